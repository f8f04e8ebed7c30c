"""Measures whole servers under load, beside peers."""
