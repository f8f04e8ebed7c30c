"""The transfer agent: effects that a worker node asks for, and the protocol behind them.

Verbs and nouns are NIXL's: an agent registers memory, exchanges metadata with a peer, prepares a
descriptor list once, and then a transfer (xfer) is two lists of indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from engine.node import NodeId


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Effect: make `peer`'s pool readable; answered by `PeerConnected`. Replaces an older epoch."""

    peer: NodeId
    epoch: int
    num_blocks: int
    metadata: bytes


@dataclass(frozen=True, slots=True)
class PeerConnected:
    peer: NodeId
    epoch: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Effect: READ block src[i] of `peer` into own block dst[i]. Always answered by `ReadDone`:
    after `timeout_s` it is given up, and `ReadDone` comes once nothing can write to dst."""

    transfer_id: int
    peer: NodeId
    epoch: int
    src: tuple[int, ...]
    dst: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ReadDone:
    """The transfer has settled: no byte of dst will be written by it from now on."""

    transfer_id: int
    error: str | None
    checksums: tuple[int, ...] = ()  # of dst, in order, if there was no error
    elapsed_s: float = 0.0
    num_bytes: int = 0


class Agent(Protocol):
    """Moves whole blocks between pools. Calls block; the runtime calls them from one thread.

    `pool` is the worker's KV memory: `[num_blocks, ...]`, contiguous, CPU or CUDA.
    """

    def metadata(self) -> bytes:
        """What a peer needs to read this agent's pool; opaque."""
        ...

    def connect(self, peer: NodeId, epoch: int, num_blocks: int, metadata: bytes) -> None:
        """Prepare `peer` for reads. Raises AgentError."""
        ...

    def disconnect(self, peer: NodeId) -> None:
        """Forget `peer`; unknown names are ignored."""
        ...

    def read(self, peer: NodeId, src: list[int], dst: list[int]) -> Any:
        """Post a READ; returns a handle at once. Raises AgentError."""
        ...

    def poll(self, handle: Any) -> bool:
        """True once it is done, False while it runs. Raises AgentError when it has failed."""
        ...

    def release(self, handle: Any) -> bool:
        """Settle `handle`, cancelling it if it still runs. True: it is freed, and nothing writes
        to dst from now on. False: something still may; call again later. Never raises."""
        ...

    def close(self) -> None:
        """Settle every handle, whatever it takes, and forget all peers."""
        ...


class AgentError(Exception):
    """A transfer or a connection failed; the text says which peer and why."""
