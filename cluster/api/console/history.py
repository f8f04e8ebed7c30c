"""What the API of this process has served, second by second: percentiles and rates over time.

Life of a point: once a second the counters and histograms of `ApiMetrics` are read; what they have
grown by within the last WINDOW_S becomes one point, which is kept for KEPT_S.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client import Counter, Histogram

from kvrelay.cluster.api.metrics import ApiMetrics

PERIOD_S = 1.0
WINDOW_S = 10.0  # that percentiles and rates are of
KEPT_S = 900.0
QUANTILES = (0.5, 0.9, 0.99)

# What a point consists of. Times are seconds, rates are per second; None: nothing ended in the
# window.
POINT_FIELDS = (
    "at",  # seconds since 1970
    *(f"{what}_p{int(100 * quantile)}" for what in ("ttft", "itl") for quantile in QUANTILES),
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "requests",
    "live",
)
Point = list[float | None]


@dataclass(frozen=True, slots=True)
class _Reading:
    """All of it since the start of the process. Histograms: by bucket, not added up."""

    at: float
    ttft: tuple[float, ...]
    itl: tuple[float, ...]
    counts: tuple[float, ...]  # prompt, cached and output tokens, requests
    live: float


class History:
    """Owned by the console. Invariant: at most KEPT_S / PERIOD_S points, the oldest first;
    `num_points` counts those that were dropped too."""

    def __init__(self, metrics: ApiMetrics) -> None:
        self._metrics = metrics
        self._bounds = {each: _bounds(each) for each in (metrics.ttft_s, metrics.itl_s)}
        self._readings: deque[_Reading] = deque(maxlen=int(WINDOW_S / PERIOD_S) + 1)
        self._points: deque[Point] = deque(maxlen=int(KEPT_S / PERIOD_S))
        self.num_points = 0

    def sample(self, at: float) -> None:
        """Add the point of now. at: seconds since 1970."""
        metrics = self._metrics
        counters = (metrics.prompt_tokens, metrics.cached_tokens, metrics.output_tokens)
        now = _Reading(
            at,
            _counts(metrics.ttft_s),
            _counts(metrics.itl_s),
            (*map(_total, counters), _total(metrics.requests)),
            metrics.live_requests.collect()[0].samples[0].value,  # type: ignore[index]
        )
        self._readings.append(now)
        self._points.append(self._point(self._readings[0], now))
        self.num_points += 1

    def since(self, number: int) -> list[Point]:
        """The points after the first `number`, as far as they are kept."""
        num_new = min(self.num_points - number, len(self._points))
        return [self._points[i] for i in range(len(self._points) - num_new, len(self._points))]

    def _point(self, then: _Reading, now: _Reading) -> Point:
        point: Point = [round(now.at, 1)]
        for histogram, old, new in (
            (self._metrics.ttft_s, then.ttft, now.ttft),
            (self._metrics.itl_s, then.itl, now.itl),
        ):
            grown = [b - a for a, b in zip(old, new, strict=True)]
            point += [quantile(self._bounds[histogram], grown, q) for q in QUANTILES]
        elapsed_s = now.at - then.at
        for a, b in zip(then.counts, now.counts, strict=True):
            point.append(round((b - a) / elapsed_s, 3) if elapsed_s > 0 else 0.0)
        return [*point, now.live]


def quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float | None:
    """Within its bucket the values are taken to lie evenly, as Prometheus does.

    bounds: upper ends of the buckets but the last, which has none. counts: one more than bounds.
    None: there are no values.
    """
    rank = q * sum(counts)
    if not rank:
        return None
    below = 0.0
    for low, high, count in zip((0.0, *bounds), bounds, counts, strict=False):
        if count and below + count >= rank:
            return float(f"{low + (high - low) * (rank - below) / count:.4g}")
        below += count
    return bounds[-1]


def _buckets(histogram: Histogram) -> Iterator[tuple[float, float]]:
    """Upper end, and how many values are at most that."""
    for family in histogram.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                yield float(sample.labels["le"]), sample.value


def _bounds(histogram: Histogram) -> tuple[float, ...]:
    return tuple(high for high, _ in _buckets(histogram))[:-1]


def _counts(histogram: Histogram) -> tuple[float, ...]:
    added_up = [0.0, *(count for _, count in _buckets(histogram))]
    return tuple(b - a for a, b in pairwise(added_up))


def _total(counter: Counter) -> float:
    """Returns the sum over all labels."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))
