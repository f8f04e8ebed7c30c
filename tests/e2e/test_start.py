"""A server on a machine of its own is there before its Ray, and without it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks.serving.served import Served
from tests.e2e.serving import Status, all_up, ask, status, wait_for, worker_of

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
        with Served({}, env={"RAY_TMPDIR": str(ray_folder)}) as served:
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
