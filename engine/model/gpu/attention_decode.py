"""Attention of one query token per sequence over paged KV, split along the context.

How a context is split follows from its own length, so a sequence's result is the same in any batch.
A pass begins with a list of its splits, made on the device, since a captured step has to serve
every length: those of long contexts first, which have the most keys. A fixed number of programs
takes them in turn, each for the heads that share a KV head, and writes a result with its
log-sum-exp; a second kernel merges those of a sequence that has several (FlashDecoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvrelay.engine.model.device_memory import MIN_KEYS, most_splits, splits_of
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

WAVES = 8  # programs per multiprocessor to aim at: the last ones end about together
SEQS = 64  # at least what a list is made for: one kernel serves all small batches


@dataclass(frozen=True, slots=True)
class Splits:
    """Splits of the contexts of a pass, for layers of one window and one shape of heads, and where
    their results are kept. On the device."""

    items: torch.Tensor  # [N, 2] int32: (sequence, split); N is a bound
    first: torch.Tensor  # [S] int32: where a sequence's splits begin in `items`
    count: torch.Tensor  # [S] int32: how many it has
    total: torch.Tensor  # [1] int32
    results: torch.Tensor  # [N, num_heads, width] float32; empty: no sequence has several
    lse: torch.Tensor  # [N, num_heads] float32
    most: int  # that a sequence may have
    block_n: int

    def programs(self, each: int) -> int:
        """How many there are, if a split is taken by `each` of them."""
        wanted = triton.cdiv(WAVES * multiprocessors(self.items.device), each)
        return each * min(wanted, len(self.items))


def list_splits(
    query_len: torch.Tensor,
    context_len: torch.Tensor,
    contexts: Sequence[int],
    num_heads: int,
    width: int,
    block_n: int,
    window: int = 0,
) -> Splits | None:
    """Lists splits of the sequences with query_len == 1, of [S] int32 on the device.

    contexts: what the host knows of their lengths, bounds in a captured step. width: of a head's
    result. window: as of `decode_attention`. None: there is none of those sequences."""
    most, device = most_splits(num_heads, width), query_len.device
    bounds = [splits_of(each, most, window) for each in contexts]
    if not any(bounds):
        return None
    num_seqs, bound = len(query_len), sum(bounds)
    items, (first, count), total = (
        torch.empty(shape, dtype=torch.int32, device=device)
        for shape in ((bound, 2), (2, num_seqs), (1,))
    )
    kept = bound if max(bounds) > 1 else 0
    results = torch.empty((kept, num_heads, width), dtype=torch.float32, device=device)
    lse = torch.empty((kept, num_heads), dtype=torch.float32, device=device)
    _list[(1,)](
        items, first, count, total, query_len, context_len, num_seqs, WINDOW=window, MOST=most,
        MIN_KEYS=MIN_KEYS, BLOCK_N=block_n, SEQS=max(SEQS, triton.next_power_of_2(num_seqs)),
        num_warps=4,
    )  # fmt: skip
    return Splits(items, first, count, total, results, lse, most, block_n)


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
    context_len: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    num_heads: int,
    scale: float,
    splits: Splits,
    window: int = 0,
    num_sinks: int = 0,
    sink_queries: torch.Tensor | None = None,
    head_sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    tiling: Tiling | None = None,
) -> None:
    """For each sequence in `splits`, row query_start of queries [N, >= num_heads * head_dim] (qkv
    itself will do) -> the same row of out [N, num_heads * value_dim]. Rows of other sequences are
    not touched: those are left to `prefill_attention`.

    query_start, context_len [S] int32; block_tables [S, widest] int32, on the device; nothing is
    read back. splits: of `list_splits`, with this window and this tiling's block_n. window,
    num_sinks as in ModelConfig; a negative window: chunks of so many positions. sink_queries as
    `rope_write` left them, needed where both are set. head_sinks [num_heads] float32: a score more
    in each head's softmax, which no key has."""
    group = num_heads // pool.num_kv_heads
    sinks = num_sinks if window else 0
    assert not sinks or sink_queries is not None
    tiling = tiling or decode_tiling(pool, group)
    assert tiling.block_n == splits.block_n
    tiles = triton.cdiv(group, tiling.block_m)
    each = pool.num_kv_heads * tiles
    _decode[(splits.programs(each),)](
        out, splits.results, splits.lse, queries, sink_queries, head_sinks, pool.data, splits.items,
        splits.first, splits.count, splits.total, query_start, context_len, block_tables,
        pool.layer_offset(layer), block_tables.stride(0), SPLIT=len(splits.results) > 0, EACH=each,
        GROUP=group, TILES=tiles, NUM_HEADS=num_heads, QUERY_STRIDE=queries.stride(0),
        OUT_STRIDE=out.stride(0), WINDOW=window, NUM_SINKS=sinks, MOST=splits.most,
        MIN_KEYS=MIN_KEYS, SCALE=scale, SOFTCAP=softcap, HEAD_DIM=pool.head_dim,
        BLOCK_D=triton.next_power_of_2(pool.head_dim), VALUE_DIM=pool.value_dim,
        BLOCK_V=triton.next_power_of_2(pool.value_dim), BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n, **pool.constants, num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )  # fmt: skip
    merge(out, splits, query_start, head_sinks)


