"""Host memory that holds KV in four bits a number: blocks are quantised on the way in, and are
blocks of numbers again when they come back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import NOT_STORED, AgentError, CopyBlocks, CopyDone, DoneAtOnce
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.executor import ArenaExecutor
from kvrelay.kvtransfer.kivi import Quantizer
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.movers.opening import Storage, TierSettings
from kvrelay.kvtransfer.movers.pool import Sides, is_on_gpu, pool_bytes, sides_of, write_blocks
from kvrelay.kvtransfer.store.arena import HostArena, arena_root, open_arena

FOLDER = "packed"  # below those of the machine's host memory


class PackedMover(DoneAtOnce):
    """Copies between `arena`, which holds quantised blocks, and a worker's own memory. Owned by a
    thread of the worker.

    A block goes in only if its numbers are finite; its checksum is that of the block as it will
    come back, so what memory does to it meanwhile is found like any other damage."""

    def __init__(
        self,
        pools: Mapping[Tier, Any],
        arena: HostArena,
        quantizer: Quantizer,
        share: HeadShare | None = None,
    ) -> None:
        """`pools`: `[num_blocks, ...]` each, on the CPU or a GPU; `share`: the heads there."""
        self._pools = dict(pools)
        self._arena = arena
        self._quantizer = quantizer
        self._share = share

    def copy(self, request: CopyBlocks) -> CopyDone:
        sides = sides_of(request, Tier.PACKED, self._pools, len(self._arena.memory))
        pool, stored = self._pools[sides.tier], tuple[int, ...]()
        if sides.reads:
            self._unpack(pool, sides)
        elif is_on_gpu(pool):
            raise AgentError(f"{request.text}: blocks are packed in host memory")
        else:
            self._arena.reserve(sides.slots)
            stored = self._pack(pool_bytes(pool), sides)
        return CopyDone(request.transfer_id, None, stored_checksums=stored)

    def _pack(self, blocks: NDArray[np.uint8], sides: Sides) -> tuple[int, ...]:
        """Their checksums as they will be read."""
        memory, found = self._arena.memory, []
        back = np.empty((1, blocks.shape[1]), np.uint8)
        for block, slot in zip(sides.blocks, sides.slots, strict=True):
            if self._quantizer.encode(blocks[block], memory[slot]):
                self._quantizer.decode(memory[slot], back[0])
                found += checksum_blocks(back, [0], self._share)
            else:
                found.append(NOT_STORED)
        return tuple(found)

    def _unpack(self, pool: Any, sides: Sides) -> None:
        memory = self._arena.memory
        if not is_on_gpu(pool):
            blocks = pool_bytes(pool)
            for slot, block in zip(sides.slots, sides.blocks, strict=True):
                self._quantizer.decode(memory[slot], blocks[block])
            return
        found = np.empty((len(sides.slots), self._quantizer.block_bytes), np.uint8)
        for slot, row in zip(sides.slots, found, strict=True):
            self._quantizer.decode(memory[slot], row)
        write_blocks(pool, sides.blocks, found)


def open_tier(settings: TierSettings) -> Storage:
    """Memory that outlives the worker. Raises StoreError, AgentError."""
    config, quantizer = settings.config, settings.quantizer
    if quantizer is None:
        raise AgentError("it needs a C compiler")
    of_packed = structs.replace(config, bytes_per_block=quantizer.num_bytes)
    root = arena_root() / settings.cluster / settings.part / FOLDER
    arena = open_arena(root, of_packed, config.num_packed_blocks)
    mover = PackedMover(settings.memory, arena, quantizer, settings.share)
    store = ArenaExecutor(arena, Tier.PACKED)
    return Storage(mover, store, tuple(arena.records), arena=arena)
