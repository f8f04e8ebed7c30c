"""An open-loop load generator that costs little, for servers that share the machine with it.

HTTP/1.1 over asyncio's streams, kept alive, with answers read whole: a request takes 0.2 ms of a
core, a toy server's part included, where `lab.bench.load` (httpx) takes 1.6 ms; at ten times the
load that decides. Clients that are refused may come back after `Retry-After`, with the same
request.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from urllib.parse import urlsplit

from benchmarks.serving.first_light import MODEL
from kvrelay.lab.bench.load import LoadSpec, make_prompts

MAX_CONNECTIONS = 4096
MAX_REQUESTS = 200_000
PATIENCE_S = 120.0  # for an answer
MAX_IDLE_S = 3.0  # servers close what is idle for long
NUM_PROMPTS = 512  # different ones; a number at the head of each makes every request's its own

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str
    key: str
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """Requests of one tenant, at times that do not depend on the server."""

    caller: Caller
    rate: float  # requests/s
    seconds: float


@dataclass(slots=True)
class Answer:
    """What became of one request. Times in seconds since the start of the load."""

    caller: Caller
    due_at: float
    is_return: bool = False  # it was refused before, and comes back as it was told
    sent_at: float = 0.0
    ended_at: float = math.inf
    status: int = 0  # 0: there was none
    error: str = ""
    retry_after_s: float | None = None

    def is_good(self, deadline_s: float) -> bool:
        return self.status == 200 and self.ended_at - self.sent_at <= deadline_s


class Load:
    """Sends loads to one server, one after the other. Owns its connections while one runs."""

    def __init__(
        self, url: str, input_len: int, output_len: int, seed: int = 0, model: str = MODEL
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._host, self._port = parts.hostname, parts.port
        self._output_len, self._model = output_len, model
        spec = LoadSpec(url, model, NUM_PROMPTS, input_len=input_len, seed=seed)
        self._prompts = make_prompts(spec)
        self._rng = Random(seed)
        self._num_sent = 0
        self._start = 0.0
        self._idle: list[tuple[float, Connection]] = []  # since when, oldest first
        self._num_open = 0
        self._answers: list[Answer] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(
        self, offers: list[Offer], return_share: float, on_progress: Callable[[float], None]
    ) -> list[Answer]:
        """One answer for each time that a request was sent, returns too. Ends when all are there.
        `return_share`: of those refused, who come back; nobody does after the last offer's end."""
        self._answers, self._tasks = [], set()
        self._start = time.perf_counter()
        until_s = max(offer.seconds for offer in offers)
        arrivals: list[tuple[float, Caller]] = []
        for offer in offers:
            at = self._rng.expovariate(offer.rate)
            while at < offer.seconds:
                arrivals.append((at, offer.caller))
                at += self._rng.expovariate(offer.rate)
        arrivals.sort(key=lambda arrival: arrival[0])
        for at, caller in arrivals[:MAX_REQUESTS]:
            delay_s = at - self._now()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            on_progress(at)
            returns = self._rng.random() < return_share
            self._spawn(self._serve(caller, at, returns, until_s))
        while self._tasks:
            await asyncio.wait(self._tasks)
        for _, connection in self._idle:
            connection[1].close()
        self._idle.clear()
        self._num_open = 0
        return self._answers

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _spawn(self, call: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(call)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, caller: Caller, due_at: float, returns: bool, until_s: float) -> None:
        """Send a request, and again when it is refused and comes back in time."""
        request = self._request(caller)
        answer = await self._send(caller, due_at, request)
        while returns and answer.retry_after_s is not None:
            due_at = answer.ended_at + answer.retry_after_s
            if due_at >= until_s:
                return
            await asyncio.sleep(due_at - self._now())
            answer = await self._send(caller, due_at, request, is_return=True)

    async def _send(
        self, caller: Caller, due_at: float, request: bytes, *, is_return: bool = False
    ) -> Answer:
        answer = Answer(caller, due_at, is_return)
        self._answers.append(answer)
        try:
            async with asyncio.timeout(PATIENCE_S):
                connection = await self._connect()
                answer.sent_at = self._now()
                is_open = await self._exchange(connection, request, answer)
            if is_open:
                self._idle.append((self._now(), connection))
            else:
                self._close(connection)
        except TimeoutError:
            answer.error = "timeout"
        except (OSError, asyncio.IncompleteReadError, ValueError, IndexError) as error:
            answer.error = type(error).__name__
        return answer

    async def _connect(self) -> Connection:
        while self._idle:
            since, connection = self._idle.pop()
            if self._now() - since < MAX_IDLE_S:
                return connection
            self._close(connection)
        if self._num_open >= MAX_CONNECTIONS:
            raise OSError(f"{MAX_CONNECTIONS} connections are open, which is the limit")
        self._num_open += 1
        return await asyncio.open_connection(self._host, self._port)

    def _close(self, connection: Connection) -> None:
        connection[1].close()
        self._num_open -= 1

    async def _exchange(
        self,
        connection: Connection,
        request: bytes,
        answer: Answer,
    ) -> bool:
        """False: the connection cannot be used again."""
        reader, writer = connection
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
        await reader.readexactly(int(fields["content-length"]))
        answer.ended_at = self._now()
        answer.status = int(head[0].split(" ", 2)[1])
        if "retry-after" in fields:
            answer.retry_after_s = float(fields["retry-after"])
        return fields.get("connection") != "close"

    def _request(self, caller: Caller) -> bytes:
        self._num_sent += 1
        prompt = self._prompts[self._num_sent % NUM_PROMPTS]
        body = json.dumps(
            {
                "model": self._model,
                "prompt": f"{self._num_sent} {prompt}",
                "max_tokens": self._output_len,
                "ignore_eos": True,
                "temperature": 0,
                "priority": caller.priority,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Authorization: Bearer {caller.key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body