def merge(
    out: torch.Tensor,
    splits: Splits,
    query_start: torch.Tensor,
    head_sinks: torch.Tensor | None = None,
) -> None:
    """Results of sequences with several splits -> rows of out [N, num_heads * width]."""
    kept, num_heads, width = splits.results.shape
    if not kept:
        return
    block_d = min(128, triton.next_power_of_2(width))
    _merge[(num_heads, len(query_start), triton.cdiv(width, block_d))](
        out, splits.results, splits.lse, head_sinks, splits.first, splits.count, query_start,
        NUM_HEADS=num_heads, OUT_STRIDE=out.stride(0), SPLITS=triton.next_power_of_2(splits.most),
        WIDTH=width, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip


@triton.jit
def split_keys(keys, MOST: tl.constexpr, BLOCK_N: tl.constexpr, MIN_KEYS: tl.constexpr):
    """Keys of a split of so many; the last one may have fewer."""
    return tl.cdiv(tl.maximum(tl.cdiv(keys, MOST), MIN_KEYS), BLOCK_N) * BLOCK_N


@triton.jit
def _list(
    items, first, count, total, query_len, context_len, num_seqs, WINDOW: tl.constexpr,
    MOST: tl.constexpr, MIN_KEYS: tl.constexpr, BLOCK_N: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """One program for all sequences."""
    seq = tl.arange(0, SEQS)
    is_seq = seq < num_seqs
    context = tl.load(context_len + seq, mask=is_seq, other=0)
    is_one = (tl.load(query_len + seq, mask=is_seq, other=0) == 1) & (context > 0)
    keys = context - first_seen(tl.maximum(context - 1, 0), WINDOW) // BLOCK_N * BLOCK_N
    keys_each = split_keys(keys, MOST, BLOCK_N, MIN_KEYS)
    splits = tl.where(is_one, tl.cdiv(keys, keys_each), 0)
    of_long = tl.where(keys_each > split_keys(1, MOST, BLOCK_N, MIN_KEYS), splits, 0)
    of_short = splits - of_long
    behind = tl.sum(of_long, 0) + tl.cumsum(of_short, 0) - of_short
    begin = tl.where(of_long > 0, tl.cumsum(of_long, 0) - of_long, behind)
    tl.store(first + seq, begin, mask=is_seq)
    tl.store(count + seq, splits, mask=is_seq)
    tl.store(total, tl.sum(splits, 0))
    for split in range(tl.max(splits, 0)):
        at = items + 2 * (begin + split)
        tl.store(at, seq, mask=split < splits)
        tl.store(at + 1, tl.zeros((SEQS,), dtype=tl.int32) + split, mask=split < splits)


@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    out, results, lse, queries, sink_queries, head_sinks, pool, items, first_items, counts, total,
    query_start, context_len, tables, layer_offset, table_stride,
    SPLIT: tl.constexpr, EACH: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr,
    NUM_HEADS: tl.constexpr, QUERY_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, NUM_SINKS: tl.constexpr, MOST: tl.constexpr, MIN_KEYS: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, PLANE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One program: a KV head and a tile of its group, and one split after another. EACH programs
    take the same splits."""
    place = tl.program_id(0) % EACH
    kv_head, member = place // TILES, place % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    heads, dims, value_dims = kv_head * GROUP + member, tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    inside = (member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    at = heads[:, None] * HEAD_DIM + dims[None, :]
    out_at = heads[:, None] * VALUE_DIM + value_dims[None, :]
    is_out = (member < GROUP)[:, None] & (value_dims < VALUE_DIM)[None, :]
    keys = pool + layer_offset + kv_head * HEAD_STRIDE
    kind: tl.constexpr = tl.float16 if FP8 else queries.dtype.element_ty
    for item in range(tl.program_id(0) // EACH, tl.load(total), tl.num_programs(0) // EACH):
        seq, split = tl.load(items + 2 * item), tl.load(items + 2 * item + 1)
        context, row = tl.load(context_len + seq), tl.load(query_start + seq).to(tl.int64)
        low = first_seen(context - 1, WINDOW)
        begin = low // BLOCK_N * BLOCK_N
        keys_each = split_keys(context - begin, MOST, BLOCK_N, MIN_KEYS)
        first = begin + split * keys_each
        last = tl.minimum(first + keys_each, context)
        table = tables + seq.to(tl.int64) * table_stride
        positions = tl.zeros((BLOCK_M,), dtype=tl.int32) + (context - 1)
        acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
        summed = tl.zeros((BLOCK_M,), dtype=tl.float32)
        highest = tl.zeros((BLOCK_M,), dtype=tl.float32) + LOWEST
        unit = context * 0
        if NUM_SINKS > 0:
            sinks = tl.minimum(low, NUM_SINKS) * (split == 0).to(tl.int32)
            q = tl.load(sink_queries + row * NUM_HEADS * HEAD_DIM + at, mask=inside, other=0.0)
            acc, summed, highest, unit = attend(
                acc, summed, highest, unit, q.to(kind), keys, table, positions, 0, sinks, 0,
                True, True, WINDOW, SCALE, SOFTCAP, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V,
                BLOCK_N, BLOCK_STRIDE, PLANE_STRIDE, BLOCK_SIZE, FP8,
            )  # fmt: skip
        q = tl.load(queries + row * QUERY_STRIDE + at, mask=inside, other=0.0)
        acc, summed, highest, unit = attend(
            acc, summed, highest, unit, q.to(kind), keys, table, positions, first, last, low,
            False, True, WINDOW, SCALE, SOFTCAP, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V,
            BLOCK_N, BLOCK_STRIDE, PLANE_STRIDE, BLOCK_SIZE, FP8,
        )  # fmt: skip
        is_whole = tl.load(counts + seq) == 1
        if SPLIT:
            part = ((tl.load(first_items + seq) + split).to(tl.int64) * NUM_HEADS) + heads
            is_part = is_out & (not is_whole)
            at_part = results + part[:, None] * VALUE_DIM + value_dims[None, :]
            tl.store(at_part, attended(acc, summed, unit, FP8), mask=is_part)
            is_part = (member < GROUP) & (not is_whole)
            tl.store(lse + part, highest + tl.log2(summed), mask=is_part)
        if head_sinks is not None:
            sink = tl.load(head_sinks + heads, mask=member < GROUP, other=0.0)
            acc, summed = with_sink(acc, summed, highest, sink)
        acc = attended(acc, summed, unit, FP8).to(out.dtype.element_ty)
        tl.store(out + row * OUT_STRIDE + out_at, acc, mask=is_out & is_whole)


@triton.jit
def _merge(
    out, results, lse, head_sinks, first_items, counts, query_start, NUM_HEADS: tl.constexpr,
    OUT_STRIDE: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: (head, sequence, columns of the head)."""
    head, seq = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + seq)
    if count < 2:
        return
    split, dims = tl.arange(0, SPLITS), tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_split = split < count
    part = (tl.load(first_items + seq) + split).to(tl.int64) * NUM_HEADS + head
    log = tl.load(lse + part, mask=is_split, other=float("-inf"))
    top = tl.max(log, 0)
    rest = 0.0
    if head_sinks is not None:
        sink = tl.load(head_sinks + head) * LOG2E
        top = tl.maximum(top, sink)
        rest = tl.exp2(sink - top)
    weight = tl.exp2(log - top)
    inside = is_split[:, None] & (dims < WIDTH)[None, :]
    acc = tl.load(results + part[:, None] * WIDTH + dims[None, :], mask=inside, other=0.0)
    merged = tl.sum(acc * weight[:, None], 0) / (tl.sum(weight, 0) + rest)
    row = tl.load(query_start + seq).to(tl.int64)
    at = out + row * OUT_STRIDE + head * WIDTH + dims
    tl.store(at, merged.to(out.dtype.element_ty), mask=dims < WIDTH)
