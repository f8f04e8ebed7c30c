"""The gated delta rule and Mamba 2 over prompts, in chunks of tokens, by matrix products.

Within a chunk that begins with a head's memory M, where token t has key k, query q, value v and the
decays up to it multiply to d, what is added for all its tokens is the solution U of a triangular
system (the WY form of the delta rule):

    U = T (V - (K d) M),  T = (I + A)^-1 beta,  A[t, i] = beta[t] k[t] . k[i] d[t] / d[i], i < t
    outputs = (Q d) M + P U,  P[t, i] = q[t] . k[i] d[t] / d[i], i <= t
    M after it = d[last] M + (K d[last] / d)^T U

Mamba 2 corrects nothing: its U is V times the step. `_within` finds T, P and the sums of log-decays
of all chunks side by side; `_across` passes a sequence's chunks one after the other, one program
for a head's columns. Quotients of decays are made as one exponential of a difference, which is at
most 0: no decay is too strong.

Chunks begin where blocks do, and every `CHUNK` tokens from there: so a block's state, and a prompt
that is cut at the ends of blocks, have the bits of the whole, whatever is beside them in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvrelay.engine.model.recurrence import DeltaRows
from kvrelay.engine.model.state_layout import Recurrent
from kvrelay.engine.model.states import StatePool
from kvrelay.engine.model.weights import RecurrentWeights

CHUNK = 32  # tokens


COLUMNS = 16  # a program has so many of a head's memory: with 32, registers spill
PART = 64  # keys of a memory that products take at once
PRECISION = tl.constexpr("tf32x3")  # float32 in three products of tensor cores


class Chunks(NamedTuple):
    """The sequences of a step that are passed in chunks."""

    chunks: torch.Tensor  # [T, 4] int32: sequence, first row, rows, row of its table to store or -1
    prompts: torch.Tensor  # [P, 3] int32: sequence, its first chunk, and the one after its last


class Where(NamedTuple):
    """Where the tokens of a step are; on the device."""

    tables: torch.Tensor  # [S, widest] int32, of the group of layers
    slots: torch.Tensor  # [N] int64; READS: the state is not changed; NO_STATE: there is none
    positions: torch.Tensor  # [N] int64
    query_start: torch.Tensor  # [S] int32
    query_len: torch.Tensor  # [S] int32; 0: the row is passed with those of the one before
    chunks: Chunks | None = None  # None: no sequence has more than one token
    keeps: bool = False  # what layers are given is kept, to be passed again


def list_chunks(
    spans: Sequence[tuple[int, int, int]], block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """`Chunks` of sequences with more than one token. spans: Batch.spans."""
    chunks, prompts, count = [np.empty((0, 4), np.int32)], list[tuple[int, int, int]](), 0
    for seq, (row, num_tokens, end) in enumerate(spans):
        if num_tokens == 1:
            continue
        start = end - num_tokens
        positions = np.arange(start, end)
        is_first = positions % block_size % CHUNK == 0
        is_first[0] = True
        firsts = positions[is_first]
        ends = np.append(firsts[1:], end)
        into = np.where((ends % block_size == 0) | (ends == end), (ends - 1) // block_size, -1)
        own = np.stack((np.full_like(firsts, seq), firsts - start + row, ends - firsts, into), 1)
        chunks.append(own.astype(np.int32))
        prompts.append((seq, count, count + len(own)))
        count += len(own)
    return np.concatenate(chunks), np.array(prompts, np.int32).reshape(-1, 3)


def scan_chunks(
    rows: DeltaRows,
    weights: RecurrentWeights,
    shape: Recurrent,
    pool: StatePool,
    layer: int,
    block_size: int,
    where: Where,
    out: torch.Tensor,
) -> None:
    """Rows of out [N, num_heads * value_dim] of the sequences in `where.chunks`, and their states.
    The rest as in `GpuRecurrent.delta_rule`."""
    assert where.chunks is not None
    (chunks, prompts), (qkv, decay, beta) = where.chunks, rows
    heads, keys, values = shape.num_heads, shape.key_dim, shape.value_dim
    corrects, by_keys = weights.skip is None, decay.shape[1] > heads
    shapes = ((CHUNK if corrects else 0), CHUNK, keys if by_keys else 1, 2)
    solved, scores, decays, lengths = (
        torch.empty((len(qkv), heads, width), dtype=torch.float32, device=qkv.device)
        for width in shapes
    )
    wide = triton.next_power_of_2(keys)
    part = min(PART, wide)
    assert wide <= 4 * part
    _within[(len(chunks), heads)](
        qkv, decay, beta, weights.rate, weights.decay_bias, chunks, solved, scores, decays, lengths,
        qkv.stride(0), decay.stride(0), beta.stride(0), heads, shape.num_key_heads, keys,
        SCALE=keys**-0.5, CORRECTS=corrects, BY_KEYS=by_keys, KEYS=wide, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    _across[(len(prompts), heads, triton.cdiv(values, COLUMNS))](
        qkv, decay, weights.decay_bias, weights.skip, out, pool.memory_of(layer), solved, scores,
        decays, lengths, chunks, prompts, where.tables, where.slots, where.positions, qkv.stride(0),
        decay.stride(0), where.tables.stride(0), pool.stride, pool.unit_stride, block_size, heads,
        shape.num_key_heads, pool.layout.num_heads, keys, values, BY_KEYS=by_keys,
        PARTS=wide // part, PART=part, COLUMNS=COLUMNS, CHUNK=CHUNK, num_warps=4, num_stages=1,
    )  # fmt: skip


@triton.jit
def softplus(x):
    """log(1 + exp(x)); log(1 + u) = 2 atanh(u / (2 + u)), whose argument is at most 1/3 here."""
    u = tl.exp(-tl.abs(x))
    s = u / (u + 2.0)
    p = s * s
    series = 2.0 / 13.0 + p * (2.0 / 15.0)
    for n in tl.static_range(6):
        series = series * p + 2.0 / (11 - 2 * n)
    return tl.maximum(x, 0.0) + series * s


@triton.jit
def _length(x, CORRECTS: tl.constexpr):
    """What rows are multiplied by to be of length 1; Mamba 2 leaves them."""
    squares = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
    return tl.rsqrt(squares + 1e-6) if CORRECTS else squares * 0.0 + 1.0


@triton.jit
def _inverse(below, t, count):
    """That of 1 + `below`, which has numbers below the diagonal alone, by substitution: row i is
    done, and what it says is taken from those behind it. (Powers of the matrix, by which few
    products would give the inverse, cancel where keys are alike.)"""
    inverse = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    for i in range(count):
        column = tl.sum(tl.where(t[None, :] == i, below, 0.0), axis=1)
        row = tl.sum(tl.where(t[:, None] == i, inverse, 0.0), axis=0)
        inverse -= column[:, None] * row[None, :]
    return inverse


@triton.jit
def _within(
    qkv, decay, beta, rate, decay_bias, chunks, solved, scores, decays, lengths, qkv_stride,
    decay_stride, beta_stride, num_heads, num_key_heads, key_dim, SCALE: tl.constexpr,
    CORRECTS: tl.constexpr,
    BY_KEYS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """T and P of a chunk and head, and sums of log-decays up to each of its tokens."""
    chunk, head = chunks + tl.program_id(0) * 4, tl.program_id(1)
    first, count = tl.load(chunk + 1).to(tl.int64), tl.load(chunk + 2)
    t, k = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    rows, is_row, is_key = first + t, t < count, k < key_dim
    inside = is_row[:, None] & is_key[None, :]
    query_at = head // (num_heads // num_key_heads) * key_dim + k
    key_at = num_key_heads * key_dim + query_at
    x = qkv + rows[:, None] * qkv_stride
    query = tl.load(x + query_at[None, :], mask=inside, other=0.0)
    key = tl.load(x + key_at[None, :], mask=inside, other=0.0)
    query_by, key_by = _length(query, CORRECTS), _length(key, CORRECTS)
    if CORRECTS:
        query_by *= SCALE
        at = lengths + (rows * num_heads + head) * 2
        tl.store(at, query_by, mask=is_row)
        tl.store(at + 1, key_by, mask=is_row)
    is_earlier = t[None, :] < t[:, None]
    is_seen = t[None, :] <= t[:, None]
    factor = tl.load(rate + head)
    if BY_KEYS:
        at = head * key_dim + k
        number_at = decay + rows[:, None] * decay_stride + at[None, :]
        number = tl.load(number_at, mask=inside, other=0.0).to(tl.float32)
        offset = tl.load(decay_bias + at, mask=is_key, other=0.0)
        step = tl.where(inside, softplus(number + offset[None, :]), 0.0)
        total = tl.cumsum(factor * step, axis=0)
        sums = decays + (rows * num_heads)[:, None] * key_dim + at[None, :]
        tl.store(sums, total, mask=inside)
        tl.debug_barrier()
        by_query = tl.zeros([CHUNK, CHUNK], tl.float32)
        by_key = tl.zeros([CHUNK, CHUNK], tl.float32)
        for i in range(count):
            row = first + i
            key_i = tl.load(qkv + row * qkv_stride + key_at, mask=is_key, other=0.0).to(tl.float32)
            total_i = tl.load(decays + row * num_heads * key_dim + at, mask=is_key, other=0.0)
            left = tl.exp(tl.minimum(total - total_i[None, :], 0.0)) * key_i[None, :]
            is_i = t[None, :] == i
            said = tl.sum(query.to(tl.float32) * left, axis=1)
            by_query = tl.where(is_i, said[:, None], by_query)
            said = tl.sum(key.to(tl.float32) * left, axis=1)
            by_key = tl.where(is_i, said[:, None], by_key)
    else:
        number = tl.load(decay + rows * decay_stride + head, mask=is_row, other=0.0).to(tl.float32)
        step = tl.where(is_row, softplus(number + tl.load(decay_bias + head)), 0.0)
        total = tl.cumsum(factor * step, axis=0)
        tl.store(decays + rows * num_heads + head, total, mask=is_row)
        left = tl.exp(tl.where(is_seen, total[:, None] - total[None, :], 0.0))
        by_query = tl.dot(query, tl.trans(key), input_precision=PRECISION) * left
        by_key = by_query
        if CORRECTS:
            by_key = tl.dot(key, tl.trans(key), input_precision=PRECISION) * left
    place = (rows * num_heads + head)[:, None] * CHUNK + t[None, :]
    score = by_query * (query_by[:, None] * key_by[None, :])
    tl.store(scores + place, tl.where(is_seen, score, 0.0), mask=is_row[:, None])
    if CORRECTS:
        added = tl.load(beta + rows * beta_stride + head, mask=is_row, other=0.0)
        added = tl.where(is_row, tl.sigmoid(added.to(tl.float32)), 0.0)
        by_key *= (added * key_by)[:, None] * key_by[None, :]
        inverse = _inverse(tl.where(is_earlier, by_key, 0.0), t, count)
        tl.store(solved + place, inverse * added[None, :], mask=is_row[:, None])


@triton.jit
def _keys_of(x, rows, is_row, part, length, row_stride, key_dim, PART: tl.constexpr):
    """Numbers of some of the keys of a chunk's rows, each row times its length, in float32."""
    k = part * PART + tl.arange(0, PART)
    at = x + rows[:, None] * row_stride + k[None, :]
    found = tl.load(at, mask=is_row[:, None] & (k < key_dim)[None, :], other=0.0).to(tl.float32)
    return found * length[:, None]


