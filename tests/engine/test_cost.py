"""Costs in seconds: what a pass is described by, and how its price is learned."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrelay.engine.cost import (
    MIN_SAMPLES,
    PROMPT_SHAPE,
    TOKENS_UNIT,
    DraftCosts,
    FittedCost,
    StepTiming,
    blocks_worth_loading,
    decode_features,
    draft_features,
    fitted_s,
    prompt_features,
)
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.stats import Role
from kvrelay.engine.step import ScheduledSeq, Step, StepDone
from tests.engine.configs import worker_config

BUDGET = 8192
TRUE = (0.004, 0.35, 0.02, 0.06)  # a pass, 4,096 tokens of it, their squares, what lies before them


def drawn(rng: Random) -> tuple[float, ...]:
    """A prompt of a size that comes, with or without a cached beginning."""
    return prompt_features(
        int(10 ** rng.uniform(1, 3.9)), rng.choice((0, 0, rng.randrange(40_000))), BUDGET
    )


def teach(cost: FittedCost, rng: Random, count: int, factor: float = 1.0) -> None:
    for _ in range(count):
        features = drawn(rng)
        noise = rng.uniform(0.95, 1.05)
        cost.add(features, fitted_s(TRUE, features) * noise * factor)


def worst_miss(cost: FittedCost, rng: Random, factor: float = 1.0) -> float:
    """Relative, over prompts that were not seen."""
    misses = []
    for _ in range(300):
        features = drawn(rng)
        misses.append(abs(fitted_s(cost.weights, features) / fitted_s(TRUE, features) / factor - 1))
    return max(misses)


@given(st.integers(1, 40_000), st.integers(0, 100_000), st.integers(1, 9000))
@example(8192, 0, 8192)
@example(8193, 5, 8192)
@example(1, 0, 1)
@settings(deadline=None, max_examples=50)
def test_features_of_a_prompt_are_the_sums_over_its_chunks(
    num_new: int, start: int, budget: int
) -> None:
    sums = [0.0, 0.0, 0.0, 0.0]
    left, at = num_new, start
    while left:
        chunk = min(left, budget)
        for index, value in enumerate((1, chunk, chunk * chunk, chunk * at)):
            sums[index] += value / (1.0, TOKENS_UNIT, TOKENS_UNIT**2, TOKENS_UNIT**2)[index]
        left, at = left - chunk, at + chunk
    assert prompt_features(num_new, start, budget) == pytest.approx(tuple(sums), rel=1e-9)


def test_a_fit_never_says_less_than_no_time() -> None:
    assert fitted_s((-1.0, 0.0), (1.0, 1.0)) == 0.0


@pytest.mark.parametrize("seed", range(60))
def test_what_was_not_among_the_samples_takes_some_time_too(seed: int) -> None:
    """Beside 16 busy processes a fit said that a prompt takes what lies before its chunks alone, so
    that the first chunk took nothing, and the worker ended at a division by that."""
    rng, cost = Random(seed), FittedCost(PROMPT_SHAPE)
    for _ in range(rng.randrange(1, 60)):
        start, size = rng.choice((0, 512, 1024, 4096, 7000)), rng.choice((1, 64, 256, 512))
        noise = rng.lognormvariate(0.0, rng.choice((0.1, 1.0, 3.0)))
        cost.add(prompt_features(size, start, size), size * (2e-3 + start * 1e-6) * noise)
    for size in (1, 256, 8000):
        assert cost.seconds(prompt_features(size, 0, 512)) > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_polynomial_is_found_in_noisy_samples(seed: int) -> None:
    rng = Random(seed)
    cost = FittedCost(PROMPT_SHAPE)
    teach(cost, rng, 400)
    assert worst_miss(cost, rng) < 0.08


def test_a_few_samples_without_noise_are_enough() -> None:
    rng = Random(1)
    cost = FittedCost(PROMPT_SHAPE)
    for _ in range(2 * MIN_SAMPLES):
        features = drawn(rng)
        cost.add(features, fitted_s(TRUE, features))
    assert worst_miss(cost, rng) < 0.2


def test_a_machine_that_slows_down_is_followed() -> None:
    rng = Random(2)
    cost = FittedCost(PROMPT_SHAPE)
    teach(cost, rng, 600)
    teach(cost, rng, 2000, factor=2.0)
    assert worst_miss(cost, rng, factor=2.0) < 0.1


def test_short_passes_count_as_much_as_long_ones() -> None:
    rng = Random(3)
    cost = FittedCost(PROMPT_SHAPE)
    teach(cost, rng, 1000)
    for num_new in (10, 20, 50):
        features = prompt_features(num_new, 0, BUDGET)
        assert fitted_s(cost.weights, features) == pytest.approx(fitted_s(TRUE, features), rel=0.05)


def test_features_that_never_vary_do_not_make_the_fit_jump() -> None:
    """A decode worker may take the same step for hours, and then another one."""
    rng = Random(4)
    cost = FittedCost(PROMPT_SHAPE)
    always = decode_features(16, 0.5)
    for _ in range(10_000):
        cost.add(always, 0.02 * rng.uniform(0.98, 1.02))
    assert fitted_s(cost.weights, always) == pytest.approx(0.02, rel=0.02)
    assert all(abs(weight) < 1.0 for weight in cost.weights)
    for num_seqs, used in ((17, 0.55), (1, 0.02), (60, 0.98)):
        assert fitted_s(cost.weights, decode_features(num_seqs, used)) < 0.2
    cost.add(decode_features(17, 0.52), 0.06)  # one step that was held up
    assert fitted_s(cost.weights, always) == pytest.approx(0.02, rel=0.5)
    for _ in range(200):
        cost.add(always, 0.02)
    assert fitted_s(cost.weights, always) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("factor", [0.01, 100.0])
@pytest.mark.parametrize("num_wrong", [1, 4, 16])
def test_first_measurements_that_are_100_times_off_are_made_good_within_20(
    factor: float, num_wrong: int
) -> None:
    cost, features = FittedCost(PROMPT_SHAPE), prompt_features(3000, 0, BUDGET)
    for _ in range(num_wrong):
        cost.add(features, factor * fitted_s(TRUE, features))
    for _ in range(20):
        cost.add(features, fitted_s(TRUE, features))
    assert 0.5 < cost.seconds(features) / fitted_s(TRUE, features) < 2.0


@pytest.mark.parametrize("seed", range(5))
def test_times_that_are_three_times_off_either_way_give_a_fit_within_2(seed: int) -> None:
    rng, cost = Random(seed), FittedCost(PROMPT_SHAPE)
    for _ in range(20):
        features = drawn(rng)
        cost.add(features, fitted_s(TRUE, features) * 3.0 ** rng.uniform(-1.0, 1.0))
    features = prompt_features(3000, 0, BUDGET)
    assert 0.5 < cost.seconds(features) / fitted_s(TRUE, features) < 2.0


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_becomes_far_slower_is_known_after_30_steps(seed: int) -> None:
    rng, cost = Random(seed), FittedCost(PROMPT_SHAPE)
    teach(cost, rng, 400)
    teach(cost, rng, 30, factor=100.0)
    features = prompt_features(3000, 0, BUDGET)
    assert 0.5 < cost.seconds(features) / fitted_s(TRUE, features) / 100.0 < 2.0


def test_short_prompts_say_something_of_long_ones_and_that_it_is_not_sure() -> None:
    cost, long = FittedCost(PROMPT_SHAPE), prompt_features(3000, 0, BUDGET)
    assert cost.spread(long) == inf
    for count in range(30, 40):
        features = prompt_features(count, 0, BUDGET)
        cost.add(features, fitted_s(TRUE, features))
    assert 0.5 < cost.seconds(long) / fitted_s(TRUE, long) < 2.0
    assert cost.spread(long) > 0.5
    assert cost.spread(prompt_features(35, 0, BUDGET)) < 0.2
    for _ in range(20):
        cost.add(long, fitted_s(TRUE, long))
    assert cost.spread(long) < 0.1


@given(st.lists(st.tuples(st.integers(1, 20_000), st.floats(1e-4, 100.0)), max_size=40))
def test_no_weight_is_negative_and_none_is_slower_than_the_slowest(
    passes: list[tuple[int, float]],
) -> None:
    cost = FittedCost(PROMPT_SHAPE)
    slowest_s = 0.0
    for count, seconds in passes:
        features = prompt_features(count, 0, BUDGET)
        cost.add(features, seconds)
        slowest_s = max(slowest_s, seconds / fitted_s(PROMPT_SHAPE, features))
        assert min(cost.weights) >= 0.0
        for asked in (1, 64, 3000, 100_000):
            features = prompt_features(asked, 0, BUDGET)
            assert cost.seconds(features) <= 1.001 * slowest_s * fitted_s(PROMPT_SHAPE, features)


def test_a_fit_stays_finite_however_long_nothing_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of a direction that is never seen is forgotten, but not without end."""
    monkeypatch.setattr("kvrelay.engine.cost.FORGET", 0.9)  # an hour of steps in a moment
    cost = FittedCost(PROMPT_SHAPE)
    always = decode_features(16, 0.5)
    for _ in range(8000):
        cost.add(always, 0.02)
    assert fitted_s(cost.weights, always) == pytest.approx(0.02)
    cost.add(decode_features(20, 0.6), 0.03)
    assert 0.01 < fitted_s(cost.weights, always) < 0.04


