"""The weights of recurrent layers, by the names that each family has for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.state_layout import (
    KIMI_DELTA_ATTENTION,
    MAMBA2,
    SHORT_CONVOLUTION,
    Recurrent,
)
from kvrelay.engine.model.weights import RecurrentWeights

if TYPE_CHECKING:
    from kvrelay.engine.model.ops import Ops

Get = Callable[..., torch.Tensor]  # a layer's tensor by its name and shape
MODULE_NAMES: dict[str, dict[str, str]] = {
    "norm": {},
    "embedding_norm": {
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    },
    "final_layernorm": {
        "post_attention_layernorm": "pre_ff_layernorm",
        "mlp.gate_proj": "feed_forward.gate_proj",
        "mlp.up_proj": "feed_forward.up_proj",
        "mlp.down_proj": "feed_forward.down_proj",
    },
}
"""By the name of the last norm: a layer's modules that LFM2 and Falcon-H1 call otherwise."""


def recurrent_weights(
    get: Get, has: Callable[[str], bool], config: ModelConfig, ops: Ops
) -> RecurrentWeights:
    """Those of one layer. Raises ModelError."""
    shape = config.recurrent
    assert shape is not None
    if shape.kind == SHORT_CONVOLUTION:
        return _short_convolution(get, shape, config.hidden_size, ops)
    if shape.kind == MAMBA2:
        return _mamba2(get, shape, config.hidden_size, ops)
    if shape.kind == KIMI_DELTA_ATTENTION:
        return _kimi_delta(get, shape, config.hidden_size, ops)
    name, width = "linear_attn.", shape.num_heads * shape.value_dim
    sizes = (shape.conv_channels, width, shape.num_heads, shape.num_heads)
    if has(name + "in_proj_qkvz.weight"):
        project = _ungrouped(get, shape, config.hidden_size)
    else:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        parts = zip(names, sizes, strict=True)
        rows = [get(f"{name}{part}.weight", size, config.hidden_size) for part, size in parts]
        project = torch.cat(rows)
    return RecurrentWeights(
        project=ops.matrix(project, None, "recurrent"),
        conv=ops.vector(_conv(get, name + "conv1d", shape), "channels"),
        conv_bias=None,
        out=ops.matrix(get(name + "out_proj.weight", config.hidden_size, width), None, "out"),
        rate=ops.vector(-get(name + "A_log", shape.num_heads).float().exp(), "heads"),
        decay_bias=ops.vector(get(name + "dt_bias", shape.num_heads), "heads"),
        norm=ops.vector(get(name + "norm.weight", shape.value_dim)),
    )


def _short_convolution(get: Get, shape: Recurrent, width: int, ops: Ops) -> RecurrentWeights:
    conv_bias = in_bias = out_bias = None
    if shape.has_biases:
        conv_bias = ops.vector(get("conv.conv.bias", width), "channels")
        in_bias, out_bias = get("conv.in_proj.bias", 3 * width), get("conv.out_proj.bias", width)
    rows = get("conv.in_proj.weight", 3 * width, width)
    return RecurrentWeights(
        project=ops.matrix(rows, in_bias, "recurrent"),
        conv=ops.vector(_conv(get, "conv.conv", shape), "channels"),
        conv_bias=conv_bias,
        out=ops.matrix(get("conv.out_proj.weight", width, width), out_bias, "out"),
    )


def _mamba2(get: Get, shape: Recurrent, hidden: int, ops: Ops) -> RecurrentWeights:
    """Values, keys and queries are put in the order of the others. The bias is of the convolution
    alone."""
    width, keys, heads = shape.width, shape.num_key_heads * shape.key_dim, shape.num_heads
    parts = [width, width, keys, keys, heads]
    rows = get("mamba.in_proj.weight", sum(parts), hidden).split(parts)
    gate, values, key, query, numbers = (
        part * scale for part, scale in zip(rows, shape.scales, strict=True)
    )

    def ordered(channels: torch.Tensor) -> torch.Tensor:
        values, key, query = channels.split([width, keys, keys], dim=-1)
        return torch.cat((query, key, values), dim=-1)

    bias = None
    if shape.has_biases:
        bias = ops.vector(ordered(get("mamba.conv1d.bias", shape.conv_channels)), "channels")
    return RecurrentWeights(
        project=ops.matrix(torch.cat((query, key, values, gate, numbers)), None, "recurrent"),
        conv=ops.vector(ordered(_conv(get, "mamba.conv1d", shape)), "channels"),
        conv_bias=bias,
        out=ops.matrix(get("mamba.out_proj.weight", hidden, width), None, "out"),
        rate=ops.vector(-get("mamba.A_log", heads).float().exp(), "heads"),
        decay_bias=ops.vector(get("mamba.dt_bias", heads), "heads"),
        norm=ops.vector(get("mamba.norm.weight", width), "heads") if shape.has_norm else None,
        skip=ops.vector(get("mamba.D", heads), "heads"),
    )


def _kimi_delta(get: Get, shape: Recurrent, hidden: int, ops: Ops) -> RecurrentWeights:
    name, width, heads, dim = "self_attn.", shape.width, shape.num_heads, shape.value_dim
    sizes = {"q": width, "k": width, "v": width, "f_a": dim, "g_a": dim, "b": heads}
    rows = [get(f"{name}{part}_proj.weight", size, hidden) for part, size in sizes.items()]
    convs = [get(f"{name}{part}_conv1d.weight", width, 1, shape.conv_kernel) for part in "qkv"]
    decay, gate = (get(f"{name}{part}_b_proj.weight", width, dim) for part in "fg")
    return RecurrentWeights(
        project=ops.matrix(torch.cat(rows), None, "recurrent"),
        conv=ops.vector(torch.cat(convs).squeeze(1).T.contiguous(), "channels"),
        conv_bias=None,
        out=ops.matrix(get(name + "o_proj.weight", hidden, width), None, "out"),
        rate=ops.vector(-get(name + "A_log", 1, 1, heads, 1).flatten().float().exp(), "heads"),
        decay_bias=ops.vector(get(name + "dt_bias", width), "heads"),
        norm=ops.vector(get(name + "o_norm.weight", dim)),
        decay_up=ops.matrix(decay, None, "decay"),
        gate_up=ops.matrix(gate, None, "open"),
    )


def _conv(get: Get, name: str, shape: Recurrent) -> torch.Tensor:
    weight = get(name + ".weight", shape.conv_channels, 1, shape.conv_kernel)
    return weight.squeeze(1).T.contiguous()


def _ungrouped(get: Get, shape: Recurrent, hidden: int) -> torch.Tensor:
    """Qwen3-Next has its projections head by head of keys: of each its query, key, and the values
    and gates of all heads that share them; and their two numbers."""
    together = shape.num_heads // shape.num_key_heads
    values = together * shape.value_dim
    sizes = [shape.key_dim, shape.key_dim, values, values]
    rows = get("linear_attn.in_proj_qkvz.weight", shape.num_key_heads * sum(sizes), hidden)
    parts = rows.unflatten(0, (shape.num_key_heads, -1)).split(sizes, dim=1)
    numbers = get("linear_attn.in_proj_ba.weight", 2 * shape.num_heads, hidden)
    both = numbers.unflatten(0, (shape.num_key_heads, -1)).split(together, dim=1)
    return torch.cat([part.flatten(0, 1) for part in (*parts, *both)])
