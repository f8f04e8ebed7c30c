"""Prefill and decode worker together, message by message; each test ends with nothing left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvrelay.engine.kv.events import KVEvents, KVSnapshot
from kvrelay.engine.messages import Abort, Probe, TokenDeltas
from kvrelay.engine.node import Woken
from kvrelay.engine.request import FinishReason, Refusal
from kvrelay.engine.sequence import SeqState
from kvrelay.engine.stats import RouterDown, RouterUp
from kvrelay.kvtransfer.messages import KVConfirmed, KVConfirmRequest, KVReady
from tests.worker.world import BLOCK_SIZE, World, reference

PROMPT = list(range(1, 23))  # five full blocks and a partial one


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.drain()
    world.assert_idle()


@pytest.mark.parametrize("remote", [False, True])
def test_tokens_are_those_of_the_model(world: World, remote: bool) -> None:
    world.submit("a", PROMPT, 9, remote=remote)
    world.assert_finishes("a", PROMPT, 9)


def test_remote_prompt_is_not_computed_by_the_decode_worker(world: World) -> None:
    world.submit("a", PROMPT, 4, remote=True)
    world.drain()
    assert world.decode.core.counters["tokens_scheduled"] == 3
    assert world.decode.core.counters["handoffs_done"] == 1


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_chunked_prefill_announces_blocks_as_they_fill(budget: int) -> None:
    world = World(max_num_batched_tokens=budget)
    world.submit("a", PROMPT, 5, remote=True)
    world.assert_finishes("a", PROMPT, 5)
    world.assert_idle()


def test_a_request_whose_announcements_were_dropped_is_computed_at_once() -> None:
    """It waited for `handoff_timeout_s`: what had been announced before it came is not again."""
    world = World(prefill_blocks=64, max_waiting=2, max_num_seqs=2)
    prompts = {f"r{i}": [i + 1] * 9 for i in range(6)}
    requests = []
    for name, prompt in prompts.items():
        world.submit(name, prompt, 4, remote=True)
        requests.append(world.queue.pop())
        world.drain()
    for request in requests:
        world.queue.append(request)
        world.drain()
    for name, prompt in prompts.items():
        assert world.output(name, prompt) == reference(prompt, 4)
    assert world.decode.core.counters["handoffs_done"] == 4
    assert world.decode.exchange.connector.failures == {"announced_too_early": 2}
    world.assert_idle()


def test_many_requests_in_a_small_pool_are_preempted_and_finish_right() -> None:
    world = World(num_blocks=14)
    prompts = {f"r{i}": [i + 1] * (5 + i) for i in range(6)}
    for name, prompt in prompts.items():
        world.submit(name, prompt, 12, remote=False)
    world.drain()
    for name, prompt in prompts.items():
        world.assert_finishes(name, prompt, 12)
    assert world.decode.core.scheduler.num_preemptions > 0
    world.assert_idle()


def test_remote_requests_in_a_small_pool_finish_right() -> None:
    world = World(num_blocks=14, prefill_blocks=10)
    prompts = {f"r{i}": [i + 1] * (5 + i) for i in range(6)}
    for name, prompt in prompts.items():
        world.submit(name, prompt, 12, remote=True)
    world.drain()
    for name, prompt in prompts.items():
        world.assert_finishes(name, prompt, 12)
    world.assert_idle()


def test_second_request_reads_only_what_is_missing(world: World) -> None:
    world.submit("a", PROMPT, 3, remote=True)
    world.drain()
    before = world.prefill.core.counters["tokens_scheduled"]
    world.hold_reads = True
    world.submit("b", [*PROMPT, 50, 51], 3, remote=True)
    world.drain()
    (_, read), *more = world.reads
    assert not more
    assert len(read.dst) == 1  # five blocks are in the cache, the sixth is partial
    world.hold_reads = False
    world.assert_finishes("b", [*PROMPT, 50, 51], 3)
    assert (
        world.prefill.core.counters["tokens_scheduled"] - before == len(PROMPT) + 2 - 5 * BLOCK_SIZE
    )


def test_shared_prefix_that_is_being_computed_is_waited_for(world: World) -> None:
    world.submit("a", PROMPT, 2, remote=False)
    world.submit("b", [*PROMPT, 60, 61, 62], 2, remote=False)
    world.drain()
    fed = world.decode.core.counters["tokens_scheduled"]
    assert fed == len(PROMPT) + 1 + (len(PROMPT) + 3 - 5 * BLOCK_SIZE) + 1


def test_refused_read_is_computed_here(world: World) -> None:
    world.hold_reads = True
    world.submit("a", PROMPT, 6, remote=True)
    world.drain()
    world.deliver("prefill", Abort("a", 0))  # the producer frees while the consumer reads
    world.hold_reads = False
    world.assert_finishes("a", PROMPT, 6)
    assert world.decode.exchange.connector.failures == {"refused": 1}


def test_expired_lease_is_refused_though_the_bytes_look_good(world: World) -> None:
    world.hold_reads = True
    world.submit("a", PROMPT, 6, remote=True)
    world.drain()
    world.now += world.prefill.config.lease_s
    world.workers["prefill"].receive(world.now, Woken("tick"))
    world.hold_reads = False
    world.drain()
    assert world.prefill.core.counters["leases_expired"] == 1
    assert world.output("a", PROMPT) == reference(PROMPT, 6)
    assert world.decode.exchange.connector.failures == {"refused": 1}


@pytest.mark.parametrize("fault", ["error", "corrupt"])
def test_bad_transfer_is_noticed_and_computed_here(world: World, fault: str) -> None:
    world.hold_reads = True
    world.submit("a", PROMPT, 6, remote=True)
    world.drain()
    world.settle_read("link down" if fault == "error" else None, corrupt=fault == "corrupt")
    world.assert_finishes("a", PROMPT, 6)
    why = {"error": "read_failed", "corrupt": "checksum_mismatch"}[fault]
    assert world.decode.exchange.connector.failures == {why: 1}


def test_cancel_while_reading_drains_before_free(world: World) -> None:
    world.hold_reads = True
    world.submit("a", PROMPT, 6, remote=True)
    world.drain()
    (seq,) = world.decode.core.seqs.values()
    blocks = list(seq.block_ids)
    world.deliver("decode", Abort("a", 0))
    assert seq.state is SeqState.DEAD
    assert seq.block_ids == blocks
    assert world.decode.core.kv.pool.num_free == 32 - len(blocks)
    assert world.decode.check_idle() != []
    world.settle_read("cancelled")
    world.drain()
    assert world.decode.core.kv.pool.is_idle()


def test_abort_during_a_step_frees_after_the_step(world: World) -> None:
    world.submit("a", PROMPT, 6, remote=False)
    world.step()  # the Decode; its step is in flight now
    world.deliver("decode", Abort("a", 0))
    assert not world.decode.core.kv.pool.is_idle()
    world.drain()
    assert world.decode.core.kv.pool.is_idle()


@pytest.mark.parametrize("lost", [KVReady, KVConfirmRequest, KVConfirmed])
def test_lost_messages_end_in_local_compute(world: World, lost: type) -> None:
    world.lost = (lost,)
    world.submit("a", PROMPT, 6, remote=True)
    world.drain()
    assert len(world.output("a", PROMPT)) == 1  # the producer's token
    world.tick(world.decode.config.handoff_timeout_s)
    world.assert_finishes("a", PROMPT, 6)


def test_kv_announced_before_the_request_arrives_is_used(world: World) -> None:
    world.submit("a", PROMPT, 6, remote=True)
    late = world.queue.pop()
    world.drain()
    world.queue.append(late)
    world.assert_finishes("a", PROMPT, 6)
    assert world.decode.core.counters["handoffs_done"] == 1


def test_request_that_ends_with_its_first_token_leaves_nothing(world: World) -> None:
    world.submit("a", PROMPT, 1, remote=True)
    world.drain()
    finishes = [
        delta.finish
        for frame in world.to_router
        if isinstance(frame, TokenDeltas)
        for delta in frame.deltas
    ]
    assert finishes == [FinishReason.LENGTH]
    world.deliver("decode", Abort("a", 0))  # as the router does


def test_request_that_can_never_fit_is_refused_with_the_sizes(world: World) -> None:
    world.submit("a", PROMPT, 200, remote=False)
    world.drain()
    (refused,) = world.refused()
    assert refused.reason is Refusal.NEVER_FITS
    assert "222 tokens need 56 KV blocks of 4 tokens, decode has 32" in refused.detail


def test_full_queue_refuses() -> None:
    world = World(max_waiting=1, max_num_seqs=1)
    for name in "abc":
        world.submit(name, PROMPT, 2, remote=False)
    world.drain()
    assert [r.request_id for r in world.refused()] == ["c"]
    world.assert_idle()


def test_deadline_ends_a_request(world: World) -> None:
    world.lost = (KVReady,)
    world.submit("a", PROMPT, 6, remote=True)
    world.drain()
    world.tick(60.0)
    world.drain()
    assert world.refused()[0].reason is Refusal.DEADLINE


def test_probe_repeats_tokens_or_says_unknown(world: World) -> None:
    world.submit("a", PROMPT, 8, remote=False)
    for _ in range(4):
        world.step()
    known = world.output("a", PROMPT)
    world.to_router.clear()
    world.deliver("decode", Probe("a", 0, "router", len(PROMPT)))
    assert world.output("a", PROMPT) == known
    world.deliver("decode", Probe("b", 0, "router", 3))
    assert world.refused()[0].reason is Refusal.UNKNOWN


def test_routers_hear_of_sealed_blocks(world: World) -> None:
    world.deliver("decode", RouterUp("router"))
    world.submit("a", PROMPT, 4, remote=False)
    world.drain()
    known: set[bytes] = set()
    for message in world.to_router:
        if isinstance(message, KVSnapshot):
            known = set(message.hashes)
        elif isinstance(message, KVEvents):
            known = (known | set(message.stored)) - set(message.removed)
    assert known == set(world.decode.core.kv.pool.block_hashes())
    assert len(known) == (len(PROMPT) + 3) // BLOCK_SIZE


@pytest.mark.parametrize("remote", [False, True])
def test_what_a_lost_router_asked_for_is_ended_at_once(world: World, remote: bool) -> None:
    world.deliver("decode", RouterUp("router"))
    world.hold_reads = True
    world.submit("a", PROMPT, 20, remote=remote)
    for _ in range(6):
        world.step()
    assert world.decode.core.seqs
    for node in ("prefill", "decode"):
        world.deliver(node, RouterDown("other"))
    assert world.decode.core.seqs  # it is not that one's
    for node in ("prefill", "decode"):
        world.deliver(node, RouterDown("router"))
    assert not world.decode.core.seqs
    assert world.decode.core.publisher.routers == []
    world.hold_reads = False
    world.drain()


def test_blocks_of_an_earlier_lease_are_not_confirmed_by_a_later_one(world: World) -> None:
    world.hold_reads = True
    world.submit("a", PROMPT, 6, remote=True)
    repeat = world.queue[0]
    world.drain()
    world.deliver("prefill", Abort("a", 0))
    world.queue.append(repeat)  # a late duplicate: computed again, under another lease
    world.drain()
    world.deliver("decode", Probe("a", 0, "router", len(PROMPT)))
    world.hold_reads = False
    world.assert_finishes("a", PROMPT, 6)
    assert world.decode.core.counters.get("handoffs_done", 0) == 0


def test_prompts_beside_decodes_are_fed_as_far_as_the_itl_target_allows() -> None:
    world = World(itl_target_ms=20.0)
    world.submit("a", PROMPT, 20, remote=False)
    for _ in range(6):
        world.step()
    fed = world.decode.core.counters["tokens_scheduled"]
    world.submit("b", [*range(40, 70)], 3, remote=False)
    sizes = []
    while world.step():
        sizes.append(world.decode.core.counters["tokens_scheduled"] - fed)
        fed = world.decode.core.counters["tokens_scheduled"]
    # A step takes 10 ms here whatever is in it, so 10 ms are left at the rate of the first prompt.
    assert 1 < max(sizes) <= 1 + len(PROMPT)
    assert world.output("b", [*range(40, 70)]) == reference([*range(40, 70)], 3)
    world.assert_idle()


def test_where_a_prompt_has_waited_for_long_it_gets_more_of_a_step() -> None:
    largest = []
    for waited_s in (0.0, 60.0):
        world = World(itl_target_ms=11.0, itl_most_ms=200.0, max_num_batched_tokens=64)
        world.submit("a", PROMPT, 20, remote=False)
        for _ in range(6):
            world.step()
        world.submit("b", [*range(40, 90)], 3, remote=False)
        while len(world.decode.core.seqs) < 2:
            world.step()
        for seq in world.decode.core.seqs.values():
            seq.arrived_at -= waited_s
        fed, sizes = world.decode.core.counters["tokens_scheduled"], []
        while world.step():
            sizes.append(world.decode.core.counters["tokens_scheduled"] - fed)
            fed = world.decode.core.counters["tokens_scheduled"]
        largest.append(max(sizes))
        assert world.output("b", [*range(40, 90)]) == reference([*range(40, 90)], 3)
    assert largest[0] < largest[1]
