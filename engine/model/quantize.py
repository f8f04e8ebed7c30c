"""Weights of 8 or 4 bits, with a scale for a group of inputs of an output; of 4 bits also with an
offset, since 16 values are too few to be spent on both signs alike.

Life: a matrix is quantized while a checkpoint is loaded; kernels read what results. Its inputs stay
floating point on a GPU. On a CPU those of each token and group are rounded to 11 bits (8 where
weights have 4), so that products are of integers; its error is an eighth of that of the weights.
What "fp8" is, which GPUs alone have, is in `engine.model.gpu.linear.fp8`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvrelay.engine.model.config import INT4_GROUP, INT8_GROUP

GROUP = INT8_GROUP  # inputs; also in gemm/layout.h, as the next
GROUPS = {8: GROUP, 4: INT4_GROUP}  # by the bits of weights
QUANTIZATIONS = {"cpu": ("none", "int8", "int4"), "cuda": ("none", "int8", "fp8")}  # by device
_MAX, _MAX_4 = 127.0, 15.0
_MIN_INPUT = 1e-30  # a group's largest, at least; as in gemm/int16.h
_MAX_INPUT = {8: 1023.0, 4: 127.0}  # by the bits of weights; as in gemm/int8_int16.c and int4.c
_SHRINK = (1.0, 0.94, 0.88, 0.82)  # a group's range times these: fewer outliers, finer steps
_OFF_STEP = 0.1  # parts of a step: so far off are bfloat16 numbers that had 4 bits
_CHUNK = 1 << 17  # weights


def bits_of(quantization: str, role: str) -> int:
    """Says how wide a matrix of this role becomes; 0: it stays floating point. The head, on which
    every token depends at once, has 8 where others have 4."""
    if quantization == "int4":
        return 8 if role == "logits" else 4
    return 8 if quantization == "int8" else 0


def quantize(weight: torch.Tensor, bits: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [..., out, in] -> integers of the same shape, one a byte, and bfloat16. 8 bits: int8
    and scales [..., out, ceil(in / group)]; 4 bits: uint8 and [..., out, ceil(in / group), 2], a
    scale and an offset."""
    depth, group = weight.shape[-1], GROUPS[bits]
    groups = -(-depth // group)
    kind, each = (torch.int8, 1) if bits == 8 else (torch.uint8, 2)
    numbers = torch.empty(weight.shape, dtype=kind, device=weight.device)
    shape = (*weight.shape[:-1], groups, each)
    scales = torch.empty(shape, dtype=torch.bfloat16, device=weight.device)
    flat = (weight.reshape(-1, depth), numbers.view(-1, depth), scales.view(-1, groups, each))
    rows = max(1, _CHUNK // depth)  # at a time: what is worked on stays in the cache
    for part, number, scale in zip(*(each.split(rows) for each in flat), strict=True):
        wide = F.pad(part.float(), (0, -depth % group)).unflatten(-1, (-1, group))
        rounded = _round_8(wide, scale) if bits == 8 else _round_4(wide, scale)
        number.copy_(rounded.flatten(-2)[..., :depth])
    return numbers, scales.squeeze(-1) if bits == 8 else scales


def _round_8(wide: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """wide: [rows, groups, GROUP]; scale: [rows, groups, 1], written."""
    scale.copy_(wide.abs().amax(-1, keepdim=True) / _MAX)
    scale.masked_fill_(scale == 0, 1.0)
    return (wide / scale.float()).round_().clamp_(-_MAX, _MAX)


def _round_4(wide: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rounds to 4 bits, with scale [rows, groups, 2]: of several ranges the one of least
    squares."""
    low, high = wide.aminmax(dim=-1, keepdim=True)
    best, least = torch.empty_like(wide), torch.full_like(low, float("inf"))
    span = high - low
    steps = [(span * (shrink / _MAX_4), low + span * ((1 - shrink) / 2)) for shrink in _SHRINK]
    if len(wide) > 0 and _has_steps(wide[0]):
        steps.append((_step_of(wide, span), low))
    for step, offset in steps:
        step = step.bfloat16().float().masked_fill_(step == 0, 1.0)
        offset = offset.bfloat16().float()
        numbers = ((wide - offset) / step).round_().clamp_(0, _MAX_4)
        error = (numbers * step + offset - wide).square_().sum(-1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, numbers, best)
        scale.copy_(torch.where(better, torch.cat((step, offset), -1), scale.float()))
    return best


def _step_of(wide: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
    """By which weights of a group differ that had 4 bits before, [..., 1]: the least difference, as
    exactly as the largest tells it."""
    gaps = wide.sort(-1).values.diff(dim=-1)
    gaps = gaps.masked_fill(gaps < span / (4 * _MAX_4), float("inf"))
    return span / (span / gaps.amin(-1, keepdim=True)).round().clamp(1, _MAX_4)


def _has_steps(groups: torch.Tensor) -> bool:
    """Whether weights [groups, GROUP] had 4 bits before: so a checkpoint that was quantized, and
    widened as it was loaded, keeps its values."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = _step_of(groups, high - low).masked_fill_(high == low, 1.0)
    numbers = (groups - low) / step
    off = (numbers - numbers.round()).abs().amax(-1)
    return bool((off < _OFF_STEP).float().mean() > 0.5)


def scheme(quantization: str, device_type: str, num_ranks: int = 1) -> str:
    """How weights and inputs are quantized, for the fingerprint of the KV. `device_type`: "cpu" or
    "cuda". Where inputs are rounded, the number of ranks is a part of it: each adds up its own
    columns, and a sum in another order may be rounded to another step."""
    if quantization in ("none", "fp8"):
        return quantization
    bits = {"int8": 11, "int4": 8}[quantization]
    named = f"{quantization} weights"
    if device_type != "cpu":
        return named
    return f"{named}, {bits}-bit inputs" + (f", {num_ranks} ranks" if num_ranks > 1 else "")


def round_inputs(x: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """x [..., in], any float -> the values that a CPU multiplies weights of `bits` by, float32."""
    depth, group = x.shape[-1], GROUPS[bits]
    wide = F.pad(x.float(), (0, -depth % group)).unflatten(-1, (-1, group))
    most = wide.abs().amax(-1, keepdim=True)
    most = most.masked_fill(most < _MIN_INPUT, 0.0)
    limit = torch.full_like(most, _MAX_INPUT[bits])  # a plain number is divided less exactly
    numbers = torch.where(most == 0, 0.0, wide * (limit / most)).round_()
    return (numbers * (most / _MAX_INPUT[bits])).flatten(-2)[..., :depth]


def dequantize(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverts `quantize`; the result is float32."""
    depth = numbers.shape[-1]
    if numbers.dtype == torch.int8:
        return numbers * scales.float().repeat_interleave(GROUP, -1)[..., :depth]
    each = scales.float().repeat_interleave(GROUPS[4], -2)[..., :depth, :]
    return numbers * each[..., 0] + each[..., 1]
