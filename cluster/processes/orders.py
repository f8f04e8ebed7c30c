"""What the supervisor and its processes say to each other, beside the controller's messages and
what operators order (`cluster.orders`): over channels (`engine.wire.channel`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.cluster.config import Config
from kvrelay.cluster.control.lease import LeaseKey
from kvrelay.cluster.control.messages import Machine, RouterLost, RouterStarted
from kvrelay.cluster.status import RestartStatus
from kvrelay.engine.node import NodeId
from kvrelay.engine.wire import channel
from kvrelay.worker.messages import Peer
from kvrelay.worker.process import Listening


@dataclass(frozen=True, slots=True)
class LeaseOrder:
    """`fd`: by its number, what says until when the controller may give orders (`life.Deadline`),
    also while nothing else gets through to it."""

    key: LeaseKey
    term: int
    fd: int


@dataclass(frozen=True, slots=True)
class Leads:
    """To the controller: the lease was renewed. `is_kept`: the store has its checkpoint."""

    is_kept: bool


@dataclass(frozen=True, slots=True)
class ControllerListens:
    """From the controller: where routers find it."""

    controller: Peer


@dataclass(frozen=True, slots=True)
class Follow:
    """To a router: this is the controller now, perhaps of another server."""

    controller: Peer


@dataclass(frozen=True, slots=True)
class ControlSpec:
    """Everything that a process needs to become the controller."""

    cluster: str
    epoch: int
    config: Config
    kept_file: Path
    listening: Listening
    host: str  # where it listens
    routers: tuple[NodeId, ...]  # of this server
    running_routers: tuple[RouterStarted, ...]  # those of them that run
    lease: LeaseOrder | None = None  # None: there is one server, and nothing to lead
    restart: RestartStatus = field(default_factory=RestartStatus)
    here: Machine | None = None  # where workers are started before Ray is up


@dataclass(frozen=True, slots=True)
class StartupProgress:
    """To the supervisor: how far a part of the cluster is."""

    part: str
    state: str
    is_up: bool


@dataclass(frozen=True, slots=True)
class AllUp:
    """To the supervisor, once: all workers and routers are up. `lines`: for the user;
    `num_outdated`: workers that another version or other settings have started."""

    lines: tuple[str, ...]
    num_outdated: int = 0


@dataclass(frozen=True, slots=True)
class Serves:
    """From a router: its API takes requests."""

    router: NodeId


@dataclass(frozen=True, slots=True)
class RouterLoaded:
    """From the process that is to succeed a router: it can serve at once."""

    router: NodeId


@dataclass(frozen=True, slots=True)
class ModelsUsed:
    """From a router: it has done `UseModels` of that number."""

    router: NodeId
    number: int


@dataclass(frozen=True, slots=True)
class GaveUp:
    """It cannot do what it is for, and would fail again in the same way; one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Take nothing new, finish what is there within `drain_s`, and end."""

    drain_s: float = 0.0
    refuse: bool = True  # what is new is refused; else it waits for who listens there next
    keep_workers: bool = False  # for the next controller; else they end too


@dataclass(frozen=True, slots=True)
class Reload:
    """To a router: read the tenants' files again."""


@dataclass(frozen=True, slots=True)
class RestartWorkers:
    """To the controller: one after the other; answered by `WorkersRestarted`."""

    only_outdated: bool = False  # those that another version or other settings have started


@dataclass(frozen=True, slots=True)
class WorkersRestarted:
    """`why_not`: empty if all are up again."""

    why_not: str


channel.register(RouterLost, RouterStarted)
channel.register(RestartStatus)  # to the controller, which shows it
channel.register(ControlSpec, StartupProgress, AllUp, Serves, GaveUp)
channel.register(Stop, Reload, RestartWorkers, WorkersRestarted)
channel.register(Leads, ControllerListens, Follow, ModelsUsed, RouterLoaded)
