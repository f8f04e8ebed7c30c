"""The weights of a model: one object per layer, its matrices as a set of operations (`Ops`) has
prepared them.

Query, key and value projections are one matrix, gate and up projections another: one read of the
activations and one kernel call instead of three or two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.engine.model.vision.tower import Tower


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    qkv: Any  # rows of queries, keys, values
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Any
    sinks: torch.Tensor | None = None  # [num_heads] float32: scores that no key has
    gate: Any = None  # rows of all heads; None: attention is not gated


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """What scores positions. The last `rope_dim` dimensions of each head and of keys are rotated,
    whatever the order in the checkpoint: it changes no product of a query with a key."""

    queries: Any  # rows of all heads, from the queries' latent
    keys: Any  # from hidden rows
    weights: Any  # router [num_heads, hidden_size]
    norm: torch.Tensor  # LayerNorm's weight and bias, for keys
    norm_bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Multi-head latent attention. The second projection of keys and values is held by heads."""

    compress: Any  # rows of the queries' latent (if they have one), the latent, the rotated key
    q_norm: torch.Tensor | None
    kv_norm: torch.Tensor
    queries: Any  # head by head: nope_dim rows, then rope_dim
    key_up: Any  # heads [num_heads, nope_dim, rank]
    value_up: Any  # heads [num_heads, rank, value_dim]
    out: Any
    indexer: IndexerWeights | None = None


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """A recurrent layer. What `project` gives is, in this order, of a short convolution: the gate
    of its inputs, the gate of its outputs, inputs; of a gated delta net: queries, keys and values,
    the gate of the outputs, and of each head how much it learns and how much it forgets; of Mamba 2
    the same, but that one number of each head says both; of Kimi delta attention queries, keys and
    values, what `decay_up` and `gate_up` make the decay of each key and the gate from, and of each
    head how much it learns."""

    project: Any
    conv: torch.Tensor  # [kernel, channels] float32, the oldest input's first
    conv_bias: torch.Tensor | None
    out: Any
    rate: torch.Tensor | None = None  # [num_heads]: the logarithm of what is kept is a multiple
    decay_bias: torch.Tensor | None = None  # [num_heads], or [num_heads * key_dim]
    norm: torch.Tensor | None = None  # [value_dim], or of all outputs
    skip: torch.Tensor | None = None  # [num_heads], of Mamba 2: this times the value is added
    decay_up: Any = None
    gate_up: Any = None


@dataclass(frozen=True, slots=True)
class MLPWeights:
    gate_up: Any  # rows of both; with an activation that has no gate, those of the latter
    down: Any
    gate: Any = None  # one row, of what multiplies the output; None: nothing does


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    router: Any  # router [num_experts, hidden_size]
    bias: torch.Tensor | None  # [num_experts] float32
    experts: Any
    router_bias: torch.Tensor | None = None  # [num_experts] float32
    gate_up_bias: torch.Tensor | None = None  # [num_experts, 2 * width]
    down_bias: torch.Tensor | None = None  # [num_experts, hidden_size]
    scales: torch.Tensor | None = None  # [num_experts] float32, of the weights of the chosen ones
    norms: ExpertsNorms | None = None


@dataclass(frozen=True, slots=True)
class ExpertsNorms:
    """Where an MLP and experts have norms of their own, before and behind."""

    router: torch.Tensor
    input: torch.Tensor
    output: torch.Tensor
    mlp_output: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What a layer makes of its own numbers of each token."""

    gate: Any
    project: Any
    norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Those numbers, of all layers one after the other: of a table and of the embedding."""

    table: Any
    project: Any
    norm: torch.Tensor  # each layer's part has it


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, prepared: matrices as `Ops.matrix` made them. It has an MLP, experts, or both:
    then every token passes the MLP, too. In models of single blocks it has those or what mixes
    tokens, and one norm before it."""

    input_norm: torch.Tensor
    attention: AttentionWeights | LatentWeights | RecurrentWeights | None
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: MLPWeights | None
    experts: ExpertsWeights | None
    mlp_out_norm: torch.Tensor | None
    beside: RecurrentWeights | None = None  # its output is added to that of the attention
    inputs: LayerInputs | None = None
    scale: float = 1.0  # multiplies the layer's output


@dataclass(frozen=True, slots=True)
class Weights:
    table: Any
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Any
    inputs: TokenInputs | None = None
    tower: Tower | None = None  # what reads images; None: nothing does


def deinterleaved(weight: torch.Tensor, num_heads: int, dim: int) -> torch.Tensor:
    """The last `dim` rows of each head from pairs (x1, x2), (x1, x2), ... to all x1, then all x2,
    as the other families store them."""
    heads = weight.view(num_heads, -1, weight.shape[1])
    plain, pairs = heads.split([heads.shape[1] - dim, dim], dim=1)
    return torch.cat((plain, pairs[:, 0::2], pairs[:, 1::2]), dim=1).view(weight.shape)
