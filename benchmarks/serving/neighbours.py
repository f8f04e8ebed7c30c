"""What each kind of load that one caller can make costs another caller's chat.

python -m benchmarks.serving.neighbours [--seconds 30] [--kind KIND]... [--keys WAY]... [--json OUT]

One `kvrelay serve`, a prefill and a decode worker, for each way of telling callers apart: a tenant
each, one key for both, no keys (then the neighbour has another address). The chat asks once a
second, alone and beside each kind of load in turn. The neighbour's process gives way to all others
(nice 19), as a client on another machine would. Reported are the chat's TTFT alone and beside it,
what was refused to the chat, what the neighbour was answered, and the router's memory.

It exits with 1 if a chat was refused or failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import httpx
import psutil
import websockets
from rich.table import Table

from benchmarks.report import json_option, make_console, write_json
from benchmarks.serving.bombs import MIB, Memory
from benchmarks.serving.first_light import MODEL
from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.lab.bench.load import Client, LoadSpec, RequestTiming, make_prompts, percentile

ADDRESS = "127.0.0.2"  # the neighbour's
NUM_CONNECTIONS = 8400  # more than a router has
NUM_SOCKETS, MESSAGE_MIB, NUM_QUEUED = 24, 7, 8  # each WebSocket's
NUM_UPLOADS = 16
NUM_ROWS = 4000
NUM_PROMPTS, PROMPT_LEN = 200, 300  # at once, tokens of each
KEYS = {
    "tenants": ("chat-key", "other-key"),
    "one key": ("one-key-for-all-of-them",) * 2,
    "no keys": ("", ""),
}
LONG = 3500  # tokens: one fits beside the chat, two do not (`NUM_BLOCKS`)
NUM_BLOCKS, BLOCK_SIZE = 340, 16

Answers = Counter[str]


def headers_of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


class Neighbour:
    """Makes one kind of load, in a process of its own, until `stop` is set."""

    def __init__(self, url: str, key: str, stop: Event) -> None:
        self.url, self.headers, self.stop = url, headers_of(key), stop
        self.answers: Answers = Counter()
        where = urlsplit(url)
        self.host, self.port = where.hostname or "", where.port or 80

    def http(self, max_connections: int = 64) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(
            local_address=ADDRESS, limits=httpx.Limits(max_connections=max_connections)
        )
        return httpx.AsyncClient(
            transport=transport, base_url=self.url, headers=self.headers, timeout=120
        )

    async def post(self, http: httpx.AsyncClient, path: str, **more: Any) -> httpx.Response | None:
        try:
            answer = await http.post(path, **more)
        except httpx.HTTPError as error:
            self.answers[type(error).__name__] += 1
            return None
        self.answers[str(answer.status_code)] += 1
        return answer

    async def connections(self) -> None:
        """Idle ones, more than a router takes; what is closed is opened again, 500 a second."""
        loop, held = asyncio.get_running_loop(), list[asyncio.Transport]()
        while not self.stop.is_set():
            num_held = len(held)
            held = [each for each in held if not each.is_closing()]
            self.answers["closed"] += num_held - len(held)
            for _ in range(min(500, NUM_CONNECTIONS - len(held))):
                with contextlib.suppress(OSError):
                    transport, _ = await loop.create_connection(
                        asyncio.Protocol, self.host, self.port, local_addr=(ADDRESS, 0)
                    )
                    held.append(transport)
                    self.answers["opened"] += 1
            await asyncio.sleep(1.0)

    async def sockets(self) -> None:
        """WebSockets whose messages are large, sent again and again, and whose answers are read."""
        text = "word " * (MESSAGE_MIB * MIB // 5)
        item = {"type": "message", "role": "user", "content": text}
        body = json.dumps(
            {"type": "response.create", "model": MODEL, "generate": False, "input": [item]}
        )

        async def one() -> None:
            while not self.stop.is_set():
                try:
                    async with websockets.connect(
                        self.url.replace("http", "ws") + "/v1/responses",
                        additional_headers=self.headers,
                        local_addr=(ADDRESS, 0),
                        max_size=None,
                    ) as socket:
                        for _ in range(NUM_QUEUED):
                            await socket.send(body)
                        while not self.stop.is_set():
                            answer = json.loads(await asyncio.wait_for(socket.recv(), 30))
                            self.answers[answer["type"]] += 1
                            if answer["type"] in ("error", "response.completed"):
                                await socket.send(body)
                except (OSError, TimeoutError, websockets.WebSocketException) as error:
                    self.answers[type(error).__name__] += 1
                    await asyncio.sleep(1.0)

        await asyncio.gather(*(one() for _ in range(NUM_SOCKETS)))

    async def uploads(self) -> None:
        """Half of them come a byte at a time, the others at full speed, 32 MiB each."""

        async def slowly() -> Any:
            yield b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
            yield b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n'
            while not self.stop.is_set():
                yield b"a"
                await asyncio.sleep(5.0)

        async def fast() -> Any:
            yield b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
            yield b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for _ in range(32):
                yield os.urandom(MIB // 2).hex().encode()
                await asyncio.sleep(0.2)
            yield b"\r\n--x--\r\n"

        async def one(http: httpx.AsyncClient, body: Callable[[], Any]) -> None:
            while not self.stop.is_set():
                form = {"content-type": "multipart/form-data; boundary=x"}
                answer = await self.post(http, "/v1/files", content=body(), headers=form)
                if answer is not None and answer.status_code == 200:
                    await http.delete(f"/v1/files/{answer.json()['id']}")
                await asyncio.sleep(1.0)

        async with self.http() as http:
            half = NUM_UPLOADS // 2
            await asyncio.gather(
                *(one(http, slowly) for _ in range(half)), *(one(http, fast) for _ in range(half))
            )

    async def rows(self) -> None:
        """A batch that takes longer than the measurement."""
        prompts = make_prompts(LoadSpec("", MODEL, NUM_ROWS, input_len=200, seed=7))
        lines = [
            json.dumps(
                {
                    "custom_id": str(number),
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {"model": MODEL, "prompt": prompt, "max_tokens": 64},
                }
            )
            for number, prompt in enumerate(prompts)
        ]
        async with self.http() as http:
            files = {"file": ("rows.jsonl", "\n".join(lines))}
            answer = await self.post(http, "/v1/files", files=files, data={"purpose": "batch"})
            if answer is None or answer.is_error:
                return
            body = {
                "input_file_id": answer.json()["id"],
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            }
            answer = await self.post(http, "/v1/batches", json=body)
            assert answer is not None
            while not self.stop.is_set():
                await asyncio.sleep(0.2)
            name = answer.json()["id"]
            state = (await http.get(f"/v1/batches/{name}")).json()
            self.answers["rows done"] += state["request_counts"]["completed"]
            await self.post(http, f"/v1/batches/{name}/cancel")

    async def memory(self) -> None:
        """Prompts of which one fits at a time, and long answers."""
        await self.prompts(8, LONG, 400)

    async def queue(self) -> None:
        """Short prompts, far more than are served at a time: they wait in the router's queue."""
        await self.prompts(NUM_PROMPTS, PROMPT_LEN, 16)

    async def prompts(self, at_once: int, input_len: int, max_tokens: int) -> None:
        """So many are under way at any time, none of them twice."""
        texts = iter(make_prompts(LoadSpec("", MODEL, 20 * at_once, input_len=input_len, seed=9)))

        async def one(http: httpx.AsyncClient) -> None:
            while not self.stop.is_set() and (text := next(texts, "")):
                body = {"model": MODEL, "prompt": text, "max_tokens": max_tokens}
                answer = await self.post(http, "/v1/completions", json=body | {"ignore_eos": True})
                if answer is None or answer.is_error:
                    await asyncio.sleep(1.0)

        async with self.http(at_once) as http:
            calls = [asyncio.create_task(one(http)) for _ in range(at_once)]
            while not self.stop.is_set():
                await asyncio.sleep(0.2)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def conversations(self) -> None:
        """One of 7 MiB is read, and added to, four times a second each."""
        text = "word " * (MIB // 10)
        item = {"type": "message", "role": "user", "content": text}
        async with self.http() as http:
            answer = await self.post(http, "/v1/conversations", json={})
            assert answer is not None
            path = f"/v1/conversations/{answer.json()['id']}"
            for _ in range(14):
                await self.post(http, f"{path}/items", json={"items": [item]})

            async def one() -> None:
                word = {"items": [{"type": "message", "role": "user", "content": "word"}]}
                while not self.stop.is_set():
                    answer = await http.get(path)
                    self.answers[str(answer.status_code)] += 1
                    await self.post(http, f"{path}/items", json=word)
                    await asyncio.sleep(1.0)

            await asyncio.gather(*(one() for _ in range(4)))


KINDS: dict[str, Callable[[Neighbour], Awaitable[None]]] = {
    "connections": Neighbour.connections,
    "sockets": Neighbour.sockets,
    "uploads": Neighbour.uploads,
    "rows": Neighbour.rows,
    "memory": Neighbour.memory,
    "conversations": Neighbour.conversations,
    "queue": Neighbour.queue,
}


def load(kind: str, url: str, key: str, stop: Event) -> Answers:
    """In the neighbour's process; what it was answered."""

    async def run() -> Answers:
        neighbour = Neighbour(url, key, stop)
        await KINDS[kind](neighbour)
        return neighbour.answers

    return asyncio.run(run())


async def chats(url: str, key: str, seconds: int, seed: int) -> list[RequestTiming]:
    """One a second, each over a connection of its own, as from a page that is opened."""
    spec = LoadSpec("", MODEL, seconds, input_len=60, output_len=16, seed=seed)
    tasks = []

    async def one(prompt: str) -> RequestTiming:
        async with httpx.AsyncClient(base_url=url, timeout=120, headers=headers_of(key)) as http:
            return await Client(spec, http, lambda _: None).request(prompt)

    for prompt in make_prompts(spec):
        tasks.append(asyncio.create_task(one(prompt)))
        await asyncio.sleep(1.0)
    return list(await asyncio.gather(*tasks))


@contextmanager
def beside(kind: str, url: str, key: str) -> Iterator[Answers]:
    """The load runs; what it was answered is there at the end."""
    spawn = multiprocessing.get_context("spawn")
    answers: Answers = Counter()
    with spawn.Manager() as manager:
        stop = manager.Event()
        pool = ProcessPoolExecutor(1, spawn, initializer=os.nice, initargs=(19,))
        try:
            found = pool.submit(load, kind, url, key, stop)  # type: ignore[arg-type]
            time.sleep(8.0)  # it has begun
            yield answers
        finally:
            stop.set()
            answers.update(found.result(180))
            pool.shutdown()


def of_chats(timings: list[RequestTiming]) -> dict[str, Any]:
    ttfts = [timing.ttft_s for timing in timings if not timing.error]
    return {
        "p50_ms": 1e3 * (percentile(ttfts, 50) or 0.0),
        "p90_ms": 1e3 * (percentile(ttfts, 90) or 0.0),
        "errors": [timing.error for timing in timings if timing.error],
    }


def measure(keys: str, kinds: tuple[str, ...], seconds: int, console: Any) -> dict[str, Any]:
    """Makes each kind of load once, on one server; before each the chat is alone."""
    mine, others = KEYS[keys]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        settings: dict[str, object] = {
            "cluster.prefill": 1,
            "cluster.decode": 1,
            "engine.num_blocks": NUM_BLOCKS,
            "engine.block_size": BLOCK_SIZE,
            "sessions.state_dir": str(Path(name) / "state"),
        }
        if keys == "tenants":
            settings["tenant"] = [{"name": each, "keys": [each]} for each in (mine, others)]
        elif keys == "one key":
            settings["api.key"] = mine
        else:
            settings["api.insecure"] = True
        with Served(settings) as server:
            asyncio.run(chats(server.url, mine, 5, 0))
            auth = OwnKey()
            status = httpx.get(f"{server.url}/status", timeout=10, auth=auth).json()
            workers = [each["pid"] for each in status["workers"] if each["pid"]]
            memory = Memory(psutil.Process(server.process.pid), workers)
            watch = threading.Thread(target=memory.run)
            watch.start()
            try:
                for number, kind in enumerate(kinds):
                    memory.part = f"before {kind}"
                    alone = asyncio.run(chats(server.url, mine, seconds, 2 * number + 1))
                    memory.part = kind
                    with beside(kind, server.url, others) as answers:
                        timings = asyncio.run(chats(server.url, mine, seconds, 2 * number + 2))
                    row = {"alone": of_chats(alone), "beside": of_chats(timings)}
                    before, after = memory.most[f"before {kind}"], memory.most[kind]
                    row["router_mib"] = (after["router"] - before["router"]) / MIB
                    row["neighbour"] = dict(answers)
                    found[kind] = row
                    show(console, f"{keys}: {kind}", row)
            finally:
                memory.stop()
                watch.join()
    return found


def ratio(row: dict[str, Any]) -> float:
    return float(row["beside"]["p90_ms"] / row["alone"]["p90_ms"])


def show(console: Any, title: str, row: dict[str, Any]) -> None:
    table = Table(title=title, show_header=False)
    for part in ("alone", "beside"):
        own = row[part]
        table.add_row(f"TTFT p50, p90 {part}", f"{own['p50_ms']:.0f}, {own['p90_ms']:.0f} ms")
    table.add_row("p90, beside / alone", f"{ratio(row):.2f}")
    errors = [*row["alone"]["errors"], *row["beside"]["errors"]]
    table.add_row("the chat's failures", ", ".join(errors) or "none")
    table.add_row("memory of the router", f"{row['router_mib']:+.0f} MiB")
    table.add_row("the neighbour's", ", ".join(f"{k} {v}" for k, v in row["neighbour"].items()))
    console.print(table)


@click.command(help=__doc__)
@click.option("--seconds", default=30, show_default=True, help="Of each part.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)))
@click.option("--keys", "ways", multiple=True, type=click.Choice(list(KEYS)))
@json_option()
def main(
    seconds: int, kinds: tuple[str, ...], ways: tuple[str, ...], json_path: Path | None
) -> None:
    console = make_console()
    found = {
        way: measure(way, kinds or tuple(KINDS), seconds, console) for way in ways or tuple(KEYS)
    }
    write_json(json_path, found)
    rows = [row for each in found.values() for row in each.values()]
    if any(row[part]["errors"] for row in rows for part in ("alone", "beside")):
        sys.exit(1)


if __name__ == "__main__":
    main()
