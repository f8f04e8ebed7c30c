"""Which growth of a process counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.leaks import EVERY_S, LEAST_LIFE_S, Growth, Sample, growth


def grown(of: Callable[[float], tuple[float, float, float]], life_s: float) -> Growth | None:
    """`of`: MiB, files and threads when so much of its life is over, from 0 to 1."""
    count = int(life_s / EVERY_S) + 1
    values = (of(number / (count - 1)) for number in range(count))
    samples = [Sample(n * EVERY_S, m, int(f), int(t)) for n, (m, f, t) in enumerate(values)]
    return growth("router", 1, samples)


@pytest.mark.parametrize(
    ("of", "leaks"),
    [
        (lambda _: (100.0, 50, 9), ""),
        (lambda part: (100.0 + 100 * min(part, 0.4), 50 + 100 * min(part, 0.4), 9), ""),
        (lambda part: (100.0 + 40 * part, 50, 9), "+10.9% of memory"),
        (lambda part: (100.0, 50 + 24 * part, 9), "files 63.5 to 72"),
        (lambda part: (100.0, 50, 9 + 24 * part), "threads 22.5 to 31"),
    ],
)
def test_what_grows_in_the_second_half_of_a_life_leaks(
    of: Callable[[float], tuple[float, float, float]], leaks: str
) -> None:
    found = grown(of, 3600.0)
    assert found is not None
    assert found.leaks == leaks


def test_a_short_life_says_nothing() -> None:
    assert grown(lambda part: (100.0 + 900 * part, 50, 9), LEAST_LIFE_S - EVERY_S) is None
