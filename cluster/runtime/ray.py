"""The Ray runtime: the only file that knows Ray.

Ray places worker processes, tells when one dies, and carries the few calls of the control plane
(start, introduce, stop). Requests, tokens and KV never pass through it. Actors are never restarted
by Ray: the controller does that, under a new epoch. Import this after `ray_environment.apply`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.build import BuildError, WorkerSpec, build_worker
from cluster.controller import (
    GiveUp,
    Introduce,
    Introduced,
    MachinesChanged,
    Peer,
    StartFailed,
    StartWorker,
    StopWorker,
    WorkerLost,
    WorkerStarted,
)
from cluster.placement import Machine
from cluster.runtime.host import NodeHost
from cluster.runtime.process import Listening, WorkerProcess
from engine.node import Effect, NodeId
from engine.stats import Role

log = logging.getLogger("kvrelay.ray")

POLL_MACHINES_S = 1.0
STOP_TIMEOUT_S = 5.0
REACH_TIMEOUT_S = 5.0
PREFILL_NICENESS = 5  # on shared cores, a decode step that waits for one delays every stream
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20  # nothing of ours goes through it


class RayUnavailable(Exception):
    """Ray did not start, or the cluster to join cannot be reached; one line."""


class WorkerActor:
    """One worker in a process of its own. Its constructor does nothing, so that it is up at once
    and its death is noticed from then on."""

    def __init__(self, worker: NodeId) -> None:
        self._worker = worker
        self._process: WorkerProcess | None = None

    def __repr__(self) -> str:  # also what `ps` shows
        return f"kvrelay {self._worker}"

    def start(self, spec: WorkerSpec, listening: Listening) -> WorkerStarted | StartFailed:
        """Build the worker and serve. What would fail again is told as permanent."""
        os.environ.setdefault("OMP_NUM_THREADS", str(spec.threads))
        if spec.role is Role.PREFILL and not spec.on_gpu:
            os.nice(PREFILL_NICENESS)
        try:
            built = build_worker(spec)
            if not listening.host:
                host = ray.util.get_node_ip_address()
                listening = Listening(host, listening.token, listening.max_frame_bytes)
            self._process = WorkerProcess(built, listening)
            host, port = self._process.start()
        except BuildError as error:
            return StartFailed(spec.worker, spec.epoch, str(error), permanent=True)
        return WorkerStarted(built.info, host, port, os.getpid(), built.notices)

    def introduce(self, peers: tuple[Peer, ...]) -> None:
        assert self._process is not None
        self._process.introduce(peers)

    def wait(self) -> None:
        """Returns never: the call fails when the process dies, and the process dies when its node
        has failed, since the state of a node that raised is not to be trusted."""
        assert self._process is not None
        try:
            self._process.wait()
        except BaseException:
            logging.shutdown()
            os._exit(1)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


def connect(address: str) -> None:
    """Join the Ray cluster at `address`, or start one that asks for a token. Blocks for seconds.
    Raises RayUnavailable."""
    if address not in ("", "auto"):
        _check_reachable(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if address:
        options["address"] = address
    else:
        options |= {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    # Ray prints the last words of dead processes; what matters of them, the controller logs.
    ray._private.worker._worker_logs_enabled = False
    try:
        ray.init(**options)
    except (RayError, ConnectionError, OSError, RuntimeError, ValueError) as error:
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
    """Leave the cluster; one that `connect` started ends with that, and its workers with it."""
    ray.shutdown()


def own_host(address: str) -> str:
    """Where the nodes of this process listen, so that the workers can reach them."""
    return ray.util.get_node_ip_address() if address else LOOPBACK


def alive_nodes() -> list[dict[str, Any]]:
    """Ray's records of the machines that it believes alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def machines_of(nodes: list[dict[str, Any]], use_gpus: bool) -> tuple[Machine, ...]:
    """In a stable order; without their GPUs if those are not wanted."""
    found = [
        Machine(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 1.0),
            node["Resources"].get("GPU", 0.0) if use_gpus else 0.0,
        )
        for node in nodes
    ]
    return tuple(sorted(found, key=lambda machine: (machine.host, machine.machine_id)))


