"""Runtimes: what delivers messages to nodes and performs their effects."""
