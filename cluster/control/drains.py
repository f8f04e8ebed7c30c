"""Workers that are to go: watched until nothing needs them.

Life of a drain: every router that is up is told, again and again, and says what it still has
there; the worker says what it still does. Twice in a row nothing -> it is empty. Twice, because a
message to the worker may be under way while it answers. What is not empty in time goes all the
same, and its streams go on elsewhere as after a failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvrelay.engine.node import Effect, NodeId, Send, Wake
from kvrelay.engine.stats import ProgressReport, ProgressRequest
from kvrelay.router.messages import DrainReport, WorkerDraining

TAG = "drain"
LOOK_S = 0.25
NUM_CLEAN = 2  # looks in a row

Life = tuple[NodeId, int]  # a worker and its epoch


@dataclass(slots=True)
class _Drain:
    deadline: float
    timeout_s: float
    left: dict[NodeId, int | None] = field(default_factory=dict)  # by router; None: not said yet
    num_busy: int | None = None  # of the worker itself
    num_clean: int = 0


class Drains:
    """Owned by the controller. Invariant: of each drain exactly one wake-up is under way."""

    def __init__(self, controller: NodeId) -> None:
        self._controller = controller
        self._drains: dict[Life, _Drain] = {}

    def begin(
        self, now: float, life: Life, routers: Iterable[NodeId], timeout_s: float
    ) -> list[Effect]:
        """Of a worker that is up."""
        if life in self._drains:
            return []
        drain = self._drains[life] = _Drain(now + timeout_s, timeout_s)
        return self._ask(life, drain, routers)

    def forget(self, life: Life) -> None:
        """It is up no more."""
        self._drains.pop(life, None)

    def reported(self, report: DrainReport) -> None:
        drain = self._drains.get((report.worker, report.epoch))
        if drain is not None and report.router in drain.left:
            drain.left[report.router] = report.num_requests

    def answered(self, report: ProgressReport) -> None:
        drain = self._drains.get((report.worker, report.epoch))
        if drain is not None:
            drain.num_busy = report.num_busy

    def woken(self, now: float, life: Life, routers: Iterable[NodeId]) -> tuple[str, list[Effect]]:
        """(why the worker may go now; "": it may not yet, effects)."""
        drain = self._drains.get(life)
        if drain is None:
            return "", []
        routers = list(routers)
        # A router that is gone takes its requests with it.
        is_clean = drain.num_busy == 0 and all(drain.left.get(router) == 0 for router in routers)
        drain.num_clean = drain.num_clean + 1 if is_clean else 0
        if drain.num_clean >= NUM_CLEAN:
            del self._drains[life]
            return "drained", []
        if now >= drain.deadline:
            del self._drains[life]
            return f"not empty {drain.timeout_s:g} s after it was to go", []
        return "", self._ask(life, drain, routers)

    def _ask(self, life: Life, drain: _Drain, routers: Iterable[NodeId]) -> list[Effect]:
        worker, epoch = life
        drain.left = dict.fromkeys(routers)
        drain.num_busy = None
        asked: list[Effect] = [Send(each, WorkerDraining(worker, epoch)) for each in drain.left]
        asked.append(Send(worker, ProgressRequest(self._controller)))
        return [*asked, Wake(LOOK_S, f"{TAG} {epoch} {worker}")]
