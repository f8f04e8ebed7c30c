"""Which experts each token goes to, and the order in which their products are computed.

Two launches for a layer: one chooses, a program a token, and one sorts, a program an expert. What
an expert's program needs of the others is how many pairs they have, which it counts itself: no
program waits for another, and nothing has to be zeroed before. Of equal scores the first expert is
chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.weights import ExpertsWeights

PAIRS = 1024  # are counted at once
TILES = 64  # are listed at once


@dataclass(frozen=True, slots=True)
class Tiles:
    """Where the grouped products find their rows. All on the device."""

    pairs: torch.Tensor  # [P] int64: sorted by expert; pair = token * num_per_token + choice
    expert: torch.Tensor  # [T] int64 of each tile; num_experts past the last tile
    first: torch.Tensor  # [T] int64: its first place in `pairs`
    end: torch.Tensor  # [T] int64: where its expert's pairs end
    block_m: int


def route(
    x: torch.Tensor, logits: torch.Tensor, layer: ExpertsWeights, config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`choose_experts` in one launch, or three where the weights multiply what goes in."""
    experts, (num_tokens, num_experts) = config.experts, logits.shape
    assert experts is not None
    size = num_experts // experts.num_groups
    shape, device = (num_tokens, experts.num_per_token), logits.device
    chosen = torch.empty(shape, dtype=torch.int64, device=device)
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    if num_tokens:
        logits = logits.contiguous()
        _route[(num_tokens,)](
            chosen, weights, logits, layer.bias, layer.scales, CHOICES=experts.num_per_token,
            NUM_GROUPS=experts.num_groups, SIZE=size, KEPT=experts.num_chosen_groups,
            SIGMOID=experts.scoring == "sigmoid", NORMALIZE=experts.normalize, SCALE=experts.scale,
            BLOCK_GROUPS=triton.next_power_of_2(experts.num_groups),
            BLOCK_SIZE=triton.next_power_of_2(size),
            BLOCK_CHOICES=triton.next_power_of_2(experts.num_per_token), num_warps=1,
        )  # fmt: skip
    if experts.scales_inputs:
        x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
    return x, chosen, weights


def sort_pairs(chosen: torch.Tensor, num_experts: int, block_m: int) -> Tiles:
    """chosen [N, num_per_token] int64, N > 0. A tile has up to `block_m` pairs of one expert."""
    num_pairs = chosen.numel()
    most = min(num_pairs, triton.cdiv(num_pairs, block_m) + num_experts)
    pairs = chosen.new_empty(num_pairs)
    expert, first, end = (chosen.new_empty(most) for _ in range(3))
    _sort[(num_experts,)](
        pairs, expert, first, end, chosen.contiguous(), num_pairs, most, NUM_EXPERTS=num_experts,
        BINS=max(32, triton.next_power_of_2(num_experts)), BLOCK_M=block_m, PAIRS=PAIRS,
        TILES=TILES, num_warps=4,
    )  # fmt: skip
    return Tiles(pairs, expert, first, end, block_m)


