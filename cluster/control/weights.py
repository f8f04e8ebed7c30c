"""Which weights the workers of a model are to have, and how they get them: one after the other.

Life of a rollout: ordered -> each worker that is up is asked, and answers, before the next one is
-> all of them have the new weights: those are the current ones, with which workers start from now
on. Where one fails, it has kept its old weights, and those that had changed go back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.cluster.control.lifecycle import Incarnation, ProcessState
from kvrelay.cluster.control.messages import ModelWeights
from kvrelay.cluster.control.routers import RouterSet
from kvrelay.cluster.control.workers import DesiredWorker, WorkerSet
from kvrelay.cluster.orders import PauseModel, UpdateModel
from kvrelay.cluster.status import RefusedUpdate, WeightsStatus
from kvrelay.engine.node import Effect, NodeId, Note, Send, Wake
from kvrelay.engine.weights import (
    PauseWorker,
    UpdateMode,
    UpdateWeights,
    WeightsUpdated,
    WeightVersion,
)
from kvrelay.worker.messages import Peer

TAG = "weights"
ASK_S = 2.0  # between two questions to the same worker; the second one is ignored
MAX_MISSES = 2  # starts that do not find the current weights
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
        self._misses = 0  # starts that did not find the current ones

    @property
    def wanted(self) -> WeightVersion:
        return self.kept.target or self.kept.current

    @property
    def is_shown(self) -> bool:
        return self.kept.number > 0 or self.kept.has_paused

    def order(self, order: UpdateModel, peers: Iterable[Peer]) -> list[Effect]:
        """An operator wants other weights, or the earlier ones. `peers`: all that have to know of
        versions."""
        kept = replace(self.kept, number=self.kept.number + 1)
        if not kept.current.digest:
            kept = replace(kept, base=order.base, current=order.base)
            self._has = {key: digest or order.base.digest for key, digest in self._has.items()}
        target = kept.previous if order.back else order.version
        if why := self._why_not(kept, target, order.mode, peers):
            refused = RefusedUpdate(kept.number, "" if order.back else order.version.name, why)
            # What is being rolled out goes on as it was, and ends as it would have.
            self.kept = replace(kept, why=kept.why if kept.target else why, refused=refused)
            return [Note("warning", "weights_refused", why)]
        assert target is not None
        if kept.target is None:
            self._pause_s.clear()
            kept = replace(kept, mode=order.mode, why="")
        # One for what is current, as from a job that is tried again, leaves the way back as it is.
        is_current = target.digest == kept.current.digest
        self.kept = replace(kept, target=kept.target or (None if is_current else target))
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

    def missing(self, digest: bytes, why: str, workers: Iterable[DesiredWorker]) -> list[Effect]:
        """A worker has not started, since what it was to compute with is nowhere any more. Where no
        other one has that, or a second start has failed, perhaps on another machine, all go back to
        the weights before, or to the model's own: fewer with each death would serve nobody."""
        kept = self.kept
        if digest != kept.current.digest or digest == kept.base.digest:
            return []
        up = (w.incarnation for w in workers if w.state is ProcessState.UP)
        self._misses += 1
        if self._misses < MAX_MISSES and any(self._has.get(key) == digest for key in up):
            return []
        self._misses = 0
        back = kept.previous if kept.previous not in (None, kept.current) else kept.base
        assert back is not None
        text = f"{kept.current.name} is lost, workers have {back.name} from now on: {why}"
        base = None if back.digest == kept.base.digest else kept.base
        self.kept = replace(kept, current=back, previous=base, target=None, why=text)
        return [Note("error", "weights_missing", text)]

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
            refused=kept.refused,
        )

    def _why_not(
        self,
        kept: ModelWeights,
        target: WeightVersion | None,
        mode: UpdateMode,
        peers: Iterable[Peer],
    ) -> str:
        running = kept.target
        if running is not None:
            is_same = target is not None and target.digest == running.digest and mode is kept.mode
            return "" if is_same else f"{running.name} is being rolled out: wait for its end"
        if target is None:
            return "there are no weights to go back to: none were changed yet"
        for known in filter(None, (kept.base, kept.current, kept.previous)):
            if known.name == target.name and known.digest != target.digest:
                return f"the name {target.name!r} is that of other weights, in {known.place}"
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


class Rollouts(dict[str, Rollout]):
    """Those of all models, by name. Owned by the controller, whose workers and routers it sees."""

    def __init__(
        self, controller: NodeId, config: ControllerConfig, workers: WorkerSet, routers: RouterSet
    ) -> None:
        kept = {each.model: each for each in config.kept.weights}
        for model, own in config.models.items():
            timeout_s = own.start_timeout_s + own.restart_drain_s
            self[model] = Rollout(controller, kept.get(model, ModelWeights(model)), timeout_s)
        self._workers, self._routers = workers, routers
        self.handlers: dict[type, Callable[[float, Any], list[Effect]]] = {
            WeightsUpdated: self._on_updated,
            UpdateModel: self._on_order,
            PauseModel: self._on_pause,
        }

    def begin(self, worker: DesiredWorker) -> WeightVersion | None:
        """Returns what it is started with, in place of its model's weights."""
        rollout = self[worker.model]
        weights = rollout.for_start()
        rollout.begun(worker.incarnation, weights)
        return weights

    def _on_updated(self, now: float, updated: WeightsUpdated) -> list[Effect]:
        self._workers.changed(updated.worker, updated.epoch, updated)
        worker = self._workers.by_name.get(updated.worker)
        return self[worker.model].answered(now, updated) if worker else []

    def _on_order(self, now: float, order: UpdateModel) -> list[Effect]:
        if order.model not in self:
            return []
        own = (w for w in self._workers.by_name.values() if w.model == order.model)
        peers = [worker.peer for worker in own if worker.peer is not None]
        return self[order.model].order(order, [*peers, *self._routers.peers])

    def _on_pause(self, now: float, order: PauseModel) -> list[Effect]:
        if order.model in self:
            self[order.model].pause(order)
        return []
