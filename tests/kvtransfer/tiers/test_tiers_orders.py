"""Orders to park, pin and drop blocks: each ends once, whatever becomes of it."""

from __future__ import annotations

import pytest

from kvrelay.engine.kv.tier import Retention, Tier
from kvrelay.kvtransfer.messages import CacheAction
from kvrelay.kvtransfer.tiers.manager import MAX_ORDERS, ORDER_TIMEOUT_S
from tests.kvtransfer.tiers.tier_world import (
    KEEP,
    MEMORY_ONLY,
    TierWorld,
    disk_records,
    names,
    parked_world,
)

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
PARK, RESUME, PIN = CacheAction.PARK, CacheAction.RESUME, CacheAction.PIN
UNPIN, DROP = CacheAction.UNPIN, CacheAction.DROP


def test_parked_blocks_leave_the_device_and_are_written_to_disk_at_once() -> None:
    world = TierWorld(host=16, disk=16, disk_after_s=60.0)
    world.serve(1, 2, 3)
    world.order(PARK, 1, 2, 3)
    assert world.answer() == 3
    assert world.held(DEVICE) == []
    world.settle()
    assert world.held(DISK) == [1, 2, 3]
    world.assert_idle()


def test_blocks_that_are_parked_lazily_are_below_the_device_and_stay_while_there_is_room() -> None:
    world = TierWorld(host=16, disk=16, disk_after_s=60.0)
    world.serve(1, 2, 3)
    world.order(PARK, 1, 2, 3, lazy=True)
    assert world.answer() == 3
    world.settle()
    assert world.held(DEVICE) == world.held(HOST) == world.held(DISK) == [1, 2, 3]
    size = world.kv.pool.num_blocks
    world.kv.pool.release(world.kv.pool.allocate(size) or [])
    assert world.held(DEVICE) == []
    world.assert_idle()


def test_blocks_that_are_being_copied_are_parked_when_that_is_done() -> None:
    world = TierWorld(host=16, disk=16)
    world.kv.pool.release(world.seal(names(1, 2, 3)))
    world.advance()
    world.order(PARK, 1, 2, 3, 9)
    assert world.answers == []
    assert world.held(DEVICE) == [1, 2, 3]
    world.settle()
    assert world.answer() == 3
    assert world.held(DEVICE) == []
    assert world.held(DISK) == [1, 2, 3]
    world.assert_idle()


def test_blocks_that_only_the_device_has_are_copied_down_to_be_parked() -> None:
    world = TierWorld(host=4)
    world.serve(1, 2)
    world.serve(*range(3, 7))
    assert not {1, 2} & set(world.held(HOST))
    world.order(PARK, 1, 2)
    world.settle()
    assert world.answer() == 2
    assert world.held(DEVICE) == [3, 4, 5, 6]


def test_a_block_that_a_request_uses_is_not_parked() -> None:
    world = TierWorld(host=16)
    world.serve(1, 2)
    world.kv.pool.acquire(world.kv.pool.lookup(names(1)))
    world.order(PARK, 1, 2)
    assert world.answer() == 1
    assert world.held(DEVICE) == [1]


def test_what_may_not_go_to_disk_is_parked_in_host_memory() -> None:
    world = TierWorld(host=16, disk=16)
    world.serve(1, retention=MEMORY_ONLY)
    world.order(PARK, 1)
    assert world.answer() == 1
    world.rest()
    assert (world.held(HOST), world.held(DISK)) == ([1], [])


def test_parking_straight_to_disk_works_without_host_memory() -> None:
    world = TierWorld(disk=16)
    world.kv.pool.release(world.seal(names(1, 2)))
    world.order(PARK, 1, 2)
    world.settle()
    assert world.answer() == 2
    assert world.held(DEVICE) == []
    assert world.held(DISK) == [1, 2]


def test_parking_ends_when_the_copy_fails() -> None:
    world = TierWorld(host=16)
    world.kv.pool.release(world.seal(names(1, 2)))
    world.order(PARK, 1, 2)
    world.advance()
    world.finish(world.reads[0], "out of luck")
    world.advance()
    assert world.answer() == 0
    assert world.held(DEVICE) == [1, 2]
    world.assert_idle()


def test_pinned_blocks_stay_however_many_others_come() -> None:
    world = TierWorld(host=8, disk=16)
    world.serve(1, 2, retention=Retention(5.0))
    world.order(PIN, 1, 2)
    assert world.answer() == 2
    for start in range(10, 100, 5):
        world.serve(*range(start, start + 5))
        world.rest(2.0)
    assert {1, 2} <= set(world.held(HOST))
    assert {1, 2} <= set(world.held(DISK))  # pinned there too, from its arrival
    world.order(UNPIN, 1, 2, 3)
    assert world.answer() == 2
    world.rest()
    assert not {1, 2} & set(world.held(HOST) + world.held(DISK))  # their time was over
    world.assert_idle()


def test_no_more_than_half_of_a_tier_is_pinned() -> None:
    world = TierWorld(host=8)
    world.serve(*range(8))
    world.order(PIN, *range(8))
    assert world.answer() == 4
    world.order(PIN, 0, 1)
    assert world.answer() == 2
    world.serve(*range(10, 18))
    assert world.held(HOST)[:4] == [0, 1, 2, 3]
    world.assert_idle()


