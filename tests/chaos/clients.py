"""Clients: streams of fixed requests, again and again, each compared with its answer at rest."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

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
    """One stream that has ended. Times are of `time.monotonic`."""

    request: int
    url: str
    began_at: float
    ended_at: float
    text: str
    error: str  # "": none
    silence_s: float  # the longest between two chunks
    silent_at: float  # when that began


async def run_stream(http: httpx.AsyncClient, url: str, number: int, body: Any) -> Stream:
    began = last = time.monotonic()
    silence, silent_at, text, error = 0.0, began, "", ""
    is_done = False
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                error = f"{answer.status_code}: {(await answer.aread())[:160]!r}"
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    is_done = True
                    break
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    error = str(chunk["error"].get("message", chunk["error"]))[:160]
                    break
                now = time.monotonic()
                if text and now - last > silence:
                    silence, silent_at = now - last, last
                last = now
                text += chunk["choices"][0]["text"] if chunk["choices"] else ""
    except httpx.HTTPError as failure:
        error = f"{type(failure).__name__}: {failure}"
    if not error and not is_done:
        error = "the stream was cut off"
    return Stream(number, url, began, time.monotonic(), text, error, silence, silent_at)


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
        async with self._client() as http:
            for number, body in enumerate(self._bodies):
                stream = await run_stream(http, self._urls[0], number, body)
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
        async with self._client() as http:
            while not self._stopping:
                number = (number + self._num_streams) % len(self._bodies)
                url = self._urls[place % len(self._urls)]
                stream = await run_stream(http, url, number, self._bodies[number])
                self.ended.append(stream)
                if stream.error:
                    await asyncio.sleep(PAUSE_S)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))
