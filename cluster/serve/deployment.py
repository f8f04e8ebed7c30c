"""What runs in the process that serves: router, controller, their wire, and hold of the workers.

Ray itself is handed in as a module, so that nothing here is imported before it has to be.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from time import perf_counter
from types import ModuleType
from typing import Any

from msgspec.structs import replace

from cluster.api.tenants import Access, Tenants
from cluster.config import Config
from cluster.control.auditor import Auditor
from cluster.control.audits import AuditDesk, audit_dict
from cluster.control.controller import Controller, ControllerConfig, Worker, WorkerState
from cluster.control.messages import (
    CONTROLLER,
    Peer,
    RouterLost,
    SetRole,
    StartRouter,
    StartWorker,
    WorkerLost,
)
from cluster.control.router_loads import RouterLoads
from cluster.control.router_processes import RouterState, router_entry, status_of
from cluster.runtime.host import NodeHost, keep_running
from cluster.serve.certificates import identity_of
from cluster.serve.router_api import ServedModel, load_of
from cluster.serve.router_process import RouterProcessSpec
from cluster.state.opening import open_state
from cluster.worker.build import PreparedModel, WorkerSpec
from cluster.worker.kv_plan import GIB, kv_lines
from cluster.worker.process import Listening
from engine.node import NodeId
from engine.stats import Role
from router.router import Router

ROUTER, AUDITOR = "router-0", "auditor-0"
ITL_TARGET_MS = 100.0  # of decode workers, where prefill workers are there for long prompts

Tell = Callable[[str, str, bool], None]  # part, news, done


class ServeError(Exception):
    """Serving cannot begin, or cannot go on; one line for the user."""


class Deployment:
    """The driver's nodes, their host and wire, and the workers. Lives on one event loop.

    Invariant: the API runs only while every worker has been up once; after `close` nothing of this
    deployment runs anywhere.
    """

    def __init__(
        self,
        config: Config,
        model: PreparedModel,
        access: Access,
        http_port: int,
        ray: ModuleType,
        tell: Tell,
    ) -> None:
        """`http_port`: of this process's API."""
        self.config = config
        self.model = model
        self.served_model = ServedModel(model.path, model.served_name, model.max_model_len)
        self._access = access
        self._http_port = http_port
        self._routers = tuple(f"router-{i}" for i in range(config.cluster.routers))
        self._ray = ray
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self.cluster = f"kvrelay-{secrets.token_hex(4)}"
        self.host = NodeHost(self._loop, self._send, self._on_node_failed)
        # On a cluster of several machines an empty host means: the machine's own address.
        listening = Listening(
            "" if config.cluster.address else ray.LOOPBACK,
            secrets.token_bytes(32),
            config.cluster.max_frame_mib << 20,
            config.cluster.reconnect_s,
            identity_of(config.tls) if config.tls.frames else None,
        )
        self.wire = listening.wire(ROUTER, 1, self.host.deliver, self._on_peer_lost)
        self.wire.serves |= {AUDITOR, CONTROLLER}
        self.opened = open_state(config, model.served_name, self.cluster, ROUTER, self._routers)
        self.router = Router(
            ROUTER,
            config.router,
            self.opened.sessions,
            self.opened.records,
            state=self.opened.state,
            clock=perf_counter,
            controller=CONTROLLER,
        )
        self.audits = AuditDesk(self.host, Auditor(AUDITOR))
        self.controller = Controller(ControllerConfig((), ()))
        self.workers: Any = ray.RayWorkers(
            self.host,
            CONTROLLER,
            self._spec_of,
            self._router_spec_of,
            listening,
            self._introduce_here,
            lambda reason: self._fail(ServeError(reason)),
        )
        self._loads = RouterLoads(self.workers.ask_routers)
        self.restarted: Counter[str] = Counter()  # tasks that ended, by name
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the workers and wait until all have been up. Raises ServeError."""
        cluster = self.config.cluster
        own_host = self._ray.own_host(cluster.address)
        host, port = await self.wire.listen(own_host)
        roles = [(Role.PREFILL, cluster.prefill), (Role.DECODE, cluster.decode)]
        wanted = tuple((f"{role}-{i}", role) for role, number in roles for i in range(number))
        self.controller = Controller(
            ControllerConfig(
                workers=wanted,
                routers=(Peer(ROUTER, host, port, 1),),
                listeners=tuple(Peer(node, host, port, 1) for node in (AUDITOR, CONTROLLER)),
                further_routers=self._routers[1:],
                start_timeout_s=cluster.start_timeout_s,
                silent_grace_s=cluster.silent_grace_s,
            )
        )
        self.host.add(self.router, self.opened.executor)
        self.opened.start(self.host.inbox(ROUTER))
        self.host.add(self.controller, self.workers)
        use_gpus = self.config.model.device != "cpu"
        watches: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "watch_machines": lambda: self.workers.watch_machines(use_gpus),
            "watch_routers": self._loads.watch,
        }
        self._watching = [
            self._loop.create_task(keep_running(name, watch, self.restarted))
            for name, watch in watches.items()
        ]
        while not self.controller.all_up():
            self._show()
            await asyncio.wait([self.failed], timeout=0.1)
            if self.failed.done():
                self.failed.result()
        self._show()

    async def close(self) -> None:
        for watching in self._watching:
            watching.cancel()
        self.host.close()
        await self.workers.close_all()
        await self.wire.close()
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()  # it was seen, or does not matter any more

    def kv_lines(self) -> list[str]:
        """What the KV cache costs, from what a worker reports."""
        infos = [w.info for w in self.controller.workers.values() if w.info is not None]
        return kv_lines(self.model.config, infos)

    def healthy(self) -> tuple[bool, dict[str, Any]]:
        """Whether requests can be served: at least one worker is up."""
        workers = self.controller.workers.values()
        up = [w for w in workers if w.state is WorkerState.UP]
        detail = {"workers_up": len(up), "workers": len(workers)}
        return bool(up), detail

    def status(self) -> dict[str, Any]:
        """What the router knows, and for each wanted worker what the controller does with it."""
        from cluster.api.metrics import status_dict

        status = status_dict(self.router.status(self._loop.time()), self.model.served_name)
        known = {worker["worker"]: worker for worker in status["workers"]}
        for worker in self.controller.workers.values():
            entry = known.get(worker.node)
            if entry is None:
                entry = {"worker": worker.node, "role": worker.role}
                status["workers"].append(entry)
            if entry.get("state") != "backoff" or worker.state is not WorkerState.UP:
                entry["state"] = str(worker.state)
            entry |= {
                "epoch": worker.epoch,
                "pid": worker.pid,
                "machine": worker.machine_id or "",
                "restarts": worker.restarts,
                "last_error": worker.last_error,
            }
        status["wire"] = dict(self.wire.counters)
        status["sessions"] = self.router.sessions.counts()
        status["state"] = self.opened.status()
        status["routers"] = self._router_entries()
        status["restarted_tasks"] = dict(self.restarted)
        return status

    def _router_entries(self) -> list[dict[str, Any]]:
        host, port, scheme = self.config.api.host, self._http_port, self.config.tls.scheme
        load = load_of(self.router, self._loop.time(), self.opened.status())
        entries = [router_entry(ROUTER, 1, RouterState.UP, host, port, load, scheme)]
        for router in self.controller.router_processes.routers.values():
            is_up = router.state is RouterState.UP
            said = self._loads.known.get((router.node, router.epoch)) if is_up else None
            entries.append(status_of(router, host, said, scheme))
        return entries

    def router_ports(self) -> dict[NodeId, int]:
        """Where the APIs of the further routers are."""
        return {r.node: r.http_port for r in self.controller.router_processes.routers.values()}

    async def audit(self) -> dict[str, Any]:
        """Where the workers' blocks are, and what is leaked; see `cluster.control.audits`."""
        workers = self.controller.workers.values()
        report = await self.audits.ask([w.node for w in workers if w.state is WorkerState.UP])
        status = self.router.status(self._loop.time())
        num_live = status.num_live + status.num_queued
        num_live += await self._loads.num_live(self._ray.REACH_TIMEOUT_S)
        return audit_dict(report, num_live, self.router.check_idle())

    def use_tenants(self, tenants: Tenants) -> None:
        """At all routers, from now on. Raises ConfigError."""
        self._access.tenants.update(tenants)
        self.workers.use_tenants(tenants)

    def set_role(self, worker: NodeId, role: Role) -> Role:
        """Prefer `worker` for `role` from now on; returns what it was before. Raises KeyError, with
        the workers that there are."""
        known = self.controller.workers
        if worker not in known:
            raise KeyError(sorted(known))
        was = known[worker].role
        self.host.deliver(CONTROLLER, SetRole(worker, role))
        return was

    def _show(self) -> None:
        for worker in self.controller.workers.values():
            news = str(worker.state)
            if worker.last_error and worker.state is not WorkerState.UP:
                news += f" ({worker.last_error})"
            self._tell(worker.node, news, worker.state is WorkerState.UP)
        for router in self.controller.router_processes.routers.values():
            news = str(router.state) + (f" ({router.last_error})" if router.last_error else "")
            self._tell(router.node, news, router.state is RouterState.UP)

    def _spec_of(self, start: StartWorker) -> WorkerSpec:
        machines = {machine.machine_id: machine for machine in self.controller.machines}
        machine = machines[start.machine_id]
        config = self.config
        engine = config.engine
        if engine.itl_target_ms == 0 and config.cluster.prefill > 0:
            engine = replace(engine, itl_target_ms=ITL_TARGET_MS)
        on_gpu = machine.num_gpus > 0
        workers = self.controller.workers.values()
        host_gib = config.tiers.host_gib
        # Ranks of one model on several GPUs cannot use host memory.
        has_auto_host = host_gib == "auto" and not (on_gpu and engine.tensor_parallel_size > 1)
        # Ray shows a worker its own GPUs only, so they are the first there.
        device = "cuda" if on_gpu else config.model.device.replace("auto", "cpu")
        return WorkerSpec(
            cluster=self.cluster,
            worker=start.worker,
            role=start.role,
            epoch=start.epoch,
            model_dir=str(self.model.path),
            model_name=config.model.name,
            cache_dir=config.model.cache_dir,
            dtype=config.model.dtype,
            quantization=config.model.quantization,
            device=device,
            threads=config.engine.threads or max(1, int(machine.num_cpus)),
            on_gpu=on_gpu,
            engine=engine,
            host_bytes=0 if host_gib == "auto" else tier_share(host_gib, start, workers),
            num_sharing_host=num_sharing_tiers(start, workers) if has_auto_host else 0,
            disk_bytes=tier_share(config.tiers.disk_gib, start, workers),
            disk_path=config.tiers.disk_path,
            retention_s=config.tiers.retention_s,
            disk_after_s=config.tiers.disk_after_s,
            num_peers=config.cluster.prefill + config.cluster.decode - 1,
            machine=start.machine_id,
            num_gpus=min(engine.tensor_parallel_size, int(machine.num_gpus)),
        )

    def _router_spec_of(self, start: StartRouter) -> RouterProcessSpec:
        config, number = self.config, self._routers.index(start.router)
        return RouterProcessSpec(
            cluster=self.cluster,
            router=start.router,
            epoch=start.epoch,
            routers=self._routers,
            http_port=start.http_port or (config.api.port and self._http_port + number),
            config=config,
            model=self.served_model,
            access=self._access,
        )

    def _introduce_here(self, peers: tuple[Peer, ...]) -> None:
        for peer in peers:
            self.wire.set_address(peer.node, peer.host, peer.port, peer.epoch)

    def _send(self, to: NodeId, message: Any) -> None:
        self.wire.send(to, message)

    def _on_peer_lost(self, node: NodeId, epoch: int) -> None:
        """It did not come back in time, or messages were lost: what each knows of the other no
        longer fits."""
        self.wire.forget(node, epoch)
        lost = RouterLost if node in self._routers else WorkerLost
        self.host.deliver(CONTROLLER, lost(node, epoch, "the connection to it was lost"))

    def _on_node_failed(self, node: NodeId, error: BaseException) -> None:
        self._fail(ServeError(f"{node} failed: {type(error).__name__}: {error}"))

    def _fail(self, error: ServeError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)


def tier_share(machine_gib: float, start: StartWorker, workers: Iterable[Worker]) -> int:
    """Bytes that a worker gets of a tier whose size is per machine."""
    num_sharing = num_sharing_tiers(start, workers)
    return int(machine_gib * GIB) // num_sharing if num_sharing else 0


def num_sharing_tiers(start: StartWorker, workers: Iterable[Worker]) -> int:
    """Workers among which the tiers of a machine are divided; 0: the one that starts has no part.

    The decode workers of a machine share them evenly, because sessions come back to them. Prefill
    workers share them where there is no decode worker. All that belong on the machine count,
    whether they are up or not, so that a worker that comes back finds its tiers as large as before.
    """
    here = [w.role for w in workers if w.machine_id == start.machine_id]
    if start.role is Role.PREFILL and Role.DECODE in here:
        return 0
    return here.count(start.role)
