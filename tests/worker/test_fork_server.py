"""Workers that are forked: they are as those that are started, and no fault of the server is one
of theirs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.model.parallel import link
from kvrelay.engine.wire.channel import BlockingChannel
from kvrelay.worker import fork_server
from kvrelay.worker.fork_server import (
    ForkOrder,
    KeepWeights,
    fork_key,
    fork_worker,
    have_kept,
)
from kvrelay.worker.messages import ProcessEnds
from kvrelay.worker.processes import GPUS, held_gpus, name_of, worker_processes

CLUSTER = f"test-fork-{os.getpid()}"
ENV = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "3"}


class Server:
    def __init__(
        self, linger_s: float = 60.0, cluster: str = CLUSTER, unused_s: float = 60.0
    ) -> None:
        self.held, its = socket.socketpair()
        with its:
            words = fork_key(cluster, ENV), str(linger_s), str(unused_s), fork_server.TITLE_ROOM
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.worker.forking", *words],
                stdin=its,
                stdout=subprocess.PIPE,
                env=dict(os.environ),
                text=True,
            )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    def close(self) -> None:
        self.held.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.close()


@contextlib.contextmanager
def forked(name: str, env: dict[str, str], num_ranks: int = 1) -> Iterator[tuple[Any, Any]]:
    """The connection to the server, or None; and the channel to the process."""
    mine, its = socket.socketpair()
    order = ForkOrder(name, env, "7", num_ranks)
    connection = fork_worker(CLUSTER, order, (its.fileno(), 1, 2))
    its.close()
    with mine:
        yield connection, None if connection is None else BlockingChannel(mine)
    if connection is not None:
        connection.close()


def seen_by(channel: BlockingChannel) -> Any:
    message = channel.receive()
    assert isinstance(message, ProcessEnds)
    return eval(message.reason)  # what `forking` has written


@pytest.mark.slow
def test_a_forked_process_is_as_one_that_was_started(server: Server) -> None:
    name = name_of(CLUSTER, "decode-0", 3)
    own = {GPUS: "80,81", "RAY_JOB_ID": "1"}
    with forked(name, ENV | own) as (_, channel):
        environment, folder, num_files = seen_by(channel)
        assert (environment, folder) == (ENV | own, os.getcwd())
        assert num_files == 5, "0, 1, 2, the channel, and the folder that was read"
        pid = channel.hello().pid
        # As the guardian of the next epoch and those of other workers look for it.
        (found,) = worker_processes(CLUSTER)
        assert (found[0].pid, *found[1:]) == (pid, "decode-0", 3)
        assert {"80": name, "81": name}.items() <= held_gpus().items()
        process = psutil.Process(pid)
        assert process.ppid() != server.process.pid
        assert os.getsid(pid) not in (os.getsid(0), os.getsid(server.process.pid))
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "7\n"
        with forked(name_of(CLUSTER, "decode-1", 1), ENV) as (_, other):
            other_pid = other.hello().pid
            assert GPUS not in psutil.Process(other_pid).environ()
            assert other_pid != pid
    gone = psutil.wait_procs([process], timeout=5)[1]
    assert not gone


@pytest.mark.slow
def test_ranks_are_forked_with_their_worker(server: Server) -> None:
    """They are its children, with which they are killed, and end when it does."""
    with forked(name_of(CLUSTER, "decode-0", 1), ENV, 3) as (_, channel):
        seen_by(channel)
        pid = channel.hello().pid
        ranks = seen_by(channel)
        assert [(parent, env) for _, parent, env, _ in ranks] == [
            (pid, ENV | {"RANK": "0"}),
            (pid, ENV | {"RANK": "1"}),
        ]
        assert [files for *_, files in ranks] == [5, 5], "0, 1, 2, its leader, and the folder"
        (found,) = worker_processes(CLUSTER)
        assert found[0].pid == pid, "a rank is not taken for a worker"
        processes = [psutil.Process(rank) for rank, *_ in ranks]
        for process in processes:
            assert process.cmdline()[:3] == [sys.executable, "-m", link.FOLLOWER]
        psutil.Process(pid).kill()
        assert not psutil.wait_procs(processes, timeout=5)[1]
        with pytest.raises(EOFError):
            channel.receive()  # its guardian hears of its end: no rank holds the channel


def test_what_differs_from_it_is_not_forked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.said == "listens"
    for differs in ({"OMP_NUM_THREADS": "4"}, {"LD_PRELOAD": "x.so"}, {"UCX_TLS": "tcp"}):
        with forked(name_of(CLUSTER, "decode-0", 1), ENV | differs) as (connection, _):
            assert connection is None, differs
    # The files of another version: it was installed while the server ran.
    changed = tmp_path / "module.py"
    changed.write_text("")
    monkeypatch.setattr(fork_server, "_installed", lambda _: [changed])
    before = fork_key(CLUSTER, ENV)
    assert fork_key(CLUSTER, ENV) == before
    changed.write_text("# the next version")
    assert fork_key(CLUSTER, ENV) != before
    with forked(name_of(CLUSTER, "decode-0", 1), ENV) as (connection, _):
        assert connection is None


def test_a_folder_that_others_reach_is_not_used(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever made it first could take the order, which has the cluster's token."""
    folder = Path(f"{tmp_path}/x{os.getuid()}")
    monkeypatch.setattr(fork_server, "FOLDER", f"{tmp_path}/x")
    folder.mkdir()
    folder.chmod(0o755)
    with forked(name_of(CLUSTER, "decode-0", 1), ENV) as (connection, _):
        assert connection is None
    assert "others may read it" in caplog.text
    assert not [*folder.iterdir()]


