"""The Ray runtime: with `ray_cluster` all that knows Ray.

Ray places a guardian on each worker's machine, which starts the worker's process and tells when it
ends. All else goes over the wire: a worker outlives its guardian, and the cluster outlives Ray.
Guardians are detached and named, so that the next controller finds them; Ray never restarts them:
the controller does that, under a new epoch. Import this after `ray_environment.apply`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvrelay.cluster.control.machines import Machine
from kvrelay.cluster.control.messages import MachinesChanged, StartFailed, WorkerLost, WorkerStarted
from kvrelay.cluster.processes.ray_cluster import (
    NAMESPACE,
    REACH_TIMEOUT_S,
    alive_nodes,
    machines_of,
    own_machine,
)
from kvrelay.cluster.processes.ray_cluster import RayUnavailable as RayUnavailable
from kvrelay.cluster.processes.ray_cluster import ask_for_machines as ask_for_machines
from kvrelay.cluster.processes.ray_cluster import connect as connect
from kvrelay.cluster.processes.ray_cluster import control_plane as control_plane
from kvrelay.cluster.processes.ray_cluster import disconnect as disconnect
from kvrelay.engine.host import first_line
from kvrelay.engine.node import NodeId
from kvrelay.worker.guardian import WorkerGuardian
from kvrelay.worker.process import Listening
from kvrelay.worker.processes import name_of
from kvrelay.worker.rank_host import RankHostSpec
from kvrelay.worker.spec import WorkerSpec

log = logging.getLogger("kvrelay.ray")

POLL_MACHINES_S = 1.0
END_TIMEOUT_S = 5.0
RANKS_WAIT_S = 120.0  # for a worker to connect to its ranks; it imports torch before that
HELD = 0.001  # of a machine, by each guardian


@dataclass(slots=True)
class _Running:
    epoch: int
    guardian: Any  # None: not created yet
    task: asyncio.Task[None]
    # Of its ranks on other machines. They end with the worker; by force where it never began.
    of_ranks: list[Any] = field(default_factory=list)


class RayWorkers:
    """Starts workers and ends them. Lives on the controller's loop.

    Invariant: at most one guardian per worker is known here, that of the latest epoch.
    """

    def __init__(self, listening: Listening, tell: Callable[[Any], None]) -> None:
        """`tell`: the controller, of WorkerStarted, StartFailed, WorkerLost, MachinesChanged."""
        self._listening = listening
        self._tell = tell
        self._raylets: dict[str, tuple[str, int]] = {}  # by machine
        self._running: dict[NodeId, _Running] = {}
        self._ending: set[asyncio.Future[Any]] = set()

    def start(self, spec: WorkerSpec) -> None:
        task = asyncio.create_task(self._start(spec))
        self._running[spec.worker] = _Running(spec.epoch, None, task)

    def attach(self, cluster: str, worker: NodeId, epoch: int) -> None:
        """To the guardian that an earlier controller has created, if it is there."""
        try:
            guardian = ray.get_actor(name_of(cluster, worker, epoch), NAMESPACE)
        except ValueError:
            log.info("%s has no guardian any more; it goes on without", worker)
            return
        task = asyncio.create_task(self._watch(worker, epoch, guardian))
        self._running[worker] = _Running(epoch, guardian, task)

    def end(self, worker: NodeId, epoch: int) -> asyncio.Future[Any] | None:
        """By force, up to this epoch. None: no guardian of it is known here."""
        running = self._running.get(worker)
        if running is None or running.epoch > epoch:
            return None
        del self._running[worker]
        running.task.cancel()
        guardians = [*running.of_ranks, *filter(None, [running.guardian])]
        if not guardians:
            return None
        ending = asyncio.gather(*map(_end, guardians))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    async def watch_machines(self, use_gpus: bool) -> None:
        """Tell the controller of machines that come and go, until cancelled. Raises TimeoutError
        if Ray does not answer."""
        known: tuple[Machine, ...] | None = None
        while True:
            async with asyncio.timeout(REACH_TIMEOUT_S):
                nodes = await asyncio.to_thread(alive_nodes)
            self._raylets = {
                n["NodeID"]: (n["NodeManagerAddress"], n["NodeManagerPort"]) for n in nodes
            }
            current = machines_of(nodes, use_gpus)
            if current != known:
                known = current
                self._tell(MachinesChanged(known))
            await asyncio.sleep(POLL_MACHINES_S)

    async def request_machines(self, num_machines: int, resources: dict[str, float]) -> None:
        """Ask Ray's autoscaler for so many machines of these resources: what was asked for before
        counts no longer. Where it does not run, nothing comes of it."""
        await asyncio.to_thread(ask_for_machines, num_machines, resources)

    async def close(self) -> None:
        """End all, within `END_TIMEOUT_S`."""
        for worker, running in list(self._running.items()):
            self.end(worker, running.epoch)
        if self._ending:
            await asyncio.wait(self._ending, timeout=END_TIMEOUT_S)

    async def _start(self, spec: WorkerSpec) -> None:
        try:
            guardian, outcome = await self._create(spec)
        except Exception as error:  # whatever it was, the controller waits for an answer
            self._tell(StartFailed(spec.worker, spec.epoch, first_line(error), False))
            return
        self._tell(outcome)
        if isinstance(outcome, WorkerStarted):
            await self._watch(spec.worker, spec.epoch, guardian)

    async def _create(self, spec: WorkerSpec) -> tuple[Any, WorkerStarted | StartFailed]:
        running, listening = self._running[spec.worker], self._listening
        for machine in (spec.machine, *spec.further):
            if machine != own_machine() and not await self._has_raylet(machine):
                failed = StartFailed(spec.worker, spec.epoch, "its machine does not answer", False)
                return None, failed
        listening = replace(listening, host=self._host_of(spec.machine))
        if spec.further:
            places = await self._start_ranks(spec, running)
            for place in places:
                if isinstance(place, StartFailed):
                    return None, place
            spec = replace(spec, host=listening.host, rank_hosts=tuple(places))
        running.guardian = self._guardian(spec, spec.machine, 0)
        return running.guardian, await _result(running.guardian.start.remote(spec, listening))

    async def _start_ranks(self, spec: WorkerSpec, running: _Running) -> list[Any]:
        """On the worker's other machines: a RankHost or StartFailed of each."""
        answers = []
        for number, machine in enumerate(spec.further, start=1):
            of_ranks = RankHostSpec(
                spec.cluster,
                spec.worker,
                spec.epoch,
                self._host_of(machine),
                spec.num_ranks_here,
                spec.threads,
                RANKS_WAIT_S,
            )
            guardian = self._guardian(spec, machine, number)
            running.of_ranks.append(guardian)
            answers.append(_result(guardian.start_ranks.remote(of_ranks)))
        return await asyncio.gather(*answers)

    def _host_of(self, machine: str) -> str:
        """Where a worker on it listens."""
        if self._listening.host:
            return self._listening.host
        own = machine == own_machine()
        return ray.util.get_node_ip_address() if own else self._raylets[machine][0]

    def _guardian(self, spec: WorkerSpec, machine: str, number: int) -> Any:
        """`number`: of the machine among the worker's. A little of it is held, or Ray's autoscaler
        would think it idle."""
        host = self._raylets.get(machine, ("", 0))[0]
        who = f"ranks of {spec.worker}" if number else spec.worker
        name = name_of(spec.cluster, spec.worker, spec.epoch) + (f"/{number}" if number else "")
        env = {"OMP_NUM_THREADS": str(spec.threads), "TOKENIZERS_PARALLELISM": "false"}
        named = type(f"kvrelay guardian of {who}", (WorkerGuardian,), {})  # for `ps`
        actor = ray.remote(named).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,  # placement is the controller's
            num_gpus=spec.num_gpus,
            resources={f"node:{host}": HELD} if host else {},
            runtime_env={"env_vars": env},
            max_restarts=0,
            max_concurrency=4,  # start, wait and end may overlap
            scheduling_strategy=NodeAffinitySchedulingStrategy(machine, soft=False),
        )
        return actor.remote(who)

    async def _watch(self, worker: NodeId, epoch: int, guardian: Any) -> None:
        try:
            why = await _result(guardian.wait.remote())
        except RayError as error:
            # Its worker may live: whether it does, the wire tells.
            log.warning("the guardian of %s is gone: %s", worker, first_line(error))
            running = self._running.get(worker)
            if running is not None and running.guardian is guardian:
                del self._running[worker]
            return
        self._tell(WorkerLost(worker, epoch, why))

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


async def _end(guardian: Any) -> None:
    try:
        await _result(guardian.end.remote())
    except RayError:
        return  # it ends with that
    finally:
        ray.kill(guardian, no_restart=True)


async def _result(reference: Any) -> Any:
    return await reference
