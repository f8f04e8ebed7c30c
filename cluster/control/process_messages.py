"""What crosses the wire between the controller's process and those of workers and routers.

It is for the processes, not for their nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.cluster.control.messages import RouterStarted
from kvrelay.engine.node import NodeId
from kvrelay.engine.wire.codec import register


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """What a router says of itself."""

    num_live: int  # requests that it serves, or that wait
    num_queued: int  # of them, those that wait
    store_up: bool | None  # whether it reaches the store of shared state; None: there is none


@dataclass(frozen=True, slots=True)
class RouterReport:
    """From a router's process, about once a second; answered by a `cluster.status.ClusterView`."""

    router: NodeId
    epoch: int
    load: RouterLoad
    started: RouterStarted | None = None  # where it is


@dataclass(frozen=True, slots=True)
class LinkLost:
    """From a router's process: messages between it and a worker were lost. The router has given the
    worker up until they are brought together again."""

    router: NodeId
    worker: NodeId
    epoch: int


register(RouterReport, LinkLost)
