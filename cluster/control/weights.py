"""Which weights the workers of a model are to have, and how they get them: one after the other.

Life of a rollout: ordered -> each worker that is up is asked, and answers, before the next one is
-> all of them have the new weights: those are the current ones, with which workers start from now
on. Where one fails, it has kept its old weights, and those that had changed go back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvrelay.cluster.control.lifecycle import Incarnation, ProcessState
from kvrelay.cluster.control.messages import ModelWeights, PauseModel, UpdateModel
from kvrelay.cluster.control.workers import DesiredWorker
from kvrelay.cluster.status import WeightsStatus
from kvrelay.engine.node import Effect, NodeId, Note, Send, Wake
from kvrelay.engine.weights import PauseWorker, UpdateWeights, WeightsUpdated, WeightVersion
from kvrelay.worker.messages import Peer

TAG = "weights"
ASK_S = 2.0  # between two questions to the same worker; the second one is ignored
PROTOCOL = 3  # the first that knows of versions


@dataclass(slots=True)
class _Asked:
    worker: Incarnation
    deadline: float


class Rollout:
    """Owned by the controller, for one model. Invariant: at most one worker is asked at a time;
    `kept` is all that the next controller has to know."""

    def __init__(self, controller: NodeId, kept: ModelWeights, timeout_s: float) -> None:
        self._controller = controller
        self.kept = kept
        self._timeout_s = timeout_s
        self._asked: _Asked | None = None
        self._not_before = 0.0  # after a failure
        self._has: dict[Incarnation, bytes] = {}  # digests that workers have answered with
        self._knows_pause: set[Incarnation] = set()  # as it is now
        self._pause_s: list[float] = []

    @property
    def wanted(self) -> WeightVersion:
        return self.kept.target or self.kept.current

    @property
    def is_shown(self) -> bool:
        return self.kept.number > 0 or self.kept.has_paused

    def order(self, order: UpdateModel, peers: Iterable[Peer]) -> list[Effect]:
        """An operator wants other weights, or the earlier ones. `peers`: all that have to know of
        versions."""
        kept = self.kept
        if not kept.current.digest:
            kept = replace(kept, base=order.base, current=order.base)
            self._has = {key: digest or order.base.digest for key, digest in self._has.items()}
        target = kept.previous if order.back else order.version
        kept = replace(kept, number=kept.number + 1, mode=order.mode, why="")
        if why := self._why_not(kept, target, peers):
            self.kept = replace(kept, why=why)
            return [Note("warning", "weights_refused", why)]
        self._pause_s.clear()
        self.kept = replace(kept, target=target)
        return []

    def pause(self, order: PauseModel) -> None:
        self.kept = replace(self.kept, paused=order.mode, has_paused=True)
        self._knows_pause.clear()

    def answered(self, now: float, answer: WeightsUpdated) -> list[Effect]:
        key, asked = (answer.worker, answer.epoch), self._asked
        is_asked = asked is not None and asked.worker == key
        if is_asked or key in self._has:  # also what it was asked for by an earlier order
            self._has[key] = answer.version.digest
        if not is_asked or answer.wanted != self.wanted.digest:
            return []
        self._asked = None
        self._pause_s.append(answer.pause_s)
        return self._failed(now, f"{answer.worker}: {answer.why}") if answer.why else []

    def advance(self, now: float, workers: Iterable[DesiredWorker]) -> list[Effect]:
        """Ask the next worker, or be done."""
        if not self.is_shown:  # as nearly always
            return []
        up = {w.incarnation: w for w in workers if w.state is ProcessState.UP}
        effects: list[Effect] = []
        self._knows_pause &= up.keys()
        for key in sorted(up.keys() - self._knows_pause):
            self._knows_pause.add(key)
            if self.kept.has_paused:
                effects.append(Send(key[0], PauseWorker(self.kept.paused)))
        wanted = self.wanted
        if self._asked is not None:
            if self._asked.worker in up:
                return effects
            self._asked = None  # it was lost: started again it has the current ones
        if not wanted.digest or now < self._not_before:
            return effects
        others = sorted(key for key in up if self._has.get(key) != wanted.digest)
        if others:
            self._asked = _Asked(others[0], now + self._timeout_s)
            return [*effects, *self._ask()]
        kept = self.kept
        if kept.target is not None and up:
            self.kept = replace(kept, previous=kept.current, current=wanted, target=None)
            text = f"all workers compute with {wanted.name}"
            effects.append(Note("info", "weights_updated", text))
        return effects

    def woken(self, now: float) -> list[Effect]:
        """Some time has passed since a worker was asked, or has failed."""
        if self._asked is None:
            return []
        if now < self._asked.deadline:
            return self._ask()
        worker, self._asked = self._asked.worker[0], None
        return self._failed(now, f"{worker} has not answered within {self._timeout_s:g} s")

    def begun(self, worker: Incarnation, weights: WeightVersion | None) -> None:
        """It was started with these; None: with those of the model."""
        self._has = {key: each for key, each in self._has.items() if key[0] != worker[0]}
        self._has[worker] = (weights or self.kept.base).digest

    def for_start(self) -> WeightVersion | None:
        """What a worker is started with."""
        kept = self.kept
        return None if kept.current.digest == kept.base.digest else kept.current

    def view(self) -> WeightsStatus:
        kept = self.kept
        state = "updating" if kept.target else "stopped" if kept.why else "done"
        return WeightsStatus(
            model=kept.model,
            number=kept.number,
            state=state if kept.number else "",
            current=kept.current.name or None,
            previous=kept.previous.name if kept.previous else None,
            target=kept.target.name if kept.target else None,
            mode=str(kept.mode) if kept.number else None,
            why=kept.why,
            paused=str(kept.paused) if kept.paused else None,
            pause_s=max(self._pause_s, default=None),
        )

    def _why_not(
        self, kept: ModelWeights, target: WeightVersion | None, peers: Iterable[Peer]
    ) -> str:
        if kept.target is not None:
            return f"{kept.target.name} is being rolled out: wait for its end"
        if target is None:
            return "there are no weights to go back to: none were changed yet"
        for known in filter(None, (kept.base, kept.current, kept.previous)):
            if known.name == target.name and known.digest != target.digest:
                return f"the name {target.name!r} is that of other weights, in {known.path}"
        old = [peer.node for peer in peers if peer.protocol < PROTOCOL]
        return f"{', '.join(old)}: of an earlier version; restart them first" if old else ""

    def _ask(self) -> list[Effect]:
        assert self._asked is not None
        update = UpdateWeights(self._controller, self.wanted, self.kept.mode, self._timeout_s / 2)
        return [Send(self._asked.worker[0], update), Wake(ASK_S, f"{TAG} {self.kept.model}")]

    def _failed(self, now: float, why: str) -> list[Effect]:
        self._not_before = now + ASK_S
        self.kept = replace(self.kept, target=None, why=why)
        wake = Wake(ASK_S, f"{TAG} {self.kept.model}")
        return [Note("error", "weights_stopped", why), wake]