def test_a_block_that_is_on_its_way_is_pinned_when_it_arrives() -> None:
    world = TierWorld(host=16)
    world.kv.pool.release(world.seal(names(1)))
    world.order(PIN, 1, 2)
    assert world.answers == []
    world.settle()
    assert world.answer() == 1


def test_dropped_blocks_are_nowhere() -> None:
    world = parked_world()
    world.serve(0, 1)
    world.order(DROP, 0, 1, 2, 99)
    assert world.answer() == 3
    assert world.held(DEVICE) == []
    assert world.held(HOST) == world.held(DISK) == [3, 4, 5, 6, 7]
    world.assert_idle()
    assert len(world.index) == 5


def test_a_dropped_block_that_is_being_moved_is_gone_when_that_is_done() -> None:
    world = TierWorld(host=16, disk=16)
    world.kv.pool.release(world.seal(names(1, 2)))
    world.advance()
    world.order(DROP, 1)
    assert world.answers == []
    world.settle()
    assert world.answer() == 1
    assert world.held(DEVICE) == world.held(HOST) == [2]
    world.tick(2.0)
    (read,) = world.reads
    assert read.dst_tier is DISK
    world.order(DROP, 2)
    world.settle()
    assert world.answer() == 1
    assert world.held(HOST) == world.held(DISK) == []
    world.assert_idle()
    assert world.index == {}


def test_dropping_leaves_what_others_use_or_pin() -> None:
    world = TierWorld(host=16)
    world.serve(1, 2, 3)
    world.order(PIN, 1)
    world.answers.clear()
    in_use = world.kv.pool.lookup(names(1, 2))
    world.kv.pool.acquire(in_use)
    world.order(DROP, 1, 2, 3)
    assert world.answer() == 1
    assert world.held(DEVICE) == [1, 2]
    assert world.held(HOST) == [1]
    world.kv.pool.release(in_use)
    world.assert_idle()


def test_a_dropped_block_is_not_given_to_another_while_it_is_read() -> None:
    world = TierWorld(host=1)
    world.serve(1)
    sources = world.tiers.find(names(1))
    world.tiers.pin(sources)
    world.pinned += sources
    world.order(DROP, 1)
    assert world.answer() == 1
    world.serve(2)
    assert world.held(HOST) == []
    world.pinned.clear()
    world.tiers.unpin(sources)
    world.serve(3)
    assert world.held(HOST) == [3]


@pytest.mark.parametrize("action", list(CacheAction))
def test_without_lower_tiers_every_order_is_answered_with_nothing(action: CacheAction) -> None:
    world = TierWorld()
    world.order(action, 1, 2)
    assert world.answer() == 0
    world.assert_idle()


@pytest.mark.parametrize("action", list(CacheAction))
def test_an_order_of_nothing_is_answered(action: CacheAction) -> None:
    world = TierWorld(host=4)
    world.order(action)
    assert world.answer() == 0
    world.assert_idle()


def test_names_that_are_there_twice_count_once() -> None:
    world = TierWorld(host=8)
    world.serve(1)
    world.order(PIN, 1, 1)
    assert world.answer() == 1


def test_no_more_than_a_bounded_number_of_orders_is_live() -> None:
    world = TierWorld(host=8)
    world.kv.pool.release(world.seal(names(1)))
    for number in range(MAX_ORDERS + 1):
        world.order(PIN, 1, order_id=str(number))
    (refused,) = world.answers
    assert (refused.order_id, refused.num_blocks) == (str(MAX_ORDERS), 0)
    world.settle()
    assert len(world.answers) == MAX_ORDERS + 1
    world.assert_idle()


def test_every_order_ends_though_nothing_ever_moves() -> None:
    world = TierWorld(host=16, disk=16, records=disk_records(1, 2))
    world.kv.pool.release(world.seal(names(5, 6)))
    world.advance()
    for action, number in ((PARK, 5), (RESUME, 1), (PIN, 6), (DROP, 5)):
        world.order(action, number, order_id=action)
    world.advance()
    assert len(world.tiers.check_idle()) > 4
    world.tick(ORDER_TIMEOUT_S)
    assert sorted(done.order_id for done in world.answers) == ["drop", "park", "pin", "resume"]
    world.assert_idle()


def test_parking_without_a_disk_leaves_nothing_to_do() -> None:
    world = TierWorld(host=6)
    world.serve(1)
    world.order(PARK, 1)
    assert world.answer() == 1
    world.assert_idle()


def test_a_parked_block_that_is_used_again_is_not_written_at_once() -> None:
    world = TierWorld(host=16, disk=16)
    blocks = world.seal(names(1))
    world.advance()
    world.order(PARK, 1)
    world.tiers.use(world.now, names(1), KEEP)
    world.settle()
    assert world.answer() == 0  # it is in use
    assert world.held(DISK) == []
    world.kv.pool.release(blocks)
    world.rest()
    assert world.held(DISK) == [1]


def test_a_dropped_block_that_is_in_use_is_not_copied_down_any_more() -> None:
    world = TierWorld(host=16)
    blocks = world.seal(names(1))
    world.order(DROP, 1)
    assert world.answer() == 0
    world.settle()
    assert world.held(HOST) == []
    world.kv.pool.release(blocks)
    world.assert_idle()
