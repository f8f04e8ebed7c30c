"""When batches stop to wait for idle workers: their windows are near.

Until then rows have the lowest class of service, begin while nobody else waits, and are no reason
to start a worker. A batch that is due is work like others' whose clients can wait.
"""

from __future__ import annotations

from math import exp

NEAR_S = 7200.0
MEAN_S = 600.0  # time constant of the rate
MARGIN = 2.0


class Pace:
    """How long rows take, by how many were answered while rows ran."""

    def __init__(self) -> None:
        self._num_rows = self._seconds = 0.0

    def add(self, num_rows: int, seconds: float) -> None:
        """Rows have run for so long."""
        fading = exp(-seconds / MEAN_S)
        self._num_rows = self._num_rows * fading + num_rows
        self._seconds = self._seconds * fading + seconds

    def needed_s(self, num_rows: int) -> float:
        """For so many more; 0: it is not known."""
        return num_rows * self._seconds / self._num_rows if self._num_rows else 0.0


def is_due(left_s: float, needed_s: float) -> bool:
    """left_s: of the window. needed_s: for all rows that wait."""
    return left_s <= max(NEAR_S, MARGIN * needed_s)
