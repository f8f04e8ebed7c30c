"""The autoscaler at work: routers' counts come in, and every tick the fleet is told what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import structs, to_builtins

from kvrelay.cluster.control.fleet import ControlledFleet, Order
from kvrelay.cluster.control.messages import RequestMachines, ScalingReport
from kvrelay.cluster.control.wanted import Worker
from kvrelay.cluster.scaling.decisions import Decision, Line, Reason
from kvrelay.cluster.scaling.observations import Snapshot
from kvrelay.cluster.scaling.planner import Scaler
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


class Autoscaling:
    """Owned by the controller. Invariant: once begun, exactly one tick is under way."""

    def __init__(self, config: ScalingConfig, num_named: int, wall: Callable[[], float]) -> None:
        """`wall`: returns seconds since 1970."""
        self._config = config
        self._wall = wall
        self.fleet = ControlledFleet(config.pending_timeout_s, num_named)
        self._scaler = Scaler(config, self.fleet)
        self._routers: dict[NodeId, RouterSeen] = {}
        self._seen: dict[NodeId, WorkerSeen] = {}
        self._shown: list[Decision] = []  # those that say something new
        self._ticks: Counter[str] = Counter()  # by reason
        self._actions: Counter[str] = Counter()
        self._machines = 0
        self._has_begun = False
        self._offset_s = 0.0  # from the controller's clock to the wall's

    def start(self) -> list[Effect]:
        """Begin, the first time; then nothing."""
        if self._has_begun:
            return []
        self._has_begun = True
        return [LogScaling(self._scaler.begin()), self._wake()]

    def take(self, now: float, report: ScalingReport) -> None:
        """Ages become times of this clock."""
        router = report.seen.router
        self._routers[router] = structs.replace(report.seen, at_s=now + report.seen.at_s)
        for seen in report.workers:
            dated = structs.replace(seen, at_s=now + seen.at_s)
            known = self._seen.get(seen.worker)
            if known is None or known.at_s <= dated.at_s:
                self._seen[seen.worker] = dated

    def tick(
        self, now: float, workers: Mapping[NodeId, Worker], routers: Collection[NodeId]
    ) -> tuple[list[Order], list[Effect]]:
        """What the controller is to do. `routers`: those that are up."""
        fleet = self.fleet
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
        )
        line = self._scaler.tick(snapshot)
        decision = line.decision
        assert decision is not None
        effects: list[Effect] = [LogScaling(line), self._wake(), *self._show(decision)]
        if decision.machines and decision.machines != self._machines:
            self._machines = decision.machines
            effects.append(RequestMachines(decision.machines))
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
        return Wake(self._config.tick_s, TAG)
