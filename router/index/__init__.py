"""Which worker holds which block: the prefix index, and what routers tell each other of it."""
