"""Snapshots of large caches: in parts, so that each fits into a frame, whatever happens between."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.engine.kv.events import KVEvents, KVSnapshot, KVSnapshotRequest
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import Send
from kvrelay.engine.stats import RouterUp
from kvrelay.router.index.prefix_index import PrefixIndex
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
