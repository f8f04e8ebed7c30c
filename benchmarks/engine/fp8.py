"""What a KV cache in fewer bits costs: perplexity, tokens that change, and what it saves.

`python -m benchmarks.engine.fp8`: English prose (this project's own documents, without their tables
and code) goes through the engine's paged KV chunk by chunk, and the probability of each token is
taken, with KV in float32, in bfloat16 and in float8_e4m3. Then each kind answers the same prompts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.progress import Progress

from benchmarks.report import json_option, make_console, number_table, write_json
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.prepare import prepare_model
from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.model.batch import Batch, Limits
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step
from kvrelay.lab.bench.engine import EngineSpec, LoneWorker, greedy

ROOT = Path(__file__).parents[2]
DEFAULT_JSON = Path(__file__).parents[1] / "results" / "fp8.json"
BLOCK_SIZE = 16
BASE = "float32"
# KV -> (dtype, kv_dtype) of the engine. On a CPU without bf16 arithmetic only KV differs.
KINDS = {
    BASE: ("float32", "auto"),
    "bfloat16": ("bfloat16", "auto"),
    "float8_e4m3": ("float32", "float8_e4m3"),
}
WANTED = 0.01  # perplexity may rise by so much


@dataclass(frozen=True, slots=True)
class Spec:
    """How long things are, in tokens."""

    num_tokens: int = 6144
    context_len: int = 3072  # the text is read in pieces of this length
    chunk_len: int = 256
    num_prompts: int = 16
    prompt_len: int = 128
    output_len: int = 64


@dataclass(slots=True)
class Score:
    """What one kind of KV did over the whole text."""

    logprobs: list[float]  # for each token but the first of a piece
    best: list[int]  # the likeliest token at each of those places
    bytes_per_token: int

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def prose() -> str:
    """The paragraphs of the documents, in the order of their names."""
    paragraphs = []
    for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for paragraph in re.split(r"\n\s*\n", text):
            joined = re.sub(r"\s+", " ", re.sub(r"[*`]|\]\([^)]*\)|\[", "", paragraph)).strip()
            if len(joined) > 80 and not joined.startswith(("|", "#")):
                paragraphs.append(joined)
    return "\n\n".join(paragraphs)


def pieces_of(tokens: Sequence[int], length: int) -> list[list[int]]:
    return [list(tokens[i : i + length]) for i in range(0, len(tokens), length)]


def score(
    runner: ModelRunner, pieces: list[list[int]], chunk_len: int, on_chunk: Callable[[], None]
) -> Score:
    """Every token of each piece, given those before it. All pieces use the same blocks."""
    limits = Limits(len(runner.kv_pool), BLOCK_SIZE, runner.max_model_len, runner.config.vocab_size)
    found = Score([], [], runner.kv_spec.bytes_per_token)
    for piece in pieces:
        blocks = list(range(-(-len(piece) // BLOCK_SIZE)))
        for start in range(0, len(piece), chunk_len):
            tokens = piece[start : start + chunk_len]
            sampling = SamplingParams(temperature=0.0)
            share = ScheduledSeq("text", tokens, start, blocks, True, sampling, tokens, len(piece))
            batch = Batch.from_step(Step(0, [share]), limits, runner.device)
            rows = torch.arange(len(tokens), device=runner.device)  # all, not the last alone
            with torch.inference_mode():
                logits = runner._decoder.forward(_with_rows(batch, rows))
                following = torch.tensor(piece[start + 1 : start + 1 + len(tokens)])
                logs = logits[: len(following)].log_softmax(-1)
                found.logprobs += logs.gather(1, following.to(logs.device)[:, None])[:, 0].tolist()
                found.best += logs.argmax(-1).tolist()
            on_chunk()
    return found


def _with_rows(batch: Batch, rows: torch.Tensor) -> Batch:
    fields = {name: getattr(batch, name) for name in Batch.__dataclass_fields__}
    return Batch(**(fields | {"sample_rows": rows}))


def same_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two answers have in common from their start."""
    pairs = zip(ours, theirs, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(ours))