def test_one_sample_that_is_far_off_does_little_to_a_fit_that_is_sure() -> None:
    rng = Random(5)
    cost = FittedCost(PROMPT_SHAPE)
    teach(cost, rng, 2000)
    cost.add(prompt_features(500, 0, BUDGET), 3.0)  # 60 times as long as it takes
    assert worst_miss(cost, rng) < 0.15


def test_too_few_samples_are_told_to_nobody() -> None:
    rng = Random(6)
    cost = FittedCost(PROMPT_SHAPE)
    teach(cost, rng, MIN_SAMPLES - 1)
    assert cost.published() == ()
    teach(cost, rng, 1)
    assert cost.published() == tuple(cost.weights)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_time_that_cannot_be_is_not_learned(seconds: float) -> None:
    cost = FittedCost(PROMPT_SHAPE)
    cost.add(prompt_features(100, 0, BUDGET), seconds)
    assert (cost.num_samples, cost.weights) == (0, [0.0] * 4)


def share(start: int, count: int) -> ScheduledSeq:
    return ScheduledSeq("r#1", [1] * count, start, [], True, SamplingParams(), [], 0)


def timing_of(role: Role = Role.DECODE, **limits: float) -> StepTiming:
    config = worker_config(role=role, num_blocks=100, **limits)
    return StepTiming(config)


