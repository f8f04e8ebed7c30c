"""Recurrent layers on a GPU: the causal convolution, and the gated delta rule or Mamba 2.

States are found by block tables and positions, as keys and values are, so a graph can hold a step:
a sequence loads the state of the position before its first token, and stores one at each end of a
block and after its last token. A convolution's outputs are computed side by side, its state by one
program for a sequence's channels. The rule passes decodes token by token, in the order of
`engine.model.recurrence` and in one program for a head's columns, whose memory stays in registers;
prompts go through `recurrent_chunks`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvrelay.engine.model.gpu.recurrent_chunks import (
    CHUNK,
    Where,
    scan_chunks,
    softplus,
)
from kvrelay.engine.model.recurrence import DeltaRows
from kvrelay.engine.model.state_layout import Recurrent
from kvrelay.engine.model.states import StatePool
from kvrelay.engine.model.weights import RecurrentWeights

KEPT_ROWS = 64  # a pass that verifies draft tokens has no more: its inputs are kept
READS = -2  # in place of a slot: the sequence's state is read, and stays as it is
CHANNELS = 128  # a program has so many
ROWS = 8  # tokens that a program computes at once
COLUMNS = 16  # a program has so many of a head's memory


@dataclass(slots=True)
class Kept:
    """What a layer was given in the last pass that keeps it: [KEPT_ROWS, width] each."""

    weights: RecurrentWeights
    silu: bool
    x: torch.Tensor
    decay: torch.Tensor | None = None
    beta: torch.Tensor | None = None


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
        self._kept: dict[int, Kept] = {}  # made in a layer's first call, before a graph is captured

    def convolve(
        self, x: torch.Tensor, weights: RecurrentWeights, layer: int, where: Where, silu: bool
    ) -> torch.Tensor:
        """Computes `Ops.convolve`, and stores what is left of the inputs."""
        assert x.stride(1) == 1
        kernel, channels = weights.conv.shape
        out = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
        blocks, chunks = triton.cdiv(channels, CHANNELS), where.chunks
        kept = self._kept.get(layer)
        if kept is None:
            kept = self._kept[layer] = Kept(weights, silu, _rows_like(x))
        launches: list[tuple[torch.Tensor | None, int, int, int, bool, bool]] = [
            (None, len(where.query_len), 1, 1, True, True)
        ]
        if chunks is not None:  # several programs read a state: it is stored when all have
            launches += [
                (chunks.chunks, len(chunks.chunks), CHUNK // ROWS, ROWS, True, False),
                (chunks.prompts, len(chunks.prompts), 1, 1, False, True),
            ]
        for items, count, tiles, rows, computes, stores in launches:
            _convolve[(count, blocks, tiles)](
                x, weights.conv, weights.conv_bias, out, self._pool.conv(layer), self._at,
                self._copies, *where[:5], items, kept.x if where.keeps else None, x.stride(0),
                channels, where.tables.stride(0), self._pool.stride, self._pool.unit_stride,
                self._pool.layout.unit_channels, self._most_copies, self._block_size,
                KERNEL=kernel, SILU=silu, ROWS=rows, CHANNELS=CHANNELS, COMPUTES=computes,
                STORES=stores, SINGLE=chunks is not None, num_warps=4,
            )  # fmt: skip
        return out

    def delta_rule(
        self, rows: DeltaRows, weights: RecurrentWeights, layer: int, where: Where
    ) -> torch.Tensor:
        """Computes `Ops.delta_rule`, token by token or in chunks, and stores states."""
        shape, (qkv, decay, beta) = self._shape, rows
        assert weights.rate is not None
        assert qkv.stride(1) == decay.stride(1) == beta.stride(1) == 1
        heads, dim = shape.num_heads, shape.value_dim
        out = torch.empty((len(qkv), heads * dim), dtype=qkv.dtype, device=qkv.device)
        kept = self._kept[layer]
        if kept.decay is None or kept.beta is None:
            kept.decay, kept.beta = _rows_like(decay), _rows_like(beta)
        keeps = (kept.decay, kept.beta) if where.keeps else (None, None)
        _delta_rule[(len(where.query_len), heads, triton.cdiv(dim, COLUMNS))](
            qkv, decay, beta, weights.rate, weights.decay_bias, weights.skip, out,
            self._pool.memory_of(layer), *where[:5], *keeps, qkv.stride(0),
            decay.stride(0), beta.stride(0), where.tables.stride(0), self._pool.stride,
            self._pool.unit_stride, self._block_size, heads, shape.num_key_heads,
            self._pool.layout.num_heads, shape.key_dim, dim, SCALE=shape.key_dim**-0.5,
            BY_KEYS=decay.shape[1] > heads, KEYS=triton.next_power_of_2(shape.key_dim),
            COLUMNS=COLUMNS, SINGLE=where.chunks is not None, num_warps=4,
        )  # fmt: skip
        if where.chunks is not None:
            size = self._block_size
            scan_chunks(rows, weights, shape, self._pool, layer, size, where, out)
        return out

    def replay(self, layer: int, where: Where) -> None:
        """Passes again the first rows of what was kept of each sequence, and stores states."""
        kept, count = self._kept[layer], len(where.positions)
        mixed = self.convolve(kept.x[:count], kept.weights, layer, where, kept.silu)
        if kept.decay is not None and kept.beta is not None:
            rows = DeltaRows(mixed, kept.decay[:count], kept.beta[:count])
            self.delta_rule(rows, kept.weights, layer, where)


def _rows_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((KEPT_ROWS, x.shape[1]), dtype=x.dtype, device=x.device)


@triton.jit
def _begin(seq, tables, slots, positions, query_start, query_len, table_stride, block_size):
    """The sequence's first row, tokens and position, the slot of the state before, whether there is
    one, whether something is stored, and the sequence's table."""
    first, count = tl.load(query_start + seq).to(tl.int64), tl.load(query_len + seq)
    start, into = tl.load(positions + first), tl.load(slots + first)
    table, stores = tables + seq * table_stride, into >= 0
    has_state = (start > 0) & (into != -1)
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
    x, weight, bias, y, state, at, copies, tables, slots, positions, query_start, query_len, items,
    kept_x, x_stride, channels, table_stride, slot_stride, unit_stride, row_stride, most_copies,
    block_size, KERNEL: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr, COMPUTES: tl.constexpr, STORES: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """All sequences, or with `SINGLE` those of one token, or those in `items`: `Chunks.chunks`
    where outputs are computed, `Chunks.prompts` where states are stored."""
    seq = tl.program_id(0).to(tl.int64)
    if items is not None:
        item = items + seq * (4 if COMPUTES else 3)
        seq = tl.load(item).to(tl.int64)
    first, count, start, slot, has_state, stores, table = _begin(
        seq, tables, slots, positions, query_start, query_len, table_stride, block_size
    )
    if (count == 0) | (SINGLE and (items is None) & (count > 1)):
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    place = tl.load(at + channel, mask=inside, other=0)
    before = state + slot * slot_stride + place
    if COMPUTES:
        begin, final = tl.program_id(2) * ROWS, count
        if items is not None:
            of_chunk = (tl.load(item + 1) - first).to(tl.int32)
            begin, final = begin + of_chunk, of_chunk + tl.load(item + 2)
        for tile in range(begin, final if items is None else tl.minimum(begin + ROWS, final), ROWS):
            t = tile + tl.arange(0, ROWS)[:, None]
            here = inside[None, :] & (t < final)
            total = tl.zeros([ROWS, CHANNELS], tl.float32)
            if bias is not None:
                total += tl.load(bias + channel, mask=inside, other=0.0)[None, :]
            for j in tl.static_range(KERNEL):
                factor = tl.load(weight + j * channels + channel, mask=inside, other=0.0)
                total += factor[None, :] * _inputs(
                    x, before[None, :], t - (KERNEL - 1) + j, first, x_stride, row_stride,
                    channel[None, :], here, has_state, KERNEL,
                )  # fmt: skip
            if SILU:
                total *= tl.sigmoid(total)
            if kept_x is not None:
                own = x + (first + t) * x_stride + channel[None, :]
                to = kept_x + (first + t) * channels + channel[None, :]
                tl.store(to, tl.load(own, mask=here), mask=here)
            out = y + (first + t) * channels + channel[None, :]
            tl.store(out, total.to(y.dtype.element_ty), mask=here)
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


