"""What a served request takes beside its passes, seen by a streaming client of a real cluster.

`request_s` is what is left of the TTFT of a request on an idle cluster: HTTP, the template and
tokenizing on the way in, HTTP on the way out. `step_s` and `sequence_s` are what is left of the gap
between tokens: the worker's node and threads between two steps, and what each stream costs on cores
that the workers want too.
"""

from __future__ import annotations

import asyncio
import queue
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx
import msgspec
import numpy as np

from cluster.bench import Client, LoadSpec, Timing, make_prompts
from cluster.config import Config, TenantsSection
from cluster.profiling.passes import ProfileError
from cluster.replay.timing import Timing as PassTiming

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 30.0
PROMPT_WORDS = 40
NUM_SINGLE = 20  # requests one after the other
STREAMS = (1, 4, 8)  # at once
STREAM_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Serving:
    request_s: float
    step_s: float
    sequence_s: float


def measure_served(config: Config, timing: PassTiming) -> Serving:
    """Start a cluster of `config` and time requests. `timing`: of this machine, without overheads.
    Raises ProfileError."""
    with served(config) as (url, model):
        singles, streams = asyncio.run(_send(url, model))
    gaps: dict[int, float] = {}
    for count, timings in streams.items():
        context = statistics.fmean(t.num_prompt_tokens + t.num_output_tokens / 2 for t in timings)
        pass_s = timing.pass_s(0, 0.0, 0, count, int(count * context), 1)
        gaps[count] = max(0.0, statistics.median(gaps_together(timings)) - pass_s)
    step_s, sequence_s = fit_gaps(gaps)
    rests = []
    for each in singles:
        tokens = each.num_prompt_tokens - each.num_cached_tokens
        pairs = tokens * (each.num_cached_tokens + tokens / 2)
        rests.append(each.ttft_s - timing.pass_s(tokens, pairs, 1, 0, 0, 1))
    rest_s = statistics.median(rests) - step_s - 2 * timing.links.message_s
    return Serving(max(0.0, rest_s), step_s, sequence_s)


def gaps_together(timings: Sequence[Timing]) -> list[float]:
    """Between tokens, while all of them stream. Raises ProfileError if they never do."""
    began, ended = max(t.chunk_at[0] for t in timings), min(t.chunk_at[-1] for t in timings)
    gaps = [
        later - earlier
        for timing in timings
        for earlier, later in zip(timing.chunk_at[1:], timing.chunk_at[2:], strict=False)
        if began <= earlier and later <= ended
    ]
    if not gaps:
        raise ProfileError(f"{len(timings)} streams were never under way at once")
    return gaps


def fit_gaps(gaps: dict[int, float]) -> tuple[float, float]:
    """(seconds a step, more seconds a sequence) of what steps of so many sequences take beside
    their passes; neither below 0."""
    counts, rests = list(gaps), list(gaps.values())
    slope, start = (float(each) for each in np.polyfit(counts, rests, 1))
    if slope < 0:
        return max(0.0, statistics.fmean(rests)), 0.0
    if start < 0:
        return 0.0, statistics.fmean(rest / count for count, rest in gaps.items())
    return start, slope


async def _send(url: str, model: str) -> tuple[list[Timing], dict[int, list[Timing]]]:
    spec = LoadSpec(
        url,
        model,
        2 + NUM_SINGLE + sum(STREAMS),
        concurrency=1,
        input_len=PROMPT_WORDS,
        output_len=STREAM_TOKENS,
    )
    prompts = iter(make_prompts(spec))
    async with httpx.AsyncClient(base_url=url, timeout=spec.timeout_s) as http:
        long, short = (
            Client(replace(spec, output_len=length), http, lambda _: None)
            for length in (STREAM_TOKENS, 4)
        )
        for _ in range(2):  # the first requests connect peers
            _check(await long.request(next(prompts)))
        singles = [_check(await short.request(next(prompts))) for _ in range(NUM_SINGLE)]
        streams = {}
        for count in STREAMS:
            asked = [long.request(next(prompts)) for _ in range(count)]
            streams[count] = [_check(timing) for timing in await asyncio.gather(*asked)]
    return singles, streams


def _check(timing: Timing) -> Timing:
    if timing.error is not None:
        raise ProfileError(f"a request to the served model failed: {timing.error}")
    return timing


@contextmanager
def served(config: Config) -> Iterator[tuple[str, str]]:
    """URL and model of a server of its own, that keeps nothing and asks nobody for a key."""
    config = replace(
        config,
        api=replace(config.api, host="127.0.0.1", port=0),
        sessions=replace(config.sessions, durable=False),
        tenants=TenantsSection(),
        tenant=(),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.profiling.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    told, said = process.stdin, process.stdout
    assert told is not None
    assert said is not None
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: lines.put(said.readline()), daemon=True).start()
    try:
        told.write(msgspec.json.encode(config).decode() + "\n")
        told.flush()
        yield _ready(lines)
    finally:
        told.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)


def _ready(lines: queue.SimpleQueue[str]) -> tuple[str, str]:
    try:
        line = lines.get(timeout=START_TIMEOUT_S)
    except queue.Empty:
        raise ProfileError(f"the server is not ready after {START_TIMEOUT_S:g} s") from None
    if not line:
        raise ProfileError("the server did not start; what it said is above")
    return msgspec.json.decode(line, type=tuple[str, str])
