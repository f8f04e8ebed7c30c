"""A mixture of experts on a GPU: grouped matrix products over tokens sorted by expert.

Every (token, chosen expert) is a pair. Pairs are sorted by expert and cut into tiles of `BLOCK_M`
pairs of one expert; tile by tile, rows of `x` are gathered and multiplied with that expert's
matrix. How many tiles an expert has is known on the device only, so the grid is an upper bound and
tiles beyond the last end at once: no host synchronization, and shapes that a graph can keep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvrelay.engine.model.gpu.attention_tile import factor, upcast
from kvrelay.engine.model.gpu.norm_activation import gated
from kvrelay.engine.model.gpu.routing import Tiles, sort_pairs
from kvrelay.engine.model.quantize import GROUP

BLOCK_M, BLOCK_N = 16, 64
MANY = 64  # pairs per expert on average, from which larger tiles pay
BLOCK_M_MANY, BLOCK_N_MANY = 64, 128


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Matrices are floats, int8 with scales as of engine.model.quantize, or pairs of MXFP4 with
    scales as of engine.model.stacked, both uint8."""

    gate_ups: torch.Tensor  # [num_experts, 2 * width, hidden_size]; without a gate [.., width, ..]
    downs: torch.Tensor  # [num_experts, hidden_size, width]
    gate_up_scales: torch.Tensor | None = None
    down_scales: torch.Tensor | None = None
    block: tuple[int, int] = (1, GROUP)  # rows and columns that share a scale of int8 or FP8


