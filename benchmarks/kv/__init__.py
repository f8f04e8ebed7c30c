"""Measures KV: transfers between pools, tiers below them, sessions that resume."""
