"""Linear layers with int8 weights (engine.model.quantize): half of bfloat16 to read in a decode.

Few tokens: a kernel dequantizes in registers, so that only int8 is read from memory, and scales the
part of each group in float32; programs of other rows find the weight in the L2 cache. Many: the
weight is dequantized, and cuBLAS multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kvrelay.engine.model.quantize import GROUP, dequantize, quantize

FEW = 256  # tokens up to which reading the weights takes longer than multiplying
BLOCK_M, BLOCK_N = 64, 32  # at most; of a program


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A weight [out, in] and the bias of its results."""

    numbers: torch.Tensor  # int8 [out, in]
    scales: torch.Tensor  # bfloat16 [out, ceil(in / GROUP)]
    bias: torch.Tensor | None


def int8_matrix(weight: torch.Tensor, bias: torch.Tensor | None) -> Int8Matrix:
    return Int8Matrix(*quantize(weight), bias)


def dequantized(matrix: Int8Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weight as floats."""
    if matrix.numbers.shape[1] % GROUP:
        return dequantize(matrix.numbers, matrix.scales).to(dtype)
    groups = matrix.numbers.unflatten(1, (-1, GROUP)).to(dtype)
    return (groups * matrix.scales.to(dtype).unsqueeze(-1)).flatten(1)


def linear(x: torch.Tensor, matrix: Int8Matrix) -> torch.Tensor:
    """x [n, in] -> [n, out]."""
    rows, depth = x.shape
    width, groups = matrix.scales.shape
    if rows > FEW:
        return F.linear(x, dequantized(matrix, x.dtype), matrix.bias)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        block_m = min(BLOCK_M, max(16, triton.next_power_of_2(rows)))
        _linear[(triton.cdiv(rows, block_m), triton.cdiv(width, BLOCK_N))](
            x, matrix.numbers, matrix.scales, matrix.bias, out, rows, width, depth, groups,
            x.stride(0), BLOCK_M=block_m, BLOCK_N=BLOCK_N,
            GROUP=GROUP, HAS_BIAS=matrix.bias is not None, num_warps=4,
            num_stages=5 if x.element_size() == 2 else 3,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, numbers, scales, bias, out, rows, width, depth, groups, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of BLOCK_M rows, a group of inputs at a time. Those of the same
    outputs run together."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, GROUP)
    is_row, is_out = m < rows, n < width
    x_at = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
    w_at = numbers + n[None, :].to(tl.int64) * depth + k[:, None]
    s_at = scales + n.to(tl.int64) * groups
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(groups):
        first = group * GROUP
        is_in = k < depth - first
        left = tl.load(x_at + first, mask=is_row[:, None] & is_in[None, :], other=0.0)
        right = tl.load(w_at + first, mask=is_in[:, None] & is_out[None, :], other=0)
        scale = tl.load(s_at + group, mask=is_out, other=0.0).to(tl.float32)
        part = tl.dot(left, right.to(left.dtype), input_precision="ieee")
        total += part * scale[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=is_out, other=0.0).to(tl.float32)[None, :]
    at = out + m[:, None].to(tl.int64) * width + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])
