"""Replays of small made-up traces: what comes out is what must, and the same every time."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.lab.replay.config import Fault
from kvrelay.lab.replay.replay import replay
from kvrelay.lab.replay.trace import Trace
from kvrelay.router.config import POLICIES
from tests.lab.replay.replay_kit import (
    BLOCK,
    by_number,
    checked,
    comparable,
    config,
    lone,
    made_up,
)

# -- what must hold of any replay -----------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_prefill", [0, 2])
def test_each_request_ends_once_with_all_its_tokens(policy: str, num_prefill: int) -> None:
    trace = made_up(60)
    _, result = checked(trace, config(policy=policy, num_prefill=num_prefill))
    assert not any(sample.refused for sample in result.samples)
    assert result.policy == policy
    gaps = sum(sample.num_output - 1 for sample in result.samples)
    assert int(result.itl_counts.sum()) == gaps, "each token but the first follows another"


@pytest.mark.slow
@pytest.mark.parametrize("host_blocks", [0, 300])
def test_the_same_replay_gives_the_same_result(host_blocks: int) -> None:
    faults = (Fault("decode-1", 4.0, 3.0),)
    run = config(num_host_blocks=host_blocks, num_disk_blocks=host_blocks, faults=faults)
    first, second = replay(made_up(), run), replay(made_up(), run)
    assert comparable(first) == comparable(second)
    other = comparable(replay(made_up(seed=2), run))
    assert other["samples"] != comparable(first)["samples"]


def test_tokens_are_computed_or_cached_and_nothing_else() -> None:
    """On decode workers alone: every prompt token once, and each output token but the last."""
    trace = made_up()
    _, result = checked(trace, config(num_prefill=0, num_blocks=2000))
    cached = sum(sum(sample.cached.values()) for sample in result.samples)
    prompts = sum(request.input_length for request in trace.requests)
    outputs = sum(request.output_length - 1 for request in trace.requests)
    assert result.counters["preemptions"] == 0
    assert cached > 0
    assert result.counters["tokens_scheduled"] == prompts - cached + outputs


def test_a_pool_that_is_too_small_for_all_is_shared_by_waiting_and_preemption() -> None:
    trace = lone(*((0.05 * n, 5 * BLOCK, 8 * BLOCK) for n in range(24)))
    _, result = checked(trace, config(num_prefill=1, num_decode=1, num_blocks=40))
    assert not any(sample.refused for sample in result.samples)


# -- faults and refusals -------------------------------------------------------------------------


@pytest.mark.parametrize("worker", ["decode-0", "decode-2", "prefill-1"])
def test_a_worker_that_is_killed_loses_no_request(worker: str) -> None:
    trace = made_up(rate=8.0)
    _, calm = checked(trace, config())
    faults = tuple(Fault(worker, at_s, 2.0) for at_s in (2.0, 6.0, 9.0))
    _, result = checked(trace, config(faults=faults))
    assert not any(sample.refused for sample in result.samples)
    assert result.retries.get("worker_down", 0) > 0
    assert calm.retries.get("worker_down", 0) == 0


def test_the_only_decode_worker_comes_back_and_serves_what_waits() -> None:
    trace = made_up(30, rate=8.0)
    run = config(num_prefill=1, num_decode=1, faults=(Fault("decode-0", 1.0, 4.0),))
    _, result = checked(trace, run)
    assert not any(sample.refused for sample in result.samples)
    assert max(sample.e2e_s or 0.0 for sample in result.samples) > 3.0


def test_what_is_refused_is_counted_with_its_reason() -> None:
    trace = made_up(rate=200.0)
    _, result = checked(trace, config(num_decode=1, limits={"max_queue": 3}, max_num_seqs=2))
    refused = [sample for sample in result.samples if sample.refused]
    assert refused
    assert {sample.refused for sample in refused} <= {"queue_full", "overloaded"}
    assert all(sample.num_output == 0 for sample in refused)
    assert all(sample.retry_after_s and sample.retry_after_s > 0 for sample in refused)


def test_a_request_that_no_worker_could_hold_is_refused() -> None:
    trace = lone((0.0, 200 * BLOCK, 5), (0.1, 100, 5))
    _, result = checked(trace, config())
    large, small = (by_number(result)[name] for name in ("r0", "r1"))
    assert large.refused == "kv_cache_too_small"
    assert small.refused is None


def test_what_takes_longer_than_its_timeout_ends_with_that() -> None:
    trace = lone((0.0, 1000, 500), (0.0, 100, 5))
    _, result = checked(trace, config(num_prefill=0, num_decode=1, timeout_s=2.0))
    late, quick = (by_number(result)[name] for name in ("r0", "r1"))
    assert late.refused == "deadline_exceeded"
    assert late.refused_s == pytest.approx(2.0, abs=0.5)
    assert quick.e2e_s is not None


# -- what is told of it ---------------------------------------------------------------------------


def test_cached_prompts_are_told_by_where_they_came_from() -> None:
    trace = made_up()
    tiers = {"num_host_blocks": 600, "num_disk_blocks": 600}
    _, small = checked(trace, config(num_blocks=60, num_prefill=0, **tiers))
    sources = {source for sample in small.samples for source in sample.cached}
    assert {"device", "host"} <= sources
    _, bare = checked(trace, config(num_blocks=60, num_prefill=0))
    assert {s for sample in bare.samples for s in sample.cached} <= {"device", "peer"}


def test_prefixes_are_reused_more_by_the_policy_that_knows_of_them() -> None:
    trace = made_up()
    cached = {
        policy: sum(sum(s.cached.values()) for s in replay(trace, config(policy=policy)).samples)
        for policy in ("prefix", "random")
    }
    assert cached["prefix"] > cached["random"] > 0


def test_load_is_sampled_for_every_worker_from_the_beginning() -> None:
    result = replay(made_up(), config())
    load = result.load
    assert load.workers == ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")
    for series in (load.num_running, load.kv_used, load.pending_tokens):
        assert series.shape == (len(load.workers), len(load.times_s))
    assert load.times_s[0] == 0.0
    assert load.times_s[-1] > made_up().duration_s - 2.0
    assert 0.0 <= load.kv_used.min() <= load.kv_used.max() <= 1.0
    assert load.num_running[2:].max() > 0


def test_first_tokens_come_about_when_they_were_predicted() -> None:
    result = replay(made_up(300, rate=4.0), config())
    pairs = [(s.predicted_ttft_s, s.ttft_s) for s in result.samples[100:]]
    misses = [abs(p - t) for p, t in pairs if p is not None and t is not None]
    assert len(misses) == 200
    assert np.median(misses) < 0.02


def test_progress_is_told_up_to_the_end() -> None:
    told: list[float] = []
    replay(made_up(), config(), lambda share, now: told.append(share))
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_a_trace_without_requests_ends_at_once() -> None:
    result = replay(Trace("empty", ()), config())
    assert result.samples == []
