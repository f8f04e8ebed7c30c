"""Host memory in four bits behind that of whole blocks: who goes there, and who does not."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvrelay.engine.kv.block_hash import hash_blocks
from kvrelay.engine.kv.scope import APPROXIMATE, CacheScope
from kvrelay.engine.kv.tier import DiskRecord, Retention, Tier
from kvrelay.engine.node import Effect
from kvrelay.kvtransfer.agent import NOT_STORED, CopyBlocks, CopyDone, StoreIndex
from kvrelay.kvtransfer.messages import CacheAction, CacheOrder
from tests.kvtransfer.tiers.tier_world import KEEP, TierWorld, content, names

DEVICE, HOST, PACKED, DISK = Tier.DEVICE, Tier.HOST, Tier.PACKED, Tier.DISK
ROUGH = Retention(1000.0, is_approximate=True)
LESS = 5000  # what quantising adds to a content, once


def rough(value: int) -> int:
    return value if value > LESS else value + LESS


class PackedWorld(TierWorld):
    """`not_finite`: numbers of blocks that cannot be quantised."""

    def __init__(self, packed: int = 16, records: Any = (), **sizes: Any) -> None:
        self.packed_index = {record.slot: record for record in records}
        self.not_finite: set[int] = set()
        super().__init__(num_packed_blocks=packed, quantizes=True, **({"host": 16} | sizes))
        self.memory[PACKED] = {record.slot: record.checksum for record in records}
        self.tiers.start(self.now, {PACKED: records})

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, StoreIndex) and effect.tier is PACKED:
                for slot in effect.remove:
                    del self.packed_index[slot]
                for record in effect.put:
                    assert self.memory[PACKED][record.slot] == record.checksum
                    self.packed_index[record.slot] = record
            else:
                super().perform([effect])

    def finish(self, read: CopyBlocks, error: str | None = None, *, damage: int = 0) -> None:
        quantised = set(read.dst) if read.dst_tier is PACKED else set(read.approximate)
        if error is not None or damage or not quantised:
            super().finish(read, error, damage=damage)
            return
        self.reads.remove(read)
        source, target = self.memory[read.src_tier], self.memory[read.dst_tier]
        found, stored = [], []
        for src, dst in zip(read.src, read.dst, strict=True):
            found.append(source[src])
            target[dst] = rough(source[src]) if dst in quantised else source[src]
            is_lost = read.dst_tier is PACKED and (source[src] - 1000) % LESS in self.not_finite
            stored.append(NOT_STORED if is_lost else target[dst])
        done = CopyDone(read.transfer_id, None, tuple(found), 0.1, 10 * len(found))
        effects = self.tiers.on_copy_done(self.now, replace(done, stored_checksums=tuple(stored)))
        assert effects is not None
        self.perform(effects)

    def listen(self) -> None:
        """Packed blocks are announced as those of host memory, without a gap."""
        for change in self.tiers.take_changes():
            assert not set(change.stored) & self.known[change.tier]
            assert set(change.removed) <= self.known[change.tier]
            self.known[change.tier] |= set(change.stored)
            self.known[change.tier] -= set(change.removed)
        assert self.known[HOST] == {*self.readable(HOST), *self.readable(PACKED)}
        assert self.known[DISK] == set(self.readable(DISK))
        assert not self.known[PACKED]
        for tier in (HOST, PACKED, DISK):
            for name, source in self.readable(tier).items():
                assert self.memory[tier][source.slot] == source.checksum
                assert source.checksum in (content(name), rough(content(name)))


def test_approximate_blocks_leave_host_memory_at_once_and_others_stay() -> None:
    world = PackedWorld()
    world.serve(1, 2, retention=ROUGH)
    world.serve(3)
    assert (world.held(PACKED), world.held(HOST)) == ([1, 2], [3])
    ways = [(read.src_tier, read.dst_tier) for read in world.posted]
    assert ways == [(DEVICE, HOST), (HOST, PACKED), (DEVICE, HOST)]
    assert world.tiers.counters["tier_packed_host"] == 2
    assert {record.block_hash for record in world.packed_index.values()} == set(names(1, 2))
    world.assert_idle()


def test_they_leave_it_when_the_disk_has_them_too() -> None:
    world = PackedWorld(disk=16, disk_after_s=2.0, disk_codec="lossless")
    world.serve(1, 2, retention=ROUGH)
    world.serve(3)
    assert (world.held(PACKED), world.held(HOST)) == ([1, 2], [1, 2, 3])
    world.rest(2.0)
    assert (world.held(DISK), world.held(HOST)) == ([1, 2, 3], [3])
    written = [slot for read in world.posted if read.dst_tier is DISK for slot in read.approximate]
    values = [world.memory[DISK][slot] for slot in written]
    assert sorted(values) == [rough(content(name)) for name in names(1, 2)]
    world.assert_idle()


def test_without_a_codec_the_disk_has_them_as_they_are() -> None:
    world = PackedWorld(packed=0, disk=16, disk_after_s=2.0)
    world.serve(1, retention=ROUGH)
    world.rest(2.0)
    assert (world.held(DISK), world.held(HOST)) == ([1], [1])
    assert all(not read.approximate for read in world.posted)
    world.assert_idle()


def test_what_is_not_finite_stays_where_it_was_and_is_not_tried_again() -> None:
    world = PackedWorld()
    world.not_finite = {2}
    world.serve(1, 2, retention=ROUGH)
    assert (world.held(PACKED), world.held(HOST)) == ([1], [2])
    world.rest(5.0)
    assert len([read for read in world.posted if read.dst_tier is PACKED]) == 1
    assert not world.notes
    world.assert_idle()


def test_a_source_that_was_damaged_is_not_packed() -> None:
    world = PackedWorld()
    world.serve(1)
    world.tiers.use(world.now, names(1), ROUGH)
    world.advance()
    (read,) = world.reads
    assert (read.src_tier, read.dst_tier) == (HOST, PACKED)
    world.finish(read, damage=1)
    assert (world.held(PACKED), world.held(HOST)) == ([], [])
    assert world.notes[0].counter == "tier_checksum_mismatch"


def test_a_parked_session_is_brought_up_by_way_of_host_memory_and_does_not_stay_there() -> None:
    world = PackedWorld()
    world.serve(1, 2, 3, retention=ROUGH)
    world.order(CacheAction.PARK, 1, 2, 3)
    world.settle()
    assert (world.answer(), world.held(DEVICE)) == (3, [])
    world.order(CacheAction.RESUME, 1, 2, 3)
    world.settle()
    assert (world.answer(), world.held(DEVICE)) == (3, [1, 2, 3])
    assert (world.held(PACKED), world.held(HOST)) == ([1, 2, 3], [])
    sums = [world.kv.checksums[b] for b in world.kv.pool.lookup(names(1, 2, 3))]
    assert sums == [rough(content(name)) for name in names(1, 2, 3)]
    world.assert_idle()


def test_parked_ten_times_a_block_has_changed_once() -> None:
    world = PackedWorld(packed=4)
    world.serve(1, retention=ROUGH)
    for number in range(10):
        world.order(CacheAction.PARK, 1)
        world.settle()
        world.serve(*range(10 + 4 * number, 14 + 4 * number), retention=ROUGH)  # pushes it out
        world.serve(1, retention=ROUGH)
        world.answers.clear()
    assert rough(content(names(1)[0])) in world.memory[PACKED].values()
    world.assert_idle()


def test_what_an_earlier_process_left_is_found_and_promoted_for_peers() -> None:
    records = tuple(
        DiskRecord(n, bytes([n]), rough(content(bytes([n]))), keep_s=500.0) for n in (1, 2)
    )
    world = PackedWorld(records=records)
    assert [source.tier for source in world.tiers.find(names(1, 2))] == [PACKED, PACKED]
    world.tiers.promote(names(1, 2))
    world.settle()
    assert [source.tier for source in world.tiers.find(names(1, 2))] == [HOST, HOST]
    world.assert_idle()


@pytest.mark.parametrize("packed", [0, 16])
def test_a_pinned_session_is_pinned_in_four_bits(packed: int) -> None:
    world = PackedWorld(packed=packed)
    world.serve(1, 2, retention=ROUGH)
    world.order(CacheAction.PIN, 1, 2)
    world.settle()
    assert world.answer() == 2
    pool = world.tiers._pools[PACKED if packed else HOST]
    assert pool.num_kept == 2
    world.assert_idle()


class MixedWorld(PackedWorld):
    """Prompts of a few tokens in both universes, over all tiers of one worker."""

    def __init__(self) -> None:
        super().__init__(device=16, host=16, packed=24, disk=32, disk_codec="lossless")
        self.num_rough = 0  # blocks that were found in fewer bits

    def check(self, labels: list[bytes], *, is_rough: bool) -> None:
        """What a request for these would read, wherever it is."""
        pool = self.kv.pool
        found = [self.kv.checksums[block] for block in pool.lookup(labels)]
        found += [source.checksum for source in self.tiers.find(labels)]
        quantised = [value for value in found if value > LESS]
        assert is_rough or not quantised
        self.num_rough += len(quantised)

    def turn(self, labels: list[bytes], retention: Retention) -> None:
        self.tiers.use(self.now, labels, retention)
        hits = self.kv.pool.lookup(labels)
        self.kv.pool.acquire(hits)
        blocks = hits + self.seal(labels[len(hits) :], retention)
        self.tiers.use(self.now, labels, retention)
        self.kv.pool.release(blocks)


def test_ten_thousand_times_exact_requests_read_exact_blocks() -> None:
    rng, world = Random(50), MixedWorld()
    for number in range(10_000):
        tokens, is_rough = rng.choices(range(2), k=rng.choice((4, 8, 12))), rng.random() < 0.5
        salt, num_public = rng.choice((b"red", b"blue")), rng.choice((0, 4))
        scope = CacheScope(APPROXIMATE * is_rough + salt, num_public)
        labels = hash_blocks(b"model", scope, tokens, 4)
        world.check(labels, is_rough=is_rough)
        match rng.randrange(6):
            case 0 | 1:
                world.turn(labels, replace(KEEP, is_approximate=scope.is_approximate))
            case 2:
                world.clear_device()
            case 3:
                world.tiers.promote(labels)
            case _:
                actions = [CacheAction.PARK, CacheAction.RESUME, CacheAction.DROP]
                action = rng.choices(actions, (3, 6, 1))[0]
                order = CacheOrder(str(number), "router", action, tuple(labels))
                world.perform(world.tiers.order(world.now, order))
        for _ in range(rng.randrange(4)):
            if world.reads:
                world.finish(rng.choice(world.reads))
        world.tick(rng.choice((0.0, 0.5, 3.0)))
        world.check(labels, is_rough=is_rough)
    while world.reads:
        world.finish(world.reads[0])
        world.advance()
    world.tiers.check_integrity()
    assert world.num_rough > 1_000
