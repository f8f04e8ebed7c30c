"""What is copied down, written to disk, found and promoted, step by step."""

from __future__ import annotations

from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.kvtransfer.agent import CopyDone
from kvrelay.kvtransfer.tiers.moves import MAX_MOVE_BLOCKS
from tests.kvtransfer.tiers.quiet import is_quiet
from tests.kvtransfer.tiers.tier_world import (
    KEEP,
    MEMORY_ONLY,
    TierWorld,
    content,
    disk_records,
    names,
)

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


def test_sealed_blocks_are_copied_to_host_memory_while_they_are_in_use() -> None:
    world = TierWorld(host=16)
    blocks = world.seal(names(1, 2))
    world.advance()
    (read,) = world.reads
    assert (read.src_tier, read.dst_tier) == (DEVICE, HOST)
    assert list(read.src) == blocks
    assert world.tiers.find(names(1)) == []
    assert not is_quiet(world.tiers, world.now)
    world.settle()
    found = world.tiers.find(names(1, 2, 3))
    assert [(s.tier, s.block_hash, s.checksum) for s in found] == [
        (HOST, name, content(name)) for name in names(1, 2)
    ]
    world.kv.pool.release(blocks)
    world.assert_idle()
    assert world.tiers.counters["moved_blocks_device_host"] == 2
    assert world.tiers.counters["moved_bytes_device_host"] == 20


