"""A step that is to end early ends at its next layer, and comes again as if it had not begun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.model.runner import GREEDY, ModelRunner
from kvrelay.engine.step import ScheduledSeq, Step
from tests.engine.model.runners import model_runner
from tests.engine.model.test_runner import generate
from tests.engine.model.tiny import make_checkpoint, tokens_of

OPTIONS: dict[str, Any] = {"num_blocks": 24, "dtype": "float32", "device": "cpu", "threads": 1}
PROMPT, BLOCKS = tokens_of(40, seed=1), [5, 3, 1, 7]


def step_of(step_id: int, tokens: list[int], start: int) -> Step:
    context = [*PROMPT[:start], *tokens]
    share = ScheduledSeq("a", tokens, start, BLOCKS, True, GREEDY, context, len(PROMPT))
    return Step(step_id, [share])


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    make_checkpoint("qwen2", tmp_path)
    return model_runner(tmp_path, **OPTIONS)


def while_it_runs(runner: ModelRunner, step: Step, call: Callable[[], None]) -> Any:
    """What `step` gives if `call` comes once it has begun."""
    check = runner._guard.check

    def checked(given: Step) -> Any:
        call()
        return check(given)

    runner._guard.check = checked  # type: ignore[method-assign]
    try:
        return runner.execute(step)
    finally:
        runner._guard.check = check  # type: ignore[method-assign]


def test_it_passes_no_layer_more_and_comes_again(runner: ModelRunner) -> None:
    expected = generate(runner, PROMPT, BLOCKS, 3, temperature=0.0)
    prompt = step_of(1, PROMPT, 0)
    before = runner.num_passed()
    done = while_it_runs(runner, prompt, lambda: runner.abandon(1))
    assert (done.sampled, done.waiting, done.error) == ([None], {0}, None)
    assert runner.num_passed() == before
    first = runner.execute(prompt).sampled[0]
    decode = step_of(2, expected[:1], len(PROMPT))
    assert while_it_runs(runner, decode, lambda: runner.abandon(2)).waiting == {0}
    second = runner.execute(decode).sampled[0]
    assert first is not None
    assert second is not None
    assert [first.token, second.token] == expected[:2]


def test_another_step_goes_on(runner: ModelRunner) -> None:
    """The word may come when the step that it is about has ended."""
    expected = generate(runner, PROMPT, BLOCKS, 1, temperature=0.0)
    runner.abandon(1)
    done = while_it_runs(runner, step_of(2, PROMPT, 0), lambda: runner.abandon(1))
    assert done.sampled[0] is not None
    assert [done.sampled[0].token] == expected


@pytest.mark.parametrize("family", ["qwen3-next", "lfm2"])
def test_states_are_never_left_half_way(tmp_path: Path, family: str) -> None:
    make_checkpoint(family, tmp_path)
    runner = model_runner(tmp_path, **OPTIONS)
    assert not runner._may_abandon
    runner._running.abandon(1)
    with runner._running.step(1):
        runner.abandon(1)
        runner._running.check()
