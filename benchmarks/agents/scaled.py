"""Sessions of coding agents, made so much shorter and faster that a small machine can serve them.

The sessions are those that `kvrelay replay` reads. Every block becomes a few tokens that are drawn
by its name, so that two prompts share after the scaling what they shared before; where an answer is
part of the next prompt, that has the tokens that the server answered.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any

from benchmarks.elastic.load import Figures, ttft
from benchmarks.serving.conversations import http_client, tokens_by_source
from kvrelay.lab.bench.load import Client, LoadSpec, RequestTiming
from kvrelay.lab.replay.trace import Trace, TraceRequest

TOKENS = range(1_000, 40_000)  # prompts are made of these: any vocabulary has them


@dataclass(frozen=True, slots=True)
class Scale:
    """How sessions are made smaller."""

    tokens: int = 32  # so many become one
    most_turns: int = 16  # an agent has no more
    most_think_s: float = 20.0


@dataclass(slots=True)
class Turn:
    """A request of an agent, scaled."""

    request: TraceRequest
    agent: str  # its session, and which of the agents in it
    done: asyncio.Event = field(default_factory=asyncio.Event)
    prompt: list[int] = field(default_factory=list)
    timing: RequestTiming | None = None  # None: it was not sent, since one before it failed

    @property
    def answer(self) -> Sequence[int]:
        return () if self.timing is None else self.timing.token_ids

    @property
    def has_failed(self) -> bool:
        return self.timing is None or self.timing.error is not None


def turns_of(trace: Trace, scale: Scale) -> dict[int, Turn]:
    """By number, those that are sent: the first of each agent, if what they wait for is sent."""
    turns: dict[int, Turn] = {}
    agents = Counter[str]()  # by session, how many
    for number, request in enumerate(trace.requests):
        waits_for = [turns.get(before) for before in request.after]
        if request.turn >= scale.most_turns or None in waits_for:
            continue
        before = (each.agent for each in waits_for if each and each.request.turn < request.turn)
        if (agent := next(before, None)) is None:
            session = str(request.session)
            agents[session] += 1
            agent = session if agents[session] == 1 else f"{session}~{agents[session]}"
        turns[number] = Turn(request, agent)
    return turns


def prompt_of(
    turn: Turn, trace: Trace, scale: Scale, turns: Mapping[int, Turn], seed: int
) -> list[int]:
    size = trace.block_tokens // scale.tokens
    length = -(-turn.request.input_length // scale.tokens)
    prompt: list[int] = []
    for block in turn.request.block_ids:
        rng = Random(f"{seed} {block}")
        drawn = [rng.choice(TOKENS) for _ in range(size)]
        for part in trace.answers.get(block, ()):
            before = turns.get(part.request)
            if before is None:
                continue
            begins = -(-before.request.input_length // scale.tokens)
            for at in range(-(-part.start // scale.tokens), -(-part.end // scale.tokens)):
                index = len(prompt) + at - begins
                if at < size and 0 <= index < len(before.answer):
                    drawn[at] = before.answer[index]
        prompt += drawn
    return prompt[:length]


async def run_sessions(
    url: str, model: str, trace: Trace, scale: Scale, seed: int, on_turn: Callable[[], None]
) -> tuple[dict[int, Turn], float]:
    """All turns, each when those before it have ended and its agent has thought; and the seconds
    that they took together."""
    turns = turns_of(trace, scale)
    spec = LoadSpec(url, model, len(turns), concurrency=1, endpoint="completions")

    async def live(client: Client, turn: Turn) -> None:
        request = turn.request
        before = [turns[number] for number in request.after]
        try:
            for each in before:
                await each.done.wait()
            if any(each.has_failed for each in before):
                return
            await asyncio.sleep(
                min(request.think_s if before else request.at_s, scale.most_think_s)
            )
            turn.prompt = prompt_of(turn, trace, scale, turns, seed)
            turn.timing = await client.send("/v1/completions", body_of(model, turn, scale))
        finally:
            turn.done.set()
            on_turn()

    async with http_client(url) as http:
        client = Client(spec, http, lambda _: None)
        await asyncio.gather(*(live(client, turn) for turn in turns.values()))
        return turns, client.now()


def body_of(model: str, turn: Turn, scale: Scale) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": turn.prompt,
        "max_tokens": -(-turn.request.output_length // scale.tokens),
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "prompt_cache_key": turn.agent,
    }


def figures(trace: Trace, scale: Scale, turns: Mapping[int, Turn], elapsed_s: float) -> Figures:
    good = [turn for turn in turns.values() if not turn.has_failed]
    first = [turn.timing for turn in good if turn.timing and not turn.request.after]
    later = [turn for turn in good if turn.request.after]
    timings = [turn.timing for turn in later if turn.timing]
    reusable = sum(min(turn.request.reusable // scale.tokens, len(turn.prompt)) for turn in later)
    sources = tokens_by_source(timings)
    found = sum(count for source, count in sources.items() if source != "computed")
    failed = {turn.request.session for turn in turns.values() if turn.has_failed}
    sessions: defaultdict[str | None, list[RequestTiming]] = defaultdict(list)
    for turn in good:
        if turn.timing and turn.request.session not in failed:
            sessions[turn.request.session].append(turn.timing)
    took_s = [
        max(each.ended_at for each in its) - min(each.sent_at for each in its)
        for its in sessions.values()
    ]
    return {
        **ttft("first", first, (50, 90)),
        **ttft("later", timings, (50, 90, 99)),
        "cached_share": found / max(1, sum(timing.num_prompt_tokens for timing in timings)),
        "of_reusable": found / max(1, reusable),
        **{f"from_{name}": float(count) for name, count in sources.items()},
        "session_p50_s": median(took_s or [0.0]),
        "turns": float(len(turns)),
        "failed": float(sum(turn.has_failed for turn in turns.values())),
        "elapsed_s": elapsed_s,
    }


def most_tokens(trace: Trace, scale: Scale) -> int:
    """What all agents have in their prompts and answers at their longest, together: as much KV as
    holds all of them, but for what they share."""
    longest: dict[str, int] = {}
    for turn in turns_of(trace, scale).values():
        request = turn.request
        tokens = (request.input_length + request.output_length) // scale.tokens + 1
        longest[turn.agent] = max(longest.get(turn.agent, 0), tokens)
    return sum(longest.values())
