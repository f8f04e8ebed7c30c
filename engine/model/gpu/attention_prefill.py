"""Attention of a ragged batch of prompt chunks over paged KV.

The host lists the tiles of query rows of a step, the ones with the most keys first, so that the
short ones fill the end. One program takes a tile for one KV head. Tiles of keys that all its rows
see are multiplied without a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kvrelay.engine.model.gpu.attention_tile import (
    LOWEST,
    Tiling,
    attend,
    attended,
    first_seen,
    shared_memory,
    with_sink,
)
from kvrelay.engine.model.gpu.cache_pool import Pool


def prefill_tiling(pool: Pool) -> Tiling:
    """The largest tiles that neither spill registers nor exceed shared memory."""
    wide, room = triton.next_power_of_2(pool.head_dim), shared_memory(pool.data.device)
    if wide > 256:
        large = room >= 200 * 1024 and pool.data.element_size() <= 2
        return Tiling(64, 32, num_warps=8, num_stages=2) if large else Tiling(32, 16, 4, 1)
    if pool.data.element_size() > 2 or (wide > 128 and room < 200 * 1024):
        return Tiling(64, 32, num_warps=4, num_stages=2)
    if wide > 128:
        return Tiling(128, 64, num_warps=8, num_stages=2)
    if pool.is_fp8 and room < 160 * 1024:  # without wgmma numbers are widened in registers
        return Tiling(128, 32, num_warps=8, num_stages=3)
    large = wide == 128 and not pool.is_fp8 and room > 161 * 1024
    return Tiling(128, 128 if large else 64, num_warps=8, num_stages=3)


def prefill_tiles(
    spans: Sequence[tuple[int, int, int]], num_heads: int, pool: Pool, tiling: Tiling | None = None
) -> np.ndarray:
    """The work list of a step, int32 [T, 2]: (sequence, first row of the tile). Sequences of one
    query token are left to `decode_attention`. spans: Batch.spans. To be copied to the device once
    per step."""
    block_m = (tiling or prefill_tiling(pool)).block_m
    return list_tiles(spans, num_heads // pool.num_kv_heads, block_m)


def list_tiles(spans: Sequence[tuple[int, int, int]], group: int, block_m: int) -> np.ndarray:
    """Tiles of block_m rows; a token has `group` rows. int32 [T, 2], longest context first."""
    parts = [np.empty((0, 3), np.int32)]
    for seq, (_, count, context) in enumerate(spans):
        if count > 1:
            first = np.arange(0, count * group, block_m, dtype=np.int32)
            keys = context - count + (first + block_m - 1) // group
            parts.append(np.stack((np.full_like(first, seq), first, keys.astype(np.int32)), 1))
    tiles = np.concatenate(parts)
    return np.ascontiguousarray(tiles[np.argsort(-tiles[:, 2], kind="stable"), :2])


def prefill_attention(
    out: torch.Tensor,
    queries: torch.Tensor,
    pool: Pool,
    layer: int,
    tiles: torch.Tensor,
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    context_len: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    num_sinks: int = 0,
    sink_queries: torch.Tensor | None = None,
    head_sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    tiling: Tiling | None = None,
) -> None:
    """Rows of out [N, num_heads * value_dim] of the sequences that `tiles` names (int32 [T, 2] on
    the device, from `prefill_tiles` with the same tiling). The new tokens' KV is in the pool
    already. The rest as in `decode_attention`."""
    if not len(tiles):
        return
    sinks = num_sinks if window else 0
    assert not sinks or sink_queries is not None
    tiling = tiling or prefill_tiling(pool)
    _prefill[(len(tiles) * pool.num_kv_heads,)](
        out, queries, sink_queries, head_sinks, pool.data, tiles, query_start, query_len,
        context_len, block_tables, pool.layer_offset(layer), block_tables.stride(0),
        GROUP=num_heads // pool.num_kv_heads, NUM_KV_HEADS=pool.num_kv_heads, NUM_HEADS=num_heads,
        QUERY_STRIDE=queries.stride(0), OUT_STRIDE=out.stride(0), WINDOW=window, NUM_SINKS=sinks,
        SCALE=scale, SOFTCAP=softcap, HEAD_DIM=pool.head_dim,
        BLOCK_D=triton.next_power_of_2(pool.head_dim), VALUE_DIM=pool.value_dim,
        BLOCK_V=triton.next_power_of_2(pool.value_dim), BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n, **pool.constants, num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def _prefill(
    out, queries, sink_queries, head_sinks, pool, tiles, query_start, query_len, context_len,
    tables, layer_offset, table_stride,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr,
    QUERY_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    NUM_SINKS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_STRIDE: tl.constexpr, PLANE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One program: a tile of rows (token, head of the group), and a KV head."""
    item, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    seq, first_row = tl.load(tiles + 2 * item), tl.load(tiles + 2 * item + 1)
    count, context = tl.load(query_len + seq), tl.load(context_len + seq)
    row, dims = first_row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    positions = context - count + row // GROUP
    token = (tl.load(query_start + seq) + row // GROUP).to(tl.int64)[:, None]
    at = (kv_head * GROUP + row % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    inside = (row < count * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    table = tables + seq.to(tl.int64) * table_stride
    keys = pool + layer_offset + kv_head * HEAD_STRIDE
    nearest = context - count + first_row // GROUP  # the first row's position
    farthest = tl.minimum(context - count + (first_row + BLOCK_M - 1) // GROUP, context - 1)
    acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    highest = tl.zeros((BLOCK_M,), dtype=tl.float32) + LOWEST
    unit = context * 0
    kind: tl.constexpr = tl.float16 if FP8 else queries.dtype.element_ty
    if NUM_SINKS > 0:
        sinks = tl.minimum(tl.maximum(farthest - WINDOW + 1, 0), NUM_SINKS)
        q = tl.load(sink_queries + token * NUM_HEADS * HEAD_DIM + at, mask=inside, other=0.0)
        acc, total, highest, unit = attend(
            acc, total, highest, unit, q.to(kind), keys, table, positions, 0, sinks, 0,
            True, True, WINDOW, SCALE, SOFTCAP, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V,
            BLOCK_N, BLOCK_STRIDE, PLANE_STRIDE, BLOCK_SIZE, FP8,
        )  # fmt: skip
    q = tl.load(queries + token * QUERY_STRIDE + at, mask=inside, other=0.0).to(kind)
    low, whole = 0, 0  # the first key that any row sees; from where on the window hides none
    if WINDOW != 0:
        low = first_seen(nearest, WINDOW)
        whole = tl.cdiv(first_seen(farthest, WINDOW), BLOCK_N) * BLOCK_N
        acc, total, highest, unit = attend(
            acc, total, highest, unit, q, keys, table, positions, low // BLOCK_N * BLOCK_N,
            tl.minimum(whole, farthest + 1), low,
            False, True, WINDOW, SCALE, SOFTCAP, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V,
            BLOCK_N, BLOCK_STRIDE, PLANE_STRIDE, BLOCK_SIZE, FP8,
        )  # fmt: skip
    diagonal = (nearest + 1) // BLOCK_N * BLOCK_N  # from where on the order hides some
    acc, total, highest, unit = attend(
        acc, total, highest, unit, q, keys, table, positions, whole, diagonal, low,
        False, False, WINDOW, SCALE, SOFTCAP, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V,
        BLOCK_N, BLOCK_STRIDE, PLANE_STRIDE, BLOCK_SIZE, FP8,
    )  # fmt: skip
    acc, total, highest, unit = attend(
        acc, total, highest, unit, q, keys, table, positions, tl.maximum(whole, diagonal),
        farthest + 1, low,
        False, True, WINDOW, SCALE, SOFTCAP, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V,
        BLOCK_N, BLOCK_STRIDE, PLANE_STRIDE, BLOCK_SIZE, FP8,
    )  # fmt: skip
    if head_sinks is not None:
        sink = tl.load(head_sinks + kv_head * GROUP + row % GROUP)
        acc, total = with_sink(acc, total, highest, sink)
    acc = attended(acc, total, unit, FP8).to(out.dtype.element_ty)
    dims = tl.arange(0, BLOCK_V)
    at = (kv_head * GROUP + row % GROUP)[:, None] * VALUE_DIM + dims[None, :]
    inside = (row < count * GROUP)[:, None] & (dims < VALUE_DIM)[None, :]
    tl.store(out + token * OUT_STRIDE + at, acc, mask=inside)
