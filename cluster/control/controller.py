"""The controller: keeps workers and routers that were asked for running, and all introduced.

Life of a worker, one epoch per round:

    down -> starting -> introducing -> up
              |             |           |
              +-------------+-----------+--> backoff -> starting (next epoch) ...

A controller that comes after another one finds workers that run; these begin with `adopting`,
which ends as `starting` does. Routers go on with them all the while.

A worker is introduced before a router may use it: it learns the addresses of all that it may talk
to (any worker may fetch KV from any other), they learn its own, and only when all have said so is
it announced. A worker that is lost is
started again after a pause that grows with its failures and shrinks back once it has held out. One
that is up and makes no progress is ended by force: see `cluster.control.suspects`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.control.machines import Assigned, Machine, assign_machine
from cluster.control.messages import (
    CONTROLLER,
    GiveUp,
    Introduce,
    Introduced,
    Kept,
    KeptWorker,
    MachinesChanged,
    Peer,
    Record,
    RestartWorker,
    RouterFailed,
    RouterLost,
    RouterStarted,
    SetRole,
    StartFailed,
    StartWorker,
    StopWorker,
    WorkerLost,
    WorkerStarted,
)
from cluster.control.process_messages import LinkLost
from cluster.control.router_processes import TAG as ROUTER_TAG
from cluster.control.router_processes import RouterProcesses, RouterProcessLimits
from cluster.control.suspects import TAG as SUSPECT_TAG
from cluster.control.suspects import Suspects
from cluster.control.wanted import COMING, RUNNING, Worker, WorkerState
from engine.node import Effect, NodeId, Note, Send, Wake, Woken
from engine.stats import ProgressReport, Role, RouterDown, RouterUp, WorkerInfo
from router.messages import RoleChanged, WorkerDown, WorkerSuspected, WorkerUp


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    workers: tuple[tuple[NodeId, Role], ...]
    routers: tuple[Peer, ...]  # that live as long as the controller
    listeners: tuple[Peer, ...] = ()  # nodes beside the routers that processes send to
    further_routers: tuple[NodeId, ...] = ()  # further routers, to be started and kept running
    kept: Kept = field(default_factory=Kept)  # by the controller before
    running_routers: tuple[RouterStarted, ...] = ()  # further routers that outlived it
    adopt_timeout_s: float = 5.0
    start_timeout_s: float = 180.0
    introduce_timeout_s: float = 10.0
    silent_grace_s: float = 5.0  # for a worker of which routers complain to answer
    backoff_s: float = 0.25
    max_backoff_s: float = 30.0
    stable_s: float = 60.0  # up for this long: earlier failures are forgotten
    max_first_failures: int = 3  # before the first worker ever was up


class Controller:
    """Node. Invariant: at most one epoch of a worker is starting, introducing or up, the latest;
    routers have been told `WorkerUp` of exactly the workers in state UP."""

    def __init__(self, config: ControllerConfig, node_id: NodeId = CONTROLLER) -> None:
        self.node_id = node_id
        self.config = config
        self.machines: tuple[Machine, ...] = ()
        self.workers = {node: Worker(node, role, 0) for node, role in config.workers}
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
        self._suspects = Suspects(node_id, config.silent_grace_s)
        self._recorded = config.kept
        self.has_been_up = False  # any worker, ever
        self._gave_up = False

    def start(self, now: float) -> list[Effect]:
        kept = self.config.kept
        effects = [effect for worker in kept.workers for effect in self._adopt(worker)]
        listening = {w.worker: w.peer for w in kept.workers if w.peer and w.worker in self.workers}
        running = self.config.running_routers
        effects += self.router_processes.start(now, kept.routers, running, listening)
        return self._record(effects)

    def _adopt(self, kept: KeptWorker) -> list[Effect]:
        """One that listened is asked whether it lives; one that had not come so far is ended."""
        worker = self.workers.get(kept.worker)
        if worker is None:  # wanted no more
            return [StopWorker(kept.worker, kept.epoch)]
        self.has_been_up |= kept.peer is not None
        return worker.adopt(kept, self.config.adopt_timeout_s)

    def _record(self, effects: list[Effect]) -> list[Effect]:
        """Before all else, what has changed for the controller that comes after this one."""
        workers = tuple(worker.keep() for worker in self.workers.values() if worker.epoch)
        kept = Kept(workers, self.router_processes.epochs)
        if kept == self._recorded:
            return effects
        self._recorded = kept
        return [Record(kept), *effects]

    def receive(self, now: float, message: Any) -> list[Effect]:
        return self._record(self._handle(now, message))

    def _handle(self, now: float, message: Any) -> list[Effect]:
        match message:
            case MachinesChanged(machines):
                self.machines = machines
                idle = [w for w in self.workers.values() if w.state is WorkerState.DOWN]
                return [effect for worker in idle for effect in self._start(worker)]
            case WorkerStarted(info):
                worker = self._current(info.worker, info.epoch, *COMING)
                return self._introduce(worker, message) if worker else []
            case Introduced(to, about, epoch):
                worker = self._current(about, epoch, WorkerState.INTRODUCING)
                effects = self._on_introduced(now, worker, to) if worker else []
                reached = self.workers.get(to)
                to_epoch = None if reached is None else reached.epoch
                return effects + self.router_processes.introduced(message, to_epoch, self._up())
            case RouterStarted() | RouterFailed() | RouterLost():
                return self.router_processes.handle(now, message, self._listening(), self._up())
            case StartFailed(node, epoch, reason, permanent):
                worker = self._current(node, epoch, WorkerState.STARTING)
                return self._start_failed(now, worker, reason, permanent) if worker else []
            case WorkerLost(node, epoch, reason):
                worker = self._current(node, epoch, *RUNNING)
                return self._lost(now, worker, reason) if worker else []
            case WorkerSuspected(_, node, epoch, _):
                worker = self._current(node, epoch, WorkerState.UP)
                return self._suspects.complain(now, message) if worker else []
            case LinkLost(router, node, epoch):
                worker = self._current(node, epoch, WorkerState.UP)
                return self._on_link_lost(now, worker, router) if worker else []
            case ProgressReport():
                effects = self._suspects.answered(message)
                return effects + self.router_processes.announce(self._up())
            case RestartWorker(node):
                worker = self.workers.get(node)
                is_up = worker is not None and worker.state is WorkerState.UP
                return self._lost(now, worker, message.why) if worker and is_up else []
            case SetRole(node, role):
                return self._set_role(self.workers[node], role) if node in self.workers else []
            case Woken(tag):
                return self._woken(now, tag)
            case _:
                return [Note("warning", "unexpected_message", type(message).__name__)]

    def all_up(self) -> bool:
        workers_up = all(w.state is WorkerState.UP for w in self.workers.values())
        return workers_up and self.router_processes.all_up()

    def _up(self) -> dict[NodeId, WorkerInfo]:
        up = (w for w in self.workers.values() if w.state is WorkerState.UP)
        return {w.node: w.info for w in up if w.info is not None}

    def _listening(self) -> dict[NodeId, Peer]:
        running = (w for w in self.workers.values() if w.state in RUNNING)
        return {w.node: w.peer for w in running if w.peer is not None}

    def _current(self, node: NodeId, epoch: int, *states: WorkerState) -> Worker | None:
        """The worker, if `epoch` is its latest and it is in one of `states`; else news is old."""
        worker = self.workers.get(node)
        if worker is None or worker.epoch != epoch or worker.state not in states:
            return None
        return worker

    def _start(self, worker: Worker) -> list[Effect]:
        placed = [
            Assigned(other.machine_id, other.role)
            for other in self.workers.values()
            if other is not worker and other.machine_id is not None and other.state in RUNNING
        ]
        machine_id = assign_machine(worker.role, self.machines, placed, worker.avoid)
        if machine_id is None:
            worker.state = WorkerState.DOWN  # until the machines change
            worker.last_error = "no machine has room"
            return [Note("warning", "no_machine", f"no machine has room for {worker.node}")]
        worker.epoch += 1
        worker.state = WorkerState.STARTING
        worker.machine_id = machine_id
        return [
            StartWorker(worker.node, worker.role, worker.epoch, machine_id),
            Wake(self.config.start_timeout_s, f"starting {worker.epoch} {worker.node}"),
        ]

    def _introduce(self, worker: Worker, started: WorkerStarted) -> list[Effect]:
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

    def _on_introduced(self, now: float, worker: Worker, to: NodeId) -> list[Effect]:
        worker.waiting_for.discard(to)
        if worker.waiting_for:
            return []
        assert worker.info is not None
        worker.state = WorkerState.UP
        worker.is_announced = True
        worker.up_at = now
        worker.avoid = None
        self.has_been_up = True
        effects: list[Effect] = [
            Note("info", "worker_up", f"{worker.node} is up (epoch {worker.epoch})")
        ]
        for router in self.config.routers:
            effects.append(Send(worker.node, RouterUp(router.node)))
            effects.append(Send(router.node, WorkerUp(worker.info)))
        return effects + self.router_processes.announce(self._up())

    def _set_role(self, worker: Worker, role: Role) -> list[Effect]:
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

    def _start_failed(
        self, now: float, worker: Worker, reason: str, permanent: bool
    ) -> list[Effect]:
        worker.avoid = worker.machine_id
        effects = self._lost(now, worker, reason)
        hopeless = permanent or worker.failures >= self.config.max_first_failures
        if hopeless and not self.has_been_up and not self._gave_up:
            self._gave_up = True
            effects.append(GiveUp(reason))
        return effects

    def _lost(self, now: float, worker: Worker, reason: str) -> list[Effect]:
        config = self.config
        if worker.state is WorkerState.UP and now - worker.up_at >= config.stable_s:
            worker.failures = 0
        was_announced, worker.is_announced = worker.is_announced, False
        worker.state = WorkerState.BACKOFF
        self._suspects.forget((worker.node, worker.epoch))
        worker.failures += 1
        worker.restarts += 1
        worker.last_error = reason
        worker.peer = worker.info = None
        worker.waiting_for.clear()
        pause_s = min(config.max_backoff_s, config.backoff_s * 2 ** min(worker.failures - 1, 20))
        text = f"{worker.node} (epoch {worker.epoch}) is gone: {reason}; again in {pause_s:g} s"
        effects: list[Effect] = [
            Note("warning", "worker_lost", text),
            StopWorker(worker.node, worker.epoch),
            Wake(pause_s, f"backoff {worker.epoch} {worker.node}"),
        ]
        if was_announced:
            down = WorkerDown(worker.node, worker.epoch, reason)
            effects += [Send(router.node, down) for router in config.routers]
        effects += self.router_processes.worker_lost(worker.node, worker.epoch, reason)
        for other in self.workers.values():
            if other.state is WorkerState.INTRODUCING and worker.node in other.waiting_for:
                effects += self._on_introduced(now, other, worker.node)
        return effects

    def _on_link_lost(self, now: float, worker: Worker, router: NodeId) -> list[Effect]:
        """What the worker does for this router ends; once it has answered, the two are brought
        together again."""
        self.router_processes.part(router, worker.node, worker.epoch)
        why = f"{router} has lost the connection to it"
        complaint = WorkerSuspected(router, worker.node, worker.epoch, why)
        return [
            Send(worker.node, RouterDown(router)),
            *self._suspects.complain(now, complaint),
        ]

    def _look_after(self, now: float, node: NodeId, epoch: int) -> list[Effect]:
        """A worker of which routers complained."""
        why, effects = self._suspects.woken(now, (node, epoch))
        worker = self._current(node, epoch, WorkerState.UP) if why else None
        if worker is None:
            return effects + self.router_processes.announce(self._up())
        return self._lost(now, worker, why)

    def _woken(self, now: float, tag: str) -> list[Effect]:
        if tag.startswith(f"{ROUTER_TAG} "):
            return self.router_processes.woken(now, tag)
        state, epoch, node = tag.split(" ", 2)
        if state == SUSPECT_TAG:
            return self._look_after(now, node, int(epoch))
        worker = self._current(node, int(epoch), WorkerState(state))
        if worker is None:
            return []
        if worker.state is WorkerState.BACKOFF:
            return self._start(worker)
        if worker.state is WorkerState.ADOPTING:
            return self._lost(now, worker, "did not answer the controller that came after its own")
        if worker.state is WorkerState.STARTING:
            reason = f"did not start within {self.config.start_timeout_s:g} s"
            return self._start_failed(now, worker, reason, permanent=False)
        missing: Sequence[NodeId] = sorted(worker.waiting_for)
        return self._lost(now, worker, f"not introduced to {', '.join(missing)} in time")
