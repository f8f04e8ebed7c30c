"""The prompts that wait for computation on one worker, as a router that sent them sees it.

Workers compute the shortest first. Between one message and the next a router only knows what it
has sent and how long each should take: the queue runs down by itself, and what is reported corrects
it. The prompts are in `router/native/worker.h`, where choices read them.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_uint32, c_void_p
from itertools import count
from weakref import finalize

from router.native.bindings import library

LEAST_S = 0.002  # a prompt that should be done by now, and is not; as in native/worker.h


class WaitingMemory(ctypes.Structure):
    """`waiting` of native/worker.h."""

    _fields_ = (("at", c_double), ("prompts", c_void_p), ("count", c_uint32), ("room", c_uint32))


class PromptQueue:
    """Owned by an endpoint. Invariant: it has every booked prompt that is not known to be computed,
    with the seconds it still needs, under the number in `_tickets`."""

    __slots__ = ("__weakref__", "_lib", "_memory", "_numbers", "_tickets", "address")

    def __init__(self) -> None:
        self._lib = library()
        self._memory = WaitingMemory()
        self.address = ctypes.addressof(self._memory)
        self._tickets: dict[str, int] = {}
        self._numbers = count()
        finalize(self, self._lib.waiting_free, ctypes.byref(self._memory))

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, now: float, request_id: str, seconds: float) -> None:
        """`request_id` is not there yet."""
        ticket = self._tickets[request_id] = next(self._numbers)
        self._lib.waiting_add(self.address, now, ticket, seconds)

    def discard(self, now: float | None, request_id: str) -> None:
        """It is computed (`now`), or not wanted any more (None)."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            if now is not None:
                self._lib.waiting_run_down(self.address, now)
            self._lib.waiting_discard(self.address, ticket)

    def ahead_of(self, now: float, seconds: float) -> tuple[float, int]:
        """How long a prompt that takes `seconds` waits for shorter ones, and how many longer ones
        would wait for it."""
        num_behind = c_uint32()
        wait_s: float = self._lib.waiting_ahead_of(
            self.address, now, seconds, ctypes.byref(num_behind)
        )
        return wait_s, num_behind.value

    def busy_until(self, now: float) -> float:
        """When all of it should be computed, on the router's clock."""
        until: float = self._lib.waiting_busy_until(self.address, now)
        return until
