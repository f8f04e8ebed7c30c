"""What a server survives: the death of its controller, its router and itself.

Workers keep their processes, weights and KV all the while, and a stream whose router lives says
what it would have said undisturbed. `python -m tests.chaos` does the same to Ray and Redis, and
restarts everything under load.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from benchmarks.serving.served import Served
from kvrelay.worker.processes import FORK_MODULE, worker_processes
from tests.e2e.serving import (
    KVRELAY,
    MODEL,
    all_up,
    ask,
    begin_batch,
    status,
    stream,
    texts_of_batch,
    wait_for,
    wait_until,
    worker_of,
)
from tests.operations.served import free_port

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(240)]

GREEDY = {"temperature": 0, "max_tokens": 80}
LONG = " ".join(f"Keeper {number} saw a whale." for number in range(60))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Served]:
    settings = {
        "sessions.state_dir": str(tmp_path_factory.mktemp("state")),
        "router.policy": "round_robin",  # every prompt is handed over
    }
    port = str(free_port())
    return lambda: Served(settings, "--port", port)


@pytest.fixture(scope="module")
def server(start: Callable[[], Served]) -> Iterator[Served]:
    with start() as served:
        yield served


@pytest.fixture
def url(server: Served) -> str:
    wait_for(server.url, all_up, 60, "workers are not back")
    return server.url


def lives(url: str) -> dict[str, tuple[int, int]]:
    """Process and epoch of each worker."""
    return {w["worker"]: (w["pid"], w["epoch"]) for w in status(url)["workers"]}


def children(server: Served, *words: str) -> list[psutil.Process]:
    """Processes that the server has started, or these, with all words in their command."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [p for p in found if all(word in command_of(p) for word in words)]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ends just now
        return ""


def kill(server: Served, *words: str) -> None:
    (process,) = children(server, *words)
    process.kill()


def has_controller(after: int) -> Callable[[dict[str, Any]], bool]:
    """A controller of a later epoch, that could start workers, and whose workers are all up."""

    def is_there(state: dict[str, Any]) -> bool:
        told = state["controller"]
        return told.get("epoch", 0) > after and told["has_ray"] and all_up(state)

    return is_there


def cached_of(url: str, prompt: str) -> float:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    usage = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["usage"]
    return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])


def test_controller_and_router_come_back_to_workers_with_their_kv(server: Served, url: str) -> None:
    cached_of(url, LONG)
    before, epoch = lives(url), status(url)["controller"]["epoch"]
    kill(server, "kvrelay.cluster.processes.child", "controller")
    kill(server, "kvrelay.cluster.processes.child", "router-0")
    share = cached_of(url, LONG)  # the connection waits until there is a router again
    wait_for(url, has_controller(epoch), 30, "there is no new controller")
    assert lives(url) == before
    assert share >= 0.95 or cached_of(url, LONG) >= 0.95


@pytest.mark.timeout(480)
def test_each_row_of_a_batch_is_answered_once_whatever_is_killed(server: Served, url: str) -> None:
    """A row that was under way is sent again, and says what it would have said."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=9, timeout=60)
    bodies: list[Any] = [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Say something about the number {i}."}],
            "max_tokens": 16,
            "seed": i,
        }
        for i in range(36)
    ]
    undisturbed, name = begin_batch(client, bodies), ""

    def has_done(count: int) -> bool:
        counts = client.batches.retrieve(name).request_counts
        return counts is not None and counts.completed >= count

    def kill_worker() -> None:
        psutil.Process(worker_of(status(url), "decode-0")["pid"]).kill()

    wait_until(lambda: client.batches.retrieve(undisturbed).status == "completed", 120)
    name = begin_batch(client, bodies)
    kills = (
        kill_worker,
        lambda: kill(server, "kvrelay.cluster.processes.child", "router-0"),
        lambda: kill(server, "kvrelay.cluster.processes.child", "controller"),
    )
    for number, disturb in enumerate(kills):
        wait_until(lambda count=6 * (number + 1): has_done(count), 120)
        disturb()
    wait_until(lambda: client.batches.retrieve(name).status == "completed", 120)
    assert texts_of_batch(client, name) == texts_of_batch(client, undisturbed)


def test_a_server_that_was_killed_finds_its_workers_when_it_is_started_again(
    server: Served, url: str, start: Callable[[], Served]
) -> None:
    cached_of(url, LONG)
    before = lives(url)
    children_of_it = children(server)
    server.process.kill()
    server.process.wait(10)
    gone, _ = psutil.wait_procs(children_of_it, timeout=20)
    with start() as again:
        assert lives(again.url) == before
        assert cached_of(again.url, LONG) >= 0.95
        drain(again)
    assert gone
    assert not any(lives_on(pid) for pid, _ in before.values())


def test_a_server_that_keeps_its_workers_finds_them_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    """As the API's pod is replaced; with other settings of workers, these end and start anew."""
    settings = {
        "sessions.state_dir": str(tmp_path),
        "cluster.on_stop": "keep-workers",
        "router.policy": "round_robin",
    }
    port = str(free_port())

    def serve(**changed: object) -> Served:
        return Served(settings | changed, "--port", port)

    with serve() as served:
        cached_of(served.url, LONG)
        before = lives(served.url)
        assert served.stop() == 0
        assert all(lives_on(pid) for pid, _ in before.values())
    with serve(**{"cluster.routers": 2}) as served:
        assert lives(served.url) == before
        assert cached_of(served.url, LONG) >= 0.95
    with serve(**{"engine.max_num_seqs": 7}) as served:
        after = lives(served.url)
        assert {name: epoch for name, (_, epoch) in after.items()} == {
            name: epoch + 1 for name, (_, epoch) in before.items()
        }
        wait_until(lambda: not any(lives_on(pid) for pid, _ in before.values()), 20)
        drain(served)
    assert not any(lives_on(pid) for pid, _ in after.values())
    assert not list((tmp_path / "running").iterdir())


