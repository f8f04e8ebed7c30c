"""Who of several callers goes next, who has most, and what all have, each without a look at all.

All that is asked at every request takes a time that hardly grows with their number: the order is
sorted, who has most is found in a heap, and sums are kept by size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from math import frexp
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)
SLACK = 256  # entries of a heap that may be out of date, beside as many as there are others


class TurnOrder(Generic[Who]):
    """Callers in the order of their turns: the earliest virtual start first, and of equal ones
    whose request came first."""

    def __init__(self) -> None:
        self._sorted: list[tuple[float, int, Who]] = []
        self._keys: dict[Who, tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Who]:
        return (who for _, _, who in self._sorted)

    def place(self, who: Who, wanted: tuple[float, int] | None) -> None:
        """wanted: its start, and the arrival of its first request; None: it has none."""
        key = self._keys.get(who)
        if key == wanted:
            return
        if key is not None:
            del self._sorted[bisect_left(self._sorted, key)]
            del self._keys[who]
        if wanted is not None:
            insort(self._sorted, (*wanted, who))
            self._keys[who] = wanted


class Most(Generic[Who]):
    """Which of the callers has most of something."""

    def __init__(self) -> None:
        self._keys: dict[Who, tuple[float, int]] = {}  # value, negative, and tie
        self._heap: list[tuple[float, int, Who]] = []  # with keys that some had before

    def put(self, who: Who, value: float, tie: int) -> None:
        """tie: of equal ones the lowest is found."""
        if not value:
            self._keys.pop(who, None)
            return
        self._keys[who] = -value, tie
        heappush(self._heap, (-value, tie, who))
        if len(self._heap) > 2 * len(self._keys) + SLACK:
            self._heap = [(*key, each) for each, key in self._keys.items()]
            heapify(self._heap)

    def top(self) -> Who | None:
        while self._heap:
            value, tie, who = self._heap[0]
            if self._keys.get(who) == (value, tie):
                return who
            heappop(self._heap)
        return None


class Loads:
    """What callers have waiting, by powers of two: sums over all of them are known without looking
    at each."""

    def __init__(self) -> None:
        self._sums: dict[int, list[float]] = {}  # how many callers, and what they have

    def change(self, before: float, after: float) -> None:
        """One has other work waiting than before; 0: none."""
        for units, sign in ((before, -1.0), (after, 1.0)):
            if units > 0:
                size = frexp(units)[1]
                sums = self._sums.get(size)
                if sums is None:
                    sums = self._sums[size] = [0.0, 0.0]
                sums[0] += sign
                sums[1] += sign * units
                if not sums[0]:
                    del self._sums[size]

    def up_to(self, units: float, without: float) -> float:
        """So much of each together, about. without: what one has that does not count."""
        size = frexp(without)[1] if without > 0 else None
        found = 0.0
        for each, (count, total) in self._sums.items():
            if each == size:
                count, total = count - 1, total - without
            found += max(0.0, min(total, count * units))
        return found
