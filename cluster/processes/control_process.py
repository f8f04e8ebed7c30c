"""The controller as a process of its own. Workers and routers go on without it; the next one adopts
them, from what this one has kept in a file.

It alone knows Ray: it starts or joins it when all else is under way, and whatever happens to Ray,
what runs goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from kvrelay.cluster.control.autoscaling import LogScaling
from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.cluster.control.controller import Controller
from kvrelay.cluster.control.lifecycle import DesiredProcess, Incarnation
from kvrelay.cluster.control.messages import (
    AdoptRouter,
    AdoptWorker,
    Checkpoint,
    GiveUp,
    MachinesChanged,
    Record,
    RequestMachines,
    RouterLost,
    SendPeers,
    StartWorker,
    StopWorker,
    WorkerLost,
)
from kvrelay.cluster.control.process_messages import RouterLoad, RouterReport
from kvrelay.cluster.control.routers import is_router
from kvrelay.cluster.control.specs import worker_spec, workers_config
from kvrelay.cluster.control.view import cluster_view
from kvrelay.cluster.prepare import PreparedModels
from kvrelay.cluster.processes.certificates import follow_certificates
from kvrelay.cluster.processes.here import run_here
from kvrelay.cluster.processes.kept_models import KeptWeights
from kvrelay.cluster.processes.life import (
    Keeper,
    fixed_of_workers,
    read_record,
    workers_of,
)
from kvrelay.cluster.processes.orders import (
    AllUp,
    ControllerListens,
    ControlSpec,
    StartupProgress,
)
from kvrelay.cluster.processes.ray_access import AskedMachines, resources_of
from kvrelay.cluster.processes.restarts import restart_workers
from kvrelay.cluster.processes.scaling_log import ScalingLog
from kvrelay.cluster.processes.servers import Leadership
from kvrelay.cluster.status import ClusterView, ControllerStatus, RestartStatus
from kvrelay.engine.host import NodeHost, first_line, keep_running
from kvrelay.engine.node import Effect, NodeId
from kvrelay.engine.stderr import lines_dropped, num_open_files
from kvrelay.engine.wire.channel import own_version
from kvrelay.engine.wire.context import TlsIdentity
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
from kvrelay.worker.spec import WorkerOrder

log = logging.getLogger("kvrelay.control")

KEEP_RETRY_S = 5.0  # before a checkpoint that could not be written to the store is tried again
FORGET_S = 2.0  # after which what was said to a worker that is to end has reached it
END_TIMEOUT_S = 5.0  # for workers to end by themselves
RAY_START_S, RAY_RETRY_S = 90.0, 2.0
LEASE_WATCH_S = 0.2
RAY_LATEST_S = 60.0  # after which it is started, whether the first workers are up or not
RAY_START_ATTEMPTS = 2  # the first time: Ray gives its raylet 30 s, which a busy machine may miss
PUBLISH_AFTER_S = 0.02  # changes that come together are sent together


class ControlProcess:
    """Owns the controller, its wire and the workers' guardians. On one loop.

    Performs the controller's effects; `tell` is the supervisor."""

    def __init__(self, spec: ControlSpec, tell: Callable[[Any], None]) -> None:
        self.spec = spec
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[str] = self._loop.create_future()
        self.host = NodeHost(self._loop, self._send, self._on_node_failed)
        listening = spec.listening
        self.wire = listening.wire(CONTROLLER, spec.epoch, self._deliver, self._on_peer_lost)
        self.controller = Controller(ControllerConfig({}))
        self._models: asyncio.Future[PreparedModels] = self._loop.create_future()
        self._workers: Any = None  # RayWorkers, once Ray is there
        self._machines = AskedMachines(self._request_machines)
        self._are_up = asyncio.Event()  # the first workers
        self._lacks_ray = spec.epoch > 1  # a controller before this one has lost it
        self._listening = spec.listening  # for workers that are started
        self._ray_thread = ThreadPoolExecutor(1, "ray")
        self._me = Peer.here(CONTROLLER, "", 0, spec.epoch)
        self._adopted: list[AdoptWorker] = []
        self._leads = None if spec.lease is None else Leadership(spec.lease, self._end_now)
        self._keeper = Keeper(spec.kept_file)  # writes what the next controller has to know
        self._checkpoint: Checkpoint | None = None  # the last one, for the store of several servers
        self._keeping: asyncio.TimerHandle | None = None  # while it cannot be written there
        self._loads: dict[Incarnation, RouterLoad] = {}  # what routers have said
        self._restart = spec.restart
        self._weights: KeptWeights  # once there is a model
        self._is_publishing = False
        self._scaling_logs: dict[str, ScalingLog] = {}  # by model
        self._tasks: set[asyncio.Task[Any]] = set()
        self.restarted: Counter[str] = Counter()  # tasks that ended, by name

    async def start(self) -> None:
        """Listen, and get Ray; once there is a model, adopt what runs and start what does not."""
        spec = self.spec
        host, port = await self.wire.listen(spec.host)
        self._me = Peer.here(CONTROLLER, host, port, spec.epoch)
        self.spawn(self._use_ray_in_time())
        self._tell(ControllerListens(self._me))
        if self._leads is not None:
            self._watch_lease()
        if (tls := spec.config.tls).frames:
            follow = partial(follow_certificates, tls, self._show_certificate)
            self.spawn(keep_running("follow_certificates", follow, self.restarted))

    def _show_certificate(self, identity: TlsIdentity) -> None:
        """On connections that are made from now on, here and at workers: other machines do not have
        the files. Raises TlsError."""
        self.wire.replace_identity(identity)
        self._listening = replace(self._listening, tls=identity)
        if self._workers is not None:
            self._workers.listening = self._listening
        for worker in self.controller.workers.values():
            if worker.peer is not None:
                self._send_certificate(worker.node)

    def _send_certificate(self, worker: NodeId) -> None:
        self.wire.send(worker, UpdatePeers(CONTROLLER, 0, (), self._listening.tls))

    def lease_renewed(self, is_kept: bool) -> None:
        """`is_kept`: the store has the checkpoint."""
        if not is_kept and self._keeping is None:
            self._keep_in_store()

    def _watch_lease(self) -> None:
        assert self._leads is not None
        if not self._leads.holds():
            self.host.close()
            self._leads.look()
        self._loop.call_later(LEASE_WATCH_S, self._watch_lease)

    def use_models(self, models: PreparedModels) -> None:
        """They are on this machine now. Begin."""
        spec = self.spec
        kept = self._read_kept()
        # Those that are not to be adopted can be told to end, wherever they are.
        update_peers(self.wire, [each.peer for each in kept.workers if each.peer is not None])
        running = len(spec.running_routers)
        log.info(
            "controller begins (epoch %d); %d workers and %d routers run",
            *(spec.epoch, len(kept.workers), running),
        )
        by_model = spec.config.by_model()
        self._weights = KeptWeights(spec.config.sessions.state_path, models.paths)
        own = {each.peer.node: each for each in (*kept.own, *spec.running_routers)}
        kept = replace(self._weights.add_to(kept), own=tuple(own.values()))
        config = ControllerConfig(
            {
                name: replace(
                    workers_config(name, own, models.by_name[name]),
                    fixed=fixed_of_workers(own, models.checkpoints[name]),
                    built=f"{own_version()} {workers_of(own)}",
                )
                for name, own in by_model.items()
            },
            listeners=(self._me,),
            routers=spec.routers,
            kept=kept,
            silent_grace_s=spec.config.cluster.silent_grace_s,
            max_workers=spec.config.scaling.max_workers,
        )
        self._scaling_logs = {
            name: ScalingLog.of(own, f"{spec.kept_file.parent.name}-{name}".rstrip("-"))
            for name, own in by_model.items()
        }
        self.controller = Controller(config, wall=time.time)
        self.host.add(self.controller, self)
        for started in spec.running_routers:
            self.say(started)
        self._models.set_result(models)
        self.spawn(self._show())
        if spec.here is not None:
            self.say(MachinesChanged((spec.here,)))

    def _keep(self, kept: Checkpoint) -> None:
        self._weights.keep(kept.weights)
        if self._leads is None:
            self._keeper.keep(kept)
            return
        self._checkpoint = kept
        if self._keeping is None:
            self._keep_in_store()

    def _keep_in_store(self) -> None:
        """Write the last checkpoint there, and try again until it is written."""
        self._keeping = None
        if self._leads is None or self._checkpoint is None:
            return
        if not self._leads.keep(self._checkpoint):
            self._keeping = self._loop.call_later(KEEP_RETRY_S, self._keep_in_store)

    def _read_kept(self) -> Checkpoint:
        if self._leads is not None:
            self._checkpoint = self._leads.read()  # to write where the store loses it
            return self._checkpoint
        return read_record(self.spec.kept_file, Checkpoint) or Checkpoint()

    def perform(self, effect: Effect) -> None:
        if self._leads is not None and not self._leads.holds():
            self.host.close()  # it hears nothing more, and what it has just decided is not done
            return
        match effect:
            case Record(kept):
                self._keep(kept)
                self._publish_soon()
            case StartWorker():
                self._start_worker(effect)
            case StopWorker(worker, epoch, gently, has_heir):
                self.wire.send(worker, End(epoch, has_heir))
                if gently:
                    self._loop.call_later(END_TIMEOUT_S, self._stop_worker, worker, epoch)
                else:
                    self._stop_worker(worker, epoch)
            case LogScaling(line, model):
                self._scaling_logs[model].write(line)
            case RequestMachines(num_machines):
                self._machines.wanted = num_machines
                self.spawn(self._machines.settle())
            case AdoptWorker():
                self._adopt(effect)
            case AdoptRouter(peer):
                update_peers(self.wire, [peer])
                self.wire.send(peer.node, Adopt(self._me))
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
        if not keep_workers and not self._hands_over():
            await self._end_workers()
            await self._machines.give_back(END_TIMEOUT_S)
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
        if self._leads is not None and self._checkpoint is not None:
            ended = tuple(replace(each, peer=None) for each in self._checkpoint.workers)
            self._leads.keep(replace(self._checkpoint, workers=ended, joined=(), own=()))

    def _hands_over(self) -> bool:
        """Whether workers go on, for another server or since it may not end them."""
        if self._leads is None:
            return False
        others = self.controller.routers.keys() - set(self.spec.routers)
        return bool(others) or not self._leads.holds()

    async def _leave_ray(self) -> None:
        if self._workers is not None:
            from kvrelay.cluster.processes.ray import disconnect

            await self._loop.run_in_executor(self._ray_thread, disconnect)

    @property
    def has_ray(self) -> bool | None:
        """Whether it answers; None: it has not begun yet, and nobody needs it."""
        if self._workers is None and self.spec.here is not None and not self._lacks_ray:
            return None
        return self._workers is not None and self._workers.is_answered

    def restart_workers(self, only_outdated: bool, done: Callable[[str], None]) -> None:
        """One after the other; their requests go on at the others. `done` gets why it stopped; ""
        if all are up again."""

        async def restart() -> None:
            try:
                drain_s = self.spec.config.cluster.drain_s
                how = self.controller, self.say, self._versions, drain_s, only_outdated
                done(await restart_workers(*how))
            except Exception as error:  # who waits must hear of it
                log.exception("restarting workers")
                done(f"{type(error).__name__}: {error}")

        self.spawn(restart())

    async def _versions(self) -> dict[str, str]:
        found: dict[str, str] = {} if self._workers is None else await self._workers.versions()
        return found

    def show_restart(self, restart: RestartStatus) -> None:
        """To operators, from now on."""
        self._restart = restart
        self._publish_soon()

    def spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine, name=coroutine.__qualname__)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        """What a task that failed would have done is done by the next controller."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end_now(f"{task.get_name()}: {type(error).__name__}: {error}")

    def say(self, message: Any) -> None:
        """To the controller, after what it does now."""
        if isinstance(message, WorkerStarted):
            info, about = message.info, (message.protocol, message.package)
            self.wire.set_address(info.worker, message.host, message.port, info.epoch, *about)
            if self._listening.tls != self.spec.listening.tls:  # it may have begun with the last
                self._send_certificate(info.worker)
        self._loop.call_soon(self.host.deliver, CONTROLLER, message)

    async def _use_ray_in_time(self) -> None:
        """Ray takes more of a machine than its workers do to start: those that can, go first."""
        if self.spec.here is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._are_up.wait(), RAY_LATEST_S)
        await self._use_ray()

    async def _use_ray(self) -> None:
        """Start or join it, and go on trying: what runs does not need it."""
        from kvrelay.cluster.processes.ray_access import start_ray

        config = self.spec.config
        starting: asyncio.Future[Any] | None = None
        attempts, last_why = 0, ""
        while True:
            try:
                if starting is None:  # one that was late goes on
                    starting = self._loop.run_in_executor(
                        self._ray_thread, start_ray, config, self._tell_ray
                    )
                ray = await asyncio.wait_for(asyncio.shield(starting), RAY_START_S)
                break
            except Exception as error:  # whatever Ray raises: it may start the next time
                why = str(error) and first_line(error)
                why = why or f"Ray did not start within {RAY_START_S:g} s"
                attempts += 1
                self._lacks_ray = True
                is_final = config.cluster.address or attempts == RAY_START_ATTEMPTS
                has_been_up = self.controller.has_been_up or bool(self.spec.running_routers)
                if not has_been_up and is_final:
                    self._fail(why)
                    return
                if has_been_up and not config.cluster.address:
                    self._end_now(why)
                if why != last_why:  # not every time of the minutes that Ray may be away
                    log.warning("%s; tried again every %g s", why, RAY_RETRY_S)
                last_why = why
                if starting is not None and starting.done():
                    starting = None
                await asyncio.sleep(RAY_RETRY_S)
        self._tell(StartupProgress("ray", "up", True))
        how = f"joined at {config.cluster.address}" if config.cluster.address else "started"
        log.info("Ray: %s; its own logs are in %s", how, ray.logs_folder())
        await self._models
        self._workers = ray.RayWorkers(self._listening, self.say, self.spec.here)
        cluster = self.spec.cluster
        for adopted in self._adopted:
            self._workers.attach(cluster, adopted.worker, adopted.epoch)
        kept = [name_of(cluster, each.worker, each.epoch) for each in self._adopted]
        if self._leads is not None and not self._leads.holds():
            return
        await ray.end_groups(cluster, kept)
        use_gpus = any(each.use_gpus for each in self.controller.config.models.values())
        await keep_running("watch_machines", lambda: self._watch_machines(use_gpus), self.restarted)

    async def _watch_machines(self, use_gpus: bool) -> None:
        while True:
            try:
                self.spawn(self._machines.settle())
                await self._workers.watch_machines(use_gpus)
            except Exception as error:
                why = f"Ray does not answer ({type(error).__name__})"
                if not self.spec.config.cluster.address:
                    # A Ray of one's own ends with this process, and the next one starts another.
                    self._end_now(why)
                # Ray itself ends a process that does not reach it for a minute.
                log.warning("%s: no worker is started until it does", why)
                await asyncio.sleep(RAY_RETRY_S)

    async def _request_machines(self, num_machines: int) -> bool:
        machines, text = self.controller.machines, self.spec.config.scaling.machine
        resources = resources_of(text, machines)
        if self._workers is None or (num_machines and not resources):
            return False
        await self._workers.request_machines(num_machines, resources)
        return True

    def _tell_ray(self, state: str) -> None:
        self._loop.call_soon_threadsafe(self._tell, StartupProgress("ray", state, False))

    def _start_worker(self, start: StartWorker) -> None:
        machines = {machine.machine_id: machine for machine in self.controller.machines}
        spec = self.spec
        workers = self.controller.workers.values()
        worker = worker_spec(
            start, spec.cluster, spec.config, self._models.result(), machines, workers
        )
        if self._workers is None:
            self.spawn(run_here(WorkerOrder(worker, self._listening), self.say))
        else:
            self._workers.start(worker)

    def _stop_worker(self, worker: NodeId, epoch: int) -> None:
        """By force, by its guardian or here; where neither reaches it, it was asked."""
        if self._leads is not None and not self._leads.holds():
            return
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
        if self._listening.tls is not None:  # it may have missed one
            self._send_certificate(adopted.worker)
        self._adopted.append(adopted)

    def _deliver(self, to: NodeId, message: Any) -> None:
        match message:
            case RouterReport(router, epoch, load, started):
                self._loads[router, epoch] = load
                # Before there is a controller it is not heard: it says so again.
                if started is not None and CONTROLLER in self.host.nodes:
                    self.say(started)
                self.wire.send(router, self._view())
            case WorkerStarted():
                self.say(message)
            case _:
                self.host.deliver(to, message)

    def _view(self) -> ClusterView:
        spec, routers = self.spec, self.controller.routers.values()
        lives = {(router.node, router.epoch) for router in routers}
        self._loads = {life: load for life, load in self._loads.items() if life in lives}
        me = ControllerStatus(
            known=True,
            epoch=spec.epoch,
            pid=os.getpid(),
            has_ray=self.has_ray,
            version=own_version(),
            server=spec.routers[0].partition("@")[2] or None,
            failed_writes=self._keeper.failed_writes,
            unwritten_s=round(self._keeper.late_s, 3),
            open_files=num_open_files(),
            max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            lines_dropped=lines_dropped(),
        )
        host, scheme = spec.config.api.host, spec.config.tls.scheme
        view = cluster_view(self.controller, me, self._loads, host, scheme)
        view.restarted_tasks = dict(self.restarted)
        view.restart = self._restart
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
        self._are_up.set()
        num_outdated = len(self.controller.worker_set.outdated())
        self._tell(AllUp(tuple(self._kv_lines(await self._models)), num_outdated))

    def _kv_lines(self, models: PreparedModels) -> list[str]:
        """What the KV cache of each model costs, for the user."""
        lines: list[str] = []
        workers = self.controller.workers.values()
        for name, model in models.by_name.items():
            infos = [w.info for w in workers if w.info is not None and w.model == name]
            lines += [f"{name}: {line}" if name else line for line in model.kv_lines(infos)]
        return lines

    def _send(self, to: NodeId, message: Any) -> str | None:
        return self.wire.send(to, message)

    def _on_peer_lost(self, node: NodeId, epoch: int) -> None:
        """It did not come back in time, or messages were lost: what each knows of the other no
        longer fits."""
        self.wire.forget(node, epoch)
        lost = RouterLost if is_router(node) else WorkerLost
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
