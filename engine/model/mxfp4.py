"""Stacked matrices in MXFP4, kept as a checkpoint stores them: four bits a number, and for each 32
inputs a power of two (OCP's Microscaling formats 1.0: E2M1, E8M0)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

GROUP = 32  # inputs that share a scale
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def unpack_fp4(pairs: torch.Tensor) -> torch.Tensor:
    """pairs [..., n] uint8, the first number in the lower half -> [..., 2 n] float32."""
    table = torch.tensor([*_NUMBERS, *(-each for each in _NUMBERS)])
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
    return table[codes.int()]


def e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Exponents as they are stored, uint8, as float32."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - _BIAS)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Matrices [num_experts, rows, columns]. Views of a checkpoint's file, or made of such."""

    pairs: torch.Tensor  # uint8 [num_experts, rows, columns / 2]
    scales: torch.Tensor  # uint8 [num_experts, rows, columns / GROUP]

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, half = self.pairs.shape
        return experts, rows, 2 * half

    def rows(self, *parts: slice) -> Mxfp4:
        """Returns these rows, one part after the other."""
        both = ([each[:, part] for part in parts] for each in (self.pairs, self.scales))
        return Mxfp4(*(torch.cat(each, dim=1) for each in both))

    def columns(self, part: slice) -> Mxfp4:
        """part: from a multiple of GROUP to another; those beyond the last are zeros."""
        assert part.start % GROUP == part.stop % GROUP == 0
        parts = []
        for stored, each in ((self.pairs, 2), (self.scales, GROUP)):
            own = stored[:, :, part.start // each : part.stop // each]
            lacks = (part.stop - part.start) // each - own.shape[2]
            parts.append(F.pad(own, (0, lacks)).contiguous())
        return Mxfp4(*parts)

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        whole = torch.empty(self.shape, dtype=dtype)
        for index, (pairs, scales) in enumerate(zip(self.pairs, self.scales, strict=True)):
            numbers = unpack_fp4(pairs).unflatten(1, (-1, GROUP)) * e8m0(scales).unsqueeze(-1)
            whole[index] = numbers.flatten(1)
        return whole


def widened(matrices: torch.Tensor | Mxfp4, dtype: torch.dtype) -> torch.Tensor:
    return matrices.widened(dtype) if isinstance(matrices, Mxfp4) else matrices
