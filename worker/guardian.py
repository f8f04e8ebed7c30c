"""Who starts a worker's process on its machine, tells of its end, and ends it by force; and, where
a worker has ranks on other machines, the process there that has them.

Runs in the actor that Ray places. The worker's process outlives its guardian, and with it Ray: a
process of an older epoch that is still there when the next one starts is ended first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import psutil

import kvrelay.engine
from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.node import NodeId
from kvrelay.engine.wire.channel import (
    VERSION_VARIABLE,
    BlockingChannel,
    ChannelError,
    command,
    own_version,
    pack,
    unpack,
)
from kvrelay.worker.fork_server import (
    ForkOrder,
    KeepWeights,
    fork_worker,
    have_kept,
    start_fork_server,
    worker_environment,
)
from kvrelay.worker.messages import ProcessEnds, StartFailed, WorkerStarted
from kvrelay.worker.processes import (
    GPUS,
    MODULE,
    RANKS_MODULE,
    choose_gpus,
    choosing,
    gpus_here,
    held_gpus,
    kill_all,
    kill_workers,
    name_of,
)
from kvrelay.worker.rank_host import RankHostSpec
from kvrelay.worker.spec import WorkerOrder, WorkerSpec

log = logging.getLogger("kvrelay.worker")

SHARED_MEMORY = Path("/dev/shm")
FOREIGN = ("VIRTUAL_ENV", "PYTHONHOME")  # what another environment must not inherit
LAST_WORDS_S = 0.5  # for the reason why a process ended to leave its guardian


class WorkerGuardian:
    """What runs in the actor; each pool has a class of its own, so that `ray list actors` shows
    both. The constructor does nothing, so that the actor is up at once and its death is noticed
    from then on. Orders and answers are packed as for a channel (`engine.wire.channel`)."""

    def __init__(self, node: NodeId, stdout: int = 1, *, stays: bool = False) -> None:
        """`stdout`: a file that the worker's process gets. `stays`: when that ends, the guardian is
        there for the next one, until it is ended."""
        self._node = node
        self._stdout = stdout
        self._stays = stays
        self._pid = 0
        self._why = "its process has ended"
        self._has_ended = threading.Event()
        self._fork_server: socket.socket | None = None  # held, so that it lives

    def __repr__(self) -> str:  # before each line that it logs
        return self._node

    def start(self, packed: bytes) -> bytes:
        """A WorkerOrder; blocks until the worker listens, or cannot. Returns WorkerStarted or
        StartFailed."""
        return pack(self.run(unpack(packed)))

    def run(self, order: WorkerOrder) -> WorkerStarted | StartFailed:
        """Blocks, as `start` does, until the worker listens."""
        answer: WorkerStarted | StartFailed = self._run(MODULE, order.spec, order)
        return answer

    def start_ranks(self, packed: bytes) -> bytes:
        """A RankHostSpec; blocks until the worker can connect, or cannot. Returns RankHost or
        StartFailed."""
        spec: RankHostSpec = unpack(packed)
        return pack(self._run(RANKS_MODULE, spec, spec))

    def _run(self, module: str, spec: WorkerSpec | RankHostSpec, order: Any) -> Any:
        kill_workers(spec.cluster, spec.worker, spec.epoch - 1)
        self._pid, self._why, self._has_ended = 0, "its process has ended", threading.Event()
        mine, its = socket.socketpair()
        try:
            with its, choosing() if spec.num_gpus else contextlib.nullcontext():
                begun = self._begin(module, spec, its)
        except OSError as error:  # from the lock
            begun = StartFailed(spec.worker, spec.epoch, str(error), permanent=False)
        if isinstance(begun, StartFailed):
            mine.close()
            return begun
        channel = BlockingChannel(mine)
        channel.send(order)
        try:
            self._pid = channel.hello().pid
            answer = channel.receive()
        except EOFError:
            self._pid = 0
            return StartFailed(spec.worker, spec.epoch, "its process ended while it started", False)
        except ChannelError as error:
            return StartFailed(spec.worker, spec.epoch, str(error), permanent=True)
        if isinstance(answer, WorkerStarted) and isinstance(spec, WorkerSpec) and spec.fork_server:
            threading.Thread(target=self._have_fork_server, args=(spec, begun)).start()
        if isinstance(answer, StartFailed):
            self._pid = 0  # it ends
        else:
            ends = channel, self._has_ended
            threading.Thread(target=self._watch, args=ends, daemon=True).start()
        return answer

    def _begin(
        self, module: str, spec: WorkerSpec | RankHostSpec, its: socket.socket
    ) -> dict[str, str] | StartFailed:
        """Start its process, at whose end of the channel is `its`. Returns its environment."""
        name = name_of(spec.cluster, spec.worker, spec.epoch)
        threads = spec.engine.threads if isinstance(spec, WorkerSpec) else spec.threads
        env, why_not = self._environment(spec.num_gpus, threads)
        if why_not:
            return StartFailed(spec.worker, spec.epoch, why_not, permanent=False)
        if not (isinstance(spec, WorkerSpec) and self._fork(spec, name, env, its)):
            words = command(module, name, end=its)
            try:
                if isinstance(spec, WorkerSpec) and spec.engine.python:
                    forget_openmp()
                    words, env = in_environment(spec.engine.python, words, env)
                    env = env if spec.on_gpu else openmp_of(Path(spec.engine.python)) | env
                self._start(words, env, its)
            except OSError as error:
                why = f"{words[0]} does not start: {error.strerror}"
                return StartFailed(spec.worker, spec.epoch, why, permanent=True)
        return env

    def _fork(self, spec: WorkerSpec, name: str, env: dict[str, str], its: socket.socket) -> bool:
        """Whether its process was forked."""
        if not spec.fork_server:
            return False
        score = Path("/proc/self/oom_score_adj").read_text()
        order = ForkOrder(name, env, score, spec.num_ranks_here)
        self._fork_server = fork_worker(spec.cluster, order, (its.fileno(), self._stdout, 2))
        return self._fork_server is not None

    def _start(self, command_line: list[str], env: dict[str, str], its: socket.socket) -> None:
        """The process makes itself a daemon: the one that is started ends at once."""
        started = subprocess.Popen(
            command_line,
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            pass_fds=(its.fileno(),),
            env=env,
        )
        started.wait()

    def _have_fork_server(self, spec: WorkerSpec, env: dict[str, str]) -> None:
        """For the next worker of this machine; this one serves already."""
        if self._fork_server is None:
            try:
                self._fork_server = start_fork_server(spec.cluster, env, low_priority=True)
            except OSError as error:
                log.warning("the process that forks workers does not start: %s", error)
                return
        weights = KeepWeights(str(spec.find_model()), spec.model, spec.engine)
        have_kept(self._fork_server, weights)

    def _environment(self, num_gpus: int, threads: int) -> tuple[dict[str, str], str]:
        """For its process; and why it has to wait, or ""."""
        env = worker_environment(os.environ, threads)
        if not num_gpus:
            return env, ""
        given, held = env.get("CUDA_VISIBLE_DEVICES", "").split(","), held_gpus()
        chosen = choose_gpus(num_gpus, [gpu for gpu in given if gpu], gpus_here(), held)
        if len(chosen) < num_gpus:
            by = ", ".join(f"{gpu} by {holder}" for gpu, holder in sorted(held.items()))
            return (
                env,
                f"{num_gpus} GPU(s) are needed, {len(chosen)} are free; held: {by or 'none'}",
            )
        if chosen != given[:num_gpus]:
            log.warning("%s takes GPU %s, not %s, which another holds", self._node, chosen, given)
        names = ",".join(chosen)
        return env | {"CUDA_VISIBLE_DEVICES": names, GPUS: names}, ""

    def _watch(self, channel: BlockingChannel, has_ended: threading.Event) -> None:
        with contextlib.suppress(EOFError, ChannelError):
            while True:
                message = channel.receive()
                if isinstance(message, ProcessEnds):
                    self._why = message.reason
        has_ended.set()
        forget_openmp()
        if not self._stays:
            self._leave()

    def _leave(self) -> None:
        """Called once, when the worker has ended."""
        ending = threading.Timer(LAST_WORDS_S, os._exit, (1,))
        ending.daemon = True
        ending.start()

    def wait(self) -> str:
        """Blocks while the process lives; then says why it ended."""
        self._has_ended.wait()
        return self._why

    def stop(self) -> None:
        """End the worker's process, by force."""
        if self._pid and not self._has_ended.is_set():
            with contextlib.suppress(psutil.Error):
                kill_all(psutil.Process(self._pid))
            self._has_ended.wait(LAST_WORDS_S)

    def end(self) -> None:
        """The worker's process, by force; then this one ends."""
        self.stop()
        os._exit(0)


