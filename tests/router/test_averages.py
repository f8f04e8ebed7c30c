"""Moving averages: what they are before the first value, and what they come to."""

from __future__ import annotations

import pytest

from kvrelay.router.averages import KNOWN_AFTER_S, Average, DrainRate, Meter, Share


def test_an_average_moves_from_its_first_value_to_what_comes() -> None:
    average = Average(100.0)
    average.add(200.0)
    assert average.value == pytest.approx(105.0)
    for _ in range(200):
        average.add(200.0)
    assert average.value == pytest.approx(200.0, abs=0.1)


def test_a_share_is_one_at_first_and_never_zero() -> None:
    share = Share(200, 10.0)
    assert share.value == 1.0
    for _ in range(2000):
        share.add(False)
    assert 0.0 < share.value < 0.01
    for _ in range(2000):
        share.add(True)
    assert share.value > 0.99


def test_a_meter_knows_a_steady_rate_long_before_its_window_is_over() -> None:
    meter = Meter(window_s=10.0)
    for step in range(1, 21):
        meter.add(step / 10, 5.0)
    assert meter.rate(2.0) == pytest.approx(50.0, rel=0.05)


def test_a_queue_drains_by_what_is_done_while_requests_wait() -> None:
    drain = DrainRate()
    drain.update(0.0, waits=True, serves=True)
    for step in range(1, 21):
        drain.update(step / 10, waits=True, serves=True)
        drain.on_work(4.0)
        if step / 10 < KNOWN_AFTER_S:
            assert drain.units_per_s is None
    known = drain.units_per_s
    assert known == pytest.approx(40.0, rel=0.05)
    drain.update(2.0, waits=False, serves=False)
    drain.update(500.0, waits=True, serves=True)
    assert drain.units_per_s == known, "its clock stood still"


def test_a_few_requests_that_come_at_once_come_at_no_rate() -> None:
    """They wait for a second, in which no more come. It is known of a lasting load."""
    drain = DrainRate()
    drain.update(0.0, waits=True, serves=True)
    for _ in range(10):
        drain.on_queued(-10, 25.0)
    drain.update(1.0, waits=True, serves=True)
    assert drain.joining_above(0) < 25.0
    assert drain.joining_above(-10) == 0.0
    for second in range(2, 60):
        drain.update(float(second), waits=True, serves=True)
        drain.on_queued(-10, 100.0)
    assert drain.joining_above(0) == pytest.approx(100.0, rel=0.1)
