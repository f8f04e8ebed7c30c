"""Which windows and states stay where a pool is too small for all: those where prefixes part."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from benchmarks.kv.parting import Replay, draw
from kvrelay.engine.kv.tier import Retention
from kvrelay.engine.stats import RECOMPUTED

STATES, WINDOWS = (0, 2, 2), (0, 20, 20)
SIZE = 8


def replay_of(windows: tuple[int, ...], num_blocks: int, **settings: Any) -> Replay:
    """Its pool is full of what nobody asks for any more."""
    replay = Replay((SIZE, windows), num_blocks, **{"max_num_batched_tokens": 64, **settings})
    rng = Random(0)
    for number in range(num_blocks // 40):
        replay.submit(f"full-{number}", draw(rng, 300), 2)
        replay.run()
    assert replay.core.kv.pool.num_evictions > 0
    return replay


def computed(replay: Replay, name: str, prompt: list[int], count: int = 4) -> int:
    """Tokens of `prompt` that are computed."""
    before = replay.core.counters["tokens_scheduled"]
    replay.submit(name, prompt, count)
    (answer,) = replay.run().values()
    assert len(answer) == count
    return int(replay.core.counters["tokens_scheduled"] - before) - (count - 1)


def recomputed(replay: Replay) -> dict[str, float]:
    counters = replay.core.counters
    names = [name for name in counters if name.startswith(RECOMPUTED)]
    return {name.removeprefix(RECOMPUTED): counters[name] for name in names}


@pytest.mark.parametrize(("windows", "cause"), [(STATES, "state"), (WINDOWS, "window")])
def test_one_that_parts_from_others_is_computed_again_once(
    windows: tuple[int, ...], cause: str
) -> None:
    replay, rng = replay_of(windows, 400), Random(1)
    for length in (150, 160):
        shared = draw(rng, length)
        found = [computed(replay, f"{length}-{k}", [*shared, *draw(rng, 70)]) for k in range(12)]
        rows = length // SIZE * SIZE
        assert found == [length + 70] * 2 + [length + 70 - rows] * 10
    # What was computed again is told, with its cause.
    assert recomputed(replay) == {cause: 150 // SIZE * SIZE + 160}
    assert replay.core.check_idle() == []


@pytest.mark.parametrize("windows", [STATES, WINDOWS])
def test_a_prompt_goes_on_where_one_before_ended_and_where_its_answer_did(
    windows: tuple[int, ...],
) -> None:
    replay, rng = replay_of(windows, 400), Random(2)
    prompt = draw(rng, 163)
    replay.submit("first", prompt, 80)
    answer = replay.run()["first"]
    # Without what was thought; again; and with it.
    assert computed(replay, "without", [*prompt, *draw(rng, 8)]) <= SIZE + 8
    assert computed(replay, "again", [*prompt, *draw(rng, 8)]) <= SIZE + 8
    assert computed(replay, "with", [*prompt, *answer, *draw(rng, 8)]) <= SIZE + 8
    assert recomputed(replay) == {}


@pytest.mark.parametrize("windows", [STATES, WINDOWS])
def test_states_of_turns_that_were_passed_make_room_for_other_sessions(
    windows: tuple[int, ...],
) -> None:
    """Two sessions of many turns, in a pool that holds both, but not the ends of all turns."""
    replay, rng = replay_of(windows, 150), Random(3)
    sessions: list[list[int]] = [draw(rng, 100), draw(rng, 100)]
    for turn in range(12):
        for name, tokens in enumerate(sessions):
            fed = computed(replay, f"{turn}-{name}", tokens)
            assert turn == 0 or fed <= 2 * SIZE + 4
            tokens += draw(rng, 8)
    assert recomputed(replay) == {}


def test_what_nobody_is_to_keep_is_evicted_first() -> None:
    replay, rng = replay_of(STATES, 400), Random(4)
    prompt = draw(rng, 160)
    replay.submit("first", prompt, 40, retention=Retention(0.0))
    replay.run()
    assert computed(replay, "other", draw(rng, 200)) == 200
    assert computed(replay, "again", [*prompt, *draw(rng, 8)]) == 168


def test_the_statistics_say_which_kind_of_group_holds_and_evicts() -> None:
    replay, rng = replay_of((0, 20, 2, 2), 400), Random(5)
    rates = {None: 0.0, "host": 0.0, "disk": 0.0, "object": 0.0}
    before = replay.core.stats(0, rates)  # type: ignore[arg-type]
    computed(replay, "one", draw(rng, 256))
    after = replay.core.stats(0, rates)  # type: ignore[arg-type]
    assert [(each.kind, each.num_groups) for each in after.groups] == [
        ("full", 1),
        ("window", 1),
        ("state", 2),
    ]
    assert sum(each.num_cached for each in after.groups) == after.num_cached_blocks
    assert sum(each.num_evicted for each in after.groups) == replay.core.kv.pool.num_evictions
    assert after.groups[0].num_evicted > before.groups[0].num_evicted
    assert all(each.num_used == 0 for each in after.groups)
    replay.submit("held", draw(rng, 256), 30)
    kinds = {each.kind: each.num_used for each in replay.core.kv.group_blocks()}
    assert kinds["full"] > 0
    assert sum(kinds.values()) == 400 - replay.core.kv.pool.num_free
    replay.run()
    # With one group there is nothing to tell.
    assert Replay((SIZE, (0,)), 400).core.stats(0, rates).groups == ()  # type: ignore[arg-type]
