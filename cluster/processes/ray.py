"""The Ray runtime, all that knows Ray: the cluster that this process is part of, its machines, and
workers on them.

Each worker has a placement group, which holds its GPUs, and in it an actor, its guardian, which
starts the worker's process and tells when it ends. All else goes over the wire: a worker outlives
its guardian, and the cluster outlives Ray. Both are detached and named, so that the next controller
finds them, and the GPUs stay held while the worker lives, whoever dies. Ray never restarts
guardians: the controller does that, under a new epoch. Import this after `apply_environment`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from kvrelay.cluster.control.messages import Machine, MachinesChanged, WorkerLost
from kvrelay.cluster.processes.here import HERE, num_cpus
from kvrelay.decode_worker.actor import DecodeWorker
from kvrelay.engine.host import first_line, in_thread
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.engine.wire.channel import pack, unpack
from kvrelay.prefill_worker.actor import PrefillWorker
from kvrelay.worker.messages import StartFailed, WorkerStarted
from kvrelay.worker.process import Listening
from kvrelay.worker.processes import name_of
from kvrelay.worker.rank_host import RankHostSpec
from kvrelay.worker.spec import WorkerOrder, WorkerSpec

log = logging.getLogger("kvrelay.ray")

POLL_MACHINES_S = 1.0
END_TIMEOUT_S = 5.0
PLACE_TIMEOUT_S = 30.0  # for the GPUs of a machine, which its last worker may still have
RANKS_WAIT_S = 120.0  # for a worker to connect to its ranks; it imports torch before that
# Each worker holds so much of its machine: Ray's autoscaler would think that idle otherwise.
HELD = 0.001
REACH_TIMEOUT_S = 5.0
SPARE_S = 30.0  # that a guardian waits for the next worker; longer than a pause between starts
DRAINING = "Draining"
NAMESPACE = "kvrelay"  # where actors have their names
OBJECT_STORE_BYTES = 80 << 20  # nothing of ours goes through it
ACTORS = {Role.PREFILL: PrefillWorker, Role.DECODE: DecodeWorker}


class RayUnavailable(Exception):
    """Ray did not start, or the cluster to join cannot be reached; one line."""


def connect(address: str, dashboard_port: int = 0) -> None:
    """Join the Ray cluster at `address`, or start one that asks for a token, with a dashboard if
    that has a port. Blocks for seconds. Raises RayUnavailable."""
    if address not in ("", "auto"):
        _check_reachable(address)
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": logging.CRITICAL,
    }
    if address:
        options["address"] = address
    else:
        options |= {
            "address": "local",
            "num_cpus": num_cpus(),  # as workers count them that are started before
            "include_dashboard": dashboard_port > 0,
            "dashboard_port": dashboard_port or None,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not address and visible.startswith("MIG-"):  # Ray counts whole GPUs
        options["num_gpus"] = len(visible.split(","))
    # Ray prints the last words of dead processes; what matters of them, the controller logs.
    ray._private.worker._worker_logs_enabled = False
    if ray.is_initialized():  # by an attempt that came through after all, or was then refused
        ray.shutdown()
    try:
        ray.init(**options)
    except Exception as error:  # it raises all kinds, and Exception itself for a timeout
        what = f"join the Ray cluster at {address}" if address else "start Ray"
        raise RayUnavailable(f"cannot {what}: {first_line(error)}") from error


def _check_reachable(address: str) -> None:
    """Ray tries for half a minute; whether anything listens is known at once."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise RayUnavailable(f"cannot reach a Ray cluster at {address}: {reason}") from error


def disconnect() -> None:
    """Leave the cluster; one that `connect` started ends with that."""
    ray.shutdown()


def control_plane() -> str:
    """HOST:PORT of the cluster that was joined."""
    return str(ray.get_runtime_context().gcs_address)


def logs_folder() -> str:
    """Where Ray and the guardians write their own logs, on this machine."""
    return str(ray._private.worker.global_worker.node.get_logs_dir_path())


