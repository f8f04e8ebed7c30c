"""How many workers there are, and in which roles: decided from what was measured, in GPU-seconds.

Pure: no clock, no I/O. Snapshots come in with the time, and a decision is data: whoever has the
workers carries it out.
"""
