"""The engine: what a worker is made of, independent of its role.

Everything here except `engine.model` is pure: no clock, no socket, no thread, no torch.
"""
