"""A server on a machine of its own is there before its Ray, and without it."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.serving.served import Served
from kvrelay.worker.processes import FORK_MODULE, MODULE
from tests.e2e.serving import Status, all_up, ask, status, wait_for, wait_until, worker_of
from tests.operations.served import free_port
from tests.support.random_model import make_model

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(600)]


def is_replaced(before: Status, name: str) -> Callable[[Status], bool]:
    old = worker_of(before, name)["epoch"]
    return lambda state: worker_of(state, name)["epoch"] > old and all_up(state)


def replace(url: str, name: str) -> None:
    before = status(url)
    psutil.Process(worker_of(before, name)["pid"]).kill()
    wait_for(url, is_replaced(before, name), 120, f"{name} is not started again")
    assert "Paris" in ask(url)


def guardians(served: Served) -> set[str]:
    found = psutil.Process(served.process.pid).children(recursive=True)
    titles = {process.cmdline()[0].partition(".")[0] for process in found if process.cmdline()}
    return titles & {"ray::DecodeWorker", "ray::PrefillWorker"}


def test_workers_start_without_ray_and_by_ray_once_it_is_there() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        ray_folder = Path(folder) / "ray"
        ray_folder.touch()  # a file, where Ray makes a folder
        with Served({}, env={"RAY_TMPDIR": str(ray_folder)}, with_ray=False) as served:
            url = served.url
            assert "Paris" in ask(url)
            assert not guardians(served)
            replace(url, "decode-0")
            wait_for(url, lambda s: s["controller"]["has_ray"] is False, 120, "it is not said")
            replace(url, "prefill-0")
            ray_folder.unlink()
            ray_folder.mkdir()
            wait_for(url, lambda state: state["controller"].get("has_ray"), 120, "no Ray")
            replace(url, "decode-0")
            assert guardians(served) == {"ray::DecodeWorker"}
            machines = {worker["machine"] for worker in status(url)["workers"]}
            assert machines == {"here"}
        assert served.process.returncode == 0


class Held:
    """From `with` to its end no worker of a cluster comes to anything: each is stopped, and so is
    what it would be forked from."""

    MODULES = (MODULE, FORK_MODULE)

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Held:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for process in self._found():
            process.resume()

    def _found(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter(["cmdline"]):
            if {*self.MODULES} & {*(process.info["cmdline"] or ())}:
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    is_held = process.environ().get("KVRELAY_HELD") == self._mark
                    if is_held and os.getsid(process.pid) == process.pid:  # it is a daemon now
                        yield process

    def _run(self) -> None:
        while not self._is_over.wait(0.01):
            for process in self._found():
                with contextlib.suppress(psutil.Error):
                    process.suspend()


def test_requests_that_come_before_a_worker_wait_for_it(tmp_path: Path) -> None:
    """A client sees the API listen as soon as `kvrelay serve` begins."""
    mark, port = uuid.uuid4().hex, free_port()
    url = f"http://127.0.0.1:{port}"
    settings = {"model.name": str(make_model(tmp_path)), "engine.num_blocks": 64}
    settings |= {"tiers.host_gib": 0}

    def ask() -> httpx.Response:
        body = {"model": tmp_path.name, "prompt": "The capital of France is", "max_tokens": 5}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=240)

    held = Held(mark)
    with ThreadPoolExecutor(1) as clients:
        with held:
            served = Served(settings, "--port", str(port), env={"KVRELAY_HELD": mark})
            wait_until(lambda: is_open(port), 60, "nothing listens")
            answer = clients.submit(ask)
            assert httpx.get(f"{url}/health/live", timeout=120).status_code == 200
            ready = httpx.get(f"{url}/health/ready", timeout=120)
            assert (ready.status_code, ready.json()["workers_up"]) == (503, 0)
            wait_for(url, lambda state: state["num_queued"] == 1, 60, "it does not wait")
            assert not answer.done()
        with served:
            assert answer.result(240).json()["usage"]["completion_tokens"] > 0
            assert httpx.get(f"{url}/health/ready", timeout=120).status_code == 200


def is_open(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
