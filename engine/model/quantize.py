"""Int8 weights: symmetric, one scale for every GROUP inputs of an output.

Life: a matrix is quantized while a checkpoint is loaded; kernels read what results. Its inputs stay
floating point on a GPU. On a CPU those of each token and group are rounded to 11 bits, so that
products are of integers; its error is an eighth of that of the weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.model.config import INT8_GROUP

GROUP = INT8_GROUP  # inputs; also in gemm/layout.h
QUANTIZATIONS = ("none", "int8")
_MAX = 127.0
_MAX_INPUT, _MIN_INPUT = 1023.0, 1e-30  # of a group's largest; as in gemm/int8_int16.c
_CHUNK = 1 << 17  # weights


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [..., out, in] -> int8 of the same shape and scales [..., out, ceil(in / GROUP)],
    bfloat16."""
    depth, groups = weight.shape[-1], -(-weight.shape[-1] // GROUP)
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty((*weight.shape[:-1], groups), dtype=torch.bfloat16, device=weight.device)
    flat = (weight.reshape(-1, depth), numbers.view(-1, depth), scales.view(-1, groups))
    rows = max(1, _CHUNK // depth)  # at a time: what is worked on stays in the cache
    for part, number, scale in zip(*(each.split(rows) for each in flat), strict=True):
        wide = F.pad(part.float(), (0, -depth % GROUP)).unflatten(-1, (-1, GROUP))
        scale.copy_(wide.abs().amax(-1) / _MAX)
        scale.masked_fill_(scale == 0, 1.0)
        wide = (wide / scale.float().unsqueeze(-1)).round_().clamp_(-_MAX, _MAX)
        number.copy_(wide.flatten(-2)[..., :depth])
    return numbers, scales


def scheme(quantization: str, device_type: str) -> str:
    """How weights and inputs are quantized, for the fingerprint of the KV. `device_type`: "cpu" or
    "cuda"."""
    if quantization == "none":
        return quantization
    return f"{quantization} weights" + (", 11-bit inputs" if device_type == "cpu" else "")


def round_inputs(x: torch.Tensor) -> torch.Tensor:
    """x [..., in], any float -> the values that a CPU multiplies int8 weights by, float32."""
    depth = x.shape[-1]
    wide = F.pad(x.float(), (0, -depth % GROUP)).unflatten(-1, (-1, GROUP))
    most = wide.abs().amax(-1, keepdim=True)
    most = most.masked_fill(most < _MIN_INPUT, 0.0)
    factor = torch.full_like(most, _MAX_INPUT) / most  # a plain number is divided less exactly
    numbers = torch.where(most == 0, 0.0, wide * factor).round_()
    return (numbers * (most / _MAX_INPUT)).flatten(-2)[..., :depth]


def dequantize(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverse of `quantize`, float32."""
    depth = numbers.shape[-1]
    return numbers * scales.float().repeat_interleave(GROUP, -1)[..., :depth]
