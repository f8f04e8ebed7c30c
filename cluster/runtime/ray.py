"""The Ray runtime: with `ray_cluster` all that knows Ray.

Ray places the processes of workers and further routers, tells when one dies, and carries the few
calls of the control plane (start, introduce, stop). Requests, tokens and KV never pass through it.
Actors are never restarted by Ray: the controller does that, under a new epoch. Import this after
`ray_environment.apply`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.api.tenants import Tenants
from cluster.control.machines import Machine
from cluster.control.messages import (
    GiveUp,
    Introduce,
    Introduced,
    MachinesChanged,
    Peer,
    RouterFailed,
    RouterLost,
    StartFailed,
    StartRouter,
    StartWorker,
    StopRouter,
    StopWorker,
    WorkerLost,
)
from cluster.control.router_loads import Questions
from cluster.control.router_processes import RouterLoad
from cluster.runtime.actors import RouterActor, WorkerActor
from cluster.runtime.host import NodeHost
from cluster.runtime.ray_cluster import LOOPBACK as LOOPBACK
from cluster.runtime.ray_cluster import (
    REACH_TIMEOUT_S,
    alive_nodes,
    first_line,
    machines_of,
    own_machine,
)
from cluster.runtime.ray_cluster import RayUnavailable as RayUnavailable
from cluster.runtime.ray_cluster import connect as connect
from cluster.runtime.ray_cluster import control_plane as control_plane
from cluster.runtime.ray_cluster import disconnect as disconnect
from cluster.runtime.ray_cluster import own_host as own_host
from cluster.serve.router_process import RouterProcessSpec
from cluster.worker.build import WorkerSpec
from cluster.worker.process import Listening
from engine.node import Effect, NodeId

log = logging.getLogger("kvrelay.ray")

POLL_MACHINES_S = 1.0
STOP_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Running:
    spec: WorkerSpec | RouterProcessSpec
    actor: Any
    task: asyncio.Task[None]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What differs between workers and routers: what is told of a start that failed, with whether
    it would again, and of a loss."""

    actor: Any  # class
    failed: Callable[[NodeId, int, str, bool], Any]
    lost: Callable[[NodeId, int, str], Any]


_WORKER = _Kind(WorkerActor, StartFailed, WorkerLost)
_ROUTER = _Kind(RouterActor, RouterFailed, RouterLost)


