"""RMSNorm and the gate of the MLP on a GPU: one read and one write of every row, float32
arithmetic."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvrelay.engine.model.ops import SWISH_ALPHA, SWISH_LIMIT

MAX_WIDTH = 65_536  # one program holds a whole row
BLOCK = 1024
_GELU_TANH, _SQUARED_RELU, _CLAMPED_SWISH = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
KINDS = {"silu": 0, "gelu_tanh": 1, "squared_relu": 2, "clamped_swish": 3}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., width], contiguous in its last dimension -> the same shape, contiguous:
    weight * (x / rms(x)), rounded before the weight as the reference does."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    if len(rows):
        _rms_norm[(len(rows),)](
            rows, weight, out, rows.stride(0), width, eps,
            BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
        )  # fmt: skip
    return out


def _warps(width: int) -> int:
    return min(16, max(1, triton.next_power_of_2(width) // 512))


@triton.jit
def _rms_norm(x, weight, out, stride, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    wide = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (w * normed).to(out.dtype.element_ty), mask=inside)


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """[n, 2 * width], contiguous -> [n, width]; squared_relu has no gate: [n, width] -> the same.
    The gate is rounded to the dtype before it is multiplied, as the reference does. activation: a
    key of KINDS."""
    kind = KINDS[activation]
    rows, width = gate_up.shape[0], gate_up.shape[1] // (1 if kind == _SQUARED_RELU.value else 2)
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        _gated[grid](
            gate_up, out, gate_up.shape[1], width, KIND=kind, BLOCK=BLOCK, ALPHA=SWISH_ALPHA,
            LIMIT=SWISH_LIMIT,
        )  # fmt: skip
    return out


@triton.jit
def _gated(
    gate_up, out, stride, width, KIND: tl.constexpr, BLOCK: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == _SQUARED_RELU:
        result = tl.maximum(gate, 0.0)
        result = result * result
    else:
        up = tl.load(gate_up + row * stride + width + at, mask=inside, other=0.0).to(tl.float32)
        if KIND == _GELU_TANH:
            # tanh(z) = 2 * sigmoid(2 * z) - 1, so 0.5 * (1 + tanh(z)) = sigmoid(2 * z)
            z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
            active = gate * tl.sigmoid(2.0 * z)
        elif KIND == _CLAMPED_SWISH:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
            active = gate * tl.sigmoid(ALPHA * gate)
        else:
            active = gate * tl.sigmoid(gate)
        result = active.to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + row * width + at, result.to(out.dtype.element_ty), mask=inside)