@triton.jit(do_not_specialize=["table_stride", "block_size"])
def _delta_rule(
    qkv, decay, beta, rate, decay_bias, skip, y, state, tables, slots, positions, query_start,
    query_len, kept_decay, kept_beta, qkv_stride, decay_stride, beta_stride, table_stride,
    slot_stride, unit_stride, block_size, num_heads, num_key_heads, unit_heads, key_dim, value_dim,
    SCALE: tl.constexpr, BY_KEYS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    first, count, start, slot, has_state, stores, table = _begin(
        seq, tables, slots, positions, query_start, query_len, table_stride, block_size
    )
    if SINGLE and count > 1:
        return
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
            if kept_decay is not None:
                tl.store(kept_decay + row * num_heads * key_dim + at, number, mask=is_key)
            offset = tl.load(decay_bias + at, mask=is_key, other=0.0)
            memory *= tl.exp(factor * softplus(number.to(tl.float32) + offset))[:, None]
        else:
            number = tl.load(decay + row * decay_stride + head)
            if kept_decay is not None:
                tl.store(kept_decay + row * num_heads + head, number)
            step = softplus(number.to(tl.float32) + tl.load(decay_bias + head))
            memory *= tl.exp(factor * step)
        if skip is None:
            query *= SCALE * tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6)
            key *= tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
            number = tl.load(beta + row * beta_stride + head)
            if kept_beta is not None:
                tl.store(kept_beta + row * num_heads + head, number)
            step = tl.sigmoid(number.to(tl.float32))
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
