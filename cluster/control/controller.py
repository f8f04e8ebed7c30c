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

from collections.abc import Callable, Sequence
from typing import Any

from kvrelay.cluster.control.autoscaling import TAG as SCALE_TAG
from kvrelay.cluster.control.autoscaling import Autoscaling
from kvrelay.cluster.control.control_config import ControllerConfig as ControllerConfig
from kvrelay.cluster.control.drains import TAG as DRAIN_TAG
from kvrelay.cluster.control.fleet import Add, Drain, Flip, Order, Remove
from kvrelay.cluster.control.machines import Machine
from kvrelay.cluster.control.messages import (
    GiveUp,
    Kept,
    KeptWorker,
    MachinesChanged,
    Record,
    RestartWorker,
    RouterFailed,
    RouterLost,
    RouterStarted,
    ScalingReport,
    SetRole,
    StopWorker,
    WorkerLost,
)
from kvrelay.cluster.control.process_messages import LinkLost
from kvrelay.cluster.control.router_processes import TAG as ROUTER_TAG
from kvrelay.cluster.control.suspects import TAG as SUSPECT_TAG
from kvrelay.cluster.control.wanted import COMING, RUNNING, Worker, WorkerState
from kvrelay.cluster.control.worker_lives import WorkerLives
from kvrelay.engine.node import Effect, NodeId, Note, Send, Woken
from kvrelay.engine.stats import ProgressReport, RouterDown
from kvrelay.router.messages import DrainReport, WorkerSuspected
from kvrelay.worker.messages import CONTROLLER, Introduced, StartFailed, WorkerStarted


