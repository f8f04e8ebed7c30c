"""The controller's workers as the autoscaler sees them: a `WorkerProvider`.

What it orders is noted, and the controller does it when the tick is over. A worker that dies after
it was up counts as up, since the controller starts it again; one that fails again and again, or
finds no machine for long, goes with its reason, and the autoscaler decides anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvrelay.cluster.control.wanted import Worker, WorkerState
from kvrelay.cluster.scaling.provider import ManagedWorker, ManagedWorkers, State
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role

MAX_FAILURES = 3  # in a row; then a worker is given up


@dataclass(frozen=True, slots=True)
class Add:
    worker: NodeId
    role: Role


@dataclass(frozen=True, slots=True)
class Drain:
    worker: NodeId


@dataclass(frozen=True, slots=True)
class Flip:
    worker: NodeId
    role: Role


@dataclass(frozen=True, slots=True)
class Remove:
    worker: NodeId
    why: str


Order = Add | Drain | Flip | Remove


class ControlledFleet:
    """WorkerProvider. `look` brings it up to date before it is asked or told anything."""

    def __init__(self, pending_timeout_s: float, num_named: int) -> None:
        """`num_named`: names with lower numbers may have been used."""
        self.num_named = num_named
        self._pending_timeout_s = pending_timeout_s
        self._book = ManagedWorkers(pending_timeout_s)
        self._now = 0.0
        self._homeless: dict[NodeId, float] = {}  # was placed, and no machine has room: since when
        self._orders: list[Order] = []

    def start(self, role: Role) -> NodeId:
        worker = f"{role}-{self.num_named}"
        self.num_named += 1
        self._book.add(self._now, worker, role)
        self._book.explain(worker, "it was only just ordered")
        self._orders.append(Add(worker, role))
        return worker

    def drain(self, worker: NodeId) -> None:
        known = self._book.get(worker)
        if known is None or known.state in (State.DRAINING, State.GONE):
            return
        if self._book.move(self._now, worker, State.DRAINING):
            self._orders.append(Drain(worker))
        else:
            self._go(worker, "not needed any more")

    def flip(self, worker: NodeId, role: Role) -> None:
        if self._book.set_role(worker, role):
            self._orders.append(Flip(worker, role))

    def workers(self) -> Iterable[ManagedWorker]:
        return list(self._book)

    def take_orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def gone(self, now: float, worker: NodeId, why: str) -> None:
        """The controller has let it go."""
        self._book.move(now, worker, State.GONE, why)
        self._homeless.pop(worker, None)

    def look(self, now: float, workers: Mapping[NodeId, Worker]) -> None:
        """What has become of them. Those that nothing comes of go."""
        self._now = now
        for worker in workers.values():
            if self._book.get(worker.node) is None:
                self._book.add(now, worker.node, worker.role)
            self._update(worker)
        for late in self._book.give_up(now):
            self._orders.append(Remove(late, "no machine had room for it"))

    def _update(self, worker: Worker) -> None:
        name, now, book = worker.node, self._now, self._book
        book.set_role(name, worker.role)
        if worker.state is WorkerState.UP:
            book.move(worker.up_at, name, State.UP)
            if worker.is_draining and not worker.comes_back:
                book.move(now, name, State.DRAINING)
        elif worker.epoch:  # it had a place
            book.move(now, name, State.STARTING)
        else:
            book.explain(name, worker.last_error or "it was only just ordered")
        known = book.get(name)
        is_placed = known is not None and known.state in (State.STARTING, State.UP)
        if worker.failures >= MAX_FAILURES and is_placed and worker.state is WorkerState.BACKOFF:
            self._go(name, f"failed {worker.failures} times: {worker.last_error}")
        elif worker.state is WorkerState.DOWN and is_placed:
            since = self._homeless.setdefault(name, now)
            if now - since >= self._pending_timeout_s:
                self._go(name, f"given up after {now - since:.0f} s: {worker.last_error}")
        else:
            self._homeless.pop(name, None)

    def _go(self, worker: NodeId, why: str) -> None:
        self.gone(self._now, worker, why)
        self._orders.append(Remove(worker, why))
