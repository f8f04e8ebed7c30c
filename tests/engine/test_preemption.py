"""Who is preempted where decodes need blocks: a stream last."""

from __future__ import annotations

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
    assert told, "nobody was preempted"
    assert "stream" not in told
    for name, length in (("long", 7 * BLOCK_SIZE), ("longer", 6 * BLOCK_SIZE), ("stream", 3)):
        assert world.output(name, [len(name)] * length) == reference([len(name)] * length, 12)
    world.assert_idle()