@triton.jit
def _say(
    memory, value, qkv, rows, is_row, query_by, key_by, kept, qkv_stride, keys_apart, decays,
    decays_stride, key_dim, CORRECTS: tl.constexpr, BY_KEYS: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """What the memory says of a chunk's queries, and what is wrong with its values: what it says of
    the keys is taken from them."""
    wrong, said = value, value * 0.0
    for part in tl.static_range(PARTS):
        left = kept[:, None]
        if BY_KEYS:
            left = tl.exp(_keys_of(decays, rows, is_row, part, kept, decays_stride, key_dim, PART))
        if CORRECTS:
            key = _keys_of(qkv + keys_apart, rows, is_row, part, key_by, qkv_stride, key_dim, PART)
            wrong -= tl.dot(key * left, memory[part], input_precision=PRECISION)
        query = _keys_of(qkv, rows, is_row, part, query_by, qkv_stride, key_dim, PART)
        said = tl.dot(query * left, memory[part], said, input_precision=PRECISION)
    return wrong, said


@triton.jit
def _learn(
    memory, added, qkv, rows, is_row, key_by, left, rest, qkv_stride, keys_apart, decays,
    decays_stride, last, key_dim, BY_KEYS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Returns the memory after a chunk."""
    learned = ()
    for part in tl.static_range(PARTS):
        key = _keys_of(qkv + keys_apart, rows, is_row, part, key_by, qkv_stride, key_dim, PART)
        before = memory[part]
        if BY_KEYS:
            k = part * PART + tl.arange(0, PART)
            whole = tl.load(decays + last * decays_stride + k, mask=k < key_dim, other=0.0)
            total = _keys_of(decays, rows, is_row, part, left, decays_stride, key_dim, PART)
            key *= tl.exp(whole[None, :] - total)
            before *= tl.exp(whole)[:, None]
        else:
            key *= left[:, None]
            before *= rest
        after = tl.dot(tl.trans(key), added, before, input_precision=PRECISION)
        learned = learned + (after,)  # type: ignore[assignment]  # noqa: RUF005
    return learned


@triton.jit
def _cells(state, part, key_dim, value_dim, v, PART: tl.constexpr):
    k = part * PART + tl.arange(0, PART)
    inside = (k < key_dim)[:, None] & (v < value_dim)[None, :]
    return state + k[:, None] * value_dim + v[None, :], inside


@triton.jit
def _loaded(
    state, has_state, key_dim, value_dim, v, PARTS: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    memory = ()
    for part in tl.static_range(PARTS):
        cells, inside = _cells(state, part, key_dim, value_dim, v, PART)
        memory = memory + (tl.load(cells, mask=inside & has_state, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return memory


@triton.jit(do_not_specialize=["table_stride", "block_size"])
def _across(
    qkv, decay, decay_bias, skip, y, state, solved, scores, decays, lengths, chunks, prompts,
    tables, slots, positions, qkv_stride, decay_stride, table_stride, slot_stride, unit_stride,
    block_size, num_heads, num_key_heads, unit_heads, key_dim, value_dim, BY_KEYS: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Outputs and states of a sequence, head and columns of the head's values. The memory is in
    `PARTS` of `PART` keys, so that factors of products take few registers."""
    prompt, head = prompts + tl.program_id(0) * 3, tl.program_id(1)
    seq, begin, end = tl.load(prompt).to(tl.int64), tl.load(prompt + 1), tl.load(prompt + 2)
    row = tl.load(chunks + begin * 4 + 1).to(tl.int64)
    start, stores = tl.load(positions + row), tl.load(slots + row) >= 0
    table, has_state = tables + seq * table_stride, (start > 0) & stores
    before = tl.maximum(start - 1, 0) // block_size
    slot = tl.load(table + before, mask=has_state, other=0).to(tl.int64)
    t, v = tl.arange(0, CHUNK), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    state += (head // unit_heads).to(tl.int64) * unit_stride
    state += (head % unit_heads) * key_dim * value_dim
    memory = _loaded(state + slot * slot_stride, has_state, key_dim, value_dim, v, PARTS, PART)
    keys_apart = num_key_heads * key_dim
    values = qkv + 2 * keys_apart + head * value_dim
    qkv += head // (num_heads // num_key_heads) * key_dim
    decays += head * key_dim if BY_KEYS else head
    decays_stride = num_heads * key_dim if BY_KEYS else num_heads
    for index in range(begin, end):
        chunk = chunks + index * 4
        first, count = tl.load(chunk + 1).to(tl.int64), tl.load(chunk + 2)
        rows, is_row, last = first + t, t < count, first + count - 1
        of_values = is_row[:, None] & (v < value_dim)[None, :]
        at = values + rows[:, None] * qkv_stride + v[None, :]
        value = tl.load(at, mask=of_values, other=0.0).to(tl.float32)
        query_by = tl.zeros([CHUNK], tl.float32) + 1.0
        key_by, kept, left, rest = query_by, query_by, query_by, 1.0
        if skip is None:
            at = lengths + (rows * num_heads + head) * 2
            query_by = tl.load(at, mask=is_row, other=0.0)
            key_by = tl.load(at + 1, mask=is_row, other=0.0)
        if not BY_KEYS:
            total = tl.load(decays + rows * num_heads, mask=is_row, other=0.0)
            whole = tl.load(decays + last * num_heads)
            kept, left, rest = tl.exp(total), tl.exp(whole - total), tl.exp(whole)
        wrong, said = _say(
            memory, value, qkv, rows, is_row, query_by, key_by, kept, qkv_stride, keys_apart,
            decays, decays_stride, key_dim, skip is None, BY_KEYS, PARTS, PART,
        )  # fmt: skip
        matrix = (rows * num_heads + head)[:, None] * CHUNK + t[None, :]
        if skip is None:
            solve = tl.load(solved + matrix, mask=is_row[:, None], other=0.0)
            added = tl.dot(solve, wrong, input_precision=PRECISION)
        else:
            number = tl.load(decay + rows * decay_stride + head, mask=is_row, other=0.0)
            added = value * softplus(number.to(tl.float32) + tl.load(decay_bias + head))[:, None]
            said += tl.load(skip + head) * value
        score = tl.load(scores + matrix, mask=is_row[:, None], other=0.0)
        said = tl.dot(score, added, said, input_precision=PRECISION)
        out = y + rows[:, None] * num_heads * value_dim + (head * value_dim + v)[None, :]
        tl.store(out, said.to(y.dtype.element_ty), mask=of_values)
        memory = _learn(
            memory, added, qkv, rows, is_row, key_by, left, rest, qkv_stride, keys_apart, decays,
            decays_stride, last, key_dim, BY_KEYS, PARTS, PART,
        )  # fmt: skip
        into = tl.load(chunk + 3)
        if stores & (into >= 0):
            to = state + tl.load(table + into).to(tl.int64) * slot_stride
            for part in tl.static_range(PARTS):
                cells, inside = _cells(to, part, key_dim, value_dim, v, PART)
                tl.store(cells, memory[part], mask=inside)
