"""`kvrelay profile`: measure this machine into a timing file, and show what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvrelay.cluster.cli.settings import settings_options


@click.command()
@click.option("--model", help="As of kvrelay serve; default: that of --config, or smollm2-135m.")
@settings_options
@click.option("--dtype", help="auto, float32 or bfloat16.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("profile.npz"), show_default=True
)
@click.option("--small", is_flag=True, help="A few points only: seconds, and less sure.")
@click.option(
    "--serving/--no-serving",
    default=True,
    show_default=True,
    help="Start a cluster to measure what requests take beside passes.",
)
def profile(
    model: str | None,
    config_path: Path | None,
    overrides: dict[str, Any],
    dtype: str | None,
    out: Path,
    small: bool,
    serving: bool,
) -> None:
    """Measure what kvrelay replay needs to know of this machine: --timing profile.npz.

    Forward passes, links between workers, what workers on the same cores cost each other, and
    what a request takes beside its passes. Run it while nothing else runs here.
    """
    import numpy as np

    from kvrelay.cluster.config import ConfigError, load_config
    from kvrelay.engine.model.errors import ModelError
    from kvrelay.kvtransfer.agent import AgentError
    from kvrelay.lab.profiling.forward import SMALL, Grid, ProfileError
    from kvrelay.lab.profiling.measure import measure
    from kvrelay.worker.kv_plan import BuildError

    if out.suffix != ".npz":
        raise click.BadParameter(
            f"{str(out)!r}: expected a name that ends in .npz", param_hint="--out"
        )
    if not out.absolute().parent.is_dir():
        raise click.BadParameter(f"{str(out)!r}: there is no such folder", param_hint="--out")
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        options = {"model.name": model, "model.dtype": dtype}
        given = {key: value for key, value in options.items() if value is not None}
        config = load_config(config_path, overrides | given)
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            task = progress.add_task("the model", total=1)

            def tell(what: str, done: int, total: int) -> None:
                progress.update(task, description=f"{what:<40}", completed=done, total=total)

            measured = measure(config, SMALL if small else Grid(), tell, with_serving=serving)
            progress.update(task, description=f"{'done':<40}", completed=progress.tasks[0].total)
    except (ConfigError, BuildError, ModelError, AgentError, ProfileError) as error:
        raise click.ClickException(str(error)) from error
    with out.open("wb") as file:
        np.savez(file, allow_pickle=False, **measured.arrays)
    for notice in measured.notices:
        console.print(notice, style="yellow", markup=False, soft_wrap=True)
    Console().print(profile_tables(measured.arrays))
    click.echo(f"written to {out}: kvrelay replay TRACE --timing {out}")


def profile_tables(arrays: dict[str, Any]) -> Group:
    """What was measured, for reading."""
    prompts = Table("prompt tokens", "TTFT ms", "tokens/s", title="Prefill, one prompt alone")
    for tokens, ms in zip(arrays["prefill_isl"], arrays["prefill_ttft_ms"], strict=True):
        prompts.add_row(f"{tokens:,.0f}", f"{ms:,.1f}", f"{1e3 * tokens / ms:,.0f}")
    contexts = arrays["decode_context_length"]
    batches = arrays["decode_active_kv_tokens"] / contexts
    points = {
        (round(float(batch)), int(context)): float(ms)
        for batch, context, ms in zip(batches, contexts, arrays["decode_itl"], strict=True)
    }
    shown = sorted({batch for batch, _ in points})
    steps = Table(
        "context", *(f"{b}" for b in shown), title="Decode, ms a step, by sequences in it"
    )
    for context in sorted({context for _, context in points}):
        found = (points.get((batch, context)) for batch in shown)
        steps.add_row(f"{context:,}", *("-" if ms is None else f"{ms:,.1f}" for ms in found))
    rest = Table("", "", title="Links and overheads", show_header=False)
    for name, text in _rest(arrays):
        rest.add_row(name, text)
    return Group(prompts, steps, rest)


def _rest(arrays: dict[str, Any]) -> list[tuple[str, str]]:
    rows = (
        ("KV between workers", "peer_bytes_per_s", 1e-9, "{:.2f} GB/s"),
        ("KV from host memory", "host_bytes_per_s", 1e-9, "{:.2f} GB/s"),
        ("KV from disk", "disk_bytes_per_s", 1e-9, "{:.2f} GB/s"),
        ("any transfer", "transfer_s", 1e3, "{:.2f} ms"),
        ("a message between processes", "message_s", 1e3, "{:.2f} ms"),
        ("a request beside its passes", "request_s", 1e3, "{:.2f} ms"),
        ("between two steps", "step_s", 1e3, "{:.2f} ms"),
        ("more of it for each sequence", "sequence_s", 1e3, "{:.2f} ms"),
        ("saved by prompts and decodes in one pass", "mixed_saved_ms", 1.0, "{:.2f} ms"),
        ("prefill while decode computes", "prefill_slowdown", 1.0, "{:.2f} times as long"),
        ("decode while prefill computes", "decode_slowdown", 1.0, "{:.2f} times as long"),
        ("prefill while decode does not", "prefill_alone_slowdown", 1.0, "{:.2f} times as long"),
        ("decode while prefill does not", "decode_alone_slowdown", 1.0, "{:.2f} times as long"),
        ("spread of equal passes", "spread", 100.0, "{:.0f} %"),
    )
    return [
        (name, text.format(float(arrays[key]) * scale))
        for name, key, scale, text in rows
        if key in arrays
    ]
