"""Who starts and ends workers, as the autoscaler sees it: one contract for all.

Life of a worker here:

    pending -> starting -> up -> draining -> gone
       |          |         |                 ^
       +----------+---------+-----------------+

`pending`: ordered, and without a place yet; given up after `pending_timeout_s`, with the reason.
`starting`: a process loads the model. `draining`: it gets no new requests, and goes when it has
none. `gone` is kept for a while, so that its reason can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role

MAX_GONE = 64


class State(StrEnum):
    PENDING = "pending"
    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"
    GONE = "gone"


NEXT: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.STARTING, State.UP, State.GONE}),
    State.STARTING: frozenset({State.UP, State.GONE}),
    State.UP: frozenset({State.DRAINING, State.GONE}),
    State.DRAINING: frozenset({State.GONE}),
    State.GONE: frozenset(),
}
COMING = (State.PENDING, State.STARTING)
COUNTED = (*COMING, State.UP)  # those that serve, or will


class ManagedWorker(Struct, frozen=True):
    """One worker that was ordered. Times are of the provider's clock."""

    worker: NodeId
    role: Role
    state: State
    ordered_at: float
    since: float  # when it came into this state
    up_at: float | None = None
    reason: str = ""  # why it is pending, or gone
    # that it took to start, where it was not ordered here; 0: not known. None: from its order on
    start_s: float | None = None


class WorkerProvider(Protocol):
    """Starts and ends workers. Calls return at once; what came of them is in `workers`."""

    def start(self, role: Role) -> NodeId:
        """Order a worker. It is `pending` at least until the next look at `workers`."""
        ...

    def drain(self, worker: NodeId) -> None:
        """Let it go when its requests have ended or moved. One that is not up yet goes at once.
        Nothing for one that is draining or gone, or was never known."""
        ...

    def flip(self, worker: NodeId, role: Role) -> None:
        """Prefer it for `role` from now on. Nothing for one that is draining or gone."""
        ...

    def workers(self) -> Iterable[ManagedWorker]:
        """All that are known, with those that went last. Ids are never used twice."""
        ...


class ManagedWorkers:
    """The book that a provider keeps. Invariant: a worker only goes along `NEXT`."""

    def __init__(self, pending_timeout_s: float) -> None:
        self._pending_timeout_s = pending_timeout_s
        self._workers: dict[NodeId, ManagedWorker] = {}

    def __iter__(self) -> Iterator[ManagedWorker]:
        return iter(list(self._workers.values()))

    def get(self, worker: NodeId) -> ManagedWorker | None:
        return self._workers.get(worker)

    def add(
        self,
        now: float,
        worker: NodeId,
        role: Role,
        state: State = State.PENDING,
        start_s: float | None = None,
    ) -> None:
        """`state`: of one that is found running, for example. `start_s`: see ManagedWorker."""
        assert worker not in self._workers, f"{worker} was there before"
        up_at = now if state is State.UP else None
        self._workers[worker] = ManagedWorker(worker, role, state, now, now, up_at, start_s=start_s)

    def came_up(self, at: float, worker: NodeId, took_s: float) -> None:
        """`took_s`: from the start of its process; 0: not known."""
        if self.move(at, worker, State.UP) and self._workers[worker].start_s is not None:
            self._workers[worker] = replace(self._workers[worker], start_s=took_s)

    def move(self, now: float, worker: NodeId, state: State, reason: str = "") -> bool:
        """To another state; False: it is not there, or cannot get there from where it is."""
        known = self._workers.get(worker)
        if known is None or state not in NEXT[known.state]:
            return False
        up_at = now if state is State.UP else known.up_at
        moved = replace(known, state=state, since=now, up_at=up_at, reason=reason)
        self._workers[worker] = moved
        gone = [each for each in self._workers.values() if each.state is State.GONE]
        for old in sorted(gone, key=lambda each: each.since)[:-MAX_GONE]:
            del self._workers[old.worker]
        return True

    def explain(self, worker: NodeId, reason: str) -> None:
        """Keep the reason why it is pending."""
        known = self._workers.get(worker)
        if known is not None and known.state is State.PENDING:
            self._workers[worker] = replace(known, reason=reason)

    def set_role(self, worker: NodeId, role: Role) -> bool:
        """False: it does not take a role any more, or has it."""
        known = self._workers.get(worker)
        if known is None or known.state not in COUNTED or known.role is role:
            return False
        self._workers[worker] = replace(known, role=role)
        return True

    def give_up(self, now: float) -> list[NodeId]:
        """Those that have been pending for too long are gone now."""
        late = [
            each
            for each in self._workers.values()
            if each.state is State.PENDING and now - each.ordered_at >= self._pending_timeout_s
        ]
        for each in late:
            why = each.reason or "no place was found for it"
            waited_s = now - each.ordered_at
            self.move(now, each.worker, State.GONE, f"given up after {waited_s:.0f} s: {why}")
        return [each.worker for each in late]
