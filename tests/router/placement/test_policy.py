"""Choices: who is picked for one request, and what a fleet makes of many."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.block_hash import hash_blocks
from kvrelay.engine.kv.events import KVEvents
from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.request import FinishReason
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.router.config import POLICIES
from kvrelay.router.placement.cost import CostModel
from tests.router.fleet import Chooser, choose, endpoint, local_cost, names_of, on, work
from tests.router.script import BLOCK, Script, worker_info, worker_stats

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")

# -- choices ----------------------------------------------------------------------------------


def test_a_long_prompt_is_handed_over_when_others_decode() -> None:
    busy = endpoint("decode-0", num_running=5)
    assert names_of(choose(work(2000), busy, endpoint("prefill-0"))) == ("decode-0", "prefill-0")


@pytest.mark.parametrize("policy", ["prefix", "round_robin"])
@pytest.mark.parametrize("keeps", ["decode-0", "prefill-0"])
def test_a_worker_that_hands_no_kv_over_is_asked_for_none(policy: str, keeps: str) -> None:
    s = Script(policy=policy)
    for name in ("decode-0", "prefill-0"):
        s.up(name, hands_over=name != keeps)
        s.tell(worker_stats(name, num_running=5 if name == "decode-0" else 0))
    s.submit(tokens=tuple(range(200)))
    assert not [m for _, m in s.sent if isinstance(m, Prefill)]
    (order,) = [m for _, m in s.sent if isinstance(m, Decode)]
    assert order.prefill_from is None
    holder = endpoint("decode-1", info={"hands_over": keeps != "prefill-0"})
    reader = endpoint("decode-0", info={"hands_over": keeps != "decode-0"})
    todo = work(1000, decode_1=on(device=900), sources=(holder,))
    assert local_cost(CostModel(handoff_s=0.0), 0.0, reader, todo).intake.fetch_from is None


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
    other = endpoint("prefill-0")
    assert names_of(choose(todo, busy, other, some))[1] == "prefill-1"
    assert names_of(choose(todo, busy, other, much))[1] == "prefill-0"


def test_a_crowded_worker_loses_its_prefix_advantage() -> None:
    todo = work(200, output_tokens=200.0, decode_0=190)
    crowded, lively = (endpoint("decode-0", num_running=running) for running in (60, 1))
    other = endpoint("decode-1")
    assert names_of(choose(todo, crowded, other))[0] == "decode-1"
    assert names_of(choose(todo, lively, other))[0] == "decode-0"


def test_equally_good_workers_are_taken_in_turn() -> None:
    chooser = Chooser(*(endpoint(f"decode-{n}") for n in range(3)))
    picked = [chooser.choose(work(10)).best.endpoint.worker for _ in range(6)]
    assert len(set(picked[:3])) == 3
    assert picked[3:] == picked[:3]


def test_of_equally_good_workers_the_one_with_the_fewest_requests_is_taken() -> None:
    weights = (0.01, 0.0, 0.0, 0.0)  # a step takes the same, however many are in it
    workers = [endpoint(f"decode-{n}", decode_weights=weights) for n in range(3)]
    chooser = Chooser(*workers)
    for number in (0, 2):
        workers[number].book(0.0, "x", 0, 0)
    assert [chooser.choose(work(10)).best.endpoint.worker for _ in range(2)] == ["decode-1"] * 2


def test_a_short_prompt_passes_long_ones_and_a_long_one_goes_where_there_are_none() -> None:
    """Both prefill workers are as busy as the other, with one long prompt or many short ones."""
    decode = endpoint("decode-0", num_running=20)
    long, short = endpoint("prefill-0"), endpoint("prefill-1")
    long.book(0.0, "long", 4000, 0, 4.0)
    for number in range(40):
        short.book(0.0, f"short {number}", 100, 0, 0.1)
    assert choose(work(500), decode, long, short).best.prefill is long
    assert choose(work(3900), decode, long, short).best.prefill is long
    for number in range(10):
        long.book(0.0, f"r{number}", 4000, 0, 4.0)
    assert choose(work(3900), decode, long, short).best.prefill is short, (
        "ten others would wait for it"
    )


def test_another_model_computes_no_prompt_for_a_decode_worker() -> None:
    busy = endpoint("decode-0", num_running=50)
    other = endpoint("prefill-0", info={"fingerprint": b"another"})
    assert names_of(choose(work(2000), busy, other))[1] is None


def test_workers_that_are_not_usable_are_not_chosen_though_they_hold_everything() -> None:
    holder, other = endpoint("decode-0"), endpoint("decode-1")
    holder.excluded_until = 5.0
    chooser = Chooser(holder, other)
    todo = work(2000, decode_0=1990)
    assert chooser.choose(todo, now=4.0).best.endpoint is other
    assert chooser.choose(todo, now=5.0).best.endpoint is holder


# -- baselines --------------------------------------------------------------------------------


def test_round_robin_takes_turns_and_always_hands_over() -> None:
    decodes = [endpoint("decode-0", num_running=50), endpoint("decode-1")]
    prefills = [endpoint(f"prefill-{n}") for n in range(3)]
    chooser = Chooser(*decodes, *prefills, policy="round_robin")
    picked = [names_of(chooser.choose(work(8, decode_1=4))) for _ in range(6)]
    for place, count in ((0, 2), (1, 3)):
        taken = [names[place] for names in picked]
        assert len(set(taken[:count])) == count
        assert taken == taken[:count] * (6 // count)
    assert names_of(choose(work(8), *decodes, policy="round_robin"))[1] is None


def test_least_loaded_ignores_prefixes() -> None:
    workers = (
        endpoint("decode-0", num_running=3),
        endpoint("decode-1", num_running=2),
        endpoint("prefill-0", pending_prefill_tokens=10),
        endpoint("prefill-1"),
    )
    choice = choose(work(900, decode_0=896, prefill_0=896), *workers, policy="least_loaded")
    assert names_of(choice) == ("decode-1", "prefill-1")


def test_random_is_anybody_however_busy_and_the_same_every_time() -> None:
    def picked() -> list[tuple[str, str | None]]:
        decodes = [endpoint(f"decode-{n}", num_running=20 * n) for n in range(4)]
        prefills = [endpoint(f"prefill-{n}", pending_prefill_tokens=900 * n) for n in range(4)]
        chooser = Chooser(*decodes, *prefills, policy="random")
        return [names_of(chooser.choose(work(900, decode_0=896))) for _ in range(400)]

    names = picked()
    assert names == picked()
    for place in (0, 1):
        counts = Counter(pair[place] for pair in names)
        assert len(counts) == 4
        assert all(60 < count < 140 for count in counts.values()), counts


def test_session_sticky_always_takes_the_same_worker_for_a_session() -> None:
    decodes = [endpoint(f"decode-{n}") for n in range(5)]
    chooser = Chooser(*decodes, policy="session_sticky")
    sessions = [f"session {n}".encode() for n in range(60)]

    def homes() -> dict[bytes, str]:
        return {
            name: chooser.choose(work(8), sticky=name).best.endpoint.worker for name in sessions
        }

    first = homes()
    for worker in decodes:
        worker.book(0.0, "x", 5000, 900, 5.0)
    assert homes() == first, "however busy it is"
    assert len(set(first.values())) == 5
    gone = decodes[2]
    gone.excluded_until = 100.0
    moved = {name for name, worker in homes().items() if worker != first[name]}
    assert moved == {name for name, worker in first.items() if worker == gone.worker}


def test_prefix_only_takes_the_longest_prefix_however_busy_its_holder_is() -> None:
    busy = endpoint("decode-0", num_running=500, pending_prefill_tokens=90_000)
    workers = (busy, endpoint("decode-1"), endpoint("decode-2"))
    todo = work(2000, decode_0=on(disk=1000), decode_1=900)
    assert names_of(choose(todo, *workers, policy="prefix_only"))[0] == "decode-0"
    assert names_of(choose(work(2000), *workers, policy="prefix_only"))[0] != "decode-0"


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "prefix"])
def test_baselines_hand_every_prompt_over_however_short(policy: str) -> None:
    workers = (endpoint("decode-0"), endpoint("prefill-0", pending_prefill_tokens=9000))
    todo = work(2000, decode_0=1999)
    assert names_of(choose(todo, *workers, policy=policy)) == ("decode-0", "prefill-0")


# -- a fleet ----------------------------------------------------------------------------------


def play(
    policy: str, read_bytes_per_s: float = 1e9, seed: int = 1, num_requests: int = 240
) -> tuple[Script, list[str], Counter]:
    """8 groups with a prefix of 120 tokens each, in random order, on 2 + 2 workers that cache what
    they are sent. Returns the script, each choice as text, and what it counted."""
    rng = Random(seed)
    s = Script(*WORKERS, policy=policy)
    s.up("decode-9")  # tells the fleet's rates, and is gone
    s.tell(worker_stats("decode-9", read_bytes_per_s=read_bytes_per_s))
    s.down("decode-9")
    s.sent.clear()
    prefixes = [tuple(rng.randrange(1000, 50_000) for _ in range(120)) for _ in range(8)]
    fingerprint = worker_info("decode-0").fingerprint
    caches: dict[str, set[bytes]] = {worker: set() for worker in WORKERS}
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


def at_home(counts: Counter) -> list[float]:
    """Returns for each group the share of its requests that one worker decoded."""
    of = [[counts["of", group, worker] for worker in WORKERS] for group in range(8)]
    return [max(numbers) / sum(numbers) for numbers in of]


@pytest.mark.parametrize(
    ("read_bytes_per_s", "decodes", "least"),
    [(2e5, WORKERS, 0.15), (1e9, ("decode-0", "decode-1"), 0.35)],
    ids=["slow to move: every worker decodes what it computes", "quick to move"],
)
def test_prefixes_are_found_and_the_load_stays_balanced(
    read_bytes_per_s: float, decodes: tuple[str, ...], least: float
) -> None:
    _, _, counts = play("prefix", read_bytes_per_s)
    assert counts["cached"] >= 0.95 * counts["possible"]
    # How long others hold memory is only known once some have ended.
    assert sum(counts["at", worker] for worker in decodes) >= 0.98 * 240
    for worker in decodes:
        assert least <= counts["at", worker] / 240 <= 1 - least
    _, _, baseline = play("round_robin", read_bytes_per_s)
    assert baseline["cached"] < counts["cached"]


def test_groups_stay_with_their_prefix_where_it_is_slow_to_move() -> None:
    _, _, counts = play("prefix", read_bytes_per_s=2e5)  # moving it takes as long as computing it
    assert sum(share > 0.95 for share in at_home(counts)) >= 5, at_home(counts)


def test_choices_are_the_same_under_any_hash_seed() -> None:
    program = (
        "from tests.router.placement.test_policy import play; print('\\n'.join(play('prefix')[1]))"
    )
    root = Path(__file__).parents[3]
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


def test_expected_blocks_send_a_burst_of_one_prefix_to_one_place() -> None:
    """Nothing is computed yet when the second request of the prefix comes."""
    s = Script("decode-0", "decode-1")
    for n in range(4):
        s.submit(f"r{n}", tokens=(*range(120), 1000 + n))
    assert len({to for to, m in s.sent if isinstance(m, Decode)}) == 1
    assert [m for _, m in s.sent if isinstance(m, Prefill)] == []
