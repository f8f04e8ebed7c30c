"""Virtual time of the simulator and of the replay: one clock, one heap of events.

An event is due at a time, for one life of a node or for none. Events due at the same time come in
the order in which they were scheduled. When a life ends, its events are not delivered any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Generic, Protocol, TypeVar


class Mortal(Protocol):
    alive: bool  # once False it stays so


L = TypeVar("L", bound=Mortal)
E = TypeVar("E")


@dataclass(slots=True)
class VirtualTime(Generic[L, E]):
    """Owns the clock and the heap. Invariant: the clock never goes back."""

    now: float = field(default=0.0, init=False)
    num_events: int = field(default=0, init=False)  # that were due, without those of ended lives
    _heap: list[tuple[float, int, L | None, E]] = field(default_factory=list, init=False)
    _sequence: int = field(default=0, init=False)

    def schedule(self, at_s: float, life: L | None, event: E) -> None:
        self._sequence += 1
        heappush(self._heap, (at_s, self._sequence, life, event))

    def advance(self, until_s: float = inf) -> tuple[L | None, E] | None:
        """The next event, with the clock at its time. None: there is none up to `until_s`."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            at_s, _, life, event = heappop(heap)
            if life is None or life.alive:
                assert at_s >= self.now
                self.now = at_s
                self.num_events += 1
                return life, event
        return None
