"""Label values that are known before anything was counted.

A counter that appears with its first event hides that event: `increase()` needs a value before it.
So what alerts look at begins at 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.engine.request import FinishReason, Refusal
from kvrelay.router.messages import SessionState
from kvrelay.router.record import Cause

# Of `router.status.Totals` that are by a label.
TOTALS: dict[str, tuple[str, ...]] = {
    "requests": (*FinishReason, *Refusal),
    "retries": tuple(Cause),
    "kv_lost": ("handoff", "fetch"),
    "cached_tokens_by_source": ("device", "host", "disk", "peer"),
}
# Of a worker's counters: those that mean that something went wrong.
WORKER_EVENTS = (
    "preemptions",
    "evictions",
    "handoffs_done",
    "handoffs_failed",
    "handoff_failed_checksum_mismatch",
    "handoff_failed_read_failed",
    "handoff_failed_read_overdue",
    "handoff_failed_refused",
    "leases_expired",
    "sequences_left_out",
    "tier_lost",
    "disk_store_failed",
    "host_store_failed",
    "kv_reads_left_behind",
)
# Of frames between processes.
WIRE_EVENTS = (
    "sent",
    "received",
    "connected",
    "reconnected",
    "broken",
    "lost",
    "resent",
    "connect_failed",
    "queue_full",
    "undeliverable",
    "unencodable",
)
SESSION_STATES = tuple(SessionState)
SPAN_OUTCOMES = ("sent", "failed", "dropped")


def from_zero(labels: tuple[str, ...], counts: Mapping[str, float]) -> dict[str, float]:
    """`counts`, and 0 for each of `labels` that has none."""
    return dict.fromkeys(map(str, labels), 0.0) | dict(counts)
