"""What the rows of a batch have of images: positions, and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvrelay.engine.images import SeqImageRows
from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.vision.config import Vision
from kvrelay.engine.step import ScheduledSeq

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ImageRows:
    """What a batch has in which some sequence has images. All tensors are on the batch's device."""

    turns: torch.Tensor  # [3, N] int64: positions in time, height and width
    section: tuple[int, ...]  # frequencies that turn by each of them
    rows: torch.Tensor  # [M] int64: tokens of images
    added: torch.Tensor  # [1 + taps, M, hidden_size]

    @property
    def has_embeddings(self) -> bool:
        return len(self.rows) > 0

    def put(self, hidden: torch.Tensor) -> None:
        """In place of what was looked up for those tokens, [N, hidden_size]."""
        hidden[self.rows] = self.added[0].to(hidden.dtype)

    def add_behind(self, layer: int, hidden: torch.Tensor) -> None:
        """To what a layer gives; the first layers alone have some."""
        if layer + 1 < len(self.added):
            hidden[self.rows] += self.added[layer + 1].to(hidden.dtype)

    def angles(self, tables: Tables) -> Tables:
        """cos and sin of each row, [N, half], of tables [max_positions, half]. Frequencies take
        turns (interleaved mrope): time, height, width, time, ..., as long as each has some left;
        the rest turn by time."""
        half = tables[0].shape[1]
        axis = torch.zeros(half, dtype=torch.int64)
        for number, length in enumerate(self.section[1:], start=1):
            axis[number : 3 * length : 3] = number
        at = self.turns[axis].T  # [N, half]
        cos, sin = (table.gather(0, at) for table in tables)
        return cos, sin


def has_images(seqs: Sequence[ScheduledSeq]) -> bool:
    return any(seq.image_rows is not None for seq in seqs)


def shifts_of(seqs: Sequence[ScheduledSeq]) -> list[int] | None:
    """By how much the tokens of each have lower positions than their index; None: some have no such
    number, as tokens of images are among theirs or follow."""
    found = [0 if seq.image_rows is None else seq.image_rows.shift for seq in seqs]
    known = [shift for shift in found if shift is not None]
    return known if len(known) == len(found) else None


def with_images(batch: Batch, seqs: Sequence[ScheduledSeq], vision: Vision) -> Batch:
    """`batch`, which is of `seqs`, with what their images make of its rows."""
    turns, rows, first = list[np.ndarray](), [np.empty(0, np.int64)], 0
    added = list[np.ndarray]()
    for seq in seqs:
        start, end = seq.start, seq.start + len(seq.tokens)
        own = seq.image_rows or SeqImageRows(shift=0)
        if own.turns is None:
            assert own.shift is not None
            turns.append(np.tile(np.arange(start, end) - own.shift, (3, 1)))
        else:
            turns.append(own.turns)
        if own.rows is not None and own.added is not None:
            rows.append(own.rows + first)
            added.append(own.added)
        first += end - start
    put = np.concatenate(added, axis=1) if added else np.empty((1, 0, vision.out_size), np.float32)
    device = batch.tokens.device
    given = ImageRows(
        torch.from_numpy(np.concatenate(turns, axis=1)).to(device),
        vision.section,
        torch.from_numpy(np.concatenate(rows)).to(device),
        torch.from_numpy(put).to(device),
    )
    return replace(batch, images=given)
