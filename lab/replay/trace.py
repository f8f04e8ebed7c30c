"""What is replayed: requests with their arrival, their sizes, and what of them is shared.

A prompt is named by the ids of its blocks of `Trace.block_tokens` tokens. Ids are chained: equal
ids mean equal tokens from the start of the prompt to the end of that block.

Synthetic traffic (conversations, and requests that share nothing) is a pure function of its numbers
and a seed. Conversations run already when the trace
begins, so that its first minute is like any other: what came before the beginning is made too, and
left out. Equal block ids mean equal beginnings: of a system prompt within its tenant, and of a
conversation's earlier prompts and answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, islice, pairwise

import numpy as np
from numpy.random import Generator


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. Without `block_ids` nothing of its prompt is shared with any other."""

    at_s: float  # arrival, from the start of the trace
    input_length: int  # tokens
    output_length: int
    block_ids: Sequence[int] = ()  # the last one may be partial
    session: str | None = None
    tenant: str = ""
    priority: int = 0
    model: str = ""  # by its name; "": there is one
    after: tuple[int, ...] = ()  # requests, by number, that end before it: it then waits `think_s`
    think_s: float = 0.0
    turn: int = 0  # 0: the first one of its agent
    reusable: int = 0  # leading tokens that earlier requests of the closed loop have, or answers


