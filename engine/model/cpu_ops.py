"""The decoder's operations on a CPU: compiled kernels and float32 arithmetic.

The residual stream is float32. Weights are kept as the checkpoint has them: bfloat16 ones stay
bfloat16 in memory and are widened in registers, which gives float32's results at half the traffic.
Where the CPU multiplies bfloat16 natively and that dtype was chosen, products go through torch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.kernels import KernelsUnavailable
from engine.model.ops import rope_tables

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _Attention(ctypes.Structure):
    """`Attention` of attention.c, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "out", "pool", "partial", "tables")),
        *((name, _POINTER) for name in ("query_start", "query_len", "context_len")),
        *((name, _POINTER) for name in ("items", "merges")),
        *((name, _LONG) for name in ("qkv_stride", "table_stride", "block_stride")),
        *((name, _LONG) for name in ("value_offset", "num_heads", "num_kv_heads", "head_dim")),
        *((name, _LONG) for name in ("block_size", "num_items", "num_merges")),
        *(("scale", ctypes.c_float), ("kv_bf16", ctypes.c_int32), ("threads", ctypes.c_int32)),
    )


class _Rope(ctypes.Structure):
    """`Rope` of layers.c, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("cos", "sin", "positions", "slots")),
        *((name, _LONG) for name in ("num_tokens", "qkv_stride", "block_stride")),
        *((name, _LONG) for name in ("value_offset", "num_heads", "num_kv_heads", "head_dim")),
        *(("block_size", _LONG), ("eps", ctypes.c_float)),
        *(("kv_bf16", ctypes.c_int32), ("threads", ctypes.c_int32)),
    )


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A weight [rows, depth]: packed for the kernel, or as torch wants it."""

    role: str
    rows: int
    depth: int
    data: torch.Tensor
    packed: bool
    bias: torch.Tensor | None  # float32


