"""What a server cannot do without goes away and comes back: its log, files, Ray, the right time.

Sixteen seeded streams run all the while, and say what they say at rest. All is up again without a
hand within half a minute of the fault's end, and the metric that its alert reads has shown it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving.served import READY_TIMEOUT_S, OwnedServer, Served, toml_text
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.engine import native
from tests.cluster.state.stores import Server
from tests.e2e.serving import KVRELAY, Status, all_up, status, stream, wait_for, worker_of
from tests.e2e.test_two_nodes import RAY_ENV, RayNode
from tests.operations.served import free_port

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(900)]

NUM_STREAMS = 16
UP_WITHIN_S = 30.0
RAY_AWAY_S = float(os.environ.get("RAY_AWAY_S", "75"))  # Ray ends a driver after 60


class Streams:
    """From `with` to its end they run, each begun again when it ends. `first`: what each says when
    nothing is wrong."""

    def __init__(self, url: str, max_tokens: int = 80) -> None:
        self._url = url
        self._options = {"temperature": 0.9, "max_tokens": max_tokens}
        self._is_over = threading.Event()
        self.wrong: list[str] = []
        self.num_done = 0
        self.first: dict[int, str] = {}
        self._run_all(lambda seed: self.first.update({seed: self._ask(seed)}))

    def _ask(self, seed: int) -> str:
        return stream(self._url, {**self._options, "seed": seed})

    def _run_all(self, run: Callable[[int], Any]) -> list[threading.Thread]:
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        if not self.first:
            for thread in threads:
                thread.join()
        return threads

    def _repeat(self, seed: int) -> None:
        while not self._is_over.is_set():
            try:
                text = self._ask(seed)
            except Exception as error:
                self.wrong.append(f"{seed}: {error!r}")
                return
            if text != self.first[seed]:
                self.wrong.append(f"{seed}: {text!r} instead of {self.first[seed]!r}")
            self.num_done += 1

    def __enter__(self) -> Self:
        assert len(self.first) == NUM_STREAMS
        self._threads = self._run_all(self._repeat)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        assert not self.wrong, self.wrong
        assert self.num_done >= NUM_STREAMS


def metric(url: str, name: str) -> dict[tuple[str, ...], float]:
    text = httpx.get(f"{url}/metrics", timeout=20, auth=OwnKey()).text
    families = text_string_to_metric_families(text)
    samples = (sample for family in families for sample in family.samples)
    return {tuple(s.labels.values()): s.value for s in samples if s.name == name}


def is_well(state: Status) -> bool:
    told = state["controller"]
    return bool(told["known"] and told["age_s"] < 3 and told.get("has_ray") and all_up(state))


def is_replaced(before: Status, name: str) -> Callable[[Status], bool]:
    old = worker_of(before, name)["epoch"]
    return lambda state: worker_of(state, name)["epoch"] > old and is_well(state)


def wait_up(url: str, wanted: Callable[[Status], bool], why: str) -> None:
    """Within half a minute; on a machine that others use, as much later as they make it."""
    started = time.monotonic()
    wait_for(url, wanted, UP_WITHIN_S, why)
    took_s = time.monotonic() - started
    print(f"up again {took_s:.1f} s after the fault, at a load of {os.getloadavg()[0]:.1f}")


def kill_worker(url: str, name: str = "decode-0") -> None:
    psutil.Process(worker_of(status(url), name)["pid"]).kill()


def processes(url: str, supervisor: int) -> list[psutil.Process]:
    """The supervisor, the controller, routers and workers, without Ray's."""
    state = status(url)
    pids = [supervisor, state["controller"]["pid"]]
    pids += [each["pid"] for each in (*state["workers"], *state["routers"])]
    return [psutil.Process(pid) for pid in pids]


class SilentServer(OwnedServer):
    """Its stderr is a file that the test owns. From `with` to its end."""

    def __init__(self, stderr: int, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        config = folder / "kvrelay.toml"
        config.write_text(toml_text({"sessions.state_dir": str(folder / "state")}))
        command = [*KVRELAY, "serve", "--config", str(config), "--port", str(port)]
        self.process = subprocess.Popen(command, stderr=stderr)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.HTTPError, KeyError):
                if is_well(status(self.url)):
                    return
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.2)

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_log_disk_ends_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "log") as disk:
        log = (disk / "server.log").open("ab", buffering=0)
        with log, SilentServer(log.fileno(), tmp_path) as served, Streams(served.url):
            url, fill = served.url, disk / "fill"
            with fill.open("wb", buffering=0) as file:
                for full in (file, log):  # also what is left of the log's last page
                    with contextlib.suppress(OSError):
                        while full.write(b"\n"):
                            pass
            for name in ("decode-0", "prefill-0"):
                before = status(url)
                kill_worker(url, name)
                wait_up(url, is_replaced(before, name), f"{name} is not back")
            assert metric(url, "kvrelay_log_lines_dropped_total")["controller",] > 0
            fill.unlink()
            before = status(url)
            kill_worker(url)
            wait_up(url, is_replaced(before, "decode-0"), "the worker is not back")
            text = (disk / "server.log").read_text()
            assert "lines of this log found no room and are lost" in text
            assert "decode-0 (epoch 2) is gone" in text
            told = metric(url, "kvrelay_log_lines_dropped_total")["controller",]
            time.sleep(3)
            assert metric(url, "kvrelay_log_lines_dropped_total")["controller",] == told


