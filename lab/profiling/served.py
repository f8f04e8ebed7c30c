"""What a served request takes beside its passes, seen by a streaming client of a real cluster.

`request_s` is what is left of the TTFT of a request on an idle cluster: HTTP, the template and
tokenizing on the way in, HTTP on the way out. `step_s` and `sequence_s` are what is left of the gap
between tokens: the worker's node and threads between two steps, and what each stream costs on cores
that the workers want too. Where all share the cores of one machine, what prompts and streams cost
each other comes last, with router, API and client at work beside them (`Mixed`).

For that, a served cluster gets prompts and streams mixed, as users send them. From what its clients
saw: how much longer than alone prompts took while tokens were streamed and while none were, and the
gaps between tokens while a prompt was computed and while none was. What a worker is slowed by when
no other computes (router, API, client, the system) is found with that, and how far the times of
equal steps are spread.
"""

from __future__ import annotations

import asyncio
import math
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, pairwise
from random import Random

import httpx
import msgspec
import numpy as np
from msgspec import structs

from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.cluster.config import Config, TenantsSection
from kvrelay.lab.bench.load import Client, LoadSpec, RequestTiming, make_arrivals, make_prompts
from kvrelay.lab.profiling.forward import ProfileError
from kvrelay.lab.replay.runtime import SPREAD_S
from kvrelay.lab.timing.profile import Profile
from kvrelay.lab.timing.timing import Overheads, Timing, overheads_of

NUM_REQUESTS = 80
WORDS, TOKENS = (16, 256), (16, 64)  # in a prompt and in its answer, at least and at most
LOAD = 0.4  # requests under way on average, if they did not slow each other
SEED = 11
MIN_SLOWDOWN, MAX_SLOWDOWN = 0.5, 16.0  # slowdowns that are tried
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


def contention_of(timing: Timing, seen: Sequence[RequestTiming]) -> Overheads:
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
    return alone, shared_s / done_s if done_s > 0 else MAX_SLOWDOWN


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
    return min(MAX_SLOWDOWN, max(MIN_SLOWDOWN, slowdown))


def prompt_s(timing: Timing, each: RequestTiming) -> float:
    """What its prompt takes to be computed, alone. All begin with the few tokens of a template,
    which are in the cache."""
    tokens = each.num_prompt_tokens - each.num_cached_tokens
    return timing.pass_s(tokens, tokens * (each.num_cached_tokens + tokens / 2), 1, 0, 0, 1)


def mean_context(timings: Sequence[RequestTiming]) -> float:
    """Tokens of KV of each of them, on average."""
    return statistics.fmean(t.num_prompt_tokens + t.num_output_tokens / 2 for t in timings)


def alone_s(timing: Timing, tokens: int) -> float:
    """What a first token takes on an idle cluster."""
    pass_s = timing.pass_s(tokens, tokens**2 / 2, 1, 0, 0, 1)
    return overheads_of(timing).request_s + pass_s


START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 30.0
PROMPT_WORDS = 40
NUM_SINGLE, SINGLE_WORDS = 20, 4  # requests one after the other
STREAMS = (1, 4, 8)  # at once
STREAM_TOKENS, STREAM_ROUNDS = 96, 3
TIMEOUT_S = 120.0  # for a request
HANDS_OVER = "round_robin"  # a policy that hands every prompt to a prefill worker


@dataclass(slots=True)
class _Measured:
    """What the client saw of a cluster that had nothing else to do."""

    singles: list[RequestTiming]
    streams: dict[int, list[list[RequestTiming]]]  # so many at once, several times


