"""Who is preempted where decodes need blocks: a stream last."""

from __future__ import annotations

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.request import SamplingParams
from tests.worker.world import BLOCK_SIZE, World, reference


@pytest.mark.parametrize("comes_by", ["migration", "handoff"])
def test_a_prompt_that_has_told_nothing_makes_room_for_a_stream(comes_by: str) -> None:
    world = World(num_blocks=16, max_num_batched_tokens=BLOCK_SIZE)
    long, stream = [1] * 14 * BLOCK_SIZE, [9] * 3 * BLOCK_SIZE
    world.submit("long", long, 5, remote=False)
    assert world.step()
    if comes_by == "handoff":
        world.submit("stream", stream, 12, remote=True)
    else:
        params = SamplingParams(max_tokens=12, temperature=0)
        told = (*stream, *reference(stream, 2))
        moved = Decode("stream", params, 1, "router", told, len(stream), 60.0)
        world.deliver("decode", moved)
    core, order = world.decode.core, list[str]()
    while world.step():
        order += [name for name, _ in core.seqs if name not in order[-1:]]
        assert [seq.request_id for seq in core.seqs.values() if seq.num_preemptions] in (
            [],
            ["long"],
        )
    assert core.scheduler.num_preemptions > 0
    assert order[-1] == "long", "it ends first, though it came first"
    assert world.output("long", long) == reference(long, 5)
    if comes_by == "handoff":
        assert world.output("stream", stream) == reference(stream, 12)
    assert core.kv.pool.is_idle()


def test_a_handoff_takes_no_memory_before_its_prompt_is_begun() -> None:
    world = World(max_num_batched_tokens=BLOCK_SIZE)
    first, second = [1] * 5 * BLOCK_SIZE, [2] * 2 * BLOCK_SIZE
    world.submit("first", first, 4, remote=True)
    world.submit("second", second, 4, remote=True)
    begun = set[str]()
    while world.step():
        scheduler = world.decode.core.scheduler
        begun.update(name for (name, _) in world.prefill.core.seqs)
        for seq in world.decode.core.seqs.values():
            assert not (seq.awaits_producer and seq.block_ids)
        assert all(seq.is_offered for seq in scheduler.remote)
    assert begun == {"first", "second"}
    assert world.output("first", first) == reference(first, 4)
    assert world.output("second", second) == reference(second, 4)
    world.assert_idle()


def test_prompts_that_cannot_be_in_the_next_step_take_no_memory_yet() -> None:
    world = World(max_num_batched_tokens=BLOCK_SIZE)
    for name in ("one", "two", "three"):
        world.submit(name, [len(name)] * 4 * BLOCK_SIZE, 4, remote=False)
    while world.step():
        computing = [seq for seq in world.decode.core.scheduler.running if not seq.is_decoding]
        assert len(computing) <= 1
    for name in ("one", "two", "three"):
        prompt = [len(name)] * 4 * BLOCK_SIZE
        assert world.output(name, prompt) == reference(prompt, 4)
    world.assert_idle()


def test_a_stream_that_comes_from_elsewhere_does_not_wait_behind_prompts() -> None:
    """Nor behind a prompt that was preempted for it."""
    world = World(num_blocks=12, max_num_batched_tokens=BLOCK_SIZE)
    for name in ("one", "two", "three"):
        world.submit(name, [len(name)] * 6 * BLOCK_SIZE, 5, remote=False)
    for _ in range(3):
        world.step()
    said = reference([9] * 9, 4)
    params = SamplingParams(max_tokens=30, temperature=0)
    moved = Decode("moved", params, 1, "router", (*[9] * 9, *said), 9, 60.0)
    world.deliver("decode", moved)
    scheduler, order = world.decode.core.scheduler, list[str]()
    assert [seq.request_id for seq in scheduler.running] == ["one", "moved"]
    assert [seq.request_id for seq in scheduler.waiting] == ["two", "three"]
    while world.step():
        for seq in scheduler.running:
            if seq.request_id not in order:
                order.append(seq.request_id)
        waiting = [seq.num_output_tokens > 0 for seq in scheduler.waiting]
        assert waiting == sorted(waiting, reverse=True), "a prompt is before a stream"
    assert order.index("moved") < order.index("three")
    for name in ("one", "two", "three"):
        prompt = [len(name)] * 6 * BLOCK_SIZE
        assert world.output(name, prompt) == reference(prompt, 5)
    assert world.decode.core.kv.pool.is_idle()
