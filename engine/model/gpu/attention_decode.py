"""Attention of one query token per sequence over paged KV, split along the context.

One program takes one split of a sequence's context for the heads that share a KV head, and writes
its result with its log-sum-exp; a second kernel merges the splits (FlashDecoding). The kernel
computes from the context how many splits a sequence has, so that a captured step serves every
length: programs without a split end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvrelay.engine.model.gpu.attention_tile import (
    LOG2E,
    LOWEST,
    Tiling,
    attend,
    attended,
    first_seen,
    multiprocessors,
    with_sink,
)
from kvrelay.engine.model.gpu.cache_pool import Pool

MIN_KEYS = 256  # a split has: below, starting a program costs more than it reads
MAX_SPLITS = 64
WAVES = 8  # programs per multiprocessor to aim at: the last ones end about together


def decode_splits(num_seqs: int, num_kv_heads: int, max_context: int, device: torch.device) -> int:
    """Number of splits, so that all multiprocessors have work. From numbers that the host knows:
    a captured step passes its batch size and the longest context that the pool allows."""
    wanted = triton.cdiv(WAVES * multiprocessors(device), max(1, num_seqs * num_kv_heads))
    return max(1, min(wanted, triton.cdiv(max_context, MIN_KEYS), MAX_SPLITS))


def decode_tiling(pool: Pool, group: int) -> Tiling:
    """group: query heads per KV head. Five stages hold two tiles in flight: of two loads that
    depend on each other, the block's number and what is in it, each takes two."""
    wide = pool.data.element_size() * triton.next_power_of_2(pool.head_dim)  # bytes of a key
    block_n = max(16, min(64, 16_384 // wide))
    block_m = min(64, max(16, triton.next_power_of_2(group)))
    stages = 5 if wide <= 512 else 2  # what they hold fits into shared memory
    return Tiling(block_m, block_n, num_warps=4, num_stages=stages)


def decode_attention(
    out: torch.Tensor,
    queries: torch.Tensor,
    pool: Pool,
    layer: int,
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    context_len: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    num_heads: int,
    scale: float,
    num_splits: int,
    window: int = 0,
    num_sinks: int = 0,
    sink_queries: torch.Tensor | None = None,
    head_sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    tiling: Tiling | None = None,
) -> None:
    """For each sequence with query_len == 1, row query_start of queries [N, >= num_heads *
    head_dim] (qkv itself will do) -> the same row of out [N, num_heads * value_dim]. Sequences with
    another query_len are left to `prefill_attention`: their rows of `out` are not touched.

    query_start, query_len, context_len [S] int32; block_tables [S, widest] int32, on the device;
    nothing is read back. window, num_sinks as in ModelConfig; a negative window: chunks of so many
    positions. sink_queries as `rope_write` left them, needed where both are set. head_sinks
    [num_heads] float32: a score more in each head's softmax, which no key has."""
    num_seqs, group = len(query_start), num_heads // pool.num_kv_heads
    if not num_seqs:
        return
    sinks = num_sinks if window else 0
    assert not sinks or sink_queries is not None
    tiling = tiling or decode_tiling(pool, group)
    tiles = triton.cdiv(group, tiling.block_m)
    partial, lse = partials(out, num_seqs, num_heads, num_splits, pool.value_dim)
    constants = pool.constants
    _decode[(pool.num_kv_heads * tiles, num_seqs, num_splits)](
        out, partial, lse, queries, sink_queries, head_sinks, pool.data, query_start, query_len,
        context_len, block_tables, pool.layer_offset(layer), block_tables.stride(0), num_splits,
        DIRECT=num_splits == 1, GROUP=group, TILES=tiles, NUM_HEADS=num_heads,
        QUERY_STRIDE=queries.stride(0), OUT_STRIDE=out.stride(0), WINDOW=window, NUM_SINKS=sinks,
        MIN_KEYS=MIN_KEYS, SCALE=scale, SOFTCAP=softcap, HEAD_DIM=pool.head_dim,
        BLOCK_D=triton.next_power_of_2(pool.head_dim), VALUE_DIM=pool.value_dim,
        BLOCK_V=triton.next_power_of_2(pool.value_dim), BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n, **constants, num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        where = (query_start, query_len, context_len)
        merge(out, partial, lse, *where, window, tiling.block_n, head_sinks)


def partials(
    out: torch.Tensor, num_seqs: int, num_heads: int, num_splits: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for the results of splits, [S, num_heads, num_splits, width], and log-sum-exps."""
    shape = (num_seqs, num_heads, num_splits if num_splits > 1 else 0)
    lse = torch.empty(shape, dtype=torch.float32, device=out.device)
    return torch.empty((*shape, width), dtype=torch.float32, device=out.device), lse


def merge(
    out: torch.Tensor,
    partial: torch.Tensor,
    lse: torch.Tensor,
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    context_len: torch.Tensor,
    window: int,
    block_n: int,
    head_sinks: torch.Tensor | None = None,
) -> None:
    """Splits -> rows of out [N, num_heads * width]."""
    num_seqs, num_heads, num_splits, width = partial.shape
    block_d = min(128, triton.next_power_of_2(width))
    _merge[(num_heads, num_seqs, triton.cdiv(width, block_d))](
        out, partial, lse, head_sinks, query_start, query_len, context_len, num_splits,
        NUM_HEADS=num_heads, OUT_STRIDE=out.stride(0), WINDOW=window, MIN_KEYS=MIN_KEYS,
        BLOCK_N=block_n, SPLITS=triton.next_power_of_2(num_splits), WIDTH=width, BLOCK_D=block_d,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def split_keys(keys, num_splits, BLOCK_N: tl.constexpr, MIN_KEYS: tl.constexpr):
    """Keys of a split; the last one may have fewer."""
    return tl.cdiv(tl.maximum(tl.cdiv(keys, num_splits), MIN_KEYS), BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def _decode(
    out, partial, lse, queries, sink_queries, head_sinks, pool, query_start, query_len, context_len,
    tables, layer_offset, table_stride, num_splits,
    DIRECT: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr, NUM_HEADS: tl.constexpr,
    QUERY_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    NUM_SINKS: tl.constexpr, MIN_KEYS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    PLANE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """One program: (KV head and tile of its group, sequence, split)."""
    kv_head, seq, split = tl.program_id(0) // TILES, tl.program_id(1), tl.program_id(2)
    context = tl.load(context_len + seq)
    low = first_seen(context - 1, WINDOW)
    begin = low // BLOCK_N * BLOCK_N
    keys_each = split_keys(context - begin, num_splits, BLOCK_N, MIN_KEYS)
    first = begin + split * keys_each
    if (tl.load(query_len + seq) != 1) | (first >= context):
        return
    last = tl.minimum(first + keys_each, context)
    row = tl.load(query_start + seq).to(tl.int64)
    member = tl.program_id(0) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    heads, dims = kv_head * GROUP + member, tl.arange(0, BLOCK_D)
    inside = (member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    at = heads[:, None] * HEAD_DIM + dims[None, :]
    table = tables + seq.to(tl.int64) * table_stride
    keys = pool + layer_offset + kv_head * HEAD_STRIDE
    positions = tl.zeros((BLOCK_M,), dtype=tl.int32) + (context - 1)
    acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    highest = tl.zeros((BLOCK_M,), dtype=tl.float32) + LOWEST
    unit = context * 0
    kind: tl.constexpr = tl.float16 if FP8 else queries.dtype.element_ty
    if NUM_SINKS > 0:
        sinks = tl.minimum(low, NUM_SINKS) * (split == 0).to(tl.int32)
        q = tl.load(sink_queries + row * NUM_HEADS * HEAD_DIM + at, mask=inside, other=0.0)
        acc, total, highest, unit = attend(
            acc, total, highest, unit, q.to(kind), keys, table, positions, 0, sinks, 0,
            True, True, WINDOW, SCALE, SOFTCAP, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V,
            BLOCK_N, BLOCK_STRIDE, PLANE_STRIDE, BLOCK_SIZE, FP8,
        )  # fmt: skip
    q = tl.load(queries + row * QUERY_STRIDE + at, mask=inside, other=0.0)
    acc, total, highest, unit = attend(
        acc, total, highest, unit, q.to(kind), keys, table, positions, first, last, low,
        False, True, WINDOW, SCALE, SOFTCAP, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V,
        BLOCK_N, BLOCK_STRIDE, PLANE_STRIDE, BLOCK_SIZE, FP8,
    )  # fmt: skip
    if DIRECT and head_sinks is not None:
        sink = tl.load(head_sinks + heads, mask=member < GROUP, other=0.0)
        acc, total = with_sink(acc, total, highest, sink)
    acc = attended(acc, total, unit, FP8)
    dims = tl.arange(0, BLOCK_V)
    inside = (member < GROUP)[:, None] & (dims < VALUE_DIM)[None, :]
    if DIRECT:
        at = heads[:, None] * VALUE_DIM + dims[None, :]
        tl.store(out + row * OUT_STRIDE + at, acc.to(out.dtype.element_ty), mask=inside)
    else:
        part = (seq.to(tl.int64) * NUM_HEADS + heads) * num_splits + split
        tl.store(partial + part[:, None] * VALUE_DIM + dims[None, :], acc, mask=inside)
        tl.store(lse + part, highest + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def _merge(
    out, partial, lse, head_sinks, query_start, query_len, context_len, num_splits,
    NUM_HEADS: tl.constexpr, OUT_STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    MIN_KEYS: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: (head, sequence, columns of the head)."""
    head, seq = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_len + seq)
    if (tl.load(query_len + seq) != 1) | (context <= 0):
        return
    keys = context - first_seen(context - 1, WINDOW) // BLOCK_N * BLOCK_N
    split, dims = tl.arange(0, SPLITS), tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_split = split < tl.cdiv(keys, split_keys(keys, num_splits, BLOCK_N, MIN_KEYS))
    part = (seq.to(tl.int64) * NUM_HEADS + head) * num_splits + split
    log = tl.load(lse + part, mask=is_split, other=float("-inf"))
    top = tl.max(log, 0)
    rest = 0.0
    if head_sinks is not None:
        sink = tl.load(head_sinks + head) * LOG2E
        top = tl.maximum(top, sink)
        rest = tl.exp2(sink - top)
    weight = tl.exp2(log - top)
    inside = is_split[:, None] & (dims < WIDTH)[None, :]
    acc = tl.load(partial + part[:, None] * WIDTH + dims[None, :], mask=inside, other=0.0)
    merged = tl.sum(acc * weight[:, None], 0) / (tl.sum(weight, 0) + rest)
    row = tl.load(query_start + seq).to(tl.int64)
    at = out + row * OUT_STRIDE + head * WIDTH + dims
    tl.store(at, merged.to(out.dtype.element_ty), mask=dims < WIDTH)
