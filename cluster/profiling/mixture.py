"""What prompts and streams cost each other where all workers share the cores of one machine.

A served cluster gets prompts and streams mixed, as users send them, and the same load is replayed:
the slowdowns are those with which the replay takes as long. Prompts and streams slow each other in
turn, so none can be read off alone: streams that take longer meet more prompts. What a worker is
slowed by when no other computes (router, API, client, the system) is found with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import numpy as np
from numpy.typing import NDArray

from cluster.bench import LoadSpec, Timing, make_arrivals
from cluster.config import Config
from cluster.deployment import ITL_TARGET_MS
from cluster.replay.config import ReplayConfig
from cluster.replay.profile import Profile
from cluster.replay.replay import replay
from cluster.replay.timing import Overheads, overheads_of
from cluster.replay.timing import Timing as PassTiming
from cluster.replay.trace import Trace, TraceRequest
from engine.config import STATS_INTERVAL_S

NUM_REQUESTS = 80
WORDS, TOKENS = (16, 256), (16, 64)  # of a prompt and of its answer, at least and at most
LOAD = 0.4  # requests under way on average, if they did not slow each other
SEED = 11
SLOWDOWNS = ("prefill_slowdown", "decode_slowdown", "alone_slowdown")  # fields of Overheads
FIRST = (2.0, 1.3, 1.1)  # in this order
LEAST, MOST = (1.0, 1.0, 0.5), 16.0
GAINS = (*4 * (1.0,), *6 * (0.6,), *8 * (0.4,))  # steps, as shares of what is missing
NUM_LAST = 8
NEAR = 0.005  # real and replayed differ by no more: good enough

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Mixed:
    """One request of the load."""

    at_s: float
    num_words: int
    num_tokens: int  # of its answer


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


def as_served(config: Config, timing: PassTiming, num_blocks: int) -> ReplayConfig:
    """A cluster of `config`, each worker with so many blocks."""
    return ReplayConfig(
        timing=timing,
        num_prefill=config.cluster.prefill,
        num_decode=config.cluster.decode,
        num_blocks=num_blocks,
        block_size=config.engine.block_size,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        router=config.router,
        stats_interval_s=STATS_INTERVAL_S,
        itl_target_s=(config.engine.itl_target_ms or ITL_TARGET_MS) / 1e3,
    )


def fit_slowdowns(cluster: ReplayConfig, seen: Sequence[Timing]) -> Overheads:
    """Of the `cluster` whose clients have `seen` this; its timing is a Profile, that knows all but
    the slowdowns. Each of them follows what it does most to, in logarithms, by ever smaller steps:
    a replay is as sensitive to small changes as a cluster is, so the last ones are averaged."""
    gaps = [later - earlier for each in seen for earlier, later in pairwise(each.chunk_at)]
    trace = _trace_of(seen)
    by_time = sorted(seen, key=lambda each: each.sent_at)
    real = _compared(cluster, trace, [each.ttft_s for each in by_time], gaps)

    def slowed(at: Times) -> Overheads:
        found = dict(zip(SLOWDOWNS, map(float, np.exp(at)), strict=True))
        return replace(overheads_of(cluster.timing), **found)

    at, tried = np.log(FIRST), []
    for gain in GAINS:
        miss = real - _replayed(cluster, trace, slowed(at))
        if np.abs(miss).max() < NEAR:
            return slowed(at)
        at = np.clip(at + gain * miss, np.log(LEAST), math.log(MOST))
        tried.append(at)
    return slowed(np.mean(tried[-NUM_LAST:], axis=0))


def _trace_of(seen: Sequence[Timing]) -> Trace:
    began_s = min(each.sent_at for each in seen)
    requests = (
        TraceRequest(
            at_s=each.sent_at - began_s,
            input_length=each.num_prompt_tokens,
            output_length=each.num_output_tokens,
        )
        for each in seen
    )
    return Trace("mixture", tuple(sorted(requests, key=lambda each: each.at_s)))


def _replayed(cluster: ReplayConfig, trace: Trace, overheads: Overheads) -> Times:
    assert isinstance(cluster.timing, Profile)
    timing = replace(cluster.timing, overheads=overheads)
    result = replay(trace, replace(cluster, timing=timing))
    ttfts = [math.nan if each.ttft_s is None else each.ttft_s for each in result.samples]
    return _compared(cluster, trace, ttfts, np.repeat(result.itl_s, result.itl_counts))


def _compared(
    cluster: ReplayConfig, trace: Trace, ttfts: Sequence[float], gaps: Sequence[float] | Times
) -> Times:
    """Logarithms of what each of the slowdowns does most to: how many times as long as alone the
    slower first tokens take, the gaps between tokens beside prompts, and the other gaps."""
    alone = [alone_s(cluster.timing, each.input_length) for each in trace.requests]
    slower = np.nanpercentile(np.divide(ttfts, alone), 85)
    quiet, beside = np.percentile(gaps, (50, 90))
    return np.log([slower, beside, quiet])


def alone_s(timing: PassTiming, tokens: int) -> float:
    """What a first token takes on an idle cluster."""
    pass_s = timing.pass_s(tokens, tokens**2 / 2, 1, 0, 0, 1)
    return overheads_of(timing).request_s + pass_s
