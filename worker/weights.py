"""A worker changes its weights while it serves, and pauses.

The life of an update is in `engine.weights`. Requests that were sent for other weights than these
are given back to their routers (`Refused`, unknown here), which try them elsewhere, or here again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from enum import StrEnum
from math import inf
from typing import Any

from kvrelay.engine.core import EngineCore
from kvrelay.engine.messages import WorkRequest
from kvrelay.engine.node import Effect, NodeId, Note, Send
from kvrelay.engine.plug import Handler, Plug
from kvrelay.engine.request import Refusal
from kvrelay.engine.sequence import SeqState, Sequence
from kvrelay.engine.support import Capability, Trait, no_to
from kvrelay.engine.weights import (
    LoadWeights,
    PauseMode,
    PauseWorker,
    UpdateMode,
    UpdateWeights,
    UseWeights,
    WeightsChanged,
    WeightsLoaded,
    WeightsUpdated,
    WeightsUsed,
)


class Phase(StrEnum):
    IDLE = "idle"
    LOADING = "loading"  # beside the steps
    ENDING = "ending"  # what is under way ends: the step, or with `drain` the requests
    PROBING = "probing"  # no step runs


def weight_updates(plugs: Iterable[Plug]) -> WeightUpdates:
    """Returns those among the plugs of a worker."""
    return next(each for each in plugs if isinstance(each, WeightUpdates))


class WeightUpdates(Plug):
    """Owned by a worker node. Invariant: `update` is None iff IDLE; while PROBING no step is under
    way, and `_row` are the blocks of the probe; a live sequence computes with the weights that its
    router sent it for, or has changed with them."""

    def __init__(
        self,
        core: EngineCore,
        arrivals: Container[tuple[str, int]],
        forget: Callable[[Sequence], list[Effect]],
    ) -> None:
        """`arrivals`: attempts whose KV comes from elsewhere; `forget` ends a sequence."""
        self._core, self._arrivals, self._forget = core, arrivals, forget
        self.version, self.num_changes = core.config.weights, 0
        self.phase = Phase.IDLE
        self.update: UpdateWeights | None = None
        self.why_fixed = ""  # it keeps its weights, and says so
        self.traits = frozenset({Trait.STATES} if core.config.has_states else ())
        self.is_settled: Callable[[], bool] = lambda: core.scheduler.is_settled
        self.pause: PauseMode | None = None  # as an operator has ordered
        self._paused_at = inf
        self._since = 0.0  # when the phase began
        self._load_s = 0.0
        self._row: list[int] = []
        self.handlers: dict[type, Handler] = {
            UpdateWeights: self._on_update,
            WeightsLoaded: self._on_loaded,
            WeightsUsed: self._on_used,
            PauseWorker: self._on_pause,
        }

    @property
    def stops_requests(self) -> bool:
        """Whether those that are under way have to stop before the weights change."""
        update = self.update
        drains = update is None or update.mode is UpdateMode.DRAIN
        return self.phase is Phase.ENDING and not drains

    def advance(self, now: float) -> list[Effect]:
        """Begin the probe once nothing is left that has to end before."""
        update, scheduler = self.update, self._core.scheduler
        if update is None or self.phase is not Phase.ENDING:
            return []
        if update.mode is UpdateMode.DRAIN:
            old = (s for s in self._core.seqs.values() if s.arrived_at <= self._since)
            if any(seq.state is not SeqState.HELD for seq in old):
                if now - self._since < update.drain_s:
                    return []
                self.update = replace(update, mode=UpdateMode.RECOMPUTE)
                self._set_gate()
        if not self.is_settled():
            return []
        self._row = scheduler.take_row()
        self._enter(Phase.PROBING, now)
        if not self._row:
            return self._end(now, "no KV block is free for a probe of the new weights")
        return [UseWeights(update.version.digest, tuple(self._row))]

    def on_router_up(self, router: NodeId) -> list[Effect]:
        """It knows the worker as it began."""
        return [self.announce(router)] if self.num_changes else []

    def on_refused(self, work: WorkRequest) -> list[Effect]:
        """It may be for the weights before."""
        return [self.announce(work.router)] * self._core.is_for_others(work)

    def facts(self) -> dict[str, Any]:
        core, number = self._core, self.num_changes
        changed = {"fingerprint": core.fingerprint, "weights": core.weights} if number else {}
        return {"num_weight_changes": number, **changed}

    def announce(self, router: NodeId) -> Send:
        core, config = self._core, self._core.config
        about = config.node_id, config.epoch, core.fingerprint, core.weights
        return Send(router, WeightsChanged(*about, self.num_changes))

    def _on_update(self, now: float, update: UpdateWeights) -> list[Effect]:
        version = update.version
        if self.update is not None:
            if self.update.version.digest == version.digest:
                return []
            why = f"{self.update.version.name} is being loaded: one update at a time"
            return [self._answer(update, why)]
        if version.digest == self.version.digest or self.why_fixed:
            return [self._answer(update, self.why_fixed)]
        no = no_to(Capability.WEIGHT_UPDATES, self.traits)
        if update.mode is UpdateMode.KEEP and no is not None:
            return [self._answer(update, no.text)]
        self.update = update
        self._enter(Phase.LOADING, now)
        return [LoadWeights(version)]

    def _on_loaded(self, now: float, loaded: WeightsLoaded) -> list[Effect]:
        if self.update is None or self.update.version.digest != loaded.digest:
            return []
        self._load_s = loaded.elapsed_s
        if loaded.why:
            return self._end(now, loaded.why)
        self._enter(Phase.ENDING, now)
        return []

    def _on_used(self, now: float, used: WeightsUsed) -> list[Effect]:
        update, core = self.update, self._core
        assert update is not None
        core.kv.pool.release(self._row, evict_first=True)
        self._row = []
        if used.why:
            return self._end(now, used.why)
        self.version, config = update.version, core.config
        root = self.version.root_key(config.fingerprint, config.base_weights)
        core.compute_with(root, self.version.name)
        self.num_changes += 1
        effects: list[Effect] = [self.announce(router) for router in core.publisher.routers]
        for seq in list(core.seqs.values()):
            effects += self._change(seq, update.mode)
        core.count("weight_updates")
        return effects + self._end(now)

    def _change(self, seq: Sequence, mode: UpdateMode) -> list[Effect]:
        """What becomes of one that began with the old weights."""
        core = self._core
        if seq.state is SeqState.HELD:
            return []  # computed, for one that decodes with the old ones
        begun = seq.num_computed > 0 or seq.num_outputs > 0
        moves = seq.key in self._arrivals or not seq.reserve_growth
        if moves or seq.is_pinned or (begun and seq.sampling.reads_prompt):
            refused = core.refusal(*seq.key, Refusal.UNKNOWN, "the weights have changed")
            return [*self._forget(seq), Send(seq.router, refused)]
        seq.weights = (*seq.weights, (len(seq.tokens), core.weights))
        chain = seq.chain.under(core.fingerprint)
        if seq.state is SeqState.RUNNING and mode is UpdateMode.KEEP:
            seq.next_chain = chain
            return []
        if seq.state is SeqState.RUNNING:
            core.scheduler.recompute(seq)
        seq.chain, seq.num_held, seq.num_had = chain, 0, 0
        return []

    def _on_pause(self, now: float, order: PauseWorker) -> list[Effect]:
        if order.mode is not self.pause:
            self.pause, self._paused_at = order.mode, now
            self._set_gate()
        return []

    def _end(self, now: float, why: str = "") -> list[Effect]:
        update, pause_s = self.update, now - self._since
        assert update is not None
        paused_s = pause_s if self.phase is Phase.PROBING else 0.0
        self.update = None
        self._enter(Phase.IDLE, now)
        text = f"{update.version.name}: {why}" if why else f"{update.version.name} is in use"
        kind = ("error", "weights_not_changed") if why else ("info", "weights_changed")
        return [Note(*kind, text), self._answer(update, why, paused_s)]

    def _answer(self, update: UpdateWeights, why: str = "", pause_s: float = 0.0) -> Send:
        core, config = self._core, self._core.config
        answer = WeightsUpdated(
            config.node_id,
            config.epoch,
            self.version,
            core.fingerprint,
            update.version.digest,
            why,
            self._load_s,
            pause_s,
        )
        return Send(update.reply_to, answer)

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self._since = phase, now
        self._set_gate()

    def _set_gate(self) -> None:
        scheduler, update = self._core.scheduler, self.update
        drains = update is not None and update.mode is UpdateMode.DRAIN
        ends = self.phase is Phase.ENDING
        scheduler.is_paused = (
            self.pause is PauseMode.KEEP or self.phase is Phase.PROBING or (ends and not drains)
        )
        until = self._since if ends and drains else inf
        waits_from = self._paused_at if self.pause is PauseMode.WAIT else inf
        scheduler.admits_until = min(until, waits_from)