def add_experts(
    hidden: torch.Tensor,
    x: torch.Tensor,
    experts: ExpertWeights,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> None:
    """hidden [N, hidden_size] += sum over k of weights[N, k] * expert chosen[N, k] of x. biases: of
    both projections, float32 [num_experts, rows of the matrix]."""
    num_tokens, num_chosen = chosen.shape
    if not num_tokens:
        return
    num_experts = len(experts.downs)
    block = BLOCK_M_MANY if chosen.numel() >= MANY * num_experts else BLOCK_M
    tiles = sort_pairs(chosen, num_experts, block)
    gate_ups = experts.gate_ups, experts.gate_up_scales, experts.block, biases[0]
    downs = experts.downs, experts.down_scales, experts.block, biases[1]
    active = gated(_grouped(x, *gate_ups, tiles, num_chosen, None), activation)
    out = _grouped(active, *downs, tiles, 0, weights)  # `active` has a row per place in `pairs`
    # A token's parts are added in the order of its choices, the same for any batch.
    hidden += out.view(num_tokens, num_chosen, -1).sum(dim=1).to(hidden.dtype)


def _grouped(
    x: torch.Tensor,
    matrices: torch.Tensor,
    scales: torch.Tensor | None,
    block: tuple[int, int],
    bias: torch.Tensor | None,
    tiles: Tiles,
    num_chosen: int,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """x times each pair's expert [P, width]. With `num_chosen` > 0, `x` has a row per token and the
    result a row per place in `tiles.pairs`. Else `x` has a row per place, and the result, float32
    and multiplied with `weights`, a row per pair."""
    num_experts, width, depth = matrices.shape
    is_fp4, is_fp8 = matrices.dtype == torch.uint8, matrices.dtype == torch.float8_e4m3fn
    matrices = matrices.view(torch.uint8) if is_fp8 else matrices
    depth *= 2 if is_fp4 else 1
    num_pairs = len(tiles.pairs)
    kind = x.dtype if weights is None else torch.float32
    out = torch.empty((num_pairs, width), dtype=kind, device=x.device)
    many = tiles.block_m == BLOCK_M_MANY
    block_n = BLOCK_N_MANY if many else BLOCK_N
    _product[(len(tiles.expert), triton.cdiv(width, block_n))](
        x, matrices, scales, bias, out, tiles.pairs, tiles.expert, tiles.first, tiles.end,
        None if weights is None else weights.contiguous(), x.stride(0), width, depth, num_experts,
        GATHER=num_chosen, BLOCK_M=tiles.block_m, BLOCK_N=block_n, BLOCK_K=GROUP,
        SCALE_ROWS=block[0], SCALE_COLUMNS=block[1], FP4=is_fp4, FP8=is_fp8,
        num_warps=8 if many else 4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _e2m1(code):
    """Numbers of four bits, in int32, as float32."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    bits = tl.where(exponent > 0, normal, mantissa * (126 << 23))  # below 1: 0 and 0.5
    return (bits | ((code >> 3) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _sum_fp4(total, rows, is_row, pairs, scales, columns, is_out, depth):
    """total [M, N] += rows [M, depth] times columns of MXFP4. The inputs of the lower halves of
    bytes and those of the upper ones are multiplied apart, so that nothing is rearranged."""
    SCALED: tl.constexpr = 32
    k = tl.arange(0, SCALED // 2)
    for at in range(0, depth, SCALED):
        x_at = rows + (at + 2 * k)[None, :]
        even = tl.load(x_at, mask=is_row[:, None], other=0.0)
        odd = tl.load(x_at + 1, mask=is_row[:, None], other=0.0)
        w_at = pairs + columns[None, :] * (depth // 2) + (at // 2 + k)[:, None]
        both = tl.load(w_at, mask=is_out[None, :], other=0).to(tl.int32)
        part = tl.dot(even, _e2m1(both & 15).to(even.dtype), input_precision="ieee")
        part = tl.dot(odd, _e2m1(both >> 4).to(odd.dtype), part, input_precision="ieee")
        s_at = scales + columns * (depth // SCALED) + at // SCALED
        total += part * factor(tl.load(s_at, mask=is_out, other=0).to(tl.int32))[None, :]
    return total


@triton.jit
def _product(
    x, matrices, scales, bias, out, pairs, tile_expert, tile_first, tile_end, weights, x_stride,
    width, depth, num_experts, GATHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    FP4: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One tile: BLOCK_M pairs of one expert, BLOCK_N outputs. GATHER: choices per token, or 0.
    SCALE_ROWS and SCALE_COLUMNS, a multiple of BLOCK_K, share a scale, where there are scales."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert < num_experts:
        m = tl.load(tile_first + tile) + tl.arange(0, BLOCK_M)
        is_row = m < tl.load(tile_end + tile)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_out = n < width
        pair = tl.load(pairs + m, mask=is_row, other=0)
        if GATHER > 0:
            source = pair // GATHER
            target = m
        else:
            source = m
            target = pair
        rows, columns = x + source[:, None] * x_stride, expert * width + n
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if FP4:
            total = _sum_fp4(total, rows, is_row, matrices, scales, columns, is_out, depth)
        else:
            k = tl.arange(0, BLOCK_K)
            if scales is not None:
                s_row = expert * tl.cdiv(width, SCALE_ROWS) + n // SCALE_ROWS
                s_rows = scales + s_row * tl.cdiv(depth, SCALE_COLUMNS)
            x_at, w_at = rows + k[None, :], matrices + columns[None, :] * depth + k[:, None]
            for at in range(0, depth, BLOCK_K):
                is_in = k < depth - at
                left = tl.load(x_at + at, mask=is_row[:, None] & is_in[None, :], other=0.0)
                right = tl.load(w_at + at, mask=is_in[:, None] & is_out[None, :], other=0)
                if scales is not None:
                    part = tl.dot(left, upcast(right, left, FP8), input_precision="ieee")
                    s_at = s_rows + at // SCALE_COLUMNS
                    total += part * tl.load(s_at, mask=is_out, other=0.0).to(tl.float32)[None, :]
                else:
                    total = tl.dot(left, right, total, input_precision="ieee")
        if bias is not None:
            total += tl.load(bias + expert * width + n, mask=is_out, other=0.0)[None, :]
        if GATHER == 0:
            total *= tl.load(weights + pair, mask=is_row, other=0.0).to(tl.float32)[:, None]
        place = out + target[:, None] * width + n[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])
