"""How many workers there are, and in which roles: decided from what was measured, in GPU-seconds.

Pure: no clock, no I/O. Time is passed in, and whoever starts workers is a `WorkerProvider`.
"""
