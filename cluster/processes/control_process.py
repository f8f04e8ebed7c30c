"""The controller as a process of its own. Workers and routers go on without it; the next one adopts
them, from what this one has kept in a file.

It alone knows Ray: it starts or joins it when all else is under way, and whatever happens to Ray,
what runs goes on.

The autoscaler's log: all that it saw and decided, one line of JSON each.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from kvrelay.cluster.config import Config
from kvrelay.cluster.control.autoscaling import LogScaling
from kvrelay.cluster.control.controller import Controller, ControllerConfig
from kvrelay.cluster.control.lifecycle import DesiredProcess, Incarnation, ProcessState
from kvrelay.cluster.control.machines import resources_of
from kvrelay.cluster.control.messages import (
    AdoptWorker,
    Checkpoint,
    GiveUp,
    Record,
    RequestMachines,
    RestartWorker,
    RouterLost,
    SendPeers,
    StartRouter,
    StartWorker,
    StopRouter,
    StopWorker,
    WorkerLost,
)
from kvrelay.cluster.control.process_messages import RouterLoad, RouterReport
from kvrelay.cluster.control.specs import worker_spec
from kvrelay.cluster.control.view import cluster_view
from kvrelay.cluster.prepare import PreparedModel
from kvrelay.cluster.processes.life import keep, read_record, workers_of
from kvrelay.cluster.processes.orders import AllUp, ControlSpec, StartupProgress
from kvrelay.cluster.scaling.decisions import Line, encode_line
from kvrelay.cluster.status import ClusterView, ControllerStatus
from kvrelay.engine.host import NodeHost, keep_running
from kvrelay.engine.node import Effect, NodeId
from kvrelay.engine.stats import Role
from kvrelay.worker.kv_plan import kv_lines
from kvrelay.worker.messages import (
    CONTROLLER,
    Adopt,
    End,
    Peer,
    PeersUpdated,
    UpdatePeers,
    WorkerStarted,
)
from kvrelay.worker.process import update_peers
from kvrelay.worker.processes import kill_workers, name_of, worker_processes

MIB = 1 << 20


def log_path(config: Config, name: str) -> Path:
    """Of the server called `name`. When it is full, it goes on anew beside what it had."""
    return config.sessions.state_path / "scaling" / f"{name}.jsonl"


class ScalingLog:
    """Appends. That something cannot be written is said once; scaling goes on without."""

    def __init__(self, path: Path | None, max_bytes: int) -> None:
        """`path`: None writes nothing."""
        self._path = path
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None
        self._is_failing = False

    @classmethod
    def of(cls, config: Config, name: str) -> ScalingLog:
        max_bytes = int(config.scaling.log_mib * MIB)
        return cls(log_path(config, name) if max_bytes else None, max_bytes)

    def write(self, line: Line) -> None:
        if self._path is None:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            self._file.write(encode_line(line) + b"\n")
            if self._file.tell() >= self._max_bytes:
                self._file.close()
                self._file = None
                self._path.replace(self._path.with_suffix(".old.jsonl"))
            self._is_failing = False
        except OSError as error:
            self._file = None
            if not self._is_failing:
                log.warning("decisions of the autoscaler are not logged: %s: %s", self._path, error)
            self._is_failing = True


log = logging.getLogger("kvrelay.control")

KEEP_RETRY_S = 5.0  # before a checkpoint that could not be written is tried again
FORGET_S = 2.0  # after which what was said to a worker that is to end has reached it
END_TIMEOUT_S = 5.0  # for workers to end by themselves
RAY_START_S, RAY_RETRY_S = 90.0, 2.0
PUBLISH_AFTER_S = 0.02  # changes that come together are sent together


class ControlProcess:
    """Owns the controller, its wire and the workers' guardians. On one loop.

    Performs the controller's effects; `tell` is the supervisor, which starts routers."""

    def __init__(self, spec: ControlSpec, tell: Callable[[Any], None]) -> None:
        self.spec = spec
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self.is_ending = False  # routers are not started again
        self.failed: asyncio.Future[str] = self._loop.create_future()
        self.host = NodeHost(self._loop, self._send, self._on_node_failed)
        listening = spec.listening
        self.wire = listening.wire(CONTROLLER, spec.epoch, self._deliver, self._on_peer_lost)
        self.controller = Controller(ControllerConfig((), ()))
        self._model: asyncio.Future[PreparedModel] = self._loop.create_future()
        self._workers: Any = None  # RayWorkers, once Ray is there
        self._ray_thread = ThreadPoolExecutor(1, "ray")
        self._me = Peer(CONTROLLER, "", 0, spec.epoch)
        self._adopted: list[AdoptWorker] = []
        self._checkpoint: Checkpoint | None = None  # the last one
        self._keeping: asyncio.TimerHandle | None = None  # while it cannot be written
        self._loads: dict[Incarnation, RouterLoad] = {}  # what routers have said
        self._is_publishing = False
        self._scaling_log = ScalingLog.of(spec.config, spec.kept_file.parent.name)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.restarted: Counter[str] = Counter()  # tasks that ended, by name

    async def start(self) -> None:
        """Listen, and get Ray; once there is a model, adopt what runs and start what does not."""
        spec = self.spec
        host, port = await self.wire.listen(spec.host)
        self._me = Peer(CONTROLLER, host, port, spec.epoch)
        self.spawn(self._use_ray())

    def use_model(self, model: PreparedModel) -> None:
        """It is on this machine now. Begin."""
        spec, cluster = self.spec, self.spec.config.cluster
        kept = read_record(spec.kept_file, Checkpoint) or Checkpoint()
        # Those that are not to be adopted can be told to end, wherever they are.
        update_peers(self.wire, [each.peer for each in kept.workers if each.peer is not None])
        roles = [(Role.PREFILL, cluster.prefill), (Role.DECODE, cluster.decode)]
        self.controller = Controller(
            ControllerConfig(
                workers=tuple((f"{role}-{i}", role) for role, n in roles for i in range(n)),
                routers=(),
                listeners=(self._me,),
                further_routers=spec.routers,
                kept=kept,
                running_routers=spec.running_routers,
                settings=workers_of(spec.config),
                start_timeout_s=cluster.start_timeout_s + model.load_s,
                prefill_ranks=spec.config.ranks_of(Role.PREFILL),
                decode_ranks=spec.config.ranks_of(Role.DECODE),
                ranks_per_machine=cluster.ranks_per_machine,
                use_gpus=spec.config.model.device != "cpu",
                silent_grace_s=cluster.silent_grace_s,
                scaling=spec.config.scaling if spec.config.scaling.enabled else None,
                drain_timeout_s=spec.config.api.request_timeout_s,
                restart_drain_s=cluster.drain_s,
                workers_per_machine=spec.config.scaling.workers_per_machine,
            ),
            wall=time.time,
        )
        self.host.add(self.controller, self)
        self._model.set_result(model)
        self.spawn(self._show())

    def _keep(self) -> None:
        """Write the last checkpoint, and try again until it is written."""
        self._keeping = None
        if self._checkpoint is not None and not keep(self.spec.kept_file, self._checkpoint):
            self._keeping = self._loop.call_later(KEEP_RETRY_S, self._keep)

    def perform(self, effect: Effect) -> None:
        match effect:
            case Record(kept):
                self._checkpoint = kept
                if self._keeping is None:
                    self._keep()
                self._publish_soon()
            case StartWorker():
                self._start_worker(effect)
            case StopWorker(worker, epoch, gently):
                self.wire.send(worker, End(epoch))
                if gently:
                    self._loop.call_later(END_TIMEOUT_S, self._stop_worker, worker, epoch)
                else:
                    self._stop_worker(worker, epoch)
            case LogScaling(line):
                self._scaling_log.write(line)
            case RequestMachines(num_machines):
                self.spawn(self._request_machines(num_machines))
            case AdoptWorker():
                self._adopt(effect)
            case StartRouter() | StopRouter() if self.is_ending:
                pass
            case StartRouter() | StopRouter():
                self._tell(effect)
            case SendPeers(to, about, epoch, peers) if to == CONTROLLER:
                update_peers(self.wire, peers)
                self.say(PeersUpdated(to, about, epoch))
            case SendPeers(to, about, epoch, peers):
                self.wire.send(to, UpdatePeers(about, epoch, peers))
            case GiveUp(reason):
                self._fail(reason)
            case _:
                raise AssertionError(f"not an effect of a controller: {effect}")

    def close(self) -> None:
        """Nothing runs outside the loop; `end` ends the workers."""

    async def end(self, keep_workers: bool) -> None:
        """End the workers, or leave them to the next controller, and leave Ray."""
        self.host.close()  # or the controller would have those that end started again
        for task in self._tasks:
            task.cancel()
        if not keep_workers:
            await self._end_workers()
        await self.wire.close()
        await self._leave_ray()

    async def _end_workers(self) -> None:
        """Ask them to end, and end by force those that do not."""
        running = [w for w in self.controller.workers.values() if w.peer is not None]
        for worker in running:
            self.wire.send(worker.node, End(worker.epoch))
        deadline = self._loop.time() + END_TIMEOUT_S
        while worker_processes(self.spec.cluster) and self._loop.time() < deadline:
            await asyncio.sleep(0.05)
        if self._workers is not None:
            await self._workers.close()
        kill_workers(self.spec.cluster)

    async def _leave_ray(self) -> None:
        if self._workers is not None:
            from kvrelay.cluster.processes.ray_cluster import disconnect

            await self._loop.run_in_executor(self._ray_thread, disconnect)

    @property
    def has_ray(self) -> bool:
        return self._workers is not None

    def restart_workers(self, done: Callable[[str], None]) -> None:
        """One after the other; their requests go on at the others. `done` gets why it stopped; ""
        if all are up again."""
        self.spawn(self._restart_workers(done))

    async def _restart_workers(self, done: Callable[[str], None]) -> None:
        timeout_s = self.controller.config.start_timeout_s
        for worker in list(self.controller.workers.values()):
            before = worker.epoch
            self.say(RestartWorker(worker.node, "an operator restarts all workers"))
            deadline = self._loop.time() + timeout_s
            while worker.epoch == before or worker.state is not ProcessState.UP:
                if self.controller.workers.get(worker.node) is not worker:
                    break  # the autoscaler has let it go
                if self._loop.time() > deadline:
                    done(f"{worker.node} is not up again after {timeout_s:g} s")
                    return
                await asyncio.sleep(0.1)
        done("")

    def spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def say(self, message: Any) -> None:
        """To the controller, after what it does now."""
        if isinstance(message, WorkerStarted):
            info = message.info
            self.wire.set_address(info.worker, message.host, message.port, info.epoch)
        self._loop.call_soon(self.host.deliver, CONTROLLER, message)

    async def _use_ray(self) -> None:
        """Start or join it, and go on trying: what runs does not need it."""
        from kvrelay.cluster.processes.ray_access import RayRefused, start_ray

        config = self.spec.config
        while True:
            try:
                starting = self._loop.run_in_executor(
                    self._ray_thread, start_ray, config, self._tell_ray
                )
                ray = await asyncio.wait_for(starting, RAY_START_S)
                break
            except (RayRefused, TimeoutError) as error:
                why = str(error) or f"Ray did not start within {RAY_START_S:g} s"
                if not self.controller.has_been_up:
                    self._fail(why)
                    return
                if not config.cluster.address:
                    self._end_now(why)
                log.warning("%s; again in %g s", why, RAY_RETRY_S)
                await asyncio.sleep(RAY_RETRY_S)
        self._tell(StartupProgress("ray", "up", True))
        await self._model
        self._workers = ray.RayWorkers(self.spec.listening, self.say)
        cluster = self.spec.cluster
        for adopted in self._adopted:
            self._workers.attach(cluster, adopted.worker, adopted.epoch)
        kept = [name_of(cluster, each.worker, each.epoch) for each in self._adopted]
        await ray.end_groups(cluster, kept)
        use_gpus = config.model.device != "cpu"
        await keep_running("watch_machines", lambda: self._watch_machines(use_gpus), self.restarted)

    async def _watch_machines(self, use_gpus: bool) -> None:
        try:
            await self._workers.watch_machines(use_gpus)
        except Exception as error:
            if self.spec.config.cluster.address:
                raise  # Ray itself ends a process that does not reach it for a minute
            # A Ray of one's own ends with this process, and the next one starts another.
            self._end_now(f"Ray does not answer ({type(error).__name__})")

    async def _request_machines(self, num_machines: int) -> None:
        machines, text = self.controller.machines, self.spec.config.scaling.machine
        if self._workers is None or not (resources := resources_of(text, machines)):
            return
        try:
            await self._workers.request_machines(num_machines, resources)
        except Exception as error:  # of Ray: what serves goes on with the machines that there are
            log.warning("Ray was not asked for %d machines: %s", num_machines, error)

    def _tell_ray(self, state: str) -> None:
        self._loop.call_soon_threadsafe(self._tell, StartupProgress("ray", state, False))

    def _start_worker(self, start: StartWorker) -> None:
        machines = {machine.machine_id: machine for machine in self.controller.machines}
        spec = self.spec
        workers = self.controller.workers.values()
        model = self._model.result()
        self._workers.start(worker_spec(start, spec.cluster, spec.config, model, machines, workers))

    def _stop_worker(self, worker: NodeId, epoch: int) -> None:
        """By force, by its guardian or here; where neither reaches it, it was asked."""
        if self._workers is None or self._workers.end(worker, epoch) is None:
            kill_workers(self.spec.cluster, worker, epoch)  # if it is on this machine
        self._loop.call_later(FORGET_S, self.wire.forget, worker, epoch)

    def _adopt(self, adopted: AdoptWorker) -> None:
        peer = adopted.peer
        alive = {(node, epoch) for _, node, epoch in worker_processes(self.spec.cluster)}
        is_gone = (adopted.worker, adopted.epoch) not in alive
        if self.wire.context.is_here(peer.host) and is_gone:
            self.say(WorkerLost(adopted.worker, adopted.epoch, "its process has ended"))
            return
        update_peers(self.wire, [peer])
        self.wire.send(adopted.worker, Adopt(self._me))
        self._adopted.append(adopted)

    def _deliver(self, to: NodeId, message: Any) -> None:
        match message:
            case RouterReport(router, epoch, load):
                self._loads[router, epoch] = load
                self.wire.send(router, self._view())
            case WorkerStarted():
                self.say(message)
            case _:
                self.host.deliver(to, message)

    def _view(self) -> ClusterView:
        spec, routers = self.spec, self.controller.routers.values()
        lives = {(router.node, router.epoch) for router in routers}
        self._loads = {life: load for life, load in self._loads.items() if life in lives}
        me = ControllerStatus(known=True, epoch=spec.epoch, pid=os.getpid(), has_ray=self.has_ray)
        host, scheme = spec.config.api.host, spec.config.tls.scheme
        view = cluster_view(self.controller, me, self._loads, host, scheme)
        view.restarted_tasks = dict(self.restarted)
        return view

    def _publish_soon(self) -> None:
        """Something has changed that operators look at: routers need not wait until they report."""
        if not self._is_publishing:
            self._is_publishing = True
            self._loop.call_later(PUBLISH_AFTER_S, self._publish)

    def _publish(self) -> None:
        self._is_publishing = False
        view = self._view()
        for router in self.controller.router_set.peers:
            self.wire.send(router.node, view)

    async def _show(self) -> None:
        """Tell the supervisor how far each part is, until all are up."""
        while not self.controller.all_up():
            workers, routers = self.controller.workers.values(), self.controller.routers.values()
            parts: list[DesiredProcess] = [*workers, *routers]
            for part in parts:
                why = f" ({part.last_error})" if part.last_error and not part.is_serving else ""
                self._tell(StartupProgress(part.node, f"{part.state}{why}", part.is_serving))
            await asyncio.sleep(0.1)
        infos = [w.info for w in self.controller.workers.values() if w.info is not None]
        model = await self._model
        self._tell(AllUp(tuple(kv_lines(model.config, infos))))

    def _send(self, to: NodeId, message: Any) -> str | None:
        return self.wire.send(to, message)

    def _on_peer_lost(self, node: NodeId, epoch: int) -> None:
        """It did not come back in time, or messages were lost: what each knows of the other no
        longer fits."""
        self.wire.forget(node, epoch)
        lost = RouterLost if node in self.spec.routers else WorkerLost
        if not (self.is_ending and lost is RouterLost):
            self.host.deliver(CONTROLLER, lost(node, epoch, "the connection to it was lost"))

    def _on_node_failed(self, node: NodeId, error: BaseException) -> None:
        """Its state is not to be trusted."""
        self._end_now(f"{node} failed: {type(error).__name__}: {error}")

    def _end_now(self, why: str) -> None:
        """The next controller begins with what was kept."""
        log.critical("the controller ends: %s", why)
        logging.shutdown()
        os._exit(1)

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)
