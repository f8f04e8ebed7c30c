"""Two pools that adapt, beside one pool and a peer."""
