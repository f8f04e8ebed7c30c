"""The native table behind the prefix index: `router/native/prefix_index.c`.

A worker is a slot here, a small number; what is known of a block at a slot are facts, one bit each.
Hashes are packed, 16 bytes each.
"""

from __future__ import annotations

import ctypes
from ctypes import c_uint8, c_uint16, c_uint32
from typing import NamedTuple
from weakref import finalize

from kvrelay.engine.kv.block_hash import HASH_BYTES
from kvrelay.engine.kv.tier import Tier
from kvrelay.router.native.bindings import address_of, bindings, constants, ffi

Hashes = bytes | bytearray | memoryview  # packed

FACT = {Tier.DEVICE: constants.DEVICE, Tier.HOST: constants.HOST, Tier.DISK: constants.DISK}
EXPECTED: int = constants.EXPECTED
SAID: int = constants.SAID  # all that a worker has said itself, in whatever tier
NUM_RUNS: int = constants.NUM_RUNS  # in device memory, any memory, any tier, said by the worker


def count_hashes(hashes: Hashes) -> int:
    count, rest = divmod(len(hashes), HASH_BYTES)
    if rest:
        raise ValueError(f"packed hashes of {len(hashes)} bytes: expected {HASH_BYTES} each")
    return count


def _address(hashes: Hashes) -> bytes | int:
    """`hashes` as an argument, without a copy; its size must not change meanwhile."""
    if isinstance(hashes, bytes):
        return hashes
    return address_of(ffi.from_buffer(hashes))


class Held(NamedTuple):
    """How much of a prefix a worker holds, as three runs one after the other, in blocks (or, after
    `times`, in tokens). A block that is in several tiers counts for the fastest.

    `said` is how much of it, from the first block on, the worker itself has said it holds, in
    any tier: the rest is only expected there, and cannot be fetched from it."""

    device: int = 0
    host: int = 0  # each of them in device or host memory
    disk: int = 0  # each in any tier
    said: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk

    def times(self, factor: int) -> Held:
        """The same in another unit."""
        return Held(
            self.device * factor, self.host * factor, self.disk * factor, self.said * factor
        )


NOTHING = Held()


class IndexTable:
    """Owned by a `PrefixIndex`; used by one thread. Invariant: a slot that was opened is used until
    it is closed, and is not named again before it is opened again."""

    def __init__(self, stride: int, max_expected: int) -> None:
        self._lib = bindings()
        self.address: int = self._lib.kvr_index_new(stride, max_expected)
        finalize(self, self._lib.kvr_index_free, self.address)
        self._num_slots = 0  # more than the highest that was ever opened

    def open(self, group: int) -> int:
        """A slot without blocks. `group` tells kinds of workers apart in `best`."""
        slot: int = self._lib.kvr_index_open(self.address, group)
        if slot < 0:
            raise ValueError("a prefix index can follow 65,535 workers, and has as many")
        self._num_slots = max(self._num_slots, slot + 1)
        return slot

    def close(self, slot: int) -> None:
        """Its blocks are taken out bit by bit, by later calls."""
        self._lib.kvr_index_close(self.address, slot)

    def regroup(self, slot: int, group: int) -> None:
        self._lib.kvr_index_regroup(self.address, slot, group)

    def change(self, slot: int, hashes: Hashes, add: int = 0, drop: int = 0) -> None:
        """Facts `add` come to be true of the blocks, or facts `drop` are true no more."""
        count = count_hashes(hashes)
        if count:
            self._lib.kvr_index_change(self.address, slot, _address(hashes), count, add, drop)

    def drop_all(self, slot: int, facts: int) -> None:
        self._lib.kvr_index_drop_all(self.address, slot, facts)

    def expect(self, slot: int, hashes: Hashes, now: float, until: float) -> None:
        """The blocks count as in device memory until `until`, where they are not yet."""
        count = count_hashes(hashes)
        if count:
            self._lib.kvr_index_expect(self.address, slot, _address(hashes), count, now, until)

    def tidy(self, now: float, budget: int) -> None:
        """Take out what is over, at most `budget` blocks of each kind."""
        self._lib.kvr_index_tidy(self.address, now, budget)

    def lookup(self, now: float, hashes: Hashes, limit: int | None) -> ctypes.Array[c_uint32]:
        """NUM_RUNS lengths for each slot, of the first `limit` blocks."""
        ends = (c_uint32 * (NUM_RUNS * self._num_slots))()
        count = count_hashes(hashes)
        if limit is not None and limit < count:
            count = max(0, limit)
        if count and self._num_slots:
            self._lib.kvr_index_lookup(self.address, now, _address(hashes), count, ends)
        return ends

    def best(self, ends: ctypes.Array[c_uint32], group: int, limit: int) -> list[int]:
        """Slots of `group` by how much they hold in any tier, of equals the one first that was
        returned longest ago."""
        found = (c_uint16 * limit)()
        num_slots = len(ends) // NUM_RUNS
        count = self._lib.kvr_index_best(self.address, ends, num_slots, group, limit, found)
        return found[:count]

    def count(self, hashes: Hashes) -> dict[int, dict[Tier, int]]:
        """How many of the blocks each slot has in each tier; no zeros."""
        counts = (c_uint32 * (len(FACT) * self._num_slots))()
        count = count_hashes(hashes)
        if count:
            self._lib.kvr_index_count(self.address, _address(hashes), count, counts)
        found: dict[int, dict[Tier, int]] = {}
        for at, number in enumerate(counts):
            if number:
                slot, tier = divmod(at, len(FACT))
                found.setdefault(slot, {})[tuple(FACT)[tier]] = number
        return found

    def export(self, slot: int) -> dict[Tier, bytes]:
        """All that is said of the slot, by tier, in no order."""
        sizes = [self.held(slot, fact) * HASH_BYTES for fact in FACT.values()]
        buffers = [(c_uint8 * size)() for size in sizes]
        self._lib.kvr_index_export(self.address, slot, *buffers)
        return {tier: bytes(hashes) for tier, hashes in zip(FACT, buffers, strict=True)}

    def held(self, slot: int, facts: int) -> int:
        """Number of blocks of which one of `facts`, that exclude each other, is true."""
        number: int = self._lib.kvr_index_held(self.address, slot, facts)
        return number

    @property
    def num_blocks(self) -> int:
        number: int = self._lib.kvr_index_num_blocks(self.address)
        return number

    @property
    def num_bytes(self) -> int:
        number: int = self._lib.kvr_index_num_bytes(self.address)
        return number

    def check_integrity(self) -> None:
        wrong: bytes | None = self._lib.kvr_index_check(self.address)
        assert wrong is None, (wrong or b"").decode()
