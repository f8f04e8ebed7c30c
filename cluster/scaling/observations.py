"""What is measured, and what of it counts: from counters and statistics to an `Observation`.

Counters only grow, so what came since the last look is a difference, and a router that has started
again begins a new one. What a worker measures while it warms up does not count, nor what is older
than `stale_s`. Where there is nothing to measure, a rate is 0 and a mean the last that was known:
never NaN.

What prompts and tokens cost, in GPU-seconds, by what workers measure of their own passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import exp

from msgspec import Struct
from msgspec.structs import replace

from kvrelay.engine.cost import decode_features, fitted_s, prompt_features
from kvrelay.engine.node import NodeId
from kvrelay.engine.service_class import ServiceClass
from kvrelay.engine.stats import Role, WorkerInfo, WorkerStats
from kvrelay.router.record import RequestRecord
from kvrelay.router.scaling_config import ScalingConfig
from kvrelay.router.traffic import RouterSeen, Traffic, WorkerSeen, tokens_of

KV_FILL = 0.85  # share of a pool for sequences; the rest takes what grows
MAX_BATCH = 1024
FAR = 3.0  # times what a plain rate says


class Costs(Struct, frozen=True):
    """What a typical worker's passes cost. Weights are as in `engine.cost`; empty, or a rate of 0:
    not measured."""

    prompt_weights: tuple[float, ...]
    decode_weights: tuple[float, ...]
    prefill_tokens_per_s: float
    decode_step_s: float
    pool_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @staticmethod
    def typical(prompts: Iterable[Costs], tokens: Iterable[Costs]) -> Costs | None:
        """Takes prompts' costs from the middle one of those that have measured prompts, and tokens'
        likewise: a fit may be far off on a worker that has seen little. None: none has."""
        by_rate = sorted(prompts, key=lambda costs: costs.prefill_tokens_per_s)
        by_step = sorted(tokens, key=lambda costs: costs.decode_step_s)
        if not by_rate:
            return None
        of_prompts = by_rate[len(by_rate) // 2]
        if not by_step:
            return replace(of_prompts, decode_weights=(), decode_step_s=0.0)
        of_tokens = by_step[len(by_step) // 2]
        return replace(
            of_prompts,
            decode_weights=of_tokens.decode_weights,
            decode_step_s=of_tokens.decode_step_s,
        )

    def completed_by(self, newer: Costs) -> Costs:
        """`newer`, and what it does not know from here."""
        return replace(
            newer,
            prompt_weights=newer.prompt_weights or self.prompt_weights,
            decode_weights=newer.decode_weights or self.decode_weights,
            prefill_tokens_per_s=newer.prefill_tokens_per_s or self.prefill_tokens_per_s,
            decode_step_s=newer.decode_step_s or self.decode_step_s,
        )

    def prompt_s(self, num_tokens: float, cached: float = 0.0) -> float:
        """To compute a prompt whose first `cached` tokens are there."""
        start = int(cached)
        num_new = max(1, round(num_tokens) - start)
        if num_tokens <= 0:
            return 0.0
        plain_s = num_new / self.prefill_tokens_per_s if self.prefill_tokens_per_s > 0 else 0.0
        if not self.prompt_weights:
            return plain_s
        features = prompt_features(num_new, start, self.max_num_batched_tokens)
        # A fit that was made from few lengths may be far off for others.
        return min(FAR * plain_s, max(plain_s / FAR, fitted_s(self.prompt_weights, features)))

    def streams(self, itl_target_s: float, mean_context: float) -> int:
        """Sequences that one worker can decode at once within the target; at least 1."""
        by_memory = int(KV_FILL * self.pool_tokens / max(1.0, mean_context))
        most = max(1, min(by_memory, self.max_num_seqs, MAX_BATCH))
        low, high = 1, most
        while low < high:  # a step takes longer the more it decodes
            middle = (low + high + 1) // 2
            if self.step_s(middle, mean_context) <= itl_target_s:
                low = middle
            else:
                high = middle - 1
        return low

    def step_s(self, num_seqs: int, mean_context: float) -> float:
        """Seconds that a decode step over so many sequences takes."""
        if not self.decode_weights:
            return self.decode_step_s
        used = min(1.0, num_seqs * mean_context / max(1, self.pool_tokens))
        return fitted_s(self.decode_weights, decode_features(num_seqs, used))

    def token_s(self, itl_target_s: float, mean_context: float) -> float:
        """GPU-seconds of one output token on a worker that decodes as much as it can."""
        streams = self.streams(itl_target_s, mean_context)
        return self.step_s(streams, mean_context) / streams


MEAN_S = 120.0  # time constant of the hit rate and of the mean output
MAX_STARTS = 8  # the last ones, whose longest is what a start takes


class State(StrEnum):
    """How far a worker has come. Nothing keeps it: it is read off the worker's own lifecycle."""

    PENDING = "pending"  # without a place
    STARTING = "starting"  # for the first time, or again
    UP = "up"
    DRAINING = "draining"  # to go when nothing needs it
    GONE = "gone"  # only in logs of a version before


