"""Recurrent layers on a CPU: what the kernels know of the states and of each batch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.cpu.kernels import structure
from kvrelay.engine.model.recurrence import DeltaRows
from kvrelay.engine.model.state_layout import KIMI_DELTA_ATTENTION, MAMBA2
from kvrelay.engine.model.states import StatePool
from kvrelay.engine.model.weights import RecurrentWeights

if TYPE_CHECKING:
    from kvrelay.engine.model.cpu.linear import Matrix

_States, _Convolution, _DeltaRule = map(structure, ("States", "Convolution", "DeltaRule"))
_Matrix, _Recurrent = structure("Matrix"), structure("Recurrent")
_MAX_PIECE = 256  # channels of one task, as in layers/api.h


def described_matrix(matrix: Matrix | None) -> Any:
    """As long as the matrix lives. None: a matrix that is not there."""
    if matrix is None:
        return _Matrix()
    at, bias = matrix.data.data_ptr(), address(matrix.bias)
    return _Matrix(at, bias, matrix.rows, matrix.depth, matrix.kind, matrix.number)


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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
        self._pool, self._lib, self._config = pool, library, config
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
        self._states = self._no_states()
        self._alive: list[Any] = []

    def _no_states(self) -> ctypes.Array[Any]:
        """One for each group of layers."""
        count = 1 + max(map(self._pool.group, self._config.recurrent_layers))
        strides = {"stride": self._pool.stride, "unit_stride": self._pool.unit_stride}
        return (_States * count)(*(_States(**strides) for _ in range(count)))

    def for_decodes(self) -> CpuRecurrent:
        """Another over the same pool, with states of its own: `begin` does not change them."""
        other = copy(self)
        other._states, other._alive = other._no_states(), []
        return other

    def begin(self, batch: Batch) -> None:
        """Batch is what the following calls belong to."""
        assert batch.states, "a step of a model with recurrent layers has states"
        self._alive = []
        for spans, states in zip(batch.states, self._states, strict=True):
            rows = zip(spans.rows, spans.load, spans.store, strict=True)
            segments = np.array([(*row, load, store) for row, load, store in rows], np.int64)
            starts = [each.start for each in spans.chains()]
            self._lend(states, segments, np.array([*starts, len(spans.rows)], np.int64))
            states.count = len(starts)

    def hold(self, capacity: int) -> tuple[int, int]:
        """Prepares decodes of at most `capacity` sequences, whose states the kernels look up.
        Returns the address and the number of their `States`."""
        self._alive = []
        for states in self._states:
            self._lend(states, np.zeros((capacity, 4), np.int64), np.arange(capacity + 1))
        return ctypes.addressof(self._states), len(self._states)

    def _lend(self, states: Any, segments: np.ndarray, chains: np.ndarray) -> None:
        states.segments, states.chains = segments.ctypes.data, chains.ctypes.data
        self._alive += [segments, chains]

    @property
    def widths(self) -> dict[str, int]:
        """Returns those of the buffers that a step's rows pass through here."""
        shape = self._config.recurrent
        assert shape is not None
        decays = shape.width if shape.kind == KIMI_DELTA_ATTENTION else 0
        return {"projected": shape.num_projected + decays, "recurred": shape.width}

    def described(self, weights: RecurrentWeights, layer: int) -> Any:
        """As long as this and the weights live."""
        shape = self._config.recurrent
        assert shape is not None
        has_memory, norm = shape.num_heads > 0, weights.norm
        return _Recurrent(
            project=described_matrix(weights.project),
            decay_up=described_matrix(weights.decay_up),
            gate_up=described_matrix(weights.gate_up),
            out=described_matrix(weights.out),
            conv=self._convolution(weights, silu=has_memory),
            rule=self._rule(weights) if has_memory else _DeltaRule(),
            norm=address(norm),
            norm_width=shape.norm_width if has_memory else 0,
            norm_step=norm_step(norm, shape.norm_width) if has_memory else 0,
            states=self._states_of(layer),
            conv_state=self._pool.conv(layer).data_ptr(),
            memory=self._pool.memory_of(layer).data_ptr() if has_memory else None,
            index=self._config.recurrent_layers.index(layer),
            silu=gate_is_silu(shape.kind),
            gate_first=shape.kind == MAMBA2,
        )

    def _states_of(self, layer: int) -> int:
        return ctypes.addressof(self._states[self._pool.group(layer)])

    def _convolution(self, weights: RecurrentWeights, silu: bool) -> Any:
        kernel, channels = weights.conv.shape
        return _Convolution(
            weight=weights.conv.data_ptr(),
            bias=address(weights.conv_bias),
            pieces=self._pieces.ctypes.data,
            channels=channels,
            kernel=kernel,
            silu=silu,
            num_pieces=len(self._pieces),
            unit_channels=self._pool.layout.unit_channels,
        )

    def _rule(self, weights: RecurrentWeights) -> Any:
        shape, bias = self._config.recurrent, weights.decay_bias
        assert shape is not None
        assert weights.rate is not None
        assert bias is not None
        return _DeltaRule(
            rate=weights.rate.data_ptr(),
            decay_bias=bias.data_ptr(),
            skip=address(weights.skip),
            decay_width=len(bias) // shape.num_heads,
            num_heads=shape.num_heads,
            num_key_heads=shape.num_key_heads,
            unit_heads=self._pool.layout.num_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
        )

    def convolve(
        self, x: torch.Tensor, weights: RecurrentWeights, layer: int, silu: bool
    ) -> torch.Tensor:
        assert x.stride(1) == 1
        out = self._buffer("convolved", len(x), weights.conv.shape[1])
        conv = self._convolution(weights, silu)
        conv.x, conv.x_stride, conv.y = x.data_ptr(), x.stride(0), out.data_ptr()
        self._call(self._lib.kvr_convolve, conv, layer, self._pool.conv(layer))
        return out

    def delta_rule(self, rows: DeltaRows, weights: RecurrentWeights, layer: int) -> torch.Tensor:
        rule = self._rule(weights)
        for name, each in rows._asdict().items():
            assert each.stride(1) == 1
            setattr(rule, name, each.data_ptr())
            setattr(rule, f"{name}_stride", each.stride(0))
        out = self._buffer("recurrent_out", len(rows.qkv), rule.num_heads * rule.value_dim)
        rule.y = out.data_ptr()
        self._call(self._lib.kvr_delta_rule, rule, layer, self._pool.memory_of(layer))
        return out

    def _call(self, kernel: Any, described: Any, layer: int, state: torch.Tensor) -> None:
        kernel(
            self._states_of(layer),
            ctypes.addressof(described),
            state.data_ptr(),
            self._threads,
        )


def gate_is_silu(kind: str) -> bool:
    """Whether outputs are multiplied by what they pass times its sigmoid, not by that alone."""
    return kind != KIMI_DELTA_ATTENTION


def norm_step(norm: torch.Tensor | None, width: int) -> int:
    """From the weights of outputs that are normed together, `width`, to those of the next ones."""
    return 0 if norm is None or len(norm) == width else width
