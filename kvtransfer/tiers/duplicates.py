"""Blocks that host memory and the device both have, and storage as well: where host memory is full,
these copies make way first, and are made again before the device evicts the block.

Life of a block here: in both -> its copy has made way for another block -> about to be evicted from
the device -> copied down again.
"""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.engine.kv.block_pool import BlockPool
from kvrelay.kvtransfer.tiers.pool import Entry
from kvrelay.kvtransfer.tiers.uses import Usage

LEAVING_SHARE = 0.25
"""Of a device's blocks, so many are copied down before they are evicted. It is what the prompts of
a quarter of a second need; more would be held twice."""
MAX_GONE = 64  # blocks that the device has evicted meanwhile


class Duplicates:
    """Owned by `TierBlocks`. Invariant: `_above` has at most as many blocks as the device, and a
    few."""

    def __init__(self, device: BlockPool, is_stored: Callable[[bytes], bool]) -> None:
        """`is_stored`: whether storage has a block too. Others keep their copy: the device may
        have to evict them before another one is made."""
        self._device = device
        self._is_stored = is_stored
        self._above: dict[bytes, Usage] = {}  # on the device alone, and how they were used
        self._leaving: frozenset[bytes] = frozenset()  # the device evicts them next
        self._looked_at = (-1, -1)

    def has(self, entry: Entry) -> bool:
        """Whether this copy may make way."""
        name = entry.block_hash
        is_there = name not in self._leaving and self._device.is_cached(name)
        return is_there and self._is_stored(name)

    def leave(self, usage: Usage) -> None:
        """The tier has no copy of it, and is to have one when the device evicts it."""
        self._above[usage.block_hash] = usage
        if len(self._above) > self._device.num_blocks + MAX_GONE:
            is_cached = self._device.is_cached
            self._above = {name: use for name, use in self._above.items() if is_cached(name)}

    def is_left(self, block_hash: bytes) -> bool:
        """Whether the device has it, from which it is copied before it goes."""
        if block_hash not in self._above:
            return False
        if self._device.is_cached(block_hash) and self._is_stored(block_hash):
            return True
        del self._above[block_hash]
        return False

    def is_leaving(self, block_hash: bytes) -> bool:
        """Whether the device evicts it next."""
        return block_hash in self._leaving

    def forget(self, block_hash: bytes) -> None:
        self._above.pop(block_hash, None)

    def take_leaving(self) -> list[Usage]:
        """Those without a copy that the device evicts next, in that order. Work in proportion to
        LEAVING_SHARE of the device, if it has freed or evicted blocks since the last call."""
        device = self._device
        changed = device.num_freed, device.num_evictions
        if changed == self._looked_at:
            return []
        self._looked_at = changed
        num_blank = device.num_free - device.num_evictable
        names = device.next_evicted(int(LEAVING_SHARE * device.num_blocks) - num_blank)
        self._leaving = frozenset(names)
        return [self._above.pop(name) for name in names if name in self._above]
