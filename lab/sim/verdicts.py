"""Whether an estimate refuses what an idle worker would have served."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.engine.node import NodeId
from kvrelay.lab.sim.runtime import SimNode, SimRuntime
from kvrelay.router.router import Router
from kvrelay.worker.node import Worker

IDLE_S = 0.2  # without a request, as its routers know


class IdleWorkers:
    """Knows since when each worker has had nothing to do. While there is one that may have it, no
    request is refused for the time that it would take: that worker would have begun it."""

    def __init__(
        self,
        runtime: SimRuntime,
        routers: Sequence[NodeId],
        may_decode: Callable[[NodeId], bool],
    ) -> None:
        """`may_decode`: whether the policy ever chooses the worker for an output."""
        self._runtime, self._routers, self._may_decode = runtime, routers, may_decode
        self._busy_at: dict[tuple[NodeId, int], float] = {}

    def __call__(self, runtime: SimRuntime, life: SimNode) -> None:
        node = life.node
        if isinstance(node, Worker):
            key = node.node_id, node.config.epoch
            if node.core.seqs or key not in self._busy_at:
                self._busy_at[key] = runtime.now

    def find(self) -> NodeId | None:
        """A worker that is idle, and that all routers may send requests to."""
        runtime = self._runtime
        for (worker, epoch), busy_at in self._busy_at.items():
            life = runtime.life(worker)
            node = None if life is None else life.node
            if not isinstance(node, Worker) or node.config.epoch != epoch or node.core.seqs:
                continue
            is_free = runtime.now - busy_at >= IDLE_S and self._may_decode(worker)
            if is_free and all(self._is_free_at(router, worker, epoch) for router in self._routers):
                return worker
        return None

    def _is_free_at(self, router: NodeId, worker: NodeId, epoch: int) -> bool:
        life = self._runtime.life(router)
        node = None if life is None else life.node
        if not isinstance(node, Router):
            return False
        endpoint = node._dispatcher.endpoint(worker, epoch)
        if endpoint is None or endpoint.bookings:
            return False
        return endpoint.excluded_until <= self._runtime.now - IDLE_S
