"""Reads that never settle: requests go on with other blocks, and the reads keep theirs."""

from __future__ import annotations

import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.messages import Abort, Probe
from kvrelay.kvtransfer.agent import CopyDone
from kvrelay.kvtransfer.peer.connector import UnsettledReads
from kvrelay.worker.node import Worker
from tests.worker.world import World, reference

PROMPT = list(range(1, 18))


def stuck(**limits: float) -> World:
    """The request "a", whose handoff to the decode worker never settles."""
    world = World(**limits)
    world.hold_reads = True
    world.submit("a", PROMPT, 8, remote=True)
    world.drain()
    assert world.reads
    return world


def left_behind(worker: Worker) -> UnsettledReads:
    return worker.exchange.unsettled


def pass_time(world: World, seconds: float) -> None:
    """In ticks, as workers have them."""
    for _ in range(round(seconds / 0.25)):
        world.tick(0.25)
        world.drain()


def test_a_request_whose_read_never_settles_goes_on_with_other_blocks() -> None:
    """It waited for the client's deadline, and answered every probe that it was alive."""
    world = stuck()
    num_blocks = sum(len(read.dst) for _, read in world.reads)
    pass_time(world, 1.5)
    assert world.output("a", PROMPT) == reference(PROMPT, 1)  # by the prefill worker
    pass_time(world, 2.0)
    assert world.output("a", PROMPT) == reference(PROMPT, 8)
    assert left_behind(world.decode).num_blocks == num_blocks
    assert world.decode.exchange.connector.failures["read_overdue"] == 1
    assert world.decode.audit().counts["device.left_to_reads"] == num_blocks


def test_blocks_of_a_read_that_is_left_behind_are_not_used_before_it_has_settled() -> None:
    world = stuck(num_blocks=16)
    pass_time(world, 3.5)
    written = {block for _, read in world.reads for block in read.dst}
    for number in range(6):  # more than the pool holds
        world.submit(f"b{number}", [50 + number] * 14, 6, remote=False)
        while world.step():
            steps = [each.step for each in world.decode.core.scheduler.in_flight]
            used = {block for step in steps for share in step.seqs for block in share.block_ids}
            assert not used & written
        assert world.output(f"b{number}", [50 + number] * 14) == reference([50 + number] * 14, 6)
    for node, read in world.reads:
        world.deliver(node, CopyDone(read.transfer_id, "given up"))
    world.reads.clear()
    world.drain()
    assert left_behind(world.decode).num_blocks == 0
    world.assert_idle()


def test_a_request_that_is_aborted_meanwhile_leaves_its_blocks_to_the_read() -> None:
    world = stuck()
    world.deliver("decode", Abort("a", 0))
    pass_time(world, 1.0)
    pool, kept = world.decode.core.kv.pool, left_behind(world.decode).num_blocks
    assert kept > 0
    assert pool.num_free == pool.num_blocks - kept
    world.hold_reads = False
    world.drain()
    world.assert_idle()


def test_a_read_that_settles_when_it_is_given_up_leaves_nothing_behind() -> None:
    world = stuck()
    pass_time(world, 2.0)
    for node, read in world.reads:
        world.deliver(node, CopyDone(read.transfer_id, "timed out"))
    world.reads.clear()
    world.assert_finishes("a", PROMPT, 8)
    assert left_behind(world.decode).num_taken == 0
    world.assert_idle()


def test_a_probe_is_answered_with_tokens_after_that() -> None:
    world = stuck()
    pass_time(world, 3.5)
    world.to_router.clear()
    world.deliver("decode", Probe("a", 0, "router", len(PROMPT)))
    assert world.refused(), "it has ended"


@pytest.mark.parametrize("own", [True, False])
def test_a_prefix_whose_read_never_settles_is_loaded_from_elsewhere_or_computed(own: bool) -> None:
    """`own`: it was to come from the worker's own host memory; else from a peer."""
    world = World(num_decode=2, num_host_blocks=40)
    first = "decode" if own else "decode-1"
    world.submit("a", PROMPT, 4, remote=False, decode=first)
    world.drain()
    world.workers[first].core.kv.pool.evict(world.workers[first].core.kv.pool.block_hashes())
    if own:
        world.decode.exchange.connector.rates.read_bytes_per_s[Tier.HOST].add(1e9, 0.001)
    world.hold_reads = True
    fetch = {} if own else {"fetch_from": "decode-1"}
    world.submit("b", PROMPT, 4, remote=False, **fetch)
    world.drain()
    assert world.reads
    pass_time(world, 3.5)
    assert world.output("b", PROMPT) == reference(PROMPT, 4)
    assert left_behind(world.decode).num_taken > 0
    world.hold_reads = False
    world.drain()
    world.assert_idle()


def test_the_deadline_follows_from_the_bytes_and_the_rate() -> None:
    world = World()
    rates = world.decode.exchange.connector.rates
    block = world.decode.config.bytes_per_block
    assert rates.timeout_s(None, 4) == 2.0  # the floor
    rates.add(None, 100 * block, 10.0)  # 10 blocks a second
    assert rates.timeout_s(None, 4) == pytest.approx(4.0)
    assert rates.timeout_s(None, 400) == world.decode.config.read_timeout_s
