"""What a router's process counts of batches."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvrelay.cluster.api.batches.store import Backlog

OUTCOMES = ("completed", "failed")
_GAUGES = {
    "batches": "Batches that have not ended, of all routers that share them.",
    "batches_due": "Those whose window is near, for the rows that wait.",
    "batch_rows_waiting": "Requests of batches that have no answer yet.",
    "batch_oldest_seconds": "Age of the oldest batch that has not ended.",
    "batch_window_seconds": "Until the first of their windows ends.",
}


class BatchMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.rows = Counter(
            "kvrelay_batch_rows",
            "Requests of batches that have ended, by outcome.",
            ["outcome"],
            registry=registry,
        )
        for outcome in OUTCOMES:
            self.rows.labels(outcome)
        self._gauges = [
            Gauge(f"kvrelay_{name}", text, registry=registry) for name, text in _GAUGES.items()
        ]

    def show(self, now: float, backlog: Backlog, num_due: int) -> None:
        oldest_at = min(backlog.created_at, default=now)
        ends_at = min(backlog.ends_at, default=float("inf"))
        found = len(backlog.ends_at), num_due, backlog.num_rows, now - oldest_at, ends_at - now
        for gauge, value in zip(self._gauges, found, strict=True):
            gauge.set(value)
