"""A state disk without room: streams go on, processes that die come back, and no hand is needed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.serving.served import Served
from tests.e2e.serving import MODEL, Status, all_up, status, stream, wait_for, worker_of

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small disk needs the right to mount one")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass


def test_a_full_state_disk_ends_nothing(disk: Path) -> None:
    options = {"temperature": 0, "max_tokens": 300}
    with Served({"sessions.state_dir": f"{disk}/state"}) as served:
        url = served.url
        wait_for(url, all_up, 60, "workers are not up")
        undisturbed = stream(url, options)
        fill(disk / "fill")
        before = status(url)

        def is_new(state: Status) -> bool:
            mine, old = state["controller"], before["controller"]
            return bool(mine["epoch"] > old["epoch"] and mine["has_ray"] and all_up(state))

        def disturb(number: int) -> None:
            if number == 20:
                os.kill(before["controller"]["pid"], signal.SIGKILL)
            if number == 40:
                os.kill(worker_of(before, "decode-0")["pid"], signal.SIGKILL)

        assert stream(url, options, disturb) == undisturbed
        wait_for(url, is_new, 30, "there is no new controller, or it does not know the workers")
        wait_for(
            url,
            lambda state: worker_of(state, "decode-0")["epoch"] == 2 and all_up(state),
            60,
            "the worker is not back",
        )
        body = {"model": MODEL, "input": "Hi", "max_output_tokens": 4}
        assert httpx.post(f"{url}/v1/responses", json=body, timeout=60).status_code == 200
        assert "No space left on device" in "".join(served.lines)
        (disk / "fill").unlink()
        before = status(url)
        os.kill(before["controller"]["pid"], signal.SIGKILL)
        wait_for(url, is_new, 30, "there is no new controller")
        (kept,) = (disk / "state/running").iterdir()
        assert {path.name for path in kept.iterdir()} == {"life", "controller"}