class RayWorkers:
    """Executor of the controller's effects. Lives on the host's loop.

    Invariant: at most one actor per node is known here, that of the latest epoch; every actor that
    was started is stopped, by `StopWorker` or `StopRouter`, by a later start, or by `close_all`.
    """

    def __init__(
        self,
        host: NodeHost,
        controller: NodeId,
        spec_of: Callable[[StartWorker], WorkerSpec],
        router_spec_of: Callable[[StartRouter], RouterProcessSpec],
        listening: Listening,
        introduce_here: Callable[[tuple[Peer, ...]], None],
        on_give_up: Callable[[str], None],
    ) -> None:
        self._host = host
        self._controller = controller
        self._spec_of = spec_of
        self._router_spec_of = router_spec_of
        self._listening = listening
        self._introduce_here = introduce_here
        self._on_give_up = on_give_up
        self._raylets: dict[str, tuple[str, int]] = {}  # by machine
        self._running: dict[NodeId, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def perform(self, effect: Effect) -> None:
        match effect:
            case StartWorker():
                spec = self._spec_of(effect)
                env = {"OMP_NUM_THREADS": str(spec.threads), "TOKENIZERS_PARALLELISM": "false"}
                options = {"num_gpus": spec.num_gpus, "runtime_env": {"env_vars": env}}
                self._launch(_WORKER, spec, effect.machine_id, **options)
            case StartRouter():
                self._launch(_ROUTER, self._router_spec_of(effect), own_machine())
            case StopWorker(node, epoch) | StopRouter(node, epoch):
                running = self._running.get(node)
                if running is not None and running.spec.epoch <= epoch:
                    del self._running[node]
                    self._kill(running)
            case Introduce(to, about, epoch, peers) if to in self._host.nodes:
                self._introduce_here(peers)
                self._tell(Introduced(to, about, epoch))
            case Introduce():
                self._spawn(self._introduce(effect))
            case GiveUp(reason):
                self._on_give_up(reason)
            case _:
                raise AssertionError(f"not an effect of a controller: {effect}")

    def close(self) -> None:
        """Nothing runs outside the loop; `close_all` stops the workers."""

    async def watch_machines(self, use_gpus: bool) -> None:
        """Tell the controller of machines that come and go, until cancelled."""
        known: tuple[Machine, ...] = ()
        while True:
            nodes = await asyncio.to_thread(alive_nodes)
            self._raylets = {
                n["NodeID"]: (n["NodeManagerAddress"], n["NodeManagerPort"]) for n in nodes
            }
            current = machines_of(nodes, use_gpus)
            if current != known:
                known = current
                self._tell(MachinesChanged(known))
            await asyncio.sleep(POLL_MACHINES_S)

    def ask_routers(self) -> Questions:
        """Each of the further routers that have a process, and how to ask it for its load."""
        return {(r.spec.node, r.spec.epoch): partial(_load, r.actor) for r in self._routers()}

    def use_tenants(self, tenants: Tenants) -> None:
        """Tell the further routers; one that starts is told by its spec."""
        for router in self._routers():
            router.actor.use_tenants.remote(tenants)

    def _routers(self) -> list[_Running]:
        running = [r for r in self._running.values() if r.actor is not None]
        return [r for r in running if isinstance(r.spec, RouterProcessSpec)]

    async def close_all(self) -> None:
        """Stop every process, politely and then by force, within `STOP_TIMEOUT_S`."""
        running = list(self._running.values())
        self._running.clear()
        stops = [asyncio.ensure_future(_result(entry.actor.stop.remote())) for entry in running]
        if stops:
            await asyncio.wait(stops, timeout=STOP_TIMEOUT_S)
        for task in (*self._tasks, *stops):
            task.cancel()
        for entry in running:
            self._kill(entry)

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._host.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _launch(
        self, kind: _Kind, spec: WorkerSpec | RouterProcessSpec, machine_id: str, **options: Any
    ) -> None:
        run = self._run(kind, spec, machine_id, options)
        self._running[spec.node] = _Running(spec, None, self._spawn(run))

    def _tell(self, message: Any) -> None:
        self._host.loop.call_soon(self._host.deliver, self._controller, message)

    def _kill(self, running: _Running) -> None:
        running.task.cancel()
        if running.actor is not None:
            try:
                ray.kill(running.actor, no_restart=True)
            except RayError as error:
                log.debug("not killed: %s", first_line(error))

    async def _run(
        self,
        kind: _Kind,
        spec: WorkerSpec | RouterProcessSpec,
        machine_id: str,
        options: dict[str, Any],
    ) -> None:
        """The life of one actor, told to the controller."""
        node, epoch, listening = spec.node, spec.epoch, self._listening
        own = machine_id == own_machine()
        if not own and not await self._has_raylet(machine_id):
            self._tell(kind.failed(node, epoch, "its machine does not answer", False))
            return
        if not listening.host:
            host = ray.util.get_node_ip_address() if own else self._raylets[machine_id][0]
            listening = replace(listening, host=host)
        try:
            name = f"{spec.cluster}/{node}/{epoch}"
            actor = _create_actor(kind.actor, node, name, machine_id, options)
            self._running[node].actor = actor
            outcome = await _result(actor.start.remote(spec, listening))
        except Exception as error:  # whatever it was, the controller waits for an answer
            self._tell(kind.failed(node, epoch, first_line(error), False))
            return
        self._tell(outcome)
        if isinstance(outcome, StartFailed | RouterFailed):
            return
        try:
            await _result(actor.wait.remote())
        except Exception as error:
            self._tell(kind.lost(node, epoch, f"{type(error).__name__}: {first_line(error)}"))

    async def _has_raylet(self, machine_id: str) -> bool:
        """Ray takes long to notice that a machine is gone; a connection shows it at once."""
        if machine_id not in self._raylets:
            return False  # it has gone since it was chosen
        host, port = self._raylets[machine_id]
        try:
            async with asyncio.timeout(REACH_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def _introduce(self, effect: Introduce) -> None:
        running = self._running.get(effect.to)
        if running is None or running.actor is None:
            return
        try:
            await _result(running.actor.introduce.remote(effect.peers))
        except RayError as error:
            log.info("%s was not introduced to: %s", effect.to, first_line(error))
            return
        self._tell(Introduced(effect.to, effect.about, effect.epoch))


def _create_actor(
    actor: Any, node: NodeId, name: str, machine_id: str, options: dict[str, Any]
) -> Any:
    common = {
        "name": name,
        "num_cpus": 0,  # placement is the controller's
        "max_restarts": 0,
        "max_concurrency": 4,  # start, wait, introduce and stop may overlap
        "scheduling_strategy": NodeAffinitySchedulingStrategy(machine_id, soft=False),
    }
    named = type(f"kvrelay {node}", (actor,), {})  # what `ps` shows of its process
    return ray.remote(named).options(**common, **options).remote(node)


async def _result(reference: Any) -> Any:
    return await reference


async def _load(actor: Any) -> RouterLoad:
    load: RouterLoad = await actor.load.remote()
    return load
