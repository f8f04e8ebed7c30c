"""The life of a worker's or router's process, and what the controller does alike with both.

    down -> starting -> introducing -> up -> draining
             |              |          |         |
             +--------------+----------+---------+--> backoff -> starting (next epoch) ...

One that outlived the controller that started it begins with `adopting` instead of `starting`. A
process is introduced before it is used: others learn where it listens, and it where they do. One
that is lost is started again after a pause that grows with its failures and shrinks back once it
has held out. One that is wanted no more is `gone`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Generic, TypeVar

from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.cluster.control.messages import GiveUp, StopRouter, StopWorker
from kvrelay.engine.backoff import Backoff
from kvrelay.engine.node import Effect, NodeId, Note, Wake
from kvrelay.worker.messages import Peer

Incarnation = tuple[NodeId, int]
"""A worker or router, and its epoch."""


MAX_DOUBLED = 2  # how often the time of a start is doubled


class ProcessState(StrEnum):
    DOWN = "down"  # there is no place for it, or it was never started
    ADOPTING = "adopting"  # it runs, perhaps, and has not answered this controller yet
    STARTING = "starting"
    INTRODUCING = "introducing"  # it listens
    UP = "up"
    DRAINING = "draining"  # up, and it is to end when nothing needs it
    BACKOFF = "backoff"
    GONE = "gone"


class ProcessEvent(StrEnum):
    START = "start"  # its next epoch is ordered
    ADOPT = "adopt"
    NO_ROOM = "no room"  # it cannot be started before the machines change
    HOLD = "hold"  # others have failed: it is not started at once
    LISTENS = "listens"
    INTRODUCED = "introduced"  # all whom it needs know it, and it knows them
    DRAIN = "drain"
    END = "end"  # it did not start, was lost, or is to come back
    REMOVE = "remove"  # it is wanted no more


_S, _E = ProcessState, ProcessEvent
COMING = (_S.ADOPTING, _S.STARTING)
SERVING = (_S.UP, _S.DRAINING)
RUNNING = (*COMING, _S.INTRODUCING, *SERVING)

TRANSITIONS: dict[tuple[ProcessState, ProcessEvent], ProcessState] = {
    (_S.DOWN, _E.START): _S.STARTING,
    (_S.DOWN, _E.ADOPT): _S.ADOPTING,
    (_S.DOWN, _E.NO_ROOM): _S.DOWN,
    (_S.DOWN, _E.HOLD): _S.BACKOFF,
    (_S.ADOPTING, _E.LISTENS): _S.INTRODUCING,
    (_S.STARTING, _E.LISTENS): _S.INTRODUCING,
    (_S.INTRODUCING, _E.INTRODUCED): _S.UP,
    (_S.UP, _E.DRAIN): _S.DRAINING,
    (_S.DRAINING, _E.DRAIN): _S.DRAINING,
    (_S.BACKOFF, _E.START): _S.STARTING,
    (_S.BACKOFF, _E.NO_ROOM): _S.DOWN,
    **{(state, _E.END): _S.BACKOFF for state in RUNNING},
    **{(state, _E.REMOVE): _S.GONE for state in (*RUNNING, _S.DOWN, _S.BACKOFF)},
}


class IllegalTransition(AssertionError):
    """Our bug: the table has no such transition. Nothing was changed."""


@dataclass(slots=True)
class DesiredProcess:
    """A process that is wanted. Invariant: `waiting_for` is empty unless it is introducing."""

    node: NodeId
    epoch: int = 0
    state: ProcessState = ProcessState.DOWN
    peer: Peer | None = None  # while it listens
    pid: int = 0
    failures: int = 0  # in a row
    restarts: int = 0
    up_at: float = 0.0
    last_error: str = ""
    waiting_for: set[NodeId] = field(default_factory=set)  # who has not got its address yet

    @property
    def incarnation(self) -> Incarnation:
        return self.node, self.epoch

    @property
    def is_serving(self) -> bool:
        return self.state in SERVING

    def on(self, event: ProcessEvent) -> None:
        """Take the transition. Raises IllegalTransition."""
        if (self.state, event) not in TRANSITIONS:
            raise IllegalTransition(f"{self.node}: {event} in state {self.state}")
        self.state = TRANSITIONS[self.state, event]

    def end(self, event: ProcessEvent) -> None:
        """`event`: whether it is to come back."""
        self.on(event)
        self.waiting_for.clear()
        self.peer = None
        self.pid = 0  # nobody's: the kernel may give it to another process


P = TypeVar("P", bound=DesiredProcess)


class ProcessSet(ABC, Generic[P]):
    """The processes of one kind, by name. Owned by the controller. Invariant: at most one epoch of
    each runs, the latest."""

    kind: ClassVar[str]
    tag: ClassVar[str]  # its wake-ups begin with this
    stop: ClassVar[type[StopWorker | StopRouter]]

    def __init__(self, config: ControllerConfig) -> None:
        self.config = config
        self.by_name: dict[NodeId, P] = {}
        self.backoff = Backoff(config.backoff_s, config.max_backoff_s)
        self._gave_up = False

    @abstractmethod
    def start(self, process: P) -> list[Effect]:
        """Order its next epoch, if there is a place for it."""

    @abstractmethod
    def lost(self, now: float, process: P, reason: str) -> list[Effect]:
        """End it, and start it again after a pause."""

    @abstractmethod
    def why_none(self, process: P, reason: str) -> str:
        """What the user reads if `process` cannot start; "" if it is none of the first that do."""

    def current(self, node: NodeId, epoch: int, *states: ProcessState) -> P | None:
        """The process, if `epoch` is its latest and it is in one of `states`; else whatever was
        said of it is out of date."""
        process = self.by_name.get(node)
        if process is None or process.epoch != epoch or process.state not in states:
            return None
        return process

    def wake(self, after_s: float, process: P) -> Wake:
        """For `woken`, which ignores it if `process` is in another state by then."""
        return Wake(after_s, f"{self.tag}{process.state} {process.epoch} {process.node}")

    def woken(self, now: float, tag: str) -> list[Effect]:
        """A process has been in its state for as long as it may."""
        state, epoch, node = tag.removeprefix(self.tag).split(" ", 2)
        process = self.current(node, int(epoch), ProcessState(state))
        if process is None:
            return []
        if process.state is ProcessState.BACKOFF:
            return self.start(process)
        if process.state is ProcessState.STARTING:
            reason = f"did not start within {self.start_s(process):g} s"
            return self.failed(now, process, reason, permanent=False)
        if process.state is ProcessState.ADOPTING:
            reason = "did not answer the controller that came after its own"
        else:
            reason = f"not introduced to {', '.join(sorted(process.waiting_for))} in time"
        return self.lost(now, process, reason)

    def begin(self, process: P) -> Wake:
        """Its next epoch starts; the effect that bounds how long it may take."""
        process.on(ProcessEvent.START)
        process.epoch += 1
        return self.wake(self.start_s(process), process)

    def start_s(self, process: P) -> float:
        """How long its start may take: longer after each failure, since a start that is ended
        begins anew, and on a machine that is busy none would come to its end."""
        return float(self.config.start_timeout_s * 2 ** min(process.failures, MAX_DOUBLED))

    def failed(self, now: float, process: P, reason: str, permanent: bool) -> list[Effect]:
        """It did not start. `permanent`: it would fail again in the same way."""
        effects = self.lost(now, process, reason)
        hopeless = permanent or process.failures >= self.config.max_first_failures
        why = self.why_none(process, reason)
        if hopeless and why and not self._gave_up:
            self._gave_up = True
            effects.append(GiveUp(why))
        return effects

    def back_off(self, now: float, process: P, reason: str) -> list[Effect]:
        """The part of `lost` that all have in common."""
        if process.is_serving and now - process.up_at >= self.config.stable_s:
            process.failures = 0
        process.end(ProcessEvent.END)
        process.failures += 1
        process.restarts += 1
        process.last_error = reason
        pause_s = self.backoff.pause_s(process.failures)
        text = f"{process.node} (epoch {process.epoch}) is gone: {reason}; again in {pause_s:g} s"
        return [
            Note("warning", f"{self.kind}_lost", text),
            self.stop(process.node, process.epoch),
            self.wake(pause_s, process),
        ]
