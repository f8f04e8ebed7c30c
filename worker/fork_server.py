"""A process on each machine that has imported what a worker needs, and forks itself for each that
starts: most of a start on a CPU is Python and torch, and its memory is then shared.

This is its clients' side: the guardian of a worker asks it, and where there is none starts the
worker as a process of its own, and then the server, for the next one. `cluster.processes.
fork_server` is the server.

Life: the one that `kvrelay serve` starts listens before it imports, so who asks early waits; the
one of a guardian imports at low priority first, and workers start without it meanwhile. It lives
while somebody holds a connection to it (guardians, and `kvrelay serve` once a worker has come of
it) and for `LINGER_S` after, and ends with its cluster. It has no CUDA context and, when it forks,
no thread. Weights of small models on a CPU it packs once for all: workers share these pages. Of
several models it has those that were wanted last.

A worker may be forked only from what it would have started as. So the socket's name is a digest of
the installed files, the interpreter, the environment, and the kernel's namespaces; after an upgrade
nobody asks the old server, and it ends. Whatever goes wrong costs the time that it would have
saved: the asker starts the worker itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec.structs import replace

import kvrelay.engine
from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.files import held_lock, own_folder
from kvrelay.engine.installation import interpreter
from kvrelay.engine.wire.channel import command
from kvrelay.worker.processes import FORK_MODULE, fork_server_name

log = logging.getLogger("kvrelay.worker")

ANSWER_S = 20.0  # for an answer, or for a part of the imports before it
MAX_WAITS = 6  # each of ANSWER_S, as long as it works
LOCK_S = 10.0  # for others who look into the folder
REQUEST_S = 5.0  # to say what is wanted, once that has begun
UNUSED_S = 300.0  # that it lives for its starter alone: no guardian may be its equal
LINGER_S = 30.0  # that it lives without a connection: a controller may be starting again
MAX_CONNECTIONS = 256  # one for each worker of the machine, and a few
MAX_ORDER_BYTES = 1 << 20
MAX_KEPT_BYTES = 1 << 30  # all checkpoints together: 1 GiB is 2 s of work
FORKED, FAILED = b"+", b"-"
TITLE_ROOM = "-" * 256  # in its command line: a worker's is written over it

PACKAGES = (
    "engine",
    "kvtransfer",
    "worker",
    "prefill_worker",
    "decode_worker",
    "router",
    "cluster",
)
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
# What may differ between it and a worker: it is read after the fork, or not at all.
OWN_VARIABLES = {
    *("CUDA_VISIBLE_DEVICES", "KVRELAY_GPUS"),
    *("PYTHONBREAKPOINT", "SPT_NOENV"),  # set by Ray
}
OWN_PREFIXES = ("RAY_", "CUDA_COREDUMP", "CUDA_ENABLE")
FOLDER = "/tmp/kvrelay-fork-"  # and the user's number


class ForkOrder(msgspec.Struct, frozen=True):
    """What a worker's process gets from who starts it, besides its open files."""

    name: str  # as in `name_of`
    environment: dict[str, str]
    oom_score: str  # its /proc/self/oom_score_adj
    num_ranks: int = 1  # its processes on this machine: the others are forked from it


class KeepWeights(msgspec.Struct, frozen=True):
    """Has the server load a checkpoint, once, for the workers that it forks from then on."""

    path: str
    model: ModelSection
    engine: EngineSection  # that a worker gets

    @property
    def is_sensible(self) -> bool:
        """Each rank has another part of them, a GPU's memory is not forked, and who asks meanwhile
        must not wait for long."""
        if self.engine.tensor_parallel_size > 1 or self.model.device.startswith("cuda"):
            return False
        return self.num_bytes <= MAX_KEPT_BYTES

    def as_kept(self) -> KeepWeights:
        """Only what weights depend on: all who mean the same ask in the same words."""
        engine = EngineSection(window=self.engine.window, sinks=self.engine.sinks)
        return KeepWeights(self.path, replace(self.model, device="cpu"), engine)

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in Path(self.path).glob("*.safetensors"))

    @property
    def name(self) -> str:
        """One for each model of a server: other weights of the same model take their place."""
        return msgspec.json.encode(self.model).decode()


def fork_key(cluster: str, environment: Mapping[str, str]) -> str:
    """Names all that a process that is forked would have in common with one that is started."""
    digest = blake2b(digest_size=12, person=b"kvrelay-fork")

    def add(*what: object) -> None:
        digest.update(repr(what).encode() + b"\0")

    add(os.getcwd())  # where modules are looked for first
    python = interpreter(sys.executable)  # as of a process that has pinned its installation
    add(cluster, python, sys.version, os.getuid(), os.getgid(), os.sched_getaffinity(0))
    add(*(os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES))
    add(Path("/proc/self/cgroup").read_text())
    for name, value in sorted(environment.items()):
        if name not in OWN_VARIABLES and not name.startswith(OWN_PREFIXES):
            add(name, value)
    for path in sorted(_installed(environment)):
        with contextlib.suppress(OSError):
            status = path.stat()
            add(str(path), status.st_ino, status.st_size, status.st_mtime_ns)
    return digest.hexdigest()


