"""Does the simulation tell the truth? A workload against a real cluster, and the same simulated.

`python -m benchmarks.fidelity`: measures this machine (`kvrelay profile`), starts a cluster of one
prefill and one decode worker, sends conversations for some minutes, replays what was sent with the
profile, and compares TTFT and ITL at p50 and p90. Each part can be had alone: `--profile FILE` and
`--record FILE` take what is there already and write what is not; `--simulate-only` starts nothing.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.conversations import LoadFailed
from benchmarks.fidelity_load import (
    Recorded,
    WorkloadSpec,
    plan,
    read_recording,
    record,
    send,
    trace_of,
    write_recording,
)
from benchmarks.report import make_console, write_json
from benchmarks.served import Served
from cluster.api.tokenizer import Tokenizer
from cluster.bench import percentile
from cluster.build import PreparedModel, prepare_model
from cluster.config import Config
from cluster.profiling.mixture import as_served
from cluster.replay.replay import replay
from cluster.replay.results import ReplayResult
from cluster.replay.timing import Timing
from cluster.replay.timing_file import load_timing

PERCENTS = (50, 90)
GOAL = 0.15  # simulated and real differ by no more
SETTINGS = {"cluster.prefill": 1, "cluster.decode": 1}

Figures = dict[str, dict[str, float]]  # "ttft" and "itl" -> "p50", ... -> seconds


def measure_profile(path: Path) -> None:
    """As a user does it."""
    command = [sys.executable, "-m", "cluster.cli", "profile", "--out", str(path)]
    if subprocess.run(command, check=False).returncode:
        raise click.ClickException("this machine could not be measured; what went wrong is above")


def run_real(
    console: Console, spec: WorkloadSpec, model: PreparedModel
) -> tuple[list[Recorded], float]:
    """The recording, and the median relative error of the router's predictions of TTFT."""
    planned = plan(spec)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        Served(SETTINGS) as server,
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
    ):
        name = httpx.get(f"{server.url}/v1/models", timeout=10).json()["data"][0]["id"]
        task = progress.add_task("requests to the real cluster", total=len(planned))
        timings = asyncio.run(send(server.url, name, planned, lambda: progress.advance(task)))
        status = httpx.get(f"{server.url}/status", timeout=10).json()
    return record(Tokenizer(model.path), planned, timings), status["prediction_error"]


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


def simulated_figures(result: ReplayResult) -> Figures:
    ttfts = [sample.ttft_s for sample in result.samples if sample.ttft_s is not None]
    gaps = np.repeat(result.itl_s, result.itl_counts)
    return {"ttft": _percentiles(ttfts), "itl": _percentiles([float(gap) for gap in gaps])}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": percentile(values, percent) or 0.0 for percent in PERCENTS}


def ratios(real: Figures, simulated: Figures) -> Figures:
    """Simulated to real."""
    return {
        what: {at: simulated[what][at] / found for at, found in figures.items()}
        for what, figures in real.items()
    }


def breakdown(recorded: Sequence[Recorded], result: ReplayResult) -> dict[str, float]:
    """What explains a difference, if there is one."""
    prompt = sum(each.input_length for each in recorded)
    samples = result.samples
    return {
        "requests": len(recorded),
        "duration_s": recorded[-1].timestamp / 1e3,
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
@click.option("--profile", "profile_path", type=click.Path(path_type=Path), help="Of this machine.")
@click.option("--record", "record_path", type=click.Path(path_type=Path), help="A recording.")
@click.option("--simulate-only", is_flag=True, help="Both files have to be there.")
@click.option("--requests", type=click.IntRange(1), default=240, show_default=True)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=0.5, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results.")
def main(
    profile_path: Path | None,
    record_path: Path | None,
    simulate_only: bool,
    requests: int,
    rate: float,
    seed: int,
    json_path: Path | None,
) -> None:
    """Compare the simulation with a real cluster: TTFT and ITL at p50 and p90.

    Exit code 1: some figure is off by more than 15 %.
    """
    console = make_console()
    spec = replace(WorkloadSpec(), num_requests=requests, rate=rate, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        profile_path = profile_path or Path(folder) / "profile.npz"
        record_path = record_path or Path(folder) / "recorded.jsonl"
        missing = [str(path) for path in (profile_path, record_path) if not path.is_file()]
        if simulate_only and missing:
            raise click.UsageError(f"--simulate-only: {' and '.join(missing)}: no such file")
        workload = None if record_path.is_file() else asdict(spec)
        model = prepare_model(Config(), 0, lambda news: console.print(news, markup=False))
        if not profile_path.is_file():
            measure_profile(profile_path)
        prediction_error: float | None = None
        if not record_path.is_file():
            try:
                recorded, prediction_error = run_real(console, spec, model)
                write_recording(record_path, recorded)
            except* LoadFailed as errors:
                raise click.ClickException(str(errors.exceptions[0])) from errors
        recorded = read_recording(record_path)
        timing = load_timing(str(profile_path))
    result = simulate(console, recorded, timing, model)
    real, simulated = real_figures(recorded), simulated_figures(result)
    facts = breakdown(recorded, result)
    if prediction_error is not None:
        facts["real_prediction_error"] = prediction_error
    good = show(console, real, simulated, facts)
    results: dict[str, Any] = {
        "workload": workload,  # None: the recording was there already
        "real_s": real,
        "simulated_s": simulated,
        "simulated_to_real": ratios(real, simulated),
        **facts,
    }
    write_json(json_path, results)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
