"""Workers of a model whose layers attend to different windows: the tokens that one with all its KV
would give, out of one pool that the groups of layers share."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvrelay.engine.kv.block_hash import hash_blocks, of_groups
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.step import Step
from kvrelay.kvtransfer.messages import CacheAction, CacheOrder, CacheOrderDone, KVReady
from tests.worker.layers import Layered, prompt_of
from tests.worker.world import BLOCK_SIZE

LAYOUTS = [((0, 10), 0), ((0, 0, 10, 10), 0), ((0, 12, 5), 0), ((17, 6), 0), ((0,), 2), ((0, 9), 1)]
ONE = ((10,), 0)  # every layer has the same window
Layout = tuple[tuple[int, ...], int]  # windows, and groups that hold states


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("remote", [False, True])
def test_a_decode_holds_what_its_windows_show(layout: Layout, remote: bool) -> None:
    world = Layered(*layout, num_blocks=120, prefill_blocks=120, max_num_batched_tokens=16)
    prompt = prompt_of(Random(1), 100)
    world.submit("a", prompt, 40, remote=remote)
    most = 0
    while world.queue or world.reads:
        if world.queue:
            world.step()
        else:
            world.settle_read()
        for seq in world.decode.core.seqs.values():
            if seq.is_decoding and seq.num_output_tokens:
                most = max(most, sum(block >= 0 for block in seq.block_ids))
    world.drain()
    assert world.output("a", prompt) == world.reference(prompt, 40)
    groups = world.windows.groups
    bound = sum(each.num_blocks if each.size else -(-140 // BLOCK_SIZE) for each in groups)
    assert 0 < most <= bound
    moved = [read for node, read in world.log if node == "decode"]
    assert bool(moved) == remote
    held = len(world.windows.kept(100)) + world.windows.count  # the last block is not full
    assert sum(len(read.src) for read in moved) <= held
    world.assert_idle()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_turn_goes_on_where_all_groups_can(layout: Layout) -> None:
    world = Layered(*layout, num_blocks=160)
    prompt = prompt_of(Random(3), 60)
    world.submit("a", prompt, 21, remote=False)
    world.drain()
    turn = [*prompt, *world.reference(prompt, 21), 9, 9, 9]
    fed = world.decode.core.counters["tokens_scheduled"]
    world.submit("b", turn, 6, remote=False)
    world.drain()
    assert world.output("b", turn) == world.reference(turn, 6)
    assert world.decode.core.counters["tokens_scheduled"] - fed <= BLOCK_SIZE + 3 + 6
    # Only the first group's prefix is there: nothing can be continued.
    names = of_groups(hash_blocks(b"tiny", UNSALTED, turn, BLOCK_SIZE), world.windows.count)
    groups = world.windows.groups
    windowed = [i for i in range(len(names)) if groups[i % len(groups)].size]
    world.decode.core.kv.pool.evict(names[i] for i in windowed)
    fed = world.decode.core.counters["tokens_scheduled"]
    world.submit("c", turn, 6, remote=False)
    world.drain()
    assert world.output("c", turn) == world.reference(turn, 6)
    assert world.decode.core.counters["tokens_scheduled"] - fed >= len(turn)
    world.assert_idle()


@pytest.mark.parametrize("layout", [*LAYOUTS, ONE])
def test_a_session_is_parked_resumed_and_loaded_with_the_windows_of_its_end(
    layout: Layout,
) -> None:
    world = Layered(*layout, num_blocks=400, num_host_blocks=200)
    prompt = prompt_of(Random(5), 100)
    world.submit("a", prompt, 21, remote=False)
    world.drain()
    tokens = [*prompt, *world.reference(prompt, 21)]
    names = hash_blocks(b"tiny", UNSALTED, tokens, BLOCK_SIZE)
    pool = world.decode.core.kv.pool
    kept = len(world.windows.kept(len(names) * BLOCK_SIZE))
    for action in (CacheAction.PARK, CacheAction.RESUME):
        world.deliver("decode", CacheOrder(action, "router", action, tuple(names)))
        world.drain()
        assert pool.num_cached == 0 if action is CacheAction.PARK else pool.num_cached >= kept
        below = {*world.windows.kept(99), *world.windows.kept(120), *world.windows.kept(116)}
        assert world.decode.exchange.tiers.num_blocks(Tier.HOST) <= len(below)
    answers = [m.num_blocks for m in world.to_router if isinstance(m, CacheOrderDone)]
    assert answers == [len(names), len(names)]
    for prefix in ("resumed", "loaded"):
        turn = [*tokens, 9, 9, 9]
        if prefix == "loaded":
            pool.evict(pool.block_hashes())
        before = dict(world.decode.core.counters)
        world.submit(prefix, turn, 1, remote=False)
        world.drain()
        assert world.output(prefix, turn) == world.reference(turn, 1)
        after = world.decode.core.counters
        assert after["tokens_scheduled"] - before["tokens_scheduled"] <= BLOCK_SIZE + 3 + 1
        loaded = after.get("blocks_from_host", 0) - before.get("blocks_from_host", 0)
        assert bool(loaded) == (prefix == "loaded")
    world.assert_idle()


@pytest.mark.parametrize("layout", [*LAYOUTS, ONE])
def test_a_prefix_is_fetched_with_the_windows_of_its_end(layout: Layout) -> None:
    world = Layered(*layout, num_blocks=300, num_decode=2, max_num_batched_tokens=16)
    prompt = prompt_of(Random(7), 90)
    world.submit("a", prompt, 11, remote=False)
    world.drain()
    turn = [*prompt, *world.reference(prompt, 11), *prompt_of(Random(8), 30)]
    world.submit("b", turn, 6, remote=False, decode="decode-1", fetch_from="decode")
    world.drain()
    assert world.output("b", turn) == world.reference(turn, 6)
    core = world.workers["decode-1"].core
    assert core.counters["tokens_scheduled"] <= BLOCK_SIZE + 30 + 1 + 6
    moved = [read for node, read in world.log if node == "decode-1"]
    assert sum(len(read.src) for read in moved) == len(world.windows.kept(100))
    # One that has lost the windows exports nothing; one that reads garbage computes it all.
    world.decode.core.kv.pool.evict(
        world.decode.core.kv.pool.block_hashes()[-world.windows.count :]
    )
    for name in ("c", "d"):
        other = [*prompt_of(Random(ord(name)), 40), *turn]
        world.submit(name, other, 6, remote=False)
        world.drain()
        world.hold_reads = name == "d"
        more = [*other, 5, 6, 7]
        fetching = f"{name}2"
        world.submit(fetching, more, 6, remote=False, decode="decode-1", fetch_from="decode")
        world.drain()
        while world.reads:
            world.settle_read(corrupt=True)
            world.drain()
        assert world.output(fetching, more) == world.reference(more, 6)
    world.assert_idle()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_export_that_ends_before_what_it_covers_is_not_waited_for(layout: Layout) -> None:
    """As when blocks that only a disk had are lost before they are read."""
    world = Layered(*layout, num_blocks=300, num_decode=2)
    prompt = prompt_of(Random(7), 90)
    world.submit("a", prompt, 11, remote=False)
    world.drain()
    world.submit("b", prompt, 11, remote=False, decode="decode-1", fetch_from="decode")
    while not any(isinstance(message, KVReady) for _, message in world.queue):
        assert world.step()
    for at, (node, message) in enumerate(world.queue):
        if isinstance(message, KVReady):
            blocks, sums = message.block_ids[:-1], message.checksums[:-1]
            world.queue[at] = node, replace(message, block_ids=blocks, checksums=sums)
    world.drain()
    assert world.output("b", prompt) == world.reference(prompt, 11)
    connector = world.workers["decode-1"].exchange.connector
    assert connector.failures == {"export_incomplete": 1}
    world.assert_idle()


class Faults:
    """Steps that fail, and requests whose grammars are not ready when their rows have been run, as
    on ranks. What fails may do so again only after others have been found well."""

    def __init__(self, rng: Random) -> None:
        self._rng, self._num_steps = rng, 0

    def fault(self, step: Step) -> str | None:
        self._num_steps += 1
        if self._num_steps < 40 or step.is_health_check or self._rng.random() > 0.1:
            return None
        self._num_steps = 0
        return "a fault"

    def waits(self, step: Step) -> frozenset[int]:
        asked = (index for index, seq in enumerate(step.seqs) if seq.sample)
        return frozenset(index for index in asked if self._rng.random() < 0.03)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(56))
def test_groups_share_a_pool_and_answer_right_whatever_comes(seed: int) -> None:
    rng = Random(seed)
    layout = [*LAYOUTS, ONE][seed % 7]
    count = len(layout[0]) + layout[1]
    tiers: dict[str, Any] = {}
    if rng.random() < 0.6:
        tiers = {
            "num_host_blocks": count * rng.choice([0, 12, 40]),
            "num_disk_blocks": count * rng.choice([0, 40]),
        }
    most = Layered(*layout).windows.max_blocks(250)
    world = Layered(
        *layout,
        num_blocks=rng.randint(most, 2 * most),
        prefill_blocks=rng.randint(most, 2 * most),
        max_num_batched_tokens=rng.choice([3, 8, 32]),
        num_speculative_tokens=rng.choice([0, 4]),
        num_decode=2,
        disk_after_s=0.0,
        **tiers,
    )
    faults = Faults(rng)
    world.fault, world.waits = faults.fault, faults.waits
    shared = prompt_of(rng, 60)
    jobs: dict[str, tuple[list[int], int]] = {}
    for number in range(rng.randint(2, 8)):
        begin = shared[: rng.choice([0, 20, 60])]
        if jobs and rng.random() < 0.4:  # a further turn
            before, count = jobs[rng.choice(sorted(jobs))]
            begin = [*before, *world.reference(before, count)]
        prompt, count = [*begin, *prompt_of(rng, rng.randint(1, 30))], rng.randint(2, 30)
        if len(prompt) + count > 250:
            continue
        jobs[f"r{number}"] = prompt, count
        options: dict[str, Any] = {"remote": rng.random() < 0.4}
        if rng.random() < 0.3:
            options = {"remote": False, "decode": "decode-1", "fetch_from": "decode"}
        world.submit(f"r{number}", prompt, count, **options)
        for _ in range(rng.choice([0, 5, 60])):
            world.step()
        if rng.random() < 0.3:
            world.tick(0.3)
        if world.reads and rng.random() < 0.2:
            world.settle_read(corrupt=True)
    world.drain(20_000)
    for name, (prompt, count) in jobs.items():
        assert world.output(name, prompt) == world.reference(prompt, count)
    assert world.refused() == []
    world.assert_idle()
