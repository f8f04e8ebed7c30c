"""How many workers, and in which roles: a decision for each tick.

The number is the smallest with which the wanted share of the last traffic would have been on time
(`shadows`), beside what decoding takes in GPU-seconds, and not less than the forecast needs when a
worker that is ordered now is up. Workers that are coming count. What costs nothing goes first: the
router's order by the target (always), then roles, then workers, then machines.

More are started at once. Fewer have to be enough for `hold_s`, and the most that were needed in
that time stay. A way down also has to leave room for a way back up among the reversals of an hour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from msgspec.structs import replace

from kvrelay.cluster.scaling.decisions import Alternative, Decision, Inputs, Line, Reason
from kvrelay.cluster.scaling.observations import (
    COMING,
    COUNTED,
    ManagedWorker,
    Observation,
    Observer,
    Snapshot,
    State,
)
from kvrelay.cluster.scaling.shadows import Shadows
from kvrelay.cluster.scaling.sharing import Demand
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.router.config import RouterConfig
from kvrelay.router.scaling_config import ScalingConfig
from kvrelay.router.traffic import tokens_of

HOUR_S = 3600.0
RECENT_S = 30.0  # demand is averaged over
LONG_S = 90.0  # demand has to have lasted so long, to be expected to go on
PREFILL_FULL = 0.9  # share of a worker's time for prompts that go on coming
MAX_ON_TIME = 0.99  # share of what could be on time at all
MAX_GAP = 0.1
LEAST_ENDED = 50  # requests, before it is known what the real fleet misses
LEAST_STAY_S = 10.0  # over which arrivals count together for decoding
FLIP_HOLD_S = 30.0  # a role has to be wanted for so long
DECODE_FULL = 0.8  # share of a decode worker's time at which the target still holds
MIXED_PREFILL_SHARE = 0.5  # share of what decoding leaves of a worker, for prompts
SPARE_DECODE = 0.3  # decode workers to spare before one's role changes back
CHUNK_SHARE = 0.6  # share of the ITL target for a decode step that takes prompt tokens
WAKE_STARTS = 2  # so many, one after the other, a request waits for its first worker
STATE_ORDER = {State.PENDING: 0, State.STARTING: 1, State.UP: 2}
MAX_FAILURES = 3  # starts in a row; then a worker is given up


def chunk_target_s(scaling: ScalingConfig) -> float:
    """For a step that takes prompt tokens beside decodes."""
    return CHUNK_SHARE * scaling.itl_target_s


def router_config(config: RouterConfig, scaling: ScalingConfig) -> RouterConfig:
    """Requests in the order of the TTFT target, unless another is set; and those that come while
    there is no worker wait until one can be there."""
    wake_s = scaling.pending_timeout_s + WAKE_STARTS * scaling.start_s
    return replace(
        config,
        ttft_target_s=config.ttft_target_s or scaling.ttft_target_s,
        no_workers_wait_s=max(config.no_workers_wait_s, wake_s),
    )


@dataclass(frozen=True, slots=True)
class Need:
    """How many workers are needed, before limits."""

    size: int
    decode_demand: float  # GPU-seconds per second
    prefill_demand: float
    forecast: float
    alternatives: tuple[Alternative, ...] = ()

    def decode_workers(self, size: int, have: int) -> int:
        """How many of `size` decode: at least one, and one is left for prompts where there are
        several. None of the `have` there are now goes that would soon be missed."""
        if size <= 1:
            return size
        least = decode_workers(size, self.decode_demand)
        spare = min(have, ceil(self.decode_demand / DECODE_FULL + SPARE_DECODE))
        return min(size - 1, max(least, spare))


def decode_workers(size: int, demand: float) -> int:
    """How many of `size` decode, for so many GPU-seconds of decoding per second."""
    return size if size <= 1 else min(size - 1, max(1, ceil(demand / DECODE_FULL - 1e-9)))


def for_prompts(size: int, decode_demand: float) -> float:
    """Workers' worth of prompts that `size` workers compute: prefill workers all the time, decode
    workers in a part of what decoding leaves, in chunks."""
    decode = decode_workers(size, decode_demand)
    return size - decode + MIXED_PREFILL_SHARE * max(0.0, DECODE_FULL * decode - decode_demand)


@dataclass(frozen=True, slots=True)
class Moves:
    starts: tuple[Role, ...] = ()
    drains: tuple[NodeId, ...] = ()
    flips: tuple[tuple[NodeId, Role], ...] = ()


def moves_to(workers: Iterable[ManagedWorker], prefill: int, decode: int) -> Moves:
    """`workers`: those that serve or will, of any role (`both` counts as decode). The first to go
    are those that have come least far, then those that came last: they hold the least KV."""
    ranked = sorted(workers, key=lambda w: (STATE_ORDER[w.state], -w.ordered_at, w.worker))
    prefills = [w.worker for w in ranked if w.role is Role.PREFILL]
    decodes = [w.worker for w in ranked if w.role is not Role.PREFILL]
    surplus = max(0, len(ranked) - prefill - decode)
    # Taken from the pool that has most above what it should have.
    drains: list[NodeId] = []
    for _ in range(surplus):
        above = len(prefills) - prefill, len(decodes) - decode
        pool = prefills if above[0] >= above[1] else decodes
        drains.append(pool.pop(0))
    flips: list[tuple[NodeId, Role]] = []
    while len(prefills) > prefill and len(decodes) < decode:
        flips.append((prefills[0], Role.DECODE))
        decodes.append(prefills.pop(0))
    while len(decodes) > decode and len(prefills) < prefill:
        flips.append((decodes[0], Role.PREFILL))
        prefills.append(decodes.pop(0))
    starts = [Role.DECODE] * max(0, decode - len(decodes))
    starts += [Role.PREFILL] * max(0, prefill - len(prefills))
    return Moves(tuple(starts), tuple(drains), tuple(flips))


def removals(snapshot: Snapshot, pending_timeout_s: float) -> tuple[tuple[NodeId, str], ...]:
    """Workers of which nothing comes, each with the reason: their starts fail again and again, or
    they have been without a place for too long."""
    found = []
    for each in snapshot.workers:
        waited_s = snapshot.at_s - each.since
        if each.failures >= MAX_FAILURES:
            found.append((each.worker, f"failed {each.failures} times: {each.reason}"))
        elif each.state is State.PENDING and waited_s >= pending_timeout_s:
            why = each.reason or "no place was found for it"
            found.append((each.worker, f"given up after {waited_s:.0f} s: {why}"))
    return tuple(found)


class Scaler:
    """Decides, and leaves it to its owner to do so: a controller, or the simulator. Invariant:
    equal settings and snapshots give equal decisions."""

    def __init__(self, config: ScalingConfig) -> None:
        most = max([config.max_workers, *(config.limits_of_schedules())])
        self.config = config
        self._observer = Observer(config)
        self._shadows = Shadows(most, config.ttft_target_s, config.memory_s)
        self._begun_at: float | None = None
        self._num_coming = 0  # workers, now
        self._decode_demand = 0.0  # at the last look
        self._arrivals: deque[tuple[float, float]] = deque()  # (when, requests) of the last ticks
        self._real: deque[tuple[float, float, float]] = (
            deque()
        )  # (when, ended, missed beyond shadows)
        self._decoding: deque[tuple[float, float]] = deque()  # (when, workers full of sequences)
        self._peaks: deque[tuple[float, float, float]] = deque()  # (when, arrivals, workers busy)
        self.demand: Demand | None = None  # by the last tick; None: there was none
        self._active_at = 0.0  # the last tick with requests
        self._fewer_since: float | None = None
        self._most_needed = 0  # since then
        self._flip_since: float | None = None
        self._left: dict[NodeId, Role] | None = None  # the fleet after the last decision
        self._directions: deque[tuple[float, int]] = deque()  # in the last hour: 1 up, -1 down
        self._reversals: deque[float] = deque()
        self._worker_s: deque[tuple[float, float]] = deque()

    def begin(self) -> Line:
        """Returns the first line of a log."""
        return Line(settings=self.config)

    def tick(self, snapshot: Snapshot) -> Line:
        """Decide. The line for the log has the decision."""
        return Line(snapshot=snapshot, decision=self._plan(snapshot))

    def _plan(self, snapshot: Snapshot) -> Decision:
        seen = self._observer.observe(snapshot)
        now = seen.at_s
        if self._begun_at is None:
            self._begun_at = self._active_at = now
        given_up = removals(snapshot, self.config.pending_timeout_s)
        gone = {worker for worker, _ in given_up}
        workers = [w for w in snapshot.workers if w.state in COUNTED and w.worker not in gone]
        num_draining = sum(each.state is State.DRAINING for each in snapshot.workers)
        least, most = self.config.limits(snapshot.wall_s)
        self._num_coming = sum(each.state in COMING for each in workers)
        self._take_in(now, seen, len(workers))
        need = self._need(now, seen, most)
        self.demand = self._demand(now, seen, len(workers), need, (least, most))
        if snapshot.share is not None:
            most = max(least, min(most, snapshot.share))
        inputs = self._inputs(workers, num_draining, seen, need, (least, most))
        decision = self._decide(now, seen, workers, need, inputs)
        decision = replace(decision, removals=given_up)
        self._remember(now, workers, decision)
        return decision

    # -- what is needed --------------------------------------------------------------------------

    def _demand(
        self, now: float, seen: Observation, have: int, need: Need, limits: tuple[int, int]
    ) -> Demand:
        """What it would have if no other model was there."""
        least, most = limits
        is_idle = seen.is_idle and (not have or now - self._active_at >= self.config.idle_s)
        needed = least if is_idle else max(1, need.size or have)
        return Demand(least, needed, most)

    def _take_in(self, now: float, seen: Observation, have: int) -> None:
        if not seen.is_idle or have == self._num_coming:  # what has not served yet is not idle
            self._active_at = now
        costs = seen.costs
        if costs is not None and seen.elapsed_s > 0:
            prompts = [
                (costs.prompt_s(tokens, tokens * seen.hit_rate), count)
                for tokens, count in ((tokens_of(n), c) for n, c in seen.arrivals.items())
            ]
            self._shadows.add(now, seen.elapsed_s, prompts)
            num_up = have - self._num_coming
            ideal = self._shadows.last_missed(for_prompts(num_up, self._decode_demand))
            beyond = seen.num_late - ideal
            self._real.append((now, float(seen.num_ended), beyond))
            while self._real[0][0] <= now - self.config.memory_s:
                self._real.popleft()
        self._arrivals.append((now, float(sum(seen.arrivals.values()))))
        self._worker_s.append((now, have * seen.elapsed_s))
        for kept in (self._arrivals, self._worker_s, self._directions):
            while kept and kept[0][0] <= now - max(HOUR_S, self.config.memory_s):
                kept.popleft()
        while self._reversals and self._reversals[0] <= now - HOUR_S:
            self._reversals.popleft()

    @property
    def gap(self) -> float:
        """Share of requests that the real fleet misses and its shadow would not: the shadow is
        ideal."""
        num_ended = sum(ended for _, ended, _ in self._real)
        if num_ended < LEAST_ENDED:
            return 0.0
        return min(MAX_GAP, max(0.0, sum(beyond for *_, beyond in self._real) / num_ended))

    def _rate(self, now: float, seconds: float) -> float:
        """Requests per second, over the last `seconds` or as long as this has looked."""
        assert self._begun_at is not None
        known_s = min(seconds, max(self.config.tick_s, now - self._begun_at))
        return sum(count for at_s, count in self._arrivals if at_s > now - known_s) / known_s

    def _need(self, now: float, seen: Observation, most: int) -> Need:
        costs, config = seen.costs, self.config
        if costs is None:
            return Need(0, 0.0, 0.0, 0.0)
        rate = max(self._rate(now, LONG_S), self._rate(now, config.memory_s))
        token_s = costs.token_s(config.itl_target_s, seen.mean_context)
        streams = costs.streams(config.itl_target_s, seen.mean_context)
        self._decoding.append((now, seen.num_decoding / streams))
        while self._decoding[0][0] <= now - RECENT_S:
            self._decoding.popleft()
        busy = sum(each for _, each in self._decoding) / len(self._decoding)
        peak = DECODE_FULL * self._peak(now, seen, max(token_s, chunk_target_s(config) / streams))
        decode = max(rate * seen.mean_output * token_s, DECODE_FULL * busy, peak)
        self._decode_demand = decode
        recent = self._shadows.demand(now, RECENT_S)
        forecast = self._forecast(now, recent, seen.start_s)
        wanted = min(config.percentile / 100.0 + self.gap, self._shadows.ceiling * MAX_ON_TIME)
        options = [
            Alternative(size, self._shadows.on_time(for_prompts(size, decode)), float(size))
            for size in range(1, most + 1)
        ]
        enough = (each.workers for each in options if each.on_time >= wanted)
        by_traffic = next(enough, most + 1)  # more than may be
        by_forecast = next(
            (n for n in range(1, most) if PREFILL_FULL * for_prompts(n, decode) >= forecast), most
        )
        by_decode = ceil(decode / DECODE_FULL - 1e-9)
        by_decode += by_decode > 1  # beside one that computes prompts
        size = max(by_traffic, by_forecast, by_decode, 1)
        near = tuple(each for each in options if abs(each.workers - by_traffic) <= 2)
        return Need(size, decode, recent, forecast, near)

    def _peak(self, now: float, seen: Observation, token_s: float) -> float:
        """Decode workers that would have been busy in all but the last percent of arrivals: many
        come in bursts, and miss the target together."""
        stay_s = max(LEAST_STAY_S, 2 * seen.mean_output * self.config.itl_target_s)
        busy = self._rate(now, stay_s) * seen.mean_output * token_s
        self._peaks.append((now, float(sum(seen.arrivals.values())), busy))
        while self._peaks[0][0] <= now - self.config.memory_s:
            self._peaks.popleft()
        left = (1.0 - self.config.percentile / 100.0) * sum(count for _, count, _ in self._peaks)
        for _, count, workers in sorted(self._peaks, key=lambda each: -each[2]):
            left -= count
            if left < 0:
                return workers
        return 0.0

    def _forecast(self, now: float, recent: float, start_s: float) -> float:
        """Demand for prompts when a worker that is ordered now is up: what has lasted goes on, and
        what has grown from minute to minute grows on."""
        minutes = [self._shadows.demand(now, 60.0 * n) * n for n in (1, 2, 3)]
        third, second, first = minutes[2] - minutes[1], minutes[1] - minutes[0], minutes[0]
        lasting = min(recent, self._shadows.demand(now, LONG_S))
        if 0 < third < second < first:
            return lasting + min(first - second, second - third) / 60.0 * start_s
        return lasting

    # -- what is done ----------------------------------------------------------------------------

    def _decide(
        self,
        now: float,
        seen: Observation,
        workers: list[ManagedWorker],
        need: Need,
        inputs: Inputs,
    ) -> Decision:
        have, least, most = len(workers), inputs.least, inputs.most
        wanted, reason = self._wanted(now, seen, have, need, inputs)
        decode = need.decode_workers(wanted, inputs.decode)
        if not need.alternatives:  # nothing is measured: roles stay as they are
            decode = min(wanted, max(1, inputs.decode)) if wanted else 0
        moves = moves_to(workers, wanted - decode, decode)
        if moves.flips and not (moves.starts or moves.drains):
            if self._may_flip(now, need):
                reason = Reason.FLIP
            else:
                moves = Moves()
        elif not moves.flips:
            self._flip_since = None
        per_machine = self.config.workers_per_machine
        return Decision(
            at_s=now,
            reason=reason,
            text=self._text(reason, have, wanted, need, inputs),
            wanted=wanted,
            wanted_decode=decode,
            inputs=inputs,
            alternatives=need.alternatives,
            starts=moves.starts,
            drains=moves.drains,
            flips=moves.flips,
            machines=ceil(min(most, max(least, wanted)) / per_machine) if per_machine else None,
        )

    def _wanted(
        self, now: float, seen: Observation, have: int, need: Need, inputs: Inputs
    ) -> tuple[int, Reason]:
        """How many workers there should be after this tick, and why."""
        config, least, most = self.config, inputs.least, inputs.most
        if have > most:
            return most, Reason.LIMIT
        if have < least:
            return least, Reason.LEAST
        if not seen.is_fresh:
            return have, Reason.STALE
        if have == 0:
            return (0, Reason.IDLE) if seen.is_idle else (1, Reason.WAKE)
        if seen.is_idle and now - self._active_at >= config.idle_s:
            return least, Reason.IDLE  # whatever was needed before
        if seen.costs is None:
            return have, Reason.NOT_MEASURED
        size = min(most, max(least, need.size, 1))
        if size >= have:
            self._fewer_since = None
            if size == have:
                reason = Reason.AT_MOST if need.size > most else Reason.ENOUGH
                return have, Reason.COMING if inputs.coming and have > 1 else reason
            if config.budget_worker_hours and inputs.worker_hours >= config.budget_worker_hours:
                return have, Reason.BUDGET
            return size, Reason.GROW
        return self._fewer(now, have, size, inputs)

    def _fewer(self, now: float, have: int, size: int, inputs: Inputs) -> tuple[int, Reason]:
        if self._fewer_since is None:
            self._fewer_since, self._most_needed = now, size
        self._most_needed = max(self._most_needed, size)
        if now - self._fewer_since < self.config.hold_s:
            return have, Reason.HOLDING
        turns = bool(self._directions) and self._directions[-1][1] > 0
        if inputs.reversals + turns + 1 > self.config.max_reversals_per_hour:
            return have, Reason.REVERSALS
        self._fewer_since = None
        return self._most_needed, Reason.SHRINK

    def _may_flip(self, now: float, need: Need) -> bool:
        if not need.alternatives:
            return False
        if self._flip_since is None:
            self._flip_since = now
        return now - self._flip_since >= FLIP_HOLD_S

    def _remember(self, now: float, workers: list[ManagedWorker], decision: Decision) -> None:
        """What the fleet will be, and the direction."""
        found = {each.worker: each.role for each in workers}
        if self._left is not None and set(found) != self._left.keys() and not decision.starts:
            self._fewer_since = None  # someone else has changed it: that stands for a while
        change = len(decision.starts) - len(decision.drains)
        if change:
            direction = 1 if change > 0 else -1
            if self._directions and self._directions[-1][1] != direction:
                self._reversals.append(now)
            self._directions.append((now, direction))
        if decision.flips:
            self._flip_since = None
        self._left = {each: role for each, role in found.items() if each not in decision.drains}

    # -- for people ------------------------------------------------------------------------------

    def _inputs(
        self,
        workers: list[ManagedWorker],
        num_draining: int,
        seen: Observation,
        need: Need,
        limits: tuple[int, int],
    ) -> Inputs:
        prefill = sum(each.role is Role.PREFILL for each in workers)
        hour_ago = seen.at_s - HOUR_S
        worker_s = sum(amount for at_s, amount in self._worker_s if at_s > hour_ago)
        return Inputs(
            prefill=prefill,
            decode=len(workers) - prefill,
            coming=self._num_coming,
            draining=num_draining,
            least=limits[0],
            most=limits[1],
            prefill_demand=need.prefill_demand,
            decode_demand=need.decode_demand,
            forecast=need.forecast,
            hit_rate=seen.hit_rate,
            mean_output=seen.mean_output,
            start_s=seen.start_s,
            pending_prefill_s=seen.pending_prefill_s,
            gap=self.gap,
            reversals=len(self._reversals),
            worker_hours=worker_s / HOUR_S,
        )

    def _text(self, reason: Reason, have: int, wanted: int, need: Need, inputs: Inputs) -> str:
        shares = ", ".join(
            f"{100 * each.on_time:.1f} % with {each.workers}" for each in need.alternatives
        )
        on_time = f"; on time would have been {shares}; wanted: {self.config.percentile:g} %"
        on_time = on_time if shares else ""
        match reason:
            case Reason.GROW | Reason.SHRINK | Reason.LEAST | Reason.LIMIT | Reason.WAKE:
                return f"from {have} to {wanted} workers ({reason}){on_time}"
            case Reason.FLIP:
                return f"roles change: decoding takes {inputs.decode_demand:.2f} workers{on_time}"
            case Reason.HOLDING:
                since = self.config.hold_s
                return f"not scaling: {need.size} would do, but not yet for {since:g} s{on_time}"
            case Reason.REVERSALS:
                return f"not scaling: {inputs.reversals} reversals in the last hour{on_time}"
            case Reason.BUDGET:
                return f"not scaling: {inputs.worker_hours:.2f} worker hours are spent{on_time}"
            case Reason.AT_MOST:
                return f"not scaling: {need.size} are needed, {inputs.most} may be{on_time}"
            case Reason.COMING:
                return f"not scaling: {inputs.coming} of {have} are coming{on_time}"
            case Reason.STALE:
                return f"not scaling: measurements are older than {self.config.stale_s:g} s"
            case Reason.NOT_MEASURED:
                return "not scaling: no worker has told yet what prompts cost"
            case Reason.IDLE:
                return f"idle: {wanted} workers"
            case _:
                return f"not scaling: {have} workers are enough{on_time}"


def replay_log(lines: Iterable[Line]) -> list[tuple[Decision, Decision]]:
    """The decisions of a log, each beside the one that is made from its snapshots now. Lines before
    the first settings do not count."""
    scaler: Scaler | None = None
    pairs = []
    for line in lines:
        if line.settings is not None:
            scaler = Scaler(line.settings)
        elif scaler is not None and line.snapshot is not None and line.decision is not None:
            again = scaler.tick(line.snapshot).decision
            assert again is not None
            pairs.append((line.decision, again))
    return pairs
