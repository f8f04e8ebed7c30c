"""Products with weights of 8 bits on a GPU."""
