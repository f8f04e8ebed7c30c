"""Quest (Tang et al. 2024, arXiv:2406.10774): decodes read the pages of their context that matter.

A page is a block. Its bounds, the least and the largest number of its keys in each dimension, say
how high a query may score there. They follow from the keys, so they are made where a sequence that
reads by them first has the block, by the kernels, and are sent and stored nowhere: a `Table` says
for how many of its rows they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

LEAST_TOKENS = 512  # are always read: a choice among fewer saves nothing
NEVER = np.iinfo(np.int32).max


class Reading(Protocol):
    """What a sequence has in a step (`ScheduledSeq`), as far as pages are concerned."""

    tokens: list[int]
    start: int
    sample: bool
    num_prompt_tokens: int
    reads_pages: bool


class Bounded(Protocol):
    """A block table, and how much of it has bounds."""

    num_bounded: int  # rows, from the first, whose keys have bounds


@dataclass(frozen=True, slots=True)
class Quest:
    """How much of its context a query reads."""

    budget: float  # below 1: a share of it; from 1 on: tokens
    dense_layers: int  # the first layers, which read all

    @property
    def share(self) -> float:
        return self.budget if self.budget < 1 else 0.0

    @property
    def least_tokens(self) -> int:
        return max(LEAST_TOKENS, int(self.budget))

    def has(self, layer: int, window: int) -> bool:
        """Whether it chooses pages: layers with windows have few, which they read."""
        return layer >= self.dense_layers and not window


def starts_of(seqs: Sequence[Reading]) -> np.ndarray:
    """The position of each from which on queries choose pages, [S] int32: its outputs', whoever
    computes them again."""
    starts = [seq.num_prompt_tokens if seq.reads_pages else NEVER for seq in seqs]
    return np.array(starts, np.int32)


def bounded_of(seqs: Sequence[Reading], tables: Sequence[Bounded], size: int) -> np.ndarray:
    """The rows of each whose bounds are there, [S] int32: no more than its full ones, as rejected
    draft tokens may have been in others."""
    both = zip(seqs, tables, strict=True)
    return np.array([min(table.num_bounded, seq.start // size) for seq, table in both], np.int32)


@dataclass(frozen=True, slots=True)
class PageReads:
    """What the queries of a batch of S sequences read."""

    starts: torch.Tensor  # [S] int32
    bounded: torch.Tensor  # [S] int32

    @staticmethod
    def of(seqs: Sequence[Reading], tables: Sequence[Bounded], block_size: int) -> PageReads | None:
        """None where no sequence chooses pages."""
        if not any(seq.reads_pages for seq in seqs):
            return None
        starts, bounded = starts_of(seqs), bounded_of(seqs, tables, block_size)
        return PageReads(torch.from_numpy(starts), torch.from_numpy(bounded))

    def of_rows(self, seqs: torch.Tensor) -> PageReads:
        return PageReads(self.starts[seqs], self.bounded[seqs])


def keep_bounds(seqs: Sequence[Reading], tables: Sequence[Bounded], size: int) -> None:
    """A batch has passed all layers. The last of them has seen the rows that are sampled alone."""
    for seq, table in zip(seqs, tables, strict=True):
        last = seq.start + len(seq.tokens) - 1
        if seq.reads_pages and seq.sample and last >= seq.num_prompt_tokens:
            table.num_bounded = last // size