COMING = (State.PENDING, State.STARTING)
COUNTED = (*COMING, State.UP)  # those that serve, or will


class ManagedWorker(Struct, frozen=True):
    """One worker, as whoever has it sees it now."""

    worker: NodeId
    role: Role
    state: State
    ordered_at: float  # 0: it was there before
    since: float  # when it was first seen in this state
    up_at: float | None = None
    reason: str = ""  # why it has no place, or has failed
    start_s: float | None = None  # 0: not known; None: from its order on
    failures: int = 0  # starts in a row, while it waits for the next one

    @property
    def took_s(self) -> float:
        """Seconds that its start took; 0: not known, or it is not up."""
        if self.up_at is None:
            return 0.0
        return self.up_at - self.ordered_at if self.start_s is None else self.start_s


class Snapshot(Struct, frozen=True):
    """All that a decision is made from. `at_s` is of the controller's clock, as all times here but
    `wall_s`, which counts from 1970, for schedules."""

    at_s: float
    wall_s: float
    routers: tuple[RouterSeen, ...]
    seen: tuple[WorkerSeen, ...]
    workers: tuple[ManagedWorker, ...]
    share: int | None = None  # that several models leave to this one, in workers; None: all


class Observation(Struct, frozen=True):
    """What counts of a snapshot."""

    at_s: float
    elapsed_s: float  # since the last one; 0: this is the first
    arrivals: dict[int, int]  # requests since then, by bin of prompt length
    num_ended: int  # since then
    num_late: int  # among those, and among those that were refused
    is_fresh: bool
    is_idle: bool  # no request is live, and none has come since the last look
    hit_rate: float  # share of prompt tokens that need not be computed
    mean_output: float  # tokens
    mean_context: float  # tokens, of a sequence half way through its output
    costs: Costs | None  # None: no worker has measured any yet
    start_s: float  # that a worker takes to start
    pending_prefill_s: float  # to compute the prompts that wait, on all workers
    num_decoding: int  # interactive sequences, on all workers


@dataclass(slots=True)
class Mean:
    """A mean of what is added, the last counting most; until then `value`."""

    value: float
    _total: float = 0.0
    _count: float = 0.0

    def add(self, total: float, count: float, fading: float) -> None:
        if count <= 0:
            return
        self._total = self._total * fading + total
        self._count = self._count * fading + count
        self.value = self._total / self._count


