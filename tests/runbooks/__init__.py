"""Runbooks, carried out: `python -m tests.runbooks`."""
