"""Ten times more load than can be served: what is still served, and what the others are told.

python -m benchmarks.serving.overload [--factor 10] [--seconds 60] [--json OUT]

First the sustainable load: an open loop at rising rates, until more load brings no more goodput.
Then `--factor` times the best rate, from three tenants: gold (weight 3) and silver (weight 1), and
batch, which asks for a lower priority. A sample of those who are refused comes back when it was
told to. Goodput counts answers within the deadline. A machine that is shared does not stay as fast
as it was, so the rate that was best is offered once more afterwards: the peak is the mean of both.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.report import json_option, make_console, ms, write_json
from benchmarks.serving.load import Answer, Caller, Load, Offer
from benchmarks.serving.served import Served
from kvrelay.lab.bench.load import percentile

DEADLINE_S = 20.0
MAX_QUEUE_WAIT_S = 8.0
WARM_UP_S = 5.0  # from a load's start to what is counted: the queue fills
FIRST_BATCH_S = 15.0
REFUSAL_GOAL_S = 0.1
SETTLED = 1.05  # goodput of a step that is no more than this times the best is no better
WEIGHTS = {"gold": 3.0, "silver": 1.0, "batch": 1.0}
PRIORITIES = {"gold": 0, "silver": 0, "batch": 10}
LOW_SHARE = 0.05
TENANTS = "".join(
    f'[[tenant]]\nname = "{name}"\nkeys = ["{name}-key"]\nweight = {weight}\n'
    for name, weight in WEIGHTS.items()
)
Row = tuple[str, str]


def offers(rate: float, seconds: float) -> list[Offer]:
    """Makes equal loads for each of the tenants."""
    return [
        Offer(Caller(name, f"{name}-key", PRIORITIES[name]), rate / len(WEIGHTS), seconds)
        for name in WEIGHTS
    ]


def goodput(answers: Sequence[Answer], from_s: float, until_s: float) -> float:
    """Answers in time that ended between the two, per second."""
    good = [a for a in answers if a.is_good(DEADLINE_S) and from_s <= a.ended_at < until_s]
    return len(good) / (until_s - from_s)


def measure(load: Load, rate: float, step_s: float, progress: Progress) -> dict[str, float]:
    """Measures the goodput at one rate."""
    task = progress.add_task(f"{rate:.1f} requests/s", total=step_s)
    seconds = step_s + WARM_UP_S
    offered = offers(rate, seconds)
    answers = asyncio.run(
        load.run(offered, 0.0, lambda done: progress.update(task, completed=done))
    )
    found = goodput(answers, WARM_UP_S, seconds)
    progress.update(task, completed=step_s, description=f"{rate:.1f}/s: {found:.1f}/s served")
    return {"rate": rate, "goodput": found}


def find_peak(
    load: Load, first_rate: float, step_s: float, progress: Progress
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Finds the rate with the best goodput, and what each rate brought."""
    steps: list[dict[str, float]] = []
    rate, num_worse = first_rate, 0
    while num_worse < 2 and len(steps) < 16:
        best = max((step["goodput"] for step in steps), default=0.0)
        steps.append(measure(load, rate, step_s, progress))
        num_worse = num_worse + 1 if steps[-1]["goodput"] < best * SETTLED else 0
        rate *= 1.4
    return max(steps, key=lambda step: step["goodput"]), steps


