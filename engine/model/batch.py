"""A step as tensors: every sequence's tokens in one row, and where each of them lives.

Built once per step and read by every layer. Whatever a faulty scheduler could get wrong and a
kernel would turn into a wild write is checked here, with the request's name in the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.step import ScheduledSeq, Step


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step has to stay within."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    window: int = 0  # the widest of the layers, if each has one; what it has left is not looked at
    num_sinks: int = 0
    guard: bool = True  # whole block tables are compared with each other before each step

    @property
    def num_sink_blocks(self) -> int:
        return -(-self.num_sinks // self.block_size) if self.window else 0

    def first_read(self, position: int) -> int:
        """The first block, sinks aside, that a token at `position` reads."""
        return max(0, position - self.window + 1) // self.block_size if self.window else 0


@dataclass(frozen=True, slots=True)
class Batch:
    """All tensors are on one device. S sequences, N tokens, R of them to be sampled after."""

    tokens: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    slots: torch.Tensor  # [N] int64: block * block_size + offset
    query_start: torch.Tensor  # [S] int32: index of the sequence's first token in `tokens`
    query_len: torch.Tensor  # [S] int32
    context_len: torch.Tensor  # [S] int32: positions attended to by the last token
    # [S, widest] int32; 0 past a sequence's blocks, -1 where a window has left them
    block_tables: torch.Tensor
    sample_rows: torch.Tensor  # [R] int64
    spans: tuple[tuple[int, int, int], ...]  # (query_start, query_len, context_len), on the host

    @staticmethod
    def from_step(step: Step, limits: Limits, device: torch.device) -> Batch:
        """Raises ValueError if a sequence is not within `limits`."""
        seqs, size = step.seqs, limits.block_size
        num_tokens = step.num_tokens
        widest = max((-(-(s.start + len(s.tokens)) // size) for s in seqs), default=0)
        tokens = np.empty(num_tokens, np.int64)
        positions = np.empty(num_tokens, np.int64)
        slots = np.empty(num_tokens, np.int64)
        tables = np.zeros((len(seqs), widest), np.int32)
        spans, rows, first = [], [], 0
        for index, seq in enumerate(seqs):
            count, end = len(seq.tokens), seq.start + len(seq.tokens)
            blocks = checked_blocks(seq, limits)
            tables[index, : len(blocks)] = blocks
            span = slice(first, first + count)
            tokens[span] = seq.tokens
            check_tokens(seq, tokens[span], limits)
            at = np.arange(seq.start, end)
            positions[span] = at
            slots[span] = blocks[at // size] * size + at % size
            spans.append((first, count, end))
            first += count
            if seq.sample:
                rows.append(first - 1)
        starts = np.array(spans, np.int32).reshape(-1, 3).T.copy()
        return Batch(
            tokens=torch.from_numpy(tokens).to(device),
            positions=torch.from_numpy(positions).to(device),
            slots=torch.from_numpy(slots).to(device),
            query_start=torch.from_numpy(starts[0]).to(device),
            query_len=torch.from_numpy(starts[1]).to(device),
            context_len=torch.from_numpy(starts[2]).to(device),
            block_tables=torch.from_numpy(tables).to(device),
            sample_rows=torch.tensor(rows, dtype=torch.int64, device=device),
            spans=tuple(spans),
        )


def checked_blocks(seq: ScheduledSeq, limits: Limits) -> np.ndarray:
    """The blocks that hold [0, start + len(tokens)), int64; -1 where the window has left them."""
    end = seq.start + len(seq.tokens)
    if not seq.tokens or seq.start < 0 or end > limits.max_model_len:
        raise ValueError(
            f"request {seq.request_id}: positions [{seq.start}, {end}) are empty or exceed "
            f"the model's length of {limits.max_model_len}"
        )
    needed = -(-end // limits.block_size)
    blocks = np.array(seq.block_ids[:needed], np.int64)
    if len(blocks) < needed:
        raise ValueError(
            f"request {seq.request_id}: {len(blocks)} blocks for {end} positions, "
            f"{needed} are needed"
        )
    if blocks.min() < 0:
        _check_missing(seq, blocks, limits)
    if blocks.min() < -1 or blocks.max() >= limits.num_blocks:
        raise ValueError(
            f"request {seq.request_id}: block ids {blocks.min()} to {blocks.max()} are outside "
            f"the pool of {limits.num_blocks} blocks"
        )
    return blocks


def _check_missing(seq: ScheduledSeq, blocks: np.ndarray, limits: Limits) -> None:
    first = limits.first_read(seq.start)
    missing = np.flatnonzero(blocks < 0)
    missing = missing[(missing >= first) | (missing < limits.num_sink_blocks)]
    if len(missing):
        raise ValueError(
            f"request {seq.request_id}: entry {missing[0]} of its block table is "
            f"{blocks[missing[0]]}, and position {seq.start} reads it"
        )


def check_tokens(seq: ScheduledSeq, tokens: np.ndarray, limits: Limits) -> None:
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        raise ValueError(
            f"request {seq.request_id}: token ids {tokens.min()} to {tokens.max()} are outside "
            f"the vocabulary of {limits.vocab_size}"
        )
