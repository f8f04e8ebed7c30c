"""Another version and other settings for a server that serves: streams, sessions and a client that
calls tools notice nothing. And what is refused."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.served import Served, toml_text
from kvrelay.cluster.cli.own_key import OwnKey
from tests.chaos.clients import Clients, Stream, requests_of
from tests.e2e.serving import KVRELAY, MODEL, slack, status, wait_for, wait_until
from tests.operations.served import free_port
from tests.support.versions import Versions

pytestmark = pytest.mark.e2e

FIRST = "e01f5b6"  # whose supervisor replaces itself, and whose routers let no connection fail
NUM_STREAMS = 16
MOST_SILENT_S = 3.0
OWN_LOAD = 3.0  # for each processor, by all of this: others' comes on top, and is waited for
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}},
            "required": ["city"],
        },
    },
}


def settings_of(folder: Path, **more: object) -> dict[str, object]:
    return {
        "cluster.prefill": 0,
        "cluster.decode": 2,
        "engine.num_blocks": 256,
        "tiers.host_gib": 0.05,
        "engine.max_model_len": 512,
        "cluster.drain_s": 120.0,
        "cluster.start_timeout_s": 600.0,
        "tiers.disk_gib": 0.5,
        "tiers.disk_path": str(folder / "disk"),
        "tiers.disk_after_s": 0.1,
        "sessions.state_dir": str(folder / "state"),
        **{name.replace("__", "."): value for name, value in more.items()},
    }


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path)


def order(url: str, what: str) -> subprocess.CompletedProcess[str]:
    command = [*KVRELAY, what, "--url", url, "--wait-s", "900"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=960)


def restart(url: str, what: str = "restart") -> None:
    done = order(url, what)
    assert done.returncode == 0, done.stdout + done.stderr


def tool_call(url: str) -> Any:
    """What it calls: a grammar decides the form, and temperature 0 the rest."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "temperature": 0,
        "max_tokens": 40,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=180)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]


class Load:
    """Streams, sessions and calls of a tool, all the while."""

    def __init__(self, url: str) -> None:
        self.url = url
        # Versions before tokens were drawn by a race (ADR 55) draw others with a seed.
        self.bodies = [body | {"temperature": 0.0} for body in requests_of(MODEL, NUM_STREAMS, 100)]
        self.clients: Any = None
        self.calls: list[Any] = []
        self.failures: list[str] = []
        self.slack = 1.0
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        self.call = tool_call(self.url)
        threads = [threading.Thread(target=run) for run in (self._stream, self._call)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: len(self.ended()) >= NUM_STREAMS, 300, "no stream ends")
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(300)

    def ended(self) -> list[Stream]:
        return [] if self.clients is None else self.clients.ended

    def _stream(self) -> None:
        async def run() -> None:
            clients = Clients([self.url], self.bodies, NUM_STREAMS)
            await clients.learn()
            self.clients = clients
            clients.start()
            await asyncio.to_thread(self._stop.wait)
            await clients.stop()

        asyncio.run(run())

    def _call(self) -> None:
        while not self._stop.wait(1.0):
            try:
                self.calls.append(tool_call(self.url))
            except (AssertionError, httpx.HTTPError) as error:
                self.failures.append(repr(error))

    def show(self) -> None:
        streams = self.ended()
        failed = sum(1 for stream in streams if stream.error)
        altered = sum(stream.altered for stream in streams)
        silence_s = max(stream.silence_s for stream in streams)
        print(
            f"{len(streams)} streams, {failed} failed, {altered} altered, longest silence "
            f"{silence_s:.2f} s; {len(self.calls)} calls of a tool, {len(self.failures)} failed; "
            f"load {os.getloadavg()[0]:.1f}"
        )
        self.slack = max(self.slack, slack() / OWN_LOAD)

    def check(self) -> None:
        streams = self.ended()
        silence_s = max(stream.silence_s for stream in streams)
        failed = [stream for stream in streams if stream.error]
        assert [stream.error for stream in failed] == []
        assert not any(stream.altered for stream in streams)
        assert self.failures == []
        assert [call for call in self.calls if call != self.call] == []
        assert silence_s <= MOST_SILENT_S * self.slack

    def cached_share(self) -> float:
        """How much of the next turns' prompts is found in the cache."""
        shares = []
        for body in self.bodies:
            turn = {**body, "max_tokens": 1, "stream": False}
            usage = httpx.post(f"{self.url}/v1/completions", json=turn, timeout=120).json()["usage"]
            # The last token is always computed, and with it its block.
            whole = (usage["prompt_tokens"] - 1) // 16 * 16
            shares.append(usage["prompt_tokens_details"]["cached_tokens"] / whole)
        return float(min(shares))


