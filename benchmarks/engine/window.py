"""Text without end in a KV cache that does not grow: a window of positions, and sinks.

`python -m benchmarks.engine.window`: the default model writes 20,000 tokens, more than twice its
context, through a worker as it is served, with a window of 1,024 positions and 4 sinks
(StreamingLLM). Every 1,000 tokens tell how many KV blocks the sequence holds, and how sane the text
is: the mean log-probability of the tokens, and how many 4-grams were there before. Beside it the
same window without sinks, and no window, until the model's context ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.report import json_option, make_console, number_table, write_json
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import load_config
from kvrelay.cluster.prepare import prepare_model
from kvrelay.engine.kv.block_table import NO_BLOCK
from kvrelay.engine.request import SamplingParams
from kvrelay.lab.bench.engine import Generated, LoneWorker

DEFAULT_JSON = Path(__file__).parents[1] / "results" / "window.json"
BLOCK_SIZE = 16
GRAM = 4  # tokens
SAMPLE_CHARS = 300
PROMPT = (
    "Write a very long novel about a lighthouse keeper and her brother, chapter after chapter,"
    " with new people and places in each."
)


@dataclass(frozen=True, slots=True)
class Spec:
    """Lengths in tokens. One that loops says little, so tokens are drawn, by a fixed seed."""

    model: str = "smollm2-135m"
    num_tokens: int = 20_000
    every: int = 1_000
    window: int = 1_024
    num_sinks: int = 4
    temperature: float = 1.0  # the default model repeats itself at less, and writes noise at more
    top_p: float = 0.95
    frequency_penalty: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Interval:
    """What became of `every` tokens, up to the `end`th."""

    end: int
    num_blocks: int  # that the sequence held then
    mean_logprob: float
    repeated: float  # share of its 4-grams that were in it before
    text: str  # its last words


def repeated_share(tokens: Sequence[int]) -> float:
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


class Writing:
    """One text under way: looks at its worker whenever tokens have come."""

    def __init__(self, worker: LoneWorker, tokenizer: Tokenizer, every: int) -> None:
        self.intervals: list[Interval] = []
        self._worker = worker
        self._tokenizer = tokenizer
        self._every = every
        self.most_blocks = 0

    def look(self, answer: Generated) -> None:
        seqs = self._worker.node.core.seqs.values()
        held = [sum(block != NO_BLOCK for block in seq.block_ids) for seq in seqs]
        count = len(answer.tokens)
        if not held:  # it has just ended
            held = [self.intervals[-1].num_blocks if self.intervals else 0]
        self.most_blocks = max(self.most_blocks, *held)
        end = (len(self.intervals) + 1) * self._every
        if count < end:
            return
        tokens = answer.tokens[end - self._every : end]
        logprobs = [each.logprob for each in answer.logprobs[end - self._every : end]]
        self.intervals.append(
            Interval(
                end=end,
                num_blocks=held[0],
                mean_logprob=round(sum(logprobs) / len(logprobs), 4),
                repeated=round(repeated_share(tokens), 4),
                text=" ".join(self._tokenizer.decode(tokens).split())[-SAMPLE_CHARS:],
            )
        )


def write(
    spec: Spec, window: int, num_sinks: int, on_tokens: Callable[[int], None]
) -> dict[str, Any]:
    """One text. Without a window it ends with the model's context."""
    overrides = {
        "model.name": spec.model,
        "model.device": "cpu",
        "engine.block_size": BLOCK_SIZE,
        "engine.window": window,
        "engine.sinks": num_sinks,
        "engine.threads": 2,
    }
    plain = prepare_model(load_config(None, {"model.name": spec.model}), 1, lambda _: None)
    tokenizer = Tokenizer(plain.path)
    prompt = tokenizer.chat_prompt([{"role": "user", "content": PROMPT}]).tokens
    length = len(prompt) + spec.num_tokens + 1
    if not window:
        length = min(length, plain.config.max_position_embeddings)
    overrides["engine.max_model_len"] = length
    overrides["engine.num_blocks"] = -(-length // BLOCK_SIZE) + 2
    config = load_config(None, overrides)
    model = prepare_model(config, 1, lambda _: None)
    sampling = SamplingParams(
        max_tokens=length - len(prompt) - 1,
        temperature=spec.temperature,
        top_p=spec.top_p,
        frequency_penalty=spec.frequency_penalty,
        seed=spec.seed,
        logprobs=0,
        logit_bias=dict.fromkeys(tokenizer.eos_token_ids, -100.0),  # the text has no end
    )
    with LoneWorker(config, model) as worker:
        writing = Writing(worker, tokenizer, spec.every)

        def on_step(answers: list[Generated]) -> None:
            writing.look(answers[0])
            on_tokens(len(answers[0].tokens))

        answer = worker.generate([prompt], sampling, on_step=on_step)[0]
        return {
            "window": window,
            "num_sinks": num_sinks,
            "num_tokens": len(answer.tokens),
            "most_blocks": writing.most_blocks,
            "pool_blocks": worker.info.num_blocks,
            "notices": list(worker.notices),
            "intervals": [asdict(interval) for interval in writing.intervals],
        }


def runs_of(spec: Spec) -> dict[str, tuple[int, int]]:
    return {
        f"window {spec.window:,}, {spec.num_sinks} sinks": (spec.window, spec.num_sinks),
        f"window {spec.window:,}, no sinks": (spec.window, 0),
        "no window": (0, 0),
    }


def results_table(spec: Spec, results: dict[str, dict[str, Any]]) -> Table:
    table = number_table(
        *("tokens", *results),
        title="blocks held | mean log-probability | share of 4-grams that were there before",
        caption=f"of each {spec.every:,} tokens; temperature {spec.temperature:g}, top_p"
        f" {spec.top_p:g}, frequency_penalty {spec.frequency_penalty:g}",
    )
    for index in range(spec.num_tokens // spec.every):
        cells = []
        for result in results.values():
            if index >= len(result["intervals"]):
                cells.append("-")
                continue
            row = result["intervals"][index]
            share = f"{100 * row['repeated']:.1f} %"
            cells.append(f"{row['num_blocks']} | {row['mean_logprob']:.3f} | {share}")
        table.add_row(f"{(index + 1) * spec.every:,}", *cells)
    return table


def show_text(console: Console, spec: Spec, results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        intervals = result["intervals"]
        console.print(f"\n{name}: {result['num_tokens']:,} tokens, at most"
                      f" {result['most_blocks']} blocks at a time", style="bold")  # fmt: skip
        for row in intervals[-1 :: -max(1, len(intervals) // 5)][::-1]:
            console.print(f"[{row['end']:,}] ... {row['text']}", markup=False, highlight=False)


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--tokens", "num_tokens", type=click.IntRange(10), default=20_000, show_default=True)
@click.option("--every", type=click.IntRange(GRAM), default=1_000, show_default=True)
@click.option("--window", type=click.IntRange(1), default=1_024, show_default=True)
@click.option("--sinks", "num_sinks", type=click.IntRange(0), default=4, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True)
@click.option(
    "--frequency-penalty",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Of tokens that the window sees.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--only", type=click.IntRange(1, 3), default=3, help="The first so many of the three."
)
@json_option(DEFAULT_JSON)
def main(only: int, json_path: Path, **options: Any) -> None:
    """Write the texts, and tell what became of them."""
    spec = Spec(**options)
    console = make_console()
    results: dict[str, dict[str, Any]] = {}
    with Progress(console=console) as progress:
        for name, (window, num_sinks) in list(runs_of(spec).items())[:only]:
            task = progress.add_task(name, total=spec.num_tokens)
            results[name] = write(
                spec, window, num_sinks, lambda n, task=task: progress.update(task, completed=n)
            )
            progress.update(task, completed=results[name]["num_tokens"])
    console.print(results_table(spec, results))
    show_text(console, spec, results)
    for notice in {line for result in results.values() for line in result["notices"]}:
        console.print(notice, style="yellow", markup=False)
    write_json(json_path, {"spec": asdict(spec), "runs": results})


if __name__ == "__main__":
    main()
