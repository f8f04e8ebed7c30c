"""How often one that waits for memory may be passed by those behind it that fit."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

MAX_PASSED = 32  # so many may go before one that does not fit; then memory is held for it
MAX_PASSED_SHARE = 0.1  # or so much of its timeout, since the first of them did


@dataclass(slots=True)
class Passes:
    """How often one that waits was passed, at a router or at a worker."""

    count: int = 0
    since: float = inf  # the first one

    def add(self, now: float) -> None:
        self.count += 1
        self.since = min(self.since, now)

    def are_over(self, now: float, timeout_s: float) -> bool:
        """Whether no more may pass it."""
        return self.count >= MAX_PASSED or now - self.since >= timeout_s * MAX_PASSED_SHARE
