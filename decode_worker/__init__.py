"""The decode worker: a node over the engine."""
