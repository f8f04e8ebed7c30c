"""What operators may order of a server. An order is written here and where it is obeyed; whoever
hosts the router passes it on, to the supervisor or to the controller by what it is.

An order only begins something: how that goes is in the log and in the status."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvrelay.cluster.config import ModelEntry
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.engine.weights import PauseMode, UpdateMode, WeightVersion
from kvrelay.engine.wire import channel, codec


class OrderRefused(Exception):
    """It cannot be begun; one line for the operator."""


class UnknownWorker(OrderRefused):
    """It names a worker that there is not."""


class ControllerAway(Exception):
    """What only the controller knows or does cannot be had now."""


class Service(StrEnum):
    """What may be ordered of the whole server."""

    DRAIN = "drain"  # finish what is there, and end
    RESTART = "restart"  # every process, one after the other
    ROLLBACK = "rollback"  # a restart with the version and settings of before


@dataclass(frozen=True, slots=True)
class ServiceRequest:
    service: str  # a Service


@dataclass(frozen=True, slots=True)
class ChangeModels:
    """Add a model, or (no entry) remove one, whose requests have `drain_s` to end."""

    name: str
    entry: ModelEntry | None
    drain_s: float | None = None  # None: `cluster.drain_s`


@dataclass(frozen=True, slots=True)
class SetRole:
    """What routers prefer the worker for from now on, also after a restart."""

    worker: NodeId
    role: Role


@dataclass(frozen=True, slots=True)
class UpdateModel:
    """The workers of `model` are to compute with `version`, or with `back` with those before the
    last change. `base`: the model's own weights. Whoever passes it on reads the digests."""

    model: str
    base: WeightVersion
    version: WeightVersion
    mode: UpdateMode
    back: bool = False


@dataclass(frozen=True, slots=True)
class PauseModel:
    """The workers of `model` are to pause, or (None) to go on."""

    model: str
    mode: PauseMode | None


OfServer = ServiceRequest | ChangeModels
"""Obeyed by the supervisor."""
OfWorkers = SetRole | UpdateModel | PauseModel
"""Obeyed by the controller."""
Order = OfServer | OfWorkers

channel.register(ServiceRequest, ChangeModels)
codec.register(SetRole)
codec.register(UpdateModel, PauseModel, since=3)
