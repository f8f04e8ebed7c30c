"""One picture of replays whose workers come and go: workers and what they were needed for, and the
share of requests within the targets. Matplotlib is imported when a picture is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvrelay.lab.replay.autoscale.report import attainment
from kvrelay.lab.replay.autoscale.scaled import ScaledResult
from kvrelay.lab.replay.report import Slo
from kvrelay.router.scaling_config import ScalingConfig

BIN_S = 60.0


def save_scaling_plot(
    found: Sequence[ScaledResult], path: Path, slo: Slo, scaling: ScalingConfig
) -> None:
    """Write a PNG; the first result is the autoscaler's. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 10.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    workers, demand, share = figure.subplots(3, 1, sharex=True)
    first = found[0].result
    figure.suptitle(
        f"{first.trace}: {len(first.samples):,} requests; {first.timing}; start "
        f"{scaling.start_s:g} s"
    )
    for each in found:
        times = [at_s for at_s, _, _ in each.history]
        label = f"{each.name}: {each.gpu_hours:.2f} GPU-hours"
        workers.step(times, [paid for *_, paid in each.history], where="post", label=label)
    workers.set_ylabel("workers paid for")
    decisions = [line.decision for line in found[0].log if line.decision is not None]
    at = [decision.at_s for decision in decisions]
    parts = [
        [decision.inputs.prefill_demand for decision in decisions],
        [decision.inputs.decode_demand for decision in decisions],
    ]
    demand.stackplot(at, parts, labels=("prompts, last 30 s", "decoding"), alpha=0.6)
    demand.step(at, [d.wanted for d in decisions], "k", where="post", label="wanted", linewidth=1)
    demand.set_ylabel("GPU-seconds per second")
    for each in found:
        label = f"{each.name}: {100 * attainment(each, slo):.1f} %"
        share.plot(*_share_over_time(each, slo), label=label, linewidth=1.2)
    share.axhline(scaling.percentile, color="#b2182b", linestyle=":", label="wanted")
    share.set_ylabel("within the targets, % of requests")
    share.set_xlabel("time, s")
    for axis in (workers, demand, share):
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=8)
    figure.savefig(path, format="png")


def _share_over_time(found: ScaledResult, slo: Slo) -> tuple[list[float], list[float]]:
    """Minute by minute of arrivals; a minute without any is left out."""
    samples = found.result.samples
    minutes = np.array([int(sample.at_s / BIN_S) for sample in samples])
    good = np.array([slo.met_by(sample) for sample in samples], dtype=np.float64)
    if not len(minutes):
        return [], []
    counts = np.bincount(minutes)
    sums = np.bincount(minutes, weights=good)
    there = np.flatnonzero(counts)
    return [float(m * BIN_S) for m in there], [float(100 * sums[m] / counts[m]) for m in there]
