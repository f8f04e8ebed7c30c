"""A worker whatever its role: its node, its exchange with other workers, and its process."""
