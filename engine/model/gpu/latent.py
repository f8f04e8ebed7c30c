"""Multi-head latent attention over paged latents.

What is cached of a token is one vector [rank + rope_dim] for all heads; keys are all of it, values
its first `rank` numbers, so that a tile is read once and multiplied twice. Rows are (token, head)
pairs. Decode goes by a list of splits as in `attention_decode`. Sparse attention is a decode of
each token whose context is what was selected for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kvrelay.engine.model.device_memory import MIN_KEYS
from kvrelay.engine.model.gpu.attention_decode import Splits, merge, split_keys
from kvrelay.engine.model.gpu.attention_prefill import list_tiles
from kvrelay.engine.model.gpu.attention_tile import (
    LOWEST,
    Tiling,
    accumulate,
    attended,
    factor,
    load_rows,
    scaled_scores,
    shared_memory,
    upcast,
)
from kvrelay.engine.model.gpu.cache_pool import Pool


def latent_tiling(pool: Pool, num_heads: int) -> Tiling:
    """Serves decode and prefill alike. A tile of 64 rows, multiplied from shared memory, reads
    latents once for 64 heads."""
    room = shared_memory(pool.data.device)
    if pool.data.element_size() > 2:
        return Tiling(16, 16, num_warps=4, num_stages=2)
    if num_heads > 16 and room > 160 * 1024:
        return Tiling(64, 32, num_warps=8, num_stages=2)
    return Tiling(16, 32, num_warps=8 if pool.is_fp8 else 4, num_stages=3)


def latent_tiles(
    spans: Sequence[tuple[int, int, int]], num_heads: int, pool: Pool, tiling: Tiling | None = None
) -> np.ndarray:
    """Lists tiles like `prefill_tiles`, for `latent_prefill`."""
    return list_tiles(spans, num_heads, (tiling or latent_tiling(pool, num_heads)).block_m)


@dataclass(frozen=True, slots=True)
class Selected:
    """What N tokens attend to, each alone."""

    positions: torch.Tensor  # [N, topk] int32, ascending; those past `context_len` are not read
    sequences: torch.Tensor  # [N] int32: rows of the block tables
    query_start: torch.Tensor  # [N] int32: each token's own row
    query_len: torch.Tensor  # [N] int32: ones
    context_len: torch.Tensor  # [N] int32: how many positions, up to topk

    def part(self, rows: slice) -> Selected:
        fields = self.positions, self.sequences, self.query_start, self.query_len, self.context_len
        return Selected(*(each[rows] for each in fields))


def latent_decode(
    out: torch.Tensor,
    queries: torch.Tensor,
    pool: Pool,
    layer: int,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    rank: int,
    scale: float,
    splits: Splits,
    softcap: float = 0.0,
    tiling: Tiling | None = None,
    selected: Selected | None = None,
) -> None:
    """queries [N, num_heads, rank + rope_dim] -> out [N, num_heads, rank], both contiguous; the
    rest as in `decode_attention`. selected: its lengths and starts are those that are given."""
    num_heads = queries.shape[1]
    tiling = tiling or latent_tiling(pool, num_heads)
    assert tiling.block_n == splits.block_n
    tiles = triton.cdiv(num_heads, tiling.block_m)
    positions = sequences = None
    if selected is not None:
        positions, sequences = selected.positions, selected.sequences
    _latent[(splits.programs(tiles),)](
        out, splits.results, splits.lse, queries, pool.data, splits.items, splits.first,
        splits.count, splits.total, positions, sequences, query_start, query_start, context_len,
        block_tables, pool.layer_offset(layer), block_tables.stride(0), 0, DECODE=True,
        SPLIT=len(splits.results) > 0, MOST=splits.most, TILES=tiles,
        TOPK=0 if positions is None else positions.shape[1],
        **_constants(queries, pool, rank, scale, softcap), **_launch(tiling),
    )  # fmt: skip
    merge(out.view(len(out), -1), splits, query_start)


def latent_prefill(
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
    rank: int,
    scale: float,
    softcap: float = 0.0,
    tiling: Tiling | None = None,
) -> None:
    """As `latent_decode`, of the sequences that `tiles` names (from `latent_tiles`)."""
    if not len(tiles):
        return
    tiling = tiling or latent_tiling(pool, queries.shape[1])
    _latent[(len(tiles),)](
        out, None, None, queries, pool.data, tiles, None, None, None, None, None, query_start,
        query_len, context_len, block_tables, pool.layer_offset(layer), block_tables.stride(0),
        len(tiles), DECODE=False, SPLIT=False, MOST=1, TILES=1, TOPK=0,
        **_constants(queries, pool, rank, scale, softcap), **_launch(tiling),
    )  # fmt: skip


def _constants(
    queries: torch.Tensor, pool: Pool, rank: int, scale: float, softcap: float
) -> dict[str, float]:
    assert queries.is_contiguous()
    rope_dim = pool.head_dim - rank
    return {
        "NUM_HEADS": queries.shape[1],
        "RANK": rank,
        "ROPE_DIM": rope_dim,
        "BLOCK_RANK": triton.next_power_of_2(rank),
        "BLOCK_ROPE": max(16, triton.next_power_of_2(rope_dim)),
        "SCALE": scale,
        "SOFTCAP": softcap,
        "MIN_KEYS": MIN_KEYS,
        **pool.constants,
    }


def _launch(tiling: Tiling) -> dict[str, int]:
    return {
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }


@triton.jit
def _attend(
    acc, total, highest, unit, query, query_rope, latents, table, selected, positions, first, last,
    MASKED: tl.constexpr, TOPK: tl.constexpr, RANK: tl.constexpr, ROPE_DIM: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """As `attention_tile.attend`; `query` [M, BLOCK_RANK] and `query_rope` [M, BLOCK_ROPE] are the
    two parts of the rows. With TOPK the context is the positions `selected`."""
    dims, behind = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    for start in tl.range(first, last, BLOCK_N, disable_licm=True):  # kept, it would be spilled
        n = start + tl.arange(0, BLOCK_N)
        readable, place = n < last, n
        if TOPK:
            place = tl.load(selected + n, mask=readable, other=0)
        if MASKED:
            block = tl.load(table + place // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
        else:
            block = tl.load(table + place // BLOCK_SIZE).to(tl.int64)
        head = latents + block * BLOCK_STRIDE
        scale_bytes = n
        if FP8:
            scale_at = head + (BLOCK_SIZE * (RANK + ROPE_DIM) + place % BLOCK_SIZE)
            scale_bytes = tl.load(scale_at, mask=readable, other=0).to(tl.int32)
        at = (head + place % BLOCK_SIZE * (RANK + ROPE_DIM))[:, None]
        latent = load_rows(at + dims[None, :], readable, dims, RANK, BLOCK_RANK, MASKED)
        key = load_rows(at + RANK + behind[None, :], readable, behind, ROPE_DIM, BLOCK_ROPE, MASKED)
        latent, key = upcast(latent, query, FP8), upcast(key, query, FP8)
        scores = tl.dot(query_rope, tl.trans(key), input_precision="ieee")
        scores = tl.dot(query, tl.trans(latent), scores, input_precision="ieee")
        if FP8:
            scores = scores * factor(scale_bytes)[None, :]
        scores = scaled_scores(scores, SCALE, SOFTCAP)
        if MASKED:
            visible = (n[None, :] <= positions[:, None]) & readable[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        acc, total, highest, unit = accumulate(
            acc, total, highest, unit, scores, latent, scale_bytes, FP8
        )
    return acc, total, highest, unit


@triton.jit(do_not_specialize=["table_stride", "num_items"])
def _latent(
    out, results, lse, queries, pool, items, first_items, counts, total, selected, sequences,
    query_start, query_len, context_len, tables, layer_offset, table_stride, num_items,
    DECODE: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr, TILES: tl.constexpr,
    TOPK: tl.constexpr, NUM_HEADS: tl.constexpr, RANK: tl.constexpr, ROPE_DIM: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    MIN_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, PLANE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One program: a tile of rows, of a work list or, in decode, of one split after another. TILES
    programs take the same splits."""
    if DECODE:
        num_items = tl.load(total)
    each = tl.num_programs(0) // TILES
    # What is the same in each round is computed again: kept, it would be spilled.
    for item in tl.range(tl.program_id(0) // TILES, num_items, each, disable_licm=True):
        seq, first_row = tl.load(items + 2 * item), tl.load(items + 2 * item + 1)
        context, first, count, split = tl.load(context_len + seq), 0, 1, 0
        if DECODE:
            split, first_row = first_row, tl.program_id(0) % TILES * BLOCK_M
            keys_each = split_keys(context, MOST, BLOCK_N, MIN_KEYS)
            first = split * keys_each
            last = tl.minimum(first + keys_each, context)
            diagonal = last // BLOCK_N * BLOCK_N
        else:
            count = tl.load(query_len + seq)
            farthest = context - count + (first_row + BLOCK_M - 1) // NUM_HEADS
            last = tl.minimum(farthest + 1, context)
            diagonal = (context - count + first_row // NUM_HEADS + 1) // BLOCK_N * BLOCK_N
        row = first_row + tl.arange(0, BLOCK_M)
        positions = context - count + row // NUM_HEADS
        token = (tl.load(query_start + seq) + row // NUM_HEADS).to(tl.int64)
        vector = (token * NUM_HEADS + row % NUM_HEADS)[:, None]
        dims, behind = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
        is_row = row < count * NUM_HEADS
        inside = is_row[:, None] & (dims < RANK)[None, :]
        kind: tl.constexpr = tl.float16 if FP8 else queries.dtype.element_ty
        at = queries + vector * (RANK + ROPE_DIM)
        query = tl.load(at + dims[None, :], mask=inside, other=0.0).to(kind)
        rope_inside = is_row[:, None] & (behind < ROPE_DIM)[None, :]
        query_rope = tl.load(at + RANK + behind[None, :], mask=rope_inside, other=0.0).to(kind)
        acc = tl.zeros((BLOCK_M, BLOCK_RANK), dtype=tl.float32)
        summed = tl.zeros((BLOCK_M,), dtype=tl.float32)
        highest = tl.zeros((BLOCK_M,), dtype=tl.float32) + LOWEST
        unit, of, chosen = context * 0, seq, selected
        if TOPK:
            of = tl.load(sequences + seq)
            chosen = selected + seq.to(tl.int64) * TOPK
        table, latents = tables + of.to(tl.int64) * table_stride, pool + layer_offset
        acc, summed, highest, unit = _attend(
            acc, summed, highest, unit, query, query_rope, latents, table, chosen, positions,
            first, diagonal, False, TOPK, RANK, ROPE_DIM, BLOCK_RANK, BLOCK_ROPE, SCALE, SOFTCAP,
            BLOCK_N, BLOCK_STRIDE, BLOCK_SIZE, FP8,
        )  # fmt: skip
        acc, summed, highest, unit = _attend(
            acc, summed, highest, unit, query, query_rope, latents, table, chosen, positions,
            diagonal, last, True, TOPK, RANK, ROPE_DIM, BLOCK_RANK, BLOCK_ROPE, SCALE, SOFTCAP,
            BLOCK_N, BLOCK_STRIDE, BLOCK_SIZE, FP8,
        )  # fmt: skip
        acc = attended(acc, summed, unit, FP8)
        if SPLIT:
            is_whole = tl.load(counts + seq) == 1
            part = (tl.load(first_items + seq) + split).to(tl.int64) * NUM_HEADS + row
            at_part = results + part[:, None] * RANK + dims[None, :]
            tl.store(at_part, acc, mask=inside & (not is_whole))
            tl.store(lse + part, highest + tl.log2(summed), mask=is_row & (not is_whole))
            inside = inside & is_whole
        acc = acc.to(out.dtype.element_ty)
        tl.store(out + vector * RANK + dims[None, :], acc, mask=inside)
