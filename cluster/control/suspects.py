"""Workers that routers complain of, until they have answered for themselves or are ended.

Life of a suspicion: a router hears nothing of a worker that is up, or hears that it makes no
progress -> the worker is asked, each second -> it answers that it makes some: all is well, and
routers that complained subscribe again, since they may only have been forgotten; or routers
complain no more; or the grace is over: the worker is ended. It may be stopped, so that nothing but
its end by force helps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.engine.node import Effect, NodeId, Send, Wake
from kvrelay.engine.stats import Progress, ProgressReport, ProgressRequest, RouterUp
from kvrelay.router.messages import WorkerSuspected

TAG = "suspect"
ASK_S = 1.0  # between two questions
CALM_S = 3.0  # without a complaint: it is over

Life = tuple[NodeId, int]  # a worker and its epoch


@dataclass(slots=True)
class _Suspicion:
    why: str
    complained_at: float  # last
    routers: set[NodeId] = field(default_factory=set)
    num_asked: int = 1


class Suspects:
    """Owned by the controller. Invariant: of each suspicion exactly one wake-up is under way."""

    def __init__(self, controller: NodeId, grace_s: float) -> None:
        self._controller = controller
        self._grace_s = grace_s
        self._suspicions: dict[Life, _Suspicion] = {}

    def complain(self, now: float, told: WorkerSuspected) -> list[Effect]:
        """Of a worker that is up."""
        life = (told.worker, told.epoch)
        known = self._suspicions.get(life)
        if known is not None:
            known.complained_at, known.why = now, told.why
            known.routers.add(told.router)
            return []
        self._suspicions[life] = _Suspicion(told.why, now, {told.router})
        return self._ask(life)

    def answered(self, report: ProgressReport) -> list[Effect]:
        life = (report.worker, report.epoch)
        if report.progress is Progress.NONE or life not in self._suspicions:
            return []
        routers = sorted(self._suspicions.pop(life).routers)
        return [Send(report.worker, RouterUp(router)) for router in routers]

    def woken(self, now: float, life: Life) -> tuple[str, list[Effect]]:
        """(why the worker is to be ended; "": it is not, effects). Time counts in questions: a
        controller that was stopped itself has asked none."""
        suspicion = self._suspicions.get(life)
        if suspicion is None:
            return "", []
        if now - suspicion.complained_at > CALM_S:
            del self._suspicions[life]
            return "", []
        if suspicion.num_asked * ASK_S >= self._grace_s:
            del self._suspicions[life]
            return f"{suspicion.why}, and it does not answer", []
        suspicion.num_asked += 1
        return "", self._ask(life)

    def forget(self, life: Life) -> None:
        """It is up no more."""
        self._suspicions.pop(life, None)

    def _ask(self, life: Life) -> list[Effect]:
        worker, epoch = life
        question = Send(worker, ProgressRequest(self._controller))
        return [question, Wake(ASK_S, f"{TAG} {epoch} {worker}")]
