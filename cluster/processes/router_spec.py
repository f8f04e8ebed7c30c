"""What a router's process is to be, as the supervisor says it, which imports nothing that a router
computes with."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.cluster.api.listening import PortTaken, bind_socket
from kvrelay.cluster.api.tenants import Access
from kvrelay.cluster.config import Config
from kvrelay.cluster.prepare import PreparedModels
from kvrelay.engine.node import NodeId
from kvrelay.engine.wire import channel
from kvrelay.worker.process import Listening

SHUTDOWN_S = 5.0  # live requests have this long to finish, beyond what they were given before


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What an API has to know of its model."""

    path: Path
    served_name: str
    max_model_len: int  # tokens, prompt and output together

    @classmethod
    def by_name(cls, models: PreparedModels) -> dict[str, ServedModel]:
        """Returns what routers get of them."""
        return {
            name: cls(each.path, each.served_name, each.max_model_len)
            for name, each in models.by_name.items()
        }


class RouterProcessError(Exception):
    """It cannot serve here; one line for the user."""


@dataclass(frozen=True, slots=True)
class RouterProcessSpec:
    """Everything that a process needs to become a router."""

    cluster: str  # this life of the cluster
    router: NodeId
    epoch: int
    routers: tuple[NodeId, ...]  # all of the cluster
    config: Config
    models: dict[str, ServedModel]  # by name, the one of calls that name none first
    access: Access
    # where tenants come from that may change: `path` and `overrides` of a `Source`
    source: tuple[Path | None, dict[str, Any]] | None = None
    kept: Path | None = None  # the `kept` of that `Source`


@dataclass(frozen=True, slots=True)
class RouterOrder:
    """What a router's process is to be. `sock`: the number of its listening socket here."""

    spec: RouterProcessSpec
    listening: Listening
    host: str  # where its wire listens
    sock: int


@dataclass(frozen=True, slots=True)
class LoadRouter:
    """To a process that is to succeed a router: load what takes long, while that one serves.
    Answered by `RouterLoaded`. Its `RouterOrder` comes when that one has ended."""

    router: NodeId
    config: Config
    models: dict[str, ServedModel]


@dataclass(frozen=True, slots=True)
class UseModels:
    """To a router: serve these models, and offer clients those whose names are in `offered`.
    Answered by `ModelsUsed` when no request for another one is left, or after `drain_s`."""

    number: int
    config: Config
    models: dict[str, ServedModel]
    offered: tuple[str, ...]
    drain_s: float


channel.register(RouterOrder, LoadRouter, UseModels)


def bind(host: str, port: int) -> socket.socket:
    """Raises RouterProcessError."""
    try:
        return bind_socket(host, port)
    except PortTaken as error:
        raise RouterProcessError(str(error)) from error
    except OSError as error:
        raise RouterProcessError(f"cannot listen at {host}:{port}: {error.strerror}") from error
