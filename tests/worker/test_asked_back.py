"""Memory of a prefill worker that computed prompts of a low class have, and a higher one needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.service_class import ServiceClass
from kvrelay.prefill_worker.messages import Prefill
from tests.worker.world import BLOCK_SIZE, World, reference

BATCH = ServiceClass.BATCH
ROW, CHAT, STREAM = [2] * 20 * BLOCK_SIZE, [3] * 16 * BLOCK_SIZE, [1] * 24 * BLOCK_SIZE


def hand_over(
    world: World, name: str, prompt: list[int], max_tokens: int, of: ServiceClass
) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    work = (name, params, 0, "router", tuple(prompt), len(prompt), 60.0)
    world.queue.append(("prefill", Prefill(*work, decode_to="decode", priority=of.priority)))
    world.queue.append(("decode", Decode(*work, prefill_from="prefill", priority=of.priority)))


def world_with_a_held_row() -> World:
    """The decode worker has no room for a batch row, whose prompt is computed and held."""
    world = World(num_blocks=48, prefill_blocks=32, lease_s=30.0, max_model_len=512)
    world.submit("stream", STREAM, 60, remote=False)
    while not world.output("stream", STREAM):
        assert world.step()
    hand_over(world, "row", ROW, 4, BATCH)
    while not world.prefill.core.scheduler.held:
        assert world.step()
    return world


def test_a_chat_gets_the_memory_of_a_row_whose_consumer_has_no_room() -> None:
    world = world_with_a_held_row()
    hand_over(world, "chat", CHAT, 2, ServiceClass.DEFAULT)
    for _ in range(60):
        world.step()
        if world.output("chat", CHAT):
            break
    assert world.now < 1.0
    assert world.output("chat", CHAT) == reference(CHAT, 2)[: len(world.output("chat", CHAT))]
    assert world.output("chat", CHAT)
    assert world.decode.exchange.connector.failures == {"asked_back": 1}
    world.drain()
    assert world.output("row", ROW) == reference(ROW, 4), "it is computed again, by its consumer"
    world.assert_idle()


@pytest.mark.parametrize("other", [BATCH, ServiceClass.FLEX])
def test_nothing_is_asked_back_for_a_class_that_is_no_higher(other: ServiceClass) -> None:
    world = world_with_a_held_row()
    world.prefill.core.scheduler.held[0].service_class = ServiceClass.FLEX
    hand_over(world, "other", CHAT, 2, other)
    for _ in range(20):
        world.step()
    assert len(world.prefill.core.scheduler.held) == 1


def test_what_is_being_read_is_not_released() -> None:
    world = World(num_blocks=64, prefill_blocks=32, lease_s=30.0, max_model_len=512)
    world.hold_reads = True
    hand_over(world, "row", ROW, 4, BATCH)
    while not world.reads or not world.prefill.core.scheduler.held:
        assert world.step()
    hand_over(world, "chat", CHAT, 2, ServiceClass.DEFAULT)
    for _ in range(40):
        world.step()
    assert world.prefill.exchange.producer.counters["handoffs_asked_back"] == 1
    assert len(world.prefill.core.scheduler.held) == 1
    world.hold_reads = False
    world.drain()
    assert world.output("row", ROW) == reference(ROW, 4)
    assert world.output("chat", CHAT) == reference(CHAT, 2)
    assert world.decode.exchange.connector.failures == {}
    world.assert_idle()


def test_what_is_held_and_what_runs_make_room_together() -> None:
    """The chat's prompt needs 26 of 32 blocks: 20 are held for a row, another one has some."""
    world = world_with_a_held_row()
    taken = world.decode.core.kv.allocate(8)
    assert taken, "or the row finds room there before the stream has grown"
    params = SamplingParams(max_tokens=40, temperature=0)
    prompt = [4] * 6 * BLOCK_SIZE
    other = Decode("other", params, 0, "router", tuple(prompt), len(prompt), 60.0)
    world.queue.append(("prefill", replace(other, priority=BATCH.priority)))
    while len(world.output("other", prompt)) < 10:
        assert world.step()
    assert world.prefill.core.kv.pool.num_free + 20 < 26
    chat = [5] * 26 * BLOCK_SIZE
    hand_over(world, "chat", chat, 2, ServiceClass.DEFAULT)
    while not world.output("chat", chat):
        assert world.step()
    assert world.decode.exchange.connector.failures == {"asked_back": 1}
    assert world.prefill.core.scheduler.num_preemptions == 1
    world.decode.core.kv.pool.release(taken)
    world.drain()
    assert world.output("other", prompt) == reference(prompt, 40)
    world.assert_idle()
