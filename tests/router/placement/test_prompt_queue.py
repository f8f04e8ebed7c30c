"""Prompts that wait on one worker, as a router counts them down between two messages."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvrelay.router.native.bindings import bindings, constants
from kvrelay.router.placement.endpoint import PromptQueue
from tests.router.fleet import ahead_of

LEAST_S = constants.LEAST_MS / 1000
SECONDS = st.floats(LEAST_S, 20.0, allow_nan=False)


def queue(*seconds: float) -> PromptQueue:
    made = PromptQueue()
    for number, left_s in enumerate(seconds):
        made.add(0.0, f"r{number}", left_s)
    return made


def busy_until(prompts: PromptQueue, now: float) -> float:
    """When all of it should be computed."""
    until: float = bindings().kvr_prompts_busy_until(prompts.address, now)
    return until


def test_a_prompt_waits_for_the_shorter_ones_alone() -> None:
    assert ahead_of(queue(1.0, 2.0, 4.0, 8.0), 0.0, 3.0) == (3.0, 2)
    assert ahead_of(queue(), 5.0, 3.0) == (0.0, 0)


def test_a_short_prompt_waits_for_few_of_the_many_that_have_waited_longer() -> None:
    """While it waits for them it comes closer to its turn."""
    waiting = queue(*[2.0] * 20)
    wait_s, num_behind = ahead_of(waiting, 20.0, 0.2)
    assert wait_s == pytest.approx(2.0, rel=0.1)
    assert num_behind >= 8


def test_of_two_that_are_equally_long_the_first_goes_first() -> None:
    assert ahead_of(queue(3.0), 0.0, 3.0) == (3.0, 0)


def test_time_runs_the_shortest_down_first() -> None:
    waiting = queue(1.0, 2.0, 8.0)
    assert ahead_of(waiting, 2.0, 100.0) == (pytest.approx(9.0, abs=0.1), 0)
    wait_s, num_behind = ahead_of(waiting, 2.0, 1.5)
    assert (wait_s, num_behind) == (pytest.approx(1.0, abs=0.1), 1)


def test_what_should_be_computed_and_is_not_holds_nobody_up_for_long() -> None:
    waiting = queue(1.0)
    wait_s, num_behind = ahead_of(waiting, 1000.0, 5.0)
    assert 0 < wait_s < 0.1
    assert num_behind == 0
    assert len(waiting) == 1, "nobody has said that it is computed"
    waiting.discard(1001.0, "r0")
    assert ahead_of(waiting, 1001.0, 5.0) == (0.0, 0)


def test_what_is_computed_early_lets_those_behind_it_go_on() -> None:
    waiting = queue(2.0, 3.0)
    waiting.discard(1.0, "r0")
    assert ahead_of(waiting, 1.0, 10.0) == (pytest.approx(3.0), 0)
    assert busy_until(waiting, 1.0) == pytest.approx(4.0)


def test_discarding_what_is_not_there_changes_nothing() -> None:
    waiting = queue(2.0)
    waiting.discard(None, "other")
    waiting.discard(9.0, "other")
    assert len(waiting) == 1


def test_an_idle_worker_is_free_now() -> None:
    assert busy_until(queue(), 7.0) == 7.0


def test_the_clock_never_goes_back() -> None:
    waiting = queue(2.0)
    ahead_of(waiting, 1.5, 9.0)
    assert ahead_of(waiting, 1.0, 9.0) == (pytest.approx(0.5), 0)


@given(st.lists(SECONDS, max_size=8), st.lists(st.floats(0, 3, allow_nan=False), max_size=6))
@settings(deadline=None, max_examples=60)
def test_work_is_neither_lost_nor_made(prompts: list[float], waits: list[float]) -> None:
    """Whatever is asked in between, a queue runs down by the time that has passed."""
    waiting = queue(*prompts)
    now = 0.0
    for wait_s in waits:
        now += wait_s
        ahead_of(waiting, now, 1.0)
    least_s, total_s = LEAST_S * len(prompts), sum(prompts)
    left_s = busy_until(waiting, now) - now
    assert max(least_s, total_s - now) - 1e-6 <= left_s <= max(total_s - now, 0) + least_s + 1e-6


@given(st.lists(SECONDS, max_size=8), SECONDS)
@settings(deadline=None, max_examples=60)
def test_everybody_is_ahead_or_behind(prompts: list[float], seconds: float) -> None:
    assume(all(abs(left_s - seconds) > 1e-6 for left_s in prompts if left_s != seconds))
    wait_s, num_behind = ahead_of(queue(*prompts), 0.0, seconds)
    ahead = [left_s for left_s in prompts if left_s <= seconds]
    assert wait_s == pytest.approx(sum(ahead))
    assert num_behind == len(prompts) - len(ahead)


def test_a_prompt_that_has_waited_counts_as_shorter() -> None:
    """It counts like at the worker: half a second for each second."""
    waiting = PromptQueue()
    waiting.add(0.0, "long", 5.0)
    for number in range(8):
        waiting.add(0.0, f"r{number}", 1.0)
    assert ahead_of(waiting, 0.0, 4.0)[0] == pytest.approx(8.0)
    # Four of the eight are computed; the long one goes before a new prompt of 4 s.
    assert ahead_of(waiting, 4.0, 4.0)[0] == pytest.approx(9.0, abs=0.1)


def test_what_a_worker_reports_corrects_what_time_has_run_down() -> None:
    waiting = queue(2.0, 3.0)
    waiting.correct(4.0, "r1", 2.5)  # by the clock 1 s is left of it
    waiting.correct(4.0, "other", 9.0)
    assert ahead_of(waiting, 4.0, 100.0)[0] == pytest.approx(2.5, abs=0.1)
    assert len(waiting) == 2
