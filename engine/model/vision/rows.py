"""What the rows of a batch have of images: positions, and embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
