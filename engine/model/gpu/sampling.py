"""From logits to tokens on the device: as `sampling.sampler`, without the host.

One program per row. The smallest weight exp((logit - largest) / temperature) that top-k and top-p
keep is found by bisection over the bits of a float32: those of positive floats are ordered as the
floats. That takes 31 passes, so what may be kept is collected first: tokens above a floor, which a
pass or two over the row find. Where they are too many, the passes go over the row, and weights are
computed again in each. The draw is the same race as on the host.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kvrelay.engine.model.sampling.sampler import DRAW, LUCKLESS, draw_of
from kvrelay.engine.step import NO_TOKEN, ScheduledSeq

BLOCK = 4096
MAX_FEW = 4096  # tokens of a row that are collected
_FLOOR, _LOWER, _LOWEST = tl.constexpr(8), tl.constexpr(6), tl.constexpr(26)
"""Floors that are tried: weights of 2 to the power of minus these (first, steps, last)."""
_ONE = tl.constexpr(0x3F800000)  # bits of 1.0f, the largest weight
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_GOLDEN_32, _MIX_3, _MIX_4 = (tl.constexpr(x) for x in (0x9E3779B1, 0x7FEB352D, 0x846CA68B))
_UNIT, _LUCKLESS = tl.constexpr(2.0**-32), tl.constexpr(LUCKLESS)


HOSTS = ("mask", "counts")  # addresses on the host
COLUMNS = {name: DRAW[name].type for name in DRAW.names or () if name not in HOSTS}
_Draws = namedtuple("_Draws", [*COLUMNS])  # type: ignore[misc]  # the names are DRAW's


def draws_of(seqs: Sequence[ScheduledSeq]) -> dict[str, np.ndarray]:
    """`COLUMNS` of rows, on the host."""
    rows = np.array([draw_of(seq) for seq in seqs], DRAW)
    return {name: np.ascontiguousarray(rows[name]) for name in COLUMNS}


def draw(logits: torch.Tensor, draws: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
    """logits float32 [R, vocab_size], contiguous, are kept. draws: `COLUMNS`, [R] each, among
    others. out int64 [R]: NO_TOKEN where some of the row is NaN, or its largest is not finite."""
    if not len(logits):
        return
    few = torch.empty(2, len(logits), MAX_FEW, dtype=torch.int32, device=logits.device)
    weights, ids = few[0].view(torch.float32), few[1]
    columns = _Draws(*(draws[name] for name in COLUMNS))
    _draw[(len(logits),)](
        logits, columns, out, weights, ids, logits.shape[1],
        BLOCK=BLOCK, MAX_FEW=MAX_FEW, num_warps=8,
    )  # fmt: skip


@triton.jit
def _mixed(word):
    """splitmix64's output function; words are uint64 and wrap around."""
    word = word + tl.full((), _GOLDEN, tl.uint64)
    word = (word ^ (word >> 30)) * tl.full((), _MIX_1, tl.uint64)
    word = (word ^ (word >> 27)) * tl.full((), _MIX_2, tl.uint64)
    return word ^ (word >> 31)


@triton.jit
def _key(seed, position):
    """The 64 bits of `engine.model.sampling.sampler.key_of`."""
    word = _mixed(seed.to(tl.uint64)) ^ (position.to(tl.uint64) * tl.full((), _GOLDEN, tl.uint64))
    return _mixed(word)


@triton.jit
def _luck(ids, key):
    """As `engine.model.sampling.sampler.luck`, of the tokens `ids`."""
    word = (ids.to(tl.uint32) * tl.full((), _GOLDEN_32, tl.uint32)) ^ key.to(tl.uint32)
    word = (word ^ (word >> 16)) * tl.full((), _MIX_3, tl.uint32)
    word = ((word ^ (word >> 15)) + (key >> 32).to(tl.uint32)) * tl.full((), _MIX_4, tl.uint32)
    word = word ^ (word >> 16)
    return tl.minimum((word.to(tl.float32) + 0.5) * _UNIT, _LUCKLESS)


@triton.jit
def _weights(source, at, size, largest, temperature, IS_ROW: tl.constexpr):
    """Those `at`; 0 past the end. source: a row of logits, or weights that were collected."""
    if IS_ROW:
        logit = tl.load(source + at, mask=at < size, other=-float("inf"))
        weight = tl.exp((logit - largest) / temperature)
    else:
        weight = tl.load(source + at, mask=at < size, other=0.0)
    return weight


@triton.jit
def _mass_from(source, size, largest, temperature, bits, BLOCK: tl.constexpr, IS_ROW: tl.constexpr):
    """How many tokens weigh at least the float of `bits`, and what they weigh together."""
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    mass = tl.zeros((BLOCK,), dtype=tl.float64)
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        w = _weights(source, at, size, largest, temperature, IS_ROW)
        kept = (w.to(tl.int32, bitcast=True) >= bits) & (at < size)
        count += kept.to(tl.int32)
        mass += tl.where(kept, w, 0.0).to(tl.float64)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _floor(row, vocab, total, largest, temperature, top_k, top_p, BLOCK: tl.constexpr):
    """Bits of a weight that is at most the smallest one kept, and how many tokens reach it."""
    power = tl.full((), _FLOOR, tl.int32)
    bits = (127 - power) << 23
    count, mass = _mass_from(row, vocab, largest, temperature, bits, BLOCK, True)
    while (power < _LOWEST) & tl.where(top_k > 0, count < top_k, mass < top_p * total):
        power += _LOWER
        bits = (127 - power) << 23
        count, mass = _mass_from(row, vocab, largest, temperature, bits, BLOCK, True)
    if tl.where(top_k > 0, count < top_k, mass < top_p * total):
        count, bits = vocab, bits * 0
    return bits, count


