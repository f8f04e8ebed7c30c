"""The inner loop of attention: some query rows against a run of paged keys and values.

Rows are (token, head of the group) pairs, so that all heads that share a KV head share its tiles.
Softmax is online (FlashAttention): the loop carries the weighted sum of values, the sum of weights
and the highest score so far, in powers of two. An FP8 tile is upcast to float16, which holds every
e4m3 exactly; its scales are applied to scores and weights, one per key, instead of to elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # finite, so that a row that sees no key of a tile stays finite
LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Launch parameters of a kernel: rows and keys of a tile, and options of the compiler."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def multiprocessors(device: torch.device) -> int:
    """A CPU, where kernels are interpreted, counts as few."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have for its tiles: 227 KiB on Hopper, 99 on smaller cards."""
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 48 * 1024)


@triton.jit
def load_rows(at, rows, dims, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[N, BLOCK] from `at` [N, BLOCK]; masked ones are zero."""
    if MASKED:
        if BLOCK == DIM:
            tile = tl.load(at, mask=rows[:, None], other=0)
        else:
            tile = tl.load(at, mask=rows[:, None] & (dims < DIM)[None, :], other=0)
    elif BLOCK == DIM:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(dims < DIM)[None, :], other=0)
    return tile


@triton.jit
def upcast(tile, like, FP8: tl.constexpr):
    if FP8:
        tile = tile.to(tl.float8e4nv, bitcast=True)
    return tile.to(like.dtype)


@triton.jit
def factor(byte):
    """Returns what E8M0 means: 2**(byte - 127)."""
    return (byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled_scores(scores, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Products of queries and keys -> scores as exponents of two."""
    if SOFTCAP > 0.0:
        # tanh(x) = 1 - 2 / (1 + exp(2 x))
        doubled = tl.exp2(scores * (2.0 * SCALE / SOFTCAP * LOG2E))
        return (1.0 - 2.0 / (1.0 + doubled)) * (SOFTCAP * LOG2E)
    return scores * (SCALE * LOG2E)


@triton.jit
def accumulate(acc, total, highest, unit, scores, values, value_bytes, FP8: tl.constexpr):
    """Online softmax over scores [M, N] and values [N, D]; value_bytes [N]: their scales, in FP8.

    There `acc` is in units of the largest scale so far, so that weights stay within float16."""
    top = tl.maximum(highest, tl.max(scores, 1))
    kept = tl.exp2(highest - top)
    weights = tl.exp2(scores - top[:, None])
    total = total * kept + tl.sum(weights, 1)
    if FP8:
        largest = tl.maximum(unit, tl.max(value_bytes, 0))
        kept = kept * factor(tl.maximum(unit - largest + 127, 0))
        weights = weights * factor(tl.maximum(value_bytes - largest + 127, 0))[None, :]
        unit = largest
    weights = weights.to(values.dtype)
    acc = tl.dot(weights, values, acc * kept[:, None], input_precision="ieee")
    return acc, total, top, unit


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """Returns the first key in the window of a position; of its chunk, if WINDOW is negative."""
    low = position * 0
    if WINDOW > 0:
        low = tl.maximum(position - WINDOW + 1, 0)
    if WINDOW < 0:
        low = position // -WINDOW * -WINDOW
    return low


@triton.jit
def with_sink(acc, total, highest, sink):
    """State of the loop, as if each row had seen one key more, of score `sink` [M] and no value."""
    score = sink * LOG2E
    top = tl.maximum(highest, score)
    kept = tl.exp2(highest - top)
    return acc * kept[:, None], total * kept + tl.exp2(score - top)


@triton.jit
def attended(acc, total, unit, FP8: tl.constexpr):
    """State of the loop -> rows of the result."""
    if FP8:
        acc = acc * factor(unit)
    return acc / total[:, None]


@triton.jit
def attend(
    acc, total, highest, unit, queries, keys, table, positions, first, last, low,
    SINKS: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    PLANE_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Rows `queries` [M, BLOCK_D] at `positions` [M] against keys [first, last), tile by tile.

    keys: where block 0 holds this layer's and head's keys; table: the sequence's blocks. MASKED:
    rows see keys up to themselves and within the window, and keys below `low` or from `last` on are
    not read; else all rows see all keys. SINKS: rows see the keys before their window instead.
    """
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        readable = (n >= low) & (n < last)
        if MASKED:
            block = tl.load(table + n // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
        else:
            block = tl.load(table + n // BLOCK_SIZE).to(tl.int64)
        head = keys + block * BLOCK_STRIDE
        value_bytes = n
        if FP8:  # single bytes are not loaded ahead, so they are asked for first
            scale_at = head + (BLOCK_SIZE * HEAD_DIM + n % BLOCK_SIZE)
            key_bytes = tl.load(scale_at, mask=readable, other=0).to(tl.int32)
            scale_at = head + (PLANE_STRIDE + BLOCK_SIZE * VALUE_DIM + n % BLOCK_SIZE)
            value_bytes = tl.load(scale_at, mask=readable, other=0).to(tl.int32)
        at = (head + n % BLOCK_SIZE * HEAD_DIM)[:, None] + dims[None, :]
        key = load_rows(at, readable, dims, HEAD_DIM, BLOCK_D, MASKED)
        at = (head + (PLANE_STRIDE + n % BLOCK_SIZE * VALUE_DIM))[:, None] + value_dims[None, :]
        value = load_rows(at, readable, value_dims, VALUE_DIM, BLOCK_V, MASKED)
        scores = tl.dot(queries, tl.trans(upcast(key, queries, FP8)), input_precision="ieee")
        if FP8:
            scores = scores * factor(key_bytes)[None, :]
        scores = scaled_scores(scores, SCALE, SOFTCAP)
        if MASKED:
            visible = n[None, :] <= positions[:, None]
            if SINKS:
                visible = n[None, :] <= positions[:, None] - WINDOW
            elif WINDOW != 0:
                visible = visible & (n[None, :] >= first_seen(positions, WINDOW)[:, None])
            scores = tl.where(visible & readable[None, :], scores, float("-inf"))
        value = upcast(value, queries, FP8)
        acc, total, highest, unit = accumulate(
            acc, total, highest, unit, scores, value, value_bytes, FP8
        )
    return acc, total, highest, unit
