"""Who is preempted where decodes need blocks: a stream last."""

from __future__ import annotations

from decode_worker.messages import Decode
from engine.request import SamplingParams
from tests.workers.world import BLOCK_SIZE, World, reference


def test_a_prompt_that_has_told_nothing_makes_room_for_streams() -> None:
    """The stream is the latest arrival; the prompts before it wait for their turn."""
    world = World(num_blocks=16, max_num_batched_tokens=BLOCK_SIZE)
    for name, length in (("long", 7 * BLOCK_SIZE), ("longer", 6 * BLOCK_SIZE), ("stream", 3)):
        world.submit(name, [len(name)] * length, 12, remote=False)
    scheduler, told = world.decode.core.scheduler, dict[str, int]()
    while world.step():
        for seq in world.decode.core.seqs.values():
            if seq.num_preemptions > told.get(seq.request_id, 0):
                assert seq.num_output_tokens == 0 or not any(
                    each.num_output_tokens == 0 for each in scheduler.running
                ), seq.request_id
                told[seq.request_id] = seq.num_preemptions
    assert told, "no sequence was preempted"
    assert "stream" not in told
    for name, length in (("long", 7 * BLOCK_SIZE), ("longer", 6 * BLOCK_SIZE), ("stream", 3)):
        assert world.output(name, [len(name)] * length) == reference([len(name)] * length, 12)
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
    moved = Decode("moved", 1, "router", None, (*[9] * 9, *said), 9, params, 60.0)
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
