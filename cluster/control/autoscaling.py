"""The autoscaler at work: routers' counts come in, and every tick workers are ordered or let go.

It sees the controller's workers as a `WorkerProvider`. What it orders is noted, and the controller
does it when the tick is over. A worker that dies after it was up counts as up, since the controller
starts it again; one that fails again and again, or finds no machine for long, goes with its reason,
and the autoscaler decides anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import structs, to_builtins

from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import ScalingReport
from kvrelay.cluster.control.workers import DesiredWorker, worker_name
from kvrelay.cluster.scaling.decisions import Decision, Line, Reason
from kvrelay.cluster.scaling.observations import Snapshot
from kvrelay.cluster.scaling.planner import Scaler
from kvrelay.cluster.scaling.provider import ManagedWorker, ManagedWorkers, State
from kvrelay.cluster.scaling.sharing import Demand
from kvrelay.cluster.status import ScalingStatus
from kvrelay.engine.node import Effect, NodeId, Note, Wake
from kvrelay.engine.stats import Role
from kvrelay.router.scaling_config import ScalingConfig
from kvrelay.router.traffic import RouterSeen, WorkerSeen

TAG = "scale"
MAX_SHOWN = 20  # decisions, for operators
FULL = 3  # the last ones, with all that they were made from
MAX_FAILURES = 3  # in a row; then a worker is given up


@dataclass(frozen=True, slots=True)
class LogScaling:
    """Effect: keep what the autoscaler saw and decided."""

    line: Line
    model: str = ""  # for whose workers


@dataclass(frozen=True, slots=True)
class Add:
    worker: NodeId
    role: Role
    model: str = ""


@dataclass(frozen=True, slots=True)
class Drain:
    worker: NodeId


@dataclass(frozen=True, slots=True)
class Flip:
    worker: NodeId
    role: Role


@dataclass(frozen=True, slots=True)
class Remove:
    worker: NodeId
    why: str


Order = Add | Drain | Flip | Remove


class ControlledFleet:
    """WorkerProvider. `look` brings it up to date before it is asked or told anything."""

    def __init__(self, pending_timeout_s: float, num_named: int, model: str = "") -> None:
        """`num_named`: names with lower numbers may have been used. `model`: that they serve."""
        self.num_named = num_named
        self._model = model
        self._pending_timeout_s = pending_timeout_s
        self._book = ManagedWorkers(pending_timeout_s)
        self._now = 0.0
        self._homeless: dict[NodeId, float] = {}  # was placed, and no machine has room: since when
        self._orders: list[Order] = []

    def start(self, role: Role) -> NodeId:
        worker = worker_name(role, self._model, self.num_named)
        self.num_named += 1
        self._book.add(self._now, worker, role)
        self._book.explain(worker, "it was only just ordered")
        self._orders.append(Add(worker, role, self._model))
        return worker

    def drain(self, worker: NodeId) -> None:
        known = self._book.get(worker)
        if known is None or known.state in (State.DRAINING, State.GONE):
            return
        if self._book.move(self._now, worker, State.DRAINING):
            self._orders.append(Drain(worker))
        else:
            self._go(worker, "not needed any more")

    def flip(self, worker: NodeId, role: Role) -> None:
        if self._book.set_role(worker, role):
            self._orders.append(Flip(worker, role))

    def workers(self) -> Iterable[ManagedWorker]:
        return list(self._book)

    def take_orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def gone(self, now: float, worker: NodeId, why: str) -> None:
        """The controller has let it go."""
        self._book.move(now, worker, State.GONE, why)
        self._homeless.pop(worker, None)

    def look(self, now: float, workers: Mapping[NodeId, DesiredWorker]) -> None:
        """What has become of them. Those that nothing comes of go."""
        self._now = now
        for worker in workers.values():
            if self._book.get(worker.node) is None:
                self._book.add(now, worker.node, worker.role, start_s=0.0)
            self._update(worker)
        for late in self._book.give_up(now):
            self._orders.append(Remove(late, "no machine had room for it"))

    def _update(self, worker: DesiredWorker) -> None:
        name, now, book = worker.node, self._now, self._book
        book.set_role(name, worker.role)
        if worker.is_serving:
            book.came_up(worker.up_at, name, worker.started.took_s if worker.started else 0.0)
            if worker.is_leaving:
                book.move(now, name, State.DRAINING)
        elif worker.epoch:  # it had a place
            book.move(now, name, State.STARTING)
        else:
            book.explain(name, worker.last_error or "it was only just ordered")
        known = book.get(name)
        is_placed = known is not None and known.state in (State.STARTING, State.UP)
        if worker.failures >= MAX_FAILURES and is_placed and worker.state is ProcessState.BACKOFF:
            self._go(name, f"failed {worker.failures} times: {worker.last_error}")
        elif worker.state is ProcessState.DOWN and is_placed:
            since = self._homeless.setdefault(name, now)
            if now - since >= self._pending_timeout_s:
                self._go(name, f"given up after {now - since:.0f} s: {worker.last_error}")
        else:
            self._homeless.pop(name, None)

    def _go(self, worker: NodeId, why: str) -> None:
        self.gone(self._now, worker, why)
        self._orders.append(Remove(worker, why))


class Autoscaling:
    """Owned by the controller, one for the workers of each model that has it. Invariant: once
    begun, exactly one tick is under way."""

    def __init__(
        self, config: ScalingConfig, num_named: int, wall: Callable[[], float], model: str = ""
    ) -> None:
        """`wall`: returns seconds since 1970."""
        self._config = config
        self._wall = wall
        self._model = model
        self.fleet = ControlledFleet(config.pending_timeout_s, num_named, model)
        self._scaler = Scaler(config, self.fleet)
        self._routers: dict[NodeId, RouterSeen] = {}
        self._seen: dict[NodeId, WorkerSeen] = {}
        self._shown: list[Decision] = []  # those that say something new
        self._ticks: Counter[str] = Counter()  # by reason
        self._actions: Counter[str] = Counter()
        self.num_machines: int | None = None  # that it wants; None: it says nothing, or not yet
        self._has_begun = False
        self._offset_s = 0.0  # from the controller's clock to the wall's

    def start(self) -> list[Effect]:
        """Begin, the first time; then nothing."""
        if self._has_begun:
            return []
        self._has_begun = True
        return [LogScaling(self._scaler.begin(), self._model), self._wake()]

    def take(self, now: float, report: ScalingReport) -> None:
        """Ages become times of this clock."""
        router = report.seen.router
        self._routers[router] = structs.replace(report.seen, at_s=now + report.seen.at_s)
        for seen in report.workers:
            dated = structs.replace(seen, at_s=now + seen.at_s)
            known = self._seen.get(seen.worker)
            if known is None or known.at_s <= dated.at_s:
                self._seen[seen.worker] = dated

    @property
    def asks_for_machines(self) -> bool:
        return self._config.workers_per_machine > 0

    @property
    def demand(self) -> Demand | None:
        """What it would have if no other model was there; None: it has not looked yet."""
        return self._scaler.demand

    def tick(
        self,
        now: float,
        workers: Mapping[NodeId, DesiredWorker],
        routers: Collection[NodeId],
        share: int | None = None,
    ) -> tuple[list[Order], list[Effect]]:
        """What the controller is to do. `routers`: those that are up; `share`: as in `Snapshot`."""
        fleet = self.fleet
        workers = {name: each for name, each in workers.items() if each.model == self._model}
        fleet.look(now, workers)
        self._seen = {name: seen for name, seen in self._seen.items() if name in workers}
        self._routers = {name: seen for name, seen in self._routers.items() if name in routers}
        wall_s = self._wall()
        self._offset_s = wall_s - now
        snapshot = Snapshot(
            at_s=now,
            wall_s=wall_s,
            routers=tuple(self._routers[name] for name in sorted(self._routers)),
            seen=tuple(self._seen[name] for name in sorted(self._seen)),
            workers=tuple(fleet.workers()),
            share=share,
        )
        line = self._scaler.tick(snapshot)
        decision = line.decision
        assert decision is not None
        self.num_machines = decision.machines
        effects = [LogScaling(line, self._model), self._wake(), *self._show(decision)]
        return fleet.take_orders(), effects

    def view(self) -> ScalingStatus:
        """What it does and why, and its last decisions."""
        last = self._scaler.decisions[-1] if self._scaler.decisions else None
        least, most = self._config.limits(self._wall())
        return ScalingStatus(
            why=self._scaler.why,
            reason="" if last is None else str(last.reason),
            wanted=None if last is None else last.wanted,
            wanted_decode=None if last is None else last.wanted_decode,
            least=least,
            most=most,
            coming=0 if last is None else last.inputs.coming,
            draining=0 if last is None else last.inputs.draining,
            ticks={str(reason): self._ticks[str(reason)] for reason in Reason},
            actions=dict(self._actions),
            decisions=[
                self._plain(each, is_full=number >= len(self._shown) - FULL)
                for number, each in enumerate(self._shown)
            ],
        )

    def _plain(self, decision: Decision, *, is_full: bool) -> dict[str, Any]:
        plain: dict[str, Any] = to_builtins(decision)
        plain["at_s"] = decision.at_s + self._offset_s
        plain["flips"] = [f"{worker} to {role}" for worker, role in decision.flips]
        if not is_full:
            del plain["inputs"], plain["alternatives"]
        return plain

    def _show(self, decision: Decision) -> list[Effect]:
        """Keep for operators what differs from the last; note what is done."""
        self._ticks[str(decision.reason)] += 1
        done = {"start": decision.starts, "drain": decision.drains, "flip": decision.flips}
        self._actions.update({action: len(each) for action, each in done.items() if each})
        last = self._shown[-1] if self._shown else None
        if decision.acts or last is None or last.reason is not decision.reason or last.acts:
            self._shown = [*self._shown, decision][-MAX_SHOWN:]
        else:
            self._shown[-1] = decision  # says the same of now
        if not decision.acts:
            return []
        actions = [f"start {role}" for role in decision.starts]
        actions += [f"drain {worker}" for worker in decision.drains]
        actions += [f"{worker} for {role}" for worker, role in decision.flips]
        return [Note("info", "scaling", f"{decision.text}: {', '.join(actions)}")]

    def _wake(self) -> Wake:
        return Wake(self._config.tick_s, f"{TAG} {self._model}".rstrip())
