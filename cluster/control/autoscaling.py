"""The autoscaler at work: routers' counts come in, and every tick has a decision.

It reads the controller's workers, and says which are to be started, drained, flipped or given up:
the controller does that. A worker that dies is coming again, since the controller starts it again;
one that fails again and again, or finds no machine for long, is given up with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import structs, to_builtins

from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import ScalingReport
from kvrelay.cluster.control.workers import DesiredWorker
from kvrelay.cluster.scaling.decisions import Decision, Line, Reason
from kvrelay.cluster.scaling.observations import ManagedWorker, Snapshot, State
from kvrelay.cluster.scaling.planner import Scaler
from kvrelay.cluster.scaling.sharing import Demand
from kvrelay.cluster.status import ScalingStatus
from kvrelay.engine.node import Effect, NodeId, Note, Wake
from kvrelay.router.scaling_config import ScalingConfig
from kvrelay.router.traffic import RouterSeen, WorkerSeen

TAG = "scale"
MAX_SHOWN = 20  # decisions, for operators
FULL = 3  # the last ones, with all that they were made from


@dataclass(frozen=True, slots=True)
class LogScaling:
    """Effect: keep what the autoscaler saw and decided."""

    line: Line
    model: str = ""  # for whose workers


STATES = {
    ProcessState.DOWN: State.PENDING,
    ProcessState.ADOPTING: State.STARTING,
    ProcessState.STARTING: State.STARTING,
    ProcessState.INTRODUCING: State.STARTING,
    ProcessState.UP: State.UP,
    ProcessState.DRAINING: State.UP,  # it comes back, unless it leaves
    ProcessState.BACKOFF: State.STARTING,
}


def observed(now: float, worker: DesiredWorker, last: ManagedWorker | None) -> ManagedWorker:
    """A worker as the autoscaler sees it. `last`: the tick before; None: it was not there."""
    state = State.DRAINING if worker.is_leaving else STATES[worker.state]
    if not worker.epoch:
        state = State.PENDING  # also while the failures of others hold it back
    if last is not None:
        since = last.since if last.state is state else now
    else:
        since = now if worker.ordered_at is None else worker.ordered_at
    took_s = worker.started.took_s if worker.started else 0.0
    waits = worker.state is ProcessState.BACKOFF and worker.epoch > 0
    return ManagedWorker(
        worker=worker.node,
        role=worker.role,
        state=state,
        ordered_at=worker.ordered_at or 0.0,
        since=since,
        up_at=worker.up_at if worker.is_serving else None,
        reason=worker.last_error,
        start_s=took_s if worker.ordered_at is None else None,
        failures=worker.failures if waits else 0,
    )


class Autoscaling:
    """Owned by the controller, one for the workers of each model that has it. Invariant: once
    begun, exactly one tick is under way."""

    def __init__(self, config: ScalingConfig, wall: Callable[[], float], model: str = "") -> None:
        """`wall`: returns seconds since 1970."""
        self._config = config
        self._wall = wall
        self._model = model
        self._scaler = Scaler(config)
        self.workers: dict[NodeId, ManagedWorker] = {}  # at the last tick
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
    ) -> tuple[Decision, list[Effect]]:
        """What the controller is to do. `routers`: those that are up; `share`: as in `Snapshot`."""
        self.workers = {
            name: observed(now, worker, self.workers.get(name))
            for name, worker in workers.items()
            if worker.model == self._model
        }
        self._seen = {name: seen for name, seen in self._seen.items() if name in self.workers}
        self._routers = {name: seen for name, seen in self._routers.items() if name in routers}
        wall_s = self._wall()
        self._offset_s = wall_s - now
        snapshot = Snapshot(
            at_s=now,
            wall_s=wall_s,
            routers=tuple(self._routers[name] for name in sorted(self._routers)),
            seen=tuple(self._seen[name] for name in sorted(self._seen)),
            workers=tuple(self.workers.values()),
            share=share,
        )
        line = self._scaler.tick(snapshot)
        decision = line.decision
        assert decision is not None
        self.num_machines = decision.machines
        effects = [LogScaling(line, self._model), self._wake(), *self._show(decision)]
        return decision, effects

    def view(self) -> ScalingStatus:
        """What it does and why, and its last decisions."""
        last = self._shown[-1] if self._shown else None
        least, most = self._config.limits(self._wall())
        return ScalingStatus(
            why="not scaling: nothing was seen yet" if last is None else last.text,
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
        plain["removals"] = [f"{worker}: {why}" for worker, why in decision.removals]
        if not is_full:
            del plain["inputs"], plain["alternatives"]
        return plain

    def _show(self, decision: Decision) -> list[Effect]:
        """Keep for operators what differs from the last; note what is done."""
        self._ticks[str(decision.reason)] += 1
        done = {"start": decision.starts, "drain": decision.drains, "flip": decision.flips}
        done["remove"] = decision.removals
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
        actions += [f"give up {worker}" for worker, _ in decision.removals]
        return [Note("info", "scaling", f"{decision.text}: {', '.join(actions)}")]

    def _wake(self) -> Wake:
        return Wake(self._config.tick_s, f"{TAG} {self._model}".rstrip())
