"""A fleet on paper: snapshots as routers and workers would give them, and decisions that are
carried out at once or after a while."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from kvrelay.cluster.scaling.decisions import Decision, Inputs, Line, Reason
from kvrelay.cluster.scaling.observations import COUNTED, ManagedWorker, Snapshot, State
from kvrelay.cluster.scaling.planner import Scaler
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.router.scaling_config import ScalingConfig
from kvrelay.router.traffic import RouterSeen, WorkerSeen, bin_of

RATE = 10_000.0  # prompt tokens per second of a worker
STEP_S = 0.01


def config(**changes: Any) -> ScalingConfig:
    values: dict[str, Any] = {"start_s": 20.0, "tick_s": 1.0, "hold_s": 30.0, "max_workers": 10}
    values |= {"memory_s": 120.0, "warmup_s": 5.0, "pending_timeout_s": 60.0}
    return ScalingConfig(**(values | changes))


def decided(**moves: Any) -> Decision:
    """Says to do this, whatever for."""
    inputs = Inputs(**dict.fromkeys(Inputs.__struct_fields__, 0))
    return Decision(0.0, Reason.ENOUGH, "", 0, 0, inputs, **moves)


@dataclass
class Paper:
    """Has the fleet, and the clock. Workers start in `start_s`, and drain in a second."""

    config: ScalingConfig
    start_s: float = 20.0
    now: float = 0.0

    def __post_init__(self) -> None:
        self.workers: dict[NodeId, ManagedWorker] = {}
        self.number = 0
        self.prompts: Counter[int] = Counter()
        self.outputs: Counter[int] = Counter()
        self.live = 0
        self.stats_age_s = 0.0
        self.routers_age_s = 0.0
        self.measures = True
        self.silent_roles: set[Role] = set()  # workers of these roles have not computed anything
        self.log: list[Line] = []
        self.scaler = Scaler(self.config)
        self.log.append(self.scaler.begin())

    def with_fleet(self, prefill: int, decode: int) -> Paper:
        for role, number in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for _ in range(number):
                self.add(-100.0, role, State.UP)
        return self

    def add(self, at: float, role: Role, state: State, failures: int = 0) -> NodeId:
        self.number += 1
        name, up_at = f"w{self.number}", at if state is State.UP else None
        self.workers[name] = ManagedWorker(
            name, role, state, at, at, up_at, start_s=None, failures=failures
        )
        return name

    def move(self, worker: NodeId, state: State) -> None:
        known = self.workers[worker]
        up_at = self.now if state is State.UP else known.up_at
        self.workers[worker] = replace(known, state=state, since=self.now, up_at=up_at)

    @property
    def up(self) -> int:
        return sum(each.state is State.UP for each in self.workers.values())

    @property
    def size(self) -> int:
        return sum(each.state in COUNTED for each in self.workers.values())

    def tick(self, *prompts: int, output: int = 8) -> Decision:
        """A second passes in which these prompts come, and are served."""
        self.now += self.config.tick_s
        for each in list(self.workers.values()):
            if each.state is State.STARTING and self.now - each.ordered_at >= self.start_s:
                self.move(each.worker, State.UP)
            elif each.state is State.DRAINING:
                del self.workers[each.worker]
        self.prompts.update(map(bin_of, prompts))
        self.outputs.update(bin_of(output) for _ in prompts)
        self.live = len(prompts)
        line = self.scaler.tick(self.snapshot())
        self.log.append(line)
        assert line.decision is not None
        self.carry_out(line.decision)
        return line.decision

    def carry_out(self, decision: Decision) -> None:
        for worker, _ in decision.removals:
            del self.workers[worker]
        for worker, role in decision.flips:
            self.workers[worker] = replace(self.workers[worker], role=role)
        for worker in decision.drains:
            if self.workers[worker].state is State.UP:
                self.move(worker, State.DRAINING)
            else:
                del self.workers[worker]
        for role in decision.starts:
            self.add(self.now, role, State.STARTING)

    def run(self, seconds: float, *prompts: int, output: int = 8) -> list[Decision]:
        return [
            self.tick(*prompts, output=output) for _ in range(round(seconds / self.config.tick_s))
        ]

    def has_measured(self, worker: ManagedWorker) -> bool:
        return self.measures and worker.role not in self.silent_roles

    def snapshot(self) -> Snapshot:
        routed_at = self.now - self.routers_age_s
        router = RouterSeen(
            "router-0", routed_at, dict(self.prompts), dict(self.outputs), 0, 0, 0, self.live
        )
        seen = [
            WorkerSeen(
                worker=each.worker,
                at_s=self.now - self.stats_age_s,
                prompt_weights=(),
                decode_weights=(),
                prefill_tokens_per_s=RATE if self.has_measured(each) else 0.0,
                decode_step_s=STEP_S if self.has_measured(each) else 0.0,
                pool_tokens=200_000,
                max_num_seqs=64,
                max_num_batched_tokens=8192,
                num_decoding=0,
                pending_prefill_tokens=0,
            )
            for each in self.workers.values()
            if each.state in (State.UP, State.DRAINING)
        ]
        return Snapshot(self.now, self.now, (router,), tuple(seen), tuple(self.workers.values()))