def _installed(environment: Mapping[str, str]) -> Iterator[Path]:
    """Our own modules, and the folders that others are installed in."""
    yield from (Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib"))
    yield from map(Path, filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    package = Path(str(kvrelay.engine.__file__)).parents[1].resolve()
    for name in PACKAGES:
        yield from (package / name).rglob("*.py")


@contextlib.contextmanager
def listening_place(key: str) -> Iterator[Path]:
    """Where the server of `key` listens, while nobody else changes that folder. Raises OSError
    where the folder is not this user's alone, or is in use for long."""
    folder = own_folder(Path(f"{FOLDER}{os.getuid()}"), private=True)
    with held_lock(folder / "lock", LOCK_S):
        yield folder / f"{key}.sock"


def connect(path: Path) -> socket.socket | None:
    """Returns None if nobody listens there."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(ANSWER_S)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    return connection


def fork_worker(cluster: str, order: ForkOrder, files: Sequence[int]) -> socket.socket | None:
    """Has a worker's process forked, with these files as its channel, stdout and stderr. Returns a
    connection to the server, to be kept open; None: there is no process."""
    try:
        with listening_place(fork_key(cluster, order.environment)) as path:
            connection = connect(path)
    except OSError as error:
        log.warning("no worker is forked: %s", error)
        return None
    if connection is None:
        return None
    body = msgspec.msgpack.encode(order)
    try:
        socket.send_fds(connection, [len(body).to_bytes(4, "big")], files)
        connection.sendall(body)
        answer = _answer(connection)
    except TimeoutError:
        log.warning("the process that forks workers does not answer, and is ended")
        _kill_peer(connection)
        answer = b""
    except OSError:  # it has ended
        answer = b""
    if answer == FORKED:
        return connection
    connection.close()
    return None


def _answer(connection: socket.socket) -> bytes:
    """Waits on while the server works: imports take long where others use the cores, and would
    take the asker as long. Raises OSError."""
    pid, _ = _peer(connection)
    for _ in range(MAX_WAITS):
        before_s = _cpu_s(pid)
        try:
            return connection.recv(1)
        except TimeoutError:
            if _cpu_s(pid) <= before_s:
                raise
    raise TimeoutError


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Returns the process at the other end, and its user."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", peer)
    return pid, uid


def _kill_peer(connection: socket.socket) -> None:
    pid, uid = _peer(connection)
    if uid == os.getuid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def have_kept(connection: socket.socket, weights: KeepWeights) -> None:
    """Asks the server, and does not wait."""
    with contextlib.suppress(OSError):  # it has ended, or the checkpoint is gone
        if weights.is_sensible:
            body = msgspec.msgpack.encode(weights.as_kept())
            connection.sendall(len(body).to_bytes(4, "big") + body)


def start_fork_server(
    cluster: str, environment: Mapping[str, str], *, low_priority: bool
) -> socket.socket:
    """Starts one, unless there is one, and returns a connection to it, to be kept open. Where it
    cannot start, that is closed at its other end. `low_priority`: it then listens only when it is
    ready. Raises OSError."""
    key = fork_key(cluster, environment)
    with listening_place(key) as path:
        connection = connect(path)
    if connection is not None:
        return connection
    mine, its = socket.socketpair()
    how = "low" if low_priority else "normal"
    with its:
        try:
            started = subprocess.Popen(
                command(FORK_MODULE, fork_server_name(cluster), key, how, TITLE_ROOM, end=its),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(its.fileno(),),
                env=dict(environment),
            )
        except OSError:
            mine.close()
            raise
    try:
        started.wait(ANSWER_S)  # it makes itself a daemon: this one ends at once
    except subprocess.TimeoutExpired:
        mine.close()
        started.kill()
        started.wait()
        raise TimeoutError(f"it has not begun within {ANSWER_S:g} s") from None
    return mine


def worker_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """What a worker is started with, whoever starts it. `threads`: of its engine; 0: any."""
    own = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return {**environment, **own, "TOKENIZERS_PARALLELISM": "false"}


def show_process(command_line: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have `ps`, and who looks for workers' processes, see these of this process in place of those
    that it was started with. Raises ValueError if there is no room."""
    import ctypes

    # Fields 48 to 51 of proc_pid_stat(5), counted after the name, which is in parentheses.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    *words, last = (word.encode() for word in command_line)
    shown = b"".join(word + b"\0" for word in words) + last
    room = arg_end - arg_start - 1
    if len(shown) > room:
        raise ValueError(f"a command line of {len(shown)} bytes: there is room for {room}")
    _write(ctypes, arg_start, shown.ljust(room) + b"\0")
    rows = b"".join(f"{name}={value}\0".encode() for name, value in environment.items())
    room = env_end - env_start
    whole = rows if len(rows) < room else rows[: rows.rfind(b"\0", 0, room - 1) + 1]
    _write(ctypes, env_start, whole.ljust(room, b"\0"))


def _write(ctypes: Any, address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))
