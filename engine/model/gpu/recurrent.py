"""Recurrent layers on a GPU: the causal convolution, and the gated delta rule or Mamba 2.

States are found by block tables and positions, as keys and values are, so a graph can hold a step:
a sequence loads the state of the position before its first token, and stores one at each end of a
block and after its last token. Sums have the order of `engine.model.recurrence`, token by token: of
the rule in one program for a head's columns, whose memory stays in registers. A convolution's
outputs are computed side by side, its state by one program for a sequence's channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvrelay.engine.model.recurrence import DeltaRows
from kvrelay.engine.model.state_layout import Recurrent
from kvrelay.engine.model.states import StatePool
from kvrelay.engine.model.weights import RecurrentWeights

CHANNELS = 128  # a program has so many
ROWS = 16  # tokens that a program computes
COLUMNS = 16  # a program has so many of a head's memory


class Where(NamedTuple):
    """Where the tokens of a step are; on the device."""

    tables: torch.Tensor  # [S, widest] int32, of the group of layers
    slots: torch.Tensor  # [N] int64; negative: nothing is stored for the sequence
    positions: torch.Tensor  # [N] int64
    query_start: torch.Tensor  # [S] int32
    query_len: torch.Tensor  # [S] int32


class GpuRecurrent:
    """The recurrent part of `TritonOps`, owned by it."""

    def __init__(self, shape: Recurrent, pool: StatePool, block_size: int) -> None:
        self._shape, self._pool, self._block_size = shape, pool, block_size
        runs = pool.layout.runs()
        device = pool.memory.device
        at = [run.unit * pool.unit_stride + run.at + i for run in runs for i in range(run.width)]
        self._at = torch.tensor(at, dtype=torch.int64, device=device)
        copies = [run.copies for run in runs for _ in range(run.width)]
        self._copies = torch.tensor(copies, dtype=torch.int32, device=device)
        self._most_copies = max(copies)

    def convolve(
        self,
        x: torch.Tensor,
        weights: RecurrentWeights,
        layer: int,
        where: Where,
        longest: int,
        silu: bool,
    ) -> torch.Tensor:
        """As `Ops.convolve`. longest: tokens that a sequence has in the step, at most."""
        assert x.stride(1) == 1
        kernel, channels = weights.conv.shape
        out = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
        blocks, tiles = triton.cdiv(channels, CHANNELS), triton.cdiv(longest, ROWS)
        # Where several programs read a state, it is stored when all have.
        for computes, stores in ((True, True),) if tiles == 1 else ((True, False), (False, True)):
            _convolve[(len(where.query_len), blocks, tiles if computes else 1)](
                x, weights.conv, weights.conv_bias, out, self._pool.conv(layer), self._at,
                self._copies, *where, x.stride(0), channels, where.tables.stride(0),
                self._pool.stride, self._pool.unit_stride, self._pool.layout.unit_channels,
                self._most_copies, self._block_size, KERNEL=kernel, SILU=silu, ROWS=ROWS,
                CHANNELS=CHANNELS, COMPUTES=computes, STORES=stores, num_warps=4,
            )  # fmt: skip
        return out

    def delta_rule(
        self, rows: DeltaRows, weights: RecurrentWeights, layer: int, where: Where
    ) -> torch.Tensor:
        """Takes and returns what `Ops.delta_rule` does."""
        shape, (qkv, decay, beta) = self._shape, rows
        assert weights.rate is not None
        assert qkv.stride(1) == decay.stride(1) == beta.stride(1) == 1
        heads, dim = shape.num_heads, shape.value_dim
        out = torch.empty((len(qkv), heads * dim), dtype=qkv.dtype, device=qkv.device)
        _delta_rule[(len(where.query_len), heads, triton.cdiv(dim, COLUMNS))](
            qkv, decay, beta, weights.rate, weights.decay_bias, weights.skip, out,
            self._pool.memory_of(layer), *where, qkv.stride(0), decay.stride(0), beta.stride(0),
            where.tables.stride(0), self._pool.stride, self._pool.unit_stride, self._block_size,
            heads, shape.num_key_heads, self._pool.layout.num_heads, shape.key_dim, dim,
            SCALE=shape.key_dim**-0.5, BY_KEYS=decay.shape[1] > heads,
            KEYS=triton.next_power_of_2(shape.key_dim), COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
        return out


@triton.jit
def _begin(tables, slots, positions, query_start, query_len, table_stride, block_size):
    """The sequence's first row, tokens and position, the slot of the state before, whether there is
    one, whether something is stored, and the sequence's table."""
    seq = tl.program_id(0).to(tl.int64)
    first, count = tl.load(query_start + seq).to(tl.int64), tl.load(query_len + seq)
    start, stores = tl.load(positions + first), tl.load(slots + first) >= 0
    table = tables + seq * table_stride
    has_state = (start > 0) & stores
    row = tl.maximum(start - 1, 0) // block_size
    slot = tl.load(table + row, mask=has_state, other=0).to(tl.int64)
    return first, count, start, slot, has_state, stores, table


@triton.jit
def _inputs(x, before, index, first, x_stride, row_stride, channel, inside, has_state, KERNEL):
    """Those of token `index` of the step in float32; before the first they are in the state."""
    row = (first + tl.maximum(index, 0)) * x_stride
    own = tl.load(x + row + channel, mask=inside & (index >= 0), other=0.0).to(tl.float32)
    is_old = inside & (index < 0) & has_state
    return own + tl.load(before + (index + KERNEL - 1) * row_stride, mask=is_old, other=0.0)