def compare(base: Score, other: Score, ours: Any, theirs: Any, output_len: int) -> dict[str, Any]:
    """`theirs`: answers with `other`'s kind of KV, `ours` with the base's."""
    common = [same_length(a, b) for a, b in zip(ours, theirs, strict=True)]
    same = sum(a == b for a, b in zip(base.best, other.best, strict=True))
    return {
        "perplexity": round(other.perplexity, 5),
        "change": round(other.perplexity / base.perplexity - 1, 6),
        "same_likeliest_token": round(same / len(base.best), 5),
        "answers_the_same": sum(n == output_len for n in common),
        "tokens_before_they_part": round(sum(common) / len(common), 2),
        "bytes_per_token": other.bytes_per_token,
        "tokens_in_the_same_bytes": round(base.bytes_per_token / other.bytes_per_token, 3),
    }


def answers(model: str, kind: tuple[str, str], prompts: list[list[int]], spec: Spec) -> Any:
    """Greedy continuations, from a worker as it is served."""
    asked = EngineSpec(
        model=model,
        batches=(len(prompts),),
        input_len=spec.prompt_len,
        output_len=spec.output_len,
        prefills=(),
        dtype=kind[0],
        kv_dtype=kind[1],
        device="cpu",
    )
    config = asked.config()
    ready = prepare_model(config, 1, lambda _: None)
    with LoneWorker(config, ready) as worker:
        return [answer.tokens for answer in worker.generate(prompts, greedy(spec.output_len))]


def measure(model: str, tokens: list[int], spec: Spec, progress: Progress) -> dict[str, Any]:
    pieces = pieces_of(tokens[: spec.num_tokens], spec.context_len)
    prompts = pieces_of(tokens[: spec.num_prompts * spec.prompt_len], spec.prompt_len)
    steps = sum(-(-len(piece) // spec.chunk_len) for piece in pieces)
    task = progress.add_task("", total=len(KINDS) * (steps + 1))
    scores: dict[str, Score] = {}
    given: dict[str, Any] = {}
    for name, kind in KINDS.items():
        progress.update(task, description=f"KV in {name}")
        runner = ModelRunner(
            Path(model),
            ModelSection(dtype=kind[0], device="cpu"),
            EngineSection(
                kv_dtype=kind[1],
                num_blocks=-(-spec.context_len // BLOCK_SIZE),
                block_size=BLOCK_SIZE,
            ).sized(gpu=False),
        )
        for notice in runner.notices:
            progress.console.print(notice)
        scores[name] = score(runner, pieces, spec.chunk_len, lambda: progress.advance(task))
        del runner
        given[name] = answers(model, kind, prompts, spec)
        progress.advance(task)
    rows = {
        name: compare(scores[BASE], scores[name], given[BASE], given[name], spec.output_len)
        for name in KINDS
    }
    return {"num_tokens": len(scores[BASE].logprobs), "num_prompts": len(prompts), "kv": rows}


@click.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True)
@click.option("--tokens", "num_tokens", type=click.IntRange(64), default=6144, show_default=True)
@click.option("--context", "context_len", type=click.IntRange(32), default=3072, show_default=True)
@json_option(DEFAULT_JSON)
def main(model: str, num_tokens: int, context_len: int, json_path: Path) -> None:
    """Measure, and print a table."""
    console = make_console()
    path = resolve_model(model, progress=console.print)
    tokens = Tokenizer(path).encode(prose())
    if len(tokens) < num_tokens:
        raise click.UsageError(f"--tokens {num_tokens}: the documents have {len(tokens):,}")
    spec = Spec(num_tokens=num_tokens, context_len=context_len)
    with Progress(console=console) as progress:
        results = measure(str(path), tokens, spec, progress)
    table = number_table(
        *("KV", "perplexity", "change", "same likeliest token", "same answers"),
        *("part after", "bytes a token", "tokens in the same bytes"),
        title=f"{results['num_tokens']:,} tokens of prose, {results['num_prompts']} greedy answers"
        f" of {spec.output_len} tokens",
        caption=f"wanted: a change of at most {100 * WANTED:.0f} % in float8_e4m3",
    )
    for name, row in results["kv"].items():
        table.add_row(
            name,
            f"{row['perplexity']:.4f}",
            f"{100 * row['change']:+.3f} %",
            f"{100 * row['same_likeliest_token']:.2f} %",
            f"{row['answers_the_same']}",
            f"{row['tokens_before_they_part']:.1f}",
            f"{row['bytes_per_token']:,}",
            f"{row['tokens_in_the_same_bytes']:.2f}",
        )
    console.print(table)
    write_json(json_path, {"model": model, "spec": asdict(spec), **results})


if __name__ == "__main__":
    main()
