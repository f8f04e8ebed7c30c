"""The simulator's connector: workers that take `start_s` to start, drain, and cost from the order
until they are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kvrelay.cluster.scaling.connector import ManagedWorker, ManagedWorkers, State
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role

LOOK_S = 0.5  # between two looks at a worker that drains
AGAIN_S = 2.0  # what found no room elsewhere is moved again


class Cluster(Protocol):
    """What workers are placed in."""

    @property
    def now(self) -> float: ...
    def call_at(self, at_s: float, call: Callable[[], None]) -> None: ...
    def bring_up(self, worker: NodeId, role: Role) -> None: ...
    def set_role(self, worker: NodeId, role: Role) -> None: ...
    def clear(self, worker: NodeId) -> None:
        """No new requests; what decodes there moves. May be called again."""
        ...

    def is_empty(self, worker: NodeId) -> bool: ...
    def take_down(self, worker: NodeId) -> None: ...


class SimulatedFleet:
    """A `Connector`. `places`: workers that there is room for at once, ordered ones included; those
    beyond it are pending."""

    def __init__(
        self,
        cluster: Cluster,
        start_s: float,
        places: float = float("inf"),
        pending_timeout_s: float = 60.0,
    ) -> None:
        self._cluster = cluster
        self._start_s = start_s
        self.places = places
        self._pending_timeout_s = pending_timeout_s
        self._book = ManagedWorkers(pending_timeout_s)
        self._numbers = dict.fromkeys(Role, 0)
        self._bills: dict[NodeId, tuple[float, float | None]] = {}  # ordered, gone
        self.history: list[tuple[float, int, int]] = []  # (when, up, ordered but not gone)

    def adopt(self, role: Role) -> NodeId:
        """A worker that is up from the start."""
        worker = self._name(role)
        self._book.add(self._cluster.now, worker, role, State.UP)
        self._bills[worker] = self._cluster.now, None
        self._cluster.bring_up(worker, role)
        self._note()
        return worker

    def start(self, role: Role) -> NodeId:
        worker = self._name(role)
        now = self._cluster.now
        self._book.add(now, worker, role)
        self._book.explain(worker, "all places are taken")
        self._cluster.call_at(now, lambda: self._place(worker))
        self._cluster.call_at(now + self._pending_timeout_s, self._give_up)
        return worker

    def drain(self, worker: NodeId) -> None:
        known = self._book.get(worker)
        if known is None:
            return
        if known.state is State.UP:
            self._book.move(self._cluster.now, worker, State.DRAINING)
            self._empty(worker, float("-inf"))
        elif known.state in (State.PENDING, State.STARTING):
            self._go(worker, "not needed any more")
        self._note()

    def flip(self, worker: NodeId, role: Role) -> None:
        known = self._book.get(worker)
        if self._book.set_role(worker, role) and known is not None and known.state is State.UP:
            self._cluster.set_role(worker, role)

    def workers(self) -> Iterable[ManagedWorker]:
        return list(self._book)

    def gpu_s(self, now: float) -> float:
        """Sums all workers until now, each from its place until it was gone."""
        return sum((now if end is None else end) - begin for begin, end in self._bills.values())

    def _name(self, role: Role) -> NodeId:
        worker = f"{role}-{self._numbers[role]}"
        self._numbers[role] += 1
        return worker

    def _place(self, worker: NodeId) -> None:
        taken = sum(end is None for _, end in self._bills.values())
        if taken >= self.places or not self._book.move(self._cluster.now, worker, State.STARTING):
            return
        now = self._cluster.now
        self._bills[worker] = now, None
        self._cluster.call_at(now + self._start_s, lambda: self._arrive(worker))
        self._note()

    def _arrive(self, worker: NodeId) -> None:
        if self._book.move(self._cluster.now, worker, State.UP):
            known = self._book.get(worker)
            assert known is not None
            self._cluster.bring_up(worker, known.role)
            self._note()

    def _empty(self, worker: NodeId, cleared_at: float) -> None:
        """Look whether it has anything left."""
        now = self._cluster.now
        if now - cleared_at >= AGAIN_S:
            self._cluster.clear(worker)
            cleared_at = now
        elif self._cluster.is_empty(worker):
            self._cluster.take_down(worker)
            self._go(worker, "drained")
            return
        self._cluster.call_at(now + LOOK_S, lambda: self._empty(worker, cleared_at))

    def _go(self, worker: NodeId, reason: str) -> None:
        now = self._cluster.now
        self._book.move(now, worker, State.GONE, reason)
        if worker in self._bills:
            self._bills[worker] = self._bills[worker][0], now
        for each in self._book:  # a place is free
            if each.state is State.PENDING:
                self._place(each.worker)
        self._note()

    def _give_up(self) -> None:
        self._book.give_up(self._cluster.now)

    def _note(self) -> None:
        states = [each.state for each in self._book]
        ordered = sum(state in (State.STARTING, State.UP, State.DRAINING) for state in states)
        self.history.append((self._cluster.now, states.count(State.UP), ordered))


def is_idle(node: Any) -> bool:
    """Whether a worker node has nothing left to do for anyone."""
    return not node.core.seqs and not node.check_idle()