@triton.jit(do_not_specialize=["table_stride", "most_copies", "block_size"])
def _convolve(
    x, weight, bias, y, state, at, copies, tables, slots, positions, query_start, query_len,
    x_stride, channels, table_stride, slot_stride, unit_stride, row_stride, most_copies,
    block_size, KERNEL: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr, COMPUTES: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    first, count, start, slot, has_state, stores, table = _begin(
        tables, slots, positions, query_start, query_len, table_stride, block_size
    )
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    place = tl.load(at + channel, mask=inside, other=0)
    before = state + slot * slot_stride + place
    if COMPUTES:
        tile = tl.program_id(2) * ROWS
        for t in range(tile, tl.minimum(tile + ROWS, count)):
            total = tl.zeros([CHANNELS], tl.float32)
            if bias is not None:
                total += tl.load(bias + channel, mask=inside, other=0.0)
            for j in tl.static_range(KERNEL):
                factor = tl.load(weight + j * channels + channel, mask=inside, other=0.0)
                total += factor * _inputs(
                    x, before, t - (KERNEL - 1) + j, first, x_stride, row_stride, channel, inside,
                    has_state, KERNEL,
                )  # fmt: skip
            if SILU:
                total *= tl.sigmoid(total)
            out = total.to(y.dtype.element_ty)
            tl.store(y + (first + t) * channels + channel, out, mask=inside)
    if STORES and stores:
        repeats = tl.load(copies + channel, mask=inside, other=0)
        end = start + count
        last = (end - 1) // block_size
        # The first block may have the state that is read: it is written last, oldest inputs first.
        for back in range(last - start // block_size + 1):
            row = last - back
            stop = tl.minimum((row + 1) * block_size, end) - start
            to = state + tl.load(table + row).to(tl.int64) * slot_stride + place
            for j in tl.static_range(KERNEL - 1):
                kept = _inputs(
                    x, before, stop - (KERNEL - 1) + j, first, x_stride, row_stride, channel,
                    inside, has_state, KERNEL,
                )  # fmt: skip
                tl.debug_barrier()  # a row may be where another was that has been read by now
                for copy in range(most_copies):
                    into = to + copy * unit_stride + j * row_stride
                    tl.store(into, kept, mask=inside & (copy < repeats))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)); log(1 + u) = 2 atanh(u / (2 + u)), whose argument is at most 1/3 here."""
    u = tl.exp(-tl.abs(x))
    s = u / (u + 2.0)
    p = s * s
    series = 2.0 / 13.0 + p * (2.0 / 15.0)
    for n in tl.static_range(6):
        series = series * p + 2.0 / (11 - 2 * n)
    return tl.maximum(x, 0.0) + series * s


@triton.jit(do_not_specialize=["table_stride", "block_size"])
def _delta_rule(
    qkv, decay, beta, rate, decay_bias, skip, y, state, tables, slots, positions, query_start,
    query_len, qkv_stride, decay_stride, beta_stride, table_stride, slot_stride, unit_stride,
    block_size, num_heads, num_key_heads, unit_heads, key_dim, value_dim, SCALE: tl.constexpr,
    BY_KEYS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first, count, start, slot, has_state, stores, table = _begin(
        tables, slots, positions, query_start, query_len, table_stride, block_size
    )
    head, v = tl.program_id(1), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    k, key_head = tl.arange(0, KEYS), head // (num_heads // num_key_heads)
    is_key, is_value = k < key_dim, v < value_dim
    inside = is_key[:, None] & is_value[None, :]
    place = (head // unit_heads).to(tl.int64) * unit_stride
    place += (head % unit_heads) * key_dim * value_dim
    cell = state + place + k[:, None] * value_dim + v[None, :]
    memory = tl.load(cell + slot * slot_stride, mask=inside & has_state, other=0.0)
    query_at = key_head * key_dim + k
    key_at, value_at = num_key_heads * key_dim + query_at, head * value_dim + v
    value_at += 2 * num_key_heads * key_dim
    factor = tl.load(rate + head)
    for t in range(count):
        row = first + t
        x = qkv + row * qkv_stride
        query = tl.load(x + query_at, mask=is_key, other=0.0).to(tl.float32)
        key = tl.load(x + key_at, mask=is_key, other=0.0).to(tl.float32)
        value = tl.load(x + value_at, mask=is_value, other=0.0).to(tl.float32)
        if BY_KEYS:
            at = head * key_dim + k
            number = tl.load(decay + row * decay_stride + at, mask=is_key, other=0.0)
            offset = tl.load(decay_bias + at, mask=is_key, other=0.0)
            memory *= tl.exp(factor * _softplus(number.to(tl.float32) + offset))[:, None]
        else:
            number = tl.load(decay + row * decay_stride + head).to(tl.float32)
            step = _softplus(number + tl.load(decay_bias + head))
            memory *= tl.exp(factor * step)
        if skip is None:
            query *= SCALE * tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6)
            key *= tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
            step = tl.sigmoid(tl.load(beta + row * beta_stride + head).to(tl.float32))
            added = value - tl.sum(memory * key[:, None], axis=0)
        else:
            added = value
        memory += key[:, None] * (added * step)[None, :]
        said = tl.sum(memory * query[:, None], axis=0)
        if skip is not None:
            said += tl.load(skip + head) * value
        out = y + row * num_heads * value_dim + head * value_dim + v
        tl.store(out, said.to(y.dtype.element_ty), mask=is_value)
        position = start + t
        if stores & ((t == count - 1) | ((position + 1) % block_size == 0)):
            into = tl.load(table + position // block_size).to(tl.int64)
            tl.store(cell + into * slot_stride, memory, mask=inside)
