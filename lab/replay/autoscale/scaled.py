"""A replay whose workers come and go: the production router and workers, and the production
autoscaler or a path that is given, all in virtual time.

The simulator's connector: workers that take `start_s` to start, drain, and cost from the order
until they are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

from msgspec import structs

from kvrelay.cluster.scaling.connector import COUNTED, ManagedWorker, ManagedWorkers, State
from kvrelay.cluster.scaling.decisions import Line
from kvrelay.cluster.scaling.moves import moves_to
from kvrelay.cluster.scaling.scaler import Scaler
from kvrelay.cluster.scaling.snapshots import router_seen, snapshot_of
from kvrelay.cluster.scaling.targets import chunk_target_s, router_config
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.lab.replay.config import ReplayConfig
from kvrelay.lab.replay.replay import ROUTER, OnProgress, Replay
from kvrelay.lab.replay.results import ReplayResult
from kvrelay.lab.replay.trace import Trace
from kvrelay.router.messages import RoleChanged, WorkerDown, WorkerDraining
from kvrelay.router.scaling_config import ScalingConfig

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


GROWTH_S = 1.0  # between two looks of a path that is given

Plan = Callable[[float], tuple[int, int]]
"""Prefill and decode workers that are to be up or coming, by the time."""


@dataclass(slots=True)
class ScaledResult:
    """What a replay with a changing fleet has shown."""

    name: str  # for tables
    result: ReplayResult
    gpu_hours: float
    num_starts: int
    reversals: int  # from more to fewer workers, or back
    history: list[tuple[float, int, int]]  # (when, workers up, workers paid for)
    log: list[Line] = field(default_factory=list)

    @property
    def reversals_per_hour(self) -> float:
        return self.reversals / max(self.result.virtual_s / 3600.0, 1e-9)


def with_targets(config: ReplayConfig, scaling: ScalingConfig) -> ReplayConfig:
    """The means that cost nothing: order by the TTFT target, and prompts on decode workers in
    chunks that leave streams within the ITL target."""
    router = router_config(config.router, scaling)
    return replace(config, router=router, itl_target_s=chunk_target_s(scaling))


class ScaledReplay(Replay):
    """Owned by `replay_scaled`. Its cluster is also that of a `SimulatedFleet`."""

    def __init__(self, trace: Trace, config: ReplayConfig, start_s: float) -> None:
        super().__init__(trace, config)
        self._workers.clear()
        self.fleet = SimulatedFleet(self, start_s)
        self.log: list[Line] = []
        self._changes: list[int] = []

    # -- the cluster of the fleet ----------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.runtime.now

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        self.runtime.call_at(at_s, call)

    def bring_up(self, worker: NodeId, role: Role) -> None:
        number = int(worker.rpartition("-")[2])
        config = structs.replace(self._worker_config(role, number), node_id=worker)
        if role is Role.PREFILL:  # its prompts are computed whole: nobody should decode beside them
            config = structs.replace(config, itl_target_ms=0.0)
        self._workers.append(config)
        self._start(config, 1)

    def set_role(self, worker: NodeId, role: Role) -> None:
        self.runtime.post(ROUTER, RoleChanged(worker, 1, role))

    def clear(self, worker: NodeId) -> None:
        self.runtime.post(ROUTER, WorkerDraining(worker, 1))

    def is_empty(self, worker: NodeId) -> bool:
        node: Any = self.runtime.lives[worker].node
        on_way = any(
            attempt.decode.worker == worker or (attempt.prefill and attempt.awaits_prefill)
            for record in self.router.live.values()
            for attempt in record.under_way
            if worker in [each.worker for each in attempt.workers]
        )
        return not on_way and is_idle(node)

    def take_down(self, worker: NodeId) -> None:
        epoch = self.runtime.end(worker)
        self.runtime.post(ROUTER, WorkerDown(worker, epoch, "drained"))

    # -- who decides -----------------------------------------------------------------------------

    def begin_with(self, roles: Sequence[Role]) -> None:
        """These workers are up from the start."""
        for role in roles:
            self.fleet.adopt(role)

    def scale_by(self, scaler: Scaler) -> None:
        """Let `scaler` decide from now on."""
        self.log.append(scaler.begin())
        self.call_at(self.now + scaler.config.tick_s, lambda: self._tick(scaler))

    def follow(self, plan: Plan) -> None:
        """Do as `plan` says from now on."""
        prefill, decode = plan(self.now)
        counted = [each for each in self.fleet.workers() if each.state in COUNTED]
        moves = moves_to(counted, prefill, decode)
        for worker, role in moves.flips:
            self.fleet.flip(worker, role)
        for worker in moves.drains:
            self.fleet.drain(worker)
        for role in moves.starts:
            self.fleet.start(role)
        self._changes.append(len(moves.starts) - len(moves.drains))
        self.call_at(self.now + GROWTH_S, lambda: self.follow(plan))

    def scaled_result(self, name: str, result: ReplayResult) -> ScaledResult:
        workers = list(self.fleet.workers())
        return ScaledResult(
            name=name,
            result=result,
            gpu_hours=self.fleet.gpu_s(result.virtual_s) / 3600.0,
            num_starts=sum(each.ordered_at > 0 for each in workers),
            reversals=reversals_of(self._changes),
            history=[*self.fleet.history, (result.virtual_s, *self.fleet.history[-1][1:])],
            log=self.log,
        )

    def _tick(self, scaler: Scaler) -> None:
        now, router = self.now, self.router
        up = {w.worker for w in self.fleet.workers() if w.state in (State.UP, State.DRAINING)}
        snapshot = snapshot_of(
            at_s=now,
            wall_s=now,
            routers=[router_seen(now, ROUTER, router.traffic, len(router.live))],
            stats=[each for each in router.worker_stats if each[0].worker in up],
            workers=self.fleet.workers(),
        )
        line = scaler.tick(snapshot)
        self.log.append(line)
        assert line.decision is not None
        self._changes.append(len(line.decision.starts) - len(line.decision.drains))
        self.call_at(now + scaler.config.tick_s, lambda: self._tick(scaler))


def reversals_of(changes: Sequence[int]) -> int:
    """How often the sign of what is not 0 changes."""
    signs = [change > 0 for change in changes if change]
    return sum(a != b for a, b in pairwise(signs))


def replay_scaled(
    name: str,
    trace: Trace,
    config: ReplayConfig,
    start_s: float,
    by: Plan | ScalingConfig | None = None,
    on_progress: OnProgress | None = None,
) -> ScaledResult:
    """Run `trace`, beginning with the fleet of `config`. `by`: who decides; None: it stays."""
    run = ScaledReplay(trace, config, start_s)
    roles = [Role.PREFILL] * config.num_prefill + [Role.DECODE] * config.num_decode
    run.call_at(0.0, lambda: run.begin_with(roles))
    if isinstance(by, ScalingConfig):
        scaler = Scaler(by, run.fleet)
        run.call_at(0.0, lambda: run.scale_by(scaler))
    elif by is not None:
        plan = by
        run.call_at(0.0, lambda: run.follow(plan))
    return run.scaled_result(name, run.run(on_progress))
