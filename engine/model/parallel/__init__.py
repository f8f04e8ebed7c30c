"""Tensor parallelism: one worker's model over several processes."""
