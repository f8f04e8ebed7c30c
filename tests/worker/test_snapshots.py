"""Snapshots of large caches: in parts, so that each fits into a frame, whatever happens between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

import pytest

from kvrelay.engine.kv.block_pool import BlockPool
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.events import (
    MAX_EMPTY,
    SLICE,
    SLICE_S,
    KVEvents,
    KVPublisher,
    KVSnapshot,
    KVSnapshotRequest,
)
from kvrelay.engine.kv.tier import Tier, TierHashes
from kvrelay.engine.node import Send, Wake
from kvrelay.engine.stats import RouterUp
from kvrelay.kvtransfer.tiers.manager import Tiers
from kvrelay.kvtransfer.tiers.pool import TierPool, Usage
from kvrelay.router.index.prefix_index import PrefixIndex
from tests.engine.configs import worker_config
from tests.worker.world import World


def follow(world: World, index: PrefixIndex) -> None:
    """Deliver to the router's index what the worker has sent."""
    for message in world.to_router:
        if isinstance(message, KVEvents | KVSnapshot):
            index.apply(world.now, message)
    world.to_router.clear()


def serve(world: World, numbers: Iterable[int]) -> None:
    for number in numbers:
        world.submit(f"r{number}", [100 * number + t for t in range(20)], 4, remote=False)
        world.drain()


def test_a_large_cache_is_published_in_parts_while_it_changes() -> None:
    world = World(num_blocks=40, num_host_blocks=60, max_snapshot_blocks=4)
    serve(world, range(5))
    index = PrefixIndex()
    index.add("decode", 1)
    world.to_router.clear()
    world.deliver("decode", RouterUp("router"))
    (snapshot,) = [m for m in world.to_router if isinstance(m, KVSnapshot)]
    assert len(snapshot.hashes) == 4
    follow(world, index)
    assert len(index.block_hashes("decode")) == 4
    for number in range(5, 15):  # evicts blocks that were not told of yet
        serve(world, [number])
        world.tick(0.25)
        world.drain()
        follow(world, index)
    core = world.decode.core
    assert core.kv.pool.num_evictions > 0
    assert index.in_step
    assert index.block_hashes("decode") == set(core.kv.pool.block_hashes())
    held = {part.tier: set(part.stored) for part in world.decode.exchange.tiers.snapshot()}
    assert index.block_hashes("decode", Tier.HOST) == held[Tier.HOST]


def test_a_part_that_is_lost_makes_the_router_ask_again() -> None:
    world = World(num_blocks=40, max_snapshot_blocks=4)
    serve(world, range(5))
    index = PrefixIndex()
    index.add("decode", 1)
    world.deliver("decode", RouterUp("router"))
    world.to_router = [m for m in world.to_router if isinstance(m, KVSnapshot)]
    follow(world, index)
    world.tick(0.25)
    events = [m for m in world.to_router if isinstance(m, KVEvents)]
    asks = [index.apply(1.0, event) for event in (events[0], *events[2:])]
    assert True in asks
    world.to_router.clear()
    world.perform("decode", [Send("decode", KVSnapshotRequest("router"))])
    world.drain()
    for _ in range(4):
        world.tick(0.25)
        world.drain()
    follow(world, index)
    assert index.block_hashes("decode") == set(world.decode.core.kv.pool.block_hashes())


def test_a_snapshot_that_comes_before_the_rest_of_the_last_one_leaves_nothing_out() -> None:
    world = World(num_blocks=40, max_snapshot_blocks=4)
    serve(world, range(5))
    index = PrefixIndex()
    index.add("decode", 1)
    world.to_router.clear()
    world.deliver("decode", RouterUp("router"))
    follow(world, index)
    serve(world, range(5, 9))  # the first blocks go: the next snapshot begins with others
    assert world.decode.core.kv.pool.num_evictions > 0
    follow(world, index)
    world.perform("decode", [Send("decode", KVSnapshotRequest("router"))])
    world.drain()
    for _ in range(8):
        world.tick(0.25)
        world.drain()
    follow(world, index)
    assert index.in_step
    assert index.block_hashes("decode") == set(world.decode.core.kv.pool.block_hashes())


@pytest.mark.parametrize("seed", range(6))
def test_a_router_knows_all_whatever_comes_and_goes_and_who_asks_meanwhile(seed: int) -> None:
    rng = Random(seed)
    sizes = {"num_host_blocks": rng.choice([12, 40]), "num_disk_blocks": 50}
    world = World(num_blocks=40, max_snapshot_blocks=3, disk_after_s=0.3, **sizes)
    serve(world, range(4))
    losing, whole = PrefixIndex(0.0), PrefixIndex()  # a router that loses messages, and another
    for index in losing, whole:
        index.add("decode", 1)
    world.to_router.clear()
    world.deliver("decode", RouterUp("router"))
    for number in range(40):
        if rng.random() < 0.4:
            serve(world, [rng.randrange(12)] if rng.random() < 0.5 else [number])
        if rng.random() < 0.7:
            world.tick(0.25)
            world.drain()
        messages = [m for m in world.to_router if isinstance(m, KVEvents | KVSnapshot)]
        world.to_router.clear()
        for message in messages:
            if isinstance(message, KVEvents) or number == 0:
                whole.apply(world.now, message)
            is_lost = number < 30 and rng.random() < 0.1
            if not is_lost and losing.apply(world.now, message):
                world.perform("decode", [Send("decode", KVSnapshotRequest("router"))])
        world.drain()
    for _ in range(30):
        world.tick(0.25)
        world.drain()
        whole_messages = [m for m in world.to_router if isinstance(m, KVEvents)]
        follow(world, losing)
        for message in whole_messages:
            whole.apply(world.now, message)
    held = {part.tier: set(part.stored) for part in world.decode.exchange.tiers.snapshot()}
    held[Tier.DEVICE] = set(world.decode.core.kv.pool.block_hashes())
    for index in losing, whole:
        assert index.in_step
        for tier, names in held.items():
            assert index.block_hashes("decode", tier) == names, tier


def test_no_message_looks_at_more_than_a_part_of_a_large_store() -> None:
    names = [number.to_bytes(16) for number in range(1, 2001)]
    store = TierPool(Tier.DISK, 4000)
    usages = (Usage(name, number, 0.0, 1e9, True) for number, name in enumerate(names))
    store.fill((2 * number, 0, 0, usage) for number, usage in enumerate(usages))
    looked: list[int] = []

    class Lower(Tiers):
        def parts(self, count: int) -> Iterator[TierHashes]:
            for part in super().parts(count):
                looked[-1] += count
                yield part

    config = worker_config(max_snapshot_blocks=64)
    lower = Lower(config, KVCacheManager(8, 4))
    lower._pools[Tier.DISK] = store
    publisher = KVPublisher(config, BlockPool(8))
    publisher.lower = lower
    lower.take_changes()
    index = PrefixIndex()
    index.add(config.node_id, config.epoch)
    looked.append(0)
    effects = publisher.subscribe("router")
    while True:
        messages = [each.message for each in effects if isinstance(each, Send)]
        assert sum(len(part.stored) for message in messages for part in message.tiers) <= 64
        for message in messages:
            index.apply(0.0, message)
        wakes = [each for each in effects if isinstance(each, Wake)]
        if not wakes:
            break
        assert wakes == [Wake(SLICE_S, SLICE)]
        looked.append(0)
        publisher.on_woken()
        effects = publisher.publish()
    assert index.block_hashes(config.node_id, Tier.DISK) == set(names)
    assert len(looked) > 2000 / 64
    assert max(looked) <= 64 * MAX_EMPTY
