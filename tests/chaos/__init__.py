"""Faults of every kind against a running system that is known by HTTP and by its processes alone.

`python -m tests.chaos --minutes 20`: seeded streams run all the time, each checked against what it
says undisturbed, while processes are killed, stopped, slowed down and cut off.
"""