def test_a_worker_learns_what_prompts_cost_from_its_steps() -> None:
    timing, rng = timing_of(), Random(7)
    for _ in range(500):
        num_new, start = rng.randrange(10, 2000), rng.choice((0, 512, 2000))
        seconds = fitted_s(TRUE, prompt_features(num_new, start, num_new))
        timing.on_step(Step(0, [share(start, num_new)]), seconds, 1)
    assert worst_miss(timing.prompt_cost, rng) < 0.02
    assert timing.present_slowdown(is_busy=False) == pytest.approx(1.0, abs=0.01)


def test_short_prompts_of_a_fresh_worker_do_not_make_long_ones_look_slow() -> None:
    timing = timing_of()
    for num_new in (12, 40, 25):
        seconds = fitted_s(TRUE, prompt_features(num_new, 0, num_new))
        timing.on_step(Step(0, [share(0, num_new)]), seconds, 1)
    really = 1024 / fitted_s(TRUE, prompt_features(1024, 0, 1024))
    assert timing.prefill_tokens_per_s == pytest.approx(really, rel=0.5)


def test_prompts_that_take_longer_of_late_are_told_to_before_the_fit_has_learned_it() -> None:
    timing, rng = timing_of(), Random(8)
    for number in range(320):
        num_new = rng.randrange(10, 2000)
        seconds = fitted_s(TRUE, prompt_features(num_new, 0, num_new))
        slow = 3.0 if number >= 300 else 1.0
        timing.on_step(Step(0, [share(0, num_new)]), slow * seconds, 1)
    said = timing.present_slowdown(is_busy=False) * fitted_s(
        timing.prompt_cost.published(), prompt_features(500, 0, 500)
    )
    real = 3.0 * fitted_s(TRUE, prompt_features(500, 0, 500))
    assert said == pytest.approx(real, rel=0.15)


