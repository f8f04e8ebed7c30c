"""Threads that others of the machine go before."""

from __future__ import annotations

import os

NICENESS = 5  # on shared cores, a decode step that waits for one delays every stream
MOST_NICENESS = 19  # that there is


def lower_priority() -> None:
    """The calling thread, and those that it will start, let others of the machine go first."""
    own = 0  # to Linux the thread, not its process
    niceness = os.getpriority(os.PRIO_PROCESS, own) + NICENESS
    os.setpriority(os.PRIO_PROCESS, own, min(niceness, MOST_NICENESS))
