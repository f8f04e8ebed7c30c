"""From logits to tokens on the device: as `sampling.sampler`, without the host.

One program per row. Weights exp((logit - largest) / temperature) are computed again in each pass
over the row, which the second-level cache holds. The smallest weight that top-k and top-p keep is
found by bisection over the bits of a float32: those of positive floats are ordered as the floats.
The draw is the inverse of the cumulative distribution, in order of token ids, at the same pure
function of (seed, position) as on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from engine.model.sampling.sampler import GREEDY_BELOW
from engine.request import SamplingParams

BLOCK = 4096
_WORD = (1 << 64) - 1
_ONE = tl.constexpr(0x3F800000)  # bits of 1.0f, the largest weight
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_UNIT = tl.constexpr(2.0**-52)


@dataclass(frozen=True, slots=True)
class Draws:
    """How each row's token is chosen: [R] each, on the device."""

    temperature: torch.Tensor  # float32; 0: greedy
    top_p: torch.Tensor  # float64
    min_p: torch.Tensor  # float32
    top_k: torch.Tensor  # int32; 0: all
    seed: torch.Tensor  # int64: the low 64 bits
    position: torch.Tensor  # int64: of the row's last known token; the drawn one is at the next


def draw_values(params: list[SamplingParams]) -> dict[str, np.ndarray]:
    """What `Draws` holds besides positions, on the host."""
    greedy = [p.temperature < GREEDY_BELOW or p.top_k == 1 for p in params]
    heat = [0.0 if cold else p.temperature for p, cold in zip(params, greedy, strict=True)]
    return {
        "temperature": np.array(heat, np.float32),
        "top_p": np.array([p.top_p for p in params], np.float64),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "top_k": np.array([p.top_k for p in params], np.int32),
        "seed": np.array([p.seed & _WORD for p in params], np.uint64).view(np.int64),
    }


