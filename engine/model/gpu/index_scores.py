"""Scores of positions for sparse attention, over paged index keys.

A program scores a tile of positions for one token, with all its heads: sum over heads of weight *
relu(query * key). Sums are float32, in an order that depends on the shapes alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvrelay.engine.model.gpu.attention_tile import factor, load_rows, upcast
from kvrelay.engine.model.gpu.cache_pool import Pool

KEYS, HEADS = 64, 32  # a tile has


def index_scores(
    queries: torch.Tensor,
    weights: torch.Tensor,
    pool: Pool,
    positions: torch.Tensor,
    sequences: torch.Tensor,
    block_tables: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """queries [N, index heads * dim], rotated, weights [N, index heads] float32, each token's
    position [N] int64 and row of the block tables [N] int32 -> float32 [N, longest]; -inf past the
    token. pool: of index keys, at its first layer."""
    num_tokens, num_heads = weights.shape
    out = torch.empty((num_tokens, longest), dtype=torch.float32, device=queries.device)
    assert queries.is_contiguous()
    assert weights.is_contiguous()
    _scores[(triton.cdiv(longest, KEYS), num_tokens)](
        out, queries, weights, pool.data, positions, sequences, block_tables,
        block_tables.stride(0), longest, NUM_HEADS=num_heads, DIM=pool.head_dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(pool.head_dim)), HEADS=HEADS, KEYS=KEYS,
        BLOCK_STRIDE=pool.data.stride(0), BLOCK_SIZE=pool.block_size, FP8=pool.is_fp8, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_stride", "longest"])
def _scores(
    out, queries, weights, pool, positions, sequences, tables, table_stride, longest,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    n, position = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.load(positions + token)
    total = tl.zeros((KEYS,), dtype=tl.float32)
    if tl.program_id(0) * KEYS <= position:
        dims, heads = tl.arange(0, BLOCK_DIM), tl.arange(0, HEADS)
        readable = n <= position
        table = tables + tl.load(sequences + token).to(tl.int64) * table_stride
        block = tl.load(table + n // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
        head = pool + block * BLOCK_STRIDE
        at = (head + n % BLOCK_SIZE * DIM)[:, None] + dims[None, :]
        key = load_rows(at, readable, dims, DIM, BLOCK_DIM, True)
        kind: tl.constexpr = tl.float16 if FP8 else queries.dtype.element_ty
        for first in range(0, NUM_HEADS, HEADS):
            h = first + heads
            inside = (h < NUM_HEADS)[:, None] & (dims < DIM)[None, :]
            query_at = queries + (token * NUM_HEADS + h)[:, None] * DIM + dims[None, :]
            query = tl.load(query_at, mask=inside, other=0.0).to(kind)
            found = tl.dot(query, tl.trans(upcast(key, query, FP8)), input_precision="ieee")
            weight = tl.load(weights + token * NUM_HEADS + h, mask=h < NUM_HEADS, other=0.0)
            total += tl.sum(weight[:, None] * tl.maximum(found, 0.0), 0)
        if FP8:  # a scale is positive, and comes after the sum as well as before it
            scale_at = head + (BLOCK_SIZE * DIM + n % BLOCK_SIZE)
            total = total * factor(tl.load(scale_at, mask=readable, other=0).to(tl.int32))
    total = tl.where(n <= position, total, float("-inf"))
    tl.store(out + token * longest + n, total, mask=n < longest)
