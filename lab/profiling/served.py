"""What a served request takes beside its passes, seen by a streaming client of a real cluster.

`request_s` is what is left of the TTFT of a request on an idle cluster: HTTP, the template and
tokenizing on the way in, HTTP on the way out. `step_s` and `sequence_s` are what is left of the gap
between tokens: the worker's node and threads between two steps, and what each stream costs on cores
that the workers want too. Where all share the cores of one machine, what prompts and streams cost
each other comes last, with router, API and client at work beside them (`mixture`).
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
from msgspec import structs

from kvrelay.cluster.config import Config, TenantsSection
from kvrelay.lab.bench.load import Client, LoadSpec, Timing, make_prompts
from kvrelay.lab.profiling.forward import ProfileError
from kvrelay.lab.profiling.mixture import (
    Mixed,
    alone_s,
    contention_of,
    mean_context,
    plan_mixture,
    prompt_s,
)
from kvrelay.lab.timing.profile import Profile
from kvrelay.lab.timing.timing import Overheads

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 30.0
PROMPT_WORDS = 40
NUM_SINGLE, SINGLE_WORDS = 20, 4  # requests one after the other
STREAMS = (1, 4, 8)  # at once
STREAM_TOKENS, STREAM_ROUNDS = 96, 3
TIMEOUT_S = 120.0  # for a request
HANDS_OVER = "round_robin"  # a policy that hands every prompt to a prefill worker


@dataclass(slots=True)
class _Seen:
    """What the client saw of a cluster that had nothing else to do."""

    singles: list[Timing]
    streams: dict[int, list[list[Timing]]]  # so many at once, several times


def measure_served(config: Config, timing: Profile, *, shares_cores: bool) -> Overheads:
    """Start a cluster of `config` and time requests. `timing`: of this machine, without overheads.
    The slowdowns are found where the workers share cores. Raises ProfileError."""
    with served(config) as (url, model):
        overheads, gap_s, tokens_per_word = asyncio.run(_measure_alone(url, model, timing))
    if not shares_cores:
        return overheads
    timing = replace(timing, overheads=overheads)

    def service_s(words: int, tokens: int) -> float:
        return alone_s(timing, int(words * tokens_per_word)) + tokens * gap_s

    planned = plan_mixture(service_s)
    # Prompts and streams have to meet on two workers, whatever that costs.
    hands_over = structs.replace(config, router=structs.replace(config.router, policy=HANDS_OVER))
    with served(hands_over) as (url, model):
        return contention_of(timing, asyncio.run(_measure_mixture(url, model, planned)))


async def _measure_alone(url: str, model: str, timing: Profile) -> tuple[Overheads, float, float]:
    """Measures what `_alone` does, and how many tokens a word makes."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        asker = _Asker(url, model, http)
        overheads, gap_s = _alone(timing, await _send(asker))
        return overheads, gap_s, asker.num_tokens / asker.num_words


async def _measure_mixture(url: str, model: str, planned: Sequence[Mixed]) -> list[Timing]:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        return await _send_mixture(_Asker(url, model, http), planned)


def _alone(timing: Profile, seen: _Seen) -> tuple[Overheads, float]:
    """What requests take beside their passes; the gap between tokens of one stream."""
    found_s: dict[int, float] = {}
    rests_s: dict[int, float] = {}
    for num, rounds in seen.streams.items():
        # What else goes on here only ever adds to a gap.
        gap_s = least_gap_s(rounds)
        if gap_s is not None:
            pass_s = timing.pass_s(0, 0.0, 0, num, int(num * mean_context(rounds[0])), 1)
            found_s[num], rests_s[num] = gap_s, max(0.0, gap_s - pass_s)
    if not found_s:
        raise ProfileError("no stream had two tokens: is the model's context long enough?")
    step_s, sequence_s = fit_gaps(rests_s)
    rests = [each.ttft_s - prompt_s(timing, each) for each in seen.singles]
    rest_s = max(0.0, statistics.median(rests) - step_s - 2 * timing.links.message_s)
    overheads = Overheads(request_s=rest_s, step_s=step_s, sequence_s=sequence_s)
    return overheads, found_s[min(found_s)]


def least_gap_s(rounds: Sequence[Sequence[Timing]]) -> float | None:
    """The median gap of the quickest round. None if in none all streamed at once: short ones may be
    over before the last prompt is computed."""
    gaps = [found for timings in rounds if (found := gaps_together(timings))]
    return min(map(statistics.median, gaps)) if gaps else None


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
    if len(counts) == 1:
        return rests[0], 0.0
    slope, start = (float(each) for each in np.polyfit(counts, rests, 1))
    if slope < 0:
        return max(0.0, statistics.fmean(rests)), 0.0
    if start < 0:
        return 0.0, statistics.fmean(rest / count for count, rest in gaps.items())
    return start, slope


class _Asker:
    """Sends prompts that no other begins like. All its times are of one clock."""

    def __init__(self, url: str, model: str, http: httpx.AsyncClient) -> None:
        self._spec = LoadSpec(url, model, 1, concurrency=1)
        self._http = http
        self._numbers = count(1)
        self._start = time.perf_counter()
        self.num_words = self.num_tokens = 0  # in all prompts so far

    async def ask(self, num_words: int, num_tokens: int) -> Timing:
        """Raises ProfileError if the server refuses."""
        seed = next(self._numbers)
        asked = replace(self._spec, input_len=num_words, output_len=num_tokens, seed=seed)
        shift_s = time.perf_counter() - self._start
        timing = await Client(asked, self._http, lambda _: None).request(*make_prompts(asked))
        if timing.error is not None:
            raise ProfileError(f"a request to the served model failed: {timing.error}")
        timing.sent_at += shift_s
        timing.chunk_at = [at + shift_s for at in timing.chunk_at]
        self.num_words += num_words
        self.num_tokens += timing.num_prompt_tokens
        return timing


async def _send(asker: _Asker) -> _Seen:
    for _ in range(2):  # the first requests connect peers
        await asker.ask(PROMPT_WORDS, STREAM_TOKENS)
    singles = [await asker.ask(SINGLE_WORDS, 4) for _ in range(NUM_SINGLE)]
    streams: dict[int, list[list[Timing]]] = {number: [] for number in STREAMS}
    for number in STREAM_ROUNDS * STREAMS:
        asked = [asker.ask(PROMPT_WORDS, STREAM_TOKENS) for _ in range(number)]
        streams[number].append(list(await asyncio.gather(*asked)))
    return _Seen(singles, streams)


async def _send_mixture(asker: _Asker, planned: Sequence[Mixed]) -> list[Timing]:
    """Each at its time, whatever the others do."""

    async def ask(each: Mixed) -> Timing:
        await asyncio.sleep(each.at_s)
        return await asker.ask(each.num_words, each.num_tokens)

    return list(await asyncio.gather(*map(ask, planned)))


@contextmanager
def served(config: Config) -> Iterator[tuple[str, str]]:
    """URL and model of a server of its own, that keeps nothing and asks for no key."""
    config = structs.replace(
        config,
        api=structs.replace(config.api, host="127.0.0.1", port=0),
        sessions=structs.replace(config.sessions, durable=False),
        tenants=TenantsSection(),
        tenant=(),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrelay.lab.profiling.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stdin, said = process.stdin, process.stdout
    assert stdin is not None
    assert said is not None
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: lines.put(said.readline()), daemon=True).start()
    try:
        stdin.write(msgspec.json.encode(config).decode() + "\n")
        stdin.flush()
        yield _ready(lines)
    finally:
        stdin.close()
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
