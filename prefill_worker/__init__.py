"""The prefill worker: a node over the engine."""