def in_environment(
    python: str, words: list[str], env: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """`words` by the interpreter of another virtual environment, which finds this source, and
    nothing else of this environment. Raises OSError."""
    package = Path(str(kvrelay.engine.__file__)).parents[1]
    source = default_cache_dir() / "source" / blake2b(bytes(package), digest_size=8).hexdigest()
    source.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (source / "kvrelay").symlink_to(package, target_is_directory=True)
    found = {name: value for name, value in env.items() if name not in FOREIGN}
    own = {"PYTHONPATH": str(source), VERSION_VARIABLE: own_version()}
    return [python, *words[1:]], found | own


def openmp_of(python: Path) -> dict[str, str]:
    """With what an engine that computes on CPUs is started: the OpenMP that its environment has,
    loaded first, as vLLM's documentation wants it, and threads that sleep soon. That of torch spins
    between its regions, which costs a machine with other work three times what is computed."""
    library = python.parent.parent / "lib" / "libiomp5.so"
    if not library.exists():
        return {"OMP_WAIT_POLICY": "passive"}
    return {"LD_PRELOAD": str(library), "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}  # ms


def forget_openmp() -> None:
    """Removes what Intel's OpenMP has left in shared memory of processes that were killed: a file
    of a kilobyte for each, with its process id in the name."""
    for path in SHARED_MEMORY.glob(f"__KMP_REGISTERED_LIB_*_{os.getuid()}"):
        pid = path.name.split("_")[-2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            path.unlink(missing_ok=True)