def report(
    answers: Sequence[Answer], seconds: float, warm_up_s: float, peak: float
) -> tuple[list[Row], dict[str, Any]]:
    """Describes the overload. Goodput and shares are those after `warm_up_s`: what is in the first
    batch was admitted while there was room for all."""
    found = goodput(answers, warm_up_s, seconds)
    refused = [a for a in answers if a.status == 429]
    latencies = [a.ended_at - a.sent_at for a in refused]
    in_time = sum(latency <= REFUSAL_GOAL_S for latency in latencies)
    slow = Counter(a.caller.tenant for a in refused if a.ended_at - a.sent_at > REFUSAL_GOAL_S)
    admitted = [a for a in answers if a.status == 200]
    late = [a for a in admitted if not a.is_good(DEADLINE_S)]
    other = Counter(str(a.error or a.status) for a in answers if a.status not in (200, 429))
    errors = ", ".join(f"{count} of {cause}" for cause, count in other.items()) or "none"
    back = [a for a in answers if a.is_return and a.sent_at < seconds]
    kept = sum(a.status == 200 for a in back)
    rows = [
        ("offered", f"{len(answers) / seconds:.1f} requests/s"),
        ("goodput", f"{found:.2f}/s = {found / peak:.1%} of the peak (wanted: at least 90 %)"),
        ("admitted and late", f"{len(late)} of {len(admitted)}; other errors: {errors}"),
        (
            "refusals' latency",
            f"p50 {ms(latencies, 50)}, p99 {ms(latencies, 99)}, max {ms(latencies, 100)} ms; "
            f"{in_time / max(1, len(refused)):.2%} of {len(refused)} within 100 ms",
        ),
        ("later, having waited", ", ".join(f"{n} of {name}" for name, n in slow.items()) or "none"),
        (
            "Retry-After kept",
            f"{kept} of {len(back)} = {kept / max(1, len(back)):.1%} (wanted: at least 90 %)",
        ),
    ]
    served = {
        name: sum(a.caller.tenant == name and warm_up_s <= a.ended_at < seconds for a in admitted)
        for name in WEIGHTS
    }
    total = max(1, sum(served.values()))
    high = WEIGHTS["gold"] + WEIGHTS["silver"]
    for name in WEIGHTS:
        is_low = PRIORITIES[name] > 0
        wanted = LOW_SHARE if is_low else (1 - LOW_SHARE) * WEIGHTS[name] / high
        rows.append((f"share of {name}", f"{served[name] / total:.1%} (configured: {wanted:.1%})"))
    result = {
        "offered_per_s": len(answers) / seconds,
        "goodput_per_s": found,
        "goodput_of_peak": found / peak,
        "late": len(late),
        "admitted": len(admitted),
        "other_errors": dict(other),
        "refused": len(refused),
        "slow_refusals_by_tenant": dict(slow),
        "refusals_in_time": in_time / max(1, len(refused)),
        "refusal_s": {p: percentile(latencies, p) for p in (50, 99, 100)},
        "returns": len(back),
        "returns_admitted": kept,
        "served_by_tenant": served,
    }
    return rows, result


@click.command()
@click.option("--factor", default=10.0, help="Times the sustainable load.")
@click.option("--seconds", default=60.0, help="Of overload.")
@click.option("--step-s", default=30.0, help="Of each rate, in the search for the best.")
@click.option("--first-rate", default=4.0, help="Requests/s at which the search begins.")
@click.option("--return-share", default=0.2, help="Of the refused, who come back when told.")
@click.option("--input-len", default=16, help="Tokens of a prompt, about.")
@click.option("--output-len", default=64, help="Tokens of an answer.")
@json_option()
def main(
    factor: float,
    seconds: float,
    step_s: float,
    first_rate: float,
    return_share: float,
    input_len: int,
    output_len: int,
    json_path: Path | None,
) -> None:
    """Measure a server of one's own under overload."""
    console = make_console()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "tenants.toml"
        path.write_text(TENANTS)
        settings = {
            "tenants.file": str(path),
            "sessions.state_dir": str(Path(name) / "state"),
            "api.request_timeout_s": DEADLINE_S,
            "router.max_queue_wait_s": MAX_QUEUE_WAIT_S,
            "router.low_priority_share": LOW_SHARE,
        }
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with (
            Served(settings, "--prefill", "0", "--decode", "1") as server,
            Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress,
        ):
            load = Load(server.url, input_len, output_len)
            best, steps = find_peak(load, first_rate, step_s, progress)
            before = best["goodput"]
            task = progress.add_task(f"{factor:g} times {before:.1f}/s", total=seconds)
            offered = offers(factor * before, seconds)
            answers = asyncio.run(
                load.run(offered, return_share, lambda done: progress.update(task, completed=done))
            )
            after = measure(load, best["rate"], step_s, progress)["goodput"]
    peak = (before + after) / 2
    rows, result = report(answers, seconds, min(FIRST_BATCH_S, seconds / 2), peak)
    table = Table(title="overload", show_header=False)
    table.add_row(
        "peak goodput",
        f"{peak:.2f} requests/s: {before:.2f} before, {after:.2f} after the overload",
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)
    peaks = {"peak_per_s": peak, "peak_before_per_s": before, "peak_after_per_s": after}
    write_json(json_path, {**peaks, "steps": steps, "factor": factor, **result})


if __name__ == "__main__":
    main()
