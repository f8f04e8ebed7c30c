"""Weights that change in place in all ranks of a worker, between the same two steps, or in none.

Life of an update: the leader asks all ranks to load the new weights, each its part, beside its
steps -> all have answered -> no step runs, and the leader asks all to take them; each keeps those
before -> all have answered -> one step of all ranks is the probe -> the leader says whether they
keep the new ones. A rank that ends on the way takes the worker with it, as at any time; the next
one begins with the weights that are current in the cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.parallel.ops import COLLECTIVE_TIMEOUT_S, LOAD_TIMEOUT_S
from kvrelay.engine.model.versions import Versions
from kvrelay.engine.priority import lower_priority
from kvrelay.engine.weights import LoadWeights, UseWeights


@dataclass(frozen=True, slots=True)
class ChangeRank:
    """From the leader to each other rank; answered by `RankChanged` of the same number."""

    number: int
    request: LoadWeights | UseWeights


@dataclass(frozen=True, slots=True)
class RankChanged:
    number: int
    why: str = ""  # it has not


@dataclass(frozen=True, slots=True)
class ForgetLoaded:
    """From the leader: what was loaded last is not used."""


@dataclass(frozen=True, slots=True)
class SettleRank:
    """From the leader, behind the probe: these weights stay, or the ones before are back."""

    keep: bool


def is_of_loading(message: Any) -> bool:
    """Whether it is for `RankUpdates.load`."""
    loads = isinstance(message, ChangeRank) and isinstance(message.request, LoadWeights)
    return loads or isinstance(message, ForgetLoaded)


class LeaderVersions(Versions):
    """As Versions, for all ranks of a worker. Invariant: between two calls all have the same
    weights, or the worker is lost."""

    def __init__(self, runner: Any) -> None:
        """Takes a ParallelRunner, and changes all of its ranks."""
        super().__init__(runner)
        self._ranks, self._numbers = runner, count(1)

    def load(self, request: LoadWeights) -> None:
        number, loaded = self._ask(request), False
        try:
            try:
                super().load(request)
            finally:  # none loads any more when this returns
                self._wait(number, LOAD_TIMEOUT_S)
            loaded = True
        finally:
            if not loaded:
                self.forget()
                self._ranks.tell(ForgetLoaded())

    def _use(self, request: UseWeights) -> None:
        keep, self._asked = False, self._ask(request)
        try:
            super()._use(request)
            keep = True
        finally:
            self._ranks.tell(SettleRank(keep))

    def _probe(self, request: UseWeights) -> None:
        self._wait(self._asked, COLLECTIVE_TIMEOUT_S)
        super()._probe(request)

    def _ask(self, request: LoadWeights | UseWeights) -> int:
        number = next(self._numbers)
        self._ranks.tell(ChangeRank(number, request))
        return number

    def _wait(self, number: int, timeout_s: float) -> None:
        """Until all have answered. Raises ModelError if one has not done it, OSError."""
        whys = self._ranks.changed(number, timeout_s)
        if found := next((why for why in whys if why), ""):
            raise ModelError(found)


class RankUpdates:
    """Those of a follower. It loads on a thread of its own; the others are called between steps."""

    def __init__(self, runner: Any, tell: Callable[[Any], None]) -> None:
        self._versions, self._tell = Versions(runner), tell
        self._undo: Callable[[], None] | None = None  # while it is not settled
        self._loads = ThreadPoolExecutor(1, "weights", initializer=lower_priority)

    def load(self, message: ChangeRank | ForgetLoaded) -> None:
        """Called from one thread, which does not wait for it."""
        self._loads.submit(self._change, message)

    def take(self, message: ChangeRank | SettleRank) -> None:
        """Takes what was loaded, or settles that it did; no step runs meanwhile."""
        if isinstance(message, ChangeRank):
            self._change(message)
            return
        undo, self._undo = self._undo, None
        if undo is not None and not message.keep:
            undo()

    def _change(self, message: ChangeRank | ForgetLoaded) -> None:
        if isinstance(message, ForgetLoaded):
            self._versions.forget()
            return
        request, why = message.request, ""
        try:
            if isinstance(request, LoadWeights):
                self._versions.load(request)
            else:
                self._undo = self._versions.swap()
        except Exception as error:
            why = " ".join(str(error).splitlines()[:1]) or type(error).__name__
        self._tell(RankChanged(message.number, why))
