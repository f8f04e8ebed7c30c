"""From a `ReplayResult` to figures: plain data, for JSON and for `tables`.

Times count from a request's arrival. What was refused, and what never ended, is in no percentile.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvrelay.lab.replay.results import ReplayResult, Sample

Summary = dict[str, Any]
PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """A request is good if it got all its tokens, the first one within `ttft_ms`, and the others
    at most `itl_ms` apart in its own mean."""

    ttft_ms: float = 2000.0
    itl_ms: float = 50.0

    def met_by(self, sample: Sample) -> bool:
        if not is_complete(sample):
            return False
        assert sample.ttft_s is not None
        assert sample.e2e_s is not None
        gaps = max(1, sample.num_output - 1)
        mean_itl_s = (sample.e2e_s - sample.ttft_s) / gaps
        return sample.ttft_s * 1e3 <= self.ttft_ms and mean_itl_s * 1e3 <= self.itl_ms


def is_complete(sample: Sample) -> bool:
    return sample.refused is None and sample.ttft_s is not None and sample.e2e_s is not None


def summary(result: ReplayResult, slo: Slo = Slo()) -> Summary:
    """What a replay has shown, ready for JSON. A figure of nothing is None."""
    samples = result.samples
    done = [sample for sample in samples if is_complete(sample)]
    refused = [sample for sample in samples if sample.refused is not None]
    return {
        "trace": result.trace,
        "policy": result.policy,
        "timing": result.timing,
        "speedup": result.speedup,
        "requests": len(samples),
        "completed": len(done),
        "unfinished": len(samples) - len(done) - len(refused),
        "ttft_ms": _times(sample.ttft_s for sample in done),
        "second_token_ms": _times(sample.second_s for sample in done),
        "itl_ms": _weighted_times(result.itl_s, result.itl_counts),
        "e2e_ms": _times(sample.e2e_s for sample in done),
        **_reuse(done),
        "goodput": _goodput(samples, slo, result.virtual_s),
        "refused": _refused(refused),
        "output_tokens_per_s": _rate(sum(s.num_output for s in samples), result.virtual_s),
        "prediction_error": _prediction_error(done),
        "per_tenant": _shares(samples, slo, lambda sample: sample.tenant),
        "per_priority": _shares(samples, slo, lambda sample: sample.priority),
        "retries": dict(result.retries),
        "counters": dict(result.counters),
        "virtual_s": result.virtual_s,
        "wall_s": result.wall_s,
        "speed": _rate(result.virtual_s, result.wall_s),  # times real time
        "events": result.num_events,
        "peak_rss_bytes": result.peak_rss_bytes,
    }


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def _times(seconds: Iterable[float | None]) -> dict[str, float | None]:
    return _spread(np.array([s for s in seconds if s is not None]) * 1e3)


def _spread(values: ArrayLike) -> dict[str, float | None]:
    """Returns mean and percentiles, which are interpolated."""
    found = np.asarray(values, dtype=np.float64)
    if not found.size:
        return {"mean": None, **{f"p{percent}": None for percent in PERCENTS}}
    percentiles = np.percentile(found, PERCENTS)
    return {
        "mean": float(found.mean()),
        **{f"p{p}": float(value) for p, value in zip(PERCENTS, percentiles, strict=True)},
    }


def weighted_percentiles(
    values: NDArray[np.floating], counts: NDArray[np.integer], percents: ArrayLike
) -> NDArray[np.float64]:
    """Each of `values` was seen `counts` times; there is at least one. The n-th percentile is the
    smallest value that at least n percent do not exceed."""
    order = np.argsort(values, kind="stable")
    cumulated = np.cumsum(counts[order], dtype=np.int64)
    wanted = np.ceil(np.asarray(percents) / 100 * cumulated[-1] - 1e-9)
    at = np.searchsorted(cumulated, np.maximum(wanted, 1))
    return np.asarray(values[order][at], dtype=np.float64)


def _weighted_times(
    seconds: NDArray[np.float32], counts: NDArray[np.int32]
) -> dict[str, float | None]:
    if not counts.sum():
        return _spread([])
    found = weighted_percentiles(seconds, counts, PERCENTS) * 1e3
    return {
        "mean": float(np.average(seconds.astype(np.float64), weights=counts)) * 1e3,
        **{f"p{p}": float(value) for p, value in zip(PERCENTS, found, strict=True)},
    }


def _reuse(done: Sequence[Sample]) -> Summary:
    """The fraction of prompt tokens that were not computed."""
    prompt_tokens = sum(sample.input_length for sample in done)
    cached: Counter[str] = Counter()
    for sample in done:
        cached.update(sample.cached)
    return {
        "prompt_tokens": prompt_tokens,
        "prefix_reuse": _rate(cached.total(), prompt_tokens),
        "prefix_reuse_by_tier": {
            tier: tokens / prompt_tokens for tier, tokens in cached.most_common()
        },
    }


def _goodput(samples: Sequence[Sample], slo: Slo, virtual_s: float) -> Summary:
    good = [sample for sample in samples if slo.met_by(sample)]
    return {
        "ttft_slo_ms": slo.ttft_ms,
        "itl_slo_ms": slo.itl_ms,
        "requests": len(good),
        "share": _rate(len(good), len(samples)),  # among all that came, refused ones too
        "requests_per_s": _rate(len(good), virtual_s),
        "tokens_per_s": _rate(sum(sample.num_output for sample in good), virtual_s),
    }


def _refused(refused: Sequence[Sample]) -> Summary:
    by_reason: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in refused:
        by_reason[sample.refused or ""].append(sample)
    return {
        reason: {
            "requests": len(group),
            "after_ms": _times(sample.refused_s for sample in group),
            "retry_after_s": _spread(
                [s.retry_after_s for s in group if s.retry_after_s is not None]
            ),
        }
        for reason, group in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    }


def _prediction_error(done: Sequence[Sample]) -> dict[str, float | None]:
    """Compares the router's predicted time to the first token with the real one, relative to it."""
    errors = [
        abs(sample.predicted_ttft_s - sample.ttft_s) / sample.ttft_s
        for sample in done
        if sample.predicted_ttft_s is not None and sample.ttft_s
    ]
    found = _spread(errors)
    return {"median": found["p50"], "p90": found["p90"]}


def _shares(
    samples: Sequence[Sample], slo: Slo, group_of: Callable[[Sample], str | int]
) -> dict[str, Summary]:
    """What each group of requests asked for and got."""
    groups: defaultdict[Any, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[group_of(sample)].append(sample)
    all_output = sum(sample.num_output for sample in samples)
    return {
        str(name): _share(group, slo, len(samples), all_output)
        for name, group in sorted(groups.items())
    }


def _share(group: Sequence[Sample], slo: Slo, num_all: int, all_output: int) -> Summary:
    done = [sample for sample in group if is_complete(sample)]
    return {
        "requests": len(group),
        "requests_share": len(group) / num_all,
        "output_tokens_share": _rate(sum(sample.num_output for sample in group), all_output),
        "refused": sum(sample.refused is not None for sample in group),
        "good_share": sum(map(slo.met_by, group)) / len(group),
        "prefix_reuse": _reuse(done)["prefix_reuse"],
        "ttft_ms": _times(sample.ttft_s for sample in done),
    }
