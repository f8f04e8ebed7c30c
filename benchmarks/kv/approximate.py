"""What KV in four bits (KIVI-4) costs and gains: `kv = "approximate"`.

`python -m benchmarks.kv.approximate quality`: prose and code go through the engine's paged KV in
turns. After each turn its blocks are quantised, as if the session had been parked and came back, so
that the next one reads them in four bits and only its own exact. With `--turn 16` that is each
block by itself, the worst that can happen. Beside it KV in float8_e4m3, which ships. Both are
compared with exact KV: the divergence of what would be said next, how often the likeliest token is
another one, and perplexity. Tokens of a first turn read nothing that was quantised, and are left
out.

`python -m benchmarks.kv.approximate room`: sessions in a GiB, by the slots of a worker's tiers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.progress import Progress

from benchmarks.engine.fp8 import BLOCK_SIZE, ROOT, _with_rows, pieces_of, prose
from benchmarks.report import json_option, make_console, number_table, write_json
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.model.batch import Batch, Limits
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step
from kvrelay.kvtransfer.codec import MORE_BYTES
from kvrelay.kvtransfer.kivi import Quantizer
from kvrelay.kvtransfer.movers.pool import pool_bytes
from kvrelay.kvtransfer.store import slot_bytes
from kvrelay.worker.kv_plan import model_config, plan_kv, plan_tiers

GIB = 1 << 30
KIVI, FP8 = "KIVI-4", "float8_e4m3"
LENGTHS = {"prose": 6144, "code": 2048}
LIMITS = {"divergence": 0.006, "change": 0.007, "same": 0.94}  # for KIVI-4


@click.group()
def main() -> None:
    """KV in four bits a number."""


def code() -> str:
    """Modules of this repository, in the order of their names."""
    paths = sorted((ROOT / "engine").glob("*.py"))
    return "\n\n".join(path.read_text(encoding="utf-8") for path in paths)


TEXTS: dict[str, Callable[[], str]] = {"prose": prose, "code": code}


@dataclass(slots=True)
class Kind:
    """What one kind of KV did, token by token."""

    divergence: list[float] = field(default_factory=list)  # KL from exact KV, nats
    same: list[bool] = field(default_factory=list)  # the likeliest token
    logprobs: list[float] = field(default_factory=list)
    base_logprobs: list[float] = field(default_factory=list)  # with exact KV

    def add(self, exact: torch.Tensor, found: torch.Tensor, following: torch.Tensor) -> None:
        """Log-probabilities `[num_tokens, vocabulary]`, and the tokens that did follow."""
        self.divergence += (exact.exp() * (exact - found)).sum(-1).tolist()
        self.same += (exact.argmax(-1) == found.argmax(-1)).tolist()
        count = len(following)
        for logs, into in ((exact, self.base_logprobs), (found, self.logprobs)):
            into += logs[:count].gather(1, following[:, None])[:, 0].tolist()

    @property
    def facts(self) -> dict[str, float]:
        change = sum(self.base_logprobs) - sum(self.logprobs)
        return {
            "num_tokens": len(self.same),
            "divergence": sum(self.divergence) / len(self.divergence),
            "perplexity": math.exp(-sum(self.logprobs) / len(self.logprobs)),
            "change": math.expm1(change / len(self.logprobs)),
            "same": sum(self.same) / len(self.same),
        }


class Reader:
    """Reads texts turn by turn."""

    def __init__(self, model: Path, num_rows: int, kv_dtype: str = "auto") -> None:
        sections = ModelSection(dtype="bfloat16", device="cpu")
        fields = {"kv_dtype": kv_dtype, "block_size": BLOCK_SIZE}
        groups = ModelRunner(model, sections, _sized(fields, 1)).kv_spec.num_groups
        self._runner = ModelRunner(model, sections, _sized(fields, num_rows * groups))
        runner, spec = self._runner, self._runner.kv_spec
        self._groups = groups
        self._blocks = pool_bytes(runner.kv_pool)
        self._quantizer = Quantizer(spec, spec.num_kv_heads) if kv_dtype == "auto" else None
        self._limits = Limits(
            *(len(runner.kv_pool), BLOCK_SIZE, runner.max_model_len, runner.config.vocab_size),
            *(runner.config.max_window, runner.config.num_sinks, False),
            *(spec.windows if groups > 1 else (), spec.num_state_groups),
        )

    @property
    def bytes_per_block(self) -> int:
        return int(self._blocks.shape[1])

    def read(
        self, piece: Sequence[int], turn: int, *, quantised: bool = False
    ) -> Iterator[torch.Tensor]:
        """Log-probabilities after each token, turn by turn. `quantised`: blocks are after it."""
        table = list(range(-(-len(piece) // BLOCK_SIZE) * self._groups))
        sampling = SamplingParams(temperature=0.0)
        for start in range(0, len(piece), turn):
            tokens = list(piece[start : start + turn])
            share = ScheduledSeq("text", tokens, start, table, True, sampling, tokens, len(piece))
            batch = Batch.from_step(Step(0, [share]), self._limits, self._runner.device)
            with torch.inference_mode():
                rows = _with_rows(batch, torch.arange(len(tokens)))
                yield self._runner._decoder.forward(rows).float().log_softmax(-1)
            if quantised:
                first, end = start // BLOCK_SIZE, (start + len(tokens)) // BLOCK_SIZE
                self.quantise(range(first * self._groups, end * self._groups))

    def quantise(self, blocks: Sequence[int]) -> None:
        quantizer = self._quantizer
        assert quantizer is not None
        coded = self._blocks[0].copy()[: quantizer.num_bytes]
        for block in blocks:
            assert quantizer.encode(self._blocks[block], coded), block
            quantizer.decode(coded, self._blocks[block])


def _sized(fields: dict[str, Any], num_blocks: int) -> EngineSection:
    return EngineSection(num_blocks=num_blocks, **fields).sized(gpu=False)


def compare(
    model: Path, texts: dict[str, list[list[int]]], turn: int, progress: Progress
) -> dict[str, dict[str, dict[str, float]]]:
    """Facts by text and kind of KV. `texts`: the pieces of each, in tokens."""
    num_rows = max(-(-len(p) // BLOCK_SIZE) for pieces in texts.values() for p in pieces)
    # A pool each, read in turns: so the logits of one turn are kept.
    exact, kivi = Reader(model, num_rows), Reader(model, num_rows)
    float8 = Reader(model, num_rows, FP8)
    facts = {}
    for name, pieces in texts.items():
        kinds = {KIVI: Kind(), FP8: Kind()}
        total = sum(-(-len(piece) // turn) for piece in pieces)
        task = progress.add_task(name, total=total)
        for piece in pieces:
            read = exact.read(piece, turn), kivi.read(piece, turn, quantised=True)
            ways = zip(*read, float8.read(piece, turn), strict=True)
            for index, (base, *others) in enumerate(ways):
                start = index * turn + 1
                following = torch.tensor(piece[start : start + len(base)])
                for kind, found in zip(kinds.values(), others if index else (), strict=False):
                    kind.add(base, found, following)
                progress.advance(task)
        facts[name] = {kind: each.facts for kind, each in kinds.items()}
    return facts


@main.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True)
@click.option("--context", type=click.IntRange(32), default=2048, show_default=True)
@click.option("--turn", type=click.IntRange(16), default=256, show_default=True)
@click.option("--share", type=click.FloatRange(0.01, 1.0), default=1.0, help="Of the texts.")
@json_option()
def quality(model: str, context: int, turn: int, share: float, json_path: Path | None) -> None:
    """What it costs, beside KV in float8_e4m3."""
    if turn % BLOCK_SIZE or context <= turn:
        raise click.UsageError(f"--turn {turn}: blocks of {BLOCK_SIZE}, less than {context} tokens")
    console = make_console()
    path = resolve_model(model, progress=console.print)
    tokenizer, texts = Tokenizer(path), {}
    for name, length in LENGTHS.items():
        tokens = tokenizer.encode(TEXTS[name]())
        num_pieces = -(-int(length * share) // (context - turn))
        if len(tokens) < num_pieces * context:
            raise click.ClickException(f"the {name} has only {len(tokens):,} tokens")
        texts[name] = pieces_of(tokens[: num_pieces * context], context)
    with Progress(console=console) as progress:
        facts = compare(path, texts, turn, progress)
    table = number_table(
        *("text", "KV", "tokens", "KL", "perplexity", "change", "same likeliest token"),
        title=f"{model}, pieces of {context:,} tokens, turns of {turn}",
        caption=f"against exact KV in bfloat16. Wanted of {KIVI}: KL {LIMITS['divergence']},"
        f" {LIMITS['change']:+.1%}, {LIMITS['same']:.0%}",
    )
    for text, kinds in facts.items():
        for kind, row in kinds.items():
            shown = f"{row['divergence']:.5f}", f"{row['perplexity']:.3f}", f"{row['change']:+.3%}"
            table.add_row(text, kind, f"{row['num_tokens']:,}", *shown, f"{row['same']:.2%}")
    console.print(table)
    write_json(json_path, {"model": model, "context": context, "turn": turn, "facts": facts})


@main.command()
@click.option("--model", "models", multiple=True, default=[DEFAULT_MODEL], show_default=True)
@click.option("--tokens", type=click.IntRange(16), default=4096, show_default=True)
@json_option()
def room(models: tuple[str, ...], tokens: int, json_path: Path | None) -> None:
    """Sessions in a GiB of host memory and of disk, exact and approximate, as a worker plans it."""
    console, found = make_console(), {}
    table = number_table(
        *("model", "exact, host", "in four bits", "ratio", "on disk as it is", "in four bits"),
        title=f"sessions of {tokens:,} tokens in bfloat16, in a GiB",
        caption="on disk a block takes whole pages; bytes of what a next turn reads",
    )
    for model in models:
        config = model_config(resolve_model(model, progress=console.print), EngineSection())
        plan = plan_kv(config, EngineSection().sized(gpu=False), "bfloat16")
        plan = plan_tiers(plan, GIB, GIB, packed_bytes=GIB)
        each = len(plan.windows.kept(tokens))
        on_disk = slot_bytes(MORE_BYTES + plan.packed_block_bytes)
        counts = [plan.num_host_blocks, plan.num_packed_blocks]
        counts += [GIB // plan.disk_slot_bytes, GIB // on_disk]
        exact, packed, *disk = [count // each for count in counts]
        ratio = counts[1] / counts[0]
        shown = f"{exact:,}", f"{packed:,}", f"{ratio:.3f}", *(f"{count:,}" for count in disk)
        table.add_row(model, *shown)
        found[model] = {"blocks": counts, "blocks_of_a_session": each}
    console.print(table)
    write_json(json_path, {"tokens": tokens, "in_a_gib": found})


if __name__ == "__main__":
    main()
