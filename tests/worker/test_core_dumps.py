"""What a worker leaves that ends because a step hangs; CUDA's driver is played by a thread."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvrelay.cluster.config import ConfigError, build_config
from kvrelay.engine.wire.channel import BlockingChannel, command
from kvrelay.worker import core_dumps
from kvrelay.worker.core_dumps import CORE, KEPT, PIPE, STACKS, CoreDumps
from kvrelay.worker.messages import ProcessEnds, WorkerStarted

HOST, PID = socket.gethostname(), os.getpid()
START_S = 120.0


class Driver:
    """Makes the pipe of a process, and dumps in two parts when something is written to it."""

    def __init__(self, folder: Path, pid: int = PID, pause_s: float = 0.2) -> None:
        self.pipe, self.core = folder / f"{PIPE}.{HOST}.{pid}", folder / f"{CORE}.{HOST}.{pid}.17"
        os.mkfifo(self.pipe)
        self.fd = os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(self.fd, True)
        self.pause_s = pause_s
        self.thread = threading.Thread(target=self._run, name="cuda-driver", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not os.read(self.fd, 1):  # the end of a file, as long as there is no writer
            time.sleep(0.01)
        for part in (b"first part", b", and the rest"):
            with self.core.open("ab") as file:
                file.write(part)
            time.sleep(self.pause_s)


@pytest.fixture
def dumps(tmp_path: Path) -> CoreDumps:
    found = CoreDumps(str(tmp_path), "decode-0", on_gpu=True)
    found.prepare({})
    return found


def test_the_environment_is_set_for_a_gpu_and_what_the_operator_chose_stands(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "dumps" / "here"
    environment = {"CUDA_ENABLE_LIGHTWEIGHT_COREDUMP": "0", "CUDA_COREDUMP_FILE": "elsewhere"}
    CoreDumps(str(folder), "decode-0", on_gpu=True).prepare(environment)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert environment["CUDA_ENABLE_USER_TRIGGERED_COREDUMP"] == "1"
    assert environment["CUDA_ENABLE_LIGHTWEIGHT_COREDUMP"] == "0"
    assert environment["CUDA_COREDUMP_PIPE"] == f"{folder}/gpu-pipe.%h.%p"
    assert environment["CUDA_COREDUMP_FILE"] == f"{folder}/gpu-core.%h.%p.%t"
    for dumps in (
        CoreDumps(str(tmp_path), "decode-0", on_gpu=False),
        CoreDumps("", "decode-0", on_gpu=True),
    ):
        environment = {}
        dumps.prepare(environment)
        assert environment == {}


def test_a_driver_is_asked_and_waited_for(
    dumps: CoreDumps, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(tmp_path)
    with caplog.at_level(logging.INFO):
        stacks = dumps.write_stacks("a step has not ended after 30 s")
        (core,) = dumps.dump_gpus()
    assert stacks is not None
    assert core == driver.core
    assert core.read_bytes() == b"first part, and the rest"
    text = stacks.read_text()
    assert f"decode-0, process {PID} at {HOST}" in text
    assert ": a step has not ended after 30 s\n" in text
    assert "is cuda-driver" in text
    assert "in _run" in text
    told = caplog.text
    assert f"decode-0 hangs: the stacks of its threads are in {stacks}" in told
    assert f"decode-0 hangs: the state of its GPU is in {core}" in told


@pytest.mark.slow
def test_a_dump_of_before_is_not_taken_for_this_one(dumps: CoreDumps, tmp_path: Path) -> None:
    """An operator may have asked for one: a driver gives both the same name."""
    driver = Driver(tmp_path)
    driver.core.write_bytes(b"complete, ")
    (core,) = dumps.dump_gpus()
    assert core.read_bytes() == b"complete, first part, and the rest"
    driver.thread.join()
    assert dumps.dump_gpus(timeout_s=1.5) == [], "it was not written again: this driver dumps once"


def test_a_dump_that_does_not_end_is_not_waited_for(
    dumps: CoreDumps, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(tmp_path)
    driver.core.touch()
    driver.core = tmp_path / "nowhere"
    started = time.monotonic()
    assert dumps.dump_gpus(timeout_s=1.0) == []
    assert time.monotonic() - started < 3.0
    assert f"no complete dump of processes [{PID}] in time" in caplog.text


def test_a_driver_that_has_ended_is_not_waited_for(
    dumps: CoreDumps, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / f"{PIPE}.{HOST}.{PID}")
    started = time.monotonic()
    assert dumps.dump_gpus() == []
    assert time.monotonic() - started < 2.0
    assert "no CUDA driver reads a pipe" in caplog.text


def test_the_processes_of_other_ranks_are_asked_too(dumps: CoreDumps, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
        drivers = [Driver(tmp_path), Driver(tmp_path, rank.pid)]
        cores = dumps.dump_gpus()
        rank.kill()
    assert sorted(cores) == sorted(driver.core for driver in drivers)


def test_only_the_newest_are_kept_and_pipes_of_the_dead_go(tmp_path: Path) -> None:
    for number in range(KEPT + 5):
        for kind in (STACKS, CORE):
            path = tmp_path / f"{kind}.{HOST}.{number}"
            path.touch()
            os.utime(path, (1000.0 + number,) * 2)
    mine = tmp_path / f"{PIPE}.{HOST}.{PID}"
    pipes = [mine, tmp_path / f"{PIPE}.{HOST}.999999999", tmp_path / f"{PIPE}.other.999999999"]
    for pipe in pipes:
        os.mkfifo(pipe)
    CoreDumps(str(tmp_path), "decode-0", on_gpu=False).prepare({})
    for kind in (STACKS, CORE):
        left = sorted(int(path.suffix[1:]) for path in tmp_path.glob(f"{kind}.*"))
        assert left == list(range(5, KEPT + 5))
    assert [pipe.exists() for pipe in pipes] == [True, False, True]


def test_a_folder_that_cannot_be_is_told_and_keeps_no_worker_from_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    dumps = CoreDumps(str(tmp_path / "file" / "folder"), "decode-0", on_gpu=True)
    environment: dict[str, str] = {}
    dumps.prepare(environment)
    assert environment == {}
    assert "nothing is kept" in caplog.text
    assert (dumps.write_stacks("why"), dumps.dump_gpus()) == (None, [])


def test_it_ends_before_the_controller_ends_it() -> None:
    grace_s = build_config({}, "").cluster.silent_grace_s
    assert grace_s - 1.0 >= core_dumps.TAKE_S


def test_a_folder_has_to_be_said_whole() -> None:
    with pytest.raises(ConfigError, match=r"core_dumps.*an absolute path"):
        build_config({"engine": {"core_dumps": "dumps"}}, "x.toml")


@pytest.mark.slow
def test_a_worker_whose_step_hangs_says_where_before_it_ends(tmp_path: Path) -> None:
    """A process of its own, all of it real but the function that computes."""
    mine, its = socket.socketpair()
    with mine:
        with its:
            done = subprocess.run(
                command("tests.worker.hung_worker", str(tmp_path), end=its),
                capture_output=True,
                timeout=START_S,
                check=False,
                pass_fds=(its.fileno(),),
            )
        assert done.returncode == 1, done.stderr.decode()
        guardian = BlockingChannel(mine)
        pid = guardian.hello().pid
        started, ending = guardian.receive(), guardian.receive()
    assert isinstance(started, WorkerStarted)
    assert isinstance(ending, ProcessEnds)
    (stacks,) = tmp_path.iterdir()
    assert ending.reason == f"NodeExit: a step has not ended after 1 s; stacks: {stacks}"
    assert stacks.name.startswith(f"stacks.decode-0.{HOST}.{pid}.")
    text = stacks.read_text()
    assert "a step has not ended after 1 s" in text
    (number,) = [line.split()[1] for line in text.splitlines() if "is decode-0-step" in line]
    _, _, stack = text.partition(f"{number} (most recent call first):")
    innermost = stack.partition("\n\n")[0]
    assert "in wait_for_a_kernel_that_hangs" in innermost
    assert f"the stacks of its threads are in {stacks}" in done.stderr.decode()
