"""Orders to bring the blocks of a session up again, ahead of its next request."""

from __future__ import annotations

import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.messages import CacheAction
from kvrelay.kvtransfer.tiers.manager import ORDER_TIMEOUT_S
from tests.kvtransfer.tiers.tier_world import (
    TierWorld,
    content,
    disk_records,
    names,
    parked_world,
)

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
RESUME = CacheAction.RESUME


def test_resumed_blocks_are_a_cache_hit_on_the_device() -> None:
    world = parked_world()
    world.order(RESUME, *range(8))
    world.settle()
    assert world.answer() == 8
    blocks = world.kv.pool.lookup(names(*range(8)))
    assert [world.kv.checksums[block] for block in blocks] == [content(n) for n in names(*range(8))]
    assert [world.memory[DEVICE][b] for b in blocks] == [world.kv.checksums[b] for b in blocks]
    assert world.kv.newly_sealed == []
    world.assert_idle()


def test_resumed_blocks_come_from_disk_through_host_memory() -> None:
    world = TierWorld(host=16, disk=8, records=disk_records(*range(8)))
    world.order(RESUME, *range(8))
    world.settle()
    assert world.answer() == 8
    assert world.held(HOST) == list(range(8))
    assert {(r.src_tier, r.dst_tier) for r in world.posted} == {(DISK, HOST), (HOST, DEVICE)}
    world.assert_idle()


def test_without_host_memory_they_come_from_disk_at_once() -> None:
    world = TierWorld(disk=8, records=disk_records(*range(8)))
    world.order(RESUME, *range(8))
    world.settle()
    assert world.answer() == 8
    world.assert_idle()


def test_nothing_behind_a_missing_block_is_resumed() -> None:
    world = parked_world()
    world.order(RESUME, 0, 1, 99, 2, 3)
    world.settle()
    assert world.answer() == 2
    assert world.held(DEVICE) == [0, 1]
    world.assert_idle()


def test_a_resumed_session_evicts_a_quarter_of_the_device_at_most() -> None:
    world = parked_world(host=32, device=16)
    world.serve(*range(20, 36))
    world.order(RESUME, *range(8))
    world.settle()
    assert world.answer() == 4
    assert world.held(DEVICE) == [*range(4), *range(24, 36)]


def test_a_session_is_resumed_into_all_blank_memory_but_what_is_left_to_requests() -> None:
    world = TierWorld(device=16, host=16)
    world.serve(*range(16))
    world.rest()
    world.clear_device()
    world.order(RESUME, *range(16))
    world.settle()
    assert world.answer() == 14
    assert world.held(DEVICE) == [*range(14)]


def test_resuming_leaves_blocks_to_requests_and_ends_at_its_deadline() -> None:
    world = parked_world(device=16)
    busy = world.kv.allocate(14)
    assert busy is not None
    world.order(RESUME, 0, 1)
    world.settle()
    assert world.answers == []
    assert world.kv.pool.num_free == 2
    world.tick(ORDER_TIMEOUT_S - 0.1)
    assert world.answers == []
    world.tick(0.1)
    assert world.answer() == 0
    world.kv.pool.release(busy)
    world.assert_idle()
    assert world.held(DEVICE) == []


def test_resuming_starts_when_a_request_gives_its_blocks_back() -> None:
    world = parked_world(device=16)
    busy = world.kv.allocate(14)
    assert busy is not None
    world.order(RESUME, 0, 1)
    world.kv.pool.release(busy)
    world.settle()
    assert world.answer() == 2


def test_a_block_that_arrives_with_other_bytes_is_not_resumed() -> None:
    world = parked_world(disk=0)
    world.order(RESUME, *range(8))
    world.advance()
    world.finish(world.reads[0], damage=1)
    world.settle()
    assert world.answer() == 0
    assert world.held(DEVICE) == [1]
    assert world.held(HOST) == list(range(1, 8))
    world.assert_idle()


def test_what_the_device_has_stays_there_while_the_rest_is_resumed() -> None:
    world = parked_world(device=16)
    world.serve(0, 1)
    world.serve(*range(20, 34))
    assert world.held(DEVICE) == [0, 1, *range(20, 34)]
    world.order(RESUME, 0, 1, 2, 3)
    world.settle()
    assert world.answer() == 4
    assert {0, 1, 2, 3} <= set(world.held(DEVICE))


@pytest.mark.parametrize("failing", [HOST, DEVICE])
def test_a_block_whose_moves_fail_is_not_tried_for_ever(failing: Tier) -> None:
    world = TierWorld(host=8, disk=8, records=disk_records(0))
    world.order(RESUME, 0)
    world.advance()
    num_failures = 0
    while world.answers == []:
        (read,) = world.reads
        fails = read.dst_tier is failing
        num_failures += fails
        world.finish(read, "refused" if fails else None)
        world.tick(1.0)
    assert world.answer() == 0
    assert 1 <= num_failures <= 2
    world.assert_idle()