@dataclass(frozen=True, slots=True)
class Answered:
    """Tokens [start, end) of a block are part of the answer to a request."""

    start: int
    end: int
    request: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival; with `after` that is the published one."""

    name: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int = 512
    notes: tuple[str, ...] = field(default=())  # what a reader had to mend, one line each
    answers: Mapping[int, tuple[Answered, ...]] = field(default_factory=dict)  # in blocks, by id

    @property
    def is_closed(self) -> bool:
        """Requests wait for the answers of others."""
        return any(request.after for request in self.requests)

    @property
    def duration_s(self) -> float:
        """From the start of the trace to its last arrival."""
        return self.requests[-1].at_s if self.requests else 0.0


def by_model(trace: Trace) -> dict[str, Trace]:
    """What each model is asked, at the same times: models share no worker, queue or KV."""
    requests: dict[str, list[TraceRequest]] = {}
    for request in trace.requests:
        requests.setdefault(request.model, []).append(request)
    return {name: replace(trace, requests=tuple(its)) for name, its in sorted(requests.items())}


MAX_SPREAD_S = 1.0  # copies of one request come within this


def multiplied(trace: Trace, copies: int) -> Trace:
    """`copies` times the traffic in the same time: every request comes so often, spread evenly
    until the next one of the trace arrives, but over `MAX_SPREAD_S` at most, so that a silence
    stays one. Copies share nothing with each other: they are other users."""
    if copies == 1:
        return trace
    requests = trace.requests
    stride = 1 + max((max(r.block_ids, default=-1) for r in requests), default=-1)
    gaps = [min(MAX_SPREAD_S, b.at_s - a.at_s) for a, b in pairwise(requests)] + [0.0]
    made = [
        replace(
            request,
            at_s=request.at_s + gap * copy / copies,
            block_ids=tuple(copy * stride + each for each in request.block_ids),
            session=None if request.session is None else f"{request.session} {copy}",
        )
        for request, gap in zip(requests, gaps, strict=True)
        for copy in range(copies)
    ]
    made.sort(key=lambda request: request.at_s)
    return replace(trace, name=f"{trace.name} x {copies}", requests=tuple(made))


NUM_MEASURED = 1_000  # conversations that tell how many turns one has, and how long it goes on


@dataclass(frozen=True, slots=True)
class Size:
    """A log-normal size: half lie below `median`; `sigma` is the deviation of the logarithm. None
    is above `most`."""

    median: float
    sigma: float
    most: float

    def draw(self, rng: Generator) -> float:
        return min(self.most, float(rng.lognormal(math.log(self.median), self.sigma)))

    def tokens(self, rng: Generator) -> int:
        return max(1, round(self.draw(rng)))


@dataclass(frozen=True, slots=True)
class Bursts:
    """A Markov-modulated Poisson process of two states: for exponentially distributed times that
    last `quiet_s` and `burst_s` in the mean, arrivals are `factor` times as frequent in bursts."""

    factor: float
    burst_s: float
    quiet_s: float


@dataclass(frozen=True, slots=True)
class ConversationShape:
    """What conversations are like. `think` counts from the end of an answer, which comes at
    `token_s` a token: arrivals are fixed beforehand, and do not wait for the cluster."""

    tenants: int  # the n-th has 1/n of the first one's conversations
    system_prompts: int  # each tenant's; used 1, 1/2, 1/3, ... as often
    system: Size  # tokens of a system prompt
    turns: float  # mean; geometrically distributed
    user: Size  # tokens that a turn adds to the conversation
    answer: Size  # tokens
    think: Size  # seconds
    max_turns: int = 100
    max_input: int = 32_768  # a conversation ends before a longer prompt
    token_s: float = 0.03
    bursts: Bursts | None = None


@dataclass(frozen=True, slots=True)
class Unshared:
    """Requests on their own: no prompt begins like another."""

    prompt: Size
    answer: Size


_CHAT = ConversationShape(
    tenants=4,
    system_prompts=3,
    system=Size(800, 0.6, 4_000),
    turns=4,
    user=Size(120, 1.2, 8_000),
    answer=Size(220, 0.8, 2_000),
    think=Size(25, 1.0, 600),
)
# Medians and logarithmic deviations of 240 sessions of Claude Code (kv-cache-tester, commit
# 94f6046): 17,411 requests, of whose prompt tokens 96.6 % had been seen before. Think times above
# ten minutes (3 %) count as ten; a session ends where its agent would shorten the prompt.
_AGENTS = ConversationShape(
    tenants=2,
    system_prompts=4,
    system=Size(14_900, 0.15, 20_000),  # tools and system prompt
    turns=72,
    user=Size(330, 1.8, 50_000),  # what a prompt has beyond the one before and its answer
    answer=Size(213, 0.9, 18_000),
    think=Size(8.5, 1.4, 600),
    max_turns=350,
    max_input=200_000,
    token_s=0.0152,
)
PRESETS: dict[str, tuple[str, ConversationShape | Unshared]] = {
    "chat": ("people, about 4 turns, 4 tenants", _CHAT),
    "agents": ("coding agents, about 70 turns, long prompts that grow", _AGENTS),
    "bursts": (
        "chat, 8 times as many new ones in bursts of 30 s",
        replace(_CHAT, bursts=Bursts(factor=8, burst_s=30, quiet_s=270)),
    ),
    "unshared": (
        "single requests that share nothing",
        Unshared(prompt=Size(2_000, 1.0, 32_768), answer=Size(250, 0.8, 2_000)),
    ),
}


def preset(name: str, requests: int, rate: float, seed: int, block_tokens: int = 512) -> Trace:
    """`requests` of PRESETS[name], `rate` a second in the mean."""
    _, kind = PRESETS[name]
    title = f"synthetic:{name}"
    if isinstance(kind, Unshared):
        return unshared(kind, requests, rate, seed, block_tokens, title)
    return synthetic(kind, requests, rate, seed, block_tokens, title)


def unshared(
    kind: Unshared,
    requests: int,
    rate: float,
    seed: int = 0,
    block_tokens: int = 512,
    name: str = "unshared",
) -> Trace:
    """Poisson arrivals, `rate` a second, of prompts that have nothing in common."""
    rng = np.random.default_rng(seed)
    starts = _arrivals(rng, rate, 0.0, None)
    made = tuple(
        TraceRequest(next(starts), kind.prompt.tokens(rng), kind.answer.tokens(rng))
        for _ in range(requests)
    )
    return Trace(name, made, block_tokens)


@dataclass(slots=True)
class _System:
    """A system prompt. `ids` are those of its whole blocks."""

    tenant: str
    tokens: int
    ids: tuple[int, ...]


@dataclass(slots=True)
class _Turn:
    after_s: float  # the start of the conversation
    input_length: int
    output_length: int


@dataclass(slots=True)
class _Talk:
    """A conversation under way. Invariant: `ids` are those of its first blocks, as many as its
    longest prompt so far has; the last of them may since have been filled up."""

    session: str
    system: _System
    turns: list[_Turn]
    ids: list[int] = field(default_factory=list)

    def request(
        self, at_s: float, index: int, block_tokens: int, ids: Iterator[int]
    ) -> TraceRequest:
        turn = self.turns[index]
        num_blocks = -(-turn.input_length // block_tokens)
        while len(self.ids) < num_blocks:
            self.ids.append(next(ids))
        return TraceRequest(
            at_s=at_s,
            input_length=turn.input_length,
            output_length=turn.output_length,
            block_ids=tuple(self.ids[:num_blocks]),
            session=self.session,
            tenant=self.system.tenant,
        )


def synthetic(
    kind: ConversationShape,
    requests: int,
    rate: float,
    seed: int = 0,
    block_tokens: int = 512,
    name: str = "conversations",
) -> Trace:
    """Conversations that together send `rate` requests a second in the mean, until there are
    `requests`."""
    mean_turns, warm_s = _measured(kind)
    rng = np.random.default_rng(seed)
    ids = count()
    systems = _systems(kind, rng, block_tokens, ids)
    turns: list[tuple[float, int, int, _Talk]] = []  # to come: when, whose (a number), which
    made: list[TraceRequest] = []
    for number, start_s in enumerate(_arrivals(rng, rate / mean_turns, -warm_s, kind.bursts)):
        # What begins from now on has no turn before now.
        while turns and turns[0][0] <= start_s and len(made) < requests:
            at_s, _, index, talk = heappop(turns)
            if at_s >= 0:
                made.append(talk.request(at_s, index, block_tokens, ids))
        if len(made) == requests:
            break
        system = systems[_zipf(rng, kind.tenants)][_zipf(rng, kind.system_prompts)]
        talk = _Talk(f"conversation-{number}", system, _turns(kind, rng, system.tokens))
        talk.ids.extend(system.ids)
        for index, turn in enumerate(talk.turns):
            if start_s + turn.after_s >= 0:
                heappush(turns, (start_s + turn.after_s, number, index, talk))
    return Trace(name, tuple(made), block_tokens)


def _measured(kind: ConversationShape) -> tuple[float, float]:
    """How many turns a conversation has in the mean, and how many seconds nearly all of them end
    within. The limits on sizes have their part in both, so they are counted, not computed."""
    rng = np.random.default_rng(0)
    talks = [_turns(kind, rng, kind.system.tokens(rng)) for _ in range(NUM_MEASURED)]
    lengths_s = [turns[-1].after_s for turns in talks]
    return sum(map(len, talks)) / len(talks), float(np.percentile(lengths_s, 99))


def _systems(
    kind: ConversationShape, rng: Generator, block_tokens: int, ids: Iterator[int]
) -> list[list[_System]]:
    """Returns what each has: [tenants][system prompts]."""
    lengths = [
        [kind.system.tokens(rng) for _ in range(kind.system_prompts)] for _ in range(kind.tenants)
    ]
    return [
        [
            _System(f"tenant-{number}", length, tuple(islice(ids, length // block_tokens)))
            for length in row
        ]
        for number, row in enumerate(lengths)
    ]


def _turns(kind: ConversationShape, rng: Generator, system_tokens: int) -> list[_Turn]:
    """Draws at least one of them."""
    num_turns = min(kind.max_turns, int(rng.geometric(1 / kind.turns)))
    turns: list[_Turn] = []
    at_s, length = 0.0, system_tokens
    for _ in range(num_turns):
        length += kind.user.tokens(rng)
        if length > kind.max_input:
            break
        answer = kind.answer.tokens(rng)
        turns.append(_Turn(at_s, length, answer))
        at_s += answer * kind.token_s + kind.think.draw(rng)
        length += answer
    return turns or [_Turn(0.0, kind.max_input, kind.answer.tokens(rng))]


def _arrivals(
    rng: Generator, rate: float, start_s: float, bursts: Bursts | None
) -> Iterator[float]:
    """Moments from `start_s` on, without end: `rate` a second in the mean."""
    if bursts is None:
        at_s = start_s
        while True:
            at_s += rng.exponential(1 / rate)
            yield at_s
    share = bursts.burst_s / (bursts.burst_s + bursts.quiet_s)  # in time
    quiet_rate = rate / (1 + share * (bursts.factor - 1))
    is_burst = rng.random() < share
    at_s, until_s = start_s, start_s  # how long a state still lasts does not depend on its past
    while True:
        until_s += rng.exponential(bursts.burst_s if is_burst else bursts.quiet_s)
        while True:
            at_s += rng.exponential(1 / (quiet_rate * (bursts.factor if is_burst else 1)))
            if at_s > until_s:
                break
            yield at_s
        at_s, is_burst = until_s, not is_burst


def _zipf(rng: Generator, number: int) -> int:
    """Draws one of range(number): n with weight 1 / (n + 1)."""
    weights = np.cumsum(1 / np.arange(1, number + 1))
    return int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))
