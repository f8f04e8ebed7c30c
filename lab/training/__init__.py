"""A small hybrid model, trained here: `kvrelay train-hybrid`."""
