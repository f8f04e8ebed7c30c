"""A fourth tier beside host memory and disk, which the code of the tiers does not name."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest

from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.engine.model.step_executor import StepExecutor
from kvrelay.engine.node import Effect
from kvrelay.kvtransfer.agent import CopyBlocks, CopyDone, MoveId, StoreFailed, StoreIndex
from kvrelay.kvtransfer.executor import StoreExecutor, TransferExecutor
from kvrelay.worker.threads import Copies, WorkerThreads
from tests.kvtransfer.fake_agent import FakeAgent, RefusingStore
from tests.kvtransfer.movers.nixl_peer import content as pool_content
from tests.kvtransfer.tiers.object_tier import WRITE_AFTER_S, add_object_tier
from tests.kvtransfer.tiers.tier_world import TierWorld, content, names

HOST, DISK = Tier.HOST, Tier.DISK


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Tier:
    return add_object_tier(monkeypatch)


class ObjectWorld(TierWorld):
    """Keeps the index of the object store too."""

    def __init__(self, tier: Tier, records: tuple[DiskRecord, ...] = (), **sizes: Any) -> None:
        self.objects = tier
        self.object_index = {record.slot: record for record in records}
        super().__init__(**sizes)
        self.memory[tier] = {record.slot: record.checksum for record in records}
        self.tiers.start(self.now, {tier: records})

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, StoreIndex) and effect.tier is self.objects:
                for slot in effect.remove:
                    del self.object_index[slot]
                for record in effect.put:
                    assert self.memory[self.objects][record.slot] == record.checksum
                    self.object_index[record.slot] = record
            else:
                super().perform([effect])


def test_idle_blocks_are_written_to_each_tier_behind_the_first(objects: Tier) -> None:
    world = ObjectWorld(objects, host=16, disk=16, disk_after_s=2.0)
    world.serve(1, 2)
    world.rest(2.0)
    assert (world.held(DISK), world.held(objects)) == ([1, 2], [])
    world.rest(WRITE_AFTER_S)
    assert world.held(objects) == [1, 2]
    ways = [(read.src_tier, read.dst_tier) for read in world.posted]
    assert ways == [(Tier.DEVICE, HOST), (HOST, DISK), (HOST, objects)]
    assert {record.block_hash for record in world.object_index.values()} == set(names(1, 2))
    world.assert_idle()


def test_what_only_the_fourth_tier_has_is_found_there_and_promoted(objects: Tier) -> None:
    records = tuple(DiskRecord(n, bytes([n]), content(bytes([n])), 500.0) for n in (1, 2))
    world = ObjectWorld(objects, records, host=16, disk=16)
    assert [(s.tier, s.slot) for s in world.tiers.find(names(1, 2))] == [(objects, 1), (objects, 2)]
    world.tiers.promote(names(1, 2))
    world.settle()
    assert [s.tier for s in world.tiers.find(names(1, 2))] == [HOST, HOST]
    world.assert_idle()


def test_a_store_that_fails_does_not_stop_another(objects: Tier) -> None:
    world = ObjectWorld(objects, host=16, disk=16, disk_after_s=2.0)
    world.perform(world.tiers.on_store_failed(world.now, StoreFailed("503", tier=objects)))
    world.serve(1)
    world.rest(8.0 + WRITE_AFTER_S / 10)
    assert (world.held(DISK), world.held(objects)) == ([1], [])
    (note,) = world.notes
    assert note.counter == "archive_store_failed"
    world.rest(WRITE_AFTER_S)
    assert world.held(objects) == [1]
    world.assert_idle()


def test_a_store_that_was_lost_forgets_its_own_blocks(objects: Tier) -> None:
    world = ObjectWorld(objects, host=16, disk=16, disk_after_s=2.0)
    world.serve(1)
    world.rest(WRITE_AFTER_S)
    world.object_index.clear()
    lost = StoreFailed("the bucket is gone", lost=True, tier=objects)
    world.perform(world.tiers.on_store_failed(world.now, lost))
    world.listen()
    assert (world.held(DISK), world.held(objects)) == ([1], [])


def test_a_thread_of_its_own_copies_to_it(objects: Tier) -> None:
    pools = {Tier.DEVICE: pool_content(4, 8, 0), HOST: pool_content(4, 8, 1)}
    agents = {tier: FakeAgent(states=["done"] * 9) for tier in (HOST, DISK, objects)}
    store: Any = RefusingStore()
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    new: Callable[[Tier], TransferExecutor] = lambda tier: TransferExecutor(  # noqa: E731
        "me", 1, agents[tier], pools
    )
    copies: Copies = {
        Tier.DEVICE: (new(HOST), None),
        **{tier: (new(tier), StoreExecutor(store, tier=tier)) for tier in (DISK, objects)},
    }
    steps = StepExecutor(lambda step: None, lambda blocks: [])  # type: ignore[arg-type, return-value]
    threads = WorkerThreads(steps, copies, answers.put, "me")
    try:
        threads.perform(CopyBlocks(MoveId(1), "me", 1, (0,), (1,), 5.0, HOST, objects))
        done = answers.get(timeout=10.0)
        assert isinstance(done, CopyDone)
        assert done.error is None
        assert [agent.num_reads for agent in agents.values()] == [0, 0, 1]
        threads.perform(StoreIndex(remove=(1,), tier=objects))
        failed = answers.get(timeout=10.0)
        assert (failed.tier, failed.error) == (objects, "no space")
    finally:
        threads.close()
