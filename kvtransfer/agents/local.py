"""An agent for workers that share a process: a transfer is a memcpy, made when it is polled.

An agent enters the registry when it is made and leaves it when it is closed; a peer connects to
one incarnation, and its reads fail from the moment that incarnation has left.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.node import NodeId
from kvtransfer.agent import AgentError
from kvtransfer.agents.metadata import AgentMetadata, unpack
from kvtransfer.agents.pool import check_block_ids, pool_bytes

TRANSPORT = "local"


@dataclass(slots=True)
class LocalRegistry:
    """The pools that can be read in this process, by incarnation. Made by the composition root
    and given to every LocalAgent; its operations are atomic under the GIL."""

    pools: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    _incarnations: itertools.count[int] = field(init=False, default_factory=itertools.count)

    def add(self, name: str, pool: NDArray[np.uint8]) -> str:
        """Enter `pool`; returns the name of the incarnation."""
        incarnation = f"{name}#{next(self._incarnations)}"
        self.pools[incarnation] = pool
        return incarnation

    def remove(self, incarnation: str) -> None:
        self.pools.pop(incarnation, None)


@dataclass(slots=True)
class _Xfer:
    """Copies nothing before it is polled, and nothing after it was released."""

    peer: NodeId
    incarnation: str
    src: list[int]
    dst: list[int]
    released: bool = False


class LocalAgent:
    """Implements kvtransfer.agent.Agent over CPU pools. Owned by its worker's transfer thread."""

    def __init__(self, name: str, pool: Any, registry: LocalRegistry) -> None:
        """`pool`: numpy array or CPU tensor `[num_blocks, ...]`, contiguous."""
        self._pool = pool_bytes(pool)
        self._registry = registry
        self._incarnation = registry.add(name, self._pool)
        self._peers: dict[NodeId, str] = {}

    def metadata(self) -> bytes:
        return AgentMetadata(TRANSPORT, self._incarnation, *self._pool.shape).pack()

    def connect(self, peer: NodeId, epoch: int, num_blocks: int, metadata: bytes) -> None:
        self.disconnect(peer)
        facts = unpack(
            peer,
            metadata,
            transport=TRANSPORT,
            num_blocks=num_blocks,
            bytes_per_block=self._pool.shape[1],
        )
        if facts.agent not in self._registry.pools:
            raise AgentError(f"{peer}, epoch {epoch}, is not in this process (any more)")
        self._peers[peer] = facts.agent

    def disconnect(self, peer: NodeId) -> None:
        self._peers.pop(peer, None)

    def read(self, peer: NodeId, src: list[int], dst: list[int]) -> _Xfer:
        incarnation = self._peers.get(peer)
        if incarnation is None:
            raise AgentError(f"not connected to {peer}")
        check_block_ids(peer, src, dst, len(self._source(peer, incarnation)), len(self._pool))
        return _Xfer(peer, incarnation, src, dst)

    def poll(self, handle: _Xfer) -> bool:
        assert not handle.released
        source = self._source(handle.peer, handle.incarnation)
        for src, dst in zip(handle.src, handle.dst, strict=True):
            self._pool[dst] = source[src]
        return True

    def release(self, handle: _Xfer) -> bool:
        handle.released = True
        return True

    def close(self) -> None:
        self._peers.clear()
        self._registry.remove(self._incarnation)

    def _source(self, peer: NodeId, incarnation: str) -> NDArray[np.uint8]:
        pool = self._registry.pools.get(incarnation)
        if pool is None:
            raise AgentError(f"{peer} has left")
        return pool