@triton.jit
def _collect(row, vocab, largest, temperature, bits, weights, ids, BLOCK: tl.constexpr):
    """Weights and ids of the tokens that weigh at least `bits`, in order."""
    end = tl.full((), 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        w = _weights(row, at, vocab, largest, temperature, True)
        kept = (w.to(tl.int32, bitcast=True) >= bits) & (at < vocab)
        to = end + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(weights + to, w, mask=kept)
        tl.store(ids + to, at, mask=kept)
        end += tl.sum(kept.to(tl.int32), axis=0)
    tl.debug_barrier()  # they are read by other threads of the program


@triton.jit
def _cut(
    source, size, total, largest, temperature, top_k, top_p,
    BLOCK: tl.constexpr, IS_ROW: tl.constexpr,
):  # fmt: skip
    """Bits of the smallest weight that top-k and then top-p (of what top-k leaves) keep. Tokens
    that tie with the last one kept are kept. total: of all weights of the row."""
    bits = tl.full((), 0, tl.int32)
    if (top_k > 0) & (top_k <= size):
        low, high = tl.full((), 0, tl.int32), tl.full((), _ONE, tl.int32) + 1
        for _step in range(31):  # the largest bits that at least top_k tokens reach
            middle = low + (high - low) // 2
            count, mass = _mass_from(source, size, largest, temperature, middle, BLOCK, IS_ROW)
            enough = count >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        bits = low
        # Where tokens tie at the cut, only those within top_k count for top-p.
        above, mass = _mass_from(source, size, largest, temperature, low + 1, BLOCK, IS_ROW)
        total = mass + (top_k - above).to(tl.float64) * low.to(tl.float32, bitcast=True)
    if top_p < 1.0:
        wanted = tl.maximum(top_p, 0.0) * total
        low, high = tl.full((), 0, tl.int32), tl.full((), _ONE, tl.int32) + 1
        for _step in range(31):  # the largest bits whose tokens weigh as much as is wanted
            middle = low + (high - low) // 2
            count, mass = _mass_from(source, size, largest, temperature, middle, BLOCK, IS_ROW)
            enough = (mass >= wanted) & (count > 0)
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        bits = tl.maximum(bits, low)
    return bits


@triton.jit
def _race(
    source, ids, size, largest, temperature, bits, key, BLOCK: tl.constexpr, IS_ROW: tl.constexpr
):
    """The first token of those that weigh at least `bits`."""
    best = tl.full((BLOCK,), float("inf"), tl.float32)
    best_at = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        w = _weights(source, at, size, largest, temperature, IS_ROW)
        token = at
        if IS_ROW == 0:
            token = tl.load(ids + at, mask=at < size, other=0)
        luck = _luck(token, key)
        left = 1.0 - luck  # rounded: what the logarithm is taken of is not 1 - luck, but nearly
        time = tl.where(left == 1.0, luck, -tl.log(left) * (luck / (1.0 - left))) / w
        first_so_far = (w.to(tl.int32, bitcast=True) >= bits) & (w > 0.0) & (time < best)
        best_at = tl.where(first_so_far, token, best_at)
        best = tl.where(first_so_far, time, best)
    return tl.min(tl.where(best == tl.min(best, axis=0), best_at, 2147483647), axis=0)


@triton.jit
def _draw(logits, draws, out, weights, ids, vocab, BLOCK: tl.constexpr, MAX_FEW: tl.constexpr):
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * vocab
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_at = tl.zeros((BLOCK,), dtype=tl.int32)
    nan = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logit = tl.load(row + at, mask=at < vocab, other=-float("inf"))
        nan += (logit != logit).to(tl.int32)
        best_at = tl.where(logit > best, at, best_at)
        best = tl.maximum(logit, best)
    largest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == largest, best_at, vocab), axis=0)
    is_number = (tl.sum(nan, axis=0) == 0) & (largest > -float("inf")) & (largest < float("inf"))
    token = tl.where(is_number, token, _NO_TOKEN)
    temperature = tl.load(draws.temperature + index).to(tl.float32)
    if is_number & (temperature > 0.0):
        top_k, top_p = tl.load(draws.top_k + index), tl.load(draws.top_p + index)
        min_p = tl.load(draws.min_p + index).to(tl.float32)
        bits = tl.minimum(min_p, 1.0).to(tl.int32, bitcast=True)
        key = _key(tl.load(draws.seed + index), tl.load(draws.position + index))
        is_few = tl.full((), 0, tl.int1)
        if (top_k > 0) | (top_p < 1.0):
            zero = tl.full((), 0, tl.int32)
            _everything, total = _mass_from(row, vocab, largest, temperature, zero, BLOCK, True)
            floor, count = _floor(row, vocab, total, largest, temperature, top_k, top_p, BLOCK)
            is_few = count <= MAX_FEW
            if is_few:
                own_weights = weights + index.to(tl.int64) * MAX_FEW
                own_ids = ids + index.to(tl.int64) * MAX_FEW
                _collect(row, vocab, largest, temperature, floor, own_weights, own_ids, BLOCK)
                kept = _cut(
                    own_weights, count, total, largest, temperature, top_k, top_p, BLOCK, False
                )
                bits = tl.maximum(bits, kept)
                token = _race(
                    own_weights, own_ids, count, largest, temperature, bits, key, BLOCK, False
                )
            else:
                kept = _cut(row, vocab, total, largest, temperature, top_k, top_p, BLOCK, True)
                bits = tl.maximum(bits, kept)
        if is_few == 0:
            token = _race(row, ids, vocab, largest, temperature, bits, key, BLOCK, True)
    tl.store(out + index, token.to(tl.int64))
