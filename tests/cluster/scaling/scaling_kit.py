"""A fleet on paper: snapshots as routers and workers would give them, and a provider that does
what it is told at once or after a while."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvrelay.cluster.scaling.decisions import Decision, Line
from kvrelay.cluster.scaling.observations import Snapshot
from kvrelay.cluster.scaling.planner import Scaler
from kvrelay.cluster.scaling.provider import ManagedWorker, ManagedWorkers, State
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


@dataclass
class Paper:
    """A `WorkerProvider`, and the clock. Workers start in `start_s`, and drain in a second."""

    config: ScalingConfig
    start_s: float = 20.0
    now: float = 0.0
    orders: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.book = ManagedWorkers(self.config.pending_timeout_s)
        self.number = 0
        self.prompts: Counter[int] = Counter()
        self.outputs: Counter[int] = Counter()
        self.live = 0
        self.stats_age_s = 0.0
        self.routers_age_s = 0.0
        self.measures = True
        self.silent_roles: set[Role] = set()  # workers of these roles have not computed anything
        self.log: list[Line] = []
        self.scaler = Scaler(self.config, self)
        self.log.append(self.scaler.begin())

    def with_fleet(self, prefill: int, decode: int) -> Paper:
        for role, number in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for _ in range(number):
                self.number += 1
                self.book.add(-100.0, f"w{self.number}", role, State.UP)
        return self

    def start(self, role: Role) -> NodeId:
        self.number += 1
        self.orders.append(("start", role))
        self.book.add(self.now, f"w{self.number}", role)
        return f"w{self.number}"

    def drain(self, worker: NodeId) -> None:
        self.orders.append(("drain", worker))
        known = self.book.get(worker)
        if known is not None:
            state = State.DRAINING if known.state is State.UP else State.GONE
            self.book.move(self.now, worker, state)

    def flip(self, worker: NodeId, role: Role) -> None:
        self.orders.append(("flip", worker, role))  # type: ignore[arg-type]
        self.book.set_role(worker, role)

    def workers(self) -> Iterable[ManagedWorker]:
        return list(self.book)

    @property
    def up(self) -> int:
        return sum(each.state is State.UP for each in self.book)

    @property
    def size(self) -> int:
        states = (State.PENDING, State.STARTING, State.UP)
        return sum(each.state in states for each in self.book)

    def tick(self, *prompts: int, output: int = 8) -> Decision:
        """A second passes in which these prompts come, and are served."""
        self.now += self.config.tick_s
        for each in list(self.book):
            if each.state is State.PENDING:
                self.book.move(self.now, each.worker, State.STARTING)
            elif each.state is State.STARTING and self.now - each.ordered_at >= self.start_s:
                self.book.move(self.now, each.worker, State.UP)
            elif each.state is State.DRAINING:
                self.book.move(self.now, each.worker, State.GONE, "drained")
        self.prompts.update(map(bin_of, prompts))
        self.outputs.update(bin_of(output) for _ in prompts)
        self.live = len(prompts)
        line = self.scaler.tick(self.snapshot())
        self.log.append(line)
        assert line.decision is not None
        return line.decision

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
            for each in self.book
            if each.state in (State.UP, State.DRAINING)
        ]
        return Snapshot(self.now, self.now, (router,), tuple(seen), tuple(self.workers()))