def own_machine() -> str:
    return str(ray.get_runtime_context().get_node_id())


def alive_nodes() -> list[dict[str, Any]]:
    """Ray's records of the machines that it believes alive, with DRAINING: whether they are to end,
    as `kvrelay leave`, an autoscaler or a cloud that takes them away has said."""
    ending = ray._private.state.state.get_draining_nodes()
    return [node | {DRAINING: node["NodeID"] in ending} for node in ray.nodes() if node["Alive"]]


def ask_for_machines(num_machines: int, resources: dict[str, float]) -> None:
    """Ask Ray's autoscaler; see `RayWorkers.request_machines`. Blocks."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[resources] * num_machines)


def machines_of(nodes: list[dict[str, Any]], use_gpus: bool) -> tuple[Machine, ...]:
    """In a stable order; without their GPUs if those are not wanted. A node that was started with
    no CPUs and no GPUs, as heads are, is for Ray alone."""
    found = [
        Machine(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0) if use_gpus else 0.0,
            node.get(DRAINING, False),
        )
        for node in nodes
        if node["Resources"].keys() & {"CPU", "GPU"}
    ]
    return tuple(sorted(found, key=lambda machine: (machine.host, machine.machine_id)))


@dataclass(slots=True)
class _Running:
    epoch: int
    guardian: Any  # None: not created yet
    task: asyncio.Task[None]
    role: Role
    # Guardians of its ranks on other machines end with the worker; by force where it never began.
    of_ranks: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Spare:
    """A guardian without a worker, in its placement group."""

    guardian: Any
    role: Role
    group: str
    stopped: asyncio.Future[bool]  # once its last worker has ended; False: it does not answer


class RayWorkers:
    """Starts workers and ends them. Lives on the controller's loop.

    Invariant: at most one guardian per worker is known here, that of the latest epoch. In a Ray of
    this machine's own, which no other controller comes to know, it guards the next epoch too: Ray
    takes a second of a core for another one.
    """

    def __init__(
        self,
        listening: Listening,
        tell: Callable[[Any], None],
        here: Machine | None = None,
    ) -> None:
        """`tell`: the controller, of WorkerStarted, StartFailed, WorkerLost, MachinesChanged.
        `here`: what the controller calls this machine; None: as Ray does."""
        self.listening = listening
        self._tell = tell
        self._here = here
        self._raylets: dict[str, tuple[str, int, str]] = {}  # by machine; Ray's name for it last
        self._running: dict[NodeId, _Running] = {}
        self._placed: dict[NodeId, tuple[int, str]] = {}  # epoch and placement group of each worker
        self._spares: dict[NodeId, _Spare] = {}
        self._is_closing = False
        self._ending: set[asyncio.Future[Any]] = set()
        self.is_answered = False  # by Ray, when it was asked last

    def start(self, spec: WorkerSpec) -> None:
        before = self._running.get(spec.worker)
        if self._here is not None and before is not None and before.guardian is not None:
            before.task.cancel()  # it was asked to end, and is not waited for
            self._spare(spec.worker, before)
        task = asyncio.create_task(self._start(spec))
        self._running[spec.worker] = _Running(spec.epoch, None, task, spec.role)

    def attach(self, cluster: str, worker: NodeId, epoch: int) -> None:
        """To the guardian that an earlier controller has created, if it is there."""
        name = name_of(cluster, worker, epoch)
        self._placed[worker] = epoch, name
        try:
            guardian = ray.get_actor(name, NAMESPACE)
        except ValueError:
            log.info("%s has no guardian any more; it goes on without", worker)
            return
        task = asyncio.create_task(self._watch(worker, epoch, guardian))
        self._running[worker] = _Running(epoch, guardian, task, Role.BOTH)

    def end(self, worker: NodeId, epoch: int) -> asyncio.Future[Any] | None:
        """By force, up to this epoch. None: no guardian of it is known here."""
        running = self._running.get(worker)
        latest, _ = self._placed.get(worker, (0, ""))
        if max(latest, running.epoch if running else 0) > epoch:
            return None
        guardians = []
        if running is not None:
            del self._running[worker]
            running.task.cancel()
            if self._here is not None and running.guardian is not None and not self._is_closing:
                return self._spare(worker, running)
            guardians = [*running.of_ranks, *filter(None, [running.guardian])]
        ending = self._release(worker, guardians)
        return ending if guardians else None

    def _spare(self, worker: NodeId, running: _Running) -> asyncio.Future[Any]:
        """End its process; its guardian waits for the next one, for a while."""
        _, group = self._placed.pop(worker, (0, ""))
        stopped = asyncio.ensure_future(_stop(running.guardian))
        spare = self._spares[worker] = _Spare(running.guardian, running.role, group, stopped)

        def drop() -> None:
            if self._spares.get(worker) is spare:
                self._drop_spare(worker)

        asyncio.get_running_loop().call_later(SPARE_S, drop)
        return stopped

    def _drop_spare(self, worker: NodeId) -> None:
        spare = self._spares.pop(worker)
        self._give_back(spare.group, [spare.guardian])

    def _release(self, worker: NodeId, guardians: Sequence[Any] = ()) -> asyncio.Future[Any]:
        """End its guardians, with their processes, and then give back what it held."""
        return self._give_back(self._placed.pop(worker, (0, ""))[1], guardians)

    def _give_back(self, group: str, guardians: Sequence[Any]) -> asyncio.Future[Any]:

        async def give_back() -> None:
            try:
                await asyncio.gather(*map(_end, guardians))
            finally:
                if group:
                    await asyncio.to_thread(_remove_group, group)

        ending = asyncio.ensure_future(give_back())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    def _name(self, node: str) -> str:
        """What the controller calls the machine of a node of Ray's."""
        is_here = self._here is not None and node == own_machine()
        return HERE if is_here else node

    async def watch_machines(self, use_gpus: bool) -> None:
        """Tell the controller of machines that come and go, until cancelled. Raises TimeoutError
        if Ray does not answer."""
        known: tuple[Machine, ...] | None = None
        while True:
            try:
                async with asyncio.timeout(REACH_TIMEOUT_S):
                    nodes = await in_thread(alive_nodes, "ray-nodes")
            except BaseException:
                self.is_answered = False
                raise
            if not self.is_answered:
                self.is_answered = True
                known = None
            self._raylets = {
                self._name(n["NodeID"]): (
                    n["NodeManagerAddress"],
                    n["NodeManagerPort"],
                    n["NodeID"],
                )
                for n in nodes
            }
            current = machines_of(nodes, use_gpus)
            if current and self._here is not None:
                current = (self._here,)
            if current != known:
                known = current
                self._tell(MachinesChanged(known))
            await asyncio.sleep(POLL_MACHINES_S)

    async def versions(self) -> dict[str, str]:
        """The version that a worker would have, by machine: of those that say it in time."""

        def version() -> str:  # sent by value: there it may be another one of this module
            from kvrelay.engine.wire.channel import own_version

            return own_version()

        async def ask(machine: str, node: str) -> tuple[str, str] | None:
            at = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(version).options(
                num_cpus=0, max_retries=0, scheduling_strategy=at, runtime_env=None
            )
            try:
                async with asyncio.timeout(PLACE_TIMEOUT_S):
                    return machine, str(await _result(await _apart(task.remote)))
            except (RayError, TimeoutError) as error:
                log.warning("%s does not say its version: %s", machine, first_line(error))
                return None

        nodes = {machine: node for machine, (_, _, node) in self._raylets.items()}
        return dict(filter(None, await asyncio.gather(*(ask(*each) for each in nodes.items()))))

    async def request_machines(self, num_machines: int, resources: dict[str, float]) -> None:
        """Ask Ray's autoscaler for so many machines of these resources: what was asked for before
        counts no longer. Where it does not run, nothing comes of it."""
        await asyncio.to_thread(ask_for_machines, num_machines, resources)

    async def close(self) -> None:
        """End all workers, within `END_TIMEOUT_S`."""
        self._is_closing = True
        for worker in [*self._spares]:
            self._drop_spare(worker)
        for worker in {*self._running, *self._placed}:
            self.end(worker, sys.maxsize)
        if self._ending:
            await asyncio.wait(self._ending, timeout=END_TIMEOUT_S)

    async def _start(self, spec: WorkerSpec) -> None:
        try:
            guardian, outcome = await self._create(spec)
        except Exception as error:  # whatever it was, the controller waits for an answer
            self._release(spec.worker)
            self._tell(StartFailed(spec.worker, spec.epoch, first_line(error), False))
            return
        if isinstance(outcome, StartFailed):
            self._release(spec.worker)  # before the controller starts it again
        self._tell(outcome)
        if isinstance(outcome, WorkerStarted):
            await self._watch(spec.worker, spec.epoch, guardian)

    async def _create(self, spec: WorkerSpec) -> tuple[Any, WorkerStarted | StartFailed]:
        running, listening = self._running[spec.worker], self.listening
        for machine in (spec.machine, *spec.further):
            if machine != self._name(own_machine()) and not await self._has_raylet(machine):
                failed = StartFailed(spec.worker, spec.epoch, "its machine does not answer", False)
                return None, failed
        listening = replace(listening, host=self._host_of(spec.machine))
        if await self._take_spare(spec, running):
            order = pack(WorkerOrder(spec, listening))
            return running.guardian, unpack(await _result(running.guardian.start.remote(order)))
        group = await self._place(spec)
        if group is None:
            gpus = f"{spec.num_gpus} GPU(s) of {listening.host} are not free" * (spec.num_gpus > 0)
            why = gpus or f"Ray finds no place on {listening.host}"
            return None, StartFailed(spec.worker, spec.epoch, why, False)
        if spec.further:
            places = await self._start_ranks(spec, running, group)
            for place in places:
                if isinstance(place, StartFailed):
                    return None, place
            spec = replace(spec, host=listening.host, rank_hosts=tuple(places))
        running.guardian = await self._guardian(spec, group, 0)
        order = pack(WorkerOrder(spec, listening))
        return running.guardian, unpack(await _result(running.guardian.start.remote(order)))

    async def _take_spare(self, spec: WorkerSpec, running: _Running) -> bool:
        """Whether the guardian of an epoch before this one takes this one too."""
        spare = self._spares.pop(spec.worker, None)
        if spare is None:
            return False
        running.guardian, self._placed[spec.worker] = spare.guardian, (spec.epoch, spare.group)
        if spare.role is spec.role and await asyncio.shield(spare.stopped):
            return True
        running.guardian = None
        self._release(spec.worker, [spare.guardian])
        return False

    async def _place(self, spec: WorkerSpec) -> PlacementGroup | None:
        """A bundle for each of the worker's machines, once Ray holds them; None: it does not."""
        machines = (spec.machine, *spec.further)
        bundles = []
        for machine in machines:
            bundle = {f"node:{self._raylets[machine][0]}": HELD}
            bundles.append(bundle | ({"GPU": float(spec.num_gpus)} if spec.num_gpus else {}))
        name = name_of(spec.cluster, spec.worker, spec.epoch)
        self._placed[spec.worker] = spec.epoch, name
        ask = partial(
            placement_group,
            bundles,
            strategy="STRICT_SPREAD" if spec.further else "STRICT_PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[
                {"ray.io/node-id": self._raylets[machine][2]} for machine in machines
            ],
        )
        group = await _apart(ask)
        return group if await asyncio.to_thread(group.wait, PLACE_TIMEOUT_S) else None

    async def _start_ranks(
        self, spec: WorkerSpec, running: _Running, group: PlacementGroup
    ) -> list[Any]:
        """On the worker's other machines: a RankHost or StartFailed of each."""
        answers = []
        for number, machine in enumerate(spec.further, start=1):
            of_ranks = RankHostSpec(
                spec.cluster,
                spec.worker,
                spec.epoch,
                self._host_of(machine),
                spec.num_ranks_here,
                RANKS_WAIT_S,
                spec.log,
                spec.num_gpus,
                spec.engine.threads,
            )
            guardian = await self._guardian(spec, group, number)
            running.of_ranks.append(guardian)
            answers.append(_result(guardian.start_ranks.remote(pack(of_ranks))))
        return [unpack(answer) for answer in await asyncio.gather(*answers)]

    def _host_of(self, machine: str) -> str:
        """Where a worker on it listens."""
        if self.listening.host:
            return self.listening.host
        own = machine == self._name(own_machine())
        return ray.util.get_node_ip_address() if own else self._raylets[machine][0]

    async def _guardian(self, spec: WorkerSpec, group: PlacementGroup, number: int) -> Any:
        """`number` says which of the worker's machines it is on."""
        who = f"ranks of {spec.worker}" if number else spec.worker
        name = name_of(spec.cluster, spec.worker, spec.epoch) + (f"/{number}" if number else "")
        # Without a runtime_env: Ray takes a process for it that it has started already.
        actor = ray.remote(ACTORS[spec.role]).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            num_gpus=spec.num_gpus,
            max_restarts=0,
            max_concurrency=4,  # start, wait and end may overlap
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
        )
        return await _apart(partial(actor.remote, who, stays=self._here is not None))

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
        running = self._running.get(worker)
        is_latest = running is not None and running.guardian is guardian
        if is_latest and self._here is None:  # else it is spare once the controller has heard
            self._release(worker)
        self._tell(WorkerLost(worker, epoch, why))

    async def _has_raylet(self, machine_id: str) -> bool:
        """Ray takes long to notice that a machine is gone; a connection shows it at once."""
        if machine_id not in self._raylets:
            return False  # it has gone since it was chosen
        host, port, _ = self._raylets[machine_id]
        try:
            async with asyncio.timeout(REACH_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True


async def end_groups(cluster: str, keep: Collection[str] = ()) -> None:
    """The placement groups of `cluster`'s workers but those to keep: with the workers, of which no
    controller knows any more, on whichever machine they are."""
    try:
        table = await asyncio.to_thread(placement_group_table)
        actors = await asyncio.to_thread(list_named_actors)
    except RayError as error:
        log.warning("placement groups of lost workers stay: %s", first_line(error))
        return
    names = [group["name"] for group in table.values() if group["state"] != "REMOVED"]
    for name in names:
        if name.startswith(f"{cluster}/") and name not in keep:
            of_it = [each for each in actors if each == name or each.startswith(f"{name}/")]
            await asyncio.gather(*map(_end_named, of_it))
            await asyncio.to_thread(_remove_group, name)


async def _end_named(name: str) -> None:
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await _end(ray.get_actor(name, NAMESPACE))
    except (ValueError, TimeoutError):
        return  # it has ended, or its machine is gone


def _remove_group(name: str) -> None:
    """With what runs in it. Blocks."""
    try:
        remove_placement_group(get_placement_group(name))
    except ValueError:
        return  # there is none
    except RayError as error:
        log.warning("the placement group %s is not given back: %s", name, first_line(error))


async def _stop(guardian: Any) -> bool:
    """Whether it has ended its worker, and so can have another."""
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await _result(guardian.stop.remote())
    except (RayError, TimeoutError):
        return False
    return True


async def _end(guardian: Any) -> None:
    try:
        await _result(guardian.end.remote())
    except RayError:
        return  # it ends with that
    finally:
        await _apart(partial(ray.kill, guardian, no_restart=True))


async def _apart(call: Callable[[], Any]) -> Any:
    """Await what waits for Ray's control plane: without that it stands for a minute, and the
    controller must not. Raises TimeoutError."""
    async with asyncio.timeout(PLACE_TIMEOUT_S):
        return await in_thread(call, "ray-call")


async def _result(reference: Any) -> Any:
    return await reference
