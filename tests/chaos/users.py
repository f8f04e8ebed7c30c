"""Who is there beside streams on a day in operation: agents that talk on, and batches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import httpx

from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.lab.bench.load import Client
from tests.chaos.clients import PAUSE_S, THINGS, TIMEOUT_S, Stream, client_of, run_stream

TURNS, TURN_TOKENS = 8, 40
THINK_S = (0.5, 4.0)  # what a tool takes
ROWS, ROW_TOKENS = 16, 24
BATCH_S = 900.0  # it is answered by then, whatever is done to the system
ASKED_AGAIN_S = 120.0  # as clients do whose connection is lost
FAILED = ("failed", "expired", "cancelled")


def _chat(model: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "model": model,
        "messages": list(messages),
        "max_tokens": TURN_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }


class Agent:
    """One conversation, again and again: each turn has all turns before it, and there is a pause
    between two. Each time it is another session."""

    def __init__(self, model: str, number: int) -> None:
        self._model, self._number = model, number
        self._turns: list[tuple[dict[str, Any], str]] = []  # a body, and what is said at rest

    async def learn(self, client: Client) -> None:
        thing = THINGS[self._number % len(THINGS)]
        rules = f"You are agent {self._number} and look after a {thing}. " + "Be brief. " * 60
        messages = [{"role": "system", "content": rules}]
        for turn in range(TURNS):
            result = f"Tool {turn} says: the {thing} is at step {turn}. " * 3
            messages.append({"role": "user", "content": result})
            body = _chat(self._model, messages)
            text = (await run_stream(client, "/v1/chat/completions", body)).text
            self._turns.append((body, text))
            messages.append({"role": "assistant", "content": text})

    async def run(self, url: str, take: Callable[[Stream], None], is_over: asyncio.Event) -> None:
        random = Random(self._number)
        async with client_of(url) as client:
            for session in range(1 << 30):
                key = {"prompt_cache_key": f"agent-{self._number}-{session}"}
                for body, known in self._turns:
                    if is_over.is_set():
                        return
                    take(await run_stream(client, "/v1/chat/completions", body | key, known))
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(is_over.wait(), random.uniform(*THINK_S))


class Batches:
    """One file of requests after the other, each awaited and compared row by row."""

    def __init__(self, model: str) -> None:
        self._bodies = [
            {
                "model": model,
                "prompt": f"Row {row}: a note about a {THINGS[row % len(THINGS)]}. " * 4,
                "max_tokens": ROW_TOKENS,
                "temperature": 0.0,
            }
            for row in range(ROWS)
        ]
        self._known: dict[str, str] = {}

    async def learn(self, client: Client) -> None:
        for row, body in enumerate(self._bodies):
            streamed = body | {"stream": True}
            self._known[str(row)] = (await run_stream(client, "/v1/completions", streamed)).text

    async def run(self, url: str, take: Callable[[Stream], None], is_over: asyncio.Event) -> None:
        async with self._client(url) as client:
            while not is_over.is_set():
                try:
                    for stream in await self._batch(client):
                        take(stream)
                except (httpx.HTTPError, TimeoutError, ValueError, KeyError) as error:
                    take(Stream(time.monotonic(), "", f"a batch: {error!r}", 0.0))
                    await asyncio.sleep(PAUSE_S)

    @asynccontextmanager
    async def _client(self, url: str) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, auth=OwnKey()) as client:
            yield client

    async def _batch(self, client: httpx.AsyncClient) -> list[Stream]:
        lines = [
            {"custom_id": str(row), "method": "POST", "url": "/v1/completions", "body": body}
            for row, body in enumerate(self._bodies)
        ]
        text = "\n".join(map(json.dumps, lines))
        files, purpose = {"file": ("rows.jsonl", text)}, {"purpose": "batch"}
        file = (await ask(client, "POST", "/v1/files", files=files, data=purpose)).json()["id"]
        order = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await ask(client, "POST", "/v1/batches", json=order)).json()
        async with asyncio.timeout(BATCH_S):
            while batch["status"] != "completed":
                if batch["status"] in FAILED:
                    raise ValueError(f"{batch['status']}: {batch.get('errors')}")
                await asyncio.sleep(1.0)
                batch = (await ask(client, "GET", f"/v1/batches/{batch['id']}")).json()
        answers = await ask(client, "GET", f"/v1/files/{batch['output_file_id']}/content")
        for each in (file, batch["output_file_id"]):
            await ask(client, "DELETE", f"/v1/files/{each}")
        rows = {row["custom_id"]: row for row in map(json.loads, answers.text.splitlines())}
        return [self._stream(number, rows.get(number)) for number in self._known]

    def _stream(self, number: str, row: dict[str, Any] | None) -> Stream:
        now = time.monotonic()
        if row is None or row["error"] or row["response"]["status_code"] != 200:
            return Stream(now, "", f"row {number}: {row}", 0.0)
        text = row["response"]["body"]["choices"][0]["text"]
        return Stream(now, text, None, 0.0, altered=text != self._known[number])


async def ask(client: httpx.AsyncClient, method: str, path: str, **what: Any) -> httpx.Response:
    """Retries while connections fail or the answer asks for it. Raises HTTPError after 120 s."""
    deadline = time.monotonic() + ASKED_AGAIN_S
    while True:
        try:
            answer = await client.request(method, path, **what)
            if answer.status_code == 404 and method == "DELETE":  # the first time, it was
                return answer
            return answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            is_busy = error.response.status_code in (429, 502, 503, 507)
            if not is_busy or time.monotonic() > deadline:
                raise
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(1.0)
