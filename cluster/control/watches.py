"""Workers that the controller asks again and again: those that are to go, and those that routers
complain of.

Life of a drain: every router that is up says what it still has there, again and again; the worker
says what it still does. Twice in a row nothing -> it is empty. Twice, because a message to the
worker may be under way while it answers. What is not empty in time goes all the same, and its
streams go on elsewhere as after a failure.

Life of a suspicion: a router hears nothing of a worker that is up, or hears that it makes no
progress -> the worker is asked, each second -> it answers that it makes some: all is well, and
routers that complained subscribe again, since they may only have been forgotten; or routers
complain no more; or the grace is over: the worker is ended. It may be stopped, so that nothing but
its end by force helps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvrelay.cluster.control.lifecycle import Incarnation
from kvrelay.engine.node import Effect, NodeId, Send, Wake
from kvrelay.engine.stats import Progress, ProgressReport, ProgressRequest, RouterUp
from kvrelay.router.messages import DrainReport, WorkerDraining, WorkerSuspected

DRAIN_TAG, SUSPECT_TAG = "drain", "suspect"
LOOK_S = 0.25  # between two looks at a worker that drains
NUM_CLEAN = 2  # looks in a row
ASK_S = 1.0  # between two questions to a suspect
CALM_S = 3.0  # without a complaint: it is over


@dataclass(slots=True)
class _Drain:
    deadline: float
    timeout_s: float
    left: dict[NodeId, int | None] = field(default_factory=dict)  # by router; None: not said yet
    num_busy: int | None = None  # what the worker itself says
    num_clean: int = 0


class Drains:
    """Owned by the controller. Invariant: each drain has exactly one wake-up under way."""

    def __init__(self, controller: NodeId) -> None:
        self._controller = controller
        self._drains: dict[Incarnation, _Drain] = {}

    def begin(
        self, now: float, key: Incarnation, routers: Iterable[NodeId], timeout_s: float
    ) -> list[Effect]:
        """`key`: a worker that is up."""
        if key in self._drains:
            return []
        drain = self._drains[key] = _Drain(now + timeout_s, timeout_s)
        return self._ask(key, drain, routers)

    def forget(self, key: Incarnation) -> None:
        """It is not up any more."""
        self._drains.pop(key, None)

    def reported(self, report: DrainReport) -> None:
        drain = self._drains.get((report.worker, report.epoch))
        if drain is not None and report.router in drain.left:
            drain.left[report.router] = report.num_requests

    def answered(self, report: ProgressReport) -> None:
        drain = self._drains.get((report.worker, report.epoch))
        if drain is not None:
            drain.num_busy = report.num_busy

    def woken(
        self, now: float, key: Incarnation, routers: Iterable[NodeId]
    ) -> tuple[str, list[Effect]]:
        """(why the worker may go now; "": it may not yet, effects)."""
        drain = self._drains.get(key)
        if drain is None:
            return "", []
        routers = list(routers)
        # A router that is gone takes its requests with it.
        is_clean = drain.num_busy == 0 and all(drain.left.get(router) == 0 for router in routers)
        drain.num_clean = drain.num_clean + 1 if is_clean else 0
        if drain.num_clean >= NUM_CLEAN:
            del self._drains[key]
            return "drained", []
        if now >= drain.deadline:
            del self._drains[key]
            return f"not empty {drain.timeout_s:g} s after it was to go", []
        return "", self._ask(key, drain, routers)

    def _ask(self, key: Incarnation, drain: _Drain, routers: Iterable[NodeId]) -> list[Effect]:
        worker, epoch = key
        drain.left = dict.fromkeys(routers)
        drain.num_busy = None
        asked: list[Effect] = [Send(each, WorkerDraining(worker, epoch)) for each in drain.left]
        asked.append(Send(worker, ProgressRequest(self._controller)))
        return [*asked, Wake(LOOK_S, f"{DRAIN_TAG} {epoch} {worker}")]


@dataclass(slots=True)
class _Suspicion:
    why: str
    complained_at: float  # last
    routers: set[NodeId] = field(default_factory=set)
    num_asked: int = 1


class Suspects:
    """Owned by the controller. Invariant: each suspicion has exactly one wake-up under way."""

    def __init__(self, controller: NodeId, grace_s: float) -> None:
        self._controller = controller
        self._grace_s = grace_s
        self._suspicions: dict[Incarnation, _Suspicion] = {}

    def complain(self, now: float, complaint: WorkerSuspected) -> list[Effect]:
        """It is about a worker that is up."""
        key = (complaint.worker, complaint.epoch)
        known = self._suspicions.get(key)
        if known is not None:
            known.complained_at, known.why = now, complaint.why
            known.routers.add(complaint.router)
            return []
        self._suspicions[key] = _Suspicion(complaint.why, now, {complaint.router})
        return self._ask(key)

    def answered(self, report: ProgressReport) -> list[Effect]:
        key = (report.worker, report.epoch)
        if report.progress is Progress.NONE or key not in self._suspicions:
            return []
        routers = sorted(self._suspicions.pop(key).routers)
        return [Send(report.worker, RouterUp(router)) for router in routers]

    def woken(self, now: float, key: Incarnation) -> tuple[str, list[Effect]]:
        """(why the worker is to be ended; "": it is not, effects). Time counts in questions: a
        controller that was stopped itself has asked none."""
        suspicion = self._suspicions.get(key)
        if suspicion is None:
            return "", []
        if now - suspicion.complained_at > CALM_S:
            del self._suspicions[key]
            return "", []
        if suspicion.num_asked * ASK_S >= self._grace_s:
            del self._suspicions[key]
            return f"{suspicion.why}, and it does not answer", []
        suspicion.num_asked += 1
        return "", self._ask(key)

    def forget(self, key: Incarnation) -> None:
        """It is not up any more."""
        self._suspicions.pop(key, None)

    def _ask(self, key: Incarnation) -> list[Effect]:
        worker, epoch = key
        question = Send(worker, ProgressRequest(self._controller))
        return [question, Wake(ASK_S, f"{SUSPECT_TAG} {epoch} {worker}")]
