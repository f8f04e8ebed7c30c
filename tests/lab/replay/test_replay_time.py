"""What takes how long in a replay: passes, transfers, and runs of steps that are one event."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvrelay.lab.replay.replay import replay
from kvrelay.lab.replay.trace import Trace, TraceRequest
from tests.lab.replay.replay_kit import (
    BLOCK,
    LINKS,
    STEP_S,
    TIMING,
    by_number,
    checked,
    config,
    lone,
    made_up,
)

# -- time ----------------------------------------------------------------------------------------


def test_a_lone_request_takes_what_its_passes_take() -> None:
    prompt, output = 1000, 51
    _, result = checked(lone((0.0, prompt, output)), config(num_prefill=0, num_decode=1))
    (sample,) = result.samples
    assert sample.ttft_s == pytest.approx(0.105, abs=0.005)
    assert sample.e2e_s is not None
    assert sample.second_s is not None
    least_s = 0.105 + (output - 1) * 0.010
    assert least_s < sample.e2e_s < least_s + (output - 1) * 0.003 + 0.01
    assert sample.second_s - 0.105 == pytest.approx(0.0105, abs=0.005)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    _, result = checked(
        lone((0.0, 4000, 2)), config(num_prefill=0, num_decode=1, max_num_batched_tokens=1000)
    )
    assert result.samples[0].ttft_s == pytest.approx(4 * 0.105, abs=0.01)


def test_a_handoff_takes_the_link_what_its_bytes_take() -> None:
    slow = replace(TIMING, links=replace(LINKS, peer_bytes_per_s=1e6))  # 1 ms a token
    for timing, least_s in ((TIMING, 0.0), (slow, 1.0)):
        run = replace(config(policy="round_robin", num_prefill=1, num_decode=1), timing=timing)
        (sample,) = checked(lone((0.0, 1000, 5)), run)[1].samples
        assert sample.prefill == "prefill-0"
        assert sample.ttft_s == pytest.approx(0.105, abs=0.01), "it does not wait for the transfer"
        assert sample.second_s is not None
        assert least_s <= sample.second_s - 0.105 < least_s + 0.05


def test_two_transfers_into_one_worker_share_its_link() -> None:
    """Two prompts are computed at once, by two workers, for the same decode worker."""
    slow = replace(TIMING, links=replace(LINKS, peer_bytes_per_s=1e6))
    run = replace(config(policy="round_robin", num_prefill=2, num_decode=1), timing=slow)
    (one,) = checked(lone((0.0, 1000, 5)), run)[1].samples
    two = checked(lone((0.0, 1000, 5), (0.0, 1000, 5)), run)[1].samples
    assert {sample.prefill for sample in two} == {"prefill-0", "prefill-1"}
    alone_s = one.second_s
    last_s = max(sample.second_s for sample in two)  # type: ignore[type-var]
    assert alone_s is not None
    assert last_s is not None
    assert last_s - 0.105 == pytest.approx(2 * (alone_s - 0.105), rel=0.05)


def test_transfers_into_two_workers_do_not_share_a_link() -> None:
    slow = replace(TIMING, links=replace(LINKS, peer_bytes_per_s=1e6))
    run = replace(config(policy="round_robin", num_prefill=2, num_decode=2), timing=slow)
    (one,) = checked(lone((0.0, 1000, 5)), run)[1].samples
    two = checked(lone((0.0, 1000, 5), (0.0, 1000, 5)), run)[1].samples
    for sample in two:
        assert sample.second_s == pytest.approx(one.second_s, rel=0.02)


def test_arrivals_come_as_many_times_as_fast_as_is_asked() -> None:
    trace = made_up(40)
    once, twice = (replay(trace, config(speedup=speedup)) for speedup in (1.0, 2.0))
    for a, b in zip(once.samples, twice.samples, strict=True):
        assert a.at_s == pytest.approx(2 * b.at_s)


# -- runs of decode steps that are one event ------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["prefix", "round_robin"])
@pytest.mark.parametrize("num_prefill", [0, 2])
def test_decode_steps_in_a_row_are_what_they_would_be_one_by_one(
    monkeypatch: pytest.MonkeyPatch, policy: str, num_prefill: int
) -> None:
    """Where choices do not depend on when exactly tokens come: on one decode worker."""
    trace = made_up(60, rate=2.0)
    run = config(policy=policy, num_decode=1, num_prefill=min(num_prefill, 1), num_blocks=1000)
    results = []
    for longest_s in (1e-9, 0.2, 100.0):
        monkeypatch.setattr("kvrelay.lab.replay.runtime.MAX_BURST_S", longest_s)
        results.append(checked(trace, run)[1])
    single = by_number(results[0])
    for result in results[1:]:
        assert result.num_events < results[0].num_events / 2
        for request_id, sample in by_number(result).items():
            alone = single[request_id]
            for name in ("ttft_s", "second_s", "e2e_s"):
                there, here = getattr(alone, name), getattr(sample, name)
                assert there == pytest.approx(here, abs=2 * STEP_S), (request_id, name)
        assert int(result.itl_counts.sum()) == int(results[0].itl_counts.sum())
        mean_s = [float(np.average(r.itl_s, weights=r.itl_counts)) for r in (results[0], result)]
        assert mean_s[1] == pytest.approx(mean_s[0], rel=0.02)


def test_the_first_token_of_a_prompt_that_is_cached_is_told_at_once() -> None:
    """All but one of its tokens is: its first pass looks like a decode."""
    ids = tuple(range(8))
    first = TraceRequest(0.0, 7 * BLOCK + 1, 2, ids)
    again = TraceRequest(1.0, 7 * BLOCK + 1, 40, ids)
    trace = Trace("twice", (first, again), block_tokens=BLOCK)
    _, result = checked(trace, config(num_prefill=0, num_decode=1))
    sample = by_number(result)["r1"]
    assert sum(sample.cached.values()) == 7 * BLOCK
    assert sample.ttft_s is not None
    assert sample.ttft_s < 2 * STEP_S
    assert sample.second_s is not None
    assert sample.ttft_s < sample.second_s < sample.ttft_s + 2 * STEP_S


def test_who_takes_the_place_of_another_does_not_wait_for_a_run_of_its_steps() -> None:
    """One runs out of time within a long run of steps, and the next is computed at once."""
    trace = lone((0.0, 1000, 500), (0.5, 100, 5))
    run = config(num_prefill=0, num_decode=1, timeout_s=2.0, max_num_seqs=1, block_size=4096)
    late, waiting = (by_number(checked(trace, run)[1])[name] for name in ("r0", "r1"))
    assert late.refused == "deadline_exceeded"
    assert waiting.ttft_s == pytest.approx(1.5, abs=0.1)