class CpuOps:
    """Owned by one runner, used from one thread at a time. Result buffers grow to the largest step
    seen and are reused from layer to layer."""

    def __init__(
        self,
        config: ModelConfig,
        pool: torch.Tensor,
        dtype: torch.dtype,
        max_positions: int,
        library: ctypes.CDLL,
        num_threads: int,
        native_bf16: bool,
    ) -> None:
        """pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], float32 or
        bfloat16. Raises KernelsUnavailable for shapes that the kernels do not know."""
        self._config, self._pool, self._lib = config, pool, library
        self._threads = num_threads
        self._bf16 = dtype == torch.bfloat16
        self._pack = not (self._bf16 and native_bf16)
        _check(config, pool, library)
        self._tables = rope_tables(config, max_positions, torch.device("cpu"))
        self._stride = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._layer_bytes = pool.stride(1) * pool.element_size()
        self._buffers: dict[str, torch.Tensor] = {}
        shared = {
            "block_stride": pool.stride(0),
            "value_offset": pool.stride(2),
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "block_size": pool.shape[4],
            "qkv_stride": self._stride,
            "kv_bf16": pool.dtype == torch.bfloat16,
            "threads": num_threads,
        }
        self._attention = _Attention(scale=config.head_dim**-0.5, **shared)
        self._rope = _Rope(eps=config.rms_norm_eps, **shared)
        self._rope.cos, self._rope.sin = (table.data_ptr() for table in self._tables)
        self._attention_at = ctypes.addressof(self._attention)
        self._rope_at = ctypes.addressof(self._rope)

    def table(self, weight: torch.Tensor) -> torch.Tensor:
        kind = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
        return _owned(weight, kind)

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None, role: str) -> _Matrix:
        rows, depth = weight.shape
        wide = None if bias is None else self.vector(bias)
        if not self._pack:
            return _Matrix(role, rows, depth, _owned(weight, torch.bfloat16), False, wide)
        narrow = self._bf16 or weight.dtype == torch.bfloat16
        data = weight.to(torch.bfloat16 if narrow else torch.float32).contiguous()
        panel = self._lib.kvr_panel_width()
        packed = torch.empty(-(-rows // panel) * panel * depth, dtype=data.dtype)
        self._lib.kvr_pack(data.data_ptr(), rows, depth, narrow, packed.data_ptr(), self._threads)
        return _Matrix(role, rows, depth, packed, True, wide)

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        return _owned(weight, torch.float32)

    def begin(self, batch: Batch) -> None:
        c, a = self._config, self._attention
        num_seqs, width = len(batch.spans), c.num_kv_heads
        tile = self._lib.kvr_attention_tile(c.num_heads // width)
        split = self._lib.kvr_attention_split()
        most = sum(-(-s[1] // tile) + -(-s[2] // split) for s in batch.spans) * width
        items = torch.empty((most, 4), dtype=torch.int32)
        merges = torch.empty((num_seqs * width, 4), dtype=torch.int32)
        counts = (_LONG * 3)()
        self._lib.kvr_attention_plan(
            num_seqs,
            batch.query_len.data_ptr(),
            batch.context_len.data_ptr(),
            width,
            c.num_heads // width,
            items.data_ptr(),
            merges.data_ptr(),
            counts,
        )
        a.num_items, a.num_merges, num_partials = counts
        partial = torch.empty(num_partials * (c.num_heads // width) * (c.head_dim + 2))
        a.items, a.merges, a.partial = items.data_ptr(), merges.data_ptr(), partial.data_ptr()
        a.tables, a.table_stride = batch.block_tables.data_ptr(), batch.block_tables.shape[1]
        a.query_start, a.query_len = batch.query_start.data_ptr(), batch.query_len.data_ptr()
        a.context_len = batch.context_len.data_ptr()
        self._rope.positions = batch.positions.data_ptr()
        self._rope.slots = batch.slots.data_ptr()
        self._rope.num_tokens = len(batch.tokens)
        self._alive = (batch, items, merges, partial)  # the structures point into these

    def _buffer(self, role: str, rows: int, width: int) -> torch.Tensor:
        held = self._buffers.get(role)
        if held is None or held.numel() < rows * width:
            held = self._buffers[role] = torch.empty(rows * width)
        return held[: rows * width].view(rows, width)

    def embed(self, table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.empty(len(tokens), table.shape[1])
        bf16 = table.dtype == torch.bfloat16
        self._lib.kvr_embed(
            table.data_ptr(), bf16, tokens.data_ptr(), *hidden.shape, hidden.data_ptr()
        )
        return hidden

    def linear(self, x: torch.Tensor, matrix: _Matrix) -> torch.Tensor:
        out = self._buffer(matrix.role, len(x), matrix.rows)
        if matrix.packed:
            self._multiply(x, matrix, matrix.bias, out, keep=False)
        else:
            out.copy_(F.linear(x.bfloat16(), matrix.data))
            if matrix.bias is not None:
                out += matrix.bias
        return out

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, matrix: _Matrix) -> None:
        if matrix.bias is not None:
            hidden += matrix.bias
        if matrix.packed:
            self._multiply(x, matrix, None, hidden, keep=True)
        else:
            hidden += F.linear(x.bfloat16(), matrix.data)

    def _multiply(
        self,
        x: torch.Tensor,
        matrix: _Matrix,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        keep: bool,
    ) -> None:
        self._lib.kvr_linear(
            x.data_ptr(),
            len(x),
            matrix.depth,
            matrix.data.data_ptr(),
            matrix.data.dtype == torch.bfloat16,
            matrix.rows,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            keep,
            self._threads,
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = self._buffer("norm", *x.shape)
        self._lib.kvr_rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *x.shape,
            self._config.rms_norm_eps,
            self._threads,
        )
        return out

    def rope_write(
        self,
        qkv: torch.Tensor,
        layer: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> None:
        self._lib.kvr_rope_write(
            self._rope_at,
            qkv.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            self._pool.data_ptr() + layer * self._layer_bytes,
        )

    def attention(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        c = self._config
        out = self._buffer("attention", len(qkv), c.num_heads * c.head_dim)
        self._lib.kvr_attention(
            self._attention_at,
            qkv.data_ptr(),
            out.data_ptr(),
            self._pool.data_ptr() + layer * self._layer_bytes,
        )
        return out

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        out = self._buffer("swiglu", rows, width // 2)
        self._lib.kvr_swiglu(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, self._threads)
        return out


def _owned(weight: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """A copy: the checkpoint's file may be replaced while its pages are still mapped."""
    return weight.to(kind, copy=True, memory_format=torch.contiguous_format)


def _check(config: ModelConfig, pool: torch.Tensor, library: ctypes.CDLL) -> None:
    """Raises KernelsUnavailable for what the kernels do not handle."""
    assert library.kvr_attention_bytes() == ctypes.sizeof(_Attention)
    assert library.kvr_rope_bytes() == ctypes.sizeof(_Rope)
    assert pool.is_contiguous()
    width, most = library.kvr_vector_width(), library.kvr_attention_max_dim()
    if config.head_dim % width or config.head_dim > most:
        raise KernelsUnavailable(
            f"head_dim {config.head_dim} is not a multiple of {width} up to {most}"
        )
    if config.num_heads // config.num_kv_heads > library.kvr_attention_max_group():
        raise KernelsUnavailable(
            f"{config.num_heads} heads over {config.num_kv_heads} KV heads is too large a group"
        )
    if pool.dtype not in (torch.float32, torch.bfloat16):
        raise KernelsUnavailable(f"a KV cache of {pool.dtype} is not handled")
