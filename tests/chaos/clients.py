"""Clients: streams of fixed requests, again and again, each compared with its answer at rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from kvrelay.lab.bench.load import Client, LoadSpec

TIMEOUT_S = 120.0
PAUSE_S = 0.5  # after a failure, as a client would wait

THINGS = ("lighthouse", "river", "clockmaker", "glacier", "harbour", "orchard", "comet", "archive")


def requests_of(model: str, count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Every other one greedy, the others drawn with a seed; every third one a session's turn."""
    return [
        {
            "model": model,
            "prompt": f"A long story about a {THINGS[i % len(THINGS)]}, number {i}. " * 4,
            "max_tokens": max_tokens,
            "temperature": 0.8 if i % 2 else 0.0,
            "seed": i,
            "ignore_eos": True,
            "stream": True,
            **({} if i % 3 else {"prompt_cache_key": f"story-{i}"}),
        }
        for i in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Stream:
    """What became of one stream. `ended_at` is by `time.monotonic`."""

    request: int
    ended_at: float
    text: str
    error: str | None
    silence_s: float  # the longest between two chunks


async def run_stream(client: Client, number: int, body: Any) -> Stream:
    timing = await client.send("/v1/completions", body)
    silence_s = max(timing.gaps_s, default=0.0)
    return Stream(number, time.monotonic(), timing.text, timing.error, silence_s)


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[Client]:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        yield Client(LoadSpec(url, "", 0, timeout_s=TIMEOUT_S), http, lambda _: None)


class Clients:
    """Owned by a run. `ended` grows while they run."""

    def __init__(self, urls: Sequence[str], bodies: Sequence[Any], num_streams: int) -> None:
        self._urls, self._bodies, self._num_streams = urls, bodies, num_streams
        self.known: dict[int, str] = {}
        self.ended: list[Stream] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def learn(self) -> None:
        """What each request says at rest. Raises RuntimeError."""
        async with client_of(self._urls[0]) as client:
            for number, body in enumerate(self._bodies):
                stream = await run_stream(client, number, body)
                if stream.error:
                    raise RuntimeError(f"request {number} fails at rest: {stream.error}")
                self.known[number] = stream.text

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(self._num_streams)]

    async def stop(self) -> None:
        """When those that run have ended."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def is_altered(self, stream: Stream) -> bool:
        return not stream.error and stream.text != self.known[stream.request]

    async def _run(self, place: int) -> None:
        number = place
        async with client_of(self._urls[place % len(self._urls)]) as client:
            while not self._stopping:
                number = (number + self._num_streams) % len(self._bodies)
                stream = await run_stream(client, number, self._bodies[number])
                self.ended.append(stream)
                if stream.error:
                    await asyncio.sleep(PAUSE_S)
