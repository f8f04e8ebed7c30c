"""All layers of a step in one call of the CPU kernels.

Life: the layers are described once, when the first step comes; each step then only says where its
rows are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.cpu.attention import CpuAttention
from kvrelay.engine.model.cpu.kernels import constants, structure
from kvrelay.engine.model.cpu.linear import ACTIVATIONS, Matrix
from kvrelay.engine.model.weights import (
    AttentionWeights,
    ExpertsWeights,
    LatentWeights,
    LayerWeights,
)

_Matrix, _Experts, _Latent = map(structure, ("Matrix", "Experts", "Latent"))
_Layer, _Step = structure("Layer"), structure("Step")
ROW_BLOCK_STEP: int = constants.ROW_BLOCK_STEP


class CpuStep:
    """The layers of `CpuOps` at once, owned by it. The weights that it describes are kept alive."""

    def __init__(
        self,
        config: ModelConfig,
        library: Any,
        num_threads: int,
        attention: CpuAttention,
        buffer: Callable[[str, int, int], torch.Tensor],
    ) -> None:
        self._lib, self._attention, self._buffer = library, attention, buffer
        self._config = config
        self._step = step_of(config, library, num_threads)
        self._widths: dict[str, int] = {}  # width of each buffer
        self._described: Sequence[LayerWeights] | None = None
        self._layers: ctypes.Array[Any] | None = None

    def run(
        self, hidden: torch.Tensor, layers: Sequence[LayerWeights], batch: Batch
    ) -> torch.Tensor:
        """hidden [N, hidden_size] passes all layers. Returns it where rows are to be sampled, [R,
        hidden_size]."""
        if self._described is not layers:
            self._described = layers
            self._layers = described(self._config, layers, self._attention, self._lib)
            self._widths = widths(self._layers, self._config)
        assert hidden.is_contiguous()
        step, rows, count = self._step, len(hidden), len(layers)
        step.hidden, step.rows = hidden.data_ptr(), rows
        buffers = {
            name: self._buffer("step_" + name, rows + step.threads * ROW_BLOCK_STEP, width)
            for name, width in self._widths.items()
        }
        for name, buffer in buffers.items():
            setattr(step, name, buffer.data_ptr())
        whole = len(batch.sample_rows) == rows
        assert self._layers is not None
        self._lib.kvr_layers(
            ctypes.addressof(self._layers), count if whole else count - 1, ctypes.addressof(step)
        )
        return hidden if whole else self._last(hidden, buffers["qkv"], count - 1, batch)

    def _last(
        self, hidden: torch.Tensor, qkv: torch.Tensor, index: int, batch: Batch
    ) -> torch.Tensor:
        """The last layer. Tokens that nothing is sampled after leave keys and values, no more."""
        assert self._layers is not None
        layer, step = self._layers[index], self._step
        self._lib.kvr_before_attention(ctypes.addressof(layer), ctypes.addressof(step))
        hidden = hidden.index_select(0, batch.sample_rows)
        if not len(hidden):
            return hidden
        queries = qkv.index_select(0, batch.sample_rows)
        self._attention.begin(batch.sampled())
        self._lib.kvr_attention(layer.attention, queries.data_ptr(), step.attended, layer.pool)
        step.hidden, step.rows = hidden.data_ptr(), len(hidden)
        self._lib.kvr_after_attention(ctypes.addressof(layer), ctypes.addressof(step))
        return hidden


def step_of(config: ModelConfig, library: Any, num_threads: int) -> Any:
    """A step whose rows are not there yet."""
    return _Step(
        width=config.hidden_size,
        eps=config.rms_norm_eps,
        activation=ACTIVATIONS[config.activation],
        threads=num_threads,
    )


def described(
    config: ModelConfig,
    layers: Sequence[LayerWeights],
    attention: CpuAttention,
    library: Any,
) -> ctypes.Array[Any]:
    """As long as the weights and `attention` live."""
    structs = (_Layer * len(layers))()
    for index, (layer, to) in enumerate(zip(layers, structs, strict=True)):
        weights = layer.attention
        matrices = {"out": weights.out}
        names = ("input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
        norms = {name: getattr(layer, name) for name in names}
        if isinstance(weights, AttentionWeights):
            matrices["qkv"] = weights.qkv
            norms |= {"q_norm": weights.q_norm, "k_norm": weights.k_norm}
        else:
            to.latent = _described_latent(weights, config)
        if layer.mlp is not None:
            matrices |= {"gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
        for name, matrix in matrices.items():
            setattr(to, name, described_matrix(matrix))
        for name, norm in norms.items():
            setattr(to, name, _address(norm))
        to.rope, to.attention, to.pool = attention.described(index)
        if layer.experts is not None:
            to.experts = described_experts(layer.experts, config)
    return structs


def described_matrix(matrix: Matrix) -> Any:
    bias = _address(matrix.bias)
    return _Matrix(matrix.data.data_ptr(), bias, matrix.rows, matrix.depth, matrix.kind)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _described_latent(weights: LatentWeights, config: ModelConfig) -> Any:
    latent = config.latent
    assert latent is not None
    assert weights.key_up.kind == weights.value_up.kind
    return _Latent(
        compress=described_matrix(weights.compress),
        queries=described_matrix(weights.queries),
        q_norm=_address(weights.q_norm),
        kv_norm=weights.kv_norm.data_ptr(),
        key_up=weights.key_up.data.data_ptr(),
        value_up=weights.value_up.data.data_ptr(),
        kind=weights.key_up.kind,
        heads=config.num_heads,
        q_rank=latent.q_rank or 0,
        rank=latent.rank,
        nope=latent.nope_dim,
        rope=latent.rope_dim,
        value=latent.value_dim,
    )


def described_experts(weights: ExpertsWeights, model: ModelConfig) -> Any:
    """As long as the weights live."""
    experts, config = weights.experts, model.experts
    assert config is not None
    return _Experts(
        router=described_matrix(weights.router),
        bias=_address(weights.bias),
        gate_ups=experts.gate_ups.data_ptr(),
        downs=experts.downs.data_ptr(),
        count=experts.count,
        width=experts.width,
        kind=experts.kind,
        per_token=config.num_per_token,
        groups=config.num_groups,
        chosen_groups=config.num_chosen_groups,
        scale=config.scale,
        sigmoid=config.scoring == "sigmoid",
        normalize=config.normalize,
    )


def widths(layers: ctypes.Array[Any], config: ModelConfig) -> dict[str, int]:
    """Returns the widths of the buffers that a step's rows pass through, `hidden` aside."""
    latent, heads = config.latent, config.num_heads
    return {
        "qkv": layers[0].qkv.rows if latent is None else heads * config.head_dim,
        "attended": heads * (config.head_dim if latent is None else latent.rank),
        "gated": max(each.down.depth for each in layers),
        "norm": config.hidden_size,
        "added": config.hidden_size,
    }
