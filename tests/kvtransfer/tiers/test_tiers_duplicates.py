"""Where there is a disk, host memory that is full keeps what the device has not."""

from __future__ import annotations

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.messages import CacheAction
from kvrelay.kvtransfer.tiers.pool import DUPLICATE
from tests.kvtransfer.tiers.tier_world import TierWorld, names

HOST, DISK = Tier.HOST, Tier.DISK


def full_world(**options: int) -> TierWorld:
    """Blocks 0 to 15 came one after the other; all are on disk, the last 8 on the device."""
    world = TierWorld(**{"device": 8, "host": 8, "disk": 64, **options})
    for number in range(16):
        world.serve(number)
        world.rest(0.3)
    for _ in range(4):
        world.rest(60.0)
    assert world.held(DISK) == [*range(16)]
    return world


def test_host_memory_has_what_the_device_has_evicted() -> None:
    world = full_world()
    for number in range(8):  # again: each comes from below, and another one leaves the device
        world.serve(number)
        world.rest(0.3)
    held = set(world.held(HOST))
    on_device = {n for n in range(16) if world.kv.pool.is_cached(names(n)[0])}
    assert on_device == {*range(8)}
    assert len(held | on_device) > 12, "half of it would be held twice"
    world.assert_idle()


def test_what_the_device_evicts_next_is_in_host_memory() -> None:
    world = full_world()
    for number in (3, 5, 1, 7, 2, 6, 0, 4, 3, 5):
        world.serve(number)
        world.rest(0.3)
        leaving = world.kv.pool.next_evicted(2)
        assert {*leaving} <= {*names(*world.held(HOST))}


def test_a_block_that_storage_has_not_keeps_its_copy() -> None:
    world = TierWorld(device=16, host=8)
    for number in range(12):
        world.serve(number)
        world.rest(0.3)
    assert world.held(HOST) == [*range(4, 12)], "the least recently used have gone"
    assert f"tier_{DUPLICATE}_host" not in world.tiers.counters


def test_a_copy_of_what_leaves_does_not_change_what_leaves() -> None:
    world = full_world()
    before = world.kv.pool.next_evicted(8)
    world.serve(0)
    world.rest(0.3)
    world.rest(0.3)
    assert world.kv.pool.next_evicted(8)[: len(before) - 1] == before[1:]


def test_what_is_dropped_is_not_copied_again() -> None:
    world = full_world()
    for number in range(4):
        world.serve(number)
        world.rest(0.3)
    world.order(CacheAction.DROP, 0, 1, 2, 3)
    world.settle()
    for number in range(8, 16):
        world.serve(number)
        world.rest(0.3)
    assert not {0, 1, 2, 3} & {*world.held(HOST), *world.held(DISK)}
    world.assert_idle()


def test_a_block_that_is_evicted_while_it_is_copied_has_no_copy() -> None:
    world = full_world()
    for number in range(8):
        world.serve(number)
    before = {*world.held(HOST)}
    world.tick(0.3)
    (read,) = [read for read in world.reads if read.src_tier is Tier.DEVICE]
    pool = world.kv.pool
    assert pool.num_free == pool.num_blocks, "it keeps its place in the order of eviction"
    world.clear_device()
    world.settle()
    assert {*world.held(HOST)} <= before
    assert len(read.src) > 0
    assert world.notes == []
    world.assert_idle()