def test_a_log_that_nobody_reads_holds_nobody_up(tmp_path: Path) -> None:
    """From the start of the server to its end, not a byte of the pipe is read."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, b"x" * 64):
            pass
    os.set_blocking(writing, True)
    served = SilentServer(writing, tmp_path)
    with served, Streams(served.url):
        before = status(served.url)
        psutil.Process(before["controller"]["pid"]).kill()
        kill_worker(served.url)
        wait_up(served.url, is_replaced(before, "decode-0"), "the worker is not back")
    assert served.process.returncode == 0
    os.close(reading)
    os.close(writing)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served({}) as served:
        wait_for(served.url, is_well, READY_TIMEOUT_S, "it is not up")
        yield served


def test_without_free_files_streams_go_on(server: Served) -> None:
    url = server.url
    with Streams(url):
        found = processes(url, server.process.pid)
        limits = [each.rlimit(resource.RLIMIT_NOFILE) for each in found]
        before = status(url)
        try:
            for each, (_, hard) in zip(found, limits, strict=True):
                each.rlimit(resource.RLIMIT_NOFILE, (each.num_fds(), hard))
            psutil.Process(worker_of(before, "decode-0")["pid"]).kill()
            time.sleep(10)
        finally:
            for each, limit in zip(found, limits, strict=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.rlimit(resource.RLIMIT_NOFILE, limit)
        wait_up(url, is_replaced(before, "decode-0"), "the worker is not back")


def test_a_ray_of_its_own_that_dies_is_started_again(server: Served) -> None:
    url = server.url
    with Streams(url):
        before, lives = status(url), {}
        for each in psutil.Process(server.process.pid).children(recursive=True):
            if "gcs_server" in each.name():
                each.kill()
                lives[each.pid] = each
        assert len(lives) == 1
        epoch = before["controller"]["epoch"]
        wait_up(
            url,
            lambda state: state["controller"].get("epoch", 0) > epoch and is_well(state),
            "there is no controller with Ray",
        )
        now = status(url)
        assert [w["pid"] for w in now["workers"]] == [w["pid"] for w in before["workers"]]
        kill_worker(url)
        wait_up(url, is_replaced(now, "decode-0"), "the new Ray starts no worker")


@contextlib.contextmanager
def head(port: int) -> Iterator[RayNode]:
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        where = ("--head", f"--port={port}", "--include-dashboard=0")
        node = RayNode(Path(log.name), *where, num_cpus=2)
        try:
            node.wait_for("Ray runtime started", READY_TIMEOUT_S)
            yield node
        finally:
            node.kill()


def test_a_ray_that_is_away_is_joined_again_when_it_is_back() -> None:
    """Its head was killed, and is started again by others, after a minute and more."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        ray = stack.enter_context(head(port))
        served = stack.enter_context(Served({}, "--address", f"127.0.0.1:{port}", env=RAY_ENV))
        url = served.url
        wait_for(url, is_well, READY_TIMEOUT_S, "it is not up")
        stack.enter_context(Streams(url))
        before = status(url)
        ray.kill()
        gone_at = time.monotonic()
        wait_for(url, lambda state: not state["controller"]["has_ray"], 30, "it is not seen")
        assert set(metric(url, "kvrelay_controller_has_ray").values()) == {0.0}
        kill_worker(url)
        time.sleep(max(0.0, gone_at + RAY_AWAY_S - time.monotonic()))
        state = status(url)
        assert not state["controller"].get("has_ray")
        assert state["controller"]["age_s"] < 5
        assert worker_of(state, "prefill-0")["pid"] == worker_of(before, "prefill-0")["pid"]
        stack.enter_context(head(port))
        wait_up(url, is_replaced(before, "decode-0"), "the worker is not back")
        assert set(metric(url, "kvrelay_controller_has_ray").values()) == {1.0}


@pytest.mark.parametrize("jump", ["+3600", "-3600"])
def test_a_clock_that_jumps_by_an_hour_is_noticed_by_no_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: str
) -> None:
    """Redis' clock jumps too. The true time stays in Ray's own processes, the kernel's stamps
    (files, starts of processes) and its timers."""
    at = tmp_path / "clock"
    set_off(at, 0)
    monkeypatch.setenv("LD_PRELOAD", str(native.build(Path(__file__).with_name("clock.c"))))
    monkeypatch.setenv("CLOCK_OFFSET_FILE", str(at))
    monkeypatch.setenv("RAY_LD_PRELOAD_ON_WORKERS", "1")  # without it, they start ours with none
    settings = {"tls.frames": True, "cluster.routers": 2, "sessions.state_dir": str(tmp_path)}
    redis = Server(tmp_path)
    with contextlib.ExitStack() as stack:
        redis.start()
        stack.callback(redis.kill)
        served = stack.enter_context(Served({**settings, "state.url": redis.url}))
        url = served.url
        wait_for(url, is_well, READY_TIMEOUT_S, "it is not up")
        with Streams(url):
            before = status(url)
            set_off(at, int(jump))
            wait_for(url, lambda _: off_s(url) > 3500, 20, "the clock has not jumped")
            time.sleep(10)
            now = status(url)
            assert is_well(now)
            assert epochs(now) == epochs(before)
            assert (now["state"]["up"], now["state"]["outages"]) == (True, 0)
            kill_worker(url)
            wait_up(url, is_replaced(now, "decode-0"), "the worker is not back")
            set_off(at, 0)
            wait_for(url, lambda _: off_s(url) < 2, 20, "the clock is not back")
            time.sleep(5)
            assert is_well(status(url))


def epochs(state: Status) -> list[int]:
    return [each["epoch"] for each in (state["controller"], *state["workers"])]


def set_off(at: Path, seconds: int) -> None:
    with at.open("r+b" if at.exists() else "wb") as file:
        file.write(seconds.to_bytes(8, sys.byteorder, signed=True))


def off_s(url: str) -> float:
    """By how much the server's clock differs, as its alert sees it."""
    (there,) = metric(url, "kvrelay_clock_seconds").values()
    return abs(there - time.time())
