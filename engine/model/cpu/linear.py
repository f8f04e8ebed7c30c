"""Matrices on a CPU: how weights are packed, and products with them.

Sums are float32. Factors are too, but for quantized weights, multiplied as integers, and where
bfloat16 was chosen and the CPU multiplies it, or half floats or integers, faster.

Life: `matrix` packs a weight once, while a checkpoint is loaded; `linear` and `add_linear` are
called for every step from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.engine.model.cpu.huge_pages import HugePages
from kvrelay.engine.model.cpu.kernels import constants
from kvrelay.engine.model.quantize import bits_of, quantize

FLOAT32: int = constants.FLOAT32
BF16: int = constants.BF16
INT8: int = constants.INT8
INT4: int = constants.INT4
BITS = {INT8: 8, INT4: 4}
BF16_PAIRS: int = constants.BF16_PAIRS
FP16: int = constants.FP16
AMX: int = constants.AMX
INT16: int = constants.INT16
LOW_PRECISION = (AMX, FP16, BF16_PAIRS, INT16)  # fastest first
ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "squared_relu": 3}  # as in activation.h


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [rows, depth], packed for the kernel."""

    role: str
    rows: int
    depth: int
    data: torch.Tensor
    kind: int
    bias: torch.Tensor | None  # float32
    number: int = 0  # among those of a set of operations


@dataclass(frozen=True, slots=True)
class Experts:
    """Matrices of all experts, packed one after the other."""

    count: int
    width: int  # one expert's
    gate_ups: torch.Tensor  # each [2 * width, hidden_size]
    downs: torch.Tensor  # each [hidden_size, width]
    kind: int


@dataclass(frozen=True, slots=True)
class Heads:
    """A matrix for each head, packed one after the other."""

    role: str
    rows: int  # each matrix has
    data: torch.Tensor
    kind: int


