"""The pause between attempts doubles from its base to its ceiling, and never overflows."""

import pytest

from kvrelay.engine.backoff import Backoff


def test_the_pause_doubles_from_the_base_to_the_ceiling() -> None:
    backoff = Backoff(0.25, 3.0)
    pauses = [backoff.pause_s(failures) for failures in range(7)]
    assert pauses == [0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("backoff", [Backoff(1.0, 8.0), Backoff(9.0, 8.0)])
def test_failures_without_end_wait_for_the_ceiling(backoff: Backoff) -> None:
    assert backoff.pause_s(10**9) == 8.0
