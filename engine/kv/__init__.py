"""KV blocks in a worker: their shape, pool, hashes and block tables, tiers and windows."""
