"""What the controller is told, and what it asks for: its messages and its effects.

Whoever runs processes (a runtime) performs the effects and reports back by the messages; each names
the epoch that it is about, so that what comes late is known for what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvrelay.cluster.status import RefusedUpdate
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.engine.weights import NO_VERSION, PauseMode, UpdateMode, WeightVersion
from kvrelay.engine.wire.codec import register
from kvrelay.router.traffic import RouterSeen, WorkerSeen
from kvrelay.worker.messages import Peer


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Effect: start this worker; answered by `WorkerStarted` or `StartFailed`."""

    worker: NodeId
    role: Role
    epoch: int
    machine_id: str
    num_ranks: int = 1  # its processes
    further: tuple[str, ...] = ()  # other machines; the ranks are divided evenly among all
    model: str = ""  # by its name in [[models]]
    weights: WeightVersion | None = None  # in place of the model's own


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Effect: make sure that this epoch of the worker does not run (any more). `gently`: it is
    asked to end, and ended by force only where it does not. `has_heir`: as in `End`."""

    worker: NodeId
    epoch: int
    gently: bool = False
    has_heir: bool = False


@dataclass(frozen=True, slots=True)
class AdoptWorker:
    """Effect: ask a worker that an earlier controller has started whether it lives; answered by
    `WorkerStarted`, or by `WorkerLost` where its process is plainly gone."""

    worker: NodeId
    epoch: int
    peer: Peer
    machine_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerCheckpoint:
    """What the next controller has to know of a worker. `peer`: None if it does not listen yet."""

    worker: NodeId
    role: Role
    epoch: int
    machine_id: str
    peer: Peer | None
    pid: int
    restarts: int = 0
    is_draining: bool = False
    hangs: int = 0
    further: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # where its machines are, in their order; empty: not known
    built: str = ""  # `WorkersConfig.built` when it was started
    settings: str = ""  # a version before compared it, by paths and times
    model: str = ""  # that it serves
    # What it was started with and cannot change, by name: `cluster.processes.life`. {}: unknown.
    fixed: dict[str, str] = field(default_factory=dict)


def differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names that both know, and that have another value: a version may have brought or dropped
    some."""
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """What the next controller has to know of the weights of a model. No digest: they were never
    changed, and nobody has asked for that of the model's own."""

    model: str = ""
    base: WeightVersion = NO_VERSION  # the model's own
    current: WeightVersion = NO_VERSION  # with which workers start
    previous: WeightVersion | None = None
    target: WeightVersion | None = None  # workers get it, one after the other
    mode: UpdateMode = UpdateMode.RECOMPUTE
    number: int = 0  # counts orders
    why: str = ""  # the last one was refused, or stopped
    paused: PauseMode | None = None
    has_paused: bool = False  # ever: those that are up are asked to go on
    refused: RefusedUpdate | None = None  # the last order that was not followed


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What outlives a controller. `routers`: the last epoch of each; `num_named`: where workers
    come and go, numbers below it may have been names; `joined`, `own`: routers that are up,
    of other servers and of the controller's, which versions before have started themselves."""

    workers: tuple[WorkerCheckpoint, ...] = ()
    routers: dict[NodeId, int] = field(default_factory=dict)
    num_named: int = 0
    joined: tuple[RouterStarted, ...] = ()
    weights: tuple[ModelWeights, ...] = ()
    num_machines: int = 0  # that were asked for
    own: tuple[RouterStarted, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """Effect: keep this for the next controller, before any later effect is performed."""

    kept: Checkpoint


@dataclass(frozen=True, slots=True)
class RequestMachines:
    """Effect: ask whoever provides machines for so many."""

    num_machines: int


@dataclass(frozen=True, slots=True)
class ScalingReport:
    """From a router, about once a tick: what has come to it, and what workers have told it. Times
    in it count from when it was sent: they are not above 0."""

    seen: RouterSeen
    workers: tuple[WorkerSeen, ...]
    model: str = ""  # for which that is


@dataclass(frozen=True, slots=True)
class SendPeers:
    """Effect: send `to` where `peers` listen; answered by `PeersUpdated`."""

    to: NodeId
    about: NodeId  # the worker or router whose coming up is the reason
    epoch: int  # that `about` has
    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Effect: the cluster cannot come up at all; `reason` is one line for the user."""

    reason: str


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the cluster that is alive. `machine_id` is the runtime's name for it."""

    machine_id: str
    host: str  # where its workers listen
    num_cpus: float
    num_gpus: float = 0.0
    is_draining: bool = False  # it is about to end: nothing is placed there any more


@dataclass(frozen=True, slots=True)
class MachinesChanged:
    machines: tuple[Machine, ...]


@dataclass(frozen=True, slots=True)
class RestartWorker:
    """From an operator: end this worker and start it again; its requests go on elsewhere."""

    worker: NodeId
    why: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker: NodeId
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class RouterStarted:
    """A router, which its server has started, says where it is."""

    peer: Peer
    http_port: int
    pid: int = 0


@dataclass(frozen=True, slots=True)
class AdoptRouter:
    """Effect: tell a router that an earlier controller knew of this one; answered by
    `RouterStarted`."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class RouterLost:
    router: NodeId
    epoch: int
    reason: str


register(ScalingReport)
