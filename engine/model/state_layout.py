"""Where the state of a recurrent layer lies in a block, so that ranks have contiguous shares of it.

A block of a model with states is cut into *units* of the same bytes: parts of a KV head, or several
of them. A unit has an even share of the layer's heads, so a rank of any size that divides the units
holds a run of them, as it holds a run of KV heads. In a unit, layers follow one another, and each
has there the last inputs of its convolution, `[conv_rows, channels of the unit]`, and behind them a
matrix `[key_dim, value_dim]` for each head of the unit. All is float32.

What a convolution mixes is made of stacked parts (queries, keys, values), of which each unit has an
even share. Where a group of heads has keys and queries in common (Mamba 2) and is divided, every
unit of it has these channels: they are stored more than once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Run(NamedTuple):
    """Consecutive channels of a convolution, and where their last inputs lie: in the first of
    `copies` consecutive units, `at` float32 from the beginning of a unit's row of channels."""

    first: int
    width: int
    unit: int
    at: int
    copies: int


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The state of one recurrent layer: of the whole model, or of the units of one rank."""

    num_units: int
    conv_rows: int
    parts: tuple[int, ...]  # channels of a unit in each part
    copies: tuple[int, ...]  # how many consecutive units have the same channels of a part
    num_heads: int = 0  # in a unit
    key_dim: int = 0
    value_dim: int = 0

    @property
    def unit_channels(self) -> int:
        return sum(self.parts)

    @property
    def memory_at(self) -> int:
        """The first float32 of the matrices in a unit."""
        return self.conv_rows * self.unit_channels

    @property
    def unit_size(self) -> int:
        """How many float32 a layer has in a unit."""
        return self.memory_at + self.num_heads * self.key_dim * self.value_dim

    def runs(self) -> list[Run]:
        """All channels, in the order of the parts."""
        found, first, at = list[Run](), 0, 0
        for width, copies in zip(self.parts, self.copies, strict=True):
            for unit in range(0, self.num_units, copies):
                found.append(Run(first, width, unit, at, copies))
                first += width
            at += width
        return found