class CpuLinear:
    """The matrix part of `CpuOps`, owned by it. Results live in buffers that `buffer(role, rows,
    width)` gives."""

    def __init__(
        self,
        library: Any,
        num_threads: int,
        dtype: torch.dtype,
        buffer: Callable[[str, int, int], torch.Tensor],
        quantization: str = "none",
        low_precision: int = 0,
        activation: int = 0,
    ) -> None:
        """low_precision: as of `CpuOps`; activation: of gated matrices."""
        self._lib, self._threads = library, num_threads
        self.bf16 = dtype == torch.bfloat16
        self._quantization = quantization
        self._low_precision, self._activation = low_precision, activation
        self.has_gate = activation != ACTIVATIONS["squared_relu"]
        self._buffer = buffer
        self._memory = HugePages()
        self._num_matrices = 0

    def use_new_chunks(self) -> None:
        """What is packed from now on gets chunks of its own: see `CpuOps`."""
        self._memory = HugePages()

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None, role: str) -> Matrix:
        wide = None if bias is None else owned(bias, torch.float32)
        return self._packed(weight, wide, role, self._kind(weight, role))

    def gated_matrix(self, weight: torch.Tensor, role: str) -> Matrix:
        kind = self._kind(weight, role)
        return self._packed(weight, None, role, kind, gated=self.has_gate)

    def gated(
        self, x: torch.Tensor, matrix: Matrix, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        """added: [n, rows of the `up` of a gated `CpuTerm`]."""
        if not self.has_gate:
            out = self.linear(x, matrix)
            if added is not None:
                out += added
            self._lib.kvr_squared_relu(out.data_ptr(), *out.shape, self._threads)
            return out
        out = self._buffer(matrix.role, len(x), matrix.rows // 2)
        self._multiply(x, matrix, None, out, activation=self._activation, added=added)
        return out

    def exact(self, weight: torch.Tensor, role: str) -> Matrix:
        """A weight whose inputs are not rounded, whatever others are."""
        return self._packed(weight, None, role, _exact_kind(weight))

    def _packed(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        role: str,
        kind: int,
        gated: bool = False,
    ) -> Matrix:
        rows, depth = weight.shape
        packed = self._memory.take(self._lib.kvr_packed_bytes(rows, depth, kind))
        self._pack_into(packed, weight, kind, gated, self._threads)
        self._num_matrices += 1
        return Matrix(role, rows, depth, packed, kind, bias, self._num_matrices - 1)

    def linear(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        out = self._buffer(matrix.role, len(x), matrix.rows)
        self._multiply(x, matrix, matrix.bias, out)
        return out

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, matrix: Matrix) -> None:
        if matrix.bias is not None:
            hidden += matrix.bias
        self._multiply(x, matrix, None, hidden, keep=True)

    def heads(self, weight: torch.Tensor, role: str) -> Heads:
        """weight: [num_heads, in, out]; inputs are not rounded."""
        kind = _exact_kind(weight)
        return Heads(role, weight.shape[2], self._stack(weight.transpose(1, 2), kind), kind)

    def per_head(self, x: torch.Tensor, heads: Heads) -> torch.Tensor:
        """As `Ops.per_head`; heads may be columns of wider ones."""
        count, num_heads, width = x.shape
        assert x.stride(2) == 1
        out = self._buffer(heads.role, count, num_heads * heads.rows)
        self._lib.kvr_heads(
            *(x.data_ptr(), x.stride(0), x.stride(1), heads.data.data_ptr(), heads.kind),
            *(width, heads.rows, num_heads, count),
            *(out.data_ptr(), out.stride(0), heads.rows, self._threads),
        )
        return out.view(count, num_heads, -1)

    def experts(self, gate_ups: torch.Tensor, downs: torch.Tensor) -> Experts:
        count, _, width = downs.shape
        kind = self._kind(downs, "experts")
        gated = self._stack(gate_ups, kind, gated=self.has_gate)
        return Experts(count, width, gated, self._stack(downs, kind), kind)

    def _kind(self, weight: torch.Tensor, role: str) -> int:
        if bits := bits_of(self._quantization, role):
            return INT8 if bits == 8 else INT4
        if self._low_precision:
            return self._low_precision
        return BF16 if self.bf16 else _exact_kind(weight)

    def _pack_into(
        self, packed: torch.Tensor, weight: torch.Tensor, kind: int, gated: bool, threads: int
    ) -> None:
        rows, depth = weight.shape
        scales = None
        if kind in BITS:
            data, scales = quantize(weight, BITS[kind])
        else:
            wanted = torch.float32 if kind == FLOAT32 else torch.bfloat16
            data = weight.to(wanted).contiguous()
        self._lib.kvr_pack(
            data.data_ptr(),
            rows,
            depth,
            kind,
            gated,
            None if scales is None else scales.data_ptr(),
            packed.data_ptr(),
            threads,
        )

    def _stack(self, weights: torch.Tensor, kind: int, gated: bool = False) -> torch.Tensor:
        count, rows, depth = weights.shape
        size = self._lib.kvr_packed_bytes(rows, depth, kind)
        packed = self._memory.take(count * size).view(count, size)
        for index in range(count):
            self._pack_into(packed[index], weights[index], kind, gated, self._threads)
        return packed

    def _multiply(
        self,
        x: torch.Tensor,
        matrix: Matrix,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        keep: bool = False,
        activation: int = 0,
        added: torch.Tensor | None = None,
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
            activation,
            None if added is None else added.data_ptr(),
            self._threads,
        )


def fastest_kind(library: Any) -> int:
    """Returns which products with rounded factors are fastest on this CPU; 0: none beats
    float32."""
    return next((kind for kind in LOW_PRECISION if library.kvr_multiplies(kind)), 0)


def _exact_kind(weight: torch.Tensor) -> int:
    return BF16 if weight.dtype == torch.bfloat16 else FLOAT32


def owned(weight: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """A copy: the checkpoint's file may be replaced while its pages are still mapped."""
    return weight.to(kind, copy=True, memory_format=torch.contiguous_format)
