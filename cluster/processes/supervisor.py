"""Keeps the controller and the routers running: `kvrelay serve` itself.

It holds the sockets that clients connect to, so that a connection waits while the router behind it
starts again, and starts and ends processes; it decides nothing else. Routers and the controller are
started again when they end or hang: routers announce themselves to whichever controller leads, and
a controller adopts what runs.

One of several servers of a cluster has a controller only while it holds the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import replace as with_fields
from functools import partial
from typing import TYPE_CHECKING, Any

from kvrelay.cluster.api.tenants import Access
from kvrelay.cluster.config import Config
from kvrelay.cluster.control.lease import Change
from kvrelay.cluster.control.messages import (
    Checkpoint,
    RouterLost,
    RouterStarted,
)
from kvrelay.cluster.orders import ChangeModels, OfServer, Service, ServiceRequest
from kvrelay.cluster.prepare import PreparedModels
from kvrelay.cluster.processes import handover, orders
from kvrelay.cluster.processes.handover import Handover, HandoverError, RunningRouter
from kvrelay.cluster.processes.here import this_machine
from kvrelay.cluster.processes.life import Life, SharedLife, read_record
from kvrelay.cluster.processes.model_changes import ModelChanges, OnModel
from kvrelay.cluster.processes.ready import OnProgress, Ready, ServeError
from kvrelay.cluster.processes.reload import Source
from kvrelay.cluster.processes.restarts import Ends, Restarts
from kvrelay.cluster.processes.router_spec import (
    SHUTDOWN_S,
    LoadRouter,
    RouterOrder,
    RouterProcessSpec,
    ServedModel,
)
from kvrelay.cluster.processes.servers import Servers
from kvrelay.cluster.processes.supervised import END_S, WATCH_S, Child, end, end_silent, shown
from kvrelay.cluster.status import RestartStatus
from kvrelay.engine.backoff import Backoff
from kvrelay.engine.host import keep_running
from kvrelay.engine.installation import GIVEN_PATH
from kvrelay.engine.node import NodeId
from kvrelay.engine.wire.channel import inherited, own_version
from kvrelay.worker.messages import Peer
from kvrelay.worker.process import Listening
from kvrelay.worker.processes import kill_workers

if TYPE_CHECKING:
    from kvrelay.cluster.state.lease import LeaseView

log = logging.getLogger("kvrelay.serve")

RESTART = Backoff(0.1, 10.0)  # before a process that ended is started again


class Supervisor:
    """Owns the processes beside it. On one loop.

    Invariant: at most one controller runs, and one process for each router; beside it, while it is
    restarted, one that has loaded what the next needs."""

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
        found: Handover | None = None,
    ) -> None:
        """`sockets`: of each router, listening; `host`: where routers and controller listen;
        `found`: from the program that this process was before."""
        self._config = config
        self._access = access
        self._sockets = sockets
        self._life = life
        self._listening = listening
        self._host = host
        self._on_progress = on_progress
        self._source = source
        self._found = found
        command, python_path = handover.own_command(), GIVEN_PATH
        text = source.text() if source else None
        self._installed = handover.installed(command, python_path, text)
        # What a restart starts; a rollback has started something else.
        self._command = found.command if found else command
        self._python_path = found.python_path if found else python_path
        self._restart = Restarts(RestartStatus(version=own_version()), self._to_controller)
        if found is not None:
            status = self._restart.status
            status.number, status.is_rollback = found.number, found.is_rollback
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.asked_to_end = asyncio.Event()  # by an operator, over HTTP
        self._models: PreparedModels | None = None
        self._lines: tuple[str, ...] | None = None
        self._serving: set[NodeId] = set()
        self._controller: Child | None = None
        self._routers: dict[NodeId, Child] = {}
        self._successors: dict[NodeId, Child] = {}
        self._loaded: dict[NodeId, asyncio.Future[str]] = {}  # "", or why a successor has not
        kept = read_record(life.kept_file, Checkpoint) or Checkpoint()
        self._epochs = dict(kept.routers)  # the last of each
        self._starting: set[NodeId] = set()
        self._started: dict[NodeId, RouterStarted] = {}
        self._changes = ModelChanges(self)
        self._are_up = asyncio.Event()  # workers, as this controller has said
        self._restarting: asyncio.Future[str] | None = None  # workers, by the controller
        self._is_leaving = False  # to become another program
        self._is_ending = False
        self._ends, *ends = (Ends(RESTART, config.cluster.orphan_s / 2) for _ in (0, *sockets))
        self._router_ends = dict(zip(sockets, ends, strict=True))
        self._servers: Servers | None = None  # this one's part in a cluster with several
        if isinstance(life, SharedLife):
            self._servers = Servers(config, life, self._on_lease)
        self._spare: Child | None = None  # a controller without an order
        self._leader: Peer | None = None  # the controller of whichever server leads
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Start the controller. Its workers wait for `use_models`."""
        self._spawn(keep_running("watch", partial(end_silent, self._children), Counter()))
        if self._found is not None:
            self._restart.is_under_way = True
            self._restart.status.state = "controller"
            await self._resume_routers(self._found.routers)
            self._spawn(self._restart.finish(self._restart_all()))
        if self._servers is None:
            await self._start_controller()

    def use_models(self, models: PreparedModels, forks: OnModel = lambda *_: None) -> None:
        """`forks`: has the process that forks workers keep weights of the models."""
        self._models, self._changes.forks = models, forks
        forks(self._config, models)
        self._life.use_checkpoints(models.checkpoints)
        self._to_controller(models)
        if self._servers is not None:  # without a model it could not lead
            self._servers.start(models.checkpoints)
            self._spawn(self._keep_spare())
        self._start_routers()

    @property
    def serving(self) -> dict[NodeId, Child]:
        """The routers that take requests."""
        return {name: self._routers[name] for name in self._serving}

    def serve_models(self, config: Config, models: PreparedModels) -> None:
        """These, by whoever starts from now on."""
        self._config, self._models = config, models
        self._life.use_models(config, models.checkpoints)

    async def replace_controller(self) -> None:
        """Ends it, and waits for the next. Raises HandoverError: not all workers are up in time."""
        self._are_up.clear()
        await self._end_controller()
        self._is_leaving = False
        await self._start_controller()
        await self._wait_up(self._are_up.wait())

    async def _end_controller(self) -> None:
        """The next one adopts all; there is nothing to finish."""
        self._is_leaving = True
        if self._controller is not None and self._controller.is_alive:
            self._controller.kill()
            await self._controller.ended(END_S)

    def reload(self) -> None:
        for router in self._routers.values():
            router.send(orders.Reload())

    async def end(self, drain_s: float) -> None:
        """Take no new requests, finish what is there within `drain_s`, and end all; or all but the
        workers, where those are kept and no operator has asked for the end."""
        on_stop = self._config.cluster.on_stop
        keep_workers = on_stop == "keep-workers" and not self.asked_to_end.is_set()
        self._is_ending = True
        if self._servers is not None and not self._leads:
            await self._servers.close()
        log.info("the server ends; requests have up to %g s to finish", drain_s)
        routers = list(self._routers.values())
        for router in routers:
            router.send(orders.Stop(drain_s))
        finish_s = drain_s + SHUTDOWN_S + END_S
        await asyncio.gather(*(end(router, finish_s) for router in routers))
        if self._controller is not None and self._controller.is_alive:
            self._controller.send(orders.Stop(keep_workers=keep_workers))
            await end(self._controller, 2 * END_S)
        for each in (*self._successors.values(), *([self._spare] if self._spare else [])):
            each.kill()
        if self._servers is not None:  # workers go on for the others
            await self._servers.close()
        elif not keep_workers:
            kill_workers(self._life.record.cluster)  # that the controller could not end
            self._life.end()
        log.info("the server has ended")
        for task in self._tasks:
            task.cancel()
        if not self.failed.done():
            self.failed.cancel()

    async def obey(self, order: OfServer) -> None:
        """An operator's: end; become what the command line starts now, or what was good before,
        then every worker and every router anew, one after the other; or change the models. How it
        goes is in the log and the status."""
        is_rollback = order == ServiceRequest(Service.ROLLBACK)
        if order == ServiceRequest(Service.DRAIN):
            log.info("an operator asks the server to drain and end")
            self.asked_to_end.set()
            return
        if self._restart.is_under_way:
            log.warning("a restart is under way already")
            return
        if self._servers is not None and not self._leads:
            leader = self._servers.leader or "the leader"
            log.error("restart stopped: this server does not lead; ask %s", leader)
            return
        if self._servers is not None and is_rollback:
            log.error("rollback stopped: of several servers, start each with the earlier version")
            return
        if self._models is None:
            log.error("restart stopped: the server is not up yet")
            return
        self._restart.begin(is_rollback)
        if isinstance(order, ChangeModels):
            self._restart.show("models")
            doing = self._changes.change(self._config, self._models, order)
        elif self._servers is None:
            doing = self._replace(is_rollback)
        else:  # each is started by itself: the others serve meanwhile
            doing = self._restart_all()
        await self._restart.finish(doing)

    async def _replace(self, is_rollback: bool) -> None:
        """Does not return where all goes well: this process is another program then. Raises
        HandoverError."""
        self._restart.show("checking")
        draft = starts = Handover(
            life=self._life.path,
            command=self._command,
            python_path=self._python_path,
            sockets={name: sock.fileno() for name, sock in self._sockets.items()},
            number=self._restart.status.number,
            is_rollback=is_rollback,
        )
        if is_rollback:
            file = None if self._source is None else self._source.path
            starts = handover.go_back(self._life, self._installed, draft, file)
            draft = with_fields(draft, settings=starts.settings)
        command, python_path = starts.command, starts.python_path
        log.info("%s, and takes over", await handover.try_out(command, python_path, draft))
        if self._is_ending:
            raise HandoverError("the server ends")
        await self._end_controller()
        left = tuple([each async for each in self._left_routers()])
        if self._is_ending:
            await self._resume_routers(left)
            raise HandoverError("the server ends")
        try:
            handover.become(command, python_path, with_fields(draft, routers=left))
        except OSError as error:
            self._is_leaving = False
            await self._resume_routers(left)
            self._start_routers()
            await self._start_controller()
            raise HandoverError(f"{command[0]} cannot be started: {error.strerror}") from error

    async def _left_routers(self) -> AsyncIterator[RunningRouter]:
        """With their channels, to the program that this process becomes."""
        for name, child in self._routers.items():
            if child.is_alive and (left := await child.detach()) is not None:
                started, serves = self._started.get(name), name in self._serving
                yield RunningRouter(name, self._epochs[name], *left, started, serves)

    async def _resume_routers(self, routers: Iterable[RunningRouter]) -> None:
        for each in routers:
            self._epochs[each.router] = each.epoch
            child, its = self._router(each.router), inherited(str(each.channel))
            try:
                await child.resume(each.pid, its, each.unread)
            except OSError as error:  # it has ended meanwhile, and is started again
                log.warning("%s has ended: %s", each.router, error)
                its.close()
                continue
            self._routers[each.router] = child
            if each.started is not None:
                self._started[each.router] = each.started
            if each.serves:
                self._serving.add(each.router)

    def _router(self, name: NodeId) -> Child:
        """Without a process yet. Its end counts if it is the router, or to be it, then."""

        def on_end(code: int) -> None:
            if self._routers.get(name) is child:
                self._on_router_end(name, self._epochs[name], code)
            elif self._successors.get(name) is child:
                self._has_loaded(name, f"it has ended ({shown(code)})")

        return (child := Child(name, self._on_router_message, on_end))

    def _has_loaded(self, name: NodeId, why_not: str = "") -> None:
        if (loaded := self._loaded.get(name)) is not None and not loaded.done():
            loaded.set_result(why_not)

    async def _restart_all(self) -> None:
        """Workers first: where they do not come up, routers and their clients are as they were.
        Raises HandoverError."""
        start_timeout_s = self._config.cluster.start_timeout_s
        await self._wait_up(asyncio.shield(self.ready))
        await self._restart_workers()
        self._restart.show("routers")
        for name in list(self._routers):
            log.info("restarting %s", name)
            try:
                await self._restart_router(name)
            except TimeoutError:
                text = f"{name} does not serve again in {start_timeout_s:g} s"
                raise HandoverError(text) from None
        self._life.is_good(self._installed)

    async def _wait_up(self, up: Awaitable[Any]) -> None:
        """Waits within the time of a start. Raises HandoverError."""
        timeout_s = self._config.cluster.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await up
        except TimeoutError:
            raise HandoverError(f"not all workers are up after {timeout_s:g} s") from None

    async def _restart_workers(self, *, only_outdated: bool = False) -> None:
        """Asks the controller, and waits. Raises HandoverError."""
        self._restart.show("workers")
        self._restarting = self._loop.create_future()
        try:
            self._to_controller(orders.RestartWorkers(only_outdated))
            if why_not := await self._restarting:
                raise HandoverError(why_not)
        finally:
            self._restarting = None

    def _replace_outdated(self, num_outdated: int) -> None:
        """Workers that this server has found, and another version or other settings started."""
        if (
            num_outdated
            and not self._restart.is_under_way
            and self._restart.status.state != "stopped"
        ):
            self._restart.is_under_way = True
            log.warning("%d workers have another version or other settings", num_outdated)
            self._spawn(self._restart.finish(self._restart_workers(only_outdated=True)))

    async def _restart_router(self, name: NodeId) -> None:
        """Who connects waits for the streams of the old process, and hardly for the new one.
        Raises HandoverError: what runs goes on. Raises TimeoutError."""
        old, drain_s = self._routers[name], self._config.cluster.drain_s
        try:
            await self._load_successor(name)
            if self._routers[name] is old:
                self._serving.discard(name)
            old.send(orders.Stop(drain_s, refuse=False))
            await end(old, drain_s + SHUTDOWN_S + END_S)
            async with asyncio.timeout(self._config.cluster.start_timeout_s):
                while name not in self._serving:
                    await asyncio.sleep(0.05)
        finally:
            del self._loaded[name]
            if (left := self._successors.pop(name, None)) is not None:
                left.kill()

    async def _load_successor(self, name: NodeId) -> None:
        """Starts its process and waits until it has loaded. Raises HandoverError, TimeoutError."""
        assert self._models is not None
        loaded = self._loaded[name] = self._loop.create_future()
        child = self._successors[name] = self._router(name)
        load = LoadRouter(name, self._config, ServedModel.by_name(self._models))
        try:
            await child.start("router", load, (self._sockets[name].fileno(),))
        except Exception as error:  # no file, process, thread, memory: each by its own kind
            self._has_loaded(name, str(error))
        async with asyncio.timeout(self._config.cluster.start_timeout_s):
            why_not = await loaded
        if why_not:
            raise HandoverError(f"{name} does not come up again: {why_not}; what runs goes on")

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_lease(self, view: LeaseView) -> None:
        """Have a controller here while this server leads."""
        if view.why_not:
            self._fail(ServeError(view.why_not))
            return
        if view.change is Change.LEADS and not self._is_ending:
            self._spawn(self._start_controller_again(0.0))
        elif view.change is Change.LOST and self._controller is not None:
            self._controller.kill()
        elif view.term:
            self._to_controller(orders.Leads(view.is_kept))
        self._use_leader(view.leader.controller)
        self._look_ready()

    def _use_leader(self, controller: Peer | None) -> None:
        if controller is not None and controller != self._leader:
            self._leader = controller
            for router in self._routers.values():
                router.send(orders.Follow(controller))

    async def _start_controller(self) -> None:
        spec = orders.ControlSpec(
            cluster=self._life.record.cluster,
            epoch=self._life.next_controller(),
            config=self._config,
            kept_file=self._life.kept_file,
            listening=self._listening,
            host=self._host,
            routers=tuple(self._sockets),
            running_routers=tuple(self._started.values()),
            lease=None if self._servers is None else self._servers.order(),
            restart=self._restart.status,
            here=this_machine(self._config),
        )
        spare, self._spare = self._spare, None
        self._controller = child = spare or self._new_controller()
        if spare is None:
            await self._begin(child)
        child.started_at = self._loop.time()
        child.send(spec)
        if self._models is not None:
            child.send(self._models)

    def _new_controller(self) -> Child:
        """Without a process yet: see `_begin`."""

        def on_end(code: int) -> None:
            if self._controller is child:
                self._on_end(child.started_at, code)
            elif self._spare is child:
                self._spare = None

        return (child := Child("controller", self._on_controller_message, on_end))

    async def _begin(self, controller: Child) -> None:
        """Its process, which waits for its order."""
        fds = () if self._servers is None else (self._servers.order().fd,)
        await controller.start("controller", None, fds)

    async def _keep_spare(self) -> None:
        """A server that follows has a controller at hand: its libraries take a while to load."""
        while True:
            if self._spare is None and not self._leads:
                with contextlib.suppress(OSError):  # no memory or files for now
                    await self._begin(spare := self._new_controller())
                    if self._leads:
                        spare.kill()
                    else:
                        self._spare = spare
            await asyncio.sleep(WATCH_S)

    def _on_controller_message(self, message: Any) -> None:
        match message:
            case orders.StartupProgress(part, state, is_up):
                self._ends.see(part, is_up)
                if not self.ready.done():
                    self._on_progress(part, state, is_up)
            case orders.AllUp(lines, num_outdated):
                self._lines = lines
                self._are_up.set()
                self._look_ready()
                self._replace_outdated(num_outdated)
            case orders.ControllerListens(controller):
                if self._leads:
                    self._use_leader(controller)
                    if self._servers is not None:
                        self._servers.listens(controller)
            case orders.WorkersRestarted(why_not):
                if self._restarting is not None and not self._restarting.done():
                    self._restarting.set_result(why_not)
            case orders.GaveUp(reason):
                self._fail(ServeError(reason))
            case _:
                log.warning("the controller said %s", type(message).__name__)

    def _on_end(self, started_at: float, code: int) -> None:
        if self._is_ending or self._is_leaving:
            return
        if not self._leads:
            self._controller = None
            return
        pause_s = self._ends.ended(self._loop.time() - started_at)
        log.warning("the controller has ended (%s); again in %g s", shown(code), pause_s)
        if self._restarting is not None and not self._restarting.done():
            self._restarting.set_result("the controller has ended")
        self._spawn(self._start_controller_again(pause_s))

    async def _start_controller_again(self, pause_s: float) -> None:
        """Until it runs: what is missing now, such as memory or files, may be there later."""
        while self._leads:
            await asyncio.sleep(pause_s)
            try:
                await self._start_controller()
            except Exception as error:  # no file, process, thread, memory: each by its own kind
                pause_s = self._ends.failed()
                log.error("the controller cannot be started: %s; again in %g s", error, pause_s)
            else:
                return

    @property
    def _leads(self) -> bool:
        """Whether there is to be a controller here."""
        return self._servers is None or self._servers.leads

    def _start_routers(self) -> None:
        for name in self._sockets:
            self._spawn(self._start_router(name))

    async def _start_router(self, name: NodeId) -> None:
        """Unless it runs, or is not to."""
        is_there = name in self._starting or (
            name in self._routers and self._routers[name].is_alive
        )
        if is_there or self._is_ending or self._is_leaving or self._models is None:
            return
        epoch = self._epochs.get(name, 0) + 1
        spec = RouterProcessSpec(
            cluster=self._life.record.cluster,
            router=name,
            epoch=epoch,
            routers=tuple(self._sockets),
            config=self._config,
            models=ServedModel.by_name(self._models),
            access=self._access,
            source=None if self._source is None else (self._source.path, self._source.overrides),
            kept=None if self._source is None else self._source.kept,
        )
        self._epochs[name] = epoch
        fd = self._sockets[name].fileno()
        order = RouterOrder(spec, self._listening, self._host, fd)
        child = self._successors.pop(name, None)
        if child is None or not child.is_alive:
            child = self._router(name)
        self._routers[name], child.started_at = child, self._loop.time()
        self._starting.add(name)
        try:
            if child.is_alive:  # it has loaded
                child.send(order)
            else:
                await child.start("router", order, (fd,))
        except Exception as error:  # no file, process, thread, memory: each by its own kind
            self._start_router_again(name, str(error), self._router_ends[name].failed())
        finally:
            self._starting.discard(name)
        if self._leader is not None:
            child.send(orders.Follow(self._leader))

    def _on_router_message(self, message: Any) -> None:
        match message:
            case RouterStarted(peer):
                self._started[peer.node] = message
                self._to_controller(message)
            case orders.GaveUp(reason):
                log.error("%s", reason)
                if not self.ready.done():
                    self._fail(ServeError(reason))
            case RouterLost():
                self._to_controller(message)
            case orders.RouterLoaded(router):
                self._has_loaded(router)
            case orders.Serves(router):
                self._serving.add(router)
                self._look_ready()
            case orders.ModelsUsed(router, number):
                self._changes.answered(router, number)
            case ServiceRequest() | ChangeModels():
                self._spawn(self.obey(message))
            case _:
                log.warning("a router said %s", type(message).__name__)

    def _on_router_end(self, name: NodeId, epoch: int, code: int) -> None:
        self._serving.discard(name)
        self._started.pop(name, None)
        why = f"its process has ended ({shown(code)})"
        self._to_controller(RouterLost(name, epoch, why))
        if not self._is_ending:
            lived_s = self._loop.time() - self._routers[name].started_at
            self._start_router_again(name, why, self._router_ends[name].ended(lived_s))

    def _start_router_again(self, name: NodeId, why: str, pause_s: float) -> None:
        log.warning("%s is gone: %s; again in %g s", name, why, pause_s)
        self._loop.call_later(pause_s, lambda: self._spawn(self._start_router(name)))

    def _to_controller(self, message: Any) -> None:
        if self._controller is not None:
            self._controller.send(message)

    def _look_ready(self) -> None:
        lines, models = self._lines, self._models
        if lines is None and self._leader is not None and not self._leads:
            lines = ()  # the workers are another server's to show
        is_all = len(self._serving) == len(self._sockets)
        if lines is not None and models is not None and is_all and not self.ready.done():
            ports = {name: sock.getsockname()[1] for name, sock in self._sockets.items()}
            shown = ", ".join(f"{name} at port {port}" for name, port in ports.items())
            log.info("the server is ready: %s, %s", ", ".join(models.served_names), shown)
            self.ready.set_result(Ready(ports, lines, models))
            if self._found is None:
                self._life.is_good(self._installed)

    def _children(self) -> list[Child]:
        both = *self._routers.values(), *self._successors.values()
        return [*both, *filter(None, [self._controller])]

    def _fail(self, error: ServeError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
