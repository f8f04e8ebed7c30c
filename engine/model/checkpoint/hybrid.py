"""Families with recurrent layers: what their config.json says of these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvrelay.engine.model.checkpoint.fields import count, number, numbers, refuse
from kvrelay.engine.model.config import ATTENTION
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.state_layout import (
    GATED_DELTA_NET,
    KIMI_DELTA_ATTENTION,
    MAMBA2,
    SHORT_CONVOLUTION,
    Recurrent,
)

Raw = Mapping[str, Any]
MAX_KERNEL = 8  # inputs of a convolution, as in layers/api.h


def qwen3_next(raw: Raw) -> dict[str, Any]:
    """Fields of ModelConfig of Qwen3-Next and Qwen3.5, but for experts. Raises ModelError."""
    if not raw.get("attn_output_gate", True):
        raise ModelError("config.json: attn_output_gate false is not supported, only true")
    heads = count(raw, "linear_num_value_heads", 32)
    key_heads = count(raw, "linear_num_key_heads", 16)
    if heads % key_heads:
        raise ModelError(
            f"config.json: {heads} linear_num_value_heads over {key_heads} linear_num_key_heads is"
            " not supported"
        )
    key_dim = count(raw, "linear_key_head_dim", 128)
    value_dim = count(raw, "linear_value_head_dim", 128)
    shape = Recurrent(
        kind=GATED_DELTA_NET,
        conv_kernel=kernel(raw, "linear_conv_kernel_dim", 4),
        conv_channels=2 * key_heads * key_dim + heads * value_dim,
        num_heads=heads,
        num_key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    every, layers = count(raw, "full_attention_interval", 4), count(raw, "num_hidden_layers")
    kinds = raw.get("layer_types") or [
        "linear_attention" if (index + 1) % every else "full_attention" for index in range(layers)
    ]
    return {
        "output_gate": True,
        "qk_norm": True,
        "norm_offset": 1.0,
        "recurrent": shape,
        "layer_kinds": _kinds(raw, kinds, "linear_attention", GATED_DELTA_NET),
    }


def lfm2(raw: Raw) -> dict[str, Any]:
    """Fields of ModelConfig. Raises ModelError."""
    layers = count(raw, "num_hidden_layers")
    attends = raw.get("full_attn_idxs")
    attends = range(layers) if attends is None else attends
    kinds = raw.get("layer_types") or [
        "full_attention" if index in attends else "conv" for index in range(layers)
    ]
    width = count(raw, "block_ff_dim", count(raw, "intermediate_size", 12288))
    if raw.get("block_auto_adjust_ff_dim", True):
        factor, multiple = raw.get("block_ffn_dim_multiplier", 1.0), raw.get("block_multiple_of")
        width = int((1.0 if factor is None else factor) * int(2 * width / 3))
        width += -width % (multiple or 256)
    return {
        "qk_norm": True,
        "intermediate_size": width,
        "tie_word_embeddings": bool(raw.get("tie_embedding", raw.get("tie_word_embeddings", True))),
        "recurrent": Recurrent(
            kind=SHORT_CONVOLUTION,
            conv_kernel=kernel(raw, "conv_L_cache", 3),
            conv_channels=count(raw, "hidden_size"),
            has_biases=bool(raw.get("conv_bias")),
        ),
        "layer_kinds": _kinds(raw, kinds, "conv", SHORT_CONVOLUTION),
    }


def falcon_h1(raw: Raw) -> dict[str, Any]:
    """Fields of ModelConfig: each layer has attention and Mamba 2. Multipliers of activations are
    those of the weights beside them. Raises ModelError."""
    refuse(raw, "attention_bias", "mamba_proj_bias", "projectors_bias")
    check_steps(raw)
    has_norm = bool(raw.get("mamba_rms_norm"))
    if has_norm and raw.get("mamba_norm_before_gate", True):
        raise ModelError("config.json: mamba_norm_before_gate true is not supported, only false")
    heads, groups = count(raw, "mamba_n_heads", 128), count(raw, "mamba_n_groups", 1)
    width = count(raw, "mamba_d_ssm", 1024)
    if raw.get("mamba_d_ssm", 0) is None:
        width = count(raw, "mamba_expand", 2) * count(raw, "hidden_size")
    if width % heads:
        raise ModelError(f"config.json: mamba_d_ssm {width} in {heads} heads is impossible")
    scales = {
        key: number(raw, f"{key}_multiplier", 1.0)
        for key in ("attention_in", "attention_out", "key", "ssm_in", "ssm_out", "lm_head")
    }
    gate, down = numbers({"mlp_multipliers": [1.0] * 2, **raw}, "mlp_multipliers", 2)
    parts = numbers({"ssm_multipliers": [1.0] * 5, **raw}, "ssm_multipliers", 5)
    into = scales["attention_in"]
    return {
        "embed_scale": number(raw, "embedding_multiplier", 1.0),
        "weight_scales": (
            ("self_attn.q_proj", into),
            ("self_attn.k_proj", into * scales["key"]),
            ("self_attn.v_proj", into),
            ("self_attn.o_proj", scales["attention_out"]),
            ("mlp.gate_proj", gate),
            ("mlp.down_proj", down),
            ("mamba.out_proj", scales["ssm_out"]),
            ("lm_head", scales["lm_head"]),
        ),
        "recurrent": mamba2(
            conv_kernel=kernel(raw, "mamba_d_conv", 4),
            has_biases=bool(raw.get("mamba_conv_bias", True)),
            num_heads=heads,
            num_key_heads=groups,
            key_dim=count(raw, "mamba_d_state", 256),
            value_dim=width // heads,
            has_norm=has_norm,
            scales=tuple(part * scales["ssm_in"] for part in parts),
            beside_attention=True,
        ),
        "layer_kinds": (MAMBA2,) * count(raw, "num_hidden_layers"),
    }


def mamba2(**sizes: Any) -> Recurrent:
    """Layers of Mamba 2, by the fields of Recurrent that these are. Raises ModelError."""
    heads, groups = sizes["num_heads"], sizes["num_key_heads"]
    if heads % groups:
        raise ModelError(f"config.json: {heads} Mamba heads in {groups} groups is impossible")
    channels = heads * sizes["value_dim"] + 2 * groups * sizes["key_dim"]
    return Recurrent(kind=MAMBA2, conv_channels=channels, **sizes)


def check_steps(raw: Raw) -> None:
    """Raises ModelError if those of Mamba 2 are limited."""
    least, most = raw.get("time_step_limit") or (0.0, math.inf)
    if least or most not in (math.inf, {"__float__": "Infinity"}):
        raise ModelError(
            f"config.json: time_step_limit {least} to {most} is not supported, only 0 to infinity"
        )


KIMI_NAMES = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
"""What Kimi-Linear's config.json calls otherwise than those of DeepSeek."""


