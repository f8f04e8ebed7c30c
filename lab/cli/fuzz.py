"""`kvrelay fuzz`: run seeds, show what happened, and how to repeat what went wrong."""

from __future__ import annotations

import re
from collections import Counter

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvrelay.lab.sim.breakage import Break
from kvrelay.lab.sim.run import Report, run_seed
from kvrelay.lab.sim.scenario import GROUPED

MAX_SHOWN = 10  # violations of one seed, and failing seeds


def parse_seeds(text: str) -> range:
    """`A..B`, both included. Raises click.BadParameter."""
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise click.BadParameter(f"{text!r} is not a range of seeds; write 0..299, for example")
    return range(int(match[1]), int(match[2]) + 1)


@click.command()
@click.option("--seed", type=click.IntRange(min=0), help="Run this seed and show it in detail.")
@click.option("--seeds", metavar="A..B", help="Run a range of seeds, both ends included.")
@click.option(
    "--break",
    "broken",
    type=click.Choice([b.value for b in Break]),
    help="Take a safeguard out of the handoff, to see the checkers notice.",
)
@click.option(
    "--grouped", is_flag=True, help="Layers are in groups in every run, not in a quarter."
)
def fuzz(seed: int | None, seeds: str | None, broken: str | None, grouped: bool) -> None:
    """Run the production nodes in virtual time, with faults chosen by a seed."""
    if (seed is None) == (seeds is None):
        raise click.UsageError("give either --seed N or --seeds A..B")
    numbers = range(seed, seed + 1) if seed is not None else parse_seeds(seeds or "")
    console, share = Console(), 1.0 if grouped else GROUPED
    failed = 0
    total: list[Report] = []
    for report in _run_all(console, numbers, Break(broken) if broken else None, share):
        total.append(report)
        if report.violations:
            failed += 1
            if failed <= MAX_SHOWN:
                _show_violations(console, report, repeat_command(report.seed, broken, grouped))
    _show_summary(console, total)
    if failed:
        console.print(f"[bold red]{failed} of {len(total)} seeds found something.[/]")
        raise SystemExit(1)
    console.print(f"[bold green]{len(total)} of {len(total)} seeds: nothing found.[/]")


def repeat_command(seed: int, broken: str | None = None, grouped: bool = False) -> str:
    """The one command that repeats a run."""
    more = " --grouped" if grouped else ""
    if broken:
        return f"kvrelay fuzz --seed {seed} --break {broken}{more}"
    return f"make sim SEED={seed}" + (" ARGS=--grouped" if grouped else "")


def _run_all(console: Console, seeds: range, broken: Break | None, grouped: float) -> list[Report]:
    columns = (
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("seeds"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("seeds", total=len(seeds))
        reports = []
        for seed in seeds:
            reports.append(run_seed(seed, broken, grouped))
            progress.advance(task)
    return reports


def _show_violations(console: Console, report: Report, repeat: str) -> None:
    console.print(f"[red]seed {report.seed}[/]: {len(report.violations)} violations")
    for violation in report.violations[:MAX_SHOWN]:
        console.print(
            f"  [{violation.at_s:.6f} s] {violation.kind}: {violation.text}", markup=False
        )
    console.print(f"  repeat it: {repeat}", markup=False)


def _show_summary(console: Console, reports: list[Report]) -> None:
    first, last = reports[0], reports[-1]
    one = first is last
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row(
        "seed" if one else "seeds", str(first.seed) if one else f"{first.seed}..{last.seed}"
    )
    table.add_row("events", f"{sum(r.num_events for r in reports):,}")
    table.add_row("virtual time", f"{sum(r.virtual_s for r in reports):,.1f} s")
    table.add_row("requests", _counts(sum((r.outcomes for r in reports), Counter())))
    table.add_row("faults", _counts(sum((r.injected for r in reports), Counter())))
    table.add_row("notes", _counts(sum((r.notes for r in reports), Counter())))
    table.add_row("blocks read", _counts(sum((r.sources for r in reports), Counter())))
    table.add_row("violations", str(sum(len(r.violations) for r in reports)))
    if one:
        table.add_row("event hash", first.event_hash)
    console.print(table)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counter.items())) or "none"
