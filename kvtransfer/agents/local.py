"""An agent for workers that share a process: a transfer is a memcpy, made when it is polled.

An agent enters the registry when it is made and leaves it when it is closed; a peer connects to
one incarnation, and its reads fail from the moment that incarnation has left.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import AgentError
from kvrelay.kvtransfer.agents.metadata import AgentMetadata, Space, copy_spans, unpack
from kvrelay.kvtransfer.agents.pool import check_block_ids, make_scratch, pool_bytes, probe_blocks
from kvrelay.kvtransfer.layout import CopySpan, HeadShare

TRANSPORT = "local"

Pools = Mapping[Tier, NDArray[np.uint8]]  # [num_blocks, bytes_per_block]


@dataclass(slots=True)
class LocalRegistry:
    """The memory that can be read in this process, by incarnation. Made by the composition root
    and given to every LocalAgent; its operations are atomic under the GIL."""

    pools: dict[str, Pools] = field(default_factory=dict)
    _incarnations: itertools.count[int] = field(init=False, default_factory=itertools.count)

    def add(self, name: str, pools: Pools) -> str:
        """Enter `pools`; returns the name of the incarnation."""
        incarnation = f"{name}#{next(self._incarnations)}"
        self.pools[incarnation] = pools
        return incarnation

    def remove(self, incarnation: str) -> None:
        self.pools.pop(incarnation, None)


@dataclass(slots=True)
class _Peer:
    incarnation: str
    spans: tuple[CopySpan, ...]


@dataclass(slots=True)
class _Transfer:
    """Copies nothing before it is polled, and nothing after it was released."""

    name: NodeId
    peer: _Peer
    src_tier: Tier
    src: list[int]
    dst: list[int]
    into: NDArray[np.uint8]  # [num_blocks, bytes_per_block]
    released: bool = False


class LocalAgent:
    """Implements kvtransfer.agent.Agent over CPU pools. Owned by its worker's transfer thread."""

    def __init__(
        self,
        name: NodeId,
        pool: Any,
        registry: LocalRegistry,
        *,
        host: Any | None = None,
        share: HeadShare | None = None,
    ) -> None:
        """`pool`: numpy array or CPU tensor `[num_blocks, ...]`, contiguous; `host`: the same in
        host memory. `share`: which heads the blocks hold, where tensor-parallel sizes differ."""
        self._name = name
        self._pools = {Tier.DEVICE: pool_bytes(pool)}
        if host is not None:
            self._pools[Tier.HOST] = pool_bytes(host)
        size = self._pools[Tier.DEVICE].shape[1]
        assert all(each.shape[1] == size for each in self._pools.values()), "block sizes differ"
        assert share is None or share.bytes_per_block == size, (share, size)
        self._scratch = make_scratch(self._pools[Tier.DEVICE], size)
        self._registry = registry
        self._incarnation = registry.add(name, self._pools)
        spaces = {tier: Space(len(each)) for tier, each in self._pools.items()}
        self._facts = AgentMetadata(TRANSPORT, self._incarnation, size, spaces, share)
        self._own = _Peer(self._incarnation, (CopySpan(0, 0, size),))
        self._peers: dict[NodeId, _Peer] = {}

    def metadata(self) -> bytes:
        return self._facts.pack()

    def connect(self, peer: NodeId, epoch: int, num_blocks: int, metadata: bytes) -> None:
        self.disconnect(peer)
        facts = unpack(peer, metadata, self._facts, num_blocks=num_blocks)
        spans = copy_spans(peer, facts, self._facts)
        if facts.agent not in self._registry.pools:
            raise AgentError(f"{peer}, epoch {epoch}, is not in this process (any more)")
        self._peers[peer] = _Peer(facts.agent, spans)

    def disconnect(self, peer: NodeId) -> None:
        self._peers.pop(peer, None)

    def post_copy(
        self,
        peer: NodeId,
        src: list[int],
        dst: list[int],
        src_tier: Tier = Tier.DEVICE,
        dst_tier: Tier = Tier.DEVICE,
    ) -> _Transfer:
        known = self._own if peer == self._name else self._peers.get(peer)
        if known is None:
            raise AgentError(f"not connected to {peer}")
        if known is self._own and src_tier is dst_tier:
            raise AgentError(f"{peer} moves blocks between tiers, not within {src_tier} memory")
        if dst_tier not in self._pools:
            raise AgentError(f"read from {peer}: {self._name} has no {dst_tier} memory")
        destination = self._pools[dst_tier]
        transfer = _Transfer(peer, known, src_tier, src, dst, destination)
        check_block_ids(peer, src, dst, len(self._source(transfer)), len(destination))
        return transfer

    def post_probe(self, peer: NodeId, num_bytes: int) -> tuple[_Transfer, int]:
        known = self._peers.get(peer)
        if known is None:
            raise AgentError(f"not connected to {peer}")
        size = sum(span.length for span in known.spans)
        transfer = _Transfer(peer, known, Tier.DEVICE, [], [], self._scratch)
        blocks = probe_blocks(num_bytes, size, len(self._scratch), len(self._source(transfer)))
        transfer.src = transfer.dst = blocks
        return transfer, len(blocks) * size

    def poll(self, handle: _Transfer) -> bool:
        assert not handle.released
        source, destination = self._source(handle), handle.into
        for src, dst in zip(handle.src, handle.dst, strict=True):
            for span in handle.peer.spans:
                run = source[src, span.src : span.src + span.length]
                destination[dst, span.dst : span.dst + span.length] = run
        return True

    def release(self, handle: _Transfer) -> bool:
        handle.released = True
        return True

    def close(self) -> None:
        self._peers.clear()
        self._registry.remove(self._incarnation)

    def _source(self, transfer: _Transfer) -> NDArray[np.uint8]:
        pools = self._registry.pools.get(transfer.peer.incarnation)
        if pools is None:
            raise AgentError(f"{transfer.name} has left")
        if transfer.src_tier not in pools:
            raise AgentError(f"read from {transfer.name}: it has no {transfer.src_tier} memory")
        return pools[transfer.src_tier]