def test_repeated_steps_count_as_the_average_of_each() -> None:
    timing = timing_of()
    for _ in range(20):
        timing.on_step(Step(0, [share(100, 1), share(200, 1)], repeats=10), 0.2, 10)
    assert timing.decode_step_s.value == pytest.approx(0.02)
    used = (100 + 200 + 2 * 10 / 2) / (100 * 16)
    assert fitted_s(timing.decode_cost.weights, decode_features(2, used)) == pytest.approx(
        0.02, 0.01
    )


def test_of_a_mixed_step_the_prompts_cost_what_the_decodes_alone_would_not() -> None:
    timing = timing_of()
    for _ in range(20):
        timing.on_step(Step(0, [share(100, 1)]), 0.02, 1)
        timing.on_step(Step(0, [share(100, 1), share(0, 100)]), 0.12, 1)
    features = prompt_features(100, 0, 100)
    assert timing.prompt_cost.seconds(features) == pytest.approx(0.1, rel=1e-3)
    assert timing.decode_step_s.value == pytest.approx(0.02)


def test_drafts_are_said_to_take_their_time_and_rows_and_to_gain_passes() -> None:
    timing = timing_of()
    for number in range(200):  # 10 ms a pass, 1 ms a row
        seqs = [share(100, 1) for _ in range(1 + number % 4)]
        timing.on_step(Step(number, seqs), 0.010 + 0.001 * len(seqs), 1)
    step = Step(0, [share(100, 1), share(100, 1)])  # a pass of 12 ms, and 5 rows of drafts
    done = StepDone(0, [], elapsed_s=0.012 + 0.005 + 0.002, draft_s=0.002)
    spent, gained = timing.draft_seconds(step, done, 1.0, 3)
    assert spent == pytest.approx(0.002 + 0.005, rel=0.02)
    assert gained == pytest.approx(3 / 2 * 0.012, rel=0.02)
    spent, _ = timing.draft_seconds(step, done, 0.4, 1)
    assert spent == pytest.approx(0.002 + 0.002, rel=0.02)
    assert timing_of().draft_seconds(step, done, 1.0, 3) == (0.0, 0.0)


def test_what_a_drafter_takes_is_known_by_its_depths_after_few_steps() -> None:
    """A beginning and a part for each depth, however many sequences share them; not of the first
    step, which makes room for what it computes with."""
    timing = timing_of()
    assert timing.draft_costs() == DraftCosts()
    for number, (depth, count) in enumerate([(4, 1), (3, 1), (1, 2), (6, 2), (2, 4), (5, 4)]):
        seqs = [replace(share(100, 1), num_drafts=depth) for _ in range(count)]
        draft_s = 0.0005 + 0.0007 * depth + (1.0 if number == 0 else 0.0)
        timing.on_step(Step(number, seqs), 0.01 + draft_s, 1, 0, draft_s)
        if number == 1:
            first = fitted_s(timing.draft_costs().drafting, draft_features(3, 3))
            assert first == pytest.approx(0.0026, rel=0.2)
    drafting = timing.draft_costs().drafting
    for depth, tokens in ((1, 1), (7, 7), (3, 12)):
        seconds = fitted_s(drafting, draft_features(depth, tokens))
        assert seconds == pytest.approx(0.0005 + 0.0007 * depth, rel=0.15)


