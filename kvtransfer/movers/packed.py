"""Host memory that holds KV in four bits a number: blocks are quantised on the way in, and are
blocks of numbers again when they come back.

A copy is made by the thread that asks for it, and is over when `post_copy` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import NOT_STORED, AgentError, OwnAgent
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.kivi import Quantizer
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.movers.pool import check_block_ids, is_on_gpu, pool_bytes, write_blocks
from kvrelay.kvtransfer.store.arena import HostArena


@dataclass(frozen=True, slots=True)
class PackedCopy:
    changed: dict[int, int] = field(default_factory=dict)  # index -> checksum as it will be read


class PackedAgent(OwnAgent):
    """Implements kvtransfer.agent.Agent between `arena`, which holds quantised blocks, and a
    worker's own memory. Owned by a thread of the worker.

    A block goes in only if its numbers are finite; its checksum is that of the block as it will
    come back, so what memory does to it meanwhile is found like any other damage."""

    def __init__(
        self,
        name: NodeId,
        pools: Mapping[Tier, Any],
        arena: HostArena,
        quantizer: Quantizer,
        share: HeadShare | None = None,
    ) -> None:
        """`pools`: `[num_blocks, ...]` each, on the CPU or a GPU; `share`: the heads there."""
        self._name = name
        self._pools = dict(pools)
        self._arena = arena
        self._quantizer = quantizer
        self._share = share

    def post_copy(
        self,
        peer: NodeId,
        src: list[int],
        dst: list[int],
        src_tier: Tier = Tier.DEVICE,
        dst_tier: Tier = Tier.DEVICE,
    ) -> PackedCopy:
        reads = src_tier is Tier.PACKED
        tier = dst_tier if reads else src_tier
        is_packed = (src_tier, dst_tier).count(Tier.PACKED) == 1
        pool = self._pools.get(tier)
        if peer != self._name or not is_packed or pool is None or (is_on_gpu(pool) and not reads):
            raise AgentError(f"{peer}: no blocks are packed from {src_tier} to {dst_tier}")
        sizes = [len(self._arena.memory), len(pool)]
        check_block_ids(peer, src, dst, *(sizes if reads else sizes[::-1]))
        if reads:
            self._unpack(pool, src, dst)
            return PackedCopy()
        self._arena.reserve(dst)
        return PackedCopy(self._pack(pool, src, dst))

    def poll(self, handle: PackedCopy) -> bool:
        return True

    def release(self, handle: PackedCopy) -> bool:
        return True

    def changed(self, handle: PackedCopy) -> dict[int, int]:
        return handle.changed

    def close(self) -> None:
        """There is nothing to settle."""

    def _pack(self, pool: Any, src: list[int], dst: list[int]) -> dict[int, int]:
        blocks, memory = pool_bytes(pool), self._arena.memory
        back = np.empty((1, blocks.shape[1]), np.uint8)
        changed = {}
        for index, (block, slot) in enumerate(zip(src, dst, strict=True)):
            if self._quantizer.encode(blocks[block], memory[slot]):
                self._quantizer.decode(memory[slot], back[0])
                (changed[index],) = checksum_blocks(back, [0], self._share)
            else:
                changed[index] = NOT_STORED
        return changed

    def _unpack(self, pool: Any, src: list[int], dst: list[int]) -> None:
        memory = self._arena.memory
        if not is_on_gpu(pool):
            blocks = pool_bytes(pool)
            for slot, block in zip(src, dst, strict=True):
                self._quantizer.decode(memory[slot], blocks[block])
            return
        found = np.empty((len(src), self._quantizer.block_bytes), np.uint8)
        for slot, row in zip(src, found, strict=True):
            self._quantizer.decode(memory[slot], row)
        write_blocks(pool, dst, found)
