"""`kvrelay bench`: put load on a server, or on the engine alone, and show what it did.

`kvrelay bench engine`: the engine alone, beside what the machine could do at most.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvrelay.cluster.cli.client import plain_errors, url_option
from kvrelay.lab.bench.load import PERCENTILES, LoadSpec, RequestTiming, run_load, summarize
from kvrelay.lab.cli.figures import write_json

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
    from kvrelay.lab.bench.engine import EngineSpec, WorkerFailed, measure
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
    if json_path is not None:
        write_json(json_path, result)
    if str(json_path) == "-":
        return
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


@click.group()
def bench() -> None:
    """Measure a server, or the engine alone."""


bench.add_command(engine)


@bench.command()
@url_option
@click.option("--model", help="Model to ask; default: the server's first.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Requests/s, open loop.")
@click.option("--concurrency", type=click.IntRange(1, 4096), help="Requests in flight, instead.")
@click.option("--num-requests", type=click.IntRange(1, 1_000_000), default=100, show_default=True)
@click.option("--input-len", type=click.IntRange(1), default=128, show_default=True)
@click.option("--output-len", type=click.IntRange(1), default=32, show_default=True)
@click.option("--prefix-groups", type=click.IntRange(0), default=0, show_default=True)
@click.option("--prefix-len", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True
)
@click.option("--stream/--no-stream", default=True, show_default=True)
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True)
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and arrivals.")
@click.option("--timeout-s", type=click.FloatRange(min=0.1), default=600.0, show_default=True)
@click.option("--ttft-slo-ms", type=click.FloatRange(min=0), help="For goodput.")
@click.option("--itl-slo-ms", type=click.FloatRange(min=0), help="For goodput.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Default: $OPENAI_API_KEY.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write results there.")
def serve(url: str, model: str | None, json_path: Path | None, **options: Any) -> None:
    """Load any OpenAI-compatible endpoint, and report latency, throughput and goodput.

    Each prompt has --prefix-len words shared by its group, then --input-len of its own.
    """
    if (options["rate"] is None) == (options["concurrency"] is None):
        raise click.UsageError("give either --rate or --concurrency")
    if options["prefix_groups"] and not options["prefix_len"]:
        raise click.UsageError("--prefix-groups needs a --prefix-len")
    url = url.rstrip("/").removesuffix("/v1")
    console = Console(stderr=True)
    with plain_errors(url):
        spec = LoadSpec(url=url, model=model or _first_model(url, options["api_key"]), **options)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[errors]} errors"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("requests", total=spec.num_requests, errors=0)
        num_errors = 0

        def on_done(timing: RequestTiming) -> None:
            nonlocal num_errors
            num_errors += timing.error is not None
            progress.update(task, advance=1, errors=num_errors)

        timings, elapsed_s = asyncio.run(run_load(spec, on_done))
    result = summarize(spec, timings, elapsed_s)
    if json_path is not None:
        write_json(json_path, result)
    if json_path is None or str(json_path) != "-":
        Console().print(result_table(result))
    if not result["num_completed"]:
        raise click.ClickException(f"no request was answered: {result['errors']}")


def _first_model(url: str, api_key: str | None) -> str:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    response = httpx.get(f"{url}/v1/models", headers=headers, timeout=10)
    models = response.json().get("data") if response.is_success else None
    if not models:
        raise click.ClickException(f"{url} does not say which models it has: give --model")
    return str(models[0]["id"])


def result_table(result: dict[str, Any]) -> Group:
    """Shows a result to a reader."""
    table = Table(title=f"{result['parameters']['model']} at {result['parameters']['url']}")
    table.add_column("")
    for percent in PERCENTILES:
        table.add_column(f"p{percent}", justify="right")
    for key, name in (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("e2e_ms", "end to end")):
        values = (result[key][f"p{percent}"] for percent in PERCENTILES)
        table.add_row(name, *("-" if value is None else f"{value:.1f} ms" for value in values))
    lines = [
        f"{result['num_completed']} of {result['num_requests']} requests in "
        f"{result['elapsed_s']:.1f} s: {result['requests_per_s']:.2f} requests/s, "
        f"{result['output_tokens_per_s']:.1f} output tokens/s",
    ]
    if result["cached_tokens_share"] is not None:
        lines.append(f"{100 * result['cached_tokens_share']:.1f} % of prompt tokens were cached")
    if result["goodput_per_s"] is not None:
        lines.append(
            f"goodput {result['goodput_per_s']:.2f} requests/s "
            f"({100 * result['share_within_slo']:.1f} % within the SLO)"
        )
    if result["errors"]:
        lines.append(
            "errors: " + ", ".join(f"{n} x {kind}" for kind, n in result["errors"].items())
        )
    return Group(table, *lines)
