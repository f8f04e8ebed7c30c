"""The process that workers are forked from: `worker.fork_server` says why, and what it promises.

`python -m kvrelay.cluster.processes.fork_server NAME KEY PRIORITY ROOM FD`. NAME says in `ps` whose
it is, KEY what it has to be, and ROOM is there for the command lines of workers. PRIORITY is `low`
where workers serve already, or `normal`. FD is a connection of who has started it. With the one
word `compile` it only imports what a server does, once, so that this is compiled."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec.structs import replace

from kvrelay.cluster.processes.worker import run
from kvrelay.engine.installation import pin_installation
from kvrelay.engine.model.parallel import link
from kvrelay.engine.wire.channel import inherited
from kvrelay.worker.fork_server import (
    FAILED,
    FORKED,
    LINGER_S,
    MAX_CONNECTIONS,
    MAX_KEPT_BYTES,
    MAX_ORDER_BYTES,
    REQUEST_S,
    UNUSED_S,
    ForkOrder,
    KeepWeights,
    connect,
    fork_key,
    listening_place,
    show_process,
)
from kvrelay.worker.processes import MODULE
from kvrelay.worker.threads import at_low_priority

NUM_FILES = 3  # that an order comes with: the channel, stdout, stderr
# Everything that a worker imports on its way: what is left out is imported after the fork.
MODULES = (
    "kvrelay.cluster.roles",
    "kvrelay.worker.build",
    "kvrelay.engine.model.runner",
    "kvrelay.engine.model.parallel.follower",
    "kvrelay.engine.model.parallel.runner",
    "kvrelay.engine.model.step_executor",
    "kvrelay.kvtransfer.movers.nixl",
    "kvrelay.kvtransfer.movers.pool",
)


def import_all() -> None:
    from kvrelay.engine.kv import block_hash
    from kvrelay.engine.native import NativeBuildError
    from kvrelay.kvtransfer import checksum, kivi
    from kvrelay.kvtransfer.agent import AgentError
    from kvrelay.kvtransfer.movers.nixl_bindings import open_nixl

    for module in MODULES:
        import_module(module)
    with contextlib.suppress(AgentError):  # the worker that needs it says so
        open_nixl(on_cpu=True)  # each worker has its own environment, and opens it again
    for load_native in (block_hash.load_native, checksum.load_native, kivi.load_native):
        with contextlib.suppress(NativeBuildError):
            load_native()


def listen(key: str) -> socket.socket | None:
    """Returns None if another process does."""
    with listening_place(key) as path:
        for each in path.parent.glob("*.sock"):
            other = connect(each)
            if other is None:
                each.unlink(missing_ok=True)  # its process has ended
                continue
            other.close()
            if each == path:
                return None
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.listen(MAX_CONNECTIONS)
        return server


Calls = Callable[[Callable[[], None]], None]


class ForkServer:
    """Owns the listening socket and all connections. Single-threaded: a fork has one thread."""

    def __init__(self, starter: socket.socket, calls: Calls = at_low_priority) -> None:
        """`calls`: what takes long, such as loading weights."""
        self._starter, self._calls = starter, calls
        self._server = socket.socket(socket.AF_UNIX)  # does not listen yet
        self._wanted: dict[str, KeepWeights] = {}  # by name, the last one last
        self._is_used = False
        self._connections = {starter}
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(starter, selectors.EVENT_READ)

    def begin(self) -> None:
        """Load what the starter wants, before anybody can wait for that."""
        if self._waiting.select(REQUEST_S):
            self._answer(self._starter)

    def serve(self, server: socket.socket) -> None:
        """Until nobody has been connected for `LINGER_S`."""
        self._server = server
        self._waiting.register(server, selectors.EVENT_READ)
        alone_since, unused_until = time.monotonic(), time.monotonic() + UNUSED_S
        while self._connections or time.monotonic() - alone_since < LINGER_S:
            if not self._is_used and time.monotonic() > unused_until:
                self._drop(self._starter)
            for ready, _ in self._waiting.select(min(1.0, LINGER_S)):
                if ready.fileobj is self._server:
                    self._accept()
                else:
                    assert isinstance(ready.fileobj, socket.socket)
                    self._answer(ready.fileobj)
                    alone_since = time.monotonic()

    def _accept(self) -> None:
        connection, _ = self._server.accept()
        if len(self._connections) >= MAX_CONNECTIONS:
            connection.close()
            return
        connection.settimeout(REQUEST_S)
        self._connections.add(connection)
        self._waiting.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: socket.socket) -> None:
        """What it asks for; or it is gone."""
        files: list[int] = []
        try:
            head, files, _, _ = socket.recv_fds(connection, 4, NUM_FILES)
            if not head:
                raise EOFError
            body = _body(connection, head)
            if not files:
                self._keep(msgspec.msgpack.decode(body, type=KeepWeights))
                return
            order = msgspec.msgpack.decode(body, type=ForkOrder)
            if len(files) != NUM_FILES:
                raise ValueError(f"{len(files)} open files: expected {NUM_FILES}")
            is_forked = self._fork(order, files)
            self._is_used |= is_forked
            connection.sendall(FORKED if is_forked else FAILED)
        except (OSError, EOFError, ValueError):
            self._drop(connection)
        finally:
            for file in files:
                os.close(file)

    def _drop(self, connection: socket.socket) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._waiting.unregister(connection)
            connection.close()

    def _keep(self, wanted: KeepWeights) -> None:
        """Weights that cannot be loaded are of no interest: workers say why."""
        from kvrelay.engine.model.errors import ModelError
        from kvrelay.engine.model.kept_weights import drop

        known = self._wanted.pop(wanted.name, None)
        self._wanted[wanted.name] = wanted
        if wanted == known:
            return
        with contextlib.suppress(ModelError, OSError, MemoryError):
            while sum(each.num_bytes for each in self._wanted.values()) > MAX_KEPT_BYTES:
                drop(self._wanted.pop(next(iter(self._wanted))).name)
            self._calls(lambda: load(wanted))
        gc.collect()  # a runner that is gone takes its threads with it
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join(REQUEST_S)  # what makes the runner's pool real
        freeze()

    def _fork(self, order: ForkOrder, files: list[int]) -> bool:
        """Whether there is a process now. It is no child of this one, and outlives it."""
        if threading.active_count() > 1:  # what it holds would stay locked
            return False
        try:
            between = os.fork()
        except OSError:
            return False
        if between:
            return os.waitstatus_to_exitcode(os.waitpid(between, 0)[1]) == 0
        try:
            os.setsid()
            line = show(order, files[0])  # before it has an answer: others look for what it holds
            if os.fork():
                os._exit(0)
            self._waiting.close()
            for each in (self._server, *self._connections):
                each.close()
            become(order, line, files)
        finally:
            os._exit(1)  # also where an exception comes: nothing of this process is the fork's


def load(wanted: KeepWeights) -> None:
    """Keeps the weights. With one thread: OpenMP's would not be there after a fork."""
    from kvrelay.engine.model.runner import ModelRunner

    engine = replace(wanted.engine.sized(gpu=False), num_blocks=1, threads=1)
    ModelRunner(Path(wanted.path), wanted.model, engine, keep_as=wanted.name)


