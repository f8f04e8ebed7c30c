"""Matrices on a CPU: how weights are packed, and products with them in float32 arithmetic.

Life: `matrix` packs a weight once, while a checkpoint is loaded; `linear` and `add_linear` are
called for every step from then on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.model.huge_pages import HugePages
from engine.model.quantize import quantize

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # as in linear.h


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [rows, depth]: packed for the kernel, or as torch wants it."""

    role: str
    rows: int
    depth: int
    data: torch.Tensor
    kind: int | None  # of `_KINDS`; None: not packed
    bias: torch.Tensor | None  # float32


@dataclass(frozen=True, slots=True)
class Experts:
    """Matrices of all experts, packed one after the other."""

    count: int
    width: int  # of one expert
    gate_ups: torch.Tensor  # each [2 * width, hidden_size]
    downs: torch.Tensor  # each [hidden_size, width]
    kind: int


class CpuLinear:
    """The matrix part of `CpuOps`, owned by it. Results live in buffers that `buffer(role, rows,
    width)` gives."""

    def __init__(
        self,
        library: ctypes.CDLL,
        num_threads: int,
        dtype: torch.dtype,
        native_bf16: bool,
        buffer: Callable[[str, int, int], torch.Tensor],
        quantization: str = "none",
    ) -> None:
        self._lib, self._threads = library, num_threads
        self._bf16 = dtype == torch.bfloat16
        self._int8 = quantization == "int8"
        self._pack = self._int8 or not (self._bf16 and native_bf16)
        self._buffer = buffer
        self._memory = HugePages()

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None, role: str) -> Matrix:
        rows, depth = weight.shape
        wide = None if bias is None else owned(bias, torch.float32)
        if not self._pack:
            return Matrix(role, rows, depth, owned(weight, torch.bfloat16), None, wide)
        kind = self._kind(weight)
        packed = self._memory.take(self._lib.kvr_packed_bytes(rows, depth, kind))
        self._pack_into(packed, weight, kind)
        return Matrix(role, rows, depth, packed, kind, wide)

    def linear(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        out = self._buffer(matrix.role, len(x), matrix.rows)
        if matrix.kind is not None:
            self._multiply(x, matrix, matrix.bias, out, keep=False)
        else:
            out.copy_(F.linear(x.bfloat16(), matrix.data))
            if matrix.bias is not None:
                out += matrix.bias
        return out

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, matrix: Matrix) -> None:
        if matrix.bias is not None:
            hidden += matrix.bias
        if matrix.kind is not None:
            self._multiply(x, matrix, None, hidden, keep=True)
        else:
            hidden += F.linear(x.bfloat16(), matrix.data)

    def experts(self, gate_ups: torch.Tensor, downs: torch.Tensor) -> Experts:
        count, _, width = downs.shape
        kind = self._kind(downs)
        return Experts(count, width, self._stack(gate_ups, kind), self._stack(downs, kind), kind)

    def add_experts(
        self,
        hidden: torch.Tensor,
        x: torch.Tensor,
        experts: Experts,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        activate: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """As `Ops.add_experts`. Rows are sorted by expert, so that each expert is read once; every
        token's results are added up in the order of its choices, whoever else is in the batch."""
        num_tokens, per_token = chosen.shape
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # [N * K], into the choices
        starts = torch.zeros(experts.count + 1, dtype=torch.int64)
        starts[1:] = flat.bincount(minlength=experts.count).cumsum(0)
        rows = x[order // per_token]  # [N * K, hidden_size]
        both = self._buffer("expert_gate_up", len(rows), 2 * experts.width)
        self._multiply_each(rows, experts.gate_ups, experts, starts, both)
        down = self._buffer("expert_down", len(rows), hidden.shape[1])
        self._multiply_each(activate(both), experts.downs, experts, starts, down)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        parts = down[place].view(num_tokens, per_token, -1)
        hidden += (parts * weights.unsqueeze(-1)).sum(1)

    def _kind(self, weight: torch.Tensor) -> int:
        if self._int8:
            return _KINDS[torch.int8]
        narrow = self._bf16 or weight.dtype == torch.bfloat16
        return _KINDS[torch.bfloat16 if narrow else torch.float32]

    def _pack_into(self, packed: torch.Tensor, weight: torch.Tensor, kind: int) -> None:
        rows, depth = weight.shape
        scales = None
        if kind == _KINDS[torch.int8]:
            data, scales = quantize(weight)
        else:
            wanted = torch.bfloat16 if kind == _KINDS[torch.bfloat16] else torch.float32
            data = weight.to(wanted).contiguous()
        self._lib.kvr_pack(
            data.data_ptr(),
            rows,
            depth,
            kind,
            None if scales is None else scales.data_ptr(),
            packed.data_ptr(),
            self._threads,
        )

    def _stack(self, weights: torch.Tensor, kind: int) -> torch.Tensor:
        count, rows, depth = weights.shape
        size = self._lib.kvr_packed_bytes(rows, depth, kind)
        packed = self._memory.take(count * size).view(count, size)
        for index in range(count):
            self._pack_into(packed[index], weights[index], kind)
        return packed

    def _multiply(
        self,
        x: torch.Tensor,
        matrix: Matrix,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        keep: bool,
    ) -> None:
        assert x.stride(1) == out.stride(1) == 1
        self._lib.kvr_linear(
            x.data_ptr(),
            len(x),
            x.stride(0),
            matrix.depth,
            matrix.data.data_ptr(),
            matrix.kind,
            matrix.rows,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            keep,
            self._threads,
        )

    def _multiply_each(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        experts: Experts,
        starts: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Rows [starts[e], starts[e + 1]) of x times the matrix of expert e."""
        self._lib.kvr_experts(
            x.data_ptr(),
            x.shape[1],
            packed.data_ptr(),
            experts.kind,
            out.shape[1],
            starts.data_ptr(),
            experts.count,
            out.data_ptr(),
            self._threads,
        )


def owned(weight: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """A copy: the checkpoint's file may be replaced while its pages are still mapped."""
    return weight.to(kind, copy=True, memory_format=torch.contiguous_format)