class Observer:
    """Owned by a `Scaler`. Keeps the last counts, and means that outlast a silence."""

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._last: dict[str, RouterSeen] = {}
        self._last_at: float | None = None
        self._hits = Mean(0.0)
        self._output = Mean(128.0)
        self._prompt = Mean(1024.0)
        self._costs: Costs | None = None
        self._num_decoding = 0
        self._starts: list[float] = []
        self._num_ended = self._num_late = 0  # since the last look
        self._known_up: set[NodeId] = set()

    def observe(self, snapshot: Snapshot) -> Observation:
        now = snapshot.at_s
        elapsed_s = 0.0 if self._last_at is None else max(0.0, now - self._last_at)
        self._last_at = now
        fresh = [each for each in snapshot.routers if now - each.at_s <= self._config.stale_s]
        arrivals: Counter[int] = Counter()
        self._num_ended = self._num_late = 0
        for router in fresh:
            arrivals += self._take(router, exp(-elapsed_s / MEAN_S))
        num_live = sum(router.num_live for router in snapshot.routers)
        is_fresh = len(fresh) == len(snapshot.routers) > 0
        self._measure(now, snapshot)
        self._count_starts(snapshot.workers)
        costs = self._costs
        waiting = sum(each.pending_prefill_tokens for each in self._fresh(now, snapshot.seen))
        return Observation(
            at_s=now,
            elapsed_s=elapsed_s,
            arrivals=dict(sorted(arrivals.items())),
            num_ended=self._num_ended,
            num_late=self._num_late,
            is_fresh=is_fresh,
            is_idle=is_fresh and num_live == 0 and not arrivals,
            hit_rate=min(1.0, max(0.0, self._hits.value)),
            mean_output=self._output.value,
            mean_context=self._prompt.value + self._output.value / 2,
            costs=costs,
            start_s=max(self._starts, default=self._config.start_s),
            pending_prefill_s=0.0 if costs is None else costs.prompt_s(waiting),
            num_decoding=self._num_decoding,
        )

    def _take(self, router: RouterSeen, fading: float) -> Counter[int]:
        """What has come to it since the last look; what was before counts `fading` as much."""
        last = self._last.get(router.router)
        self._last[router.router] = router
        if last is None or last.prompt_tokens > router.prompt_tokens or _fell(last, router):
            return Counter()  # its counts up to now are of another time
        came = Counter(router.prompts)
        came.subtract(last.prompts)
        ended = Counter(router.outputs)
        ended.subtract(last.outputs)
        self._num_ended += ended.total()
        self._num_late += router.num_late - last.num_late
        prompt_tokens = router.prompt_tokens - last.prompt_tokens
        self._hits.add(router.cached_tokens - last.cached_tokens, prompt_tokens, fading)
        self._output.add(_tokens(ended), ended.total(), fading)
        self._prompt.add(_tokens(came), came.total(), fading)
        return +came

    def _fresh(self, now: float, seen: Iterable[WorkerSeen]) -> list[WorkerSeen]:
        return [each for each in seen if now - each.at_s <= self._config.stale_s]

    def _measure(self, now: float, snapshot: Snapshot) -> None:
        """What warm workers have measured, prompts by those that are meant for them; with none,
        what was known before."""
        warm = {
            each.worker
            for each in snapshot.workers
            if each.state in (State.UP, State.DRAINING)
            and each.up_at is not None
            and now - each.up_at >= self._config.warmup_s
        }
        roles = {each.worker: each.role for each in snapshot.workers}
        measured = [each for each in self._fresh(now, snapshot.seen) if each.worker in warm]
        prompts = [e for e in measured if e.prefill_tokens_per_s > 0]
        tokens = [e for e in measured if e.decode_step_s > 0]
        of_prompts = [e for e in prompts if roles[e.worker] is Role.PREFILL] or prompts
        of_tokens = [e for e in tokens if roles[e.worker] is not Role.PREFILL] or tokens
        found = Costs.typical(map(_costs, of_prompts), map(_costs, of_tokens))
        if found is not None:
            self._costs = found if self._costs is None else self._costs.completed_by(found)
        streams = sum(each.num_decoding for each in self._fresh(now, snapshot.seen))
        self._num_decoding = streams

    def _count_starts(self, workers: Iterable[ManagedWorker]) -> None:
        """How long starts took, as far as is known."""
        for each in workers:
            if each.state in COUNTED and each.up_at is not None:
                if each.worker not in self._known_up and each.took_s > 0:
                    self._starts = [*self._starts, each.took_s][-MAX_STARTS:]
                self._known_up.add(each.worker)


def _fell(last: RouterSeen, now: RouterSeen) -> bool:
    return any(now.prompts.get(number, 0) < count for number, count in last.prompts.items())


def _costs(seen: WorkerSeen) -> Costs:
    return Costs(
        seen.prompt_weights,
        seen.decode_weights,
        seen.prefill_tokens_per_s,
        seen.decode_step_s,
        seen.pool_tokens,
        seen.max_num_seqs,
        seen.max_num_batched_tokens,
    )


def _tokens(lengths: Mapping[int, int]) -> float:
    return sum(count * tokens_of(number) for number, count in lengths.items())


def router_seen(
    at_s: float, router: str, traffic: Traffic, live: Iterable[RequestRecord]
) -> RouterSeen:
    classes = Counter(record.submit.service_class for record in live)
    return RouterSeen(
        router=router,
        at_s=at_s,
        prompts=dict(traffic.prompts),
        outputs=dict(traffic.outputs),
        prompt_tokens=traffic.prompt_tokens,
        cached_tokens=traffic.cached_tokens,
        num_late=traffic.num_late,
        num_live=classes.total() - classes[ServiceClass.BATCH],
    )


def worker_seen(at_s: float, info: WorkerInfo, stats: WorkerStats) -> WorkerSeen:
    """`at_s`: when the statistics came."""
    return WorkerSeen(
        worker=info.worker,
        at_s=at_s,
        prompt_weights=stats.prompt_weights,
        decode_weights=stats.decode_weights,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_step_s=stats.decode_step_s,
        pool_tokens=info.pool_tokens,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        num_decoding=stats.num_decoding - stats.num_low_decoding,
        pending_prefill_tokens=stats.pending_prefill_tokens,
    )


def snapshot_of(
    at_s: float,
    wall_s: float,
    routers: Iterable[RouterSeen],
    stats: Iterable[tuple[WorkerInfo, float, WorkerStats]],
    workers: Iterable[ManagedWorker],
) -> Snapshot:
    """`stats`: the last of each worker, and when they came."""
    seen = tuple(worker_seen(came_at, info, each) for info, came_at, each in stats)
    return Snapshot(at_s, wall_s, tuple(routers), seen, tuple(workers))
