"""Decisions about real traffic beside the simulator's."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.scaling.simulated import (
    Sent,
    Wanted,
    agreement,
    decisions_of,
    simulate,
    simulated_wanted,
    wanted_of,
)
from cluster.scaling.costs import Costs
from lab.replay.trace import Trace, TraceRequest
from router.scaling_config import ScalingConfig

BLOCK_SIZE = 16
COSTS = Costs((0.01, 4.0, 0.0, 0.0), (0.02, 0.02, 0.0, 0.0), 800.0, 0.03, 8192, 2, 2048)
SCALING = ScalingConfig(
    min_workers=0,
    max_workers=4,
    start_s=8.0,
    tick_s=1.0,
    warmup_s=2.0,
    memory_s=10.0,
    hold_s=3.0,
    idle_s=6.0,
    max_reversals_per_hour=1000,
)


def test_the_traffic_of_a_log_leads_to_its_decisions_again() -> None:
    """What passes cost and how long starts take is read from the log."""
    rng = Random(1)
    requests = [
        TraceRequest(minute * 60 + rng.uniform(10, 40), 200, 40)
        for minute in range(5)
        for _ in range(90)
    ]
    requests.sort(key=lambda each: each.at_s)
    trace = Trace("waves", tuple(requests), BLOCK_SIZE)
    log = simulate(trace, COSTS, SCALING.start_s, SCALING)
    begin_s = log[1].snapshot.wall_s if log[1].snapshot is not None else 0.0
    sent = [Sent(r.at_s, i, r.input_length, r.output_length) for i, r in enumerate(requests)]
    real = wanted_of(decisions_of(log))
    simulated = simulated_wanted(log, sent, BLOCK_SIZE)
    found = agreement(real, simulated, SCALING.tick_s)
    assert begin_s == SCALING.tick_s
    assert found["changes"] >= 4
    assert found["same_within_a_tick"] > 0.9
    assert found["changes_within_five"] > 0.9
    nothing = simulated_wanted(log, sent[:1], BLOCK_SIZE)
    assert agreement(real, nothing, SCALING.tick_s)["mean_wanted_simulated"] < 2


def test_agreement_is_within_ticks() -> None:
    ups = [2] * 5 + [3] * 5 + [2] * 5
    real = Wanted(tuple((float(t), n) for t, n in enumerate(ups)))
    for shift, same, within_a_tick in ((0, 1.0, 1.0), (1, 1.0, 1.0), (3, 11 / 15, 0.0)):
        later = [2] * shift + ups[: len(ups) - shift]
        found = agreement(real, Wanted(tuple((float(t), n) for t, n in enumerate(later))), 1.0)
        assert found["same_within_a_tick"] == pytest.approx(same)
        assert found["changes_within_a_tick"] == within_a_tick
        assert found["changes_within_five"] == 1.0
