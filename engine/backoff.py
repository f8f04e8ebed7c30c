"""Pauses between attempts that fail in a row: each twice as long as the one before, to a ceiling.

A value without a clock or a count: whoever tries again counts its failures, and waits.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_DOUBLINGS = 60  # a float has room for that many, whatever the base


@dataclass(frozen=True, slots=True)
class Backoff:
    """Starts at `base_s`, doubles with each further failure, and stays at `max_s`."""

    base_s: float
    max_s: float

    def pause_s(self, failures: int) -> float:
        """How long to wait after so many failures in a row; 0 after none."""
        if failures < 1:
            return 0.0
        return min(self.max_s, self.base_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS))
