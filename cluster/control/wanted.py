"""One wanted worker, as the controller knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvrelay.cluster.control.messages import AdoptWorker, KeptWorker, StopWorker
from kvrelay.engine.node import Effect, NodeId, Wake
from kvrelay.engine.stats import Role, WorkerInfo
from kvrelay.worker.messages import Peer


class WorkerState(StrEnum):
    DOWN = "down"
    ADOPTING = "adopting"
    STARTING = "starting"
    INTRODUCING = "introducing"
    UP = "up"
    BACKOFF = "backoff"


COMING = (WorkerState.ADOPTING, WorkerState.STARTING)
RUNNING = (*COMING, WorkerState.INTRODUCING, WorkerState.UP)


@dataclass(slots=True)
class Worker:
    """One wanted worker. `waiting_for` is empty unless it is introducing."""

    node: NodeId
    role: Role
    epoch: int
    num_ranks: int = 1  # its processes, each with a GPU where they are used; whatever its role
    state: WorkerState = WorkerState.DOWN
    machine_id: str | None = None
    further: tuple[str, ...] = ()  # other machines, of the rest of its ranks
    avoid: str | None = None
    info: WorkerInfo | None = None
    peer: Peer | None = None
    pid: int = 0
    waiting_for: set[NodeId] = field(default_factory=set)
    failures: int = 0
    restarts: int = 0
    hangs: int = 0  # times that it was ended because it did not answer
    up_at: float = 0.0
    is_announced: bool = False  # routers may believe it up
    is_draining: bool = False  # it is to go when nothing needs it
    comes_back: bool = False  # it is draining, and is started again then
    last_error: str = ""

    @property
    def machines(self) -> tuple[str, ...]:
        """That it was placed on the last time, with as many ranks on each."""
        return () if self.machine_id is None else (self.machine_id, *self.further)

    def keep(self) -> KeptWorker:
        machine_id = self.machine_id or ""
        return KeptWorker(
            self.node,
            self.role,
            self.epoch,
            machine_id,
            self.peer,
            self.pid,
            self.restarts,
            self.is_draining and not self.comes_back,
            self.hangs,
            self.further,
        )

    def adopt(self, kept: KeptWorker, timeout_s: float) -> list[Effect]:
        """Be what an earlier controller knew, if it answers within `timeout_s`."""
        self.role, self.epoch, self.restarts = kept.role, kept.epoch, kept.restarts
        self.is_draining, self.hangs = kept.is_draining, kept.hangs
        if kept.peer is None:
            return [StopWorker(self.node, self.epoch)]
        self.state, self.is_announced = WorkerState.ADOPTING, True
        self.machine_id, self.pid, self.peer = kept.machine_id, kept.pid, kept.peer
        self.further = kept.further
        return [
            AdoptWorker(self.node, self.epoch, kept.peer, kept.machine_id, kept.pid),
            Wake(timeout_s, f"{self.state} {self.epoch} {self.node}"),
        ]
