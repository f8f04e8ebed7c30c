"""Who waits for memory at a worker, and who may pass it."""

from __future__ import annotations

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.waiting import MAX_PASSED
from tests.worker.world import BLOCK_SIZE, World, reference

LONG, LARGE, SHORT = 58, 75, 3  # blocks of the prompts, of 100


def full_world(output: int) -> tuple[World, dict[str, list[int]]]:
    """A stream that decodes so many tokens has 60 of 100 blocks, and a handed-over request of 75
    waits: its client has its first token."""
    world = World(num_blocks=100, prefill_blocks=200, max_model_len=4096)
    prompts = {"long": [1] * LONG * BLOCK_SIZE, "large": [2] * LARGE * BLOCK_SIZE}
    world.submit("long", prompts["long"], output, remote=False)
    while not world.output("long", prompts["long"]):
        world.step()
    world.submit("large", prompts["large"], 4, remote=True)
    while not any(seq.first_token_sent for seq in world.decode.core.scheduler.waiting):
        assert world.step()
    return world, prompts


def run_until(world: World, names: list[str], prompts: dict[str, list[int]], count: int) -> int:
    """Messages until each of `names` has `count` tokens."""
    for number in range(4000):
        if all(len(world.output(name, prompts[name])) >= count for name in names):
            return number
        assert world.step(), "the worker has come to rest"
    raise AssertionError(f"{names} do not go on")


def test_handed_over_streams_go_on_beside_one_that_does_not_fit() -> None:
    world, prompts = full_world(output=120)
    names = [f"short {number}" for number in range(8)]
    for number, name in enumerate(names):
        prompts[name] = [10 + number] * (SHORT - 1) * BLOCK_SIZE + [5]
        world.submit(name, prompts[name], 6, remote=True)
    run_until(world, names, prompts, 6)
    assert len(world.output("large", prompts["large"])) == 1, "it fits after all"
    assert len(world.output("long", prompts["long"])) < 120
    world.drain()
    for name, prompt in prompts.items():
        count = {"long": 120, "large": 4}.get(name, 6)
        assert world.output(name, prompt) == reference(prompt, count)
    world.assert_idle()


@pytest.mark.parametrize("told", [True, False])
def test_one_that_does_not_fit_is_passed_a_number_of_times(told: bool) -> None:
    """Short ones that never end would keep it out for ever."""
    world = World(num_blocks=100, max_model_len=4096, max_waiting=256)
    prompts = {"large": [2] * LARGE * BLOCK_SIZE}

    def submit(name: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        tokens = (*prompt, *(reference(prompt, 1) if told else ()))
        world.deliver("decode", Decode(name, params, 0, "router", tokens, len(prompt), 600.0))

    number = 0
    while "large" not in {seq.request_id for seq in world.decode.core.scheduler.running}:
        if number == 12:
            submit("large", prompts["large"], 4)
            world.now += 20.0
        submit(f"short {number}", [5 + number % 80, number // 80] * 5, 20)
        number += 1
        assert number <= 13 + 2 * MAX_PASSED, "it is passed for ever"
        world.step()
        world.step()
    assert number > 13 + MAX_PASSED / 2, "it is passed by few"
    world.drain()
    world.assert_idle()


def test_a_prompt_does_not_pass_a_stream_that_waits_for_memory() -> None:
    world, prompts = full_world(output=60)
    prompts["short"] = [9] * BLOCK_SIZE
    world.submit("short", prompts["short"], 200, remote=False)
    run_until(world, ["short"], prompts, 1)
    assert world.decode.core.seqs["large", 0].block_ids
    world.drain()
    world.assert_idle()


def test_a_short_prompt_passes_a_long_one_that_does_not_fit() -> None:
    """Though the long one is more urgent: it has waited."""
    world = World(num_blocks=100, max_model_len=4096)
    long, large, short = [1] * LONG * BLOCK_SIZE, [2] * LARGE * BLOCK_SIZE, [3] * BLOCK_SIZE
    world.submit("long", long, 120, remote=False)
    while not world.output("long", long):
        world.step()
    world.submit("large", large, 4, remote=False)
    world.step()
    world.now += 5.0
    world.submit("short", short, 2, remote=False)
    while len(world.output("short", short)) < 2:
        assert world.step()
    assert world.output("large", large) == []
    world.assert_finishes("large", large, 4)


def test_short_prompts_pass_however_many_long_ones_that_do_not_fit() -> None:
    world = World(num_blocks=100, max_model_len=4096, max_waiting=64)
    long, short = [1] * LONG * BLOCK_SIZE, [3] * BLOCK_SIZE
    world.submit("long", long, 120, remote=False)
    while not world.output("long", long):
        world.step()
    for number in range(20):
        world.submit(f"large {number}", [10 + number] * LARGE * BLOCK_SIZE, 2, remote=False)
    world.now += 5.0
    world.submit("short", short, 2, remote=False)
    tried: list[str] = []
    admit = world.decode.core.kv.admit
    world.decode.core.kv.admit = lambda seq, room: tried.append(seq.request_id) or admit(seq, room)  # type: ignore
    while len(world.output("short", short)) < 2:
        assert world.step()
    assert len(tried) <= 4 * tried.count("large 0"), "one is tried for all that need as much"
