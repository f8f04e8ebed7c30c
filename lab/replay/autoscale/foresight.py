"""Fleets chosen by who knows the trace: the best that stays as it is, and an oracle's path.

Both are found with the shadow queues of `cluster.scaling.shadows` in the times of the replay's
timing, without a prefix cache, and then replayed like everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from kvrelay.cluster.scaling.planner import decode_workers, for_prompts
from kvrelay.cluster.scaling.shadows import Shadow
from kvrelay.lab.replay.config import ReplayConfig
from kvrelay.lab.replay.trace import Trace
from kvrelay.lab.timing.timing import Timing
from kvrelay.router.scaling_config import ScalingConfig

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
