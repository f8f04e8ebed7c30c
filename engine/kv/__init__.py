"""KV blocks in a worker: their pool, their hashes, the tiers and windows they belong to."""
