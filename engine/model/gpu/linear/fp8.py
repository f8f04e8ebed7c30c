"""Linear layers in float8_e4m3, weights and inputs: half of bfloat16 to read in a decode, and twice
the rate of tensor cores for a prompt.

Each output has a scale, and each token one that is found as it comes. cuBLAS multiplies, and scales
the sums in float32. It needs a GPU of compute capability 8.9.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvrelay.engine.model.fp8 import E4M3_MAX
from kvrelay.engine.model.gpu.cache_write import e4m3

MULTIPLE = 16  # cuBLAS wants it in both sides of a matrix
BLOCK = 2048
CANDIDATES, SAMPLE = 41, 256  # numbers that a row's largest may become; columns that are tried
_LEAST_SCALE = tl.constexpr(1e-12)
_MAX = tl.constexpr(E4M3_MAX)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A weight [out, in] and the bias of its results."""

    numbers: torch.Tensor  # float8_e4m3fn [out, in]
    scales: torch.Tensor  # float32 [1, out]
    bias: torch.Tensor | None  # bfloat16


def fits(weight: torch.Tensor) -> bool:
    """Whether a weight [out, in] can be multiplied here."""
    return all(size % MULTIPLE == 0 for size in weight.shape)


def fp8_matrix(weight: torch.Tensor, bias: torch.Tensor | None) -> Fp8Matrix:
    """weight: any float, [out, in]."""
    scales = row_scales(weight)
    numbers = (weight.float() / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Fp8Matrix(numbers, scales.view(1, -1), bias)


def row_scales(weight: torch.Tensor) -> torch.Tensor:
    """float32 [out, 1]: of those that make a row's largest one of the larger e4m3 numbers the one
    with the least squares of errors. So a checkpoint that was in e4m3, and was widened as it was
    loaded, gets its numbers back, whether it had a scale for each row or one for all."""
    largest = weight.abs().amax(1, keepdim=True).float().clamp_(min=1e-12)
    sample = weight[:, :: max(1, weight.shape[1] // SAMPLE)].float()
    best = torch.full_like(largest, float("inf"))
    scales = largest / E4M3_MAX
    numbers = torch.arange(0x7E, 0x7E - CANDIDATES, -1, dtype=torch.uint8, device=weight.device)
    for number in numbers.view(torch.float8_e4m3fn).float():
        scale = largest / number
        rounded = (sample / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
        error = (rounded * scale - sample).square_().sum(1, keepdim=True)
        scales = torch.where(error < best, scale, scales)
        best = torch.minimum(best, error)
    return scales


def linear(x: torch.Tensor, matrix: Fp8Matrix) -> torch.Tensor:
    """x [n, in], bfloat16 -> [n, out]."""
    if not len(x):
        return x.new_empty(0, len(matrix.numbers))
    numbers, scales = quantize_rows(x)
    return torch._scaled_mm(
        numbers,
        matrix.numbers.t(),
        scale_a=scales,
        scale_b=matrix.scales,
        bias=matrix.bias,
        out_dtype=torch.bfloat16,
    )


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, in] -> float8_e4m3fn [n, in] and scales float32 [n, 1]: a row's largest is 448."""
    rows, depth = x.shape
    numbers = torch.empty((rows, depth), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        out = numbers.view(torch.uint8)
        _quantize[(rows,)](x, out, scales, depth, x.stride(0), BLOCK=BLOCK, num_warps=4)
    return numbers, scales


@triton.jit
def _quantize(x, numbers, scales, depth, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, depth, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + at, mask=at < depth, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(value))
    scale = tl.maximum(tl.max(most, axis=0) / _MAX, _LEAST_SCALE)
    tl.store(scales + row, scale)
    no_shift = tl.full((), 127, tl.int32)
    for first in range(0, depth, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + at, mask=at < depth, other=0.0).to(tl.float32)
        tl.store(numbers + row * depth + at, e4m3(value / scale, no_shift), mask=at < depth)
