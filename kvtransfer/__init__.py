"""Moving KV blocks between workers, correctly: read, then confirm; check, then use."""