def versions_are_served(
    served: Served,
    versions: Versions,
    path: list[str],
) -> None:
    load = Load(served.url)
    try:
        with load.running():
            for version in path:
                versions.use(version)
                restart(served.url)
                load.show()
    finally:
        print("".join(served.lines))
    share = load.cached_share()
    print(f"cached of the next turn: {share:.0%}")
    load.check()
    assert share >= 0.95


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_from_the_first_version_that_can_to_this_one_and_back(
    versions: Versions, tmp_path: Path
) -> None:
    versions.use(FIRST)
    with Served(settings_of(tmp_path), env=versions.env) as served:
        pid = served.process.pid
        versions_are_served(served, versions, ["", FIRST])
        assert status(served.url)["restart"]["number"] == 2
        assert served.process.pid == pid
        assert served.process.poll() is None


@pytest.mark.timeout(600)
def test_who_connects_hardly_waits_for_the_next_router(tmp_path: Path) -> None:
    """It loads while the one before it serves: clients waited for that, many seconds."""
    waits: list[float] = []
    stop, answers = threading.Event(), set[int]()

    def knock() -> None:
        while not stop.wait(0.05):
            began = time.monotonic()
            with closing(HTTPConnection(served.url.partition("//")[2], timeout=300)) as client:
                client.request("GET", "/health/live")
                answers.add(client.getresponse().status)
            waits.append(time.monotonic() - began)

    with Served(settings_of(tmp_path)) as served:
        thread = threading.Thread(target=knock)
        thread.start()
        try:
            restart(served.url)
        finally:
            stop.set()
            thread.join()
        log = "".join(served.lines)
    print(log)
    began, gone = (
        datetime.fromisoformat(found[1])
        for what in ("restarting router-0", "router-0 is gone")
        if (found := re.search(rf"^(\S+) .*kvrelay.serve {what}", log, re.MULTILINE))
    )
    loading_s = (gone - began).total_seconds()
    print(f"loads for {loading_s:.1f} s; the longest wait of {len(waits)}: {max(waits):.2f} s")
    assert answers == {200}
    assert max(waits) < loading_s / 2


@pytest.mark.timeout(480)
def test_settings_are_read_anew_and_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    """No worker is needed for that: the connection of a client stays open all the while."""
    port, file = free_port(), tmp_path / "kvrelay.toml"
    # On a machine without Ray's start this is over in seconds; workers are not waited for.
    file.write_text(toml_text(settings_of(tmp_path)))
    command = [*KVRELAY, "serve", "--config", str(file), "--port", str(port)]
    # Neither may change while it runs, so a restart without them would be refused.
    command += ["--kv-cache-dtype", "fp8", "--set", "model.dtype=float32", "--trust-remote-code"]
    log = (tmp_path / "log").open("w+")
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stderr=log, env=os.environ) as process:
        try:
            wait_until(lambda: is_live(url), 120, "it does not answer")
            wait_for(url, lambda state: state["controller"].get("pid"), 60, "no controller")
            refused = order_with(url, file, {"engine.num_blocks": -3}, tmp_path)
            assert "engine.num_blocks = -3: expected at least 0" in refused
            refused = order_with(url, file, {"cluster.routers": 2}, tmp_path)
            assert "cluster.routers: changed" in refused
            before = status(url)["controller"]["epoch"]
            file.write_text(toml_text(settings_of(tmp_path, tiers__host_gib=0.01)))
            with httpx.Client(base_url=url, timeout=60, auth=OwnKey()) as client:
                router = client.get("/status").json()["routers"][0]["pid"]
                client.post("/restart", json={}).raise_for_status()
                wait_until(lambda: epoch_of(client) > before, 120, "it was not replaced")
                state = client.get("/status").json()
            assert state["routers"][0]["pid"] == router, "the client's connection is as it was"
            assert (state["restart"]["number"], process.poll()) == (3, None)
        finally:
            process.terminate()
            process.wait(60)
            log.seek(0)
            print(log.read())


def is_live(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/live", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def epoch_of(client: httpx.Client) -> int:
    return int(client.get("/status").json()["controller"].get("epoch", 0))


def order_with(url: str, file: Path, changes: dict[str, object], folder: Path) -> str:
    """What `kvrelay restart` says with these settings."""
    file.write_text(toml_text({**settings_of(folder), **changes}))
    done = order(url, "restart")
    assert done.returncode == 1, done.stdout
    return done.stderr
