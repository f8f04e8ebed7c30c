"""Storage that has keys: shared, found by name, and forgotten without a word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvrelay.engine.kv.runs import LONGEST
from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import DAMAGED, MISSING, UNKNOWN, CopyDone, StoreListed
from tests.kvtransfer.tiers.tier_world import TierWorld, content, names

HOST, OBJECT = Tier.HOST, Tier.OBJECT


def world_of(num_objects: int = 40, **sizes: Any) -> TierWorld:
    return TierWorld(host=16, num_object_blocks=num_objects, object_after_s=5.0, **sizes)


def listed(world: TierWorld, *numbers: int) -> None:
    world.tiers.on_store_listed(world.now, StoreListed(OBJECT, tuple(names(*numbers))))


def removed(world: TierWorld) -> list[bytes]:
    changes = [change for change in world.tiers.take_changes() if change.tier is OBJECT]
    return [name for change in changes for name in change.removed]


def test_what_is_idle_is_written_with_its_name_and_checksum() -> None:
    world = world_of()
    world.serve(1, 2)
    world.rest(5.0)
    assert world.held(OBJECT) == [1, 2]
    written = world.posted[-1]
    assert sorted(written.names) == names(1, 2)
    assert written.checksums == tuple(content(name) for name in written.names)
    world.assert_idle()


def test_what_is_listed_is_found_and_not_written_again() -> None:
    world = world_of()
    listed(world, 1, 2)
    assert [(s.tier, s.checksum) for s in world.tiers.find(names(1, 2))] == [(OBJECT, UNKNOWN)] * 2
    world.serve(1, 2)
    world.rest(5.0)
    assert [(move.src_tier, move.dst_tier) for move in world.posted] == [(Tier.DEVICE, HOST)]


def test_a_list_pushes_nothing_out_and_a_router_does() -> None:
    world = world_of(num_objects=4)
    listed(world, 1, 2, 3)
    listed(world, 4, 5, 6)
    assert world.held(OBJECT) == [1, 2, 3, 4]
    world.tiers.take_changes()
    world.tiers.expect_stored(world.now, names(7, 8))
    assert {7, 8} < set(world.held(OBJECT))
    world.tiers.advance(world.now)
    assert removed(world) == [], "they are in the store still"
    world.tiers.check_integrity()


def test_of_a_long_session_that_is_known_to_be_stored_the_ends_of_runs_are_looked_at() -> None:
    world = world_of(num_objects=3 * LONGEST)
    session = [number.to_bytes(2) for number in range(2 * LONGEST + 2)]
    looked_at: list[int] = []

    class Names(list[bytes]):
        def __getitem__(self, at: Any) -> Any:
            if isinstance(at, slice):
                return Names(list.__getitem__(self, at))
            return list.__getitem__(self, at)

        def __iter__(self) -> Any:
            looked_at.append(len(self))
            return list.__iter__(self)

    world.tiers.expect_stored(world.now, Names(session[:-1]))
    assert looked_at == [LONGEST, LONGEST, 1]
    world.tiers.expect_stored(world.now, Names(session))
    assert looked_at == [LONGEST, LONGEST, 1, 2], "what the turn has added, and its run"
    assert world.tiers.num_blocks(OBJECT) == len(session)
    world.tiers.check_integrity()


def promote(world: TierWorld, *checksums: int) -> None:
    """Blocks 1, 2, ... are listed, and come to host memory as the store says."""
    numbers = range(1, len(checksums) + 1)
    listed(world, *numbers)
    world.tiers.take_changes()
    world.tiers.promote(names(*numbers))
    world.perform(world.tiers.advance(world.now))
    (move,) = [read for read in world.reads if read.src_tier is OBJECT]
    assert move.names == tuple(names(*numbers))
    world.reads.remove(move)
    done = CopyDone(move.transfer_id, None, checksums, 0.1, 20)
    world.perform(world.tiers.on_copy_done(world.now, done) or [])


def test_the_checksum_is_that_which_the_store_says() -> None:
    world = world_of()
    promote(world, 71, 72)
    assert [s.checksum for s in world.tiers.find(names(1, 2))] == [71, 72]
    assert [s.tier for s in world.tiers.find(names(1, 2))] == [HOST, HOST]


@pytest.mark.parametrize(("wrong", "num_notes"), [(MISSING, 0), (DAMAGED, 1)])
def test_what_is_not_there_is_forgotten_by_all(wrong: int, num_notes: int) -> None:
    world = world_of()
    promote(world, 71, wrong)
    assert world.held(HOST) == [1]
    assert world.held(OBJECT) == [1]
    assert removed(world) == names(2)
    assert len(world.notes) == num_notes, "a bucket's lifecycle is no fault"


def test_a_store_that_does_not_answer_has_what_it_had() -> None:
    world = world_of()
    listed(world, 1)
    world.tiers.promote(names(1))
    world.perform(world.tiers.advance(world.now))
    (move,) = world.reads
    world.reads.clear()
    failed = CopyDone(move.transfer_id, "503", elapsed_s=1.0)
    world.perform(world.tiers.on_copy_done(world.now, replace(failed)) or [])
    assert world.held(OBJECT) == [1]
    world.tiers.check_integrity()
