"""A router as a process of its own: its node, its API, its store and its wire on one loop.

Life: listening -> serving (what comes waits until workers are up) -> draining -> ended, or dead
with its node or its API. The controller tells it of workers, and operators through it; without a
controller it goes on with the workers that it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

import msgspec

from kvrelay.cluster import orders
from kvrelay.cluster.config import Config, ConfigError
from kvrelay.cluster.control.audits import AuditService
from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import (
    RouterStarted,
    ScalingReport,
)
from kvrelay.cluster.control.process_messages import (
    LinkLost,
    RouterLoad,
    RouterReport,
)
from kvrelay.cluster.control.routers import is_router
from kvrelay.cluster.control.view import router_status
from kvrelay.cluster.events.publisher import EventPublisher
from kvrelay.cluster.processes.adapter_bases import check_change, model_names
from kvrelay.cluster.processes.certificates import ends_of, follow_certificates, identity_of
from kvrelay.cluster.processes.orders import ModelsUsed
from kvrelay.cluster.processes.reload import Source, follow
from kvrelay.cluster.processes.router_api import (
    forget_model,
    load_of,
    offer_model,
    serve_api,
)
from kvrelay.cluster.processes.router_spec import (
    RouterProcessSpec,
    ServedModel,
    UseModels,
)
from kvrelay.cluster.scaling.observations import router_seen, worker_seen
from kvrelay.cluster.scaling.planner import router_config
from kvrelay.cluster.state.opening import ModelStores, OpenedState, open_state
from kvrelay.cluster.status import (
    ClusterStatus,
    ClusterView,
    ModelStatus,
    StateFolderStatus,
    StoreStatus,
    merge,
    model_status,
)
from kvrelay.engine.host import NodeHost, in_thread, keep_running
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.needs import Need
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Audit, AuditRequest, Role
from kvrelay.engine.stderr import lines_dropped, num_open_files
from kvrelay.engine.support import Capability, Trait, refusal_of
from kvrelay.engine.wire import channel
from kvrelay.engine.wire.context import TlsIdentity
from kvrelay.engine.wire.wire import Wire
from kvrelay.router.config import RouterConfig
from kvrelay.router.messages import WorkerDown
from kvrelay.router.models import AddModel, ForModel, ModelRouters, RemoveModel
from kvrelay.router.router import Router
from kvrelay.worker.messages import CONTROLLER, Adopt, Peer, PeersUpdated, UpdatePeers
from kvrelay.worker.process import Listening, update_peers

if TYPE_CHECKING:
    from kvrelay.cluster.api.context import ApiContext
    from kvrelay.cluster.api.server import ServerCertificate

log = logging.getLogger("kvrelay.router")

REPORT_S = 1.0
LOOK_S, LOOK_TIMEOUT_S = 2.0, 2.0  # at the disk of the state folder
LEAST_FREE, LEAST_FREE_FILES, MAX_FILES_SHARE = 64 << 20, 1000, 0.8  # as the alerts have it
AWAY_S = 5.0  # without a word of the controller it counts as gone


class RouterProcess:
    """Owns everything of one router. On one loop."""

    def __init__(
        self,
        spec: RouterProcessSpec,
        listening: Listening,
        to_server: Callable[[orders.OfServer], None] = lambda _: None,
        tokenizers: Mapping[str, Any] | None = None,
    ) -> None:
        """`to_server`: begins what an operator orders of the whole server; `tokenizers`: by model,
        if they are loaded already."""
        self.config = spec.config
        self.served_models = dict(spec.models)
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[BaseException] = self._loop.create_future()
        self.host = NodeHost(self._loop, self._send, lambda _, error: self._fail(error))
        self.wire: Wire = listening.wire(spec.router, spec.epoch, self._deliver, self._on_peer_lost)
        self.certificate: ServerCertificate | None = None
        self._ends: dict[str, float] = {}  # when certificates do
        if spec.config.tls.is_on:
            self._show(identity_of(spec.config.tls))
        self.configs = spec.config.by_model()
        self._opened: dict[str, OpenedState] = {}
        self._events = _publisher(spec)
        self._adapter_names: dict[bytes, str] = {}  # by what they hold
        self.routers = ModelRouters({name: self._open(name) for name in spec.models})
        self.context: ApiContext | None = None  # once there is an API
        self._offers = asyncio.Lock()
        self._http_port = 0
        self._stop = asyncio.Event()
        self._is_serving = asyncio.Event()
        self.finish_s = 0.0
        self.draining = False
        self.hangup = asyncio.Event()  # read tenants again
        self._to_server = to_server
        self._tokenizers = tokenizers
        self._started: RouterStarted | None = None  # what the controller has to hear from here
        self._view: ClusterView | None = None
        self._viewed_at = self._loop.time()  # it came; or the wait for it began
        self._state_folder = StateFolderStatus()
        self._runs_out: set[str] = set()  # room or files, once they were logged
        self._audits = AuditService(spec.router, self._nodes_up, self._own_audit, self.wire.send)
        self._tasks: list[asyncio.Task[Any]] = []
        self._restarted: Counter[str] = Counter()  # of them, by name

    async def start(self, sock: socket.socket, host: str) -> RouterStarted:
        """Begin to serve at `sock`, with a wire that listens at `host`."""
        spec = self._spec
        self._http_port = sock.getsockname()[1]
        host, port = await self.wire.listen(host)
        if self._events is not None:
            self._events.start()
        self._stores = ModelStores({name: each.executor for name, each in self._opened.items()})
        self.host.add(self.routers, self._stores)
        for name, opened in self._opened.items():
            opened.start(partial(self._from_store, name))
        serving = self._loop.create_task(self._serve(sock))
        serving.add_done_callback(self._on_served)
        self._tasks = [serving]
        self._keep("report", self._report)
        self._keep("watch_state_folder", self._watch_state_folder)
        self._keep("report_traffic", self._report_traffic)
        if spec.config.tls.is_on:
            use = partial(follow_certificates, spec.config.tls, self._show)
            self._keep("follow_certificates", use)
        if spec.source is not None:
            source = Source(*spec.source, self.hangup, spec.kept)
            take = spec.access.tenants.update
            self._keep("follow_tenants", partial(follow, spec.config, source, take))
        peer = Peer.here(spec.router, host, port, spec.epoch)
        self._started = RouterStarted(peer, self._http_port, os.getpid())
        return self._started

    def follow(self, controller: Peer) -> None:
        """It is the controller now; an older one than it knows already is not listened to."""
        update_peers(self.wire, [controller])
        self._tell_load()

    def _show(self, identity: TlsIdentity) -> None:
        """To whoever connects from now on, and to peers. Raises TlsError."""
        tls = self._spec.config.tls
        if tls.frames:
            self.wire.replace_identity(identity)
        if tls.api and self.certificate is None:
            from kvrelay.cluster.api.server import ServerCertificate

            self.certificate = ServerCertificate(identity)
        elif self.certificate is not None:
            self.certificate.replace(identity)
        self._ends = ends_of(tls, identity)

    def _keep(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks.append(self._loop.create_task(keep_running(name, run, self._restarted)))

    def _open(self, model: str) -> Router:
        """With what it shares, and what its sessions were."""
        spec, config = self._spec, self.configs[model]
        name = self.served_models[model].served_name
        opened = open_state(config, name, spec.cluster, spec.router, spec.routers, model)
        self._opened[model] = opened
        events = self._events.source(name, self._adapter_name) if self._events else None
        router = Router(
            spec.router,
            _router_config(config),
            opened.sessions,
            opened.records,
            state=opened.state,
            clock=perf_counter,
            controller=CONTROLLER,
            watcher=events,
        )
        if events is not None:
            events.index = router.index
        return router

    def _adapter_name(self, need: Need) -> str:
        """What clients call it; "": nobody does any more."""
        if need.digest not in self._adapter_names and self.context is not None:
            every = self.context.adapters.every().items()
            self._adapter_names = {each.digest: name for name, each in every}
        return self._adapter_names.get(need.digest, "")

    def use_models(self, order: UseModels, answer: Callable[[ModelsUsed], None]) -> None:
        """Take others, as `ModelChanges` says."""

        async def use() -> None:
            async with self._offers:  # one after the other
                await self._use_models(order)
                answer(ModelsUsed(self._spec.router, order.number))

        self._tasks.append(self._loop.create_task(use()))

    async def _use_models(self, order: UseModels) -> None:
        await self._is_serving.wait()
        assert self.context is not None
        models, configs = order.models, order.config.by_model()
        for name in models.keys() - self.routers.routers.keys():
            self.configs[name], self.served_models[name] = configs[name], models[name]
            router = await asyncio.to_thread(self._open, name)
            self._stores.stores[name] = self._opened[name].executor
            self._opened[name].start(partial(self._from_store, name))
            self.host.deliver(self._spec.router, AddModel(name, router))
        self.config = order.config
        for name in order.offered:
            if name not in self.context.models:
                loaded = await asyncio.to_thread(_load_tokenizer, models[name].path, configs[name])
                await offer_model(self, self.context, name, loaded, self._spec.access)
        gone = [name for name in self.routers.routers if name not in order.offered]
        contexts = {each.model_name: each for each in self.context.all}
        self.context.offer(order.offered)
        deadline = self._loop.time() + order.drain_s
        while any(self.routers.routers[n].live for n in gone) and self._loop.time() < deadline:
            await asyncio.sleep(0.05)
        for name in gone:
            forget_model(self, name, contexts.get(name))
        for name in self.routers.routers.keys() - models.keys():
            self.host.deliver(self._spec.router, RemoveModel(name))
            if self._events is not None:
                self._events.drop(name)
            del self._opened[name], self.configs[name], self.served_models[name]
            if (store := self._stores.stores.pop(name)) is not None:
                await asyncio.to_thread(store.close)

    async def order(self, order: orders.Order) -> dict[str, Any]:
        """Have an operator's order begin, by whoever obeys it; returns what is known of it already.
        Raises OrderRefused, ControllerAway."""
        known: dict[str, Any] = {}
        if isinstance(order, orders.OfWorkers):
            self._ask_controller()
        try:
            match order:
                case orders.ServiceRequest(orders.Service.DRAIN):
                    self.draining = True  # this router begins at once
                case orders.ChangeModels():
                    self._check_change(order)
                case orders.SetRole():
                    known = {"was": self._role_before(order)}
                case orders.UpdateModel():
                    order = await self._with_digests(order)
                    version = order.version
                    known = {"name": version.name, "digest": version.digest.hex()}
        except (ConfigError, ModelError) as error:
            raise orders.OrderRefused(str(error)) from None
        if isinstance(order, orders.OfServer):
            self._to_server(order)
        else:
            self.wire.send(CONTROLLER, order)
        return known

    def _check_change(self, change: orders.ChangeModels) -> None:
        config = self.config
        shared = (Trait.SERVERS,) if config.cluster.name else ()
        if why := refusal_of(Capability.MODEL_CHANGES, shared):
            raise ConfigError(why)
        check_change(config, change.name, change.entry, self._spec.access.tenants.names())
        restart = self._ask_controller().restart
        if restart.version != channel.own_version():
            raise ConfigError("`kvrelay serve` is of another version: `kvrelay restart` it first")
        if restart.state not in ("", "done", "stopped"):
            raise ConfigError(f"a restart or another change is under way ({restart.state}): wait")

    def _role_before(self, order: orders.SetRole) -> Role:
        """Of the worker; from now on it is the new one, until the controller says it again."""
        known = {each.worker: each for each in self._ask_controller().workers}
        worker = known.get(order.worker)
        if worker is None:
            there = f"there are: {', '.join(sorted(known)) or 'none'}"
            raise orders.UnknownWorker(f"There is no worker {order.worker[:80]!r}; {there}")
        was, worker.role = worker.role, order.role
        return was

    async def _with_digests(self, order: orders.UpdateModel) -> orders.UpdateModel:
        """Those of the model's own weights, and of what it names."""
        from kvrelay.engine.model.checkpoint.described import check_described
        from kvrelay.engine.model.checkpoint.version import read_version

        own = self.served_models[order.model].path
        base = wanted = await asyncio.to_thread(read_version, own)
        if (memory := order.version.memory) is not None:
            check_described(memory)
            wanted = memory.version(order.version.name)
        elif not order.back:
            folder = Path(order.version.path).expanduser().absolute()
            wanted = await asyncio.to_thread(read_version, folder, order.version.name, own)
        return replace(order, base=base, version=wanted)

    def reserved(self) -> dict[str, str]:
        """Names of models, which adapters cannot have."""
        return model_names(self.config, (m.served_name for m in self.served_models.values()))

    async def serves(self) -> None:
        """Returns when its API takes requests."""
        await self._is_serving.wait()

    async def _serve(self, sock: socket.socket) -> None:
        """The API. Its libraries take a while; the router gets to know its workers meanwhile, and
        clients wait in the socket's queue."""
        try:
            await serve_api(
                self,
                self._tokenizers or await load_tokenizers(self.served_models, self.configs),
                self._spec.access,
                sock,
                self._stop,
                lambda _: self._is_serving.set(),
            )
        finally:
            sock.close()

    async def drain(self, timeout_s: float) -> int:
        """Take no new request, and wait for those that are there; returns how many are left."""
        self.draining = True
        deadline = self._loop.time() + timeout_s
        while (num_live := self._load().num_live) and self._loop.time() < deadline:
            await asyncio.sleep(0.05)
        return num_live

    async def close(self, finish_s: float = 0.0) -> None:
        """Take no more connections, finish what is there within `finish_s` and a few seconds, and
        close everything. Who connects meanwhile waits for whoever listens there next."""
        self.finish_s = finish_s
        self._stop.set()
        with contextlib.suppress(Exception):
            await self._tasks[0]
        for task in self._tasks:
            task.cancel()
        if self._events is not None:
            await asyncio.to_thread(self._events.close)
        await self.wire.close()
        await asyncio.to_thread(self.host.close)

    def healthy(self, model: str = "") -> tuple[bool, dict[str, Any]]:
        key = next((k for k, each in self.served_models.items() if each.served_name == model), "")
        asked = self.routers.routers[key] if key else self.routers
        workers = asked.status(self._loop.time()).workers
        num_up = sum(worker.state != "down" for worker in workers)
        wanted = len(workers) if key or self._view is None else len(self._view.workers)
        scalings = [each.scaling for name, each in self.configs.items() if name == key or not key]
        may_sleep = any(each.enabled and each.limits(time())[0] == 0 for each in scalings)
        return num_up > 0 or may_sleep, {"workers_up": num_up, "workers": wanted}

    def status(self) -> ClusterStatus:
        """What this router knows, and what the controller has said."""
        now, spec = self._loop.time(), self._spec
        host, port, scheme = spec.config.api.host, self._http_port, spec.config.tls.scheme
        up, load = ProcessState.UP, self._load()
        me = router_status(spec.router, spec.epoch, up, host, port, load, scheme)
        status = ClusterStatus(
            **msgspec.structs.asdict(self.routers.status(now)),
            model=next(iter(self.served_models.values())).served_name,
            models=self._models(now),
            routers=[me],
            state=self._store_status(),
            wire=dict(self.wire.counters),
            kv_events=dict(self._events.counts) if self._events is not None else {},
            sessions=dict(sum(map(Counter, self._session_counts()), Counter())),
            restarted_tasks=dict(self._restarted),
            certificates=self._ends,
            state_folder=self._state_folder,
            lines_dropped=lines_dropped(),
        )
        age_s = now - self._viewed_at
        if self._view is not None:
            merge(status, self._view, age_s)
        else:
            status.controller.age_s = round(age_s, 3)
        return status

    def _models(self, now: float) -> list[ModelStatus]:
        """A row for each, where there are several."""
        aliases = {each.name: each.aliases for each in self.config.models}
        return [
            model_status(name, aliases[name], self.routers.routers[name].status(now))
            for name in aliases
        ]

    def _session_counts(self) -> Iterator[dict[str, int]]:
        return (router.sessions.counts() for router in self.routers.routers.values())

    def _store_status(self) -> StoreStatus:
        """All use one store, each with keys of its own: one that is in trouble stands for all."""
        all_of = [opened.status() for opened in self._opened.values()]
        return next((each for each in all_of if each.up is False), all_of[0])

    async def audit(self) -> dict[str, Any]:
        """See `cluster.control.audits`. Raises ControllerAway: it knows who is up."""
        self._ask_controller()
        return await self._audits.ask()

    def _nodes_up(self) -> tuple[list[NodeId], list[NodeId]]:
        """Returns workers and routers, as the controller has them."""
        view = self._ask_controller()
        workers = [each.worker for each in view.workers if each.state in ("up", "draining")]
        return workers, [each.router for each in view.routers if each.state == "up"]

    def _ask_controller(self) -> ClusterView:
        age_s = self._loop.time() - self._viewed_at
        if self._view is None or age_s > AWAY_S:
            raise orders.ControllerAway
        return self._view

    def _load(self) -> RouterLoad:
        return load_of(self.routers, self._loop.time(), self._store_status())

    async def _report(self) -> None:
        while True:
            self._tell_load()
            await asyncio.sleep(REPORT_S)

    async def _watch_state_folder(self) -> None:
        """How much room there is, by a thread: a disk that hangs answers nothing, and that is all
        that is said of it."""
        folder = self._spec.config.sessions.state_path
        while True:
            looking = in_thread(partial(StateFolderStatus.of, folder), "state-folder")
            done, _ = await asyncio.wait([looking], timeout=LOOK_TIMEOUT_S)
            self._state_folder = StateFolderStatus()
            if not done:
                await asyncio.wait([looking])  # one thread stands there, not one for each look
            self._state_folder = looking.result()
            self._say_what_runs_out(self._state_folder, folder)
            await asyncio.sleep(LOOK_S)

    def _say_what_runs_out(self, room: StateFolderStatus, folder: Path) -> None:
        """Logs it once, when it begins to run out."""
        limit, num_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0], num_open_files()
        found = {}
        if room.free_bytes is not None and room.free_bytes < LEAST_FREE:
            found["room"] = f"{room.free_bytes >> 20} MiB are free at {folder}: make room"
        if room.free_files is not None and room.free_files < LEAST_FREE_FILES:
            found["inodes"] = f"{room.free_files} files are left at {folder}: make room"
        if limit > 0 and (num_open or limit) > MAX_FILES_SHARE * limit:
            found["files"] = f"{num_open} of {limit} files are open: raise the limit (ulimit -n)"
        for what, text in found.items():
            if what not in self._runs_out:
                log.warning("%s", text)
        self._runs_out = set(found)

    async def _report_traffic(self) -> None:
        """To the autoscaler of each model's workers."""
        due_at: dict[str, float] = {}
        while True:
            now = self._loop.time()
            scaled = {n: each.scaling for n, each in self.configs.items() if each.scaling.enabled}
            for model, scaling in scaled.items():
                if now >= due_at.setdefault(model, now + scaling.tick_s):
                    due_at[model] = now + scaling.tick_s
                    self._report_traffic_of(now, model)
            next_at = min((due_at[model] for model in scaled), default=now + REPORT_S)
            await asyncio.sleep(max(0.0, min(REPORT_S, next_at - self._loop.time())))

    def _report_traffic_of(self, now: float, model: str) -> None:
        router = self.routers.routers.get(model)
        if router is not None and self.wire.knows(CONTROLLER):
            seen = router_seen(0.0, router.node_id, router.traffic, router.live.values())
            stats = router.worker_stats
            workers = [worker_seen(at_s - now, info, each) for info, at_s, each in stats]
            self.wire.send(CONTROLLER, ScalingReport(seen, tuple(workers), model))

    def _tell_load(self) -> None:
        spec = self._spec
        if self.wire.knows(CONTROLLER):
            report = RouterReport(spec.router, spec.epoch, self._load(), self._started)
            self.wire.send(CONTROLLER, report)

    def _own_audit(self) -> Audit:
        live = {"live": self._load().num_live}
        left = tuple(self.routers.check_idle())
        return Audit(self._spec.router, self._spec.epoch, live, left)

    def _from_store(self, model: str, message: Any) -> None:
        """May be called from any thread."""
        self.host.deliver_soon(self._spec.router, ForModel(model, message))

    def _deliver(self, to: NodeId, message: Any) -> None:
        """What is for the process is not for its node."""
        match message:
            case UpdatePeers(about, epoch, peers):
                update_peers(self.wire, peers)
                self.wire.send(CONTROLLER, PeersUpdated(self._spec.router, about, epoch))
            case Adopt(controller):
                self.follow(controller)
            case ClusterView():
                self._view = message
                self._viewed_at = self._loop.time()
            case AuditRequest(reply_to):
                self.wire.send(reply_to, self._own_audit())
            case Audit():
                self._audits.receive(message)
            case _:
                self.host.deliver(to, message)

    def _on_peer_lost(self, node: NodeId, epoch: int) -> None:
        """Messages were lost. A worker is as good as gone until the controller, which asks it, has
        brought the two together again."""
        if node == CONTROLLER or is_router(node):
            return
        self.host.deliver(
            self._spec.router, WorkerDown(node, epoch, "the connection to it was lost")
        )
        self.wire.send(CONTROLLER, LinkLost(self._spec.router, node, epoch))

    def _send(self, to: NodeId, message: Any) -> str | None:
        return self.wire.send(to, message)

    def _on_served(self, serving: asyncio.Task[None]) -> None:
        if not self._stop.is_set():
            error = None if serving.cancelled() else serving.exception()
            self._fail(error or RuntimeError("its API has ended"))

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(error)


def _publisher(spec: RouterProcessSpec) -> EventPublisher | None:
    events, most = spec.config.events, spec.config.most_workers
    if not events.endpoint:
        return None
    return EventPublisher(events, spec.router, int(spec.router.rpartition("-")[2]), most)


def _router_config(config: Config) -> RouterConfig:
    scaling = config.scaling
    return router_config(config.router, scaling) if scaling.enabled else config.router


async def load_tokenizers(
    models: Mapping[str, ServedModel], configs: Mapping[str, Config]
) -> dict[str, Any]:
    """Returns them by model; it loads the libraries of the API first."""
    return {
        name: await asyncio.to_thread(_load_tokenizer, model.path, configs[name])
        for name, model in models.items()
    }


def _load_tokenizer(path: Path, config: Config) -> Any:
    import kvrelay.cluster.api.app
    import kvrelay.cluster.api.server  # noqa: F401  (both are slow)
    from kvrelay.cluster.api.text.tokenizer import Tokenizer

    return Tokenizer(
        path,
        chat_template=config.model.chat_template,
        parse_special_tokens_in_messages=config.api.parse_special_tokens_in_messages,
    )
