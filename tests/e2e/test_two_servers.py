"""Two servers of one cluster, with Redis between them: one leads, and either may go away."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.serving.served import Served
from tests.cluster.state.stores import Server
from tests.e2e.serving import MODEL, Status, status, wait_for, wait_until, worker_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
TAKEOVER_S = 10.0
WORKERS = ("prefill-0", "decode-0")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def servers(store: Server, tmp_path: Path) -> Iterator[list[Served]]:
    """Both are ready; the first one leads."""
    settings = {
        "cluster.name": "e2e",
        "cluster.token": "secret-of-the-tests",
        "state.url": store.url,
        "engine.num_blocks": 256,
        "sessions.state_dir": str(tmp_path / "state"),
        "cluster.orphan_s": 60,
        "cluster.drain_s": 5,
    }
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(Served(settings))]
        both.append(stack.enter_context(Served(settings)))
        for server in both:
            wait_for(server.url, lambda state: len(state["routers"]) == 2, 30, "no two routers")
        yield both


def family(served: Served) -> list[psutil.Process]:
    """The server and all that ends with it: not the workers, which are daemons."""
    root = psutil.Process(served.process.pid)
    return [root, *root.children(recursive=True)]


def signal_all(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def pids(state: Status) -> dict[str, int]:
    return {worker["worker"]: worker["pid"] for worker in state["workers"]}


def term(state: Status) -> int:
    return int(state["controller"]["epoch"]) // 1_000_000


class Streams:
    """Clients of one server, from `with` to its end, one stream after the other."""

    def __init__(self, url: str, num_clients: int = 3) -> None:
        self.url = url
        self.whole, self.failed = 0, list[str]()
        self.texts: set[str] = set()
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(num_clients)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                self.texts.add(told(self.url))
                self.whole += 1
            except Exception as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                time.sleep(0.2)


def told(url: str, num_tokens: int = 60) -> str:
    """A stream that has to be whole."""
    body: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0}
    body |= {"max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True}}
    text, counted = "", 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                counted = (chunk.get("usage") or {}).get("completion_tokens", counted)
                text += "".join(choice["text"] for choice in chunk["choices"])
    assert counted == num_tokens
    return text


def said(served: Served) -> str:
    return "".join(served.lines)


def test_another_server_leads_when_the_leader_is_killed_and_streams_go_on(
    servers: list[Served],
) -> None:
    leader, follower = servers
    before = status(follower.url)
    assert term(before) == 1
    assert {router["state"] for router in before["routers"]} == {"up"}
    with Streams(follower.url) as streams:
        wait_until(lambda: streams.whole >= 3)
        signal_all(family(leader), signal.SIGKILL)
        killed_at = time.monotonic()
        wait_for(follower.url, lambda state: term(state) == 2, TAKEOVER_S, "nobody took over")
        print(f"another server leads after {time.monotonic() - killed_at:.1f} s")
        wait_for(
            follower.url,
            lambda state: [r["state"] for r in state["routers"]] == ["up"],
            30,
            "the dead router is still there",
        )
        assert pids(status(follower.url)) == pids(before)
        done = streams.whole
        wait_until(lambda: streams.whole >= done + 3)
    print(f"{streams.whole} streams, {len(streams.failed)} failed")
    assert (streams.failed, len(streams.texts)) == ([], 1)

    os.kill(pids(before)["decode-0"], signal.SIGKILL)
    wait_for(
        follower.url,
        lambda state: (
            worker_of(state, "decode-0")["state"] == "up"
            and pids(state)["decode-0"] not in (0, pids(before)["decode-0"])
        ),
        90,
        "the new leader does not replace a worker",
    )
    assert told(follower.url) in streams.texts
