"""What a served request takes beside its passes, seen by a streaming client of a real cluster.

`request_s` is what is left of the TTFT of a request on an idle cluster: HTTP, the template and
tokenizing on the way in, HTTP on the way out. `step_s` and `sequence_s` are what is left of the gap
between tokens: the worker's node and threads between two steps, and what each stream costs on cores
that the workers want too. The slowdowns are what prompts and streams cost each other, with router,
API and client at work beside them: where all share the cores of one machine.
"""

from __future__ import annotations

import asyncio
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, cycle, pairwise
from operator import truediv

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
STREAM_TOKENS, STREAM_ROUNDS = 48, 3
BESIDE_ROUNDS, BESIDE_TOKENS = 8, 300  # a stream, while prompts are computed one after the other
BESIDE_WORDS = (PROMPT_WORDS, 220)  # of these prompts, by turns
BESIDE_START_S = 0.5  # for the stream's own prompt


@dataclass(frozen=True, slots=True)
class Serving:
    """Named as in `Overheads`."""

    request_s: float
    step_s: float
    sequence_s: float
    prefill_slowdown: float
    prefill_wait_s: float
    decode_slowdown: float


@dataclass(slots=True)
class _Seen:
    """What the client saw. `beside`: prompts, and the streams that were under way meanwhile, one at
    a time."""

    singles: list[Timing]
    streams: dict[int, list[list[Timing]]]  # so many at once, several times
    beside_prompts: list[Timing]
    beside_streams: list[Timing]


def measure_served(config: Config, timing: PassTiming) -> Serving:
    """Start a cluster of `config` and time requests. `timing`: of this machine, without overheads.
    Raises ProfileError."""
    with served(config) as (url, model):
        seen = asyncio.run(_send(url, model))
    gaps: dict[int, float] = {}
    for num, rounds in seen.streams.items():
        pass_s = timing.pass_s(0, 0.0, 0, num, int(num * _context(rounds[0])), 1)
        # What else goes on here only ever adds to a gap.
        gap_s = least_gap_s(rounds)
        gaps[num] = max(0.0, gap_s - pass_s)
    step_s, sequence_s = fit_gaps(gaps)
    rests = [each.ttft_s - _prompt_s(timing, each) for each in seen.singles]
    rest_s = max(0.0, statistics.median(rests) - step_s - 2 * timing.links.message_s)
    wait_s, slowdown = fit_slowdown(
        [_prompt_s(timing, each) for each in seen.beside_prompts],
        [each.ttft_s - rest_s - step_s for each in seen.beside_prompts],
    )
    beside_s = statistics.fmean(gaps_beside(seen.beside_streams, seen.beside_prompts))
    alone_s = timing.pass_s(0, 0.0, 0, 1, int(_context(seen.beside_streams)), 1)
    return Serving(
        request_s=rest_s,
        step_s=step_s,
        sequence_s=sequence_s,
        prefill_slowdown=slowdown,
        prefill_wait_s=wait_s,
        decode_slowdown=max(1.0, beside_s / (alone_s + step_s + sequence_s)),
    )


def _context(timings: Sequence[Timing]) -> float:
    """Tokens of KV of each of them, on average."""
    return statistics.fmean(t.num_prompt_tokens + t.num_output_tokens / 2 for t in timings)


def _prompt_s(timing: PassTiming, each: Timing) -> float:
    """What its prompt takes to be computed, alone."""
    tokens = each.num_prompt_tokens - each.num_cached_tokens
    return timing.pass_s(tokens, tokens * (each.num_cached_tokens + tokens / 2), 1, 0, 0, 1)


