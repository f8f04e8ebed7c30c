"""What weights in fewer bits cost and bring: perplexity, and the time of a decode and of a prompt.

`python -m benchmarks.engine.weights`: English prose (this project's own documents, without their
tables and code) goes through the engine with weights as the checkpoint has them, in 8 and in 4
bits. Then one answer is generated with each kind by turns, several rounds; the medians count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
from rich.progress import Progress

from benchmarks.engine.fp8 import BLOCK_SIZE, Score, pieces_of, prose, score
from benchmarks.report import json_option, make_console, number_table, write_json
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.prepare import prepare_model
from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model
from kvrelay.engine.model.quantize import QUANTIZATIONS as BY_DEVICE
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.lab.bench.engine import EngineSpec, LoneWorker, greedy

DEFAULT_JSON = Path(__file__).parents[1] / "results" / "weights.json"
QUANTIZATIONS = BY_DEVICE["cpu"]
BASE = QUANTIZATIONS[0]
CONTEXT, CHUNK = 1024, 256
PROMPT, OUTPUT = 1024, 96
WANTED = 1.6  # a decode's speed in 4 bits over that in 8


def perplexities(model: Path, tokens: list[int], progress: Progress) -> dict[str, Score]:
    pieces = pieces_of(tokens, CONTEXT)
    steps = sum(-(-len(piece) // CHUNK) for piece in pieces)
    task = progress.add_task("perplexity", total=len(QUANTIZATIONS) * steps)
    found = {}
    for quantization in QUANTIZATIONS:
        runner = ModelRunner(
            model,
            ModelSection(quantization=quantization, device="cpu"),
            EngineSection(num_blocks=CONTEXT // BLOCK_SIZE).sized(gpu=False),
        )
        found[quantization] = score(runner, pieces, CHUNK, lambda: progress.advance(task))
    return found


def speeds(
    model: Path, prompt: list[int], rounds: int, progress: Progress
) -> dict[str, dict[str, float]]:
    """Medians over rounds, seconds: of a prompt, and of a decode step at batch 1."""
    task = progress.add_task("speed", total=rounds * len(QUANTIZATIONS))
    taken: dict[str, list[tuple[float, float]]] = {each: [] for each in QUANTIZATIONS}
    with ExitStack() as stack:
        workers = {each: stack.enter_context(_worker(model, each)) for each in QUANTIZATIONS}
        for number in range(rounds + 1):  # the first warms up
            for quantization, worker in workers.items():
                # Another prompt each time: none of it is in the prefix cache.
                asked = [number + 1, *prompt[1:]]
                began = perf_counter()
                (answer,) = worker.generate([asked], greedy(OUTPUT))
                first, last = answer.arrived_at[0], answer.arrived_at[-1]
                if number:
                    taken[quantization].append((first - began, (last - first) / (OUTPUT - 1)))
                    progress.advance(task)
    return {
        each: {
            "prompt_s": median(prompt_s for prompt_s, _ in times),
            "decode_s": median(decode_s for _, decode_s in times),
        }
        for each, times in taken.items()
    }


def _worker(model: Path, quantization: str) -> LoneWorker:
    spec = EngineSpec(
        model=str(model),
        batches=(1,),
        input_len=PROMPT,
        output_len=OUTPUT,
        prefills=(),
        quantization=quantization,
        device="cpu",
    )
    config = spec.config()
    ready = prepare_model(config, 1, lambda _: None)
    return LoneWorker(config, ready)


def rows_of(
    scores: dict[str, Score], times: dict[str, dict[str, float]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    base, base_s = scores[BASE], times[BASE]
    for each in QUANTIZATIONS:
        same = sum(a == b for a, b in zip(base.best, scores[each].best, strict=True))
        yield (
            each,
            {
                "perplexity": round(scores[each].perplexity, 4),
                "change": round(scores[each].perplexity / base.perplexity - 1, 5),
                "same_likeliest_token": round(same / len(base.best), 4),
                **times[each],
                "prompt_speed": round(base_s["prompt_s"] / times[each]["prompt_s"], 3),
                "decode_speed": round(base_s["decode_s"] / times[each]["decode_s"], 3),
            },
        )


@click.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True)
@click.option("--tokens", "num_tokens", type=click.IntRange(64), default=6144, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@json_option(DEFAULT_JSON)
def main(model: str, num_tokens: int, rounds: int, json_path: Path) -> None:
    """Measure, and print a table."""
    console = make_console()
    path = resolve_model(model, progress=console.print)
    tokens = Tokenizer(path).encode(prose())
    with Progress(console=console) as progress:
        scores = perplexities(path, tokens[:num_tokens], progress)
        times = speeds(path, tokens[:PROMPT], rounds, progress)
    rows = dict(rows_of(scores, times))
    table = number_table(
        *("weights", "perplexity", "change", "same likeliest token"),
        *("prompt, s", "times as fast", "decode, ms", "times as fast"),
        title=f"{num_tokens:,} tokens of prose; a prompt of {PROMPT}; decodes at batch 1",
    )
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['perplexity']:.3f}",
            f"{100 * row['change']:+.2f} %",
            f"{100 * row['same_likeliest_token']:.1f} %",
            f"{row['prompt_s']:.3f}",
            f"{row['prompt_speed']:.2f}",
            f"{1e3 * row['decode_s']:.2f}",
            f"{row['decode_speed']:.2f}",
        )
    console.print(table)
    ratio = times["int8"]["decode_s"] / times["int4"]["decode_s"]
    console.print(f"int4 over int8, decode at batch 1: {ratio:.2f} (wanted: {WANTED})")
    results = {"model": model, "num_tokens": num_tokens, "int4_over_int8": ratio, "weights": rows}
    write_json(json_path, results)


if __name__ == "__main__":
    main()
