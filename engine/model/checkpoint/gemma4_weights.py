"""Weights that Gemma 4 has beside those of other families, by its names."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import TYPE_CHECKING

import torch

from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.weights import ExpertsNorms, ExpertsWeights, LayerInputs, TokenInputs

if TYPE_CHECKING:
    from kvrelay.engine.model.ops import Ops

Get = Callable[..., torch.Tensor]  # a tensor by its name and shape


def experts_with_norms(get: Get, config: ModelConfig, ops: Ops) -> ExpertsWeights:
    """Those of one layer. Raises ModelError."""
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    number, width = experts.num_experts, experts.intermediate_size
    # The router's input is normed, without a weight, and multiplied by a number for each column.
    router = get("router.scale", hidden).float() / sqrt(hidden)
    names = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
    others = (get(f"{name}.weight", hidden) for name in (*names, "post_feedforward_layernorm_1"))
    return ExpertsWeights(
        router=ops.router(get("router.proj.weight", number, hidden)),
        bias=None,
        experts=ops.experts(
            get("experts.gate_up_proj", number, 2 * width, hidden),
            get("experts.down_proj", number, hidden, width),
        ),
        scales=ops.vector(get("router.per_expert_scale", number)),
        norms=ExpertsNorms(ops.vector(router), *map(ops.vector, others)),
    )


def layer_inputs(get: Get, config: ModelConfig, ops: Ops) -> LayerInputs:
    """Those of one layer. Raises ModelError."""
    each, hidden = config.layer_inputs, config.hidden_size
    return LayerInputs(
        gate=ops.matrix(get("per_layer_input_gate.weight", each, hidden), None, "input_gate"),
        project=ops.matrix(get("per_layer_projection.weight", hidden, each), None, "input"),
        norm=ops.vector(get("post_per_layer_input_norm.weight", hidden)),
    )


def token_inputs(get: Get, root: str, config: ModelConfig, ops: Ops) -> TokenInputs | None:
    """Those of all layers, whose names begin with `root`. Raises ModelError."""
    each, hidden = config.layer_inputs, config.hidden_size
    if not each:
        return None
    width = config.num_layers * each
    table = get(f"{root}embed_tokens_per_layer.weight", config.vocab_size, width)
    project = get(f"{root}per_layer_model_projection.weight", width, hidden)
    return TokenInputs(
        table=ops.table(table),
        project=ops.matrix(project, None, "inputs"),
        norm=ops.vector(get(f"{root}per_layer_projection_norm.weight", each)),
    )
