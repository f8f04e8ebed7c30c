"""Requests whose prefix is not in device memory: it is in host memory, on disk, or at a peer."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.messages import Abort, TokenDeltas
from kvrelay.kvtransfer.messages import KVConfirmed, KVReady
from kvrelay.router.record import EVICT_FIRST
from tests.kvtransfer.tiers.object_tier import add_object_tier
from tests.worker.world import World, reference

PROMPT = list(range(1, 41))  # 10 blocks
OTHER = list(range(50, 90))
TIERS: dict[str, Any] = {"num_host_blocks": 40, "num_disk_blocks": 40}


def world_of(**options: Any) -> World:
    return World(**{"num_blocks": 14, **TIERS, **options})


def finish(world: World, name: str, prompt: list[int], count: int = 4, **options: Any) -> list[int]:
    """Run one request to its end, and let what moves behind it come to rest."""
    world.submit(name, prompt, count, remote=options.pop("remote", False), **options)
    world.drain()
    output = world.output(name, prompt)
    assert output == reference(prompt, count)
    return output


def push_out(world: World, name: str = "other", **options: Any) -> None:
    """Fill the device pool with something else."""
    finish(world, name, OTHER, **options)


def demote_to_disk(world: World) -> None:
    for _ in range(20):
        world.tick(1.0)
        world.drain()


def sources(world: World, name: str) -> dict[str, int]:
    """What the worker said of the cached tokens of a request."""
    for frame in world.to_router:
        if isinstance(frame, TokenDeltas):
            for delta in frame.deltas:
                if delta.request_id == name and delta.num_cached_tokens is not None:
                    assert sum(delta.cached_by_source.values()) == delta.num_cached_tokens
                    return delta.cached_by_source
    raise AssertionError(f"nobody said what of {name} was cached")


def test_a_prefix_that_left_the_device_comes_back_from_host_memory() -> None:
    world = world_of()
    finish(world, "a", PROMPT)
    push_out(world)
    finish(world, "b", PROMPT)
    assert sources(world, "b")["host"] >= 20
    world.assert_idle()


def test_a_tier_that_was_slow_once_is_tried_again() -> None:
    world = world_of()
    rates = world.decode.exchange.connector.rates
    finish(world, "a", PROMPT)
    rates.add(Tier.HOST, 32, 1e6)
    for name, after_s, is_loaded in (("b", 10.0, False), ("c", 25.0, True)):
        push_out(world, f"before {name}")
        world.tick(after_s)
        finish(world, name, PROMPT)
        assert ("host" in sources(world, name)) == is_loaded
    world.assert_idle()


def test_a_retained_turn_keeps_the_beginning_that_a_request_without_retention_computed() -> None:
    """One of the two copies of a handoff is not retained; the next turn may be where it is."""
    world = world_of(num_blocks=20)
    finish(world, "first turn", PROMPT, retention=EVICT_FIRST)
    longer = PROMPT + [45 + i for i in range(12)]
    finish(world, "second turn", longer)
    for turn in range(3):
        push_out(world, f"other{turn}")
        finish(world, f"more{turn}", [90 - i for i in range(40)])
    finish(world, "third turn", longer)
    assert sources(world, "third turn").get("host", 0) >= 48
    world.assert_idle()


def test_what_no_request_retains_is_not_copied_down() -> None:
    world = world_of()
    for turn in range(3):
        finish(world, f"turn{turn}", PROMPT, retention=EVICT_FIRST)
    assert world.decode.exchange.tiers.num_blocks(Tier.HOST) == 0
    world.assert_idle()


def preempted(cached: list[int]) -> World:
    """A prompt that a stream has taken the blocks from, while it was computed; it is done now.
    `cached`: its beginning, which another request had."""
    world = world_of(max_num_batched_tokens=4)
    if cached:
        finish(world, "before", cached)
    world.submit("stream", OTHER[:8], 44, remote=False)
    for _ in range(4):
        world.step()
    world.submit("new", PROMPT[:36], 4, remote=False)
    while world.step():
        while world.reads:
            world.settle_read()
    assert world.decode.core.scheduler.num_preemptions > 0
    assert world.decode.core.counters["blocks_from_host"] > 0
    assert world.output("new", PROMPT[:36]) == reference(PROMPT[:36], 4)
    world.assert_idle()
    return world


def test_what_a_preempted_prompt_has_computed_itself_is_no_cache_hit() -> None:
    assert sources(preempted([]), "new") == {}


def test_what_was_cached_before_a_prompt_was_preempted_is_counted_once() -> None:
    assert sources(preempted(PROMPT[:16]), "new") == {"device": 16}


def test_a_prefix_that_left_host_memory_comes_back_from_disk() -> None:
    world = world_of(num_host_blocks=10)
    finish(world, "a", PROMPT)
    demote_to_disk(world)
    for turn in range(3):
        push_out(world, f"other{turn}")
        demote_to_disk(world)
        finish(world, f"more{turn}", [90 - i for i in range(40)])
        demote_to_disk(world)
    finish(world, "b", PROMPT)
    assert sources(world, "b").get("disk", 0) > 0
    world.assert_idle()


def test_a_prefix_that_only_a_fourth_tier_has_comes_back_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = add_object_tier(monkeypatch)
    world = world_of(num_host_blocks=12, num_disk_blocks=0, num_decode=2)
    finish(world, "a", PROMPT)
    demote_to_disk(world)
    push_out(world)
    demote_to_disk(world)
    finish(world, "b", PROMPT)
    assert sources(world, "b").get(tier, 0) > 0
    push_out(world, "more")
    demote_to_disk(world)
    finish(world, "c", PROMPT, decode="decode-1", fetch_from="decode")
    assert sources(world, "c")["peer"] >= 20, "it is staged in host memory for a peer"
    world.assert_idle()


def test_the_disk_survives_the_worker() -> None:
    before = world_of()
    finish(before, "a", PROMPT)
    demote_to_disk(before)
    records = list(before.indexed["decode"].values())
    assert len(records) >= 10
    after = world_of(records={"decode": records})
    after.lower["decode"][Tier.DISK] = before.lower["decode"][Tier.DISK]
    finish(after, "b", PROMPT)
    assert sources(after, "b") == {"disk": 36}
    after.assert_idle()


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_changed_byte_below_the_device_is_noticed_and_the_answer_right(tier: Tier) -> None:
    world = world_of(num_host_blocks=40 if tier is Tier.HOST else 0)
    finish(world, "a", PROMPT)
    demote_to_disk(world)
    push_out(world)
    for slots in world.lower["decode"][tier]:
        slots[1] ^= 1
    finish(world, "b", PROMPT)
    assert world.decode.exchange.connector.failures.get("checksum_mismatch") == 1
    assert str(tier) not in sources(world, "b")
    world.assert_idle()


def test_what_comes_before_a_changed_block_is_used() -> None:
    world = world_of()
    finish(world, "a", PROMPT)
    push_out(world)
    (source, *_) = world.decode.exchange.tiers.find(
        [s.block_hash for s in world.decode.exchange.tiers.find(_block_hashes(world))[3:]]
    )
    world.lower["decode"][Tier.HOST][source.slot][0] ^= 1
    finish(world, "b", PROMPT)
    assert sources(world, "b").get("host", 0) <= 12
    world.assert_idle()


def _block_hashes(world: World) -> list[bytes]:
    from kvrelay.engine.kv.block_hash import hash_blocks
    from kvrelay.engine.kv.scope import UNSALTED

    return hash_blocks(b"tiny", UNSALTED, PROMPT, 4)


def test_a_tier_that_is_slower_than_computing_is_not_read() -> None:
    world = world_of()
    finish(world, "a", PROMPT)
    push_out(world)
    world.decode.exchange.connector.rates.read_bytes_per_s[Tier.HOST].add(1.0, 100.0)
    finish(world, "b", PROMPT)
    assert "host" not in sources(world, "b")


def test_two_requests_with_one_prefix_load_it_once() -> None:
    world = world_of(num_blocks=30)
    finish(world, "a", PROMPT)
    push_out(world, "x")
    finish(world, "y", [3] * 90)
    world.log.clear()
    world.submit("b", PROMPT, 3, remote=False)
    world.submit("c", PROMPT, 3, remote=False)
    world.drain()
    loads = [r for _, r in world.log if r.dst_tier is Tier.DEVICE]
    assert sum(len(r.src) for r in loads) <= 9
    assert world.output("c", PROMPT) == reference(PROMPT, 3)
    world.assert_idle()


@pytest.fixture
def loading() -> World:
    """The prefix of a request "b" is being loaded."""
    world = world_of()
    finish(world, "a", PROMPT)
    push_out(world)
    world.hold_reads = True
    world.submit("b", PROMPT, 4, remote=False)
    world.drain()
    assert world.reads
    return world


def test_abort_while_loading_drains_before_free(loading: World) -> None:
    world = loading
    world.deliver("decode", Abort("b", 0))
    world.drain()
    assert world.decode.check_idle()
    world.hold_reads = False
    world.drain()
    world.assert_idle()


def test_a_failed_load_is_computed(loading: World) -> None:
    world = loading
    world.settle_read("the disk is on fire")
    world.hold_reads = False
    world.assert_finishes("b", PROMPT, 4)
    world.assert_idle()


@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_a_prefix_is_fetched_from_a_peer_wherever_it_has_it(where: str) -> None:
    world = world_of(num_decode=2, num_host_blocks=0 if where == "device" else 12)
    finish(world, "a", PROMPT)
    if where != "device":
        demote_to_disk(world)
        push_out(world)
    if where == "disk":
        demote_to_disk(world)
    finish(world, "b", PROMPT, decode="decode-1", fetch_from="decode")
    assert sources(world, "b")["peer"] >= 20
    world.assert_idle()


def test_a_prefill_worker_fetches_the_prefix_from_the_decode_worker() -> None:
    world = world_of(num_blocks=32)
    finish(world, "a", PROMPT, count=8)
    turn = PROMPT + world.output("a", PROMPT) + list(range(60, 80))
    finish(world, "b", turn, remote=True, fetch_from="decode")
    assert sources(world, "b") == {"peer": 44}
    world.assert_idle()


def test_a_worker_without_the_prefix_exports_nothing() -> None:
    world = world_of(num_decode=2)
    finish(world, "b", PROMPT, decode="decode-1", fetch_from="decode")
    assert sources(world, "b") == {}
    world.assert_idle()


def test_an_export_that_is_not_answered_is_not_waited_for_long() -> None:
    world = world_of(num_decode=2)
    finish(world, "a", PROMPT)
    world.lost = (KVReady,)
    world.submit("b", PROMPT, 4, remote=False, decode="decode-1", fetch_from="decode")
    world.drain()
    assert world.output("b", PROMPT) == []
    world.tick(2.5)
    world.assert_finishes("b", PROMPT, 4)
    world.tick(60.0)
    world.drain()
    world.assert_idle()


def test_blocks_read_after_the_lease_has_expired_are_not_used() -> None:
    world = world_of(num_decode=2, lease_s=1.0)
    finish(world, "a", PROMPT)
    world.hold_reads = True
    world.submit("b", PROMPT, 4, remote=False, decode="decode-1", fetch_from="decode")
    world.drain()
    assert world.reads
    world.tick(1.5)
    world.hold_reads = False
    world.assert_finishes("b", PROMPT, 4)
    assert sources(world, "b") == {}
    assert world.workers["decode-1"].exchange.connector.failures == {"refused": 1}
    world.assert_idle()


def test_a_lost_confirmation_ends_with_the_lease() -> None:
    world = world_of(num_decode=2)
    finish(world, "a", PROMPT)
    world.lost = (KVConfirmed,)
    world.submit("b", PROMPT, 4, remote=False, decode="decode-1", fetch_from="decode")
    world.drain()
    world.tick(6.0)
    world.assert_finishes("b", PROMPT, 4)
    world.assert_idle()


def test_peers_that_differ_say_in_which_field() -> None:
    from kvrelay.kvtransfer.messages import KVConnected

    world = world_of(compatibility=(("dtype", "float32"), ("num_layers", "30")))
    other = KVConnected("x", 1, b"another", 8, b"", (("dtype", "bfloat16"), ("num_layers", "30")))
    (note,) = [
        effect
        for effect in world.decode.receive(0.0, other)
        if getattr(effect, "counter", "") == "kv_incompatible_peer"
    ]
    assert "dtype is bfloat16 there and float32 here" in note.text
    assert "num_layers" not in note.text
