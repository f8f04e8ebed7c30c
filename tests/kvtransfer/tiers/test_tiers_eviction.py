"""Which blocks stay in a tier that is full, and for how long."""

from __future__ import annotations

from kvrelay.engine.kv.tier import Retention, Tier
from tests.kvtransfer.tiers.tier_world import KEEP, TierWorld, names

HOST = Tier.HOST


def test_a_slot_is_not_reused_while_it_is_pinned() -> None:
    world = TierWorld(host=2, disk=0)
    world.serve(1, 2)
    sources = world.tiers.find(names(1))
    world.tiers.pin(sources)
    world.pinned += sources
    for number in range(3, 8):
        world.serve(number)
    assert world.held(HOST) == [1, 7]
    world.pinned.clear()
    world.tiers.unpin(sources)
    world.serve(8)
    world.serve(9)
    assert world.held(HOST) == [8, 9]
    world.assert_idle()


def test_the_end_of_a_sequence_goes_before_its_beginning() -> None:
    world = TierWorld(host=8)
    world.serve(*range(8))
    world.serve(10, 11, 12)
    assert world.held(HOST) == [0, 1, 2, 3, 4, 10, 11, 12]


def test_a_flood_of_new_blocks_leaves_those_that_were_used_again() -> None:
    world = TierWorld(device=16, host=20)
    world.serve(1, 2, 3, 4)
    world.serve(1, 2, 3, 4)
    for start in range(10, 200, 5):
        world.serve(*range(start, start + 5))
    assert world.held(HOST)[:4] == [1, 2, 3, 4]


def test_blocks_that_were_used_again_have_no_more_than_their_share() -> None:
    world = TierWorld(device=40, host=20)
    world.serve(*range(20))
    world.serve(*range(20))
    for start in range(20, 50):
        world.serve(start)
    held = world.held(HOST)
    assert [number for number in held if number < 20] == list(range(5))
    assert len(held) == 20


def test_a_prompt_is_not_used_again_by_the_request_that_made_it() -> None:
    world = TierWorld(host=10)
    world.serve(1, 2)
    for start in range(10, 40, 5):
        world.serve(*range(start, start + 5))
    assert not {1, 2} & set(world.held(HOST))


def test_the_longest_retention_of_all_uses_counts_from_each_use() -> None:
    world = TierWorld(host=8)
    world.serve(1, retention=Retention(10.0))
    world.serve(2, retention=Retention(10.0))
    world.tiers.use(5.0, names(1), Retention(20.0))
    world.tiers.use(6.0, names(1), Retention(1.0))
    world.rest(10.0)
    assert world.held(HOST) == [1]
    world.rest(14.9)
    assert world.held(HOST) == [1]
    world.rest(0.1)
    assert world.held(HOST) == []
    assert world.tiers.counters["tier_expired_host"] == 2
    world.assert_idle()


def test_what_has_expired_goes_first() -> None:
    world = TierWorld(host=4)
    world.serve(1)
    world.serve(2, 3, 4, retention=Retention(5.0))
    world.now = 6.0
    world.serve(5)
    assert 1 in world.held(HOST)
    assert 5 in world.held(HOST)


def test_a_block_that_is_not_worth_retaining_is_not_copied() -> None:
    world = TierWorld(host=4)
    world.serve(1, retention=Retention(0.0))
    assert world.posted == []
    world.assert_idle()


def test_a_pinned_block_expires_after_the_pin() -> None:
    world = TierWorld(host=4)
    world.serve(1, retention=Retention(5.0))
    sources = world.tiers.find(names(1))
    world.tiers.pin(sources)
    world.rest(6.0)
    assert world.held(HOST) == [1]
    world.tiers.unpin(sources)
    world.rest(0.0)
    assert world.held(HOST) == []


def test_what_is_about_to_leave_a_crowded_host_is_written_while_the_disk_has_room() -> None:
    world = TierWorld(host=8, disk=64)
    world.serve(*range(8))
    world.rest()
    world.serve(*range(8, 16))
    assert len(world.tiers.find(names(*range(8)))) == 8
    world.serve(*range(16, 20))  # long before `disk_after_s` is over
    assert "tier_lost" not in world.tiers.counters
    assert len(world.tiers.find(names(*range(12, 16)))) == 4


def test_what_leaves_the_host_before_its_time_is_lost_where_the_disk_is_full() -> None:
    world = TierWorld(host=8, disk=8)
    world.serve(*range(8))
    world.rest()
    world.serve(*range(8, 16))
    assert "tier_lost" not in world.tiers.counters
    world.serve(*range(16, 20))
    assert world.tiers.counters["tier_lost"] == 4


def test_the_last_blocks_of_a_request_go_before_its_first_though_they_are_sealed_with_its_end() -> (
    None
):
    world = TierWorld(device=16, host=4)
    blocks = world.seal(names(1, 2))
    world.settle()
    blocks += world.seal(names(3, 4))
    world.tiers.use(world.now, names(1, 2, 3, 4), KEEP)
    world.kv.pool.release(blocks)
    world.settle()
    world.serve(5, 6)
    assert world.held(HOST) == [1, 2, 5, 6]
