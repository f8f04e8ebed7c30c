"""The living workers of one role, the least busy first, so that a choice need not look at all.

An endpoint's place is that of its last `update`; the dispatcher updates it whenever what it knows
of the worker changes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from zlib import crc32

from engine.node import NodeId
from router.endpoint import Endpoint

Busy = Callable[[float, Endpoint], float]
"""How busy a worker is: any number that orders them."""
_Key = tuple[float, int, int, NodeId]


class Fleet:
    """Owned by a dispatcher. Invariant: `_order` is sorted and has every endpoint once, under the
    key in `_keys`. Equally busy ones come in the order in which they were last chosen; among those
    never chosen the order is one of this router's own, so that several routers do not herd."""

    def __init__(self, salt: str, busy: Busy) -> None:
        self._salt = salt
        self._busy = busy
        self._order: list[_Key] = []
        self._keys: dict[NodeId, _Key] = {}
        self._ties: dict[NodeId, int] = {}  # this router's own order of names
        self._endpoints: dict[NodeId, Endpoint] = {}

    def __len__(self) -> int:
        return len(self._endpoints)

    def __iter__(self) -> Iterator[Endpoint]:
        """By name."""
        return (self._endpoints[worker] for worker in sorted(self._endpoints))

    def get(self, worker: NodeId) -> Endpoint | None:
        return self._endpoints.get(worker)

    def add(self, now: float, endpoint: Endpoint) -> None:
        worker = endpoint.worker
        self._endpoints[worker] = endpoint
        self._ties[worker] = crc32(f"{self._salt} {worker}".encode())
        self.update(now, endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        worker = endpoint.worker
        if self._endpoints.get(worker) is endpoint:
            del self._endpoints[worker]
            del self._ties[worker]
            self._drop(worker)

    def update(self, now: float, endpoint: Endpoint) -> None:
        worker = endpoint.worker
        if self._endpoints.get(worker) is not endpoint:
            return
        busy = round(self._busy(now, endpoint), 3)
        key = (busy, endpoint.chosen_at, self._ties[worker], worker)
        if self._keys.get(worker) != key:
            self._drop(worker)
            self._keys[worker] = key
            insort(self._order, key)

    def least_busy(self) -> Iterator[Endpoint]:
        """Not to be used across an update."""
        return (self._endpoints[key[3]] for key in self._order)

    def _drop(self, worker: NodeId) -> None:
        key = self._keys.pop(worker, None)
        if key is not None:
            del self._order[bisect_left(self._order, key)]


def decode_busy(now: float, endpoint: Endpoint) -> float:
    """Its KV, then its sequences."""
    return endpoint.used_fraction + 0.01 * endpoint.num_seqs


def prefill_busy(now: float, endpoint: Endpoint) -> float:
    """When it will have nothing to do."""
    rate = 1000.0 if endpoint.rates is None else endpoint.rates.prefill_tokens_per_s
    return endpoint.prompts.busy_until(now) + endpoint.other_prefill_tokens / rate
