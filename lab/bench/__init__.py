"""Benchmarks: load on an HTTP endpoint, and the engine alone."""
