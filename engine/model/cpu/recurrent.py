"""Recurrent layers on a CPU: what the kernels know of the states and of each batch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.cpu.kernels import structure
from kvrelay.engine.model.recurrence import DeltaRows
from kvrelay.engine.model.states import StatePool
from kvrelay.engine.model.weights import RecurrentWeights

_States, _Convolution, _DeltaRule = map(structure, ("States", "Convolution", "DeltaRule"))
_MAX_PIECE = 256  # channels of one task, as in layers/api.h


class CpuRecurrent:
    """The recurrent part of `CpuOps`, owned by it."""

    def __init__(
        self,
        config: ModelConfig,
        pool: StatePool,
        library: Any,
        num_threads: int,
        buffer: Callable[[str, int, int], torch.Tensor],
    ) -> None:
        self._shape, self._pool, self._lib = config.recurrent, pool, library
        self._threads, self._buffer = num_threads, buffer
        self._pieces = np.array(
            [
                (run.first + at, min(_MAX_PIECE, run.width - at), start + at, run.copies)
                for run in pool.layout.runs()
                for start in (run.unit * pool.unit_stride + run.at,)
                for at in range(0, run.width, _MAX_PIECE)
            ],
            np.int64,
        )
        self._states: list[Any] = []  # one for each group of layers
        self._alive: list[Any] = []

    def begin(self, batch: Batch) -> None:
        """Batch is what the following calls belong to."""
        assert batch.states, "a step of a model with recurrent layers has states"
        self._states, self._alive = [], []
        for spans in batch.states:
            rows = zip(spans.rows, spans.load, spans.store, strict=True)
            segments = np.array([(*row, load, store) for row, load, store in rows], np.int64)
            starts = [each.start for each in spans.chains()]
            chains = np.array([*starts, len(spans.rows)], np.int64)
            self._alive += [segments, chains]
            self._states.append(
                _States(
                    stride=self._pool.stride,
                    segments=segments.ctypes.data,
                    chains=chains.ctypes.data,
                    count=len(starts),
                    unit_stride=self._pool.unit_stride,
                )
            )

    def convolve(
        self, x: torch.Tensor, weights: RecurrentWeights, layer: int, silu: bool
    ) -> torch.Tensor:
        kernel, channels = weights.conv.shape
        assert x.stride(1) == 1
        out = self._buffer("convolved", len(x), channels)
        bias = weights.conv_bias
        conv = _Convolution(
            x=x.data_ptr(),
            weight=weights.conv.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            y=out.data_ptr(),
            pieces=self._pieces.ctypes.data,
            x_stride=x.stride(0),
            channels=channels,
            kernel=kernel,
            silu=silu,
            num_pieces=len(self._pieces),
            unit_channels=self._pool.layout.unit_channels,
        )
        self._call(self._lib.kvr_convolve, conv, layer, self._pool.conv(layer))
        return out

    def delta_rule(self, rows: DeltaRows, weights: RecurrentWeights, layer: int) -> torch.Tensor:
        shape, (qkv, decay, beta) = self._shape, rows
        assert shape is not None
        assert weights.rate is not None
        assert weights.decay_bias is not None
        assert qkv.stride(1) == decay.stride(1) == beta.stride(1) == 1
        out = self._buffer("recurrent_out", len(qkv), shape.num_heads * shape.value_dim)
        rule = _DeltaRule(
            qkv=qkv.data_ptr(),
            decay=decay.data_ptr(),
            beta=beta.data_ptr(),
            rate=weights.rate.data_ptr(),
            decay_bias=weights.decay_bias.data_ptr(),
            skip=None if weights.skip is None else weights.skip.data_ptr(),
            y=out.data_ptr(),
            qkv_stride=qkv.stride(0),
            decay_stride=decay.stride(0),
            beta_stride=beta.stride(0),
            decay_width=decay.shape[1] // shape.num_heads,
            num_heads=shape.num_heads,
            num_key_heads=shape.num_key_heads,
            unit_heads=self._pool.layout.num_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
        )
        self._call(self._lib.kvr_delta_rule, rule, layer, self._pool.memory_of(layer))
        return out

    def _call(self, kernel: Any, described: Any, layer: int, state: torch.Tensor) -> None:
        kernel(
            ctypes.addressof(self._states[self._pool.group(layer)]),
            ctypes.addressof(described),
            state.data_ptr(),
            self._threads,
        )
