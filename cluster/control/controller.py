"""The controller: keeps workers and routers that were asked for running, and all introduced.

The life of each, and what is done alike with both, is in `cluster.control.lifecycle`. A controller
that comes after another one finds workers and routers that run, and adopts them; routers go on with
their workers all the while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvrelay.cluster.control.autoscaling import TAG as SCALE_TAG
from kvrelay.cluster.control.autoscaling import Autoscaling
from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.cluster.control.lifecycle import COMING, RUNNING, SERVING, ProcessState
from kvrelay.cluster.control.machines import leave_machines
from kvrelay.cluster.control.messages import (
    Checkpoint,
    Machine,
    MachinesChanged,
    Record,
    RequestMachines,
    RestartWorker,
    RouterLost,
    RouterStarted,
    ScalingReport,
    WorkerLost,
)
from kvrelay.cluster.control.process_messages import LinkLost
from kvrelay.cluster.control.routers import DesiredRouter, RouterSet
from kvrelay.cluster.control.watches import DRAIN_TAG, SUSPECT_TAG
from kvrelay.cluster.control.weights import TAG as WEIGHTS_TAG
from kvrelay.cluster.control.weights import Rollouts
from kvrelay.cluster.control.workers import DesiredWorker, WorkerSet
from kvrelay.cluster.orders import SetRole
from kvrelay.cluster.scaling.decisions import Decision
from kvrelay.cluster.scaling.sharing import shares
from kvrelay.engine.node import Effect, NodeId, Note, Send, Woken
from kvrelay.engine.stats import ProgressReport, RouterDown
from kvrelay.router.messages import DrainReport, WorkerSuspected
from kvrelay.worker.messages import CONTROLLER, PeersUpdated, StartFailed, WorkerStarted

MAX_SHOWN = 8  # machines in a line of the log


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
        self.router_set = RouterSet(config, node_id)
        self.worker_set = WorkerSet(config, self.router_set, node_id)
        # By model; where there is none, as many workers as were asked for.
        self.scaling: dict[str, Autoscaling] = {}
        for model, own in config.models.items():
            if own.scaling is not None:
                self.scaling[model] = Autoscaling(own.scaling, wall, model)
        self.rollouts = Rollouts(node_id, config, self.worker_set, self.router_set)
        self.worker_set.starts_with = self.rollouts.begin
        self._num_machines: int | None = None  # that this controller has asked for
        self._recorded = config.kept

    @property
    def machines(self) -> tuple[Machine, ...]:
        return self.worker_set.machines

    @property
    def workers(self) -> dict[NodeId, DesiredWorker]:
        return self.worker_set.by_name

    @property
    def routers(self) -> dict[NodeId, DesiredRouter]:
        return self.router_set.by_name

    @property
    def has_been_up(self) -> bool:
        """Whether any worker was, ever."""
        return self.worker_set.has_been_up

    def start(self, now: float) -> list[Effect]:
        kept = self.config.kept
        effects = [effect for each in kept.workers for effect in self.worker_set.adopt(each)]
        effects += self.router_set.resume(self.worker_set.listening())
        if not any(each.asks_for_machines for each in self.scaling.values()) and kept.num_machines:
            effects.append(RequestMachines(0))  # workers come and go no more
        return self._record(effects)

    def _record(self, effects: list[Effect]) -> list[Effect]:
        """Before all else, what has changed for the controller that comes after this one."""
        workers = tuple(worker.checkpoint() for worker in self.workers.values() if worker.epoch)
        num_named, routers = self.worker_set.num_named, self.router_set
        weights = tuple(each.kept for each in self.rollouts.values() if each.is_shown)
        asked = self._num_machines or 0
        joined = routers.joined
        own = tuple(joined.pop(name) for name in self.config.routers if name in joined)
        others = tuple(joined.values())
        kept = Checkpoint(workers, routers.epochs, num_named, others, weights, asked, own)
        if kept == self._recorded:
            return effects
        self._recorded = kept
        return [Record(kept), *effects]

    def receive(self, now: float, message: Any) -> list[Effect]:
        effects = self._handle(now, message)
        effects += leave_machines(now, self.worker_set)
        for model, rollout in self.rollouts.items():
            effects += rollout.advance(now, self._workers_of(model))
        return self._record(effects)

    def _workers_of(self, model: str) -> list[DesiredWorker]:
        return [worker for worker in self.workers.values() if worker.model == model]

    def _handle(self, now: float, message: Any) -> list[Effect]:
        workers, routers = self.worker_set, self.router_set
        match message:
            case MachinesChanged(machines):
                return self._see_machines(machines)
            case WorkerStarted(info):
                worker = workers.current(info.worker, info.epoch, *COMING)
                return workers.introduce(worker, message) if worker else []
            case PeersUpdated(to, about, epoch):
                effects = routers.updated(message)
                worker = workers.current(about, epoch, ProcessState.INTRODUCING)
                effects += workers.updated(now, worker, to) if worker else []
                return effects + routers.announce(workers.up())
            case RouterStarted():
                return routers.join(now, message, workers.listening())
            case StartFailed(node, epoch, why, False, missing) if missing:
                worker = workers.current(node, epoch, ProcessState.STARTING)
                if worker is None:
                    return []
                effects = workers.failed(now, worker, why, permanent=False)
                own = self._workers_of(worker.model)
                return effects + self.rollouts[worker.model].missing(missing, why, own)
            case StartFailed(node, epoch, why, final):
                worker = workers.current(node, epoch, ProcessState.STARTING)
                return workers.failed(now, worker, why, final) if worker else []
            case WorkerLost(node, epoch, reason):
                worker = workers.current(node, epoch, *RUNNING)
                return workers.lost(now, worker, reason) if worker else []
            case RouterLost(node, epoch, reason):
                router = routers.current(node, epoch, *RUNNING)
                return routers.lost(now, router, reason) if router else []
            case WorkerSuspected(_, node, epoch, _):
                worker = workers.current(node, epoch, *SERVING)
                return workers.suspects.complain(now, message) if worker else []
            case LinkLost(by, node, epoch):
                worker = workers.current(node, epoch, *SERVING)
                return self._on_link_lost(now, worker, by) if worker else []
            case ProgressReport():
                workers.drains.answered(message)
                effects = workers.suspects.answered(message)
                return effects + routers.announce(workers.up())
            case DrainReport():
                workers.drains.reported(message)
                return []
            case ScalingReport(_, _, model):
                if model in self.scaling:
                    self.scaling[model].take(now, message)
                return []
            case RestartWorker(node):
                worker = self.workers.get(node)
                is_up = worker is not None and worker.state is ProcessState.UP
                return self._restart(now, worker, message.why) if worker and is_up else []
            case SetRole(node, role):
                return workers.set_role(self.workers[node], role) if node in self.workers else []
            case Woken(tag):
                return self._woken(now, tag)
            case _ if handle := self.rollouts.handlers.get(type(message)):
                return handle(now, message)
            case _:
                return [Note("warning", "unexpected_message", type(message).__name__)]

    def _see_machines(self, machines: tuple[Machine, ...]) -> list[Effect]:
        workers = self.worker_set
        changes = _changes(workers.machines, machines)
        workers.see_machines(machines)
        idle = [w for w in self.workers.values() if w.state is ProcessState.DOWN]
        idle.sort(key=lambda worker: -worker.num_ranks)  # what is left suits the small ones
        effects = [Note("info", "machines_changed", changes)] if changes else []
        effects += [effect for worker in idle for effect in workers.start(worker)]
        # Before it is known who provides machines, nothing can be pending.
        return effects + [each for s in self.scaling.values() for each in s.start()]

    def all_up(self) -> bool:
        """With an autoscaler, some are, and no other is about to be: it may want more than there
        is room for."""
        states = {worker.state for worker in self.workers.values()}
        if self.scaling and not states.isdisjoint(SERVING):
            states -= {ProcessState.DOWN, ProcessState.BACKOFF}
        return states <= {*SERVING} and self.router_set.all_up()

    def _scale(self, now: float, model: str) -> list[Effect]:
        routers = [peer.node for peer in self.router_set.peers]
        share = self._shares().get(model)
        decision, effects = self.scaling[model].tick(now, self.workers, routers, share)
        return effects + self.carry_out(now, decision, model) + self._request_machines()

    def carry_out(self, now: float, decision: Decision, model: str = "") -> list[Effect]:
        """Do what the autoscaler of `model` has decided from the workers that there are now."""
        workers, effects = self.worker_set, list[Effect]()
        for worker, why in decision.removals:
            effects += workers.remove(now, self.workers[worker], why)
        for worker, role in decision.flips:
            effects += workers.set_role(self.workers[worker], role)
        for worker in decision.drains:
            effects += workers.let_go(now, self.workers[worker])
        for role in decision.starts:
            effects += workers.add(now, role, model)
        return effects

    def _request_machines(self) -> list[Effect]:
        """The first time in any case: what an earlier controller asked for stands until then."""
        asking = [each.num_machines for each in self.scaling.values() if each.asks_for_machines]
        known = [number for number in asking if number is not None]
        if not asking or len(known) < len(asking) or sum(known) == self._num_machines:
            return []
        self._num_machines = sum(known)
        return [RequestMachines(self._num_machines)]

    def _shares(self) -> dict[str, int]:
        """Workers that each model may have of those that all may; empty: as many as it may."""
        if not self.config.max_workers or len(self.scaling) < 2:
            return {}
        known = {model: each.demand for model, each in self.scaling.items()}
        demands = {model: each for model, each in known.items() if each is not None}
        return shares(self.config.max_workers, demands) if len(demands) == len(known) else {}

    def _look_at_drain(self, now: float, node: NodeId, epoch: int) -> list[Effect]:
        workers, routers = self.worker_set, [peer.node for peer in self.router_set.peers]
        why, effects = workers.drains.woken(now, (node, epoch), routers)
        worker = workers.current(node, epoch, ProcessState.DRAINING) if why else None
        return effects if worker is None else workers.drained(now, worker, why)

    def _restart(self, now: float, worker: DesiredWorker, why: str) -> list[Effect]:
        """Where others can serve, its requests move to them before it ends."""
        if sum(each.model == worker.model for each in self.worker_set.up().values()) > 1:
            return self.worker_set.drain(now, worker, comes_back=True)
        return self.worker_set.lost(now, worker, why)

    def _on_link_lost(self, now: float, worker: DesiredWorker, router: NodeId) -> list[Effect]:
        """What the worker does for this router ends; once it has answered, the two are brought
        together again."""
        self.router_set.part(router, worker.node)
        why = f"{router} has lost the connection to it"
        complaint = WorkerSuspected(router, worker.node, worker.epoch, why)
        return [
            Send(worker.node, RouterDown(router)),
            *self.worker_set.suspects.complain(now, complaint),
        ]

    def _look_after(self, now: float, node: NodeId, epoch: int) -> list[Effect]:
        """Routers have complained of this worker."""
        workers = self.worker_set
        why, effects = workers.suspects.woken(now, (node, epoch))
        worker = workers.current(node, epoch, *SERVING) if why else None
        if worker is None:
            return effects + self.router_set.announce(workers.up())
        worker.hangs += 1
        return workers.lost(now, worker, why)

    def _woken(self, now: float, tag: str) -> list[Effect]:
        if tag.startswith(self.router_set.tag):
            return self.router_set.woken(now, tag)
        kind, _, rest = tag.partition(" ")
        if kind == SCALE_TAG:
            return self._scale(now, rest)
        if kind == WEIGHTS_TAG:
            return self.rollouts[rest].woken(now)
        epoch, _, node = rest.partition(" ")
        if kind == SUSPECT_TAG:
            return self._look_after(now, node, int(epoch))
        if kind == DRAIN_TAG:
            return self._look_at_drain(now, node, int(epoch))
        return self.worker_set.woken(now, tag)


def _changes(before: tuple[Machine, ...], now: tuple[Machine, ...]) -> str:
    """Which machines of Ray's cluster have come and gone."""
    old, new = ({machine.machine_id: machine for machine in each} for each in (before, now))
    told = [f"{each.host} has come" for name, each in new.items() if name not in old]
    told += [f"{each.host} is gone" for name, each in old.items() if name not in new]
    told += [
        f"{each.host} is to end"
        for name, each in new.items()
        if each.is_draining and not (name in old and old[name].is_draining)
    ]
    if not told:
        return ""
    shown = told[:MAX_SHOWN]
    more = len(told) - len(shown)
    return f"machines: {', '.join(shown)}{f' and {more} more' * bool(more)}; {len(now)} are there"