def first_line(error: BaseException) -> str:
    """What went wrong, in a line: of a task that raised, what it raised."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {first_line(cause)}"
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


@dataclass(slots=True)
class _Running:
    epoch: int
    actor: Any
    task: asyncio.Task[None]


class RayWorkers:
    """Executor of the controller's effects. Lives on the host's loop.

    Invariant: at most one actor per worker is known here, that of the latest epoch; every actor
    that was started is stopped, by `StopWorker`, by a later start, or by `close_all`.
    """

    def __init__(
        self,
        host: NodeHost,
        controller: NodeId,
        spec_of: Callable[[StartWorker], WorkerSpec],
        listening: Listening,
        introduce_here: Callable[[tuple[Peer, ...]], None],
        on_give_up: Callable[[str], None],
    ) -> None:
        self._host = host
        self._controller = controller
        self._spec_of = spec_of
        self._listening = listening
        self._introduce_here = introduce_here
        self._on_give_up = on_give_up
        self._raylets: dict[str, tuple[str, int]] = {}  # by machine
        self._running: dict[NodeId, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def perform(self, effect: Effect) -> None:
        match effect:
            case StartWorker():
                self._spawn(self._run(effect), effect)
            case StopWorker(worker, epoch):
                running = self._running.get(worker)
                if running is not None and running.epoch <= epoch:
                    del self._running[worker]
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

    async def close_all(self) -> None:
        """Stop every worker, politely and then by force, within `STOP_TIMEOUT_S`."""
        running = list(self._running.values())
        self._running.clear()
        stops = [asyncio.ensure_future(_result(entry.actor.stop.remote())) for entry in running]
        if stops:
            await asyncio.wait(stops, timeout=STOP_TIMEOUT_S)
        for task in (*self._tasks, *stops):
            task.cancel()
        for entry in running:
            self._kill(entry)

    def _spawn(self, coroutine: Any, start: StartWorker | None = None) -> None:
        task = self._host.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if start is not None:
            self._running[start.worker] = _Running(start.epoch, None, task)

    def _tell(self, message: Any) -> None:
        self._host.loop.call_soon(self._host.deliver, self._controller, message)

    def _kill(self, running: _Running) -> None:
        running.task.cancel()
        if running.actor is not None:
            try:
                ray.kill(running.actor, no_restart=True)
            except RayError as error:
                log.debug("not killed: %s", first_line(error))

    async def _run(self, effect: StartWorker) -> None:
        """The life of one actor, told to the controller."""
        worker, epoch = effect.worker, effect.epoch
        spec = self._spec_of(effect)
        if not await self._has_raylet(effect.machine_id):
            self._tell(StartFailed(worker, epoch, "its machine does not answer", permanent=False))
            return
        try:
            actor = _create_actor(spec, effect.machine_id)
            self._running[worker].actor = actor
            outcome = await _result(actor.start.remote(spec, self._listening))
        except RayError as error:
            self._tell(StartFailed(worker, epoch, first_line(error), permanent=False))
            return
        self._tell(outcome)
        if isinstance(outcome, StartFailed):
            return
        try:
            await _result(actor.wait.remote())
        except RayError as error:
            self._tell(WorkerLost(worker, epoch, f"{type(error).__name__}: {first_line(error)}"))

    async def _has_raylet(self, machine_id: str) -> bool:
        """Ray takes long to notice that a machine is gone; a connection shows it at once."""
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


def _create_actor(spec: WorkerSpec, machine_id: str) -> Any:
    env_vars = {"OMP_NUM_THREADS": str(spec.threads), "TOKENIZERS_PARALLELISM": "false"}
    options = {
        "name": f"{spec.cluster}/{spec.worker}/{spec.epoch}",
        "num_cpus": 0,  # placement is the controller's
        "num_gpus": 1 if spec.on_gpu else 0,
        "max_restarts": 0,
        "max_concurrency": 4,  # start, wait, introduce and stop may overlap
        "scheduling_strategy": NodeAffinitySchedulingStrategy(machine_id, soft=False),
        "runtime_env": {"env_vars": env_vars},
    }
    return ray.remote(WorkerActor).options(**options).remote(spec.worker)


async def _result(reference: Any) -> Any:
    return await reference
