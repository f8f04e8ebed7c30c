"""Choices: who is picked for one request, and what a fleet makes of many."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

from decode_worker.messages import Decode
from engine.block_hash import CacheScope, hash_blocks
from engine.kv_events import KVEvents
from engine.request import FinishReason
from prefill_worker.messages import Prefill
from router.cost import CostModel
from router.policy import Policy
from tests.router.fleet import choose, endpoint, names_of, work
from tests.router.script import BLOCK, Script, worker_info

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
    fingerprint = worker_info("decode-0").fingerprint
    caches: dict[str, set[bytes]] = {
        w: set() for w in ("prefill-0", "prefill-1", "decode-0", "decode-1")
    }
    seqs: Counter[str] = Counter()
    counts: Counter = Counter()
    log: list[str] = []
    live: list[tuple[str, str, int]] = []

    def hold(worker: str, tokens: tuple[int, ...]) -> int:
        """The worker seals the blocks of `tokens`. Returns how many tokens it did not compute."""
        names = hash_blocks(fingerprint, CacheScope(), tokens, BLOCK)
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
