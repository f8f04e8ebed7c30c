"""What KV below device memory is worth to a conversation that goes on, and what it costs others.

`python -m benchmarks.kv.tiers resume`: many conversations, room for few of them on the device; how
long the next turn waits for its first token when its KV is in host memory, on disk, or on disk
after a restart, and whether it answers what a server without tiers answers.

`python -m benchmarks.kv.tiers no-harm`: throughput of prompts that have nothing in common, with
tiers and without.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import psutil
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.kv.resume import (
    PREFILL_TOKENS_PER_S,
    SOURCES,
    Resumed,
    ResumePlan,
    ResumeRun,
    wait_settled,
)
from benchmarks.report import make_console, ms, number_table, write_json
from benchmarks.serving.conversations import LoadFailed, tokens_by_source
from benchmarks.serving.first_light import MODEL, load
from benchmarks.serving.served import Served
from kvrelay.engine.kv.tier import Tier
from kvrelay.lab.bench.load import LoadSpec

json_option = click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the results."
)
folder_option = click.option(
    "--disk-path",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Where to make the temporary folder of the disk tier.",
)
prefill_option = click.option(
    "--prefill", type=click.IntRange(0, 8), default=0, show_default=True, help="Prefill workers."
)


@contextmanager
def progress_bar(console: Console, what: str, total: float) -> Iterator[Callable[[float], None]]:
    """A bar; call what it yields with the work that is done."""
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


@click.group()
def main() -> None:
    """What the tiers below device memory are worth, and what they cost."""


@main.command()
@click.option("--sessions", type=click.IntRange(2), default=40, show_default=True)
@click.option("--tokens", type=click.IntRange(32, 7500), default=4000, show_default=True)
@click.option("--output-len", type=click.IntRange(1), default=16, show_default=True)
@click.option(
    "--device-sessions", type=click.IntRange(1), default=4, show_default=True,
    help="Conversations that fit into a worker's device pool.",
)  # fmt: skip
@prefill_option
@click.option(
    "--source", "sources", type=click.Choice(SOURCES), multiple=True, default=SOURCES,
    help="Where resumed KV comes from; all by default.",
)  # fmt: skip
@click.option("--kill", is_flag=True, help="Before the restart, SIGKILL instead of an orderly end.")
@click.option(
    "--check", type=click.IntRange(0), default=4, show_default=True,
    help="Compare so many answers of each source with a server without tiers.",
)  # fmt: skip
@folder_option
@json_option
def resume(
    sources: Sequence[str], disk_path: Path | None, json_path: Path | None, **options: Any
) -> None:
    """TTFT of the next turn, by where its KV was."""
    plan = ResumePlan(**options)
    check_plan(plan, disk_path)
    console = make_console()
    console.print(
        f"About {plan.seconds(sources) / 60:.0f} min: {plan.sessions} conversations of about"
        f" {plan.tokens:,} tokens are computed and then resumed from {', '.join(sources)}."
    )
    groups = ("host" in sources) + bool({"disk", "restart"} & set(sources))
    computed = groups * plan.sessions + len(sources) * plan.check
    total = computed * plan.turn_weight + len(sources) * plan.sessions
    try:
        with progress_bar(console, "turns", total) as advance:
            run = ResumeRun(plan, disk_path, advance)
            results = run.measure(sources)
            same = run.count_same(results)
    except (LoadFailed, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    console.print(resume_table(plan, results, same))
    write_json(json_path, {"plan": options, "resumed": [row_of(r, same) for r in results]})


def check_plan(plan: ResumePlan, parent: Path | None) -> None:
    """Raises click.UsageError where it cannot show anything, or has no room."""
    if plan.sessions <= plan.device_sessions + 1:
        raise click.UsageError(
            f"--sessions {plan.sessions}: expected more than --device-sessions + 1, that is"
            f" {plan.device_sessions + 1}, else their KV stays on the device"
        )
    if plan.check > plan.sessions:
        raise click.UsageError(f"--check {plan.check}: there are {plan.sessions} conversations")
    needed = plan.gib(plan.sessions + 1)
    memory = psutil.virtual_memory().available / 2**30
    disk = psutil.disk_usage(str(parent or tempfile.gettempdir())).free / 2**30
    for what, free in (("memory", memory - plan.gib(2 * plan.device_sessions) - 3), ("disk", disk)):
        if needed > free:
            raise click.UsageError(
                f"--sessions {plan.sessions}: their KV takes {needed:.1f} GiB of {what},"
                f" {max(0.0, free):.1f} GiB are free; fewer, or fewer --tokens"
            )


def row_of(resumed: Resumed, same: dict[str, int]) -> dict[str, Any]:
    first = [timing.ttft_s for timing in resumed.first]
    later = [timing.ttft_s for timing in resumed.timings]
    return {
        "source": resumed.source,
        "first_ttft_s": first,
        "ttft_s": later,
        "ratio": statistics.median(first) / statistics.median(later),
        "tokens_by_source": tokens_by_source(resumed.timings),
        "same_answers": same[resumed.source],
    }


def resume_table(plan: ResumePlan, results: Sequence[Resumed], same: dict[str, int]) -> Table:
    rows = [row_of(resumed, same) for resumed in results]
    places = sorted({place for row in rows for place in row["tokens_by_source"]})
    table = number_table(
        *("KV from", "first p50", "next p50", "p90", "ratio", *places, "same"),
        title=f"{plan.sessions} conversations of {plan.tokens:,} tokens, room for"
        f" {plan.device_sessions} on the device; {plan.prefill} prefill + 1 decode",
        caption="first, next: TTFT in ms of computing it and of its next turn; ratio: p50 to p50."
        " Then prompt tokens of the next turn by where their KV came from, and answers that are the"
        " same without tiers",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for row in rows:
        tokens = row["tokens_by_source"]
        total = max(1, sum(tokens.values()))
        table.add_row(
            row["source"],
            ms(row["first_ttft_s"], 50),
            ms(row["ttft_s"], 50),
            ms(row["ttft_s"], 90),
            f"{row['ratio']:.1f}",
            *(f"{tokens.get(place, 0) / total:.1%}" for place in places),
            f"{row['same_answers']}/{plan.check}",
        )
    return table


@main.command()
@click.option("--pairs", type=click.IntRange(1), default=4, show_default=True)
@click.option(
    "--requests", type=click.IntRange(1), default=32, show_default=True, help="Of each run."
)
@click.option("--concurrency", type=click.IntRange(1), default=8, show_default=True)
@click.option("--input-len", type=click.IntRange(1), default=300, show_default=True)
@click.option("--output-len", type=click.IntRange(1), default=64, show_default=True)
@click.option("--host-gib", type=float, default=2.0, show_default=True)
@click.option("--disk-gib", type=float, default=4.0, show_default=True)
@prefill_option
@folder_option
@json_option
def no_harm(
    pairs: int, host_gib: float, disk_gib: float, prefill: int, disk_path: Path | None,
    json_path: Path | None, requests: int, concurrency: int, input_len: int, output_len: int,
) -> None:  # fmt: skip
    """Tokens per second of prompts with nothing to reuse, tiers on against off.

    Both servers are up; one at a time has load, in turn."""
    console = make_console()
    spec = LoadSpec(
        "", MODEL, requests, concurrency=concurrency, input_len=input_len, output_len=output_len
    )
    seconds = 2 * pairs * requests * (input_len / PREFILL_TOKENS_PER_S + output_len / 100)
    console.print(f"About {1 + seconds / 60:.0f} min.")
    args = ("--prefill", str(prefill), "--decode", "1")
    with tempfile.TemporaryDirectory(dir=disk_path) as name:
        plain: dict[str, object] = {"sessions.state_dir": f"{name}/off"}
        tiers = {"sessions.state_dir": f"{name}/on", "tiers.disk_path": name}
        tiered = tiers | {"tiers.host_gib": host_gib, "tiers.disk_gib": disk_gib}
        with (
            Served(plain, *args) as off,
            Served(tiered, *args) as on,
            progress_bar(console, "runs", 2.0 * pairs) as advance,
        ):
            lowest = Tier.DISK if disk_gib else Tier.HOST
            settle = {"off": lambda: None, "on": lambda: wait_settled(on.url, lowest)}
            urls = {"off": off.url, "on": on.url}
            runs = alternate(spec, urls, settle, pairs, advance)
    ratios, table = compare(runs["off"], runs["on"])
    console.print(table)
    rates = {each: [run["output_tokens_per_s"] for run in found] for each, found in runs.items()}
    load_about = {"requests": requests, "input_len": input_len, "output_len": output_len}
    write_json(json_path, {"tokens_per_s": rates, "ratios": ratios, "load": load_about})


def alternate(
    spec: LoadSpec,
    urls: dict[str, str],
    settle: Mapping[str, Callable[[], object]],
    pairs: int,
    advance: Callable[[float], None],
) -> dict[str, list[dict[str, Any]]]:
    """Sends equal loads to each server, new prompts in each pair, who is first by turns. `settle`:
    what a run still has to write is not the burden of the next."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
    for name, url in urls.items():  # warm up
        load(replace(spec, url=url, num_requests=spec.concurrency or 1, seed=spec.seed + 99))
        settle[name]()
    for pair in range(pairs):
        names = list(urls) if pair % 2 == 0 else list(urls)[::-1]
        for name in names:
            result = load(replace(spec, url=urls[name], seed=spec.seed + 100 + pair))
            settle[name]()
            runs[name].append(result)
            advance(1.0)
    return runs


def compare(
    off: Sequence[dict[str, Any]], on: Sequence[dict[str, Any]]
) -> tuple[list[float], Table]:
    """On to off, by pair, of runs with the same prompts."""
    table = Table("pair", "off, tokens/s", "on, tokens/s", "on / off", "cached", title="no-harm")
    ratios = []
    for i, (plain, tiered) in enumerate(zip(off, on, strict=True), 1):
        rates = [run["output_tokens_per_s"] for run in (plain, tiered)]
        ratios.append(rates[1] / rates[0])
        cached = max(run["cached_tokens_share"] for run in (plain, tiered))
        table.add_row(
            str(i), f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{ratios[-1]:.3f}", f"{cached:.1%}"
        )
    table.add_section()
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    table.add_row("median", "", "", f"{statistics.median(ratios):.3f}", spread)
    return ratios, table


if __name__ == "__main__":
    main()
