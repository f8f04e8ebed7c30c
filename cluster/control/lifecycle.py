"""The life of a worker's or router's process, as the controller sees it.

    down -> starting -> introducing -> up -> draining
             |              |          |         |
             +--------------+----------+---------+--> backoff -> starting (next epoch) ...

One that outlived the controller that started it begins with `adopting` instead of `starting`. A
process is introduced before it is used: others learn where it listens, and it where they do. A
worker that is lost is started again after a pause that grows with its failures and shrinks back
once it has held out; a router, by its server. One that is wanted no more is `gone`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Generic, TypeVar

from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.engine.node import Effect, NodeId, Wake
from kvrelay.worker.messages import Peer

Incarnation = tuple[NodeId, int]
"""A worker or router, and its epoch."""


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

    tag: ClassVar[str]  # its wake-ups begin with this

    def __init__(self, config: ControllerConfig) -> None:
        self.config = config
        self.by_name: dict[NodeId, P] = {}

    @abstractmethod
    def overdue(self, now: float, process: P) -> list[Effect]:
        """It has been in its state for as long as it may."""

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
        state, epoch, node = tag.removeprefix(self.tag).split(" ", 2)
        process = self.current(node, int(epoch), ProcessState(state))
        return self.overdue(now, process) if process else []
