"""A replay whose workers come and go: the production router and workers, and the production
autoscaler or a path that is given, all in virtual time.

The simulator's provider: workers take `start_s` to start, drain, and cost from the order until they
are gone.

Beside that, two fleets are chosen by who knows the trace: the best that stays as it is, and an
oracle's path. Both are found with the shadow queues of `cluster.scaling.shadows` in the times of
the replay's timing, without a prefix cache, and then replayed like everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from typing import Any, Protocol

from msgspec import structs

from kvrelay.cluster.scaling.decisions import Line
from kvrelay.cluster.scaling.observations import router_seen, snapshot_of
from kvrelay.cluster.scaling.planner import (
    Scaler,
    chunk_target_s,
    decode_workers,
    for_prompts,
    moves_to,
    router_config,
)
from kvrelay.cluster.scaling.provider import COUNTED, ManagedWorker, ManagedWorkers, State
from kvrelay.cluster.scaling.shadows import Shadow
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.lab.replay.config import ReplayConfig
from kvrelay.lab.replay.replay import ROUTER, OnProgress, Replay, ReplayResult
from kvrelay.lab.replay.trace import Trace
from kvrelay.lab.timing.timing import Timing
from kvrelay.router.messages import RoleChanged, WorkerDown, WorkerDraining
from kvrelay.router.scaling_config import ScalingConfig

DRAIN_LOOK_S = 0.5  # between two looks at a worker that drains
AGAIN_S = 2.0  # what found no room elsewhere is moved again


class WorkerHost(Protocol):
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
    """A `WorkerProvider`. `places`: workers that there is room for at once, ordered ones included;
    those beyond it are pending."""

    def __init__(
        self,
        cluster: WorkerHost,
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
        self._cluster.call_at(now + DRAIN_LOOK_S, lambda: self._empty(worker, cleared_at))

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
            routers=[router_seen(now, ROUTER, router.traffic, router.live.values())],
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


LOOK_S = 10.0  # what the oracle decides about at once
KV_FILL = 0.85
DECODE_SPAN = 6  # looks over which streams that a look begins are spread, before and after


@dataclass(frozen=True, slots=True)
class Look:
    """Ten seconds of the trace."""

    requests: int  # that some fleet could serve on time
    missed: tuple[float, ...]  # share of those, by fleets of 1, 2, ... workers for prompts
    decode: float  # GPU-seconds per second


@dataclass(frozen=True, slots=True)
class Foresight:
    """What is known of a trace. `most`: workers."""

    looks: tuple[Look, ...]
    num_requests: int  # all
    most: int

    def missed(self, number: int, workers: int) -> float:
        """Requests of look `number` that so many workers of both roles would not serve on time."""
        look = self.looks[number]
        prompts = for_prompts(workers, look.decode)
        if prompts <= 0:
            return float(look.requests)
        low = int(prompts)
        by_size = (float(look.requests), *look.missed)
        high = min(low + 1, len(by_size) - 1)
        part = prompts - low
        return by_size[min(low, high)] * (1 - part) + by_size[high] * part

    def on_time(self, path: Sequence[int]) -> float:
        """Share of all requests, if `path[i]` workers serve look i."""
        missed = sum(self.missed(i, workers) for i, workers in enumerate(path))
        servable = sum(look.requests for look in self.looks)
        return (servable - missed) / max(1, self.num_requests)

    def decode_workers(self, number: int, workers: int) -> int:
        return decode_workers(workers, self.looks[number].decode)

    def static(self, workers: int) -> tuple[int, int]:
        """Prefill and decode workers of a fleet that stays: decoding at its mean, with a margin."""
        mean = sum(look.decode for look in self.looks) / max(1, len(self.looks))
        decode = decode_workers(workers, mean)
        return workers - decode, decode

    def least_static(self, wanted: float) -> int:
        """The smallest fleet that has this share on time; the largest, if none has."""
        for workers in range(2, self.most + 1):
            if self.on_time([workers] * len(self.looks)) >= wanted:
                return workers
        return self.most

    def path(self, wanted: float, start_s: float, first: int) -> list[int]:
        """The cheapest numbers of workers, look by look, with this share on time (or as near as
        there is). A worker costs from its order on, `start_s` before it serves."""
        low, high = 0.0, 1e4
        best = self._cheapest(high, start_s, first)
        for _ in range(30):
            price = (low * high) ** 0.5 if low else high / 10
            found = self._cheapest(price, start_s, first)
            if self.on_time(found) >= wanted:
                best, high = found, price
            else:
                low = price
            if low and high / low < 1.05:
                break
        return best

    def _cheapest(self, price: float, start_s: float, first: int) -> list[int]:
        """Dynamic programming over the looks; `price`: GPU-seconds that a missed request costs."""
        sizes = range(1, self.most + 1)
        cost = {size: 0.0 if size == first else float("inf") for size in sizes}
        came_from: list[dict[int, int]] = []
        for number in range(len(self.looks)):
            new, via = {}, {}
            for size in sizes:
                before = min(sizes, key=lambda b: cost[b] + max(0, size - b) * start_s)
                started_s = max(0, size - before) * start_s
                if number * LOOK_S < start_s and size > first:
                    started_s = float("inf")  # it could not have been ordered in time
                here = size * LOOK_S + price * self.missed(number, size)
                new[size] = cost[before] + started_s + here
                via[size] = before
            cost = new
            came_from.append(via)
        size = min(sizes, key=lambda each: cost[each])
        path = []
        for via in reversed(came_from):
            path.append(size)
            size = via[size]
        return path[::-1]


def foresee(trace: Trace, config: ReplayConfig, scaling: ScalingConfig) -> Foresight:
    """Run the trace through shadow queues."""
    timing, most = config.timing, scaling.max_workers
    shadows = [Shadow(size, scaling.ttft_target_s) for size in range(1, most + 1)]
    seconds = _cached(lambda length: prompt_s(timing, length, config))
    num_looks = ceil((trace.duration_s / config.speedup + 1e-9) / LOOK_S) + DECODE_SPAN
    counts, missed = [0] * num_looks, [(0.0,) * most] * num_looks
    tokens = [0.0] * num_looks
    contexts = total = 0.0
    now, number = 0.0, 0
    for request in trace.requests:
        at_s = request.at_s / config.speedup
        while int(at_s / LOOK_S) > number:
            missed[number] = tuple(shadow.take_missed() for shadow in shadows)
            number += 1
        for shadow in shadows:
            shadow.serve(at_s - now)
        now = at_s
        tokens[number] += request.output_length
        contexts += request.output_length * (request.input_length + request.output_length / 2)
        total += request.output_length
        needed_s = seconds(request.input_length)
        if needed_s <= scaling.ttft_target_s:
            counts[number] += 1
            for shadow in shadows:
                shadow.add(needed_s, 1)
    missed[number] = tuple(shadow.take_missed() for shadow in shadows)
    context = contexts / max(1.0, total)
    per_token = token_s(config, scaling.itl_target_s, context)
    decode = [
        sum(tokens[max(0, i - DECODE_SPAN // 2) : i + DECODE_SPAN // 2]) * per_token
        / (LOOK_S * DECODE_SPAN)
        for i in range(num_looks)
    ]  # fmt: skip
    looks = [Look(*each) for each in zip(counts, missed, decode, strict=True)]
    return Foresight(tuple(looks), len(trace.requests), most)


def prompt_s(timing: Timing, length: int, config: ReplayConfig) -> float:
    """To compute a prompt alone."""
    budget, pool = config.max_num_batched_tokens, config.num_blocks * config.block_size
    seconds, start = 0.0, 0
    while start < length:
        count = min(budget, length - start)
        seconds += timing.pass_s(count, count * (start + count / 2), 1, 0, 0, pool)
        start += count
    return seconds


def token_s(config: ReplayConfig, itl_target_s: float, context: float) -> float:
    """GPU-seconds of an output token on a worker that decodes as much as it can."""
    pool = config.num_blocks * config.block_size
    most = max(1, min(config.max_num_seqs, int(KV_FILL * pool / max(1.0, context))))

    def step_s(streams: int) -> float:
        return config.timing.pass_s(0, 0.0, 0, streams, int(streams * context), pool)

    streams = next((n for n in range(most, 1, -1) if step_s(n) <= itl_target_s), 1)
    return step_s(streams) / streams


def plan_of(
    foresight: Foresight, path: Sequence[int], start_s: float
) -> Callable[..., tuple[int, int]]:
    """What there has to be, up or coming, at a time: whoever is needed `start_s` later is ordered,
    and who is needed now stays."""
    ahead = ceil(start_s / LOOK_S)

    def plan(now: float) -> tuple[int, int]:
        number = min(len(path) - 1, int(now / LOOK_S))
        last = min(len(path) - 1, number + ahead)
        workers = max(path[number : last + 1])
        wanted = max(path[number], path[last])
        # One that is needed at the end of a start is kept, if it would have to be started again.
        workers = workers if path[last] >= path[number] else wanted
        decode = foresight.decode_workers(number, workers)
        return workers - decode, decode

    return plan


def _cached(function: Callable[[int], float]) -> Callable[[int], float]:
    known: dict[int, float] = {}

    def call(length: int) -> float:
        if length not in known:
            known[length] = function(length)
        return known[length]

    return call