class Controller:
    """Node. Invariant: at most one epoch of a worker is starting, introducing or up, the latest."""

    def __init__(
        self,
        config: ControllerConfig,
        node_id: NodeId = CONTROLLER,
        wall: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`wall`: seconds since 1970, for schedules of the autoscaler."""
        self.node_id = node_id
        self.config = config
        self.lives = WorkerLives(config, node_id)
        self.router_processes = self.lives.router_processes
        self.scaling: Autoscaling | None = None  # None: as many workers as were asked for
        if config.scaling is not None:
            num_named = max(config.kept.num_named, len(config.workers))
            self.scaling = Autoscaling(config.scaling, num_named, wall)
        self._recorded = config.kept
        self._gave_up = False

    @property
    def machines(self) -> tuple[Machine, ...]:
        return self.lives.machines

    @property
    def workers(self) -> dict[NodeId, Worker]:
        """Those that are wanted, by name."""
        return self.lives.workers

    @property
    def has_been_up(self) -> bool:
        """Any worker, ever."""
        return self.lives.has_been_up

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
        self.lives.has_been_up |= kept.peer is not None
        return worker.adopt(kept, self.config.adopt_timeout_s)

    def _record(self, effects: list[Effect]) -> list[Effect]:
        """Before all else, what has changed for the controller that comes after this one."""
        workers = tuple(worker.keep() for worker in self.workers.values() if worker.epoch)
        num_named = 0 if self.scaling is None else self.scaling.fleet.num_named
        kept = Kept(workers, self.router_processes.epochs, num_named)
        if kept == self._recorded:
            return effects
        self._recorded = kept
        return [Record(kept), *effects]

    def receive(self, now: float, message: Any) -> list[Effect]:
        return self._record(self._handle(now, message))

    def _handle(self, now: float, message: Any) -> list[Effect]:
        lives = self.lives
        match message:
            case MachinesChanged(machines):
                lives.machines = machines
                idle = [w for w in self.workers.values() if w.state is WorkerState.DOWN]
                idle.sort(key=lambda worker: -worker.num_ranks)  # what is left suits the small ones
                effects = [effect for worker in idle for effect in lives.start(worker)]
                # Before it is known who provides machines, nothing can be pending.
                return effects + ([] if self.scaling is None else self.scaling.start())
            case WorkerStarted(info):
                worker = lives.current(info.worker, info.epoch, *COMING)
                return lives.introduce(worker, message) if worker else []
            case Introduced(to, about, epoch):
                worker = lives.current(about, epoch, WorkerState.INTRODUCING)
                effects = lives.introduced(now, worker, to) if worker else []
                reached = self.workers.get(to)
                to_epoch = None if reached is None else reached.epoch
                return effects + self.router_processes.introduced(message, to_epoch, lives.up())
            case RouterStarted() | RouterFailed() | RouterLost():
                return self.router_processes.handle(now, message, lives.listening(), lives.up())
            case StartFailed(node, epoch, reason, permanent):
                worker = lives.current(node, epoch, WorkerState.STARTING)
                return self._start_failed(now, worker, reason, permanent) if worker else []
            case WorkerLost(node, epoch, reason):
                worker = lives.current(node, epoch, *RUNNING)
                return lives.lost(now, worker, reason) if worker else []
            case WorkerSuspected(_, node, epoch, _):
                worker = lives.current(node, epoch, WorkerState.UP)
                return lives.suspects.complain(now, message) if worker else []
            case LinkLost(router, node, epoch):
                worker = lives.current(node, epoch, WorkerState.UP)
                return self._on_link_lost(now, worker, router) if worker else []
            case ProgressReport():
                lives.drains.answered(message)
                effects = lives.suspects.answered(message)
                return effects + self.router_processes.announce(lives.up())
            case DrainReport():
                lives.drains.reported(message)
                return []
            case ScalingReport():
                if self.scaling is not None:
                    self.scaling.take(now, message)
                return []
            case RestartWorker(node):
                worker = self.workers.get(node)
                is_up = worker is not None and worker.state is WorkerState.UP
                return self._restart(now, worker, message.why) if worker and is_up else []
            case SetRole(node, role):
                return lives.set_role(self.workers[node], role) if node in self.workers else []
            case Woken(tag):
                return self._woken(now, tag)
            case _:
                return [Note("warning", "unexpected_message", type(message).__name__)]

    def all_up(self) -> bool:
        """With an autoscaler, some are, and no other is about to be: it may want more than there
        is room for."""
        states = {worker.state for worker in self.workers.values()}
        if self.scaling is not None and WorkerState.UP in states:
            states -= {WorkerState.DOWN, WorkerState.BACKOFF}
        return states <= {WorkerState.UP} and self.router_processes.all_up()

    def _start_failed(
        self, now: float, worker: Worker, reason: str, permanent: bool
    ) -> list[Effect]:
        worker.avoid = worker.machine_id
        effects = self.lives.lost(now, worker, reason)
        hopeless = permanent or worker.failures >= self.config.max_first_failures
        if hopeless and not self.has_been_up and not self._gave_up:
            self._gave_up = True
            effects.append(GiveUp(reason))
        return effects

    def _scale(self, now: float) -> list[Effect]:
        assert self.scaling is not None
        for node, why in self.lives.take_removed():
            self.scaling.fleet.gone(now, node, why)
        orders, effects = self.scaling.tick(now, self.workers, self.lives.routers)
        for order in orders:
            effects += self._obey(now, order)
        return effects

    def _obey(self, now: float, order: Order) -> list[Effect]:
        if isinstance(order, Add):
            return self.lives.add(self.config.wanted(order.worker, order.role))
        worker = self.workers.get(order.worker)
        match order:
            case _ if worker is None:
                return []
            case Flip(_, role):
                return self.lives.set_role(worker, role)
            case Remove(_, why):
                return self.lives.remove(now, worker, why)
            case Drain() if worker.state is not WorkerState.UP:
                return self.lives.remove(now, worker, "not needed any more")
            case Drain():
                return self.lives.drain(now, worker)

    def _look_at_drain(self, now: float, node: NodeId, epoch: int) -> list[Effect]:
        why, effects = self.lives.drains.woken(now, (node, epoch), self.lives.routers)
        worker = self.lives.current(node, epoch, WorkerState.UP) if why else None
        return effects if worker is None else self.lives.drained(now, worker, why)

    def _restart(self, now: float, worker: Worker, why: str) -> list[Effect]:
        """Where others can serve, its requests move to them before it ends."""
        if worker.is_draining:
            return []
        if len(self.lives.up()) > 1:
            return self.lives.drain(now, worker, comes_back=True)
        return self.lives.lost(now, worker, why)

    def _on_link_lost(self, now: float, worker: Worker, router: NodeId) -> list[Effect]:
        """What the worker does for this router ends; once it has answered, the two are brought
        together again."""
        self.router_processes.part(router, worker.node, worker.epoch)
        why = f"{router} has lost the connection to it"
        complaint = WorkerSuspected(router, worker.node, worker.epoch, why)
        return [
            Send(worker.node, RouterDown(router)),
            *self.lives.suspects.complain(now, complaint),
        ]

    def _look_after(self, now: float, node: NodeId, epoch: int) -> list[Effect]:
        """A worker of which routers complained."""
        why, effects = self.lives.suspects.woken(now, (node, epoch))
        worker = self.lives.current(node, epoch, WorkerState.UP) if why else None
        if worker is None:
            return effects + self.router_processes.announce(self.lives.up())
        worker.hangs += 1
        return self.lives.lost(now, worker, why)

    def _woken(self, now: float, tag: str) -> list[Effect]:
        if tag.startswith(f"{ROUTER_TAG} "):
            return self.router_processes.woken(now, tag)
        if tag == SCALE_TAG:
            return self._scale(now)
        state, epoch, node = tag.split(" ", 2)
        if state == SUSPECT_TAG:
            return self._look_after(now, node, int(epoch))
        if state == DRAIN_TAG:
            return self._look_at_drain(now, node, int(epoch))
        worker = self.lives.current(node, int(epoch), WorkerState(state))
        if worker is None:
            return []
        if worker.state is WorkerState.BACKOFF:
            return self.lives.start(worker)
        if worker.state is WorkerState.ADOPTING:
            return self.lives.lost(
                now, worker, "did not answer the controller that came after its own"
            )
        if worker.state is WorkerState.STARTING:
            reason = f"did not start within {self.config.start_timeout_s:g} s"
            return self._start_failed(now, worker, reason, permanent=False)
        missing: Sequence[NodeId] = sorted(worker.waiting_for)
        return self.lives.lost(now, worker, f"not introduced to {', '.join(missing)} in time")
