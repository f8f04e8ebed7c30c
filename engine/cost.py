"""Costs in seconds that workers and routers have to see alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

RATE_WEIGHT = 0.2  # of a new measurement in the moving averages


def blocks_worth_loading(load_s: Iterable[float], compute_s: float) -> int:
    """How many blocks, from the first of a run on, to load rather than to compute.

    `load_s`: seconds that each takes to load; `compute_s`: seconds to compute any one of them. A
    block that is slow to load is worth it where quick ones follow. 0: computing is quicker.
    """
    best, best_saved, saved = 0, 0.0, 0.0
    for count, seconds in enumerate(load_s, start=1):
        saved += compute_s - seconds
        if saved > best_saved:
            best, best_saved = count, saved
    return best


@dataclass(slots=True)
class Rate:
    """Amount per unit over the recent past, large measurements counting for more; 0 until
    something was measured."""

    _amount: float = 0.0
    _units: float = 0.0

    def add(self, amount: float, units: float) -> None:
        self._amount += amount - RATE_WEIGHT * self._amount
        self._units += units - RATE_WEIGHT * self._units

    @property
    def value(self) -> float:
        return self._amount / self._units if self._units else 0.0
