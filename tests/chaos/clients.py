"""Clients: streams of fixed requests, again and again, each compared with its answer at rest; and
others beside them, who talk on or have files of requests answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

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

    ended_at: float
    text: str
    error: str | None
    silence_s: float  # the longest between two chunks
    altered: bool = False  # it is not what was said at rest


class User(Protocol):
    """Whoever uses a system beside the streams."""

    async def learn(self, client: Client) -> None:
        """What is said at rest. Raises RuntimeError."""

    async def run(self, url: str, take: Callable[[Stream], None], is_over: asyncio.Event) -> None:
        """Uses the system until it is over; `take` gets each answer."""


async def run_stream(
    client: Client, path: str, body: dict[str, Any], known: str | None = None
) -> Stream:
    """`known`: what is said at rest; None: that is to be learned, and RuntimeError is raised where
    the request fails."""
    timing = await client.send(path, body)
    if known is None and timing.error:
        raise RuntimeError(f"a request fails at rest: {timing.error}: {str(body)[:200]}")
    altered = known is not None and not timing.error and timing.text != known
    silence_s = max(timing.gaps_s, default=0.0)
    return Stream(time.monotonic(), timing.text, timing.error, silence_s, altered)


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[Client]:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        yield Client(LoadSpec(url, "", 0, timeout_s=TIMEOUT_S), http, lambda _: None)


class Clients:
    """Owned by a run. `ended` grows while they run. `others` are there beside the streams, each at
    one of the addresses."""

    def __init__(
        self,
        urls: Sequence[str],
        bodies: Sequence[Any],
        num_streams: int,
        others: Sequence[User] = (),
    ) -> None:
        self._urls, self._bodies, self._num_streams = urls, bodies, num_streams
        self._others = others
        self._known: dict[int, str] = {}
        self.ended: list[Stream] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = asyncio.Event()

    async def learn(self) -> None:
        """What each request says at rest. Raises RuntimeError."""
        async with client_of(self._urls[0]) as client:
            for number, body in enumerate(self._bodies):
                self._known[number] = (await run_stream(client, "/v1/completions", body)).text
            for other in self._others:
                await other.learn(client)

    def start(self) -> None:
        streams = [self._run(place) for place in range(self._num_streams)]
        others = [
            other.run(self._urls[place % len(self._urls)], self.ended.append, self._is_over)
            for place, other in enumerate(self._others)
        ]
        self._tasks = [asyncio.create_task(each) for each in (*streams, *others)]

    async def stop(self) -> None:
        """When those that run have ended."""
        self._is_over.set()
        await asyncio.gather(*self._tasks)

    async def _run(self, place: int) -> None:
        number = place
        async with client_of(self._urls[place % len(self._urls)]) as client:
            while not self._is_over.is_set():
                number = (number + self._num_streams) % len(self._bodies)
                body, known = self._bodies[number], self._known[number]
                stream = await run_stream(client, "/v1/completions", body, known)
                self.ended.append(stream)
                if stream.error:
                    await asyncio.sleep(PAUSE_S)
