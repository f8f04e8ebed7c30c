"""A replay whose workers come and go: the production router and workers, and the production
autoscaler or a path that is given, all in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from kvrelay.cluster.scaling.connector import COUNTED, State
from kvrelay.cluster.scaling.decisions import Line
from kvrelay.cluster.scaling.moves import moves_to
from kvrelay.cluster.scaling.scaler import Scaler
from kvrelay.cluster.scaling.snapshots import router_seen, snapshot_of
from kvrelay.cluster.scaling.targets import chunk_target_s, router_config
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.lab.replay.autoscale.fleet import SimulatedFleet, is_idle
from kvrelay.lab.replay.config import ReplayConfig
from kvrelay.lab.replay.replay import ROUTER, OnProgress, Replay
from kvrelay.lab.replay.results import ReplayResult
from kvrelay.lab.replay.trace import Trace
from kvrelay.router.messages import RoleChanged, WorkerDown, WorkerDraining
from kvrelay.router.scaling_config import ScalingConfig

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
        config = replace(self._worker_config(role, number), node_id=worker)
        if role is Role.PREFILL:  # its prompts are computed whole: nobody should decode beside them
            config = replace(config, itl_target_s=0.0)
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
