"""How long forward passes of the real engine take on this machine.

Life: a runner is built as a worker builds it, every block of its pool is written once (memory that
was never written reads as one page of zeros, from the cache), then each point is run until it has
taken `point_s`, and counts with its median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from kvrelay.cluster.config import Config
from kvrelay.cluster.prepare import PreparedModel
from kvrelay.engine.kv.window import Windows
from kvrelay.engine.model.device import find_device
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.model.step_executor import StepExecutor
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.stats import Role
from kvrelay.engine.step import ScheduledSeq, Step
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.movers.pool import block_bytes
from kvrelay.worker.build import open_runner
from kvrelay.worker.kv_plan import plan_kv
from kvrelay.worker.spec import WorkerSpec

GREEDY = SamplingParams(temperature=0.0)
MIN_REPEATS = 3
MAX_REPEATS = 50


class ProfileError(Exception):
    """The machine cannot be measured; one line for the user."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured. Prompts above the engine's budget of a pass are fed in chunks."""

    prompts: tuple[int, ...] = (1, 16, 32, 64, 128, 256, 384, 512, 1024, 2048)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (32, 256, 512, 1024, 2048)
    point_s: float = 0.3  # at least as long each

    def within(self, max_model_len: int, num_blocks: int, block_size: int) -> Grid:
        """What fits into the model's context and into the pool. Raises ProfileError."""
        longest = min(max_model_len - 1, num_blocks * block_size)
        prompts = tuple(n for n in self.prompts if n <= longest)
        contexts = tuple(n for n in self.contexts if n <= longest)
        if not prompts or not contexts:
            raise ProfileError(
                f"the model's context of {max_model_len} tokens and the pool of {num_blocks} blocks"
                f" hold nothing to measure: expected {min(self.contexts) + 1} tokens or more"
            )
        return Grid(prompts, self.batches, contexts, self.point_s)


SMALL = Grid((1, 32, 128, 256), (1, 4), (32, 128), 0.02)


@contextmanager
def running(config: Config, model: PreparedModel, threads: int) -> Iterator[ModelRunner]:
    """As a worker has it: a ModelRunner, or where a worker has several processes what looks like
    one; they end with the context. Raises ModelError, BuildError."""
    section = config.model
    kind = find_device(section.device).type
    dtype = ModelRunner.default_dtype(kind) if section.dtype == "auto" else section.dtype
    engine = config.engine.sized(gpu=kind == "cuda")
    plan = plan_kv(model.config, engine, dtype, section.quantization)
    sizes = {"num_blocks": plan.num_blocks, "max_model_len": model.max_model_len}
    spec = WorkerSpec(
        cluster="profile",
        worker="profile",
        role=Role.PREFILL,
        epoch=1,
        model_dir=str(model.path),
        model=replace(section, dtype=dtype, device=kind),
        engine=replace(engine, threads=threads, **sizes),
        tiers=config.tiers,
    )
    runner, ranks = open_runner(spec, model.path)
    try:
        yield runner
    finally:
        if ranks is not None:
            ranks.close()


class PassRunner:
    """Runs passes over one runner's pool. Owned by whoever measures; one pass at a time."""

    def __init__(self, runner: ModelRunner, point_s: float, max_batched_tokens: int) -> None:
        self._runner = runner
        self._executor = StepExecutor(
            runner.execute, partial(checksum_blocks, block_bytes(runner.kv_pool))
        )
        self._point_s = point_s
        self._budget = max_batched_tokens
        spec = runner.kv_spec
        self._windows = Windows.of(spec.block_size, spec.windows)
        self.num_blocks = len(runner.kv_pool)
        self._num_steps = 0

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of blocks, one of each group of layers, that the pool holds; and tokens in one."""
        return self.num_blocks // self._windows.count, self._windows.block_size

    def fill_pool(self) -> None:
        """Give every block content that a model writes, and pages of its own."""
        pool: Any = self._runner.kv_pool
        windows = self._windows
        longest = windows.tokens(min(self.num_blocks, 16 * windows.count))
        tokens = min(longest, self._runner.max_model_len, self._budget)
        self.run([self._share(0, tokens, self._blocks(0, tokens))])
        whole = max(1, windows.full(tokens))
        for start in range(whole, self.num_blocks, whole):
            end = min(start + whole, self.num_blocks)
            pool[start:end] = pool[: end - start]

    def prompt_ms(self, num_tokens: int) -> float:
        """Times a prompt from its start to its first token, alone, in as many passes as it
        takes."""
        return sum(
            self.chunk_ms(start, min(self._budget, num_tokens - start))
            for start in range(0, num_tokens, self._budget)
        )

    def chunk_ms(self, start: int, num_tokens: int) -> float:
        return self._median_ms(lambda: self.chunk(start, num_tokens))

    def chunk(self, start: int, num_tokens: int) -> list[ScheduledSeq]:
        """Describes a pass that computes a prompt's tokens from `start` on."""
        return [self._share(start, num_tokens, self._blocks(0, start + num_tokens))]

    def decodes_ms(self, batch: int, context: int) -> float:
        return self._median_ms(lambda: self.decodes(batch, context))

    def mixed_ms(self, num_tokens: int, batch: int, context: int) -> float:
        """Times a prompt and decodes in one pass."""
        first = batch * self._table_len(context)
        blocks = self._blocks(first, num_tokens)
        return self._median_ms(
            lambda: [*self.decodes(batch, context), self._share(0, num_tokens, blocks)]
        )

    def fits(self, batch: int, context: int, num_tokens: int = 0) -> bool:
        needed = batch * self._table_len(context) + self._table_len(num_tokens)
        return needed <= self.num_blocks and batch + num_tokens <= self._budget

    def decodes(self, batch: int, context: int) -> list[ScheduledSeq]:
        each = self._table_len(context)
        return [
            self._share(context - 1, 1, list(range(i * each, (i + 1) * each))) for i in range(batch)
        ]

    def _share(self, start: int, num_tokens: int, blocks: list[int]) -> ScheduledSeq:
        vocab = self._runner.config.vocab_size
        tokens = [(7 * position + 11) % vocab for position in range(start, start + num_tokens)]
        return ScheduledSeq("profile", tokens, start, blocks, True, GREEDY, tokens, start + 1)

    def _blocks(self, first: int, num_tokens: int) -> list[int]:
        return list(range(first, first + self._table_len(num_tokens)))

    def _table_len(self, num_tokens: int) -> int:
        return self._windows.entries(num_tokens)

    def _median_ms(self, shares: Callable[[], list[ScheduledSeq]]) -> float:
        self.run(shares())  # the first touches its memory
        found: list[float] = []
        while len(found) < MIN_REPEATS or (sum(found) < self._point_s and len(found) < MAX_REPEATS):
            found.append(self.run(shares()))
        return statistics.median(found) * 1e3

    def run(self, shares: list[ScheduledSeq]) -> float:
        """Seconds of one pass, with the checksums of the blocks that it fills."""
        filled: list[int] = []
        for share in shares:
            first, end = map(self._windows.full, (share.start, share.start + len(share.tokens)))
            filled += share.block_ids[first:end]
        self._num_steps += 1
        step = Step(self._num_steps, shares, checksum_blocks=filled)
        done = self._executor.execute(step)
        if done.error is not None:
            raise ProfileError(f"a pass of {len(shares)} sequences failed: {done.error}")
        if done.failed:
            raise ProfileError(next(iter(done.failed.values())))
        return done.elapsed_s
