"""Figures of replays whose workers come and go: attainment, GPU-hours, reversals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvrelay.lab.replay.autoscale.scaled import ScaledResult
from kvrelay.lab.replay.config import ReplayConfig
from kvrelay.lab.replay.report import Slo, summary
from kvrelay.router.scaling_config import ScalingConfig


def attainment(found: ScaledResult, slo: Slo) -> float:
    """Share of all requests, refused ones included, within both targets."""
    samples = found.result.samples
    return sum(map(slo.met_by, samples)) / max(1, len(samples))


def figures(found: ScaledResult, slo: Slo) -> dict[str, Any]:
    """Describes one replay, for JSON."""
    all_figures = summary(found.result, slo)
    decisions = [line.decision for line in found.log if line.decision is not None]
    return {
        "name": found.name,
        "attainment": attainment(found, slo),
        "gpu_hours": found.gpu_hours,
        "reversals": found.reversals,
        "reversals_per_hour": found.reversals_per_hour,
        "starts": found.num_starts,
        "most_workers": max(paid for _, _, paid in found.history),
        "decisions": dict(Counter(str(each.reason) for each in decisions)),
        "replay": all_figures,
    }


def scaled_tables_json(
    found: Sequence[ScaledResult], slo: Slo, scaling: ScalingConfig, config: ReplayConfig
) -> dict[str, Any]:
    return {
        "trace": found[0].result.trace,
        "timing": found[0].result.timing,
        "ttft_slo_ms": slo.ttft_ms,
        "itl_slo_ms": slo.itl_ms,
        "percentile": scaling.percentile,
        "start_s": scaling.start_s,
        "first_fleet": [config.num_prefill, config.num_decode],
        "results": [figures(each, slo) for each in found],
    }


def scaled_table(found: Sequence[ScaledResult], slo: Slo, scaling: ScalingConfig) -> Group:
    """For the terminal, in 80 columns."""
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("fleet", no_wrap=True, max_width=18)
    counts = ("attained", "GPU\nhours", "reversals\nan hour", "starts", "most")
    heads = (*counts, "TTFT s\np99", "ITL ms\np99")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for each in found:
        row = figures(each, slo)
        ttft, itl = row["replay"]["ttft_ms"]["p99"], row["replay"]["itl_ms"]["p99"]
        table.add_row(
            Text(each.name),
            f"{row['attainment']:.3f}",
            f"{row['gpu_hours']:.2f}",
            f"{row['reversals_per_hour']:.1f}",
            f"{row['starts']:,}",
            f"{row['most_workers']:,}",
            "-" if ttft is None else f"{ttft / 1e3:.2f}",
            "-" if itl is None else f"{itl:.1f}",
        )
    first = found[0].result
    title = Text(
        f"{first.trace}: {len(first.samples):,} requests; {first.timing}; workers start in "
        f"{scaling.start_s:g} s",
        style="bold",
    )
    note = (
        f"attained: TTFT within {slo.ttft_ms:g} ms and tokens {slo.itl_ms:g} ms apart at most, in "
        f"the mean; {scaling.percentile:g} % are wanted"
    )
    return Group(title, table, Text(note))
