"""Conversations of many turns with an OpenAI-compatible server.

A turn is sent with all that was said before, as agents and chats do, and its answer is a part of
the next. `run_agents` holds many of them at once, with time to think between their turns: enough,
with a small KV cache, that the others push a conversation out of it before it goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from kvrelay.lab.bench.load import Client, LoadSpec, RequestTiming, make_prompts, percentile

Messages = list[dict[str, str]]
NEXT_MESSAGES = (
    "And what would you say is the most important word in it, in a few words?",
    "Now think of the opposite of that word, and say why it is the opposite.",
    "Which of the things named so far would you want to have beside you, and why?",
)


class LoadFailed(Exception):
    """A request was not answered; one line."""


@dataclass(slots=True)
class Conversation:
    """What was said so far, and how long each answer took. Owned by the one who sends its turns,
    one at a time."""

    name: str
    messages: Messages = field(default_factory=list)
    timings: list[RequestTiming] = field(default_factory=list)

    async def say(self, client: Client, text: str, **more: Any) -> RequestTiming:
        """The next turn. Raises LoadFailed."""
        said = [*self.messages, {"role": "user", "content": text}]
        timing = await client.chat(said, **more)
        if timing.error is not None:
            raise LoadFailed(f"{self.name}, turn {len(self.timings) + 1}: {timing.error}")
        self.messages = [*said, {"role": "assistant", "content": timing.text}]
        self.timings.append(timing)
        return timing


def http_client(url: str, timeout_s: float = 600.0) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits)


@dataclass(frozen=True, slots=True)
class AgentsSpec:
    """What each of the agents does."""

    num_agents: int = 12
    num_turns: int = 4
    context_len: int = 1500  # tokens that only this agent begins with, about
    message_len: int = 40  # tokens that each later turn adds, about
    output_len: int = 32
    think_s: float = 20.0  # between an answer and the next turn, on average
    seed: int = 0

    @property
    def final_len(self) -> int:
        """Tokens of a conversation at its end, at most about."""
        template = 40 + 12 * self.num_turns
        later = (self.num_turns - 1) * (self.message_len + self.output_len)
        return self.context_len + later + self.output_len + template


async def run_agents(
    url: str, model: str, spec: AgentsSpec, on_turn: Callable[[], None], *, named: bool
) -> tuple[list[Conversation], float]:
    """All conversations, and the seconds that they took together. `named`: tell the server which
    conversation a turn belongs to, by `prompt_cache_key`. Raises LoadFailed."""
    load = LoadSpec(url, model, spec.num_agents, concurrency=1, output_len=spec.output_len)
    contexts = make_prompts(
        LoadSpec("", "", spec.num_agents, input_len=spec.context_len, seed=spec.seed)
    )
    talks = [Conversation(f"agent-{spec.seed}-{i}") for i in range(spec.num_agents)]

    async def live(client: Client, i: int) -> None:
        rng = Random(spec.seed * 1009 + i)
        texts = make_prompts(
            LoadSpec("", "", spec.num_turns, input_len=spec.message_len, seed=rng.randrange(2**32))
        )
        more = {"prompt_cache_key": talks[i].name} if named else {}
        await asyncio.sleep(i * spec.think_s / spec.num_agents)  # they do not all begin at once
        for turn in range(spec.num_turns):
            if turn:
                await asyncio.sleep(spec.think_s * rng.uniform(0.5, 1.5))
            await talks[i].say(client, texts[turn] if turn else contexts[i], **more)
            on_turn()

    async with http_client(url) as http:
        client = Client(load, http, lambda _: None)
        await asyncio.gather(*(live(client, i) for i in range(spec.num_agents)))
        return talks, client.now()


def summarize_agents(talks: Sequence[Conversation], elapsed_s: float) -> dict[str, Any]:
    """First turns, whose context is new to everybody, apart from the later ones."""
    first = [talk.timings[0] for talk in talks]
    later = [timing for talk in talks for timing in talk.timings[1:]]
    num_output = sum(timing.num_output_tokens for timing in (*first, *later))
    num_prompt = sum(timing.num_prompt_tokens for timing in later)
    return {
        "elapsed_s": round(elapsed_s, 3),
        "output_tokens_per_s": round(num_output / elapsed_s, 3),
        "first_ttft_p50_s": percentile([timing.ttft_s for timing in first], 50),
        "later_ttft_p50_s": percentile([timing.ttft_s for timing in later], 50),
        "later_ttft_p90_s": percentile([timing.ttft_s for timing in later], 90),
        "later_cached_share": round(
            sum(timing.num_cached_tokens for timing in later) / max(1, num_prompt), 4
        ),
        "later_tokens_by_source": tokens_by_source(later),
    }


def tokens_by_source(timings: Sequence[RequestTiming]) -> dict[str, int]:
    """Prompt tokens by where their KV came from; "computed": from nowhere. A server that does not
    say where has "cached"."""
    found = {"computed": 0}
    for timing in timings:
        details = timing.usage.get("prompt_tokens_details") or {}
        sources = dict(details.get("cached_tokens_by_source") or {})
        if unknown := timing.num_cached_tokens - sum(sources.values()):
            sources["cached"] = unknown
        sources["computed"] = timing.num_prompt_tokens - timing.num_cached_tokens
        for source, count in sources.items():
            found[source] = found.get(source, 0) + count
    return found
