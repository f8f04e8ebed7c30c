"""What the controller does with workers: starts them, introduces them, takes them down.

The life of a worker is described in `cluster.control.controller`.
"""

from __future__ import annotations

from dataclasses import replace

from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.cluster.control.drains import Drains
from kvrelay.cluster.control.machines import Assigned, Machine, assign_machines
from kvrelay.cluster.control.messages import Introduce, StartWorker, StopWorker
from kvrelay.cluster.control.router_processes import RouterProcesses, RouterProcessLimits
from kvrelay.cluster.control.suspects import Suspects
from kvrelay.cluster.control.wanted import RUNNING, Worker, WorkerState
from kvrelay.engine.node import Effect, NodeId, Note, Send, Wake
from kvrelay.engine.stats import Role, RouterDown, RouterUp, WorkerInfo
from kvrelay.router.messages import RoleChanged, WorkerDown, WorkerUp
from kvrelay.worker.messages import Peer, WorkerStarted

RESTART_S = 1.0  # for one that was told to end, before it is started again


class WorkerLives:
    """Owned by the controller. Invariant: routers have been told `WorkerUp` of exactly the workers
    in state UP that are not draining."""

    def __init__(self, config: ControllerConfig, node_id: NodeId) -> None:
        self.config = config
        self.machines: tuple[Machine, ...] = ()
        self.workers = {node: config.wanted(node, role) for node, role in config.first_workers}
        limits = RouterProcessLimits(
            config.start_timeout_s,
            config.backoff_s,
            config.max_backoff_s,
            config.stable_s,
            config.max_first_failures,
        )
        self.router_processes = RouterProcesses(
            config.further_routers, config.routers, limits, node_id, config.listeners
        )
        self.suspects = Suspects(node_id, config.silent_grace_s)
        self.drains = Drains(node_id)
        self.has_been_up = False  # any worker, ever
        self._failures = 0  # of workers that were removed, since one came up
        self._removed: list[tuple[NodeId, str]] = []

    def up(self) -> dict[NodeId, WorkerInfo]:
        """Those that routers may use."""
        up = (w for w in self.workers.values() if w.state is WorkerState.UP and not w.is_draining)
        return {w.node: w.info for w in up if w.info is not None}

    @property
    def routers(self) -> list[NodeId]:
        """Those that are up."""
        return [peer.node for peer in (*self.config.routers, *self.router_processes.peers)]

    def listening(self) -> dict[NodeId, Peer]:
        running = (w for w in self.workers.values() if w.state in RUNNING)
        return {w.node: w.peer for w in running if w.peer is not None}

    def current(self, node: NodeId, epoch: int, *states: WorkerState) -> Worker | None:
        """The worker, if `epoch` is its latest and it is in one of `states`; else news is old."""
        worker = self.workers.get(node)
        if worker is None or worker.epoch != epoch or worker.state not in states:
            return None
        return worker

    def start(self, worker: Worker) -> list[Effect]:
        placed = [
            Assigned(machine, other.role, other.num_ranks // len(other.machines))
            for other in self.workers.values()
            if other is not worker and _has_place(other, worker)
            for machine in other.machines
        ]
        machines = assign_machines(
            worker.role,
            self.machines,
            placed,
            num_ranks=worker.num_ranks,
            num_machines=self.config.machines_for(worker.num_ranks),
            avoid=worker.avoid,
            most=self.config.workers_per_machine,
            use_gpus=self.config.use_gpus,
        )
        if machines is None:
            worker.state = WorkerState.DOWN  # until the machines change
            worker.last_error = self._no_room(worker)
            text = f"{worker.last_error} for {worker.node}"
            return [Note("warning", "no_machine", text)]
        worker.epoch += 1
        worker.state = WorkerState.STARTING
        worker.machine_id, *further = machines
        worker.further = tuple(further)
        num_ranks = worker.num_ranks
        return [
            StartWorker(
                worker.node, worker.role, worker.epoch, machines[0], num_ranks, worker.further
            ),
            Wake(self.config.start_timeout_s, f"starting {worker.epoch} {worker.node}"),
        ]

    def _no_room(self, worker: Worker) -> str:
        number = self.config.machines_for(worker.num_ranks)
        if self.config.use_gpus and any(machine.num_gpus for machine in self.machines):
            each = worker.num_ranks // number
            if number > 1:
                return f"no room: {each} free GPU(s) on each of {number} machines are needed"
            return f"no machine has room: {each} free GPU(s) of one are needed"
        if number > 1:
            return f"no room: {number} machines are needed, {len(self.machines)} are there"
        return "no machine has room"

    def add(self, worker: Worker) -> list[Effect]:
        """Where the last ones failed, not at once."""
        self.workers[worker.node] = worker
        if not self._failures:
            return self.start(worker)
        worker.state, worker.failures = WorkerState.BACKOFF, self._failures
        worker.last_error = "the last workers failed"
        return [Wake(self._pause_s(worker.failures), f"backoff 0 {worker.node}")]

    def introduce(self, worker: Worker, started: WorkerStarted) -> list[Effect]:
        forgotten: list[Effect] = []
        if worker.state is WorkerState.ADOPTING:  # it may know routers that live no more
            epochs, kept = self.router_processes.epochs, self.config.kept.routers
            gone = [node for node, epoch in kept.items() if epochs.get(node) != epoch]
            forgotten = [Send(worker.node, RouterDown(node)) for node in gone]
        worker.state = WorkerState.INTRODUCING
        worker.info = replace(started.info, role=worker.role)
        worker.pid = started.pid
        worker.peer = me = Peer(worker.node, started.host, started.port, worker.epoch)
        others = [
            other
            for other in self.workers.values()
            if other is not worker and other.peer is not None and other.state in RUNNING
        ]
        processes = self.router_processes.peers
        routers = (*self.config.routers, *processes)
        peers = [*routers, *(other.peer for other in others if other.peer is not None)]
        self.router_processes.greet(me.node, me.epoch)
        known = (*peers, *self.config.listeners)
        effects: list[Effect] = [Introduce(worker.node, me.node, me.epoch, known)]
        effects += [Introduce(peer.node, me.node, me.epoch, (me,)) for peer in peers]
        # Workers of one role only save each other work: one that hangs must not keep others down.
        spared = {other.node for other in others if other.role is worker.role}
        spared |= {front.node for front in processes}  # each comes together with it when it can
        worker.waiting_for = {effect.to for effect in effects} - spared
        tag = f"introducing {worker.epoch} {worker.node}"
        notes = [Note("warning", "worker_notice", f"{worker.node}: {n}") for n in started.notices]
        return [*forgotten, *effects, Wake(self.config.introduce_timeout_s, tag), *notes]

    def introduced(self, now: float, worker: Worker, to: NodeId) -> list[Effect]:
        worker.waiting_for.discard(to)
        if worker.waiting_for:
            return []
        assert worker.info is not None
        worker.state = WorkerState.UP
        worker.is_announced = True
        worker.up_at = now
        worker.avoid = None
        self.has_been_up, self._failures = True, 0
        effects: list[Effect] = [
            Note("info", "worker_up", f"{worker.node} is up (epoch {worker.epoch})")
        ]
        if worker.is_draining:  # the controller before began with it
            return effects + self.drain(now, worker)
        for router in self.config.routers:
            effects.append(Send(worker.node, RouterUp(router.node)))
            effects.append(Send(router.node, WorkerUp(worker.info)))
        return effects + self.router_processes.announce(self.up())

    def set_role(self, worker: Worker, role: Role) -> list[Effect]:
        """Weights and KV stay where they are: only what routers prefer the worker for changes."""
        if worker.role is role:
            return []
        text = f"{worker.node} was preferred for {worker.role}, and is for {role} now"
        worker.role = role
        effects: list[Effect] = [Note("info", "role_changed", text)]
        if worker.info is not None:
            worker.info = replace(worker.info, role=role)
        if worker.state is WorkerState.UP:
            change = RoleChanged(worker.node, worker.epoch, role)
            effects += [Send(router.node, change) for router in self.config.routers]
            effects += self.router_processes.role_changed(change)
        return effects

    def drain(self, now: float, worker: Worker, *, comes_back: bool = False) -> list[Effect]:
        """Let it go when nothing needs it; `comes_back`: to be started again."""
        config = self.config
        worker.is_draining, worker.comes_back = True, comes_back
        timeout_s = config.restart_drain_s if comes_back else config.drain_timeout_s
        return self.drains.begin(now, (worker.node, worker.epoch), self.routers, timeout_s)

    def drained(self, now: float, worker: Worker, why: str) -> list[Effect]:
        """Nothing needs it any more, or its time is over."""
        if not worker.comes_back:
            return self.remove(now, worker, why, gently=True)
        effects = self._take_down(now, worker, why, gently=True)
        worker.restarts += 1
        again = Wake(RESTART_S, f"backoff {worker.epoch} {worker.node}")
        return [Note("info", "worker_restarts", f"{worker.node} {why}"), *effects, again]

    def lost(self, now: float, worker: Worker, reason: str) -> list[Effect]:
        """It is started again after a pause."""
        config = self.config
        if worker.is_draining and not worker.comes_back:
            return self.remove(now, worker, reason)
        if worker.state is WorkerState.UP and now - worker.up_at >= config.stable_s:
            worker.failures = 0
        effects = self._take_down(now, worker, reason)
        worker.failures += 1
        worker.restarts += 1
        worker.last_error = reason
        pause_s = self._pause_s(worker.failures)
        text = f"{worker.node} (epoch {worker.epoch}) is gone: {reason}; again in {pause_s:g} s"
        stop, *told = effects
        again = Wake(pause_s, f"backoff {worker.epoch} {worker.node}")
        return [Note("warning", "worker_lost", text), stop, again, *told]

    def _pause_s(self, failures: int) -> float:
        config = self.config
        return min(config.max_backoff_s, config.backoff_s * 2.0 ** min(failures - 1, 20))

    def _take_down(
        self, now: float, worker: Worker, reason: str, *, gently: bool = False
    ) -> list[Effect]:
        """It ends, and whoever knows it is told. The first effect ends it."""
        config = self.config
        was_announced, worker.is_announced = worker.is_announced, False
        worker.state = WorkerState.BACKOFF
        self.suspects.forget((worker.node, worker.epoch))
        self.drains.forget((worker.node, worker.epoch))
        worker.peer = worker.info = None
        worker.pid = 0  # nobody's: the kernel may give it to another process
        worker.is_draining = worker.comes_back = False
        worker.waiting_for.clear()
        effects: list[Effect] = [StopWorker(worker.node, worker.epoch, gently)]
        if was_announced:
            down = WorkerDown(worker.node, worker.epoch, reason)
            effects += [Send(router.node, down) for router in config.routers]
        effects += self.router_processes.worker_lost(worker.node, worker.epoch, reason)
        for other in self.workers.values():
            if other.state is WorkerState.INTRODUCING and worker.node in other.waiting_for:
                effects += self.introduced(now, other, worker.node)
        return effects

    def take_removed(self) -> list[tuple[NodeId, str]]:
        """Since the last time, and why each."""
        removed, self._removed = self._removed, []
        return removed

    def remove(self, now: float, worker: Worker, why: str, *, gently: bool = False) -> list[Effect]:
        """It is wanted no more."""
        del self.workers[worker.node]
        self._removed.append((worker.node, why))
        self._failures = max(self._failures, worker.failures)
        effects: list[Effect] = [Note("info", "worker_gone", f"{worker.node} has gone: {why}")]
        if worker.epoch:
            effects += self._take_down(now, worker, why, gently=gently)
        return effects


def _has_place(other: Worker, worker: Worker) -> bool:
    """Whether what `other` holds, or comes back to, is not for `worker`: one that has failed leaves
    its GPUs to those of its size, but smaller ones would leave it too few."""
    comes_back = other.state is WorkerState.BACKOFF and other.num_ranks > worker.num_ranks
    return other.state in RUNNING or comes_back