def test_the_error_of_a_row_shrinks_with_what_was_measured() -> None:
    timing, errors = timing_of(), []
    for number in range(64):
        drafts = number % 5
        seqs = [replace(share(100, 1), draft_tokens=[1] * drafts)]
        timing.on_step(Step(number, seqs), 0.010 + 0.001 * drafts, 1)
        errors.append(timing.draft_costs().error)
    assert errors[0] == inf
    assert errors[-1] < errors[15] / 2
    assert errors[-1] < 0.3


def asked(decodes_cost_s: float, count: int = 640, role: Role = Role.PREFILL) -> int:
    """How often, of 640 times, prompts are computed apart from 10 decodes that add so much to a
    pass of 0.1 s, and take 0.02 s alone."""
    timing, num_apart = timing_of(role=role), 0
    for _ in range(MIN_SAMPLES):
        timing.on_step(Step(0, [share(0, 100)]), 0.1, 1)
    decodes = [share(100, 1) for _ in range(10)]
    for _ in range(count):
        timing.on_step(Step(0, decodes), 0.02, 1)
        if timing.computes_apart(1, 10):
            num_apart += 1
            timing.on_step(Step(0, [share(0, 100)]), 0.1, 1)
        else:
            timing.on_step(Step(0, [*decodes, share(0, 100)]), 0.1 + decodes_cost_s, 1)
    return num_apart


def test_prompts_are_computed_apart_where_a_pass_of_both_saves_nothing() -> None:
    assert asked(0.02) > 580
    assert asked(0.03) > 580, "it costs more than the two"


def test_prompts_are_computed_beside_decodes_where_those_cost_little_then() -> None:
    assert asked(0.002) == 0
    assert asked(0.01) == 0, "half of what they take alone, but for 10 of them"
    assert asked(0.02, role=Role.DECODE) == 0, "streams go before prompts there"


def test_before_anything_was_measured_prompts_are_computed_beside_decodes() -> None:
    assert asked(0.02, count=MIN_SAMPLES) == 0


def test_where_a_target_holds_prompts_back_they_are_told_to_take_longer() -> None:
    timing = timing_of(itl_target_ms=60.0)
    for _ in range(20):
        timing.on_step(Step(0, [share(100, 1)]), 0.05, 1)
        timing.on_step(Step(0, [share(0, 100)]), 0.1, 1)
    assert timing.prompt_budget(0.0) == 64, "10 tokens fit, but four blocks are the least"
    idle, busy = (timing.present_slowdown(is_busy=b) for b in (False, True))
    slowdown = timing.prefill_tokens_per_s / timing.present_prefill_rate(is_busy=True)
    assert slowdown > 1.5
    assert busy == pytest.approx(slowdown * idle)


def test_the_longer_a_prompt_has_waited_the_longer_steps_may_be() -> None:
    timing = timing_of(itl_target_ms=50.0, itl_most_ms=200.0)
    for _ in range(20):
        timing.on_step(Step(0, [share(100, 1)]), 0.02, 1)
        timing.on_step(Step(0, [share(0, 100)]), 0.02, 1)  # 5,000 tokens a second
    budgets = [timing.prompt_budget(waited_s) for waited_s in (0.0, 2.0, 4.0, 60.0)]
    assert budgets == pytest.approx([150, 525, 900, 900], abs=1)
    # Which routers are told of, until prompts are done.
    slow = timing.present_prefill_rate(is_busy=True)
    timing.on_step(Step(0, [share(100, 1)]), 0.02, 1)
    assert timing.present_prefill_rate(is_busy=True) < 0.8 * slow
    strict = timing_of(itl_target_ms=50.0)
    strict.on_step(Step(0, [share(0, 100)]), 0.02, 1)
    assert strict.prompt_budget(60.0) == strict.prompt_budget(0.0)


@given(st.lists(st.floats(0, 2, allow_nan=False), max_size=12), st.floats(0, 1, allow_nan=False))
def test_what_is_loaded_saves_most_of_all_prefixes(load_s: list[float], compute_s: float) -> None:
    chosen = blocks_worth_loading(load_s, compute_s)
    saved = [sum(compute_s - s for s in load_s[:count]) for count in range(len(load_s) + 1)]
    assert saved[chosen] == pytest.approx(max(saved), abs=1e-9)
