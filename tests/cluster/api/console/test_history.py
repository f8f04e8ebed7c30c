"""Percentiles and rates over time, from the counters of the API."""

from __future__ import annotations

import bisect
import random
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.cluster.api.console.history import (
    ALL,
    KEPT_S,
    PERIOD_S,
    POINT_FIELDS,
    WINDOW_S,
    History,
    quantile,
)
from kvrelay.cluster.api.metrics import ApiMetrics


@pytest.fixture
def metrics() -> ApiMetrics:
    return ApiMetrics(CollectorRegistry())


def last(history: History, model: str = ALL) -> dict[str, float | None]:
    return dict(zip(POINT_FIELDS, history.since(history.num_points - 1)[model][0], strict=True))


def test_a_quantile_lies_within_its_bucket() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(bounds, (0, 10, 0, 0), 0.5) == 1.5
    assert quantile(bounds, (10, 0, 10, 0), 0.5) == 1.0
    assert quantile(bounds, (10, 0, 10, 0), 0.75) == 3.0
    assert quantile(bounds, (0, 0, 0, 3), 0.5) == 4.0  # beyond the last bound: at least that
    assert quantile(bounds, (0, 0, 0, 0), 0.5) is None


def test_quantiles_are_as_exact_as_the_buckets() -> None:
    draw = random.Random(3)
    values = sorted(draw.lognormvariate(-2, 1) for _ in range(5000))
    bounds = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    ends = [bisect.bisect_right(values, bound) for bound in bounds]
    counts = [b - a for a, b in pairwise([0, *ends, len(values)])]
    for q in (0.5, 0.9, 0.99):
        exact = values[int(q * len(values))]
        at = bisect.bisect_left(bounds, exact)
        found = quantile(bounds, counts, q)
        assert found is not None
        assert (0.0, *bounds)[at] <= found <= bounds[at]


def test_a_point_is_of_the_last_window_only(metrics: ApiMetrics) -> None:
    history = History(metrics)
    metrics.ttft_s.observe(20.0)
    history.sample(0.0)
    assert last(history)["ttft_p99"] is None  # what was before the first reading is not of a window
    for _ in range(100):
        metrics.ttft_s.observe(0.02)
    metrics.output_tokens.inc(50)
    metrics.requests.labels("chat", "stop", "200").inc(4)
    metrics.count("completions", "length", 200)
    history.sample(2.0)
    point = last(history)
    assert point["at"] == 2.0
    assert 0.01 <= (point["ttft_p50"] or 0) <= (point["ttft_p99"] or 0) <= 0.025
    assert point["itl_p50"] is None
    assert point["output_tokens"] == 25.0
    assert point["requests"] == 2.5
    for second in range(int(WINDOW_S) + 1):
        history.sample(3.0 + second)
    assert last(history)["ttft_p50"] is None
    assert last(history)["output_tokens"] == 0


def test_points_are_dropped_after_their_time(metrics: ApiMetrics) -> None:
    history = History(metrics)
    most = int(KEPT_S / PERIOD_S)
    for second in range(most + 5):
        history.sample(float(second))
    assert history.num_points == most + 5

    def times(number: int, model: str = ALL) -> list[float | None]:
        return [point[0] for point in history.since(number)[model]]

    assert times(most + 2) == [most + 2.0, most + 3.0, most + 4.0]
    assert (len(times(0)), times(0)[0]) == (most, 5.0)
    assert times(most + 5) == []
    metrics.of("a"), metrics.of("b")
    for second in range(2):  # points of a model that came later
        history.sample(float(most + 5 + second), ["a", "b"])
    assert times(0, "b") == times(most + 5, "b") == [most + 5.0, most + 6.0]
    assert times(most + 6, "b") == [most + 6.0]
    history.sample(0.0, ["a"])
    assert [*history.since(0)] == [ALL], "one that is alone is all"


def test_each_model_has_points_of_its_own(metrics: ApiMetrics) -> None:
    history = History(metrics)
    for at in (0.0, 1.0):
        history.sample(at, ["a", "b"])
        for name, ttft_s in (("a", 0.02), ("b", 20.0)):
            metrics.of(name).ttft_s.observe(ttft_s)
            metrics.of(name).output_tokens.inc(10)
        metrics.of("b").live_requests.set(3)
    history.sample(2.0, ["a", "b"])
    fast, slow, both = (last(history, name) for name in ("a", "b", ALL))
    assert (fast["ttft_p99"] or 9) < 0.1
    assert (slow["ttft_p50"] or 0) > 9
    assert (both["ttft_p50"] or 9) < 0.1
    assert (both["ttft_p99"] or 0) > 9
    assert (fast["output_tokens"], both["output_tokens"]) == (10.0, 20.0)
    assert (fast["live"], slow["live"], both["live"]) == (0.0, 3.0, 3.0)
