"""Quest (`kv = "quest"`): what reading a part of the context saves a decode, and what it costs.

`python -m benchmarks.kv.quest speed`: decode steps of some sequences with long contexts of their
own, each of random keys and values: exact and by Quest in turns, in one process. With one thread it
is CPU time, which others on the machine change little. A model whose positions end before is given
more, as only time is measured.

`python -m benchmarks.kv.quest quality`: prose and code, of which the last tokens are read as if
they were outputs, and in `--turns`: prompts and outputs in turns, so that errors of earlier outputs
are in the context of later ones. Compared with exact attention by the divergence of what would be
said next, and how often the likeliest token is another one.

`python -m benchmarks.kv.quest needle`: a number is hidden in prose, and asked for at its end.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.engine.fp8 import BLOCK_SIZE, _with_rows
from benchmarks.kv.approximate import TEXTS
from benchmarks.report import json_option, make_console, number_table, write_json
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.kv.block_table import BlockTable
from kvrelay.engine.model.batch import Batch, Limits
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model
from kvrelay.engine.model.quest import Quest
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step

GREEDY = SamplingParams(temperature=0.0)
BUDGETS = (0.5, 0.25, 0.125)
LEAST_RATIO = 1.5  # that a step has to be faster, 8 sequences at 32,768 tokens
CHUNK = 512  # tokens of a prompt that are computed at a time
FILL_BLOCKS = 64  # random numbers, which are repeated
NEEDLE = "The secret number of the blue house is {}. Remember it."
QUESTION = (
    "\n\nQuestion: What is the secret number of the blue house?\nAnswer: The secret number of the"
)
QUESTION += " blue house is"


@click.group()
def main() -> None:
    """Quest attention: speed and quality."""


@contextmanager
def with_positions(model: Path, most: int) -> Iterator[Path]:
    """The model, or a folder of links to it whose config has so many positions."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["max_position_embeddings"] >= most:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        for path in model.iterdir():
            if path.name != "config.json":
                (Path(folder) / path.name).symlink_to(path.resolve())
        config["max_position_embeddings"] = most
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(folder)