@triton.jit
def _keys(scores, places):
    """int64 in the order of float32 scores, all different: of equal ones the first is highest."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # there is one zero
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) - places


@triton.jit
def _scores(logits, top, total, SIGMOID: tl.constexpr):
    if SIGMOID:
        found = (1.0 / (1.0 + tl.exp(-logits.to(tl.float64)))).to(tl.float32)
    else:
        found = tl.exp(logits - top) / total
    return found


@triton.jit
def _route(
    chosen, weights, logits, bias, scales, CHOICES: tl.constexpr, NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr, KEPT: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
):  # fmt: skip
    NONE: tl.constexpr = -(2**63)
    token = tl.program_id(0).to(tl.int64)
    group, within = tl.arange(0, BLOCK_GROUPS), tl.arange(0, BLOCK_SIZE)
    is_expert = (group < NUM_GROUPS)[:, None] & (within < SIZE)[None, :]
    expert = group[:, None] * SIZE + within[None, :]
    row = logits + token * (NUM_GROUPS * SIZE)
    found = tl.load(row + expert, mask=is_expert, other=float("-inf"))
    top = tl.max(tl.max(found, 1), 0)
    total = tl.sum(tl.sum(tl.exp(found - top), 1), 0)
    ranked = _scores(found, top, total, SIGMOID)
    if bias is not None:
        ranked += tl.load(bias + expert, mask=is_expert, other=0.0)
    keys = tl.where(is_expert, _keys(ranked, expert), NONE)
    if KEPT < NUM_GROUPS:
        first = tl.max(keys, 1)
        best = tl.max(tl.where(is_expert, ranked, float("-inf")), 1)
        if bias is not None:  # DeepSeek-V3's: by the two best
            rest = tl.where(is_expert & (keys != first[:, None]), ranked, float("-inf"))
            best += tl.max(rest, 1)
        open_groups = tl.where(group < NUM_GROUPS, _keys(best, group), NONE)
        is_kept = group < 0
        for _ in range(KEPT):
            most = tl.max(open_groups, 0)
            is_kept = is_kept | (open_groups == most)
            open_groups = tl.where(open_groups == most, NONE, open_groups)
        keys = tl.where(is_kept[:, None], keys, NONE)
    choice = tl.arange(0, BLOCK_CHOICES)
    ids = tl.zeros((BLOCK_CHOICES,), dtype=tl.int64)
    for k in range(CHOICES):
        most = tl.max(tl.max(keys, 1), 0)
        ids = tl.where(choice == k, (-most) & 0xFFFFFFFF, ids)
        keys = tl.where(keys == most, NONE, keys)
    is_choice = choice < CHOICES
    weight = _scores(tl.load(row + ids, mask=is_choice, other=0.0), top, total, SIGMOID)
    weight = tl.where(is_choice, weight, 0.0)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    if scales is None:
        weight *= SCALE
    else:
        weight *= tl.load(scales + ids, mask=is_choice, other=0.0)
    out = token * CHOICES + choice
    tl.store(chosen + out, ids, mask=is_choice)
    tl.store(weights + out, weight, mask=is_choice)


@triton.jit(do_not_specialize=["num_pairs", "most"])
def _sort(
    pairs, tile_expert, tile_first, tile_end, chosen, num_pairs, most, NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr, BLOCK_M: tl.constexpr, PAIRS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One expert: its pairs, in their order, and its tiles."""
    mine = tl.program_id(0)
    at, bins = tl.arange(0, PAIRS), tl.arange(0, BINS)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    for begin in range(0, num_pairs, PAIRS):
        is_pair = begin + at < num_pairs
        of = tl.load(chosen + begin + at, mask=is_pair, other=0).to(tl.int32)
        counts += tl.histogram(of, BINS, mask=is_pair)
    is_before = bins < mine
    count = tl.sum(tl.where(bins == mine, counts, 0), 0)
    start = tl.sum(tl.where(is_before, counts, 0), 0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(is_before, tiles, 0), 0)
    if count > 0:
        place = start
        for begin in range(0, num_pairs, PAIRS):
            is_pair = begin + at < num_pairs
            of = tl.load(chosen + begin + at, mask=is_pair, other=-1).to(tl.int32)
            is_mine = (of == mine).to(tl.int32)
            to = pairs + place + tl.cumsum(is_mine, 0) - 1
            tl.store(to, (begin + at).to(tl.int64), mask=is_mine > 0)
            place += tl.sum(is_mine, 0)
    tile = tl.arange(0, TILES)
    own = (count + BLOCK_M - 1) // BLOCK_M
    for begin in range(0, own, TILES):
        n = begin + tile
        to, is_own = first_tile + n, n < own
        tl.store(tile_expert + to, mine, mask=is_own)
        tl.store(tile_first + to, start + n * BLOCK_M, mask=is_own)
        tl.store(tile_end + to, start + count, mask=is_own)
    if mine == NUM_EXPERTS - 1:
        for begin in range(first_tile + own, most, TILES):
            tl.store(tile_expert + begin + tile, NUM_EXPERTS, mask=begin + tile < most)
