"""What a worker's process and the controller say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import WorkerInfo
from kvrelay.engine.wire import channel
from kvrelay.engine.wire.channel import own_version
from kvrelay.engine.wire.codec import PROTOCOL, register
from kvrelay.engine.wire.context import TlsIdentity

CONTROLLER: NodeId = "controller"


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a node listens. Of two peers with one name the higher epoch is the one that lives.
    `protocol`: of `engine.wire.codec`, that it speaks; `package`: its version of kvrelay."""

    node: NodeId
    host: str
    port: int
    epoch: int
    protocol: int = 1
    package: str = "unknown"

    @classmethod
    def here(cls, node: NodeId, host: str, port: int, epoch: int) -> Peer:
        """Makes that of a node of this process."""
        return cls(node, host, port, epoch, PROTOCOL, own_version())


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    info: WorkerInfo
    host: str
    port: int
    pid: int = 0  # on its machine, for operators
    notices: tuple[str, ...] = ()  # what an operator should know of it, one line each
    protocol: int = 1  # this and the next: see Peer
    package: str = "unknown"
    device: str = ""
    took_s: float = 0.0  # from the start of its process until it listened
    log: str = ""  # its file there; "": none


@dataclass(frozen=True, slots=True)
class StartFailed:
    """`permanent`: it would fail again in the same way (no such model, too little memory)."""

    worker: NodeId
    epoch: int
    reason: str
    permanent: bool
    weights: bytes = b""  # the digest of those that it was to have, and that are not there


@dataclass(frozen=True, slots=True)
class ProcessEnds:
    """To its guardian, from a worker's process or one with ranks: it ends for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeersUpdated:
    to: NodeId
    about: NodeId
    epoch: int


@dataclass(frozen=True, slots=True)
class UpdatePeers:
    """To a process: where `peers` listen; answered by `PeersUpdated`, with `about` and `epoch`."""

    about: NodeId
    epoch: int
    peers: tuple[Peer, ...]
    tls: TlsIdentity | None = None  # to be shown from now on; None: as before


@dataclass(frozen=True, slots=True)
class Adopt:
    """To a worker's process: this is your controller now; answered by `WorkerStarted`."""

    controller: Peer


@dataclass(frozen=True, slots=True)
class End:
    """To a worker's process: end, if you are of this epoch or an older one. `has_heir`: another
    one takes its place, or reads from its own, and the KV that it has in host memory is kept."""

    epoch: int
    has_heir: bool = False


register(PeersUpdated, WorkerStarted, UpdatePeers, Adopt, End)
channel.register(WorkerStarted, StartFailed, ProcessEnds)
