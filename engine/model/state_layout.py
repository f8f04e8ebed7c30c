"""Recurrent layers, and where the state of one lies in a block: ranks have contiguous shares of it.

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

GATED_DELTA_NET, KIMI_DELTA_ATTENTION = "gated_delta_net", "kimi_delta_attention"
MAMBA2, SHORT_CONVOLUTION = "mamba2", "short_convolution"


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


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Layers that keep a state of each sequence, float32, in place of keys and values: the last
    inputs of a convolution and, but for a short convolution alone, a matrix for each head."""

    kind: str  # GATED_DELTA_NET, KIMI_DELTA_ATTENTION, MAMBA2 or SHORT_CONVOLUTION
    conv_kernel: int
    conv_channels: int
    has_biases: bool = False  # the convolution and both projections
    num_heads: int = 0  # those of values; 0: no matrices
    num_key_heads: int = 0  # each is shared by consecutive heads of values
    key_dim: int = 0  # a head's
    value_dim: int = 0  # a head's
    has_norm: bool = True  # outputs pass a norm and a gate; else the gate alone
    scales: tuple[float, ...] = ()  # Mamba 2: the five parts of the first projection times these
    beside_attention: bool = False  # a layer has both, and adds up what comes out

    def splits(self, num_units: int) -> bool:
        """Whether its heads, or channels, can be divided among so many units."""
        count, groups = self.num_heads or self.conv_channels, self.num_key_heads or num_units
        shared = self.kind == MAMBA2 and num_units % groups == 0  # a group may be divided
        return count % num_units == 0 and (shared or groups % num_units == 0)

    def layout(self, num_units: int) -> StateLayout:
        """Returns where a layer's state lies, in so many units, which `splits` allows."""
        rows = self.conv_kernel - 1
        if not self.num_heads:
            return StateLayout(num_units, rows, (self.conv_channels // num_units,), (1,))
        heads, copies = self.num_heads // num_units, max(1, num_units // self.num_key_heads)
        keys = self.num_key_heads * copies // num_units * self.key_dim
        parts, copied = (keys, keys, heads * self.value_dim), (copies, copies, 1)
        return StateLayout(num_units, rows, parts, copied, heads, self.key_dim, self.value_dim)

    @property
    def width(self) -> int:
        """How many inputs the output projection has."""
        return self.num_heads * self.value_dim or self.conv_channels

    @property
    def num_projected(self) -> int:
        """How many outputs the first projection has."""
        if self.kind == SHORT_CONVOLUTION:
            return 3 * self.conv_channels
        if self.kind == KIMI_DELTA_ATTENTION:
            return self.conv_channels + 2 * self.value_dim + self.num_heads
        return self.conv_channels + self.width + self.num_numbers * self.num_heads

    @property
    def num_numbers(self) -> int:
        """How many of the outputs of the first projection are single numbers, for each head."""
        return 2 if self.kind == GATED_DELTA_NET else 1

    @property
    def norm_width(self) -> int:
        """How many outputs are normed together."""
        return self.width // self.num_key_heads if self.kind == MAMBA2 else self.value_dim

    @property
    def num_float32(self) -> int:
        """Counts parameters that are no matrices: of the convolution, decays and the norm."""
        total = self.conv_kernel * self.conv_channels + self.num_heads
        if self.kind == MAMBA2:
            return total + self.num_heads + self.has_norm * self.width
        return total + self.value_dim

    def num_matrices(self, hidden_size: int) -> int:
        """Counts the numbers in the projections of a layer."""
        total = hidden_size * (self.num_projected + self.width)
        if self.kind == KIMI_DELTA_ATTENTION:
            total += 2 * self.value_dim * self.width
        return total
