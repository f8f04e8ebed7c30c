"""When a place is free again: told by how long places were kept."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from cluster.api.limiter import UNKNOWN_RETRY_AFTER_S, ConcurrencyLimiter, LimitReached


class Scene:
    def __init__(self, limit: int) -> None:
        self.now = 1000.0
        self.places = ConcurrencyLimiter(limit, lambda: self.now)

    def stay(self, seconds: float) -> None:
        with self.places.take():
            self.now += seconds

    def refused(self) -> float:
        with pytest.raises(LimitReached) as caught, self.places.take():
            pass
        return caught.value.retry_after_s


def test_nothing_is_known_before_a_place_was_kept_for_any_time() -> None:
    scene = Scene(1)
    with scene.places.take():
        assert scene.refused() == UNKNOWN_RETRY_AFTER_S


def test_each_is_told_the_next_place_until_all_have_changed_hands() -> None:
    scene = Scene(4)
    scene.stay(20.0)
    with ExitStack() as taken:
        for _ in range(4):
            taken.enter_context(scene.places.take())
        assert [scene.refused() for _ in range(6)] == [5.0, 10.0, 15.0, 20.0, 20.0, 20.0]
        scene.now += 8.0
        assert scene.refused() == 17.0  # after those who were told; of the last, two are over
        scene.now += 12.0
        assert scene.refused() == 10.0
    assert scene.places.num_taken == 0
    scene.stay(0.0)  # there is room


def test_calls_that_hang_count_by_how_long_they_have_been_there() -> None:
    scene = Scene(2)
    for _ in range(3):
        scene.stay(0.5)
    with scene.places.take(), scene.places.take():
        assert scene.refused() == 0.25
        scene.now += 40.0
        assert scene.refused() == 20.0


def test_the_last_calls_count_for_more() -> None:
    scene = Scene(1)
    for seconds in [1.0] * 20 + [10.0] * 200:
        scene.stay(seconds)
    with scene.places.take():
        assert 9.9 < scene.refused() < 10.0


def test_a_place_is_free_again_however_a_call_ends() -> None:
    scene = Scene(1)
    with pytest.raises(ValueError, match="broken"), scene.places.take():
        raise ValueError("broken")
    assert scene.places.num_taken == 0
