"""Does the simulation tell the truth? A workload against a real cluster, and the same simulated.

`python -m benchmarks.serving.fidelity`: measures this machine (`kvrelay profile`), starts a cluster
of one prefill and one decode worker, sends conversations for some minutes, replays what was sent
with the profile, and compares TTFT and ITL at p50 and p90. A machine that is shared with others
does not stay as fast as it was: what is sent goes in parts, with a profile before, between and
after them, and each part is replayed with the mean of the two beside it. `--folder DIR` keeps
profiles and recordings, and takes those that are there already.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.report import json_option, make_console, write_json
from benchmarks.serving.conversations import LoadFailed
from benchmarks.serving.fidelity_load import (
    Planned,
    Recorded,
    WorkloadSpec,
    plan,
    read_recording,
    record,
    send,
    trace_of,
    write_recording,
)
from benchmarks.serving.served import Served
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.cluster.config import Config
from kvrelay.cluster.control.specs import ITL_TARGET_MS
from kvrelay.cluster.prepare import PreparedModel, prepare_model
from kvrelay.engine.config import STATS_INTERVAL_S
from kvrelay.lab.bench.load import percentile
from kvrelay.lab.replay.config import ReplayConfig
from kvrelay.lab.replay.replay import ReplayResult, replay
from kvrelay.lab.timing.profile import profile_of
from kvrelay.lab.timing.timing import Timing

PERCENTS = (50, 90)
GOAL = 0.15  # simulated and real differ by no more
# Passes that are simulated yield a token for each sequence.
SETTINGS = {"cluster.prefill": 1, "cluster.decode": 1, "engine.num_speculative_tokens": 0}

Figures = dict[str, dict[str, float]]  # "ttft" and "itl" -> "p50", ... -> seconds


def measure_profile(path: Path) -> None:
    """As a user does it."""
    command = [sys.executable, "-m", "kvrelay.cluster.cli.main", "profile", "--out", str(path)]
    if subprocess.run(command, check=False).returncode:
        raise click.ClickException("this machine could not be measured; what went wrong is above")


def mean_profile(*paths: Path) -> Timing:
    """Averages a machine that was measured several times over the same grid."""
    read = []
    for path in paths:
        with np.load(path, allow_pickle=False) as file:
            read.append(dict(file))
    mean = {name: np.mean([each[name] for each in read], axis=0) for name in read[0]}
    return profile_of(mean, "mean", " and ".join(map(str, paths)))


def run_real(
    console: Console, planned: Sequence[Planned], model: PreparedModel
) -> tuple[list[Recorded], dict[str, Any]]:
    """The recording of a new cluster, and the status of its router afterwards."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        Served(SETTINGS) as server,
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
    ):
        name = httpx.get(f"{server.url}/v1/models", timeout=10).json()["data"][0]["id"]
        task = progress.add_task("requests to the real cluster", total=len(planned))
        timings = asyncio.run(send(server.url, name, planned, lambda: progress.advance(task)))
        status = httpx.get(f"{server.url}/status", timeout=10, auth=OwnKey()).json()
    return record(Tokenizer(model.path), planned, timings), status


def as_served(config: Config, timing: Timing, num_blocks: int) -> ReplayConfig:
    """A cluster of `config` on CPUs, each worker with so many blocks."""
    engine = config.engine.sized(gpu=False)
    return ReplayConfig(
        timing=timing,
        num_prefill=config.cluster.prefill,
        num_decode=config.cluster.decode,
        num_blocks=num_blocks,
        block_size=engine.block_size,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        router=config.router,
        stats_interval_s=STATS_INTERVAL_S,
        itl_target_s=(engine.itl_target_ms or ITL_TARGET_MS) / 1e3,
    )


def simulate(
    console: Console, recorded: Sequence[Recorded], timing: Timing, model: PreparedModel
) -> ReplayResult:
    """A cluster as `run_real` had it."""
    replayed = as_served(Config(), timing, model.plan.num_blocks)
    with console.status("simulating"):
        return replay(trace_of(recorded, "recorded"), replayed)


def real_figures(recorded: Sequence[Recorded]) -> Figures:
    gaps = [gap for each in recorded for gap in each.gaps_s]
    return {"ttft": _percentiles([each.ttft_s for each in recorded]), "itl": _percentiles(gaps)}


def simulated_figures(results: Sequence[ReplayResult]) -> Figures:
    samples = [each for result in results for each in result.samples]
    ttfts = [sample.ttft_s for sample in samples if sample.ttft_s is not None]
    gaps = [gap for each in results for gap in np.repeat(each.itl_s, each.itl_counts).tolist()]
    return {"ttft": _percentiles(ttfts), "itl": _percentiles(gaps)}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": percentile(values, percent) or 0.0 for percent in PERCENTS}


