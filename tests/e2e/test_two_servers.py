"""Two servers of one cluster, with Redis between them: one leads, and either may go away."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model
from tests.cluster.state.stores import Server
from tests.e2e.serving import (
    MODEL,
    Status,
    begin_batch,
    samples,
    status,
    texts_of_batch,
    wait_for,
    wait_until,
    worker_of,
)

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(600)]
TAKEOVER_S = 10.0  # a lease, and a look
FROZEN_S = 8.0  # after another one has taken over
NUM_ROWS = 120  # that a batch has
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
        "cluster.orphan_s": 60,
        "cluster.drain_s": 5,
    }
    own = resolve_model(DEFAULT_MODEL, progress=print)
    with contextlib.ExitStack() as stack:
        both = []
        for name in ("first", "second"):  # as on two machines, each with a cache of its own
            folder = shutil.copytree(own, tmp_path / name / "model", copy_function=shutil.copyfile)
            mine = {
                "sessions.state_dir": str(tmp_path / name),
                "model.name": str(folder),
                "model.served_name": DEFAULT_MODEL,
            }
            both.append(stack.enter_context(Served(settings | mine)))
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


def test_a_batch_is_seen_by_both_and_finished_by_the_other_when_one_is_killed(
    servers: list[Served],
) -> None:
    clients = [openai.OpenAI(base_url=f"{each.url}/v1", api_key="none") for each in servers]
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    body |= {"model": MODEL, "max_tokens": 40, "ignore_eos": True}
    answer = httpx.post(f"{servers[0].url}/v1/chat/completions", json=body, timeout=60).json()
    name = begin_batch(clients[0], [body] * NUM_ROWS)

    def rows_of(served: Served) -> int:
        text = httpx.get(f"{served.url}/metrics", auth=OwnKey()).text
        found = samples(text, "kvrelay_batch_rows_total")
        return sum(int(value) for labels, value in found if labels["outcome"] == "completed")

    began = time.monotonic()
    wait_until(lambda: max(map(rows_of, servers)) >= NUM_ROWS // 4, 60, "a quarter is not done")
    print(f"{NUM_ROWS // 4} rows after {time.monotonic() - began:.0f} s")
    which = rows_of(servers[0]) == 0
    signal_all(family(servers[which]), signal.SIGKILL)
    left, client = servers[not which], clients[not which]
    assert client.batches.retrieve(name).status == "in_progress"
    wait_until(lambda: client.batches.retrieve(name).status == "completed", 120)
    texts = texts_of_batch(client, name)
    assert sorted(texts) == sorted(f"r{i}" for i in range(NUM_ROWS))
    assert set(texts.values()) == {answer["choices"][0]["message"]["content"]}
    print(f"{NUM_ROWS - rows_of(left)} rows by server {which + 1}, the others by the one left")
    assert 0 < rows_of(left) < NUM_ROWS


def test_a_leader_that_was_frozen_steps_down_and_its_routers_serve_on(
    servers: list[Served],
) -> None:
    leader, follower = servers
    before, expected = status(follower.url), told(follower.url)
    with Streams(follower.url) as streams:
        wait_until(lambda: streams.whole >= 1)
        frozen = family(leader)
        signal_all(frozen, signal.SIGSTOP)
        try:
            wait_for(follower.url, lambda state: term(state) == 2, TAKEOVER_S, "nobody took over")
            time.sleep(FROZEN_S)
        finally:
            signal_all(frozen, signal.SIGCONT)
        wait_until(lambda: "steps down" in said(leader), 30, said(leader))
        wait_for(
            follower.url,
            lambda state: [r["state"] for r in state["routers"]] == ["up", "up"],
            30,
            "the routers of the server that was frozen do not join",
        )
        assert told(leader.url) == expected
    assert (streams.failed, streams.texts) == ([], {expected})
    after = status(follower.url)
    assert pids(after) == pids(before)
    assert before["controller"]["server"] != after["controller"]["server"]
    assert term(after) == 2
    assert [worker["restarts"] for worker in after["workers"]] == [0, 0]


def test_one_that_is_told_to_end_hands_over_and_the_last_one_ends_the_workers(
    servers: list[Served],
) -> None:
    leader, follower = servers
    before = status(follower.url)
    with Streams(follower.url) as streams:
        wait_until(lambda: streams.whole >= 1)
        assert leader.stop() == 0
        ended_at = time.monotonic()
        wait_for(follower.url, lambda state: term(state) == 2, TAKEOVER_S, "nobody took over")
        print(f"another server leads {time.monotonic() - ended_at:.1f} s after the end")
        done = streams.whole
        wait_until(lambda: streams.whole >= done + 2)
    assert (streams.failed, len(streams.texts)) == ([], 1)
    assert pids(status(follower.url)) == pids(before)
    assert follower.stop() == 0
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids(before).values()), 20)


def test_a_cluster_without_its_store_serves_on_and_has_its_leader_again_afterwards(
    servers: list[Served], store: Server
) -> None:
    first, second = servers
    before, expected = status(first.url), told(first.url)
    with Streams(first.url, 1) as streams:
        store.kill()
        wait_until(lambda: "this controller decides nothing" in said(first), 30, said(first))
        assert told(second.url) == expected
        store.start()  # empty
        wait_for(first.url, lambda state: state["controller"]["epoch"] == 1_000_002, 60, "not back")
        assert told(second.url) == expected
    assert (streams.failed, streams.texts) == ([], {expected})
    assert pids(status(second.url)) == pids(before)
    assert "term 2" not in said(first) + said(second)
