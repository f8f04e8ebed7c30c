"""Keeps the controller and the routers running: `kvrelay serve` itself.

It holds the sockets that clients connect to, so that a connection waits while the router behind it
starts again, and starts and ends processes; it decides nothing else. Routers are started and ended
as the controller asks; the controller is started again when it ends or hangs, and adopts what runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvrelay.cluster.api.tenants import Access
from kvrelay.cluster.config import Config
from kvrelay.cluster.control.messages import (
    RouterFailed,
    RouterLost,
    RouterStarted,
    StartRouter,
    StopRouter,
)
from kvrelay.cluster.prepare import PreparedModel
from kvrelay.cluster.processes.life import Life
from kvrelay.cluster.processes.orders import (
    AllUp,
    ControlSpec,
    Ending,
    GaveUp,
    Reload,
    RestartWorkers,
    Serves,
    ServiceRequest,
    StartupProgress,
    Stop,
    WorkersRestarted,
)
from kvrelay.cluster.processes.reload import Source
from kvrelay.cluster.processes.router_api import SHUTDOWN_S, ServedModel
from kvrelay.cluster.processes.router_process import RouterOrder, RouterProcessSpec
from kvrelay.engine.backoff import Backoff
from kvrelay.engine.node import NodeId
from kvrelay.engine.wire.channel import Beat, Channel, ChannelError, command
from kvrelay.worker.process import Listening
from kvrelay.worker.processes import kill_workers

log = logging.getLogger("kvrelay.serve")

OnProgress = Callable[[str, str, bool], None]  # part, state, whether it is up
CHILD = "kvrelay.cluster.processes.child"
LAST_WORDS_S = 1.0  # for what a process has said before its end

WATCH_S = 1.0
SILENT_S = 20.0  # a process that says nothing for so long hangs, and is ended
RESTART = Backoff(0.1, 10.0)  # before a controller that ended is started again
STABLE_S = 60.0  # one that ran for so long is started again at once
END_S = 20.0  # for a process to end by itself once it was told to


class ServeError(Exception):
    """Serving cannot begin, or cannot go on; one line for the user."""


@dataclass(frozen=True, slots=True)
class Ready:
    """All are up, and the first router takes requests."""

    ports: dict[NodeId, int]  # where each router's API listens
    lines: tuple[str, ...]  # what the KV cache costs
    model: str


class Child:
    """A process beside the supervisor, from its start to its end."""

    def __init__(
        self, name: str, on_message: Callable[[Any], None], on_end: Callable[[int], None]
    ) -> None:
        """`on_end` gets the exit code, negative for a signal."""
        self.name = name
        self.heard_at = asyncio.get_running_loop().time()
        self._on_message = on_message
        self._on_end = on_end
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, kind: str, first: Any, fds: tuple[int, ...] = ()) -> None:
        """`kind`: one of `cluster.processes.child`; `fds`: sockets that it gets, by number. Raises
        OSError where there is no process, memory or file left for it."""
        mine, its = socket.socketpair()
        try:
            with its:
                self._process = await asyncio.create_subprocess_exec(
                    *command(CHILD, kind, self.name, end=its),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(its.fileno(), *fds),
                    start_new_session=True,  # the terminal's signals are for the supervisor
                )
        except BaseException:
            mine.close()
            raise
        self._channel = await Channel.over(mine)
        self.send(first)
        self._tasks = [
            asyncio.create_task(self._listen(self._channel)),
            asyncio.create_task(self._await_end()),
        ]

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def send(self, message: Any) -> None:
        if self.is_alive and self._channel is not None:
            self._channel.send(message)

    def kill(self) -> None:
        if self._process is not None and self.is_alive:
            # `Popen.kill` may reap a process that is dead already, and its exit code with it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def ended(self, timeout_s: float) -> bool:
        """Whether it ends within so long."""
        assert self._process is not None
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def _listen(self, channel: Channel) -> None:
        try:
            while True:
                message = await channel.receive()
                self.heard_at = asyncio.get_running_loop().time()
                if not isinstance(message, Beat):
                    self._on_message(message)
        except EOFError:
            return
        except ChannelError as error:
            log.error("%s is ended: %s", self.name, error)
        except Exception:
            log.exception("%s is ended: what it said leads nowhere", self.name)
        self.kill()

    async def _await_end(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.wait(self._tasks[:1], timeout=LAST_WORDS_S)
        self._on_end(code)


class Supervisor:
    """Owns the processes beside it. On one loop.

    Invariant: at most one controller, and one process for each router, is running."""

    def __init__(
        self,
        config: Config,
        access: Access,
        sockets: dict[NodeId, socket.socket],
        life: Life,
        listening: Listening,
        host: str,
        on_progress: OnProgress,
        source: Source | None,
    ) -> None:
        """`sockets`: of each router, listening; `host`: where routers and controller listen."""
        self._config = config
        self._access = access
        self._sockets = sockets
        self._life = life
        self._listening = listening
        self._host = host
        self._on_progress = on_progress
        self._source = source
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.asked_to_end = asyncio.Event()  # by an operator, over HTTP
        self._model: PreparedModel | None = None
        self._lines: tuple[str, ...] | None = None
        self._serving: set[NodeId] = set()
        self._controller: Child | None = None
        self._routers: dict[NodeId, Child] = {}
        self._started: dict[NodeId, RouterStarted] = {}
        self._restarting: asyncio.Future[str] | None = None
        self._is_ending = False
        self._failures = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def cluster(self) -> str:
        return self._life.record.cluster

    async def start(self) -> None:
        """Start the controller. Its workers wait for `use_model`."""
        self._spawn(self._watch())
        await self._start_controller()

    def use_model(self, model: PreparedModel) -> None:
        self._model = model
        self._to_controller(model)

    def reload(self) -> None:
        for router in self._routers.values():
            router.send(Reload())

    async def end(self, drain_s: float) -> None:
        """Take no new requests, finish what is there within `drain_s`, and end all; or all but the
        workers, where those are kept and no operator has asked for the end."""
        on_stop = self._config.cluster.on_stop
        keep_workers = on_stop == "keep-workers" and not self.asked_to_end.is_set()
        self._is_ending = True
        self._to_controller(Ending())
        routers = list(self._routers.values())
        for router in routers:
            router.send(Stop(drain_s))
        finish_s = drain_s + SHUTDOWN_S + END_S
        await asyncio.gather(*(_end(router, finish_s) for router in routers))
        if self._controller is not None and self._controller.is_alive:
            self._controller.send(Stop(keep_workers=keep_workers))
            await _end(self._controller, 2 * END_S)
        if not keep_workers:
            kill_workers(self.cluster)  # where the controller could not, if they are here
            self._life.end()
        for task in self._tasks:
            task.cancel()
        if not self.failed.done():
            self.failed.cancel()

    async def restart(self) -> None:
        """Every worker, every router and the controller, one after the other. Logs how it went."""
        if self._restarting is not None:
            log.warning("a restart is under way already")
            return
        if self._controller is None or not self._controller.is_alive:
            log.error("restart stopped: the controller is away; try again when it is back")
            return
        self._restarting = self._loop.create_future()
        try:
            log.info("restarting workers")
            self._controller.send(RestartWorkers())
            why_not = await self._restarting
            if why_not:
                log.error("restart stopped: %s", why_not)
                return
            for name in list(self._routers):
                log.info("restarting %s", name)
                await self._restart_router(name)
            log.info("restarting the controller")
            self._controller.kill()  # the next one adopts all; there is nothing to finish
            log.info("all have been restarted")
        except TimeoutError:
            log.error("restart stopped: a router does not serve again in time")
        finally:
            self._restarting = None

    async def _restart_router(self, name: NodeId) -> None:
        old, drain_s = self._routers[name], self._config.cluster.drain_s
        self._serving.discard(name)
        old.send(Stop(drain_s, refuse=False))
        await _end(old, drain_s + SHUTDOWN_S + END_S)
        async with asyncio.timeout(self._config.cluster.start_timeout_s):
            while name not in self._serving:
                await asyncio.sleep(0.05)

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_controller(self) -> None:
        spec = ControlSpec(
            cluster=self._life.record.cluster,
            epoch=self._life.next_controller(),
            config=self._config,
            kept_file=self._life.kept_file,
            listening=self._listening,
            host=self._host,
            routers=tuple(self._sockets),
            running_routers=tuple(self._started.values()),
        )
        started_at = self._loop.time()
        child = Child(
            "controller", self._on_controller_message, lambda code: self._on_end(started_at, code)
        )
        self._controller = child
        await child.start("controller", spec)
        if self._model is not None:
            child.send(self._model)

    def _on_controller_message(self, message: Any) -> None:
        match message:
            case StartupProgress(part, state, is_up):
                if not self.ready.done():
                    self._on_progress(part, state, is_up)
            case AllUp(lines):
                self._lines = lines
                self._look_ready()
            case StartRouter():
                self._spawn(self._start_router(message))
            case StopRouter(router, epoch):
                self._stop_router(router, epoch)
            case WorkersRestarted(why_not):
                if self._restarting is not None and not self._restarting.done():
                    self._restarting.set_result(why_not)
            case GaveUp(reason):
                self._fail(ServeError(reason))
            case _:
                log.warning("the controller said %s", type(message).__name__)

    def _on_end(self, started_at: float, code: int) -> None:
        if self._is_ending:
            return
        if self._loop.time() - started_at >= STABLE_S:
            self._failures = 0
        self._failures += 1
        pause_s = RESTART.pause_s(self._failures)
        log.warning("the controller has ended (%s); again in %g s", shown(code), pause_s)
        if self._restarting is not None and not self._restarting.done():
            self._restarting.set_result("the controller has ended")

        self._spawn(self._start_controller_again(pause_s))

    async def _start_controller_again(self, pause_s: float) -> None:
        """Until it runs: what is missing now, such as memory or files, may be there later."""
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._start_controller()
            except OSError as error:
                self._failures += 1
                pause_s = RESTART.pause_s(self._failures)
                log.error("the controller cannot be started: %s; again in %g s", error, pause_s)
            else:
                return

    async def _start_router(self, start: StartRouter) -> None:
        if self._is_ending:
            return
        name, config = start.router, self._config
        assert self._model is not None, "routers are started once there is a model"
        old = self._routers.get(name)
        if old is not None:
            old.kill()
            await old.ended(END_S)
        model = self._model
        served = ServedModel(model.path, model.served_name, model.max_model_len)
        spec = RouterProcessSpec(
            cluster=self._life.record.cluster,
            router=name,
            epoch=start.epoch,
            routers=tuple(self._sockets),
            config=config,
            model=served,
            access=self._access,
            source=None if self._source is None else (self._source.path, self._source.overrides),
        )
        fd = self._sockets[name].fileno()
        child = Child(
            name,
            self._on_router_message,
            lambda code: self._on_router_end(name, start.epoch, code),
        )
        self._routers[name] = child
        try:
            await child.start("router", RouterOrder(spec, self._listening, self._host, fd), (fd,))
        except OSError as error:  # the controller orders it again, later and later
            self._to_controller(RouterFailed(name, start.epoch, str(error), permanent=False))

    def _on_router_message(self, message: Any) -> None:
        match message:
            case RouterStarted(peer):
                self._started[peer.node] = message
                self._to_controller(message)
            case RouterFailed() | RouterLost():
                self._to_controller(message)
            case Serves(router):
                self._serving.add(router)
                self._look_ready()
            case ServiceRequest("drain"):
                self.asked_to_end.set()
            case ServiceRequest("restart"):
                self._spawn(self.restart())
            case _:
                log.warning("a router said %s", type(message).__name__)

    def _on_router_end(self, name: NodeId, epoch: int, code: int) -> None:
        self._serving.discard(name)
        started = self._started.get(name)
        if started is not None and started.peer.epoch == epoch:
            del self._started[name]
        if not self._is_ending:
            self._to_controller(RouterLost(name, epoch, f"its process has ended ({shown(code)})"))

    def _stop_router(self, name: NodeId, epoch: int) -> None:
        child, started = self._routers.get(name), self._started.get(name)
        if child is not None and (started is None or started.peer.epoch <= epoch):
            child.kill()

    def _to_controller(self, message: Any) -> None:
        if self._controller is not None:
            self._controller.send(message)

    def _look_ready(self) -> None:
        lines, model = self._lines, self._model
        is_all = len(self._serving) == len(self._sockets)
        if lines is not None and model is not None and is_all and not self.ready.done():
            ports = {name: sock.getsockname()[1] for name, sock in self._sockets.items()}
            self.ready.set_result(Ready(ports, lines, model.served_name))

    async def _watch(self) -> None:
        """End what hangs. Time counts in looks: one that was stopped itself has heard nothing."""
        last = self._loop.time()
        while True:
            await asyncio.sleep(WATCH_S)
            now = self._loop.time()
            was_away, last = now - last > 2 * WATCH_S, now
            for child in (*self._routers.values(), self._controller):
                if child is None or not child.is_alive:
                    continue
                if was_away:
                    child.heard_at = max(child.heard_at, now - SILENT_S / 2)
                if now - child.heard_at > SILENT_S:
                    log.warning("%s says nothing for %g s and is ended", child.name, SILENT_S)
                    child.heard_at = now
                    child.kill()

    def _fail(self, error: ServeError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)


async def _end(child: Child, timeout_s: float) -> None:
    """Until it has ended by itself, or by force."""
    if child.is_alive and not await child.ended(timeout_s):
        log.warning("%s does not end and is ended by force", child.name)
        child.kill()
        await child.ended(END_S)


def shown(code: int) -> str:
    """Says an exit code as people know it."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