def ratios(real: Figures, simulated: Figures) -> Figures:
    """Divides the simulated by the real."""
    return {
        what: {at: simulated[what][at] / found for at, found in figures.items()}
        for what, figures in real.items()
    }


def breakdown(parts: Sequence[list[Recorded]], results: Sequence[ReplayResult]) -> dict[str, float]:
    """What explains a difference, if there is one."""
    recorded = [each for part in parts for each in part]
    samples = [each for result in results for each in result.samples]
    prompt = sum(each.input_length for each in recorded)
    return {
        "requests": len(recorded),
        "duration_s": sum(part[-1].timestamp for part in parts) / 1e3,
        "prompt_tokens": prompt,
        "output_tokens": sum(each.output_length for each in recorded),
        "real_cached_share": sum(each.cached_tokens for each in recorded) / prompt,
        "simulated_cached_share": sum(sum(s.cached.values()) for s in samples) / prompt,
        "simulated_handed_over": sum(s.prefill is not None for s in samples) / len(samples),
        "simulated_refused": sum(s.refused is not None for s in samples),
    }


def show(console: Console, real: Figures, simulated: Figures, facts: dict[str, float]) -> bool:
    """True if all is within the goal."""
    table = Table("", "real", "simulated", "simulated / real", title="Real and simulated")
    all_good = True
    for what, figures in ratios(real, simulated).items():
        for at, ratio in figures.items():
            good = abs(ratio - 1) <= GOAL
            all_good &= good
            shown = f"[{'green' if good else 'red'}]{ratio:.3f}[/]"
            times = (f"{each[what][at] * 1e3:,.1f} ms" for each in (real, simulated))
            table.add_row(f"{what.upper()} {at}", *times, shown)
    console.print(table)
    for name, value in facts.items():
        console.print(f"{name.replace('_', ' ')}: {value:,.3f}".removesuffix(".000"))
    return all_good


@click.command()
@click.option("--requests", type=click.IntRange(1), default=240, show_default=True)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=0.5, show_default=True)
@click.option("--parts", "num_parts", type=click.IntRange(1), default=2, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Keep files here.")
@json_option()
def main(
    requests: int,
    rate: float,
    num_parts: int,
    seed: int,
    folder: Path | None,
    json_path: Path | None,
) -> None:
    """Compare the simulation with a real cluster: TTFT and ITL at p50 and p90.

    Exit code 1: some figure is off by more than 15 %.
    """
    console = make_console()
    spec = replace(WorkloadSpec(), num_requests=-(-requests // num_parts), rate=rate)
    model = prepare_model(Config(), 0, lambda line: console.print(line, markup=False))
    reports: list[dict[str, Any]] = []  # by the routers
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        profiles = [folder / f"profile-{i}.npz" for i in range(num_parts + 1)]
        recordings = [folder / f"recorded-{i}.jsonl" for i in range(num_parts)]
        for i, profile in enumerate(profiles):
            if not profile.is_file():
                measure_profile(profile)
            if i < num_parts and not recordings[i].is_file():
                try:
                    planned = plan(replace(spec, seed=seed + i))
                    recorded, status = run_real(console, planned, model)
                except* LoadFailed as failed:
                    raise click.ClickException(str(failed.exceptions[0])) from failed
                write_recording(recordings[i], recorded)
                reports.append(status)
        parts = [read_recording(recording) for recording in recordings]
        timings = [mean_profile(*both) for both in pairwise(profiles)]
    results = [simulate(console, *both, model) for both in zip(parts, timings, strict=True)]
    real, simulated = real_figures([*chain(*parts)]), simulated_figures(results)
    facts = breakdown(parts, results)
    if len(reports) == num_parts:
        handed_over = sum(status["totals"]["handoffs"] for status in reports)
        facts["real_handed_over"] = handed_over / facts["requests"]
        # Takes the median of each part.
        facts["real_prediction_error"] = statistics.fmean(s["prediction_error"] for s in reports)
    good = show(console, real, simulated, facts)
    each_part = [
        ratios(real_figures(part), simulated_figures([result]))
        for part, result in zip(parts, results, strict=True)
    ]
    found: dict[str, Any] = {
        "workload": {**asdict(spec), "num_parts": num_parts, "seed": seed},
        "real_s": real,
        "simulated_s": simulated,
        "simulated_to_real": ratios(real, simulated),
        "simulated_to_real_of_parts": each_part,
        **facts,
    }
    write_json(json_path, found)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
