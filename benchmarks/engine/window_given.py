"""How well a text that is given is predicted, far behind a window and its sinks.

`python -m benchmarks.engine.window_given`: 20,000 tokens of English prose (as
`benchmarks.engine.fp8` takes it), more than twice the model's context, go through the engine's
paged KV with a window of 1,024 positions and 4 sinks, and the probability of each token is taken.
Beside it the same window without sinks, pieces of 1,024 tokens each read alone, and no window,
until the model's context ends. Text that is drawn (`benchmarks.engine.window`) can go astray by the
draw; here nothing is drawn. Where the prose ends it begins anew, which no window holds any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.progress import Progress
from rich.table import Table

from benchmarks.engine.fp8 import BLOCK_SIZE, pieces_of, prose, score
from benchmarks.report import json_option, make_console, number_table, write_json
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model
from kvrelay.engine.model.runner import ModelRunner

DEFAULT_JSON = Path(__file__).parents[1] / "results" / "window_given.json"
CHUNK = 256  # tokens that are fed at once


@dataclass(frozen=True, slots=True)
class Spec:
    """How long things are, in tokens."""

    num_tokens: int = 20_000
    every: int = 1_000
    window: int = 1_024
    num_sinks: int = 4
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Reading:
    """One way through the text. `window` 0: none; the text is read in pieces of `piece_len`."""

    window: int
    num_sinks: int
    num_tokens: int
    piece_len: int


def readings(spec: Spec, context_len: int) -> dict[str, Reading]:
    """`context_len`: of the model, as far as it can be read without a window."""
    whole, seen = spec.num_tokens, min(spec.num_tokens, context_len)
    return {
        f"window {spec.window:,}, {spec.num_sinks} sinks": Reading(
            spec.window, spec.num_sinks, whole, whole
        ),
        f"window {spec.window:,}, no sinks": Reading(spec.window, 0, whole, whole),
        f"pieces of {spec.window:,}": Reading(0, 0, whole, spec.window),
        "no window": Reading(0, 0, seen, seen),
    }


def by_interval(logprobs: Sequence[float], piece_len: int, every: int) -> list[float]:
    """Perplexity of each `every` tokens of the text, as far as it was read. `logprobs` lack the
    first token of each piece."""
    sums: dict[int, list[float]] = {}
    for index, logprob in enumerate(logprobs):
        piece, at = divmod(index, piece_len - 1)
        sums.setdefault((piece * piece_len + at + 1) // every, []).append(logprob)
    return [math.exp(-sum(found) / len(found)) for _, found in sorted(sums.items())]


def read(
    path: Path, spec: Spec, reading: Reading, tokens: list[int], on_chunk: Callable[[], None]
) -> list[float]:
    pieces = pieces_of(tokens[: reading.num_tokens], reading.piece_len)
    runner = ModelRunner(
        path,
        ModelSection(dtype=spec.dtype, device="cpu"),
        EngineSection(
            window=reading.window,
            sinks=reading.num_sinks,
            num_blocks=-(-reading.piece_len // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_model_len=reading.piece_len,
        ).sized(gpu=False),
    )
    logprobs = score(runner, pieces, CHUNK, on_chunk).logprobs
    return by_interval(logprobs, reading.piece_len, spec.every)


def results_table(spec: Spec, results: dict[str, list[float]]) -> Table:
    title = f"perplexity of each {spec.every:,} tokens of given text"
    table = number_table("tokens", *results, title=title)
    for index in range(-(-spec.num_tokens // spec.every)):
        row = [f"{found[index]:.1f}" if index < len(found) else "-" for found in results.values()]
        table.add_row(f"{min((index + 1) * spec.every, spec.num_tokens):,}", *row)
    return table


@click.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True)
@click.option("--tokens", "num_tokens", type=click.IntRange(64), default=20_000, show_default=True)
@click.option("--every", type=click.IntRange(8), default=1_000, show_default=True)
@click.option("--window", type=click.IntRange(8), default=1_024, show_default=True)
@click.option("--sinks", "num_sinks", type=click.IntRange(0), default=4, show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@json_option(DEFAULT_JSON)
def main(
    model: str,
    num_tokens: int,
    every: int,
    window: int,
    num_sinks: int,
    dtype: str,
    json_path: Path,
) -> None:
    """Read the text in each way, and print a table."""
    console = make_console()
    path = resolve_model(model, progress=console.print)
    text = Tokenizer(path).encode(prose())
    if len(text) < 2 * window:
        raise click.UsageError(f"--window {window}: half of the documents are {len(text) // 2:,}")
    tokens = text * -(-num_tokens // len(text))
    spec = Spec(num_tokens, every, window, num_sinks, dtype)
    results: dict[str, list[float]] = {}
    with Progress(console=console) as progress:
        context_len = min(read_config(path).max_position_embeddings, len(text))
        ways = readings(spec, context_len)
        for name, reading in ways.items():
            pieces = pieces_of(range(reading.num_tokens), reading.piece_len)
            task = progress.add_task(name, total=sum(-(-len(p) // CHUNK) for p in pieces))
            results[name] = read(
                path, spec, reading, tokens, lambda task=task: progress.advance(task)
            )
    console.print(results_table(spec, results))
    write_json(json_path, {"spec": asdict(spec), "perplexity": results})


if __name__ == "__main__":
    main()
