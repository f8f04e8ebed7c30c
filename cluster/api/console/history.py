"""What the API of this process has served, second by second: percentiles and rates over time.

Life of a point: once a second the counters and histograms of `ApiMetrics` are read; what they have
grown by within the last WINDOW_S becomes one point, which is kept for KEPT_S.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise

from prometheus_client import Counter, Histogram

from kvrelay.cluster.api.metrics import ApiMetrics

PERIOD_S = 1.0
WINDOW_S = 10.0  # that percentiles and rates are of
KEPT_S = 900.0
MOST_READINGS = int(WINDOW_S / PERIOD_S)
ALL = ""  # models together, and calls of none
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


@dataclass(slots=True)
class _Series:
    readings: deque[_Reading] = field(default_factory=partial(deque, maxlen=1 + MOST_READINGS))
    points: deque[Point] = field(default_factory=partial(deque, maxlen=int(KEPT_S / PERIOD_S)))


class History:
    """Owned by the console. Invariant: at most KEPT_S / PERIOD_S points of all models together and
    of each of several, the oldest first; `num_points` counts those that were dropped too."""

    def __init__(self, metrics: ApiMetrics) -> None:
        self._metrics = metrics
        self._bounds = _bounds(metrics.ttft_s), _bounds(metrics.itl_s)
        self._series = {ALL: _Series()}
        self.num_points = 0

    def sample(self, at: float, models: Collection[str] = ()) -> None:
        """Add the points of now. at: seconds since 1970; models: those that are served."""
        found = {model: _reading(at, each) for model, each in self._metrics.all.items()}
        shown = {name: found[name] for name in models if name in found and len(models) > 1}
        self._series = {name: self._series.get(name) or _Series() for name in (ALL, *shown)}
        for name, now in {**shown, ALL: _sum(at, found.values())}.items():
            series = self._series[name]
            series.readings.append(now)
            series.points.append(self._point(series.readings[0], now))
        self.num_points += 1

    def since(self, number: int) -> dict[str, list[Point]]:
        """The points after the first `number`, as far as they are kept, by model."""
        return {
            name: list(
                islice(each.points, max(0, len(each.points) - self.num_points + number), None)
            )
            for name, each in self._series.items()
        }

    def _point(self, then: _Reading, now: _Reading) -> Point:
        point: Point = [round(now.at, 1)]
        both = (then.ttft, now.ttft), (then.itl, now.itl)
        for bounds, (old, new) in zip(self._bounds, both, strict=True):
            grown = [b - a for a, b in zip(old, new, strict=True)]
            point += [quantile(bounds, grown, q) for q in QUANTILES]
        elapsed_s = now.at - then.at
        for a, b in zip(then.counts, now.counts, strict=True):
            point.append(round((b - a) / elapsed_s, 3) if elapsed_s > 0 else 0.0)
        return [*point, now.live]


def _reading(at: float, metrics: ApiMetrics) -> _Reading:
    counters = (metrics.prompt_tokens, metrics.cached_tokens, metrics.output_tokens)
    return _Reading(
        at,
        _counts(metrics.ttft_s),
        _counts(metrics.itl_s),
        (*map(_total, counters), _total(metrics.requests)),
        metrics.live_requests.collect()[0].samples[0].value,  # type: ignore[index]
    )


def _sum(at: float, readings: Iterable[_Reading]) -> _Reading:
    each = [(r.ttft, r.itl, r.counts, (r.live,)) for r in readings]
    ttft, itl, counts, (live,) = (
        tuple(map(sum, zip(*same, strict=True))) for same in zip(*each, strict=True)
    )
    return _Reading(at, ttft, itl, counts, live)


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