def freeze() -> None:
    """Or collections in workers would write to pages that they share. What imports have left over
    stays: pages with holes would be written to."""
    gc.freeze()
    gc.enable()


def _body(connection: socket.socket, head: bytes) -> bytes:
    """Raises EOFError, OSError and ValueError."""
    deadline = time.monotonic() + REQUEST_S
    body = bytearray(head)
    while len(body) < 4 or len(body) < 4 + int.from_bytes(body[:4], "big"):
        if int.from_bytes(body[:4], "big") > MAX_ORDER_BYTES or time.monotonic() > deadline:
            raise ValueError(f"an order of {int.from_bytes(body[:4], 'big')} bytes")
        data = connection.recv(1 << 16)
        if not data:
            raise EOFError
        body += data
    return bytes(body[4:])


def show(order: ForkOrder, channel: int) -> list[str]:
    """Returns the command line. Raises ValueError."""
    os.environ.clear()
    os.environ.update(order.environment)
    line = [sys.executable, "-m", MODULE, order.name, str(channel)]
    show_process(line, order.environment)
    return line


def become(order: ForkOrder, line: list[str], files: list[int]) -> NoReturn:
    """A worker's process, as if its guardian had started it."""
    channel, stdout, stderr = files
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    try:
        with contextlib.suppress(OSError):  # only to protect oneself needs a privilege
            Path("/proc/self/oom_score_adj").write_text(order.oom_score)
        sys.argv = line[2:]
        for each in (stdout, stderr):
            os.close(each)
        for _ in range(order.num_ranks - 1):
            fork_rank(channel)
        run(channel)
    except BaseException:
        logging.getLogger("kvrelay").exception("%s does not begin", order.name)
        os._exit(1)


def fork_rank(channel: int) -> None:
    """Another rank of the worker that this process becomes, before it has threads or a GPU."""
    ours, its = socket.socketpair()
    if pid := os.fork():
        its.close()
        link.forked.append(link.ForkedRank(ours, pid))
        return
    try:
        os.close(channel)  # whose end says that the worker has ended
        for each in (ours, *(rank.connected for rank in link.forked)):
            each.close()
        line = [sys.executable, "-m", link.FOLLOWER, str(its.fileno())]
        sys.argv = line[2:]
        show_process(line, os.environ)
        follow()
    finally:
        os._exit(1)


def follow() -> None:
    from kvrelay.engine.model.parallel.follower import main

    main()


def compile_all() -> None:
    """Have all that a server's processes import compiled, as importing it does."""
    for module in ("supervisor", "control_process", "router_process", "child", "launch"):
        import_module(f"kvrelay.cluster.processes.{module}")
    for module in ("cluster.api.app", "cluster.api.constraints.compiler", "cluster.cli.main"):
        import_module(f"kvrelay.{module}")
    import_all()


def main() -> None:
    if sys.argv[1:] == ["compile"]:
        compile_all()
        return
    name, key, priority, _room, fd = sys.argv[1:]
    if os.fork():  # a daemon: its parent does not wait for it
        os._exit(0)
    os.setsid()
    gc.disable()  # a quarter of the imports would be collections: see `freeze`
    environment = dict(os.environ)  # before imports add to it
    pin_installation()
    starter = inherited(fd)
    # Where workers serve already, it takes long, and who needs it meanwhile does not wait.
    is_early = priority == "normal"
    server = listen(key) if is_early else None
    if is_early and server is None:
        os._exit(0)
    call: Calls = (lambda work: work()) if is_early else at_low_priority
    call(import_all)
    cluster = name.split("/")[0]
    torch = sys.modules["torch"]
    is_right = fork_key(cluster, environment) == key  # files may have changed since
    if not is_right or threading.active_count() > 1 or torch.cuda.is_initialized():
        os._exit(1)
    freeze()
    forks = ForkServer(starter, call)
    if server is None:
        forks.begin()
        server = listen(key)
    if server is not None:
        forks.serve(server)
    os._exit(0)


if __name__ == "__main__":
    main()
