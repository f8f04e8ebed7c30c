"""Made traffic: the same from a seed, as frequent as was asked, and sharing what it says."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from kvrelay.lab.replay.trace import PRESETS, Trace, preset

CONVERSATIONS = ("chat", "agents", "bursts")


def reuse(trace: Trace) -> float:
    """The most that could be reused: the fraction of blocks that an earlier prompt had."""
    seen: set[int] = set()
    hits = total = 0
    for request in trace.requests:
        hits += sum(block in seen for block in request.block_ids)
        total += -(-request.input_length // trace.block_tokens)
        seen.update(request.block_ids)
    return hits / total


@pytest.mark.parametrize("name", PRESETS)
def test_a_seed_gives_the_same_traffic_and_another_gives_other(name: str) -> None:
    assert preset(name, 200, 2.0, seed=3) == preset(name, 200, 2.0, seed=3)
    assert preset(name, 200, 2.0, seed=3) != preset(name, 200, 2.0, seed=4)


@pytest.mark.parametrize("name", PRESETS)
def test_requests_are_in_order_and_of_sizes_that_can_be(name: str) -> None:
    trace = preset(name, 500, 2.0, seed=1)
    assert len(trace.requests) == 500
    assert all(a.at_s <= b.at_s for a, b in pairwise(trace.requests))
    assert trace.requests[0].at_s >= 0
    assert all(r.input_length > 0 and r.output_length > 0 for r in trace.requests)


@pytest.mark.parametrize("rate", [0.5, 20.0])
@pytest.mark.parametrize("name", ["chat", "agents", "unshared"])
def test_the_rate_is_what_was_asked_from_the_beginning_on(name: str, rate: float) -> None:
    trace = preset(name, 4_000, rate, seed=2)
    assert len(trace.requests) / trace.duration_s == pytest.approx(rate, rel=0.2)
    arrivals = np.array([r.at_s for r in trace.requests])
    assert np.mean(arrivals < trace.duration_s / 2) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("block_tokens", [16, 512])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_later_turn_contains_the_earlier_prompt_and_answer(name: str, block_tokens: int) -> None:
    trace = preset(name, 600, 5.0, seed=1, block_tokens=block_tokens)
    sessions = defaultdict(list)
    for request in trace.requests:
        assert len(request.block_ids) == -(-request.input_length // block_tokens)
        sessions[request.session].append(request)
    assert max(map(len, sessions.values())) > 3
    for turns in sessions.values():
        for earlier, later in pairwise(turns):
            assert later.at_s > earlier.at_s
            assert later.tenant == earlier.tenant
            assert later.input_length > earlier.input_length + earlier.output_length
            assert later.block_ids[: len(earlier.block_ids)] == earlier.block_ids


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_equal_ids_have_equal_ids_before_them_and_one_tenant(name: str) -> None:
    trace = preset(name, 600, 5.0, seed=1, block_tokens=64)
    before: dict[int, tuple[int, str]] = {}
    sessions: defaultdict[int, set[str | None]] = defaultdict(set)
    for request in trace.requests:
        for previous, block in pairwise((-1, *request.block_ids)):
            assert before.setdefault(block, (previous, request.tenant)) == (
                previous,
                request.tenant,
            )
            sessions[block].add(request.session)
    assert max(map(len, sessions.values())) > 5, "system prompts are shared by conversations"
    assert len({request.tenant for request in trace.requests}) > 1


def test_bursts_are_bursts_and_chat_is_not() -> None:
    def dispersion(name: str) -> float:
        trace = preset(name, 6_000, 10.0, seed=5)
        counts, _ = np.histogram(
            [r.at_s for r in trace.requests], np.arange(0, trace.duration_s, 5)
        )
        return float(counts.var() / counts.mean())

    assert dispersion("chat") < 2.5
    assert dispersion("bursts") > 2 * dispersion("chat")


def test_unshared_requests_share_nothing_and_the_others_much() -> None:
    found = {name: reuse(preset(name, 1_000, 5.0, seed=1)) for name in PRESETS}
    assert found["unshared"] == 0
    assert found["chat"] > 0.5
    assert found["agents"] > 0.8
