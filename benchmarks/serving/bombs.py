"""What one tenant's worst requests cost another's chat.

python -m benchmarks.serving.bombs [--rounds 2] [--seconds 20] [--threads 0] [--json OUT]

One tenant chats, a request each second. In every other part of the run another tenant sends what is
made to harm: grammars that take minutes to compile, prompts and texts of megabytes, many large
bodies at once, a conversation of 100 MiB. The process that sends these gives way to all others
(nice 19), as a client on another machine would: what is measured is what they cost the server.
Reported are the times between the chat's tokens with and
without, what each kind of request was answered and how late, and how much memory the router (with
its compiler) and the workers took on top. It exits with 1 if one was not refused in time in words.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import httpx
import psutil
from rich.table import Table

from benchmarks.report import json_option, make_console, ms, write_json
from benchmarks.serving.first_light import MODEL
from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.lab.bench.load import percentile

ANSWER_GOAL_S = 5.0
MIB = 2**20
KEYS = {"chat": "chat-key", "bombs": "bombs-key"}
TENANTS = "".join(f'[[tenant]]\nname = "{n}"\nkeys = ["{key}"]\n' for n, key in KEYS.items())
CHAT = "/v1/chat/completions"
TEXT = "Some words of a prompt, and 12345 more. "
ITEM_MIB, NUM_ITEMS = 1, 7  # in the conversation, which may have 8 MiB
ROUTER, COMPILER = "cluster.processes.child router", "kvrelay.cluster.api.constraints.compiler"


@dataclass(frozen=True, slots=True)
class Reply:
    kind: str
    status: int
    seconds: float
    message: str

    @property
    def is_refused(self) -> bool:
        return self.status >= 400 and bool(self.message) and self.seconds <= ANSWER_GOAL_S


def post(url: str, path: str, body: bytes, kind: str) -> Reply:
    where, began = urlsplit(url), time.monotonic()
    headers = {"authorization": f"Bearer {KEYS['bombs']}", "content-type": "application/json"}
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        elapsed_s = time.monotonic() - began
        message = (answer.get("error") or {}).get("message", "") or answer.get("id", "")
        return Reply(kind, response.status, elapsed_s, message)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Reply(kind, 0, time.monotonic() - began, repr(error))
    finally:
        connection.close()


def text_of(size: int) -> str:
    return (TEXT * (size // len(TEXT) + 1))[:size]


def chat(content: str, **more: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1} | more).encode()


def with_schema(schema: dict[str, Any]) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return chat("Hi", response_format=form)


def multiple(number: int) -> bytes:
    return with_schema({"type": "integer", "multipleOf": number})


def optional(count: int) -> bytes:
    properties = {f"p{i}": {"type": "integer"} for i in range(count)}
    return with_schema({"type": "object", "properties": properties})


def in_lark(number: int) -> bytes:
    """Which is not looked into: the compiler's limits end it."""
    schema = json.dumps({"type": "integer", "multipleOf": number})
    return chat("Hi", structured_outputs={"grammar": f"start: %json {schema}"})


def bombs() -> Iterator[tuple[str, str, bytes]]:
    """Yields kind, path and body, each once."""
    for i, number in enumerate((999_983, 9_999_991)):
        yield "multipleOf", CHAT, multiple(number)
        yield "multipleOf in Lark", CHAT, in_lark(number + 2 * i)
    for count in (510, 1000, 2000, 5000):
        yield f"{count} optional properties", CHAT, optional(count)
    for _ in range(2):
        yield "prompt of 3 MiB", CHAT, chat(text_of(3 * MIB))
    tokenize = json.dumps({"model": MODEL, "prompt": text_of(8 * MIB - 1024)}).encode()
    yield "/tokenize of 8 MiB", "/tokenize", tokenize


def send_many(url: str) -> list[Reply]:
    """40 bodies of 2 MiB at once."""
    body = chat(text_of(2 * MIB))
    with ThreadPoolExecutor(40) as pool:
        calls = [pool.submit(post, url, CHAT, body, "40 bodies of 2 MiB") for _ in range(40)]
        return [call.result() for call in calls]


def lengthen(url: str) -> str:
    """The name of a conversation of as many items as it may have."""
    item = {"role": "user", "content": text_of(ITEM_MIB * MIB)}
    made = post(url, "/v1/conversations", json.dumps({"items": [item] * NUM_ITEMS}).encode(), "it")
    if made.status != 200:
        raise click.ClickException(f"the conversation was answered {made.status}: {made.message}")
    return made.message


def ask_on(url: str, name: str) -> Reply:
    body = {"model": MODEL, "input": "Hi", "conversation": name}
    return post(url, "/v1/responses", json.dumps(body).encode(), f"history of {NUM_ITEMS} MiB")


