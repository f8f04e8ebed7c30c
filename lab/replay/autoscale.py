"""A replay whose workers come and go: the production router and workers, and the production
autoscaler or a path that is given, all in virtual time.

Workers take `start_s` to start, drain, and cost from the order until they are gone.

Beside that, two fleets are chosen by who knows the trace: the best that stays as it is, and an
oracle's path. Both are found with the shadow queues of `cluster.scaling.shadows` in the times of
the replay's timing, without a prefix cache, and then replayed like everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from typing import Any

from msgspec import structs

from kvrelay.cluster.scaling.decisions import Decision, Line
from kvrelay.cluster.scaling.observations import (
    COUNTED,
    ManagedWorker,
    State,
    router_seen,
    snapshot_of,
)
from kvrelay.cluster.scaling.planner import (
    Moves,
    Scaler,
    chunk_target_s,
    decode_workers,
    for_prompts,
    moves_to,
    router_config,
)
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


@dataclass(slots=True)
class SimulatedWorker:
    """Starts in `start_s`, drains, and costs from its order until it is gone."""

    worker: NodeId
    role: Role
    ordered_at: float
    since: float  # it is in this state
    state: State = State.STARTING
    up_at: float | None = None
    gone_at: float | None = None

    def enter(self, now: float, state: State) -> None:
        self.state, self.since = state, now

    def observed(self) -> ManagedWorker:
        return ManagedWorker(
            self.worker, self.role, self.state, self.ordered_at, self.since, self.up_at
        )


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
    """Runs a trace on workers that come and go, owned by `replay_scaled`."""

    def __init__(self, trace: Trace, config: ReplayConfig, start_s: float) -> None:
        super().__init__(trace, config)
        self._workers.clear()
        self._start_s = start_s
        self._numbers = dict.fromkeys(Role, 0)
        self._ever: dict[NodeId, SimulatedWorker] = {}  # all that were ordered
        self.history: list[tuple[float, int, int]] = []  # (when, up, ordered but not gone)
        self.log: list[Line] = []
        self._changes: list[int] = []

    @property
    def now(self) -> float:
        return self.runtime.now

    @property
    def fleet(self) -> dict[NodeId, SimulatedWorker]:
        """Those that are not gone."""
        return {name: each for name, each in self._ever.items() if each.gone_at is None}

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        self.runtime.call_at(at_s, call)

    def gpu_s(self, now: float) -> float:
        """Sums all workers until now, each from its order until it was gone."""
        ends = ((each, each.gone_at) for each in self._ever.values())
        return sum((now if end is None else end) - each.ordered_at for each, end in ends)

    # -- the life of a worker --------------------------------------------------------------------

    def order(self, role: Role, after_s: float) -> NodeId:
        """A worker that is up then."""
        worker = f"{role}-{self._numbers[role]}"
        self._numbers[role] += 1
        self._ever[worker] = SimulatedWorker(worker, role, self.now, self.now)
        if after_s > 0:
            self._note()
            self.call_at(self.now + after_s, lambda: self._arrive(worker))
        else:
            self._arrive(worker)
        return worker

    def flip(self, worker: NodeId, role: Role) -> None:
        known = self._ever[worker]
        known.role = role
        if known.state is State.UP:
            self.runtime.post(ROUTER, RoleChanged(worker, 1, role))

    def let_go(self, worker: NodeId) -> None:
        """Without new requests until it is empty; at once where it is not up."""
        known = self._ever[worker]
        if known.state is State.UP:
            known.enter(self.now, State.DRAINING)
            self._empty(worker, float("-inf"))
        else:
            known.gone_at = self.now
        self._note()

    def _arrive(self, worker: NodeId) -> None:
        known = self._ever[worker]
        if known.gone_at is not None:
            return
        known.enter(self.now, State.UP)
        known.up_at = self.now
        number = int(worker.rpartition("-")[2])
        config = structs.replace(self._worker_config(known.role, number), node_id=worker)
        if known.role is Role.PREFILL:  # prompts are computed whole: nobody should decode beside
            config = structs.replace(config, itl_target_ms=0.0)
        self._workers.append(config)
        self._start(config, 1)
        self._note()

    def _empty(self, worker: NodeId, cleared_at: float) -> None:
        """Look whether it has anything left."""
        now = self.now
        if now - cleared_at >= AGAIN_S:  # what decodes there moves
            self.runtime.post(ROUTER, WorkerDraining(worker, 1))
            cleared_at = now
        elif self._is_empty(worker):
            epoch = self.runtime.end(worker)
            self.runtime.post(ROUTER, WorkerDown(worker, epoch, "drained"))
            self._ever[worker].gone_at = now
            self._note()
            return
        self.call_at(now + DRAIN_LOOK_S, lambda: self._empty(worker, cleared_at))

    def _is_empty(self, worker: NodeId) -> bool:
        node: Any = self.runtime.lives[worker].node
        on_way = any(
            attempt.decode.worker == worker or (attempt.prefill and attempt.awaits_prefill)
            for record in self.router.live.values()
            for attempt in record.under_way
            if worker in [each.worker for each in attempt.workers]
        )
        return not on_way and is_idle(node)

    def _note(self) -> None:
        fleet = self.fleet.values()
        num_up = sum(each.state is State.UP for each in fleet)
        self.history.append((self.now, num_up, len(fleet)))

    # -- who decides -----------------------------------------------------------------------------

    def begin_with(self, roles: Sequence[Role]) -> None:
        """These workers are up from the start."""
        for role in roles:
            self.order(role, 0.0)

    def scale_by(self, scaler: Scaler) -> None:
        """Let `scaler` decide from now on."""
        self.log.append(scaler.begin())
        self.call_at(self.now + scaler.config.tick_s, lambda: self._tick(scaler))

    def follow(self, plan: Plan) -> None:
        """Do as `plan` says from now on."""
        prefill, decode = plan(self.now)
        counted = [each for each in self._observed() if each.state in COUNTED]
        self._carry_out(moves_to(counted, prefill, decode))
        self.call_at(self.now + GROWTH_S, lambda: self.follow(plan))

    def _observed(self) -> list[ManagedWorker]:
        return [each.observed() for each in self.fleet.values()]

    def _carry_out(self, decided: Moves | Decision) -> None:
        for worker, role in decided.flips:
            self.flip(worker, role)
        for worker in decided.drains:
            self.let_go(worker)
        for role in decided.starts:
            self.order(role, self._start_s)
        self._changes.append(len(decided.starts) - len(decided.drains))

    def scaled_result(self, name: str, result: ReplayResult) -> ScaledResult:
        return ScaledResult(
            name=name,
            result=result,
            gpu_hours=self.gpu_s(result.virtual_s) / 3600.0,
            num_starts=sum(each.ordered_at > 0 for each in self._ever.values()),
            reversals=reversals_of(self._changes),
            history=[*self.history, (result.virtual_s, *self.history[-1][1:])],
            log=self.log,
        )

    def _tick(self, scaler: Scaler) -> None:
        now, router = self.now, self.router
        up = {name for name, each in self.fleet.items() if each.up_at is not None}
        snapshot = snapshot_of(
            at_s=now,
            wall_s=now,
            routers=[router_seen(now, ROUTER, router.traffic, router.live.values())],
            stats=[each for each in router.worker_stats if each[0].worker in up],
            workers=self._observed(),
        )
        line = scaler.tick(snapshot)
        self.log.append(line)
        assert line.decision is not None
        self._carry_out(line.decision)
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
        scaler = Scaler(by)
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
