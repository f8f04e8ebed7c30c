"""Workers of a model whose every layer has a window: the tokens that one with all its KV would
give, out of a footprint that does not grow."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.request import Refusal
from tests.worker.layers import NUM_SINKS, Layered, prompt_of
from tests.worker.world import BLOCK_SIZE

WINDOW = 10
# Sinks, window and end; and the block that is taken before another one is given back.
MOST_BLOCKS = -(-WINDOW // BLOCK_SIZE) + -(-NUM_SINKS // BLOCK_SIZE) + 2


def windowed(**options: Any) -> Layered:
    return Layered((WINDOW,), **options)


def test_a_long_answer_needs_no_more_blocks_than_a_short_one() -> None:
    world = windowed(num_blocks=MOST_BLOCKS, max_model_len=4000)
    world.submit("a", [5, 6, 7], 1500, remote=False)
    world.drain(20_000)
    assert world.output("a", [5, 6, 7]) == world.reference([5, 6, 7], 1500)
    assert world.most_held == MOST_BLOCKS - 1
    world.assert_idle()


def test_a_pool_that_holds_no_window_refuses_what_outgrows_it() -> None:
    world = windowed(num_blocks=4, max_model_len=4000)
    world.submit("a", [5, 6, 7], 1500, remote=False)
    world.submit("b", [5, 6, 7], 10, remote=False)
    world.drain()
    assert [(r.request_id, r.reason) for r in world.refused()] == [("a", Refusal.NEVER_FITS)]
    assert world.output("b", [5, 6, 7]) == world.reference([5, 6, 7], 10)


@pytest.mark.parametrize("remote", [False, True])
def test_a_long_prompt_is_computed_chunk_by_chunk_in_a_small_pool(remote: bool) -> None:
    world = windowed(num_blocks=9, prefill_blocks=9, max_num_batched_tokens=16)
    prompt = prompt_of(Random(1), 150)
    world.submit("a", prompt, 40, remote=remote)
    world.drain()
    assert world.output("a", prompt) == world.reference(prompt, 40)
    handed_over = [read for node, read in world.log if node == "decode"]
    assert bool(handed_over) == remote
    assert sum(len(read.src) for read in handed_over) <= MOST_BLOCKS
    world.assert_idle()


def test_a_handoff_that_fails_is_computed_from_the_beginning() -> None:
    world = windowed(num_blocks=12, prefill_blocks=20)
    prompt = prompt_of(Random(2), 90)
    world.hold_reads = True
    world.submit("a", prompt, 20, remote=True)
    world.drain()
    while world.reads:
        world.settle_read(corrupt=True)
        world.drain()
    assert world.decode.core.counters["handoffs_failed"] == 1
    assert world.output("a", prompt) == world.reference(prompt, 20)
    world.assert_idle()


def test_the_next_turn_goes_on_behind_the_blocks_that_were_given_back() -> None:
    """In the same pool: the sinks and the window of its end are there, the middle is not."""
    world = windowed(num_blocks=14)
    prompt = prompt_of(Random(3), 60)
    world.submit("a", prompt, 21, remote=False)
    world.drain()
    world.submit("other", prompt_of(Random(4), 33), 8, remote=False)
    world.drain()  # evicts what is the first to go
    turn = [*prompt, *world.reference(prompt, 21), 9, 9, 9]
    fed = world.decode.core.counters["tokens_scheduled"]
    world.submit("b", turn, 6, remote=False)
    world.drain()
    assert world.output("b", turn) == world.reference(turn, 6)
    assert world.decode.core.counters["tokens_scheduled"] - fed <= BLOCK_SIZE + 3 + 6
    names = world.decode.core.kv.pool.block_hashes()
    assert len(names) < len(turn) // BLOCK_SIZE
    world.assert_idle()


def test_the_tiers_keep_the_sinks_and_the_window_and_a_later_turn_loads_them() -> None:
    world = windowed(num_blocks=14, num_host_blocks=64, num_disk_blocks=64, disk_after_s=0.0)
    prompt = prompt_of(Random(5), 100)
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
    turn = [*prompt, *world.reference(prompt, 101), 9, 9, 9]
    fed = world.decode.core.counters["tokens_scheduled"]
    world.submit("b", turn, 6, remote=False)
    world.drain()
    assert world.output("b", turn) == world.reference(turn, 6)
    assert world.decode.core.counters["tokens_scheduled"] - fed <= BLOCK_SIZE + 3 + 6
    assert world.decode.core.counters["blocks_from_host"] > 0
    world.assert_idle()


def test_a_window_that_went_bad_in_host_memory_is_computed_again() -> None:
    world = windowed(num_blocks=14, num_host_blocks=64)
    prompt = prompt_of(Random(5), 100)
    world.submit("a", prompt, 30, remote=False)
    world.drain()
    for slots in world.lower["decode"][Tier.HOST]:
        slots[0] ^= 1
    for number in range(4):
        world.submit(f"other{number}", prompt_of(Random(6 + number), 40), 8, remote=False)
        world.drain()
    world.submit("b", prompt, 30, remote=False)
    world.drain()
    assert world.output("b", prompt) == world.reference(prompt, 30)
    assert world.decode.exchange.connector.failures["checksum_mismatch"] == 1
    world.assert_idle()
