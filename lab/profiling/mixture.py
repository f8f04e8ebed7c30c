"""What prompts and streams cost each other where all workers share the cores of one machine.

A served cluster gets prompts and streams mixed, as users send them. From what its clients saw: how
much longer than alone prompts took while tokens were streamed and while none were, and the gaps
between tokens while a prompt was computed and while none was. What a worker is slowed by when no
other computes (router, API, client, the system) is found with that, and how far the times of equal
steps are spread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import numpy as np

from kvrelay.lab.bench.load import LoadSpec, Timing, make_arrivals
from kvrelay.lab.profiling.forward import ProfileError
from kvrelay.lab.replay.contention import SPREAD_S
from kvrelay.lab.timing.timing import Overheads, overheads_of
from kvrelay.lab.timing.timing import Timing as PassTiming

NUM_REQUESTS = 80
WORDS, TOKENS = (16, 256), (16, 64)  # in a prompt and in its answer, at least and at most
LOAD = 0.4  # requests under way on average, if they did not slow each other
SEED = 11
LEAST, MOST = 0.5, 16.0  # slowdowns that are tried
NORMAL_P90 = 1.2816  # 90th percentile of a normal distribution, in standard deviations
NEVER_MET = "prompts and streams never met, or always: is something else running?"
CLEAR = 0.02  # share of a time that may differ from the rest of it

Span = tuple[float, float]  # by one clock, in seconds


@dataclass(frozen=True, slots=True)
class Mixed:
    """What one request of the load is."""

    at_s: float
    num_words: int
    num_tokens: int  # its answer's


def plan_mixture(service_s: Callable[[int, int], float]) -> list[Mixed]:
    """`service_s(words, tokens)`: what a request takes alone."""
    rng = Random(SEED)
    least, most = map(math.log, WORDS)  # most of what is not cached is short
    drawn = [
        (round(math.exp(rng.uniform(least, most))), rng.randint(*TOKENS))
        for _ in range(NUM_REQUESTS)
    ]
    rate = LOAD / (sum(service_s(*each) for each in drawn) / NUM_REQUESTS)
    arrivals = make_arrivals(LoadSpec("", "", NUM_REQUESTS, rate=rate, seed=SEED))
    return [Mixed(at_s, *each) for at_s, each in zip(arrivals, drawn, strict=True)]


def contention_of(timing: PassTiming, seen: Sequence[Timing]) -> Overheads:
    """`timing` knows all but the slowdowns and the spread. Raises ProfileError."""
    overheads = overheads_of(timing)
    prompts = [
        (min(each.sent_at + overheads.request_s, each.chunk_at[0]), each.chunk_at[0])
        for each in seen
    ]
    streams = [(each.chunk_at[0], each.chunk_at[-1]) for each in seen]
    works_s = [prompt_s(timing, each) for each in seen]
    alone, beside = prompts_slowed(prompts, works_s, streams)
    context = mean_context(seen)

    def step_s(num: int) -> float:
        return timing.pass_s(0, 0.0, 0, num, int(num * context), 1)

    quiet, slowed = steps_slowed(prompts, [each.chunk_at for each in seen], step_s)
    median = statistics.median(quiet)
    spread = math.log(np.percentile(quiet, 90) / median) / NORMAL_P90
    return replace(
        overheads,
        prefill_slowdown=_within(beside),
        prefill_alone_slowdown=_within(alone),
        decode_slowdown=_within(statistics.median(slowed)),
        decode_alone_slowdown=_within(median),
        spread=spread * math.sqrt(max(1.0, step_s(1) / SPREAD_S)),
    )


def prompts_slowed(
    prompts: Sequence[Span], works_s: Sequence[float], streams: Sequence[Span]
) -> tuple[float, float]:
    """How many times as long as alone (`works_s`) prompts take while nothing is streamed, and while
    something is. Those that overlap are taken together. Raises ProfileError."""
    streamed = merged(streams)
    lonely, others = [], []
    for begin, end in merged(prompts):
        work_s = sum(
            work
            for work, (sent, done) in zip(works_s, prompts, strict=True)
            if begin <= sent and done <= end
        )
        shared_s = _overlap((begin, end), streamed)
        if shared_s <= CLEAR * (end - begin):
            lonely.append((end - begin) / work_s)
        else:
            others.append((end - begin - shared_s, shared_s, work_s))
    if not lonely or not others:
        raise ProfileError(NEVER_MET)
    alone = statistics.median(lonely)
    shared_s = sum(shared for _, shared, _ in others)
    done_s = sum(work_s - apart_s / alone for apart_s, _, work_s in others)
    return alone, shared_s / done_s if done_s > 0 else MOST


def steps_slowed(
    prompts: Sequence[Span], arrivals: Sequence[Sequence[float]], step_s: Callable[[int], float]
) -> tuple[list[float], list[float]]:
    """How many times as long as `step_s` of so many streams gaps between tokens are while no prompt
    is computed, and while one is. Raises ProfileError."""
    computing = merged(prompts)
    quiet, slowed = [], []
    for at in arrivals:
        for earlier, later in pairwise(at):
            num = sum(each[0] <= earlier and later <= each[-1] for each in arrivals)
            share = _overlap((earlier, later), computing) / max(1e-9, later - earlier)
            if share <= CLEAR:
                quiet.append((later - earlier) / step_s(num))
            elif share >= 1 - CLEAR:
                slowed.append((later - earlier) / step_s(num))
    if not quiet or not slowed:
        raise ProfileError(NEVER_MET)
    return quiet, slowed


def merged(spans: Sequence[Span]) -> list[Span]:
    """The times in which there is any of `spans`."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _overlap(span: Span, others: Sequence[Span]) -> float:
    """Seconds of `span` in which there is one of `others`, which are apart."""
    return sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in others)


def _within(slowdown: float) -> float:
    return min(MOST, max(LEAST, slowdown))


def prompt_s(timing: PassTiming, each: Timing) -> float:
    """What its prompt takes to be computed, alone. All begin with the few tokens of a template,
    which are in the cache."""
    tokens = each.num_prompt_tokens - each.num_cached_tokens
    return timing.pass_s(tokens, tokens * (each.num_cached_tokens + tokens / 2), 1, 0, 0, 1)


def mean_context(timings: Sequence[Timing]) -> float:
    """Tokens of KV of each of them, on average."""
    return statistics.fmean(t.num_prompt_tokens + t.num_output_tokens / 2 for t in timings)


def alone_s(timing: PassTiming, tokens: int) -> float:
    """What a first token takes on an idle cluster."""
    pass_s = timing.pass_s(tokens, tokens**2 / 2, 1, 0, 0, 1)
    return overheads_of(timing).request_s + pass_s