def measure_served(config: Config, timing: Profile, *, shares_cores: bool) -> Overheads:
    """Start a cluster of `config` and time requests. `timing`: of this machine, without overheads.
    The slowdowns are found where the workers share cores. Raises ProfileError."""
    with served(config) as (url, model):
        start_s = settled(url)
        overheads, gap_s, tokens_per_word = asyncio.run(_measure_alone(url, model, timing))
    overheads = replace(overheads, start_s=start_s)
    if not shares_cores:
        return overheads
    timing = replace(timing, overheads=overheads)

    def service_s(words: int, tokens: int) -> float:
        return alone_s(timing, int(words * tokens_per_word)) + tokens * gap_s

    planned = plan_mixture(service_s)
    # Prompts and streams have to meet on two workers, whatever that costs.
    hands_over = structs.replace(config, router=structs.replace(config.router, policy=HANDS_OVER))
    with served(hands_over) as (url, model):
        settled(url)
        return contention_of(timing, asyncio.run(_measure_mixture(url, model, planned)))


def settled(url: str) -> float:
    """Once its Ray has started too, which takes cores. Returns what its slowest worker took to
    start. Raises ProfileError."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, auth=OwnKey()) as http:
        while not (found := http.get("/status").json())["controller"].get("has_ray"):
            if time.monotonic() > deadline:
                raise ProfileError(f"Ray has not started {START_TIMEOUT_S:g} s after the workers")
            time.sleep(0.1)
    return max(float(worker.get("start_s") or 0.0) for worker in found["workers"])


async def _measure_alone(url: str, model: str, timing: Profile) -> tuple[Overheads, float, float]:
    """Measures what `_alone` does, and how many tokens a word makes."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, auth=OwnKey()) as http:
        asker = _Asker(url, model, http)
        overheads, gap_s = _alone(timing, await _send(asker))
        return overheads, gap_s, asker.num_tokens / asker.num_words


async def _measure_mixture(url: str, model: str, planned: Sequence[Mixed]) -> list[RequestTiming]:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, auth=OwnKey()) as http:
        return await _send_mixture(_Asker(url, model, http), planned)


def _alone(timing: Profile, seen: _Measured) -> tuple[Overheads, float]:
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


def least_gap_s(rounds: Sequence[Sequence[RequestTiming]]) -> float | None:
    """The median gap of the quickest round. None if in none all streamed at once: short ones may be
    over before the last prompt is computed."""
    gaps = [found for timings in rounds if (found := gaps_together(timings))]
    return min(map(statistics.median, gaps)) if gaps else None


def gaps_together(timings: Sequence[RequestTiming]) -> list[float]:
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

    async def ask(self, num_words: int, num_tokens: int) -> RequestTiming:
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


async def _send(asker: _Asker) -> _Measured:
    for _ in range(2):  # the first requests connect peers
        await asker.ask(PROMPT_WORDS, STREAM_TOKENS)
    singles = [await asker.ask(SINGLE_WORDS, 4) for _ in range(NUM_SINGLE)]
    streams: dict[int, list[list[RequestTiming]]] = {number: [] for number in STREAMS}
    for number in STREAM_ROUNDS * STREAMS:
        asked = [asker.ask(PROMPT_WORDS, STREAM_TOKENS) for _ in range(number)]
        streams[number].append(list(await asyncio.gather(*asked)))
    return _Measured(singles, streams)


async def _send_mixture(asker: _Asker, planned: Sequence[Mixed]) -> list[RequestTiming]:
    """Each at its time, whatever the others do."""

    async def ask(each: Mixed) -> RequestTiming:
        await asyncio.sleep(each.at_s)
        return await asker.ask(each.num_words, each.num_tokens)

    return list(await asyncio.gather(*map(ask, planned)))


@contextmanager
def served(config: Config) -> Iterator[tuple[str, str]]:
    """URL and model of a server of its own, that keeps nothing and asks clients for no key."""
    with tempfile.TemporaryDirectory() as folder:
        yield from _served(config, folder)


def _served(config: Config, state_dir: str) -> Iterator[tuple[str, str]]:
    config = structs.replace(
        config,
        api=structs.replace(config.api, host="127.0.0.1", port=0, key="", operations_key=""),
        sessions=structs.replace(config.sessions, durable=False, state_dir=state_dir),
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