def test_our_modules_are_part_of_the_key() -> None:
    installed = {*fork_server._installed(ENV)}
    assert any(Path(fork_server.__file__).samefile(path) for path in installed if path.exists())


def test_an_order_that_nobody_can_follow_is_refused(server: Server) -> None:
    """And the server goes on."""
    with forked("x" * 300, ENV) as (connection, _):
        assert connection is None, "no room in its command line"
    with fork_server.listening_place(fork_key(CLUSTER, ENV)) as path:
        pass
    for data in (b"\0\0\0\4abcd", b"\xff\xff\xff\xff", b""):
        asker = fork_server.connect(path)
        assert asker is not None
        with asker:
            asker.sendall(data)
            asker.shutdown(socket.SHUT_WR)
            assert asker.recv(1) == b""
    with forked(name_of(CLUSTER, "decode-0", 1), ENV) as (connection, channel):
        assert connection is not None
        seen_by(channel)


def test_weights_are_kept_where_that_helps(tmp_path: Path) -> None:
    weights = KeepWeights(str(tmp_path), ModelSection(device="cpu"), EngineSection())
    assert weights.is_sensible
    assert not replace(weights, model=ModelSection(device="cuda")).is_sensible
    assert not replace(weights, engine=EngineSection(tensor_parallel_size=2)).is_sensible
    as_asked = replace(weights, model=ModelSection(), engine=EngineSection(threads=2, drafter="x"))
    assert as_asked.as_kept() == weights.as_kept(), "a guardian means what the server means"
    assert as_asked.as_kept() != replace(weights, engine=EngineSection(window=64)).as_kept()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(fork_server.MAX_KEPT_BYTES + 1)
    assert not weights.is_sensible, "who asks meanwhile would wait for long"


@pytest.mark.long  # it imports torch
def test_weights_that_are_not_there_are_the_workers_trouble(server: Server, tmp_path: Path) -> None:
    weights = KeepWeights(str(tmp_path), ModelSection(device="cpu"), EngineSection())
    have_kept(server.held, replace(weights, path=str(tmp_path / "missing")))
    with forked(name_of(CLUSTER, "decode-0", 1), ENV) as (connection, channel):
        assert connection is not None
        seen_by(channel)


@pytest.mark.slow
def test_one_listens_and_ends_when_nobody_is_connected(server: Server) -> None:
    second = Server()
    assert (server.said, second.said) == ("listens", "another listens")
    second.close()
    alone = Server(linger_s=0.2, cluster=f"{CLUSTER}-alone")
    assert alone.said == "listens"
    time.sleep(0.4)
    assert alone.process.poll() is None, "somebody holds it"
    alone.held.close()
    assert alone.process.wait(5) == 0
    unused = Server(linger_s=0.2, cluster=f"{CLUSTER}-unused", unused_s=0.2)
    assert unused.process.wait(5) == 0, "nobody is its equal"
    unused.close()


BUSY = """
import socket, sys, time
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("listens", flush=True)
connection = server.accept()[0]
began = time.process_time()
while time.process_time() < began + float(sys.argv[2]):
    pass
connection.recv(1 << 16)
connection.sendall(b"+")
connection.recv(1)
"""


@pytest.mark.parametrize("is_patient", [True, False])
def test_a_server_that_works_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, is_patient: bool
) -> None:
    """On a busy machine it was killed, and each worker imported torch itself."""
    monkeypatch.setattr(fork_server, "ANSWER_S", 0.2)
    monkeypatch.setattr(fork_server, "MAX_WAITS", 10_000 if is_patient else 2)
    works = iter(range(100_000))  # what the kernel gives a process in 0.2 s is not ours to say
    monkeypatch.setattr(fork_server, "_cpu_s", lambda _: next(works))
    cluster = f"{CLUSTER}-busy-{is_patient}"
    with fork_server.listening_place(fork_key(cluster, ENV)) as path:
        words = [sys.executable, "-c", BUSY, str(path), "0.5" if is_patient else "600"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
    try:
        order = ForkOrder(name_of(cluster, "decode-0", 1), ENV, "0")
        connection = fork_worker(cluster, order, (0, 1, 2))
        assert (connection is not None) == is_patient
        if connection is not None:
            connection.close()
        assert process.wait(10) == (0 if is_patient else -signal.SIGKILL)
    finally:
        process.kill()
        process.wait()


def test_what_a_server_works_is_seen() -> None:
    before_s, until = fork_server._cpu_s(os.getpid()), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert fork_server._cpu_s(os.getpid()) > before_s
    assert fork_server._cpu_s(1 << 30) == 0.0


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_does_not_answer_costs_only_time(
    monkeypatch: pytest.MonkeyPatch, fault: signal.Signals
) -> None:
    monkeypatch.setattr(fork_server, "ANSWER_S", 0.2)
    cluster = f"{CLUSTER}-{fault.name}"
    lost = Server(cluster=cluster)
    try:
        os.kill(lost.process.pid, fault)
        order = ForkOrder(name_of(cluster, "decode-0", 1), ENV, "0")
        assert fork_worker(cluster, order, (0, 1, 2)) is None
        assert lost.process.wait(5) == -signal.SIGKILL, "or the next one would wait, too"
    finally:
        lost.close()
