"""Stacked matrices of experts, kept as a checkpoint stores them: in MXFP4, four bits a number and a
power of two for each 32 inputs (OCP's Microscaling formats 1.0: E2M1, E8M0), or in FP8, with a
scale for each block of rows and columns (as DeepSeek V3 is published)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

GROUP = 32  # inputs that share a scale of MXFP4
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


def of_halves(stacked: torch.Tensor, part: slice) -> torch.Tensor:
    """stacked [E, 2 * width, ...]: rows `part` of either half, zeros where a half has ended."""
    halves = [each[:, part] for each in stacked.chunk(2, dim=1)]
    lacks = part.stop - part.start - halves[0].shape[1]
    if lacks:
        halves = [F.pad(each, (*(0, 0) * (each.dim() - 2), 0, lacks)) for each in halves]
    return torch.cat(halves, dim=1)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Matrices [num_experts, rows, columns]. Views of a checkpoint's file, or made of such."""

    pairs: torch.Tensor  # uint8 [num_experts, rows, columns / 2]
    scales: torch.Tensor  # uint8 [num_experts, rows, columns / GROUP]
    dtype: torch.dtype = torch.float32  # that the model was made in

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, half = self.pairs.shape
        return experts, rows, 2 * half

    def cuts_at(self, column: int) -> bool:
        return column % GROUP == 0

    def rows(self, *parts: slice) -> Mxfp4:
        """Returns these rows, one part after the other."""
        pairs, scales = ([each[:, part] for part in parts] for each in (self.pairs, self.scales))
        return Mxfp4(torch.cat(pairs, dim=1), torch.cat(scales, dim=1), self.dtype)

    def of_halves(self, part: slice) -> Mxfp4:
        return Mxfp4(of_halves(self.pairs, part), of_halves(self.scales, part), self.dtype)

    def columns(self, part: slice) -> Mxfp4:
        """part: from one place where it cuts to another; those beyond the last are zeros."""
        parts = []
        for stored, each in ((self.pairs, 2), (self.scales, GROUP)):
            own = stored[:, :, part.start // each : part.stop // each]
            lacks = (part.stop - part.start) // each - own.shape[2]
            parts.append(F.pad(own, (0, lacks)).contiguous())
        return Mxfp4(parts[0], parts[1], self.dtype)

    def widened(self) -> torch.Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        for index, (pairs, scales) in enumerate(zip(self.pairs, self.scales, strict=True)):
            numbers = unpack_fp4(pairs).unflatten(1, (-1, GROUP)) * e8m0(scales).unsqueeze(-1)
            whole[index] = numbers.flatten(1)
        return whole


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """Matrices [num_experts, rows, columns]; number = stored * scale of its block."""

    numbers: torch.Tensor  # float8_e4m3fn [num_experts, rows, columns]
    scales: torch.Tensor  # float32 [num_experts, rows / block[0], columns / block[1]], rounded up
    block: tuple[int, int]  # rows and columns
    dtype: torch.dtype = torch.float32  # that the model was made in

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, columns = self.numbers.shape
        return experts, rows, columns

    @staticmethod
    def stacked(each: list[Fp8Blocks]) -> Fp8Blocks:
        numbers = torch.cat([one.numbers.view(torch.uint8) for one in each])
        scales = torch.cat([one.scales for one in each])
        return replace(each[0], numbers=numbers.view(torch.float8_e4m3fn), scales=scales)

    def cuts_at(self, column: int) -> bool:
        """And so at the same row of either half, which has as many as there are columns."""
        return column % self.block[0] == column % self.block[1] == 0

    def of_halves(self, part: slice) -> Fp8Blocks:
        of_scales = slice(part.start // self.block[0], part.stop // self.block[0])
        numbers = of_halves(self.numbers.view(torch.uint8), part).view(self.numbers.dtype)
        return replace(self, numbers=numbers, scales=of_halves(self.scales, of_scales))

    def columns(self, part: slice) -> Fp8Blocks:
        """part: from one place where it cuts to another."""
        of_scales = slice(part.start // self.block[1], part.stop // self.block[1])
        numbers, scales = self.numbers[:, :, part], self.scales[:, :, of_scales]
        return replace(self, numbers=numbers.contiguous(), scales=scales.contiguous())

    def widened(self) -> torch.Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        _, rows, columns = self.shape
        for index, (numbers, scales) in enumerate(zip(self.numbers, self.scales, strict=True)):
            for dim, each in enumerate(self.block):
                scales = scales.repeat_interleave(each, dim)
            whole[index] = numbers.float() * scales[:rows, :columns]
        return whole


Packed = Mxfp4 | Fp8Blocks
Stacked = torch.Tensor | Packed


def widened(matrices: Stacked) -> torch.Tensor:
    return matrices if isinstance(matrices, torch.Tensor) else matrices.widened()
