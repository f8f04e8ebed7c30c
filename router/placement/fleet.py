"""The living workers of one role, the least busy first, so that a choice considers only some.

An endpoint's rank is that of its last `update`; the dispatcher updates it whenever what it knows
of the worker changes. A decode worker is as busy as its KV pool is full, and then as it has
sequences; a prefill worker as its queue is long, in time. The order is kept in
`router/native/fleet.c`, where choices read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import finalize
from zlib import crc32

from kvrelay.engine.node import NodeId
from kvrelay.router.native.bindings import address_of, bindings, ffi
from kvrelay.router.placement.cost import CostModel
from kvrelay.router.placement.endpoint import Endpoint


class Fleet:
    """Owned by a dispatcher. Invariant: the native order has the `_endpoints`, each once. Equally
    busy ones come in the order in which they were last chosen; among those never chosen the order
    depends on `salt`, which differs between routers, so that they do not all choose the same."""

    def __init__(self, salt: str, cost: CostModel) -> None:
        self._salt = salt
        self._cost = cost
        self._lib = bindings()
        self.address: int = self._lib.kvr_fleet_new()
        finalize(self, self._lib.kvr_fleet_free, self.address)
        self._endpoints: dict[NodeId, Endpoint] = {}
        self._by_struct: dict[Any, Endpoint] = {}

    def __len__(self) -> int:
        return len(self._endpoints)

    def __iter__(self) -> Iterator[Endpoint]:
        """By name."""
        return (self._endpoints[worker] for worker in sorted(self._endpoints))

    def get(self, worker: NodeId) -> Endpoint | None:
        return self._endpoints.get(worker)

    def add(self, now: float, endpoint: Endpoint) -> None:
        self._endpoints[endpoint.worker] = endpoint
        self._by_struct[endpoint.struct] = endpoint
        endpoint.struct.is_ranked = False
        endpoint.struct.tie_break = crc32(f"{self._salt} {endpoint.worker}".encode())
        self.update(now, endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        if self._endpoints.get(endpoint.worker) is endpoint:
            self._lib.kvr_fleet_drop(self.address, endpoint.address)
            del self._endpoints[endpoint.worker]
            del self._by_struct[endpoint.struct]

    def update(self, now: float, endpoint: Endpoint) -> None:
        if self._endpoints.get(endpoint.worker) is endpoint:
            self._lib.kvr_fleet_update(self.address, endpoint.address, self._cost.address, now)

    def has_room(self, now: float, max_inflight: int) -> bool:
        """Whether any of them could take one more request."""
        has: bool = self._lib.kvr_fleet_has_room(self.address, now, max_inflight)
        return has

    def least_busy(self) -> list[Endpoint]:
        found = ffi.new("worker *[]", len(self))
        self._lib.kvr_fleet_list(self.address, address_of(found))
        return [self._by_struct[worker] for worker in found]
