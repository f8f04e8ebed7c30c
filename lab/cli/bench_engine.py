"""`kvrelay bench engine`: the engine alone, beside what the machine could do at most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

MAX_TOKENS = 1 << 20


class Counts(click.ParamType):  # type: ignore[type-arg]
    """Positive whole numbers with commas between them, as a tuple."""

    name = "N,N,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")] if value else []
        for part in parts:
            if not part.isdecimal() or not 0 < int(part) <= MAX_TOKENS:
                self.fail(f"{part!r}: expected a whole number from 1 to {MAX_TOKENS:,}", param, ctx)
        return tuple(sorted({int(part) for part in parts}))


@click.command()
@click.option("--model", help="As of kvrelay serve; default: smollm2-135m.")
@click.option("--batch", "batches", type=Counts(), default="1,8,32", show_default=True)
@click.option("--input", "input_len", type=click.IntRange(1), default=32, show_default=True)
@click.option("--output", "output_len", type=click.IntRange(2), default=64, show_default=True)
@click.option("--prefill", "prefills", type=Counts(), default="1024,2048", show_default=True)
@click.option("--dtype", default="auto", show_default=True, help="auto, float32 or bfloat16.")
@click.option("--kv-dtype", default="auto", show_default=True, help="auto or float8_e4m3.")
@click.option("--quantization", default="none", show_default=True, help="none, int8 or int4.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True
)
@click.option("--threads", type=click.IntRange(0, 1024), default=0, help="Default: all cores.")
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(0, MAX_TOKENS),
    default=0,
    help="Of a step. Default: as of kvrelay serve.",
)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write results there.")
def engine(json_path: Path | None, **options: Any) -> None:
    """Measure one worker, without router, network or HTTP, while nothing else runs here.

    Decode for each --batch, prefill of one prompt for each --prefill, and the start of a fresh
    process up to its first token. The floor beside each is what reading the weights or multiplying
    by them takes at least, at rates measured in the same run.
    """
    from kvrelay.cluster.config import ConfigError
    from kvrelay.lab.bench.engine import EngineSpec, measure
    from kvrelay.lab.bench.lone_worker import WorkerFailed
    from kvrelay.worker.kv_plan import BuildError

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            task = progress.add_task("the model", total=1)

            def tell(what: str, done: int, total: int) -> None:
                progress.update(task, description=f"{what:<40}", completed=done, total=total)

            result = measure(EngineSpec(**options), tell)
    except (ConfigError, BuildError, WorkerFailed) as error:
        raise click.ClickException(str(error)) from error
    for notice in result["notices"]:
        console.print(notice, style="yellow", markup=False, soft_wrap=True)
    if str(json_path) == "-":
        click.echo(json.dumps(result, indent=2))
        return
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    shown = Console(highlight=False)
    shown.print(engine_tables(result))
    for line in engine_lines(result):
        shown.print(line, markup=False, soft_wrap=True)


def engine_tables(result: dict[str, Any]) -> Group:
    """Shows a result to a reader."""
    given = result["parameters"]
    decode = Table(
        *("batch", "tokens/s", "ms a step", "floor, ms", "share of it"),
        title=f"Decode, {given['input_len']} tokens in, {given['output_len']} out",
    )
    for row in result["decode"]:
        decode.add_row(
            f"{row['batch']}",
            f"{row['tokens_per_s']:,.1f}",
            f"{row['step_ms']:,.2f}",
            f"{row['floor_ms']:,.2f}",
            f"{100 * row['share_of_roofline']:.0f} %",
        )
    prefill = Table(
        *("prompt tokens", "tokens/s", "seconds", "floor, s", "share of it"),
        title="Prefill, one prompt alone",
    )
    for row in result["prefill"]:
        prefill.add_row(
            f"{row['tokens']:,}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['seconds']:,.3f}",
            f"{row['floor_s']:,.3f}",
            f"{100 * row['share_of_roofline']:.0f} %",
        )
    return Group(decode, prefill)


def engine_lines(result: dict[str, Any]) -> tuple[str, ...]:
    """What the tables were measured with."""
    given, kind = result["parameters"], result["dtype"]
    if given["quantization"] != "none":
        kind = f"{kind}, {given['quantization']} weights"
    stages = ", ".join(f"{name} {at:.2f} s" for name, at in result["start_s"].items())
    return (
        f"{given['model']}, {kind}, on {result['device']} with {given['threads']} threads",
        f"start of a fresh process: {stages}",
        f"floors: memory is read at {result['read_gb_per_s']:.1f} GB/s, matrices are multiplied at"
        f" {result['gflops_per_s']:,.0f} GFLOP/s; weights {result['weight_bytes'] / 1e6:,.0f} MB,"
        f" KV {result['kv_bytes_per_token']:,} bytes a token",
    )
