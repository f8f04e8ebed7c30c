"""Replays whose workers come and go: what drains, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.cluster.scaling.decisions import encode_line, read_log
from kvrelay.cluster.scaling.planner import replay_log
from kvrelay.engine.service_class import ServiceClass
from kvrelay.engine.stats import Role
from kvrelay.lab.cli.replay import scaling_of
from kvrelay.lab.replay.autoscale import (
    ScaledReplay,
    foresee,
    plan_of,
    replay_scaled,
    reversals_of,
    with_targets,
)
from kvrelay.lab.replay.report import Slo, attainment, figures, is_complete
from kvrelay.lab.replay.trace import Trace, TraceRequest, multiplied
from kvrelay.lab.timing.timing import Overheads
from kvrelay.router.scaling_config import ScalingConfig
from tests.lab.replay.replay_kit import config, made_up

START_S = 10.0
SCALING = ScalingConfig(start_s=START_S, max_workers=8, memory_s=60.0, hold_s=20.0, tick_s=1.0)


@pytest.mark.slow
def test_a_worker_costs_from_its_order_until_it_is_gone() -> None:
    run = ScaledReplay(ramp(), with_targets(config(num_blocks=400), SCALING), START_S)
    run.call_at(0.0, lambda: run.begin_with([Role.PREFILL, Role.DECODE]))
    costs = []
    run.call_at(5.0, lambda: run.order(Role.DECODE, START_S))  # type: ignore[arg-type]
    run.call_at(7.0, lambda: run.let_go("decode-1"))  # it is not up yet
    for at_s in (5.0, 7.0, 30.0):
        run.call_at(at_s, lambda: costs.append(run.gpu_s(run.now)))
    run.run(None)
    assert costs == pytest.approx([10.0, 16.0, 62.0])
    assert run.history[-1][1:] == (2, 2)


def ramp(num_requests: int = 500) -> Trace:
    """Prompts of 0.1 to 0.4 s: first 1 a second, then 12, then 1 again."""
    requests, at_s = [], 0.0
    for number in range(num_requests):
        at_s += 1 / 12 if num_requests * 0.1 < number < num_requests * 0.7 else 1.0
        requests.append(TraceRequest(at_s, 1000 + 500 * (number % 7), 5 + number % 20))
    return Trace("ramp", tuple(requests), block_tokens=64)


@pytest.mark.slow
def test_every_request_of_a_changing_fleet_ends_whole() -> None:
    run = with_targets(config(num_prefill=1, num_decode=1, num_blocks=400), SCALING)
    found = replay_scaled("auto", ramp(), run, START_S, SCALING)
    assert all(is_complete(sample) for sample in found.result.samples)
    assert all(sample.num_output == sample.output_length for sample in found.result.samples)
    assert found.num_starts >= 1
    drained = [d for line in found.log if line.decision for d in line.decision.drains]
    assert drained
    assert found.gpu_hours == pytest.approx(_integral(found.history), rel=0.01)


@pytest.mark.slow
def test_work_that_waits_for_idle_workers_asks_for_none() -> None:
    """All of it is done by the workers that there are; what somebody waits for asks for more."""
    run = with_targets(config(num_prefill=1, num_decode=1, num_blocks=400), SCALING)
    starts = {}
    for tier in (ServiceClass.BATCH, ServiceClass.FLEX):
        trace = ramp(200)
        rows = tuple(replace(each, priority=tier.priority) for each in trace.requests)
        found = replay_scaled("auto", replace(trace, requests=rows), run, START_S, SCALING)
        starts[tier] = found.num_starts
        if tier is ServiceClass.BATCH:
            assert all(is_complete(sample) for sample in found.result.samples)
    assert starts[ServiceClass.BATCH] == 0 < starts[ServiceClass.FLEX]


def _integral(history: list[tuple[float, int, int]]) -> float:
    return sum((b[0] - a[0]) * a[2] for a, b in pairwise(history)) / 3600


def test_a_drained_worker_leaves_nothing_behind() -> None:
    trace = made_up(60, rate=3.0)
    run = ScaledReplay(trace, with_targets(config(num_prefill=1, num_decode=2), SCALING), START_S)
    run.call_at(0.0, lambda: run.begin_with([Role.PREFILL, Role.DECODE, Role.DECODE]))
    for at_s in (5.0, 9.0):
        run.call_at(at_s, lambda worker=f"decode-{int(at_s > 5)}": run.let_go(worker))  # type: ignore[misc]
    run.call_at(7.0, lambda: run.order(Role.DECODE, START_S))  # type: ignore[arg-type]
    result = run.run(None)
    assert all(is_complete(sample) for sample in result.samples)
    assert run.fleet.keys() == {"prefill-0", "decode-2"}
    assert run.router.check_idle() == []


def test_the_log_of_a_replay_reproduces_its_decisions() -> None:
    run = with_targets(config(num_prefill=1, num_decode=1, num_blocks=400), SCALING)
    found = replay_scaled("auto", ramp(200), run, START_S, SCALING)
    pairs = replay_log(read_log(encode_line(line) for line in found.log))
    assert len(pairs) > 20
    assert all(made == again for made, again in pairs)


@pytest.mark.slow
def test_equal_arguments_give_equal_results() -> None:
    run = with_targets(config(num_prefill=1, num_decode=1, num_blocks=400), SCALING)
    first, second = (replay_scaled("a", ramp(150), run, START_S, SCALING) for _ in range(2))
    assert first.gpu_hours == second.gpu_hours
    assert [s.e2e_s for s in first.result.samples] == [s.e2e_s for s in second.result.samples]


@pytest.mark.slow
def test_an_oracle_orders_before_the_load_comes() -> None:
    trace = ramp()
    run = with_targets(config(num_prefill=1, num_decode=1, num_blocks=400), SCALING)
    known = foresee(trace, run, SCALING)
    path = known.path(0.9, START_S, 2)
    assert max(path) > path[0]
    assert known.on_time(path) >= 0.9
    found = replay_scaled("oracle", trace, run, START_S, plan_of(known, path, START_S))
    stays = replay_scaled("static", trace, run, START_S)
    slo = Slo()
    assert attainment(found, slo) > attainment(stays, slo)
    assert figures(found, slo)["gpu_hours"] == found.gpu_hours


def test_the_least_static_fleet_is_enough_and_one_less_is_not() -> None:
    known = foresee(ramp(), config(num_blocks=400), SCALING)
    size = known.least_static(0.9)
    assert known.on_time([size] * len(known.looks)) >= 0.9
    assert known.on_time([size - 1] * len(known.looks)) < 0.9


def test_reversals_are_changes_of_direction() -> None:
    assert reversals_of([0, 2, 0, 1, -1, 0, -2, 3]) == 2
    assert reversals_of([]) == 0


def test_copies_multiply_the_rate_and_share_nothing() -> None:
    trace = made_up(10)
    eight = multiplied(trace, 8)
    assert len(eight.requests) == 80
    assert eight.duration_s <= trace.duration_s + 1.0
    assert [r.at_s for r in eight.requests] == sorted(r.at_s for r in eight.requests)
    first = [r for r in eight.requests if r.input_length == trace.requests[0].input_length][:8]
    assert len({r.block_ids for r in first}) == 8


def test_a_start_takes_what_was_measured_unless_it_is_given() -> None:
    names = ("config_path", "start_s", "max_workers", "min_workers", "percentile")
    options: dict[str, Any] = dict.fromkeys(names) | {"ttft_slo_ms": 900.0, "itl_slo_ms": 60.0}
    options["overrides"] = {}
    plain: Any = SimpleNamespace()
    measured: Any = SimpleNamespace(overheads=Overheads(start_s=2.5))
    assert scaling_of(options, plain).start_s == ScalingConfig().start_s
    assert scaling_of(options, measured).start_s == 2.5
    assert scaling_of(options | {"start_s": 7.0}, measured).start_s == 7.0
