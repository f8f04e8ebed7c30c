"""The state of the cluster in parts, each with the tick in which it changed last.

A listener says which tick it has seen and gets the parts that changed since, so one that reads
slowly misses what was between, and nothing waits for it in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvrelay.cluster.api.console.history import POINT_FIELDS, History

GONE_TICKS = 60  # for so long it is known that a worker is gone; who has seen less gets all

WORKER_FIELDS = (
    "worker",
    "role",
    "state",
    "epoch",
    "num_blocks",
    "num_used_blocks",
    "num_cached_blocks",
    "num_host_blocks",
    "num_disk_blocks",
    "num_running",
    "num_waiting",
    "num_handoffs",
    "num_inflight",
    "num_decoding",
    "pending_prefill_tokens",
    "cache_hit_rate",
    "prefill_tokens_per_s",
    "decode_step_s",
    "read_bytes_per_s",
    "host_read_bytes_per_s",
    "disk_read_bytes_per_s",
)
_LOAD = ("num_live", "num_queued", "cache_hit_rate", "prediction_error")
_TOTALS = (
    "requests",
    "retries",
    "migrations",
    "attempts",
    "handoffs",
    "fetches",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "cached_tokens_by_source",
)

_encode = msgspec.json.encode


class Feed:
    """Owned by the console. Invariant: `_parts` and `_workers` are what the last tick saw."""

    def __init__(
        self, status: Callable[[], dict[str, Any]], history: History, server: dict[str, Any]
    ) -> None:
        """`status`: as in `ApiContext`. `server`: what never changes, as JSON's types."""
        self._status = status
        self._history = history
        self._server = server
        self._parts: dict[str, tuple[int, bytes]] = {}  # the tick of the last change, and JSON
        self._workers: dict[str, tuple[int, bytes]] = {}
        self._gone: dict[str, int] = {}  # worker -> tick
        self.tick_number = 0

    def tick(self) -> None:
        """See what there is now. Raises what `status` raises, and then has changed nothing."""
        status = self._status()
        self.tick_number += 1
        parts = {
            "server": self._server,
            "model": status.get("model"),
            "router": {key: status.get(key) for key in ("router", "policy")},
            "load": {key: _plain(status.get(key)) for key in _LOAD},
            "totals": {k: v for k, v in status.get("totals", {}).items() if k in _TOTALS},
            "routers": status.get("routers") or [],
            "store": status.get("state") or None,
            "scaling": status.get("scaling"),
        }
        for name, value in parts.items():
            self._put(self._parts, name, value)
        self._put_workers(status.get("workers", ()))

    def changes(self, tick: int, num_points: int) -> bytes:
        """JSON of what is new for one who has seen `tick` (0: nothing yet) and so many points."""
        is_full = not tick or self.tick_number - tick > GONE_TICKS
        after = 0 if is_full else tick
        fields = [
            b'"tick":%d' % self.tick_number,
            b'"full":%s' % (b"true" if is_full else b"false"),
            b'"parts":' + _joined(self._parts, after),
            b'"workers":' + _joined(self._workers, after),
        ]
        gone = [name for name, at in self._gone.items() if at > after]
        if gone and not is_full:
            fields.append(b'"gone":' + _encode(gone))
        if is_full:
            fields.append(b'"worker_fields":' + _encode(WORKER_FIELDS))
            fields.append(b'"point_fields":' + _encode(POINT_FIELDS))
        fields.append(b'"points":' + _encode(self._history.since(num_points)))
        return b"{" + b",".join(fields) + b"}"

    def _put(self, where: dict[str, tuple[int, bytes]], name: str, value: Any) -> None:
        data = _encode(value)
        known = where.get(name)
        if known is None or known[1] != data:
            where[name] = (self.tick_number, data)

    def _put_workers(self, workers: Iterable[dict[str, Any]]) -> None:
        found = set()
        for worker in workers:
            name = str(worker["worker"])
            found.add(name)
            self._put(self._workers, name, [_plain(worker.get(key)) for key in WORKER_FIELDS])
        for name in self._workers.keys() - found:
            del self._workers[name]
            self._gone[name] = self.tick_number
        oldest = self.tick_number - GONE_TICKS
        self._gone = {
            name: at for name, at in self._gone.items() if at >= oldest and name not in found
        }


def _plain(value: Any) -> Any:
    """Rates jitter: what is too small to see is no change."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _joined(parts: dict[str, tuple[int, bytes]], after: int) -> bytes:
    """A JSON object of the parts that changed after this tick."""
    changed = (_encode(name) + b":" + data for name, (at, data) in parts.items() if at > after)
    return b"{" + b",".join(changed) + b"}"