def fit_slowdown(passes_s: Sequence[float], taken_s: Sequence[float]) -> tuple[float, float]:
    """(seconds to wait, times as long) of prompts that took `taken_s` instead of `passes_s`: a line
    through the medians of the short ones and of the long ones."""
    middle = (min(passes_s) + max(passes_s)) / 2
    pairs = list(zip(passes_s, taken_s, strict=True))
    short, long = ([pair for pair in pairs if (pair[0] > middle) is side] for side in (False, True))
    if not short or not long:
        return 0.0, max(1.0, statistics.median(map(truediv, taken_s, passes_s)))
    (short_s, short_taken_s), (long_s, long_taken_s) = (
        [statistics.median(column) for column in zip(*side, strict=True)] for side in (short, long)
    )
    slowdown = max(1.0, (long_taken_s - short_taken_s) / (long_s - short_s))
    wait_s = short_taken_s - slowdown * short_s
    return (wait_s, slowdown) if wait_s >= 0 else (0.0, max(1.0, long_taken_s / long_s))


def gaps_beside(streams: Sequence[Timing], prompts: Sequence[Timing]) -> list[float]:
    """Between tokens of the streams, that lie in the time of one of the prompts. Raises
    ProfileError if there is none."""
    gaps = [
        later - earlier
        for stream in streams
        for earlier, later in pairwise(stream.chunk_at[1:])
        if any(p.sent_at <= earlier and later <= p.chunk_at[0] for p in prompts)
    ]
    if not gaps or not prompts:
        raise ProfileError(f"{len(streams)} streams had no token while a prompt was computed")
    return gaps


def least_gap_s(rounds: Sequence[Sequence[Timing]]) -> float:
    """The median gap of the quickest round. Raises ProfileError if in none all streamed at once:
    short ones may be over before the last prompt is computed."""
    gaps = [found for timings in rounds if (found := gaps_together(timings))]
    if not gaps:
        raise ProfileError(f"{len(rounds[0])} streams were never under way at once")
    return min(map(statistics.median, gaps))


def gaps_together(timings: Sequence[Timing]) -> list[float]:
    """Between tokens, while all of them stream; none if they never do."""
    began, ended = max(t.chunk_at[0] for t in timings), min(t.chunk_at[-1] for t in timings)
    return [
        later - earlier
        for timing in timings
        for earlier, later in pairwise(timing.chunk_at[1:])
        if began <= earlier and later <= ended
    ]


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


async def _send(url: str, model: str) -> _Seen:
    spec = LoadSpec(url, model, 1, concurrency=1, input_len=PROMPT_WORDS, output_len=STREAM_TOKENS)
    async with httpx.AsyncClient(base_url=url, timeout=spec.timeout_s) as http:
        numbers = count(1)

        async def ask(num_words: int, num_tokens: int) -> Timing:
            """A prompt that no other begins like."""
            asked = replace(spec, input_len=num_words, output_len=num_tokens, seed=next(numbers))
            return _check(await Client(asked, http, lambda _: None).request(*make_prompts(asked)))

        start = time.perf_counter()

        async def ask_at(num_words: int, num_tokens: int) -> Timing:
            """On one clock with all the others."""
            shift_s = time.perf_counter() - start
            timing = await ask(num_words, num_tokens)
            timing.sent_at += shift_s
            timing.chunk_at = [at + shift_s for at in timing.chunk_at]
            return timing

        for _ in range(2):  # the first requests connect peers
            await ask(PROMPT_WORDS, STREAM_TOKENS)
        singles = [await ask(PROMPT_WORDS, 4) for _ in range(NUM_SINGLE)]
        streams: dict[int, list[list[Timing]]] = {number: [] for number in STREAMS}
        for number in STREAM_ROUNDS * STREAMS:
            asked = [ask_at(PROMPT_WORDS, STREAM_TOKENS) for _ in range(number)]
            streams[number].append(list(await asyncio.gather(*asked)))
        seen = _Seen(singles, streams, [], [])
        words = cycle(BESIDE_WORDS)
        for _ in range(BESIDE_ROUNDS):
            stream = asyncio.create_task(ask_at(PROMPT_WORDS, BESIDE_TOKENS))
            await asyncio.sleep(BESIDE_START_S)
            while not stream.done():
                seen.beside_prompts.append(await ask_at(next(words), 1))
            seen.beside_prompts.pop()  # part of it was alone
            seen.beside_streams.append(await stream)
        return seen


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
