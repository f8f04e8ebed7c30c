"""Measures routers: decisions, several of them, restarts."""
