"""What penalties cost in a decode step on a CPU, and what they and `logprobs` cost others.

`python -m benchmarks.engine.penalties`: the same sequences by turns: none penalized, all, one of
them, and one that asks for log-probabilities. Contexts are random tokens, of which more differ than
in texts; their KV is nothing but zeros, and all sequences read the same but for their last block,
which costs no less. The model takes positions that it was not trained for. Times are the CPU's, of
one thread, so that what else the machine does matters less. Ratios are to the step of plain
sequences beside each; above 0.98 is nothing that can be measured. What a penalty takes is measured
by itself too: to count a token, and to draw one with counts rather than without.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import process_time

import click
import numpy as np
import torch

from benchmarks.report import json_option, make_console, number_table, write_json
from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.model.sampling.counts import counts_of
from kvrelay.engine.model.sampling.sampler import DRAW, draw_of
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step

DEFAULT_JSON = Path(__file__).parents[1] / "results" / "penalties.json"
BLOCK_SIZE, MAX_SEQS = 16, 8
PLAIN = SamplingParams(temperature=0.0, max_tokens=1 << 20)
PENALIZED, LOGPROBS = replace(PLAIN, repetition_penalty=1.05), replace(PLAIN, logprobs=0)


@contextmanager
def longer(model_dir: Path, most: int) -> Iterator[Path]:
    """A copy of the model that takes contexts of up to `most` tokens."""
    with tempfile.TemporaryDirectory() as folder:
        for path in model_dir.iterdir():
            (Path(folder) / path.name).symlink_to(path.resolve())
        config = json.loads((model_dir / "config.json").read_text("utf-8"))
        (Path(folder) / "config.json").unlink()
        (Path(folder) / "config.json").write_text(
            json.dumps(config | {"max_position_embeddings": most})
        )
        yield Path(folder)


def make_seqs(
    sampling: list[SamplingParams], context: int, vocab: int, first_own: int
) -> list[ScheduledSeq]:
    """Decodes at the begin of a block; the blocks before it are shared."""
    draw, seqs = random.Random(context), list[ScheduledSeq]()
    shared = list(range(context // BLOCK_SIZE))
    for row, each in enumerate(sampling):
        tokens = draw.choices(range(3, vocab), k=context + 1)
        blocks = [*shared, first_own + row]
        seqs.append(
            ScheduledSeq(f"r{row}", tokens[-1:], context, blocks, True, each, tokens, context)
        )
    return seqs


class Turns:
    """Sequences of one kind, a step at a time. Once their block is full they begin it again."""

    def __init__(self, runner: ModelRunner, seqs: list[ScheduledSeq]) -> None:
        self._runner, self._seqs, self._begin = runner, seqs, seqs[0].start

    def step_s(self, passes: int) -> float:
        """CPU seconds of a pass, in a step of `passes`."""
        if self._seqs[0].start + passes >= self._begin + BLOCK_SIZE:
            self._again()
        began = process_time()
        done = self._runner.execute(Step(0, self._seqs, repeats=passes))
        elapsed_s = process_time() - began
        count = 0
        for seq, each in zip(self._seqs, done.sampled, strict=True):
            assert each is not None
            seq.context += [each.token, *each.more]
            seq.tokens, count = seq.context[-1:], 1 + len(each.more)
            seq.start += count
        return elapsed_s / count

    def _again(self) -> None:
        for seq in self._seqs:
            del seq.context[self._begin + 1 :]
            seq.start, seq.tokens = self._begin, seq.context[-1:]
        self._runner.execute(Step(0, self._seqs))  # counts what is in the context, once


def compared(
    runner: ModelRunner, context: int, count: int, passes: int, rounds: int
) -> dict[str, float]:
    """Milliseconds of a plain pass, and ratios."""
    kinds = {"plain": [PLAIN] * count, "all penalized": [PENALIZED] * count}
    if count > 1:
        kinds["one penalized"] = [PENALIZED] + [PLAIN] * (count - 1)
        kinds["one with logprobs"] = [LOGPROBS] + [PLAIN] * (count - 1)
    first_own, vocab = context // BLOCK_SIZE, runner.config.vocab_size
    turns = {
        name: Turns(runner, make_seqs(each, context, vocab, first_own))
        for name, each in kinds.items()
    }
    ratios: dict[str, list[float]] = {name: [] for name in kinds}
    took: list[float] = []
    for each in turns.values():
        each.step_s(passes)
    for number in range(rounds):
        for name in list(kinds)[1:]:
            pair = ("plain", name) if number % 2 else (name, "plain")
            seconds = {each: turns[each].step_s(passes) for each in pair}
            ratios[name].append(seconds["plain"] / seconds[name])
            took.append(seconds["plain"])
    found = {name: round(statistics.median(each), 3) for name, each in ratios.items() if each}
    return {"ms": round(1e3 * statistics.median(took), 2), **found}


def own_s(context: int, vocab: int) -> float:
    """What one token of one penalized sequence takes more than a plain one."""
    library, repeats = kernels.load(default_cache_dir()), 200
    (seq,) = make_seqs([PENALIZED], context, vocab, 0)
    logits, token = torch.randn(1, vocab), np.zeros(1, np.int64)
    draws = np.array([draw_of(seq)] * 2, DRAW)
    draws["counts"][0] = counts_of(seq, 0).address

    def drawing_s(row: int) -> float:
        began, at = process_time(), draws[row : row + 1].ctypes.data
        for _ in range(repeats):
            library.kvr_draw(logits.data_ptr(), 1, vocab, at, token.ctypes.data, 1)
        return process_time() - began

    took_s = min(drawing_s(0) for _ in range(5)) - min(drawing_s(1) for _ in range(5))
    began = process_time()
    for number in range(repeats):
        seq.context.append(number)
        counts_of(seq, 0)
    return (took_s + process_time() - began) / repeats


@click.command()
@click.option("--contexts", default="1024,8192,65536", show_default=True)
@click.option("--batches", default="1,8", show_default=True, help="At most 8.")
@click.option("--passes", default="1,7", show_default=True, help="In a step, at most 14.")
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@json_option(DEFAULT_JSON)
def main(contexts: str, batches: str, passes: str, rounds: int, json_path: Path) -> None:
    """Compare, and print a table."""
    console = make_console()
    lengths, sizes, numbers = (
        [int(each) for each in option.split(",")] for option in (contexts, batches, passes)
    )
    most = max(lengths) + 2 * BLOCK_SIZE
    rows: dict[str, dict[str, float]] = {}
    with longer(resolve_model(DEFAULT_MODEL, progress=console.print), most) as model_dir:
        num_blocks = most // BLOCK_SIZE + MAX_SEQS
        engine = EngineSection(num_blocks=num_blocks, max_model_len=most, threads=1)
        runner = ModelRunner(model_dir, ModelSection(device="cpu"), engine.sized(gpu=False))
        for context in lengths:
            for count in sizes:
                for number in numbers:
                    name = f"{count} x {context:,}, {number} passes a step"
                    rows[name] = compared(runner, context, count, number, rounds)
                    console.print(name, rows[name])
    own = {context: round(1e6 * own_s(context, runner.config.vocab_size)) for context in lengths}
    columns = ("ms", "all penalized", "one penalized", "one with logprobs")
    table = number_table(
        *("", "a plain pass, ms", *columns[1:]),
        title="Ratios to plain sequences",
        caption=f"a penalty by itself, us a token, by context: {own}",
    )
    for name, row in rows.items():
        table.add_row(name, *(str(row.get(each, "-")) for each in columns))
    console.print(table)
    write_json(json_path, {"rounds": rounds, "rows": rows, "penalty_us": own})


if __name__ == "__main__":
    main()
