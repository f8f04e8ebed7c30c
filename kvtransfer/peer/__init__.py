"""KV that another worker holds: both sides of reading it, then confirming."""