def test_one_move_at_a_time_goes_each_way_and_it_is_bounded() -> None:
    world = TierWorld(device=800, host=1000)
    blocks = world.seal([bytes([n % 250, n // 250]) for n in range(400)])
    world.advance()
    world.advance()
    (read,) = world.reads
    assert len(read.src) == MAX_MOVE_BLOCKS
    world.kv.pool.release(blocks)
    world.settle()
    assert len(world.readable(HOST)) == 400

    small = TierWorld(device=80, host=16)
    small.serve(*range(20))
    assert {len(read.src) for read in small.posted} == {2}  # 1 / 8 of the host arena


def test_the_device_block_stays_while_it_is_copied() -> None:
    world = TierWorld(device=2, host=4)
    blocks = world.seal(names(1))
    world.advance()
    world.kv.pool.release(blocks)
    assert world.kv.allocate(2) is None
    world.settle()
    assert world.kv.pool.is_idle()


def test_blocks_that_leave_the_device_before_their_copy_are_missed() -> None:
    world = TierWorld(host=8)
    world.kv.pool.release(world.seal(names(1, 2)))
    world.clear_device()
    world.settle()
    assert world.held(HOST) == []
    assert world.tiers.counters["tier_missed"] == 2
    world.assert_idle()


def test_no_more_blocks_wait_to_be_copied_than_the_device_has() -> None:
    world = TierWorld(device=4, host=8)
    for start in range(0, 20, 4):
        world.kv.pool.release(world.seal(names(*range(start, start + 4))))
        world.tiers.use(0.0, [], KEEP)
    assert len(world.tiers._blocks.to_copy) == 4
    world.settle()
    assert world.held(HOST) == [16, 17, 18, 19]


def test_blocks_are_written_to_disk_when_they_were_not_used_for_a_while() -> None:
    world = TierWorld(host=32, disk=32, disk_after_s=2.0)
    world.serve(1, 2)
    world.advance(1.0)
    world.tiers.use(world.now, names(2), KEEP)
    world.rest(1.0)
    assert world.held(DISK) == [1]
    world.rest(1.0)
    assert world.held(DISK) == [1, 2]
    assert {record.block_hash for record in world.index.values()} == set(names(1, 2))
    assert world.held(HOST) == [1, 2]
    assert [s.tier for s in world.tiers.find(names(1))] == [HOST]
    world.assert_idle()


def test_blocks_go_to_disk_oldest_use_first() -> None:
    world = TierWorld(host=32, disk=8)
    for number in (3, 1, 2):
        world.serve(number)
        world.now += 0.1
    world.tick(5.0)
    order = []
    while world.reads:
        (read,) = world.reads
        order += [world.memory[HOST][slot] - 1000 for slot in read.src]
        world.finish(read)
        world.advance()
    assert order == [3, 1, 2]


def test_what_may_not_go_to_disk_does_not() -> None:
    world = TierWorld(host=16, disk=16)
    world.serve(1, 2, retention=MEMORY_ONLY)
    world.rest()
    assert world.held(DISK) == []
    world.tiers.use(world.now, names(1), KEEP)  # a use that allows it
    world.rest()
    assert world.held(DISK) == [1]
    world.assert_idle()


def test_without_host_memory_blocks_go_to_disk_directly() -> None:
    world = TierWorld(disk=16)
    world.serve(1, 2)
    assert {(read.src_tier, read.dst_tier) for read in world.posted} == {(DEVICE, DISK)}
    assert world.held(DISK) == [1, 2]
    world.serve(3, retention=MEMORY_ONLY)
    assert world.held(DISK) == [1, 2]
    world.tiers.promote(names(1))  # there is nowhere to bring it
    world.assert_idle()


def test_without_lower_tiers_nothing_happens() -> None:
    world = TierWorld()
    world.kv.pool.release(world.seal(names(1)))
    world.tiers.use(0.0, names(1), KEEP)
    world.tiers.promote(names(1))
    world.tick(100.0)
    assert world.tiers.find(names(1)) == []
    assert world.tiers.take_changes() == world.tiers.snapshot() == ()
    assert world.kv.newly_sealed == []
    assert world.tiers.on_copy_done(0.0, CopyDone(1, None)) is None
    assert world.tiers.num_blocks(HOST) == world.tiers.num_pinned(DISK) == 0
    world.assert_idle()


def test_the_records_of_the_store_are_found_after_a_start() -> None:
    kept = DiskRecord(5, b"\1", content(b"\1"), keep_s=50.0)
    short = DiskRecord(2, b"\2", content(b"\2"), keep_s=10.0)
    world = TierWorld(host=16, disk=16, records=[kept, short])
    (source,) = world.tiers.find(names(1))
    assert (source.tier, source.slot, source.checksum) == (DISK, 5, content(b"\1"))
    world.rest(11.0)
    assert world.held(DISK) == [1]
    assert list(world.index) == [5]
    world.serve(*range(10, 26))  # fills the host, and then the disk but for one slot
    world.rest(2.0)
    world.assert_idle()


def test_promoted_blocks_come_from_disk_to_host_memory() -> None:
    world = TierWorld(host=8, disk=32)
    world.serve(*range(8))
    world.rest()
    world.serve(*range(8, 16))
    assert world.held(HOST) == list(range(8, 16))
    world.clear_device()
    world.tiers.promote(names(0, 1, 9, 40))
    assert not is_quiet(world.tiers, world.now)
    world.settle()
    assert {s.tier for s in world.tiers.find(names(0, 1))} == {HOST}
    # What was brought up is not the next to go.
    world.serve(16, 17)
    assert {0, 1} <= set(world.held(HOST))
    world.assert_idle()


def test_a_store_that_fails_is_read_on_and_quiet_in_its_failure() -> None:
    records = [DiskRecord(n, bytes([n]), content(bytes([n])), 500.0) for n in range(3)]
    world = TierWorld(host=8, disk=8, records=records)
    world.store_failed()
    world.serve(7)
    world.rest(4.0)
    world.tiers.promote(names(0))
    world.settle()
    assert world.held(HOST) == [0, 7]
    assert world.held(DISK) == [0, 1, 2]
    assert is_quiet(world.tiers, world.now)
    world.store_failed()
    assert len(world.notes) == 1
    world.rest(10.0)
    assert world.held(DISK) == [0, 1, 2, 7]
    world.assert_idle()


def test_one_use_that_allows_the_disk_is_enough() -> None:
    world = TierWorld(host=16, disk=16)
    world.serve(1)
    world.serve(1, retention=MEMORY_ONLY)
    world.rest()
    assert world.held(DISK) == [1]


def test_no_more_promotions_wait_than_host_memory_has_room_for() -> None:
    world = TierWorld(host=2, disk=9, records=disk_records(*range(9)))
    world.tiers.promote(names(*range(9)))
    world.settle()
    assert world.held(HOST) == [0, 1]