def lives_on(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def drain(server: Served) -> None:
    """While a stream is under way, which ends as it would have."""
    undisturbed = stream(server.url, GREEDY)
    refused: list[httpx.Response] = []

    def disturb(number: int) -> None:
        if number == 5:
            assert httpx.get(f"{server.url}/health/ready").status_code == 200
            command = [*KVRELAY, "drain", "--url", server.url]
            subprocess.run(command, check=True, timeout=30, capture_output=True)
            body = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
            refused.append(httpx.get(f"{server.url}/health/ready"))
            refused.append(httpx.post(f"{server.url}/v1/completions", json=body))

    # Long enough to be under way still when the command has started, on a slow machine too.
    options = {**GREEDY, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    assert stream(server.url, options, disturb).startswith(undisturbed)
    assert [response.status_code for response in refused] == [503, 503]
    assert refused[1].json()["error"]["code"] == "draining"
    assert refused[1].headers["retry-after"] == "1"
    assert server.process.wait(60) == 0


def was_forked(pid: int) -> bool:
    """Its command line is written over a longer one."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b" \0")


def test_workers_are_forked_and_start_without_that_too(tmp_path: Path) -> None:
    with Served({"sessions.state_dir": str(tmp_path)}) as served:
        first = lives(served.url)
        said = ask(served.url)
        assert all(was_forked(pid) for pid, _ in first.values())
        cluster = psutil.Process(first["decode-0"][0]).cmdline()[3].split("/")[0]
        ((server, *_),) = worker_processes(cluster, FORK_MODULE)
        assert not psutil.Process(server.pid).children()

        server.kill()  # and a worker, which its guardian then starts itself, with a new server
        psutil.Process(first["decode-0"][0]).kill()
        wait_for(served.url, is_back(first, "decode-0"), 60, "the worker is not back")
        second = lives(served.url)
        assert not was_forked(second["decode-0"][0])
        assert ask(served.url) == said
        wait_until(lambda: listens(cluster), why="there is no new server")

        for pid, _ in second.values():  # both are forked from one, at the same time
            psutil.Process(pid).kill()
        for worker in second:
            wait_for(served.url, is_back(second, worker), 60, f"{worker} is not back")
        assert all(was_forked(pid) for pid, _ in lives(served.url).values())
        assert ask(served.url) == said
    assert not worker_processes(cluster)
    assert not worker_processes(cluster, FORK_MODULE)


def listens(cluster: str) -> bool:
    servers = worker_processes(cluster, FORK_MODULE)
    return any(end.laddr for each, *_ in servers for end in each.net_connections("unix"))


def is_back(before: dict[str, tuple[int, int]], name: str) -> Callable[[dict[str, Any]], bool]:
    def is_there(state: dict[str, Any]) -> bool:
        worker = worker_of(state, name)
        return bool(worker["state"] == "up" and worker["epoch"] > before[name][1])

    return is_there
