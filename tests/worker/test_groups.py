"""Workers of a model whose layers attend to different windows: the tokens that one with all its KV
would give, out of one pool that the groups of layers share."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvrelay.engine.kv.block_hash import UNSALTED, hash_blocks, of_groups
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.kv.window import Windows
from kvrelay.engine.step import Sampled, Step, StepDone
from kvrelay.kvtransfer.messages import CacheAction, CacheOrder, CacheOrderDone
from tests.worker.test_windows import prompt_of
from tests.worker.world import BLOCK_SIZE, World, checksum, next_token

NUM_SINKS = 3
LAYOUTS = [(0, 10), (0, 0, 10, 10), (0, 12, 5), (17, 6)]
OFFSET = 1000  # a group's blocks hold tokens plus this times its number


def visible(window: int, end: int) -> list[int]:
    """Positions that the last of `end` tokens attends to in layers of `window`."""
    return [p for p in range(end) if not window or p < NUM_SINKS or p >= end - window]


class Grouped(World):
    """Its model reads of each group what its window shows; that has to be in the group's blocks.
    Checks, after each message, who holds which blocks."""

    def __init__(self, layout: tuple[int, ...], **options: Any) -> None:
        self.layout = layout
        super().__init__(**{"group_windows": layout, "sinks": NUM_SINKS, **options})
        self.windows = Windows.of(BLOCK_SIZE, layout, NUM_SINKS)

    def draw(self, context: list[int]) -> int:
        end = len(context)
        return next_token([context[p] for window in self.layout for p in visible(window, end)])

    def reference(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.draw(tokens))
        return tokens[len(prompt) :]

    def run(self, node: str, step: Step) -> StepDone:
        slots = self.slots[node]
        sampled: list[Sampled | None] = []
        for seq in step.seqs:
            drawn = []
            for position, token in enumerate(seq.input_tokens, start=seq.start):
                context = [*seq.context, *seq.draft_tokens]
                for group, window in enumerate(self.layout):
                    block = self.block(seq.block_ids, position, group)
                    slots[block][position % BLOCK_SIZE] = token + OFFSET * group
                    for p in visible(window, position + 1):
                        held = slots[self.block(seq.block_ids, p, group)][p % BLOCK_SIZE]
                        assert held == context[p] + OFFSET * group, f"{seq.request_id} at {p}"
                drawn.append(self.draw(context[: position + 1]))
            sampled.append(seq.verify(drawn[len(seq.tokens) - 1 :]) if seq.sample else None)
        checksums = [checksum(slots[block]) for block in step.checksum_blocks]
        return StepDone(step.step_id, sampled, checksums, 0.01)

    def block(self, table: list[int], position: int, group: int) -> int:
        block = table[position // BLOCK_SIZE * len(self.layout) + group]
        assert block >= 0, f"the block of position {position}, group {group} was given back"
        return block

    def deliver(self, node: str, message: Any) -> None:
        super().deliver(node, message)
        worker = self.workers[node]
        core, exchange = worker.core, worker.exchange
        moves = [m for m in exchange.tiers._moves.live.values() if Tier.DEVICE in m.way]
        others = sum(len(move.blocks) for move in moves)
        others += sum(len(export.blocks) for export in exchange.producer.exports)
        core.kv.check_integrity(others)
        for seq in core.seqs.values():
            held = sum(block >= 0 for block in seq.block_ids)
            assert held <= core.kv.windows.max_blocks(len(seq.tokens) + 1), seq.request_id


def world_of(layout: tuple[int, ...], **options: Any) -> Grouped:
    world = Grouped(layout, **options)
    world.decode.exchange.connector.rates.load_s = lambda tier: 0.0  # type: ignore[method-assign]
    return world


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("remote", [False, True])
def test_a_decode_holds_what_its_windows_show(layout: tuple[int, ...], remote: bool) -> None:
    world = world_of(layout, num_blocks=120, prefill_blocks=120, max_num_batched_tokens=16)
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
    held = len(world.windows.kept(100)) + len(layout)  # the last block is not full
    assert sum(len(read.src) for read in moved) <= held
    world.assert_idle()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_turn_goes_on_where_all_groups_can(layout: tuple[int, ...]) -> None:
    world = world_of(layout, num_blocks=160)
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
    names = of_groups(hash_blocks(b"tiny", UNSALTED, turn, BLOCK_SIZE), len(layout))
    windowed = [i for i in range(len(names)) if layout[i % len(layout)]]
    world.decode.core.kv.pool.evict(names[i] for i in windowed)
    fed = world.decode.core.counters["tokens_scheduled"]
    world.submit("c", turn, 6, remote=False)
    world.drain()
    assert world.output("c", turn) == world.reference(turn, 6)
    assert world.decode.core.counters["tokens_scheduled"] - fed >= len(turn)
    world.assert_idle()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_session_is_parked_resumed_and_loaded_with_the_windows_of_its_end(
    layout: tuple[int, ...],
) -> None:
    world = world_of(layout, num_blocks=400, num_host_blocks=200)
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


@pytest.mark.parametrize("layout", [*LAYOUTS, (10,)])
def test_a_prefix_is_fetched_with_the_windows_of_its_end(layout: tuple[int, ...]) -> None:
    world = world_of(layout, num_blocks=300, num_decode=2, max_num_batched_tokens=16)
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
    world.decode.core.kv.pool.evict(world.decode.core.kv.pool.block_hashes()[-len(layout) :])
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


@pytest.mark.parametrize("seed", range(32))
def test_groups_share_a_pool_and_answer_right_whatever_comes(seed: int) -> None:
    rng = Random(seed)
    layout = LAYOUTS[seed % len(LAYOUTS)]
    tiers: dict[str, Any] = {}
    if rng.random() < 0.6:
        tiers = {"num_host_blocks": rng.choice([0, 24, 90]), "num_disk_blocks": rng.choice([0, 90])}
    most = Windows.of(BLOCK_SIZE, layout, NUM_SINKS).max_blocks(250)
    world = world_of(
        layout,
        num_blocks=rng.randint(most, 2 * most),
        prefill_blocks=rng.randint(most, 2 * most),
        max_num_batched_tokens=rng.choice([3, 8, 32]),
        num_speculative_tokens=rng.choice([0, 4]),
        num_decode=2,
        disk_after_s=0.0,
        **tiers,
    )
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
