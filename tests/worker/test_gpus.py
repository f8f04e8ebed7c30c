"""Which GPUs a worker takes: never one that the process of another worker holds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvrelay.worker.guardian import WorkerGuardian
from kvrelay.worker.processes import GPUS, MODULE, choose_gpus, choosing, held_gpus


@pytest.mark.parametrize(
    ("num", "given", "here", "held", "chosen"),
    [
        (1, ["0"], ["0", "1"], {}, ["0"]),
        (1, ["0"], ["0", "1"], {"0": "w"}, ["1"]),
        (2, ["0", "1"], ["0", "1", "2", "3"], {"1": "w"}, ["0", "2"]),
        (2, ["0", "1"], ["0", "1", "2"], {"1": "w", "2": "w"}, ["0"]),  # it has to wait
        (1, ["GPU-a"], ["GPU-a", "MIG-b"], {"GPU-a": "w"}, ["MIG-b"]),
        (1, ["0"], [], {"0": "w"}, []),
    ],
)
def test_choice(
    num: int, given: list[str], here: list[str], held: dict[str, str], chosen: list[str]
) -> None:
    assert choose_gpus(num, given, here, held) == chosen


@contextmanager
def holder(name: str, gpus: str) -> Iterator[None]:
    """A process that looks like a worker's which holds these."""
    sleep = "import sys, time; print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", sleep, MODULE, name]
    env = os.environ | {GPUS: gpus}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_what_a_worker_holds_is_seen_whoever_has_started_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where Ray has ended and begun anew: it gives 0 and 1 again."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "90,91")
    monkeypatch.setattr("kvrelay.worker.guardian.gpus_here", lambda: ["90", "91", "92", "93"])
    guardian = WorkerGuardian("decode-1")
    with holder("kvrelay-x/decode-0/1", "90,92"):
        held = held_gpus()
        assert held["90"] == held["92"] == "kvrelay-x/decode-0/1"
        env, why_not = guardian._environment(2, 1)
        assert (env[GPUS], env["CUDA_VISIBLE_DEVICES"], why_not) == ("91,93", "91,93", "")
        _, why_not = guardian._environment(3, 1)
        assert why_not.startswith("3 GPU(s) are needed, 2 are free; held: 90 by kvrelay-x/decode-0")
        assert GPUS not in guardian._environment(0, 1)[0]
    assert "90" not in held_gpus()
    assert guardian._environment(2, 1)[0][GPUS] == "90,91"


def test_one_at_a_time_chooses() -> None:
    script = (
        "from kvrelay.worker.processes import choosing\n"
        "with choosing():\n    print(flush=True)\n    input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    other.stdout.readline()
    began = time.monotonic()
    ended = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill {other.pid}"])
    with choosing():
        assert time.monotonic() - began > 0.4
    other.wait()
    ended.wait()


def test_a_raylets_own_view_of_gpus_comes_first() -> None:
    script = "from kvrelay.worker.processes import gpus_here; print(gpus_here())"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "4, 6"}
    shell = ["sh", "-c", f"CUDA_VISIBLE_DEVICES=6 {sys.executable} -c '{script}'; true"]
    seen = subprocess.run(shell, env=env, capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "['4', '6']"
