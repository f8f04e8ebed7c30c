"""Workers of a model whose every layer has a window: the tokens that one with all its KV would
give, out of a footprint that does not grow."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvrelay.engine.core import EngineCore
from kvrelay.engine.kv.block_hash import UNSALTED, hash_blocks
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.request import Refusal
from kvrelay.engine.step import Sampled, Step, StepDone
from kvrelay.kvtransfer.messages import CacheAction, CacheOrder, CacheOrderDone, KVReady
from tests.worker.world import BLOCK_SIZE, World, checksum, next_token

WINDOW, NUM_SINKS = 10, 3
# Sinks, window and end; and the block that is taken before another one is given back.
MOST_BLOCKS = -(-WINDOW // BLOCK_SIZE) + -(-NUM_SINKS // BLOCK_SIZE) + 2


def visible(end: int) -> list[int]:
    """Positions that the last of `end` tokens attends to."""
    return [p for p in range(end) if p < NUM_SINKS or p >= end - WINDOW]


def reference(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token([tokens[p] for p in visible(len(tokens))]))
    return tokens[len(prompt) :]


class Windowed(World):
    """Its model reads what is in the window; what it reads has to be in the blocks. Checks, after
    each message, who holds which blocks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"window": WINDOW, "sinks": NUM_SINKS, **options})
        self.most_held = 0  # by one sequence that decodes

    def run(self, node: str, step: Step) -> StepDone:
        slots = self.slots[node]
        sampled: list[Sampled | None] = []
        for seq in step.seqs:
            seen: list[int] = []
            for position, token in enumerate(seq.tokens, start=seq.start):
                slots[self.block(seq.block_ids, position)][position % BLOCK_SIZE] = token
                where = visible(position + 1)
                seen = [slots[self.block(seq.block_ids, p)][p % BLOCK_SIZE] for p in where]
                assert seen == [seq.context[p] for p in where], f"{seq.request_id} at {position}"
            sampled.append(Sampled(next_token(seen)) if seq.sample else None)
        checksums = [checksum(slots[block]) for block in step.checksum_blocks]
        return StepDone(step.step_id, sampled, checksums, 0.01)

    def block(self, table: list[int], position: int) -> int:
        block = table[position // BLOCK_SIZE]
        assert block >= 0, f"the block of position {position} was given back"
        return block

    def deliver(self, node: str, message: Any) -> None:
        if isinstance(message, KVReady):
            assert min(message.block_ids, default=0) >= 0
        super().deliver(node, message)
        worker = self.workers[node]
        core, exchange = worker.core, worker.exchange
        moves = [m for m in exchange.tiers._moves.live.values() if Tier.DEVICE in m.way]
        others = sum(len(move.blocks) for move in moves)
        others += sum(len(export.blocks) for export in exchange.producer.exports)
        core.kv.check_integrity(others)
        self.look_at(core)

    def look_at(self, core: EngineCore) -> None:
        limit = core.kv.windows.max_blocks(core.config.max_model_len)
        for seq in core.seqs.values():
            held = sum(block >= 0 for block in seq.block_ids)
            assert held <= limit, seq.request_id
            if seq.num_output_tokens > 0 and seq.is_decoding:
                assert held <= MOST_BLOCKS, seq.request_id
                self.most_held = max(self.most_held, held)


def prompt_of(rng: Random, length: int) -> list[int]:
    return [rng.randint(2, 90) for _ in range(length)]


def test_a_long_answer_needs_no_more_blocks_than_a_short_one() -> None:
    world = Windowed(num_blocks=MOST_BLOCKS, max_model_len=4000)
    world.submit("a", [5, 6, 7], 1500, remote=False)
    world.drain(20_000)
    assert world.output("a", [5, 6, 7]) == reference([5, 6, 7], 1500)
    assert world.most_held == MOST_BLOCKS - 1
    world.assert_idle()


def test_a_pool_that_holds_no_window_refuses_what_outgrows_it() -> None:
    world = Windowed(num_blocks=4, max_model_len=4000)
    world.submit("a", [5, 6, 7], 1500, remote=False)
    world.submit("b", [5, 6, 7], 10, remote=False)
    world.drain()
    assert [(r.request_id, r.reason) for r in world.refused()] == [("a", Refusal.NEVER_FITS)]
    assert world.output("b", [5, 6, 7]) == reference([5, 6, 7], 10)


@pytest.mark.parametrize("remote", [False, True])
def test_a_long_prompt_is_computed_chunk_by_chunk_in_a_small_pool(remote: bool) -> None:
    world = Windowed(num_blocks=9, prefill_blocks=9, max_num_batched_tokens=16)
    prompt = prompt_of(Random(1), 150)
    world.submit("a", prompt, 40, remote=remote)
    world.drain()
    assert world.output("a", prompt) == reference(prompt, 40)
    handed_over = [read for node, read in world.log if node == "decode"]
    assert bool(handed_over) == remote
    assert sum(len(read.src) for read in handed_over) <= MOST_BLOCKS
    world.assert_idle()


def test_a_handoff_that_fails_is_computed_from_the_beginning() -> None:
    world = Windowed(num_blocks=12, prefill_blocks=20)
    prompt = prompt_of(Random(2), 90)
    world.hold_reads = True
    world.submit("a", prompt, 20, remote=True)
    world.drain()
    while world.reads:
        world.settle_read(corrupt=True)
        world.drain()
    assert world.decode.core.counters["handoffs_failed"] == 1
    assert world.output("a", prompt) == reference(prompt, 20)
    world.assert_idle()


def test_the_next_turn_goes_on_behind_the_blocks_that_were_given_back() -> None:
    """In the same pool: the sinks and the window of its end are there, the middle is not."""
    world = Windowed(num_blocks=14)
    prompt = prompt_of(Random(3), 60)
    world.submit("a", prompt, 21, remote=False)
    world.drain()
    world.submit("other", prompt_of(Random(4), 33), 8, remote=False)
    world.drain()  # evicts what is the first to go
    turn = [*prompt, *reference(prompt, 21), 9, 9, 9]
    fed = world.decode.core.counters["tokens_scheduled"]
    world.submit("b", turn, 6, remote=False)
    world.drain()
    assert world.output("b", turn) == reference(turn, 6)
    assert world.decode.core.counters["tokens_scheduled"] - fed <= BLOCK_SIZE + 3 + 6
    names = world.decode.core.kv.pool.block_hashes()
    assert len(names) < len(turn) // BLOCK_SIZE
    world.assert_idle()


def test_the_tiers_keep_the_sinks_and_the_window_and_a_later_turn_loads_them() -> None:
    world = Windowed(num_blocks=14, num_host_blocks=64, num_disk_blocks=64, disk_after_s=0.0)
    prompt = prompt_of(Random(5), 100)
    world.decode.exchange.connector.rates.load_s = lambda tier: 0.0  # type: ignore[method-assign]
    world.submit("a", prompt, 101, remote=False)
    world.drain()
    world.tick(0.3)
    world.drain()
    tiers = world.decode.exchange.tiers
    # Those of the prompt's end too, where another request may go on.
    assert 0 < tiers.num_blocks(Tier.HOST) <= 2 * MOST_BLOCKS
    assert 0 < tiers.num_blocks(Tier.DISK) <= 2 * MOST_BLOCKS
    for number in range(4):
        world.submit(f"other{number}", prompt_of(Random(6 + number), 40), 8, remote=False)
        world.drain()
    turn = [*prompt, *reference(prompt, 101), 9, 9, 9]
    fed = world.decode.core.counters["tokens_scheduled"]
    world.submit("b", turn, 6, remote=False)
    world.drain()
    assert world.output("b", turn) == reference(turn, 6)
    assert world.decode.core.counters["tokens_scheduled"] - fed <= BLOCK_SIZE + 3 + 6
    assert world.decode.core.counters["blocks_from_host"] > 0
    world.assert_idle()


def test_a_session_is_parked_and_resumed_without_its_middle() -> None:
    world = Windowed(num_blocks=40, num_host_blocks=64)
    prompt = prompt_of(Random(5), 100)
    world.submit("a", prompt, 21, remote=False)
    world.drain()
    tokens = [*prompt, *reference(prompt, 21)]
    names = hash_blocks(b"tiny", UNSALTED, tokens, BLOCK_SIZE)
    pool = world.decode.core.kv.pool
    assert pool.num_cached > MOST_BLOCKS  # there was room for the middle
    for action in (CacheAction.PARK, CacheAction.RESUME):
        world.deliver("decode", CacheOrder(action, "router", action, tuple(names)))
        world.drain()
        on_device = pool.num_cached
        assert on_device == 0 if action is CacheAction.PARK else 0 < on_device <= MOST_BLOCKS
        # Those of the prompt's end too, where another request may go on.
        assert world.decode.exchange.tiers.num_blocks(Tier.HOST) <= 2 * MOST_BLOCKS
    answers = [m.num_blocks for m in world.to_router if isinstance(m, CacheOrderDone)]
    assert answers == [len(names), len(names)]
    fed = world.decode.core.counters["tokens_scheduled"]
    world.submit("b", [*tokens, 9, 9, 9], 6, remote=False)
    world.drain()
    assert world.output("b", [*tokens, 9, 9, 9]) == reference([*tokens, 9, 9, 9], 6)
    assert world.decode.core.counters["tokens_scheduled"] - fed <= BLOCK_SIZE + 3 + 6
    world.assert_idle()


def test_a_window_that_went_bad_in_host_memory_is_computed_again() -> None:
    world = Windowed(num_blocks=14, num_host_blocks=64)
    prompt = prompt_of(Random(5), 100)
    world.decode.exchange.connector.rates.load_s = lambda tier: 0.0  # type: ignore[method-assign]
    world.submit("a", prompt, 30, remote=False)
    world.drain()
    for slots in world.lower["decode"][Tier.HOST]:
        slots[0] ^= 1
    for number in range(4):
        world.submit(f"other{number}", prompt_of(Random(6 + number), 40), 8, remote=False)
        world.drain()
    world.submit("b", prompt, 30, remote=False)
    world.drain()
    assert world.output("b", prompt) == reference(prompt, 30)
    assert world.decode.exchange.connector.failures["checksum_mismatch"] == 1
    world.assert_idle()


@pytest.mark.parametrize("seed", range(24))
def test_windowed_sequences_hold_few_blocks_and_answer_right_whatever_comes(seed: int) -> None:
    rng = Random(seed)
    tiers: dict[str, Any] = {}
    if rng.random() < 0.6:
        tiers = {"num_host_blocks": rng.choice([0, 12, 40]), "num_disk_blocks": rng.choice([0, 40])}
    world = Windowed(
        num_blocks=rng.randint(MOST_BLOCKS, 20),
        prefill_blocks=rng.randint(MOST_BLOCKS, 20),
        max_num_batched_tokens=rng.choice([3, 8, 32]),
        disk_after_s=0.0,
        **tiers,
    )
    world.decode.exchange.connector.rates.load_s = lambda tier: 0.0  # type: ignore[method-assign]
    shared = prompt_of(rng, 60)
    jobs: dict[str, tuple[list[int], int]] = {}
    for number in range(rng.randint(2, 8)):
        begin = shared[: rng.choice([0, 20, 60])]
        if jobs and rng.random() < 0.4:  # a further turn
            before, count = jobs[rng.choice(sorted(jobs))]
            begin = [*before, *reference(before, count)]
        prompt, count = [*begin, *prompt_of(rng, rng.randint(1, 30))], rng.randint(2, 30)
        if len(prompt) + count > 250:
            continue
        jobs[f"r{number}"] = prompt, count
        world.submit(f"r{number}", prompt, count, remote=rng.random() < 0.4)
        for _ in range(rng.choice([0, 5, 60])):
            world.step()
        if rng.random() < 0.3:
            world.tick(0.3)
        if world.reads and rng.random() < 0.2:
            world.settle_read(corrupt=True)
    world.drain(20_000)
    for name, (prompt, count) in jobs.items():
        assert world.output(name, prompt) == reference(prompt, count)
    assert world.refused() == []
    world.assert_idle()
