"""What the planner decides, and that it can be decided again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvrelay.cluster.scaling.decisions import Decision, Reason, encode_line, read_log
from kvrelay.cluster.scaling.observations import State
from kvrelay.cluster.scaling.planner import replay_log
from kvrelay.engine.stats import Role
from tests.cluster.scaling.scaling_kit import Paper, config

HEAVY = [5000] * 8  # 4 GPU-seconds of prompts in a second
LIGHT = [1000] * 5  # half a GPU-second


def acts(decisions: list[Decision]) -> list[Decision]:
    return [each for each in decisions if each.acts]


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from numbers(each)
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each)


def test_a_fleet_grows_until_the_wanted_share_is_on_time() -> None:
    paper = Paper(config()).with_fleet(1, 1)
    paper.run(120, *HEAVY)
    last = paper.run(60, *HEAVY)[-1]
    assert 5 <= paper.up <= 7
    assert last.reason is Reason.ENOUGH
    by_size = {each.workers: each.on_time for each in last.alternatives}
    assert by_size[last.wanted] >= 0.9
    assert by_size[3] < 0.9


def test_an_idle_fleet_does_not_grow_for_what_came_before() -> None:
    paper = Paper(config(min_workers=2, idle_s=5.0, memory_s=60.0, max_workers=4)).with_fleet(1, 1)
    paper.run(30, *HEAVY)
    assert paper.up > 2
    decisions = paper.run(30)
    assert paper.size == 2
    assert [each.reason for each in acts(decisions)] == [Reason.IDLE]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_what_one_role_has_measured_counts_where_the_other_has_done_nothing(role: Role) -> None:
    paper = Paper(config()).with_fleet(1, 1)
    paper.silent_roles.add(role)
    decisions = paper.run(60, *HEAVY)
    assert any(each.reason is Reason.GROW for each in decisions)


def test_workers_that_are_starting_count() -> None:
    paper = Paper(config(), start_s=40.0).with_fleet(1, 1)
    decisions = paper.run(38, *HEAVY)
    ordered = sum(len(each.starts) for each in decisions)
    assert paper.up == 2
    assert 2 <= ordered <= 5
    assert decisions[-1].reason is Reason.COMING
    assert "coming" in decisions[-1].text


def test_fewer_are_kept_only_after_they_were_enough_for_long() -> None:
    paper = Paper(config(hold_s=30.0, memory_s=60.0)).with_fleet(5, 1)
    paper.run(60, *HEAVY)
    decisions = paper.run(170, *LIGHT)
    held = [each for each in decisions if each.reason is Reason.HOLDING]
    shrinks = acts(decisions)
    assert shrinks
    assert all(each.reason is Reason.SHRINK for each in shrinks)
    assert len(held) >= 29
    assert shrinks[0].at_s >= held[0].at_s + 29
    assert paper.size <= 2


def test_what_was_needed_during_the_hold_stays() -> None:
    paper = Paper(config(hold_s=60.0, memory_s=30.0)).with_fleet(7, 1)
    paper.run(20, *LIGHT)
    paper.run(15, *HEAVY)
    first = acts(paper.run(60, *LIGHT))[0]
    assert first.reason is Reason.SHRINK
    assert first.wanted >= 4


@pytest.mark.slow
def test_the_direction_changes_at_most_so_often() -> None:
    paper = Paper(
        config(hold_s=5.0, memory_s=10.0, max_workers=5, max_reversals_per_hour=4)
    ).with_fleet(1, 1)
    decisions = [d for _ in range(12) for load in (HEAVY, LIGHT) for d in paper.run(40, *load)]
    signs = [bool(each.starts) for each in decisions if each.starts or each.drains]
    turns = sum(a != b for a, b in pairwise(signs))
    assert 2 <= turns <= 4
    assert any(each.reason is Reason.REVERSALS for each in decisions)


def test_idle_is_a_number_and_never_nan() -> None:
    paper = Paper(config(idle_s=20.0, min_workers=2)).with_fleet(2, 2)
    for decision in paper.run(300):
        found = msgspec.to_builtins(decision)
        assert not [each for each in numbers(found) if not math.isfinite(each)]
    assert paper.size == 2
    assert decision.text.startswith(("idle", "not scaling: 2 workers are enough"))


def test_from_zero_one_worker_wakes_with_the_first_request() -> None:
    paper = Paper(config(idle_s=20.0, min_workers=0)).with_fleet(1, 1)
    paper.run(60)
    assert paper.size == 0
    decision = paper.tick(1000)
    assert decision.reason is Reason.WAKE
    assert decision.starts == (Role.DECODE,)


def test_old_measurements_change_nothing() -> None:
    paper = Paper(config(stale_s=5.0)).with_fleet(1, 1)
    paper.run(20, *LIGHT)
    paper.routers_age_s = 6.0
    decisions = paper.run(60, *HEAVY)
    assert not acts(decisions)
    assert {each.reason for each in decisions} == {Reason.STALE}


def test_what_a_worker_measures_while_it_warms_up_does_not_count() -> None:
    paper = Paper(config(warmup_s=1000.0)).with_fleet(1, 1)
    decisions = paper.run(60, *HEAVY)
    assert {each.reason for each in decisions} == {Reason.NOT_MEASURED}


def test_limits_and_schedules_win() -> None:
    paper = Paper(config(max_workers=3)).with_fleet(1, 1)
    last = paper.run(90, *HEAVY)[-1]
    assert paper.size == 3
    assert last.reason is Reason.AT_MOST
    paper = Paper(config(schedules=("daily 00:00-01:00 4-6",))).with_fleet(1, 1)
    first = paper.tick()
    assert first.reason is Reason.LEAST
    assert len(first.starts) == 2
    paper = Paper(config(schedules=("daily 00:00-01:00 1-2",))).with_fleet(3, 1)
    assert paper.tick().reason is Reason.LIMIT


def test_a_spent_budget_starts_no_more() -> None:
    paper = Paper(config(budget_worker_hours=0.0005)).with_fleet(1, 1)
    decisions = paper.run(60, *HEAVY)
    assert paper.size == 2
    assert decisions[-1].reason is Reason.BUDGET


def test_roles_flip_before_anything_is_started() -> None:
    paper = Paper(config(hold_s=1000.0)).with_fleet(1, 4)
    decisions = acts(paper.run(90, *[3000] * 8))
    assert decisions[0].reason is Reason.FLIP
    assert all(role is Role.PREFILL for _, role in decisions[0].flips)
    assert not any(each.starts for each in decisions)


def test_decoding_gets_workers_in_gpu_seconds() -> None:
    """20 streams a second of 500 tokens, 64 streams a worker, in steps that take prompt tokens
    (0.6 of 50 ms): 4.7 workers, and 5 are enough for nine of ten arrivals."""
    paper = Paper(config()).with_fleet(1, 1)
    last = paper.run(150, *[200] * 20, output=500)[-1]
    assert last.inputs.decode_demand / 0.8 == pytest.approx(20 * 500 * 0.03 / 64, rel=0.2)
    assert last.wanted_decode == math.ceil(last.inputs.decode_demand / 0.8)


def test_what_an_operator_adds_stays_for_a_while() -> None:
    paper = Paper(config(hold_s=30.0, memory_s=20.0, min_workers=2)).with_fleet(1, 1)
    paper.run(60, *LIGHT)
    paper.add(paper.now, Role.PREFILL, State.UP)
    assert paper.tick(*LIGHT).inputs.prefill == 2
    assert not acts(paper.run(25, *LIGHT))
    assert paper.size == 3


def test_a_lost_worker_is_replaced_in_one_tick() -> None:
    paper = Paper(config(max_workers=6)).with_fleet(3, 1)
    size = paper.run(60, *HEAVY)[-1].wanted
    del paper.workers["w1"]
    decision = paper.tick(*HEAVY)
    assert paper.size == size
    assert len(decision.starts) == 1


def test_one_that_fails_again_and_again_is_given_up_and_replaced_at_once() -> None:
    paper = Paper(config(min_workers=3)).with_fleet(1, 1)
    failing = paper.add(paper.now, Role.DECODE, State.STARTING, failures=2)
    assert not paper.tick().acts
    paper.workers[failing] = replace(paper.workers[failing], failures=3, reason="no such device")
    decision = paper.tick()
    assert decision.removals == ((failing, "failed 3 times: no such device"),)
    assert len(decision.starts) == 1
    assert decision.inputs.coming == 0
    assert paper.size == 3


def test_one_without_a_place_is_given_up_in_the_end() -> None:
    paper = Paper(config(min_workers=3, pending_timeout_s=10.0)).with_fleet(1, 1)
    pending = paper.add(paper.now, Role.DECODE, State.PENDING)
    assert not acts(paper.run(9))
    (given_up,) = paper.tick().removals
    assert given_up == (pending, "given up after 10 s: no place was found for it")


def test_machines_are_asked_for_by_what_is_wanted() -> None:
    paper = Paper(config(workers_per_machine=2)).with_fleet(1, 1)
    last = paper.run(120, *HEAVY)[-1]
    assert last.machines == math.ceil(last.wanted / 2)


def test_a_replay_of_the_log_reproduces_every_decision() -> None:
    paper = Paper(config(hold_s=10.0, memory_s=40.0)).with_fleet(1, 1)
    for load in (HEAVY, LIGHT, [], HEAVY, [40_000, 300]):
        paper.run(60, *load)
    lines = [encode_line(line) for line in paper.log]
    pairs = replay_log(read_log(lines))
    assert len(pairs) == len(paper.log) - 1
    assert len(acts([made for made, _ in pairs])) >= 3
    for made, again in pairs:
        assert made == again


def test_a_log_with_another_number_is_not_reproduced() -> None:
    """The comparison is one that can fail."""
    paper = Paper(config()).with_fleet(1, 1)
    paper.run(60, *HEAVY)
    changed = encode_line(paper.log[0]).replace(b'"percentile":90.0', b'"percentile":10.0')
    pairs = replay_log(read_log([changed, *map(encode_line, paper.log[1:])]))
    assert any(made != again for made, again in pairs)
