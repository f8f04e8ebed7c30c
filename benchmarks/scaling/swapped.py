"""Two models whose traffic swaps every ten minutes: what their autoscalers reach and cost.

    python -m benchmarks.scaling.swapped mooncake_conversation.jsonl azure_code_2023.csv

One model gets the first trace in even windows and the second in odd ones, the other model the rest.
Each has workers and an autoscaler of its own, as in production, in virtual time; the limit that all
share is above what both want. The oracle is that of `kvrelay replay --autoscale`: for each model
the cheapest path, by who knows its trace, that has the wanted share on time.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvrelay.lab.replay.autoscale import ScaledResult, foresee, plan_of, replay_scaled, with_targets
from kvrelay.lab.replay.config import ReplayConfig
from kvrelay.lab.replay.readers import read_trace
from kvrelay.lab.replay.report import Slo, attainment
from kvrelay.lab.replay.trace import Trace, TraceRequest, multiplied
from kvrelay.lab.timing.profile import load_timing
from kvrelay.router.scaling_config import ScalingConfig

WINDOW_S = 600.0


def swapped(one: Trace, other: Trace, window_s: float, end_s: float) -> tuple[Trace, Trace]:
    """The traffic of each of two models. Block ids of the two traces stay apart."""
    stride = 1 + max((max(r.block_ids, default=-1) for r in one.requests), default=-1)
    apart = [replace(r, block_ids=tuple(stride + i for i in r.block_ids)) for r in other.requests]
    models: tuple[list[TraceRequest], list[TraceRequest]] = [], []
    for number, requests in enumerate((one.requests, apart)):
        for request in requests:
            if request.at_s < end_s:
                models[(number + int(request.at_s / window_s)) % 2].append(request)
    first, second = (sorted(each, key=lambda r: r.at_s) for each in models)
    return tuple(  # type: ignore[return-value]
        Trace(name, tuple(each), one.block_tokens) for name, each in (("a", first), ("b", second))
    )


def measured(found: ScaledResult, slo: Slo) -> dict[str, Any]:
    return {
        "slo": round(attainment(found, slo), 4),
        "gpu_hours": round(found.gpu_hours, 2),
        "reversals_per_hour": round(found.reversals_per_hour, 1),
        "most_workers": max(paid for _, _, paid in found.history),
    }


@click.command()
@click.argument("one", type=click.Path(exists=True, path_type=Path))
@click.argument("other", type=click.Path(exists=True, path_type=Path))
@click.option("--copies", default=8, show_default=True, help="Of the second trace.")
@click.option("--minutes", default=60.0, show_default=True, help="Of the traces.")
@click.option("--window-s", default=WINDOW_S, show_default=True)
@click.option("--percentile", default=95.0, show_default=True, help="Of requests, on time.")
@click.option("--start-s", default=60.0, show_default=True, help="Of a worker.")
def main(
    one: Path,
    other: Path,
    copies: int,
    minutes: float,
    window_s: float,
    percentile: float,
    start_s: float,
) -> None:
    """Writes a line of JSON for each model, and one for both."""
    scaling = ScalingConfig(enabled=True, start_s=start_s, max_workers=12, percentile=percentile)
    config = ReplayConfig(timing=load_timing("h100:llama-3-8b"), num_prefill=2, num_decode=2)
    config = with_targets(config, scaling)
    slo = Slo(scaling.ttft_target_ms, scaling.itl_target_ms)
    traces = swapped(
        read_trace(one, None), multiplied(read_trace(other, None), copies), window_s, 60 * minutes
    )
    hours = {"autoscaler": 0.0, "oracle": 0.0}
    for trace in traces:
        seen = foresee(trace, config, scaling)
        path = seen.path(percentile / 100.0, start_s, config.num_prefill + config.num_decode)
        found: dict[str, Any] = {"model": trace.name, "requests": len(trace.requests)}
        for name, by in (("autoscaler", scaling), ("oracle", plan_of(seen, path, start_s))):
            result = replay_scaled(name, trace, config, start_s, by)
            found[name] = measured(result, slo)
            hours[name] += result.gpu_hours
        click.echo(json.dumps(found))
    click.echo(json.dumps({"gpu_hours_of_oracle": round(hours["autoscaler"] / hours["oracle"], 3)}))


if __name__ == "__main__":
    main()