@dataclass(slots=True)
class Chat:
    """A request each second from a thread of its own; the times between tokens, by part."""

    url: str
    itl_s: dict[str, list[float]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    part: str = "without"
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        headers = {"authorization": f"Bearer {KEYS['chat']}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=60, auth=OwnKey()) as client:
            number = 0
            while not self._stop.is_set():
                began, number = time.monotonic(), number + 1
                self._ask(client, f"{number}. Tell a story.")
                self._stop.wait(max(0.0, began + 1.0 - time.monotonic()))

    def stop(self) -> None:
        self._stop.set()

    def _ask(self, client: httpx.Client, content: str) -> None:
        part, last = self.part, 0.0
        body = json.loads(chat(content)) | {"stream": True, "max_tokens": 24, "ignore_eos": True}
        with client.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                self.failed.append(response.read().decode(errors="replace")[:200])
                return
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                if last:
                    self.itl_s.setdefault(part, []).append(now - last)
                last = now


@dataclass(slots=True)
class Memory:
    """The most that the router, its compiler and the workers have, by part."""

    root: psutil.Process
    workers: list[int]
    most: dict[str, dict[str, int]] = field(default_factory=dict)
    part: str = "without"
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._stop.wait(0.2):
            most = self.most.setdefault(self.part, {})
            for kind, size in self._now().items():
                most[kind] = max(most.get(kind, 0), size)

    def stop(self) -> None:
        self._stop.set()

    def _now(self) -> dict[str, int]:
        sizes = dict.fromkeys(("router", "compiler", "workers"), 0)
        for process in self.root.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                words = " ".join(process.cmdline())
                if ROUTER in words:
                    sizes["router"] += process.memory_info().rss
                elif COMPILER in words:  # whose forks share most of what they have
                    sizes["compiler"] += process.memory_full_info().pss
        for pid in self.workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                sizes["workers"] += psutil.Process(pid).memory_info().rss
        return sizes


def harm(url: str, seconds: float, last: str) -> list[Reply]:
    """Sends them for at least so long, each kind at least once."""
    replies: list[Reply] = []
    deadline = time.monotonic() + seconds
    steps: list[Callable[[], list[Reply]]] = [
        *(lambda each=each: [post(url, *each[1:], each[0])] for each in bombs()),  # type: ignore[misc]
        lambda: send_many(url),
        lambda: [ask_on(url, last)],
    ]
    while time.monotonic() < deadline:
        for step in steps:
            replies += step()
    return replies


@click.command()
@click.option("--rounds", default=2, help="Of a part without, then a part with.")
@click.option("--seconds", default=20.0, help="Of each part, at least.")
@click.option("--threads", default=0, help="That the worker computes with; 0: one for each core.")
@json_option()
def main(rounds: int, seconds: float, threads: int, json_path: Path | None) -> None:
    """Measure a server of one's own under harmful requests."""
    console = make_console()
    replies: list[Reply] = []
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "tenants.toml"
        path.write_text(TENANTS)
        settings = {
            "engine.threads": threads,
            "tenants.file": str(path),
            "sessions.state_dir": str(Path(name) / "state"),
        }
        with Served(settings, "--prefill", "0", "--decode", "1") as server:
            status = httpx.get(f"{server.url}/status", timeout=10, auth=OwnKey()).json()
            workers = [each["pid"] for each in status["workers"] if each["pid"]]
            talk = Chat(server.url)
            memory = Memory(psutil.Process(server.process.pid), workers)
            threads = [threading.Thread(target=each.run) for each in (talk, memory)]
            for thread in threads:
                thread.start()
            spawn = multiprocessing.get_context("spawn")
            sender = ProcessPoolExecutor(1, spawn, initializer=os.nice, initargs=(19,))
            try:
                time.sleep(3.0)
                talk.itl_s.clear()
                last = ""
                for _ in range(rounds):
                    for part in ("without", "with"):
                        talk.part = memory.part = part
                        if part == "without":
                            time.sleep(seconds)
                            continue
                        last = last or sender.submit(lengthen, server.url).result()
                        replies += sender.submit(harm, server.url, seconds, last).result()
            finally:
                sender.shutdown()
                talk.stop()
                memory.stop()
                for thread in threads:
                    thread.join()
    result = report(console, talk, memory, replies)
    write_json(json_path, result)
    if result["wrong"] or talk.failed:
        sys.exit(1)


def report(console: Any, talk: Chat, memory: Memory, replies: list[Reply]) -> dict[str, Any]:
    p99, p50 = (
        {part: percentile(times, percent) for part, times in talk.itl_s.items()}
        for percent in (99, 50)
    )
    before, after = memory.most["without"], memory.most["with"]
    grown = {kind: (size - before[kind]) / MIB for kind, size in after.items()}
    table = Table(title="bombs", show_header=False)
    for part, times in talk.itl_s.items():
        shown = f"p50 {ms(times, 50)}, p99 {ms(times, 99)}, {len(times)} tokens"
        table.add_row(f"the chat's ITL {part}", shown)
    table.add_row("p99 with / without", f"{p99['with'] / p99['without']:.2f}")
    table.add_row("the chat's failures", str(len(talk.failed)))
    for kind, size in grown.items():
        table.add_row(f"memory of the {kind}", f"{size:+.0f} MiB")
    kinds: dict[str, list[Reply]] = {}
    for reply in replies:
        kinds.setdefault(reply.kind, []).append(reply)
    for kind, mine in kinds.items():
        statuses = ", ".join(str(status) for status in sorted({each.status for each in mine}))
        slowest = max(each.seconds for each in mine)
        table.add_row(kind, f"{len(mine)} times {statuses}, at most {slowest:.2f} s")
    wrong = [each for each in replies if not each.is_refused]
    for each in wrong[:5]:
        table.add_row("not refused in time", f"{each.kind}: {each.status} {each.message[:60]}")
    console.print(table)
    for kind, mine in kinds.items():
        console.print(f"{kind}: {mine[0].message[:160]}", highlight=False, soft_wrap=True)
    return {
        "itl_ms_p99": {part: 1e3 * value for part, value in p99.items()},
        "itl_ms_p50": {part: 1e3 * value for part, value in p50.items()},
        "itl_p99_ratio": p99["with"] / p99["without"],
        "memory_grown_mib": grown,
        "chat_failures": talk.failed,
        "replies": {kind: len(mine) for kind, mine in kinds.items()},
        "wrong": [f"{each.kind}: {each.status} {each.message}" for each in wrong],
    }


if __name__ == "__main__":
    main()
