"""One picture of one or several replays: latencies by percentile, where prefixes came from, and how
busy workers were. Matplotlib is imported when a picture is wanted, and needs no screen.

Where workers come and go it shows workers and what they were needed for, and the share of requests
within the targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.kv.tier import Tier
from kvrelay.lab.replay.autoscale import ScaledResult
from kvrelay.lab.replay.replay import ReplayResult
from kvrelay.lab.replay.report import Slo, attainment, is_complete, weighted_percentiles
from kvrelay.router.scaling_config import ScalingConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

MAX_ROWS = 64  # workers of a pool that are shown one by one; more become bands
MAX_LABELS = 16
NUM_BINS = 60  # in time, for the prefix reuse
MARKED = (50.0, 90.0, 99.0)  # percentiles with their value beside them
_TICKS = (0.0, 50.0, 90.0, 99.0, 99.9)
_BANDS = ((0, 100, "all workers", 0.15), (10, 90, "80 %", 0.3), (25, 75, "50 %", 0.45))
_SOURCES = {  # stacked from below
    str(Tier.DEVICE): "#1b7837",
    str(Tier.HOST): "#7fbf7b",
    str(Tier.DISK): "#c2a5cf",
    "peer": "#f1a340",
}
_OTHER_COLOUR = "#999999"


def save_plot(results: Sequence[ReplayResult], path: Path, slo: Slo = Slo()) -> None:
    """Write a PNG. `results` are of one trace and one cluster under different policies: they share
    the two axes with latencies, and each has a column of its own below. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first = results[0]
    figure = Figure(figsize=(max(11.0, 4.2 * len(results)), 13.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    faster = "" if first.speedup == 1 else f", {first.speedup:g} times as fast"
    policy = f"; {first.policy}" if len(results) == 1 else ""
    figure.suptitle(
        f"{first.trace}: {len(first.samples):,} requests{faster}{policy}; {first.timing}",
        fontsize=13,
    )
    parts: Any = figure.subfigures(2, 1, height_ratios=(1, 2.4))
    top, below = parts
    left, right = top.subplots(1, 2)
    _draw_latencies(left, right, results, slo)
    axes = below.subplots(3, len(results), squeeze=False, sharex=True, sharey="row")
    for column, result in enumerate(results):
        if len(results) > 1:
            axes[0, column].set_title(result.policy, fontweight="bold")
        _draw_reuse(axes[0, column], result)
    axes[0, 0].set_ylabel("prompt tokens reused, %")
    axes[0, 0].legend(loc="upper left", ncols=5, fontsize=8)
    for row, load in enumerate(_loads(results), start=1):
        _draw_loads(axes[row], load)
    for axis in axes[-1]:
        axis.set_xlabel("time, s")
    figure.savefig(path, format="png")


# -- latencies -----------------------------------------------------------------------------------


def _draw_latencies(left: Axes, right: Axes, results: Sequence[ReplayResult], slo: Slo) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    for result in results:
        name = result.policy if len(results) > 1 else "TTFT"
        done = [sample for sample in result.samples if is_complete(sample)]
        _draw_percentiles(left, name, _ones([sample.ttft_s for sample in done]), len(results) == 1)
        if len(results) == 1:
            seconds = _ones([sample.second_s for sample in done if sample.second_s is not None])
            _draw_percentiles(left, "second token", seconds, False)
        if len(results) == 1 and result.is_closed:
            for turns, is_first in (("first turns", True), ("later turns", False)):
                its = [sample.ttft_s for sample in done if (sample.turn == 0) is is_first]
                _draw_percentiles(left, turns, _ones(its), False)
        gaps = (result.itl_s.astype(np.float64), result.itl_counts.astype(np.int64))
        _draw_percentiles(right, name.replace("TTFT", "ITL"), gaps, len(results) == 1)
    for axis, title, limit_ms in ((left, "TTFT", slo.ttft_ms), (right, "ITL", slo.itl_ms)):
        axis.set_title(f"{title} by percentile of {'requests' if axis is left else 'tokens'}")
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_ylabel("ms")
        axis.set_xticks(_stretched(np.array(_TICKS)), [f"p{tick:g}" for tick in _TICKS])
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        axis.axhline(limit_ms, color="#b2182b", linewidth=1, linestyle=":", label="SLO")
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=8)  # latencies rise: there is room


def _ones(values: Sequence[float | None]) -> tuple[Floats, NDArray[np.int64]]:
    found = np.array(values, dtype=np.float64)
    return found, np.ones(len(found), dtype=np.int64)


def _stretched(percents: Floats) -> Floats:
    """The slow end takes as much room as the rest: p0 is at 0, p90 at 1, p99 at 2."""
    return -np.log10(1 - percents / 100)


def _draw_percentiles(
    axis: Axes, name: str, counted: tuple[Floats, NDArray[np.int64]], with_values: bool
) -> None:
    values, counts = counted
    total = int(counts.sum())
    if not total:
        return
    last = min(_stretched(np.array(99.9)), np.log10(total) + 1e-9)
    at = np.linspace(0, last, 300)
    percents = 100 * (1 - 10**-at)
    milliseconds = 1e3 * weighted_percentiles(values, counts, percents)
    (line,) = axis.plot(at, milliseconds, label=name, linewidth=1.8)
    marked = np.array([percent for percent in MARKED if _stretched(np.array(percent)) <= last])
    heights = 1e3 * weighted_percentiles(values, counts, marked)
    axis.plot(_stretched(marked), heights, "o", color=line.get_color(), markersize=4)
    if not with_values:
        return
    for x, y in zip(_stretched(marked), heights, strict=True):
        axis.annotate(
            f"{y:,.3g}" if y < 1000 else f"{y:,.0f}",
            (x, y),
            xytext=(4, -11),
            textcoords="offset points",
            fontsize=8,
        )


# -- prefix reuse ---------------------------------------------------------------------------------


def _draw_reuse(axis: Axes, result: ReplayResult) -> None:
    """Stacked by where the tokens were, over the arrival of their requests."""
    done = [sample for sample in result.samples if is_complete(sample)]
    at_s = np.array([sample.at_s for sample in done])
    edges = np.linspace(0.0, max([*at_s, 1e-3]), NUM_BINS + 1)

    def binned(weights: list[int]) -> Floats:
        return np.histogram(at_s, edges, weights=np.array(weights, dtype=np.float64))[0]

    prompt = binned([sample.input_length for sample in done])
    others = sorted({source for sample in done for source in sample.cached} - set(_SOURCES))
    base = np.zeros(NUM_BINS)
    for source in (*_SOURCES, *others):
        share = 100 * binned([s.cached.get(source, 0) for s in done]) / np.maximum(prompt, 1)
        axis.stairs(
            base + share,
            edges,
            baseline=base,
            fill=True,
            color=_SOURCES.get(source, _OTHER_COLOUR),
            label=source,
        )
        base = base + share
    axis.set_ylim(0, 118)  # room for the legend
    axis.set_yticks(range(0, 101, 20))
    axis.grid(alpha=0.3, axis="y")


# -- load -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Load:
    """One kind of load of one pool: what a row of the picture shows, an axis a result."""

    title: str
    most: float  # where the scale ends
    gamma: float  # exponent of the colours; below 1 small values differ beside large ones
    workers: tuple[str, ...]
    times_s: list[Floats]
    values: list[Floats]  # [workers, times]


def _loads(results: Sequence[ReplayResult]) -> list[_Load]:
    """Waiting prompts where prompts are computed, and KV where tokens are."""
    workers = results[0].load.workers
    pools = {
        role: [i for i, name in enumerate(workers) if name.startswith(role)]
        for role in ("prefill", "decode")
    }
    prompt_role = "prefill" if pools["prefill"] else "decode"
    waiting = [result.load.pending_tokens[pools[prompt_role]] for result in results]
    used = [100 * result.load.kv_used[pools["decode"]] for result in results]
    times_s = [result.load.times_s for result in results]

    def load(title: str, role: str, values: list[Floats], most: float, gamma: float) -> _Load:
        named = tuple(workers[i] for i in pools[role])
        return _Load(title, most, gamma, named, times_s, values)

    # A single spike must not make everything else look idle.
    most = max(float(np.percentile(each, 99.5)) if each.size else 0.0 for each in waiting)
    return [
        load("prompt tokens waiting", prompt_role, waiting, max(most, 100.0), 0.5),
        load("KV pool in use, %", "decode", used, 100.0, 1.0),
    ]


def _draw_loads(axes: Any, load: _Load) -> None:
    """A heat map with a row for each worker; of many workers, bands."""
    from matplotlib.colors import PowerNorm

    image = None
    for axis, times_s, values in zip(axes, load.times_s, load.values, strict=True):
        if len(times_s) < 2:
            continue
        if len(load.workers) > MAX_ROWS:
            _draw_bands(axis, times_s, values, load.most)
        else:
            image = axis.pcolormesh(
                _edges(times_s),
                np.arange(len(load.workers) + 1) - 0.5,
                values,
                norm=PowerNorm(load.gamma, vmin=0, vmax=load.most),
                cmap="magma_r",
            )
        axis.set_xlim(0, max(float(each[-1]) for each in load.times_s if len(each)))
    first = axes[0]
    if len(load.workers) > MAX_ROWS:
        first.set_ylabel(f"{load.title}\n({len(load.workers):,} workers)")
        first.legend(loc="upper left", ncols=4, fontsize=8)
        return
    every = -(-len(load.workers) // MAX_LABELS)
    first.set_yticks(range(0, len(load.workers), every), load.workers[::every], fontsize=8)
    first.invert_yaxis()
    if image is not None:
        bar = first.figure.colorbar(image, ax=list(axes), label=load.title, pad=0.01)
        bar.formatter = lambda value, _: f"{value:,.0f}"


def _edges(times_s: Floats) -> Floats:
    """Returns those of the cells around two or more moments: halfway to their neighbours."""
    middles = (times_s[1:] + times_s[:-1]) / 2
    return np.concatenate([times_s[:1], middles, times_s[-1:]])


def _draw_bands(axis: Axes, times_s: Floats, values: Floats, most: float) -> None:
    """Between which values so many of the workers are, and where the median is."""
    for low, high, name, alpha in _BANDS:
        bottom, top = np.percentile(values, (low, high), axis=0)
        axis.fill_between(
            times_s, bottom, top, color="#762a83", alpha=alpha, linewidth=0, label=name
        )
    axis.plot(times_s, np.median(values, axis=0), color="#40004b", linewidth=1.2, label="median")
    axis.set_ylim(0, most * 1.05)
    axis.grid(alpha=0.3)


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
