"""Turns nodes into a running system: configuration, processes, HTTP API, controller, commands.

It may import every package below it; only `lab`, which measures and simulates, imports it.
"""