def kimi_linear(raw: Raw) -> tuple[Raw, dict[str, Any]]:
    """What config.json says in DeepSeek's words, and the fields of ModelConfig that are its own.
    Raises ModelError."""
    needed = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid"}
    for key, value in needed.items():
        if raw.get(key, value) != value:
            raise ModelError(f"config.json: {key} {raw[key]!r} is not supported, only {value!r}")
    own = raw.get("linear_attn_config") or {}
    layers = count(raw, "num_hidden_layers")
    attends = own.get("full_attn_layers", [i + 1 for i in range(layers) if i and i % 4 == 0])
    kinds = raw.get("layer_types") or [
        "full_attention" if index + 1 in attends else "linear_attention" for index in range(layers)
    ]
    stated = {
        "linear_head_dim": own.get("head_dim"),
        "linear_num_heads": own.get("num_heads"),
        "linear_conv_kernel_dim": own.get("short_conv_kernel_size"),
    }
    stated = {**raw, **{key: value for key, value in stated.items() if value}}
    dim, heads = count(stated, "linear_head_dim", 128), count(stated, "linear_num_heads", 32)
    defaults = {"rms_norm_eps": 1e-5, "q_lora_rank": None, "n_shared_experts": 1}
    defaults |= {"num_experts_per_tok": 8, "routed_scaling_factor": 2.446}
    renamed = {key: raw[name] for key, name in KIMI_NAMES.items() if name in raw}
    return {"n_group": 1, "topk_group": 1, **defaults, **renamed, **raw}, {
        "layer_ropes": (-1,) * layers,
        "recurrent": Recurrent(
            kind=KIMI_DELTA_ATTENTION,
            conv_kernel=kernel(stated, "linear_conv_kernel_dim", 4),
            conv_channels=3 * heads * dim,
            num_heads=heads,
            num_key_heads=heads,
            key_dim=dim,
            value_dim=dim,
        ),
        "layer_kinds": _kinds(raw, kinds, "linear_attention", KIMI_DELTA_ATTENTION),
    }


def kernel(raw: Raw, key: str, default: int) -> int:
    """How many inputs a convolution has. Raises ModelError."""
    inputs = count(raw, key, default)
    if not 2 <= inputs <= MAX_KERNEL:
        raise ModelError(f"config.json: {key} is {inputs}; 2 to {MAX_KERNEL} is supported")
    return inputs


def _kinds(raw: Raw, named: list[str], recurrent: str, kind: str) -> tuple[str, ...]:
    """The kinds of all layers, which config.json calls `recurrent` and "full_attention"."""
    known = {recurrent: kind, "full_attention": ATTENTION}
    wrong = [name for name in named if name not in known]
    if wrong or len(named) != count(raw, "num_hidden_layers"):
        what = wrong[0] if wrong else f"of {len(named)} layers"
        raise ModelError(f"config.json: layer_types {what} is not supported")
    return tuple(known[name] for name in named)
