"""Choices in seconds: what the books say, what a placement costs, who is picked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from decode_worker.messages import Decode
from engine.block_hash import hash_blocks, root_hash
from engine.kv_events import KVEvents
from engine.request import FinishReason
from prefill_worker.messages import Prefill
from router.cost import CostModel, Work
from router.endpoint import Endpoint
from router.policy import Choice, Policy
from tests.router.script import BLOCK, Script, worker_info, worker_stats

STATS = worker_stats("", prefill_tokens_per_s=1000.0, decode_step_s=0.01)


def endpoint(name: str, *, info: dict[str, object] | None = None, **stats: object) -> Endpoint:
    """A worker that has told its rates, and `stats`."""
    made = Endpoint(worker_info(name, num_blocks=1000, **(info or {})), heard_at=0.0)
    told = {"worker": name, "num_free_blocks": 1000, **stats}
    made.observe(0.0, replace(STATS, **told))  # type: ignore[arg-type]
    return made


def work(num_tokens: int, output_tokens: float = 100.0, **cached: int) -> Work:
    names = {name.replace("_", "-"): tokens for name, tokens in cached.items()}
    return Work(num_tokens, names, output_tokens)


def choose(todo: Work, *workers: Endpoint, policy: str = "prefix") -> Choice:
    decodes = [w for w in workers if w.worker.startswith("decode")]
    prefills = [w for w in workers if w.worker.startswith("prefill")]
    return Policy(policy, CostModel(), lambda worker: 0).choose(todo, decodes, prefills)


def names_of(choice: Choice) -> tuple[str, str | None]:
    return choice.decode.worker, choice.prefill.worker if choice.prefill else None


# -- books ------------------------------------------------------------------------------------


def test_booked_load_counts_at_once_and_statistics_replace_it() -> None:
    e = endpoint("decode-0")
    e.book(1.0, "a", 500, 20)
    e.book(1.0, "b", 300, 10)
    assert (e.pending_prefill_tokens, e.num_seqs, e.num_free_blocks) == (800, 2, 970)
    stats = replace(STATS, num_waiting=1, num_running=1, num_free_blocks=970)
    e.observe(1.05, replace(stats, pending_prefill_tokens=0, num_free_blocks=1000))
    assert e.pending_prefill_tokens == 800, "sent before the worker can have heard of them"
    assert e.num_free_blocks == 970
    e.observe(1.5, replace(stats, pending_prefill_tokens=601))
    assert e.pending_prefill_tokens == 600, "200 tokens of the first one are computed"
    assert (e.num_seqs, e.num_free_blocks) == (2, 970)
    e.start_decoding("a")
    assert e.pending_prefill_tokens == 300
    assert e.num_decoding == 1
    assert e.release("a")
    assert not e.release("a")
    assert e.release("b")
    assert (e.pending_prefill_tokens, e.num_seqs, e.num_decoding) == (0, 0, 0)
    assert e.check_integrity() == []


def test_load_of_other_routers_is_what_statistics_have_beyond_the_books() -> None:
    e = endpoint("decode-0")
    e.book(0.0, "a", 100, 5)
    e.observe(1.0, replace(STATS, num_running=4, pending_prefill_tokens=704))
    assert (e.pending_prefill_tokens, e.num_seqs) == (700, 4)
    e.start_decoding("a")
    e.release("a")
    assert (e.pending_prefill_tokens, e.num_seqs) == (600, 3)


def test_back_off_grows_to_its_limit_and_success_ends_its_growth() -> None:
    e = endpoint("decode-0")
    waits = []
    for _ in range(5):
        e.fail(10.0, 0.5, 3.0)
        waits.append(e.excluded_until - 10.0)
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert not e.usable(12.9, 10)
    assert e.usable(13.0, 10)
    e.succeed()
    e.fail(20.0, 0.5, 3.0)
    assert e.usable(20.5, 10)


# -- costs ------------------------------------------------------------------------------------


def test_a_placement_is_the_sum_of_its_parts() -> None:
    cost = CostModel(handoff_s=0.01, stalled_at_least=0.5, free_tokens=100, crowding=0.1)
    decode = endpoint("decode-0", num_running=2, pending_prefill_tokens=502)
    decode.typical_decoding = 3.0
    todo = work(1000, output_tokens=100.0, decode_0=400)
    local = cost.local(decode, todo)
    assert local.queue == pytest.approx(0.5)
    assert local.prefill == pytest.approx(0.6)
    assert local.stall == pytest.approx(0.5 * 3.0)
    assert local.decode == pytest.approx(100 * 0.01 * 1.2)
    assert (local.transfer, local.memory) == (0.0, 0.0)
    assert local.total == pytest.approx(0.5 + 0.6 + 1.5 + 1.2)
    prefill = endpoint("prefill-0", pending_prefill_tokens=100)
    first = cost.prefill(prefill, todo)
    remote = cost.remote(decode, first, todo)
    assert remote.queue == pytest.approx(0.1)
    assert remote.prefill == pytest.approx(1.0)
    assert remote.stall == 0.0
    # 1024 bytes a token, 1e9 bytes/s; all but the last 64 tokens are read during the prefill.
    assert remote.transfer == pytest.approx(0.01 + 64 * 1024 / 1e9)
    assert remote.decode == local.decode


def test_a_transfer_slower_than_the_prefill_is_what_is_waited_for() -> None:
    cost = CostModel()
    slow = endpoint("decode-0", read_bytes_per_s=1024 * 500.0)
    todo = work(1000)
    first = cost.prefill(endpoint("prefill-0"), todo)
    assert cost.remote(slow, first, todo).transfer == pytest.approx(cost.handoff_s + 2.0 - 1.0)


def test_too_few_blocks_cost_the_wait_for_some() -> None:
    cost = CostModel()
    full = endpoint("decode-0")
    full.book(0.0, "other", 0, 990)
    assert cost.local(full, work(1000)).memory == pytest.approx(100 / 2 * 0.01)


def test_pushing_prefixes_out_of_a_cache_costs_what_their_reuse_saves() -> None:
    full = endpoint("decode-0", num_cached_blocks=1000)
    cost = CostModel(reuse=0.5)
    assert cost.local(full, work(500, 0)).evict == pytest.approx(0.25)  # half of 0.5 s
    assert cost.local(endpoint("decode-1"), work(500, 0)).evict == 0
    assert CostModel().local(full, work(500, 0)).evict == 0, "nothing is known to be used again"
    in_use = endpoint("decode-2", num_cached_blocks=900, num_free_blocks=100)
    assert in_use.num_blank_blocks == 100, "sealed blocks that are in use are not evicted"


def test_rates_not_measured_are_those_of_the_fleet() -> None:
    cost = CostModel(prefill_tokens_per_s=1000.0)
    silent = Endpoint(worker_info("decode-9"), heard_at=0.0)
    assert cost.prefill(silent, work(500)).prefill == pytest.approx(0.5)
    cost.observe(replace(STATS, prefill_tokens_per_s=100.0, decode_step_s=0.0))
    assert cost.prefill(silent, work(500)).prefill == pytest.approx(5.0)
    assert cost.decode_step_s == CostModel().decode_step_s
    silent.observe(0.0, replace(STATS, worker="decode-9", prefill_tokens_per_s=250.0))
    assert cost.prefill(silent, work(500)).prefill == pytest.approx(2.0)


# -- choices ----------------------------------------------------------------------------------


def test_a_long_prompt_is_handed_over_when_others_decode() -> None:
    busy = endpoint("decode-0", num_running=5)
    assert names_of(choose(work(2000), busy, endpoint("prefill-0"))) == ("decode-0", "prefill-0")


def test_a_short_missing_suffix_is_computed_where_the_prefix_is() -> None:
    todo = work(2000, decode_1=1990)
    workers = (endpoint("decode-0"), endpoint("decode-1"), endpoint("prefill-0"))
    assert names_of(choose(todo, *workers)) == ("decode-1", None)


def test_a_long_queue_for_prefill_keeps_it_local() -> None:
    busy = endpoint("prefill-0", pending_prefill_tokens=50_000)
    idle = endpoint("decode-0")
    assert names_of(choose(work(2000), idle, busy)) == ("decode-0", None)


def test_the_prefill_worker_with_the_prefix_is_worth_some_queue() -> None:
    busy = endpoint("decode-0", num_running=5)
    todo = work(2000, prefill_1=1900)
    some = endpoint("prefill-1", pending_prefill_tokens=1000)
    much = endpoint("prefill-1", pending_prefill_tokens=9000)
    assert names_of(choose(todo, busy, endpoint("prefill-0"), some))[1] == "prefill-1"
    assert names_of(choose(todo, busy, endpoint("prefill-0"), much))[1] == "prefill-0"


def test_a_crowded_worker_loses_its_prefix_advantage() -> None:
    todo = work(200, output_tokens=200.0, decode_0=190)
    crowded = endpoint("decode-0", num_running=60)
    assert names_of(choose(todo, crowded, endpoint("decode-1")))[0] == "decode-1"
    lively = endpoint("decode-0", num_running=1)
    assert names_of(choose(todo, lively, endpoint("decode-1")))[0] == "decode-0"


def test_ties_go_to_the_fewest_requests_then_round() -> None:
    policy = Policy("prefix", CostModel(crowding=0.0), lambda worker: 0)
    workers = [endpoint(f"decode-{n}") for n in range(3)]
    picked = [policy.choose(work(10), workers, []).decode.worker for _ in range(6)]
    assert picked == ["decode-0", "decode-1", "decode-2"] * 2
    workers[0].book(0.0, "x", 0, 0)
    workers[2].book(0.0, "x", 0, 0)
    assert [policy.choose(work(10), workers, []).decode.worker for _ in range(2)] == [
        "decode-1"
    ] * 2


def test_ties_go_to_the_emptiest_cache() -> None:
    cached = {"decode-0": 7, "decode-1": 3, "decode-2": 5}
    policy = Policy("prefix", CostModel(), cached.__getitem__)
    workers = [endpoint(name) for name in cached]
    assert policy.choose(work(10), workers, []).decode.worker == "decode-1"


def test_round_robin_takes_turns_and_always_hands_over() -> None:
    policy = Policy("round_robin", CostModel(), lambda worker: 0)
    decodes = [endpoint("decode-0", num_running=50), endpoint("decode-1")]
    prefills = [endpoint(f"prefill-{n}") for n in range(3)]
    picked = [names_of(policy.choose(work(8, decode_1=4), decodes, prefills)) for _ in range(4)]
    assert picked == [
        ("decode-0", "prefill-0"),
        ("decode-1", "prefill-1"),
        ("decode-0", "prefill-2"),
        ("decode-1", "prefill-0"),
    ]
    assert names_of(policy.choose(work(8), decodes, []))[1] is None


def test_least_loaded_ignores_prefixes() -> None:
    workers = (
        endpoint("decode-0", num_running=3),
        endpoint("decode-1", num_running=2),
        endpoint("prefill-0", pending_prefill_tokens=10),
        endpoint("prefill-1"),
    )
    choice = choose(work(900, decode_0=896, prefill_0=896), *workers, policy="least_loaded")
    assert names_of(choice) == ("decode-1", "prefill-1")


# -- a fleet ----------------------------------------------------------------------------------


def play(policy: str, seed: int = 1, num_requests: int = 240) -> tuple[Script, list[str], Counter]:
    """8 groups with a prefix of 120 tokens each, in random order, on 2 + 2 workers that cache what
    they are sent. Returns the script, each choice as text, and what it counted."""
    rng = Random(seed)
    s = Script("prefill-0", "prefill-1", "decode-0", "decode-1", policy=policy)
    prefixes = [tuple(rng.randrange(1000, 50_000) for _ in range(120)) for _ in range(8)]
    root = root_hash(worker_info("decode-0").fingerprint)
    caches: dict[str, set[bytes]] = {
        w: set() for w in ("prefill-0", "prefill-1", "decode-0", "decode-1")
    }
    seqs: Counter[str] = Counter()
    counts: Counter = Counter()
    log: list[str] = []
    live: list[tuple[str, str, int]] = []

    def hold(worker: str, tokens: tuple[int, ...]) -> int:
        """The worker seals the blocks of `tokens`. Returns how many tokens it did not compute."""
        names = hash_blocks(root, tokens, BLOCK)
        hits = 0
        while hits < len(names) and names[hits] in caches[worker]:
            hits += 1
        fresh = tuple(n for n in names if n not in caches[worker])
        caches[worker].update(fresh)
        seqs[worker] += 1
        s.tell(KVEvents(worker, 1, seqs[worker], fresh, ()))
        return min(hits * BLOCK, len(tokens) - 1)

    for number in range(num_requests):
        group = rng.randrange(8)
        tokens = prefixes[group] + tuple(rng.randrange(1000) for _ in range(9))
        s.submit(f"r{number}", tokens=tokens)
        decode, prefill, _ = s.dispatched()
        log.append(f"{number} {decode} {prefill}")
        cached = hold(prefill or decode, tokens)
        if prefill:
            hold(decode, tokens)
        s.delta(prefill or decode, 129, 5, request_id=f"r{number}", num_cached_tokens=cached)
        counts["cached"] += cached
        counts["possible"] += 120 * counts.get(("seen", group), 0)
        counts["seen", group] = 1
        counts["at", decode] += 1
        counts["of", group, decode] += 1
        live.append((f"r{number}", decode, 130))
        if len(live) > 6:
            request_id, worker, at = live.pop(0)
            s.delta(worker, at, 999, request_id=request_id, finish=FinishReason.STOP)
        s.pass_time(0.05)
        s.sent.clear()
    for request_id, worker, at in live:
        s.delta(worker, at, 999, request_id=request_id, finish=FinishReason.STOP)
    s.assert_idle()
    return s, log, counts


def test_groups_stay_with_their_prefix_and_the_load_stays_balanced() -> None:
    _, _, counts = play("prefix")
    assert counts["cached"] >= 0.95 * counts["possible"]
    decodes = ("decode-0", "decode-1")
    for worker in decodes:
        assert 0.35 <= counts["at", worker] / 240 <= 0.65
    shares = [
        max(counts["of", group, d] for d in decodes) / sum(counts["of", group, d] for d in decodes)
        for group in range(8)
    ]
    assert sum(share > 0.95 for share in shares) >= 5, shares
    _, _, baseline = play("round_robin")
    assert baseline["cached"] < counts["cached"]


def test_choices_are_the_same_under_any_hash_seed() -> None:
    program = "from tests.router.test_policy import play; print('\\n'.join(play('prefix')[1]))"
    root = Path(__file__).parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=root,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == 240


def test_speculation_sends_a_burst_of_one_prefix_to_one_place() -> None:
    """Nothing is computed yet when the second request of the prefix comes."""
    s = Script("decode-0", "decode-1")
    for n in range(4):
        s.submit(f"r{n}", tokens=(*range(120), 1000 + n))
    assert len({to for to, m in s.sent if isinstance(m, Decode)}) == 1
    assert [m for _, m in s.sent if isinstance(m, Prefill)] == []
