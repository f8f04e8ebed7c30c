"""Moves that fail, bytes that are wrong, a disk that cannot be written."""

from __future__ import annotations

import pytest

from kvrelay.engine.kv.tier import DiskRecord, Retention, Tier
from kvrelay.kvtransfer.agent import CopyBlocks, StoreIndex
from tests.kvtransfer.tiers.tier_world import TierWorld, content, disk_records, names

HOST, DISK = Tier.HOST, Tier.DISK


def test_a_copy_with_other_bytes_is_not_entered() -> None:
    world = TierWorld(host=16)
    blocks = world.seal(names(1, 2))
    world.advance()
    world.finish(world.reads[0], damage=1)
    assert world.held(HOST) == [2]
    assert world.tiers.num_blocks(HOST) == 1
    assert world.tiers.counters["moved_bad_device_host"] == 1
    assert [note.level for note in world.notes] == ["error"]
    world.kv.pool.release(blocks)
    world.assert_idle()


def test_a_failed_copy_frees_its_slots_and_the_next_waits_a_moment() -> None:
    world = TierWorld(host=16)
    world.kv.pool.release(world.seal(names(1, 2)))
    world.advance()
    world.finish(world.reads[0], "out of luck")
    assert world.tiers.num_blocks(HOST) == 0
    world.kv.pool.release(world.seal(names(3)))
    world.advance(0.5)
    assert world.reads == []
    world.advance(0.5)
    assert len(world.reads) == 1
    assert [note.counter for note in world.notes] == ["tier_move_failed"]
    world.assert_idle()


def test_a_host_copy_that_changed_is_forgotten_and_not_written() -> None:
    world = TierWorld(host=16, disk=16)
    world.serve(1, 2)
    (source,) = world.tiers.find(names(1))
    world.memory[HOST][source.slot] ^= 1
    world.tick(2.0)
    while world.reads:
        world.finish(world.reads[0])
        world.advance()
    assert world.held(HOST) == [2]
    assert world.held(DISK) == [2]
    assert [record.block_hash for record in world.index.values()] == names(2)
    assert world.tiers.counters["moved_bad_host_disk"] == 1
    assert world.tiers.counters["tier_bad_host"] == 1
    world.assert_idle()


@pytest.mark.parametrize(
    ("error", "held"),
    [("input/output error", []), ("refused: too many transfers are outstanding", [1])],
)
def test_a_disk_block_is_forgotten_if_it_cannot_be_read_not_if_that_was_refused(
    error: str, held: list[int]
) -> None:
    world = TierWorld(host=8, disk=8, records=disk_records(1))
    world.tiers.promote(names(1))
    world.advance()
    world.finish(world.reads[0], error)
    world.advance()
    assert world.held(DISK) == [*world.index] == held
    assert world.tiers.counters.get("tier_unreadable_disk", 0) == 1 - len(held)
    world.assert_idle()


def test_a_disk_block_with_other_bytes_is_forgotten() -> None:
    world = TierWorld(host=8, disk=8, records=disk_records(1))
    world.memory[DISK][1] ^= 1
    world.tiers.promote(names(1))
    world.advance()
    world.finish(world.reads[0])
    world.advance()
    assert world.held(DISK) == world.held(HOST) == []
    assert world.index == {}
    world.assert_idle()


def test_a_discarded_copy_is_forgotten_and_its_slot_free_after_the_pin() -> None:
    world = TierWorld(host=1, disk=8)
    world.serve(1)
    world.rest()
    (source,) = world.tiers.find(names(1))
    assert source.tier is HOST
    world.tiers.pin([source])
    world.pinned.append(source)
    world.tiers.discard(source)
    world.tiers.discard(source)
    assert [s.tier for s in world.tiers.find(names(1))] == [DISK]
    assert world.tiers.check_idle() == ["1 blocks of the host tier are pinned"]
    world.serve(2)
    assert world.held(HOST) == []  # no slot: it is not copied, and nothing waits for one
    assert world.tiers.counters["tier_no_room_host"] == 1
    world.pinned.clear()
    world.tiers.unpin([source])
    world.serve(3)
    assert world.held(HOST) == [3]
    world.assert_idle()


def test_a_slot_leaves_the_index_before_it_is_written_again() -> None:
    world = TierWorld(disk=2)
    world.serve(1, 2)
    world.kv.pool.release(world.seal(names(3)))
    effects = world.tiers.advance(world.now)
    index, read = effects
    assert isinstance(index, StoreIndex)
    assert isinstance(read, CopyBlocks)
    assert index.remove == read.dst
    world.perform(effects)
    world.assert_idle()
    assert len(world.index) == 2


def test_a_record_is_put_again_when_its_block_is_kept_much_longer() -> None:
    world = TierWorld(host=8, disk=8)
    world.serve(1, retention=Retention(100.0))
    world.rest(2.0)
    ((slot, first),) = world.index.items()
    world.tick(10.0)
    world.tiers.use(world.now, names(1), Retention(100.0))
    world.rest(1.0)
    assert world.index[slot] is first  # there is time
    world.rest(60.0)
    world.tiers.use(world.now, names(1), Retention(100.0))
    world.rest(0.0)
    assert world.index[slot].keep_s == pytest.approx(100.0)
    world.assert_idle()


def test_after_a_failed_write_the_disk_is_left_alone_for_longer_each_time() -> None:
    world = TierWorld(host=32, disk=32)
    world.serve(1)
    waits = []
    for _ in range(7):
        while not world.reads:
            world.tick(0.5)
        failed_at = world.now
        world.finish(world.reads[0], "no space left on device")
        while not world.reads:
            world.tick(0.5)
        waits.append(world.now - failed_at)
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    notes = [note for note in world.notes if note.counter == "disk_store_failed"]
    assert len(notes) == 7
    assert "no space left on device" in notes[0].text
    assert "for 10 s" in notes[0].text
    assert world.tiers.counters["disk_store_failed"] == 7
    world.settle()
    assert world.held(DISK) == [1]
    world.rest(700.0)
    world.serve(2)
    world.tick(2.0)
    world.finish(world.reads[0], "once more")
    assert "for 10 s" in world.notes[-1].text  # it had been well for long enough


def test_what_is_forgotten_while_the_store_fails_is_removed_from_its_index_later() -> None:
    records = [DiskRecord(n, bytes([n]), content(bytes([n])), 5.0) for n in range(3)]
    world = TierWorld(host=8, disk=3, records=records)
    world.store_failed()
    world.rest(6.0)
    assert world.held(DISK) == []
    assert len(world.index) == 3
    world.serve(8)
    world.rest(6.0)
    assert world.held(DISK) == [8]
    world.assert_idle()


def test_discarding_a_copy_leaves_a_newer_one_in_another_slot() -> None:
    world = TierWorld(host=2)
    world.serve(1)
    (old,) = world.tiers.find(names(1))
    world.serve(2, 3)
    world.serve(4)
    world.clear_device()
    world.serve(1)
    (new,) = world.tiers.find(names(1))
    assert new.slot != old.slot
    world.tiers.discard(old)
    assert world.tiers.find(names(1)) == [new]