def draw(logits: torch.Tensor, draws: Draws, out: torch.Tensor) -> None:
    """logits float32 [R, vocab_size], contiguous, are kept; out int64 [R]."""
    if len(logits):
        _draw[(len(logits),)](
            logits, draws.temperature, draws.top_p, draws.min_p, draws.top_k, draws.seed,
            draws.position, out, logits.shape[1], BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


@triton.jit
def _mixed(word):
    """splitmix64's output function; words are uint64 and wrap around."""
    word = word + tl.full((), _GOLDEN, tl.uint64)
    word = (word ^ (word >> 30)) * tl.full((), _MIX_1, tl.uint64)
    word = (word ^ (word >> 27)) * tl.full((), _MIX_2, tl.uint64)
    return word ^ (word >> 31)


@triton.jit
def _uniform(seed, position):
    """As `engine.model.sampling.sampler.uniform`: float64 in [0, 1)."""
    word = _mixed(seed.to(tl.uint64)) ^ (position.to(tl.uint64) * tl.full((), _GOLDEN, tl.uint64))
    return (_mixed(word) >> 12).to(tl.int64).to(tl.float64) * _UNIT


@triton.jit
def _weights(row, at, vocab, largest, temperature):
    """Of the tokens `at`; 0 past the vocabulary."""
    logit = tl.load(row + at, mask=at < vocab, other=-float("inf"))
    return tl.exp((logit - largest) / temperature)


@triton.jit
def _mass_from(row, vocab, largest, temperature, bits, BLOCK: tl.constexpr):
    """How many tokens weigh at least the float of `bits`, and what they weigh together."""
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    mass = tl.zeros((BLOCK,), dtype=tl.float64)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        w = _weights(row, at, vocab, largest, temperature)
        kept = (w.to(tl.int32, bitcast=True) >= bits) & (at < vocab)
        count += kept.to(tl.int32)
        mass += tl.where(kept, w, 0.0).to(tl.float64)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _cut(row, vocab, largest, temperature, top_k, top_p, BLOCK: tl.constexpr):
    """Bits of the smallest weight that top-k and then top-p (of what top-k leaves) keep. Tokens
    that tie with the last one kept are kept."""
    bits = tl.full((), 0, tl.int32)
    _everything, total = _mass_from(row, vocab, largest, temperature, bits, BLOCK)
    if (top_k > 0) & (top_k < vocab):
        low, high = tl.full((), 0, tl.int32), tl.full((), _ONE, tl.int32) + 1
        for _step in range(31):  # the largest bits that at least top_k tokens reach
            middle = low + (high - low) // 2
            count, mass = _mass_from(row, vocab, largest, temperature, middle, BLOCK)
            enough = count >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        bits = low
        # Of the tokens that tie at the cut, only those within top_k count for top-p.
        above, mass = _mass_from(row, vocab, largest, temperature, low + 1, BLOCK)
        total = mass + (top_k - above).to(tl.float64) * low.to(tl.float32, bitcast=True)
    if top_p < 1.0:
        wanted = tl.maximum(top_p, 0.0) * total
        low, high = tl.full((), 0, tl.int32), tl.full((), _ONE, tl.int32) + 1
        for _step in range(31):  # the largest bits whose tokens weigh as much as is wanted
            middle = low + (high - low) // 2
            count, mass = _mass_from(row, vocab, largest, temperature, middle, BLOCK)
            enough = (mass >= wanted) & (count > 0)
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        bits = tl.maximum(bits, low)
    return bits


@triton.jit
def _inverse(row, vocab, largest, temperature, bits, uniform, BLOCK: tl.constexpr):
    """The first token at which the running sum of what weighs at least `bits` exceeds `uniform` of
    the total."""
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, vocab, BLOCK):
        w = _weights(row, first + tl.arange(0, BLOCK), vocab, largest, temperature)
        kept = tl.where(w.to(tl.int32, bitcast=True) >= bits, w, 0.0)
        total += tl.sum(kept.to(tl.float64), axis=0)
    target = total * uniform
    reached, before = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    tile, found = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for first in range(0, vocab, BLOCK):  # sums in the same order as above: the last is the total
        w = _weights(row, first + tl.arange(0, BLOCK), vocab, largest, temperature)
        kept = tl.where(w.to(tl.int32, bitcast=True) >= bits, w, 0.0)
        mass = tl.sum(kept.to(tl.float64), axis=0)
        here = (found == 0) & (reached + mass > target)
        tile = tl.where(here, first, tile)
        before = tl.where(here, reached, before)
        found = tl.where(here, 1, found)
        reached += mass
    at = tile + tl.arange(0, BLOCK)
    w = _weights(row, at, vocab, largest, temperature)
    kept = tl.where(w.to(tl.int32, bitcast=True) >= bits, w, 0.0).to(tl.float64)
    passed = (before + tl.cumsum(kept, axis=0)) > target
    # The two sums round differently: never past the last token of the tile that has any weight.
    last = tl.max(tl.where(kept > 0.0, at, 0), axis=0)
    token = tl.min(tl.where(passed, at, last), axis=0)
    return tl.minimum(token, last)


@triton.jit
def _draw(
    logits, temperatures, top_ps, min_ps, top_ks, seeds, positions, out, vocab, BLOCK: tl.constexpr
):
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * vocab
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_at = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logit = tl.load(row + at, mask=at < vocab, other=-float("inf"))
        best_at = tl.where(logit > best, at, best_at)
        best = tl.maximum(logit, best)
    largest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == largest, best_at, vocab), axis=0)
    token = tl.minimum(token, vocab - 1)  # of a row of NaN
    temperature = tl.load(temperatures + index)
    if temperature > 0.0:
        top_k = tl.load(top_ks + index)
        top_p = tl.load(top_ps + index)
        bits = tl.minimum(tl.load(min_ps + index), 1.0).to(tl.int32, bitcast=True)
        if (top_k > 0) | (top_p < 1.0):
            kept = _cut(row, vocab, largest, temperature, top_k, top_p, BLOCK)
            bits = tl.maximum(bits, kept)
        uniform = _uniform(tl.load(seeds + index), tl.load(positions + index) + 1)
        token = _inverse(row, vocab, largest, temperature, bits, uniform, BLOCK)
    tl.store(out + index, token.to(tl.int64))
