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
from itertools import count, pairwise

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
BESIDE_ROUNDS, BESIDE_TOKENS = 6, 300  # a stream, and prompts now and then
BESIDE_WORDS = (PROMPT_WORDS, 220)  # of these prompts, by turns
BESIDE_START_S = 0.5  # for the stream's own prompt
ALONE_S = 0.3  # of the stream, before each of the prompts


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
class Beside:
    """A stream, prompts that were computed meanwhile, and others like these after it."""

    stream: Timing
    prompts: list[Timing]
    alone: list[Timing]


@dataclass(slots=True)
class _Seen:
    """What the client saw."""

    singles: list[Timing]
    streams: dict[int, list[list[Timing]]]  # so many at once, several times
    beside: list[Beside]


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
        [each.ttft_s - rest_s - step_s for beside in seen.beside for each in beside.alone],
        [each.ttft_s - rest_s - step_s for beside in seen.beside for each in beside.prompts],
    )
    return Serving(
        request_s=rest_s,
        step_s=step_s,
        sequence_s=sequence_s,
        prefill_slowdown=slowdown,
        prefill_wait_s=wait_s,
        decode_slowdown=max(1.0, statistics.median(map(stream_slowdown, seen.beside))),
    )


def _context(timings: Sequence[Timing]) -> float:
    """Tokens of KV of each of them, on average."""
    return statistics.fmean(t.num_prompt_tokens + t.num_output_tokens / 2 for t in timings)


def _prompt_s(timing: PassTiming, each: Timing) -> float:
    """What its prompt takes to be computed, alone."""
    tokens = each.num_prompt_tokens - each.num_cached_tokens
    return timing.pass_s(tokens, tokens * (each.num_cached_tokens + tokens / 2), 1, 0, 0, 1)


def fit_slowdown(alone_s: Sequence[float], beside_s: Sequence[float]) -> tuple[float, float]:
    """(seconds to wait, times as long) of prompts, some short and some long, that took `alone_s` or
    `beside_s`: a line through the medians of the short ones and of the long ones."""
    (short_s, long_s), (short_beside_s, long_beside_s) = map(_short_and_long, (alone_s, beside_s))
    if long_s <= short_s:
        return 0.0, max(1.0, long_beside_s / long_s)
    slowdown = max(1.0, (long_beside_s - short_beside_s) / (long_s - short_s))
    wait_s = short_beside_s - slowdown * short_s
    return (wait_s, slowdown) if wait_s >= 0 else (0.0, max(1.0, long_beside_s / long_s))


def _short_and_long(seconds: Sequence[float]) -> tuple[float, float]:
    """Medians. Half of them are short."""
    ordered = sorted(seconds)
    middle = len(ordered) // 2
    return statistics.median(ordered[:middle]), statistics.median(ordered[middle:])


def stream_slowdown(beside: Beside) -> float:
    """How many times as long the gaps between tokens were while a prompt was computed as otherwise:
    medians of the same seconds, so that how fast the machine is then does not count. Raises
    ProfileError if it cannot be told."""
    slow, alone = [], []
    for earlier, later in pairwise(beside.stream.chunk_at[1:]):
        if any(p.sent_at <= earlier and later <= p.chunk_at[0] for p in beside.prompts):
            slow.append(later - earlier)
        elif all(later <= p.sent_at or p.chunk_at[0] <= earlier for p in beside.prompts):
            alone.append(later - earlier)
    if not slow or not alone:
        raise ProfileError(
            f"{len(slow)} tokens came while {len(beside.prompts)} prompts were computed, and "
            f"{len(alone)} otherwise; both are needed"
        )
    return statistics.median(slow) / statistics.median(alone)


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
        seen = _Seen(singles, streams, [])
        for _ in range(BESIDE_ROUNDS):
            stream = asyncio.create_task(ask_at(PROMPT_WORDS, BESIDE_TOKENS))
            await asyncio.sleep(BESIDE_START_S)
            prompts: list[Timing] = []
            while not stream.done():
                await asyncio.sleep(ALONE_S)
                prompts += [await ask_at(words, 1) for words in BESIDE_WORDS]
            whole = 2 * ((len(prompts) - 1) // 2)  # of the last ones, a part was alone
            alone = [await ask_at(words, 1) for words in 2 * BESIDE_WORDS]
            seen.beside.append(Beside(await stream, prompts[:whole], alone))
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