class Contexts:
    """Sequences over one runner, each with rows of blocks of its own: in groups with a window only
    those at the end are read, and they are the same for all of its rows before."""

    def __init__(self, model: Path, num_seqs: int, longest: int, **settings: Any) -> None:
        sections = ModelSection(dtype="bfloat16", device="cpu", **_model_settings(settings))
        fields = {"block_size": BLOCK_SIZE, "quest_budget": BUDGETS[0], **settings}
        spec = ModelRunner(model, sections, _sized(fields, 1)).kv_spec
        self.num_rows = -(-longest // BLOCK_SIZE)
        tables, first = list[BlockTable](), 0
        for _ in range(num_seqs):
            columns = []
            for window in spec.windows:
                count = self.num_rows  # with a window: those that a chunk's queries read
                if window:
                    count = min(count, -(-(window + CHUNK) // BLOCK_SIZE) + 1)
                columns.append([first + row % count for row in range(self.num_rows)])
                first += count
            entries = [block for row in zip(*columns, strict=True) for block in row]
            tables.append(BlockTable.of(entries, spec.num_groups))
        fields |= {"max_model_len": longest, "guard": False}
        self.runner = ModelRunner(model, sections, _sized(fields, first))
        self.tables = tables
        self.clock = time.process_time if settings.get("threads") == 1 else time.perf_counter

    def fill(self) -> None:
        """With numbers like those of keys and values, but random."""
        pool = self.runner.kv_pool
        some = torch.randn(min(FILL_BLOCKS, len(pool)), *pool.shape[1:]).to(pool.dtype)
        for at in range(0, len(pool), len(some)):
            pool[at : at + len(some)] = some[: len(pool) - at]

    def use(self, budget: float) -> None:
        """From now on such queries read so much."""
        quest = Quest(budget, 0)
        decode = self.runner._decode
        assert decode is not None
        ops: Any = self.runner._own_ops
        for attention in (ops._attention, decode._attention):
            attention._quest.share, attention._quest.least = quest.share, quest.least_tokens

    def share(
        self, index: int, tokens: Sequence[int], start: int, outputs_at: int | None
    ) -> ScheduledSeq:
        """The next tokens of a sequence. outputs_at: where queries choose pages from; None: not."""
        return ScheduledSeq(
            f"sequence {index}",
            [*tokens],
            start,
            self.tables[index],
            True,
            GREEDY,
            [*tokens],
            start + len(tokens) if outputs_at is None else outputs_at,
            reads_pages=outputs_at is not None,
        )

    def read(self, tokens: Sequence[int], start: int, outputs_at: int | None) -> torch.Tensor:
        """Log-probabilities [num_tokens, vocabulary] after each of some tokens of sequence 0."""
        runner = self.runner
        spec, config = runner.kv_spec, runner.config
        limits = Limits(
            *(len(runner.kv_pool), BLOCK_SIZE, runner.max_model_len, config.vocab_size),
            *(config.max_window, config.num_sinks, False),
            *(spec.windows if spec.num_groups > 1 else (),),
        )
        share = self.share(0, tokens, start, outputs_at)
        batch = Batch.from_step(Step(0, [share]), limits, runner.device)
        with torch.inference_mode():
            rows = _with_rows(batch, torch.arange(len(tokens)))
            return runner._decoder.forward(rows).float().log_softmax(-1)

    def feed(self, tokens: Sequence[int], start: int = 0) -> None:
        """Computes them, and no logits but the last ones."""
        for at in range(0, len(tokens), CHUNK):
            share = self.share(0, tokens[at : at + CHUNK], start + at, None)
            done = self.runner.execute(Step(0, [share]))
            assert not done.has_faults, done

    def answer(self, first: int, start: int, count: int, *, by_quest: bool) -> list[int]:
        """The greedy tokens after `first`, which is at position `start`."""
        tokens = [first]
        while len(tokens) < count:
            at = start + len(tokens) - 1
            share = self.share(0, tokens[-1:], at, start if by_quest else None)
            (sampled,) = self.runner.execute(Step(0, [share])).sampled
            assert sampled is not None
            tokens.append(sampled.token)
        return tokens


def _model_settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: settings.pop(name) for name in ("quantization",) if name in settings}


def _sized(fields: dict[str, Any], num_blocks: int) -> EngineSection:
    return EngineSection(num_blocks=num_blocks, **fields).sized(gpu=False)


def step_s(contexts: Contexts, num_seqs: int, at: int, *, by_quest: bool) -> float:
    shares = [contexts.share(i, [i + 1], at, at if by_quest else None) for i in range(num_seqs)]
    began = contexts.clock()
    done = contexts.runner.execute(Step(0, shares))
    seconds = contexts.clock() - began
    assert not done.has_faults, done
    return seconds


@main.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True)
@click.option("--context", type=click.IntRange(1024), default=32_768, show_default=True)
@click.option("--seqs", type=click.IntRange(1), default=8, show_default=True)
@click.option("--steps", type=click.IntRange(3), default=15, show_default=True)
@click.option("--threads", type=click.IntRange(0), default=1, help="0: all cores.")
@click.option("--budget", "budgets", multiple=True, type=float, default=BUDGETS)
@json_option()
def speed(
    model: str,
    context: int,
    seqs: int,
    steps: int,
    threads: int,
    budgets: tuple[float, ...],
    json_path: Path | None,
) -> None:
    """Times a decode step, exact and by Quest."""
    console = make_console()
    path = resolve_model(model, progress=console.print)
    table = number_table(
        *("reads", "exact, ms", "Quest, ms", "ratio, median", "least of pairs", "most"),
        title=f"{model}, {seqs} sequences of {context:,} tokens, {steps} pairs, {threads} threads",
        caption=f"wanted: {LEAST_RATIO}; the first two layers read all",
    )
    facts: dict[str, Any] = {}
    with with_positions(path, context) as folder:
        contexts = Contexts(folder, seqs, context, threads=threads)
        contexts.fill()
        for budget in budgets:
            contexts.use(budget)
            pairs = list[tuple[float, float]]()
            for number in range(steps + 1):
                ways = (False, True) if number % 2 else (True, False)
                found = {way: step_s(contexts, seqs, context - 1, by_quest=way) for way in ways}
                if number:  # before, pages and bounds were made
                    pairs.append((found[False], found[True]))
            ratios = sorted(exact / quest for exact, quest in pairs)
            exact, quest = (statistics.median(each) for each in zip(*pairs, strict=True))
            shown = f"{1e3 * exact:.1f}", f"{1e3 * quest:.1f}", f"{statistics.median(ratios):.2f}"
            table.add_row(f"{budget:g}", *shown, f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}")
            facts[f"{budget:g}"] = {"exact_s": exact, "quest_s": quest, "ratios": ratios}
    console.print(table)
    write_json(json_path, {"model": model, "context": context, "seqs": seqs, "facts": facts})


@dataclass(slots=True)
class Score:
    """What one budget did, token by token."""

    divergence: list[float] = field(default_factory=list)  # KL from exact attention, nats
    same: list[bool] = field(default_factory=list)  # the likeliest token
    change: list[float] = field(default_factory=list)  # log-probability of the next token lost

    def add(self, exact: torch.Tensor, found: torch.Tensor, following: torch.Tensor) -> None:
        self.divergence += (exact.exp() * (exact - found)).sum(-1).tolist()
        self.same += (exact.argmax(-1) == found.argmax(-1)).tolist()
        both = exact[: len(following)] - found[: len(following)]
        self.change += both.gather(1, following[:, None])[:, 0].tolist()

    @property
    def facts(self) -> dict[str, float]:
        return {
            "num_tokens": len(self.same),
            "divergence": statistics.fmean(self.divergence),
            "change": math.expm1(statistics.fmean(self.change)),
            "same": statistics.fmean(self.same),
        }


def spans_of(context: int, outputs: int, turns: int) -> list[tuple[int, int]]:
    """Where outputs are, `outputs` tokens of the context in `turns` parts of equal size."""
    each, part = outputs // turns, context // turns
    return [(end - each, end) for end in range(part, part * turns + 1, part)]


@main.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True)
@click.option("--context", type=click.IntRange(1024), default=8192, show_default=True)
@click.option("--outputs", type=click.IntRange(16), default=1024, show_default=True)
@click.option("--turns", type=click.IntRange(1), default=1, show_default=True)
@click.option("--budget", "budgets", multiple=True, type=float, default=BUDGETS)
@click.option("--text", "texts", multiple=True, default=[*TEXTS])
@json_option()
def quality(
    model: str,
    context: int,
    outputs: int,
    turns: int,
    budgets: tuple[float, ...],
    texts: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """What reading a part of the context changes."""
    console = make_console()
    path = resolve_model(model, progress=console.print)
    tokenizer, contexts = Tokenizer(path), Contexts(path, 1, context)
    spans, facts = spans_of(context, outputs, turns), dict[str, Any]()
    for name in texts:
        tokens = tokenizer.encode(TEXTS[name]())[:context]
        if len(tokens) < context:
            raise click.ClickException(f"the {name} has only {len(tokens):,} tokens")
        exact: list[torch.Tensor] = []
        for budget in (1.0, *budgets):
            contexts.use(budget)
            score, at = Score(), 0
            for number, (first, end) in enumerate(spans):
                if budget == 1.0 or turns > 1:  # else the prompt's KV is there
                    contexts.feed(tokens[at:first], at)
                for start in range(first, end, 256):
                    part = tokens[start : min(start + 256, end)]
                    found = contexts.read(part, start, None if budget == 1.0 else first)
                    if budget == 1.0:
                        exact.append(found)
                        continue
                    following = torch.tensor(tokens[start + 1 : start + 1 + len(part)])
                    base = exact[number * -(-(end - first) // 256) + (start - first) // 256]
                    score.add(base, found, following)
                at = end
            if budget != 1.0:
                facts[f"{name}, {budget:g}"] = score.facts
    table = number_table(
        *("text, reads", "tokens", "KL", "perplexity", "same likeliest token"),
        title=f"{model}, {context:,} tokens, {outputs:,} of them outputs in {turns} turns",
        caption="against exact attention, bfloat16",
    )
    for name, row in facts.items():
        shown = f"{row['divergence']:.4f}", f"{row['change']:+.2%}", f"{row['same']:.1%}"
        table.add_row(name, f"{row['num_tokens']:,}", *shown)
    console.print(table)
    write_json(json_path, {"model": model, "context": context, "turns": turns, "facts": facts})


@main.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True)
@click.option("--context", type=click.IntRange(512), default=8192, show_default=True)
@click.option("--times", type=click.IntRange(1), default=10, show_default=True)
@click.option("--budget", "budgets", multiple=True, type=float, default=BUDGETS)
@json_option()
def needle(
    model: str, context: int, times: int, budgets: tuple[float, ...], json_path: Path | None
) -> None:
    """How often the hidden number is found, exact and by Quest."""
    console = make_console()
    path = resolve_model(model, progress=console.print)
    tokenizer, contexts = Tokenizer(path), Contexts(path, 1, context)
    prose, draw = tokenizer.encode(TEXTS["prose"]()), random.Random(7)
    names = ["exact", *(f"{budget:g}" for budget in budgets)]
    found, same = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for number in range(times):
        secret = " ".join(str(draw.randrange(10)) for _ in range(7))
        hidden, asked = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (NEEDLE.format(secret), QUESTION)
        )
        room = context - len(hidden) - len(asked) - 32
        at = max(1, int(room * (number + 0.5) / times))
        prompt = [*prose[:at], *hidden, *prose[at:room], *asked]
        contexts.feed(prompt[:-1])
        contexts.use(budgets[0])
        last = contexts.read(prompt[-1:], len(prompt) - 1, None)
        first, answers = int(last.argmax()), dict[str, list[int]]()
        for name in names:
            if name != "exact":
                contexts.use(float(name))
            answer = contexts.answer(first, len(prompt), 24, by_quest=name != "exact")
            answers[name] = answer
            found[name] += secret in tokenizer.decode(answer)
            same[name] += answer == answers["exact"]
    table = number_table(
        *("reads", "found", "the exact answer"),
        title=f"{model}, {times} prompts of {context:,} tokens, a number of 7 digits in each",
    )
    for name in names:
        table.add_row(name, f"{found[name]} of {times}", f"{same[name]} of {times}")
    console.print(table)
    write_json(json_path, {"model": model, "context": context, "found": found, "same": same})


if __name__ == "__main__":
    main()
