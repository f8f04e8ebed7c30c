"""Small things that clients ask of a server beside generating."""
