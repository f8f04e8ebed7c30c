"""MiMo-V2: values are narrower than keys; layers with a window have more KV heads, and sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrelay.engine.kv.spec import KVHeads
from kvrelay.engine.model.checkpoint.fields import count, layer_heads, number, refuse
from kvrelay.engine.model.checkpoint.rope import SLIDING, read_rope
from kvrelay.engine.model.config import Experts
from kvrelay.engine.model.errors import ModelError

DEFAULTS = {"head_dim": 192, "v_head_dim": 128, "partial_rotary_factor": 0.334}


def mimo_v2(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What `families.base` takes. Raises ModelError."""
    refuse(raw, "attention_bias", "add_full_attention_sink_bias", "n_shared_experts")
    raw = {**DEFAULTS, "rms_norm_eps": raw.get("layernorm_epsilon", 1e-5), **raw}
    for key in ("num_attention_heads", "head_dim", "v_head_dim"):
        if raw.get(f"swa_{key}", raw[key]) != raw[key]:
            raise ModelError(
                f"config.json: swa_{key} {raw[f'swa_{key}']} is not supported with {key} {raw[key]}"
            )
    layers, heads = count(raw, "num_hidden_layers"), count(raw, "num_key_value_heads")
    swa_heads = count(raw, "swa_num_key_value_heads", 2 * heads)
    near = [bool(each) for each in raw.get("hybrid_layer_pattern") or ()]
    near = near or [kind == SLIDING for kind in raw["layer_types"]]
    window = count(raw, "sliding_window", 129)
    if raw.get("sliding_window_size"):  # positions before a query
        window = count(raw, "sliding_window_size") + 1
    if len(near) != layers:
        raise ModelError(f"config.json: kinds of {len(near)} layers for {layers}")
    rotary = {**raw, "rope_theta": raw.get("swa_rope_theta", 10000.0)}
    return {
        "raw": raw,
        "ropes": (
            read_rope(raw, count(raw, "head_dim"), 5e6, "full_attention"),
            read_rope(rotary, count(raw, "head_dim"), 10000.0, SLIDING),
        ),
        "layer_ropes": tuple(map(int, near)),
        "windows": tuple(window if each else 0 for each in near),
        **layer_heads(
            KVHeads(swa_heads if each else heads, raw["head_dim"], raw["v_head_dim"])
            for each in near
        ),
        "value_scale": number(raw, "attention_value_scale", 0.707),
        "learned_sinks": True,
        "sinks_in_windows": True,
        "experts": _experts(raw),
    }


def _experts(raw: Mapping[str, Any]) -> Experts:
    sparse = raw.get("moe_layer_freq") or [kind == "sparse" for kind in raw["mlp_layer_types"]]
    dense = sparse.index(1)
    if 0 in sparse[dense:] or raw.get("n_group", 1) != 1:
        raise ModelError("config.json: dense layers after sparse ones, or n_group, not supported")
    return Experts(
        num_experts=count(raw, "n_routed_experts"),
        num_per_token=count(raw, "num_experts_per_tok"),
        intermediate_size=count(raw, "moe_intermediate_size"),
        normalize=bool(raw.get("norm_topk_prob", True)),
        scoring="sigmoid",
        scale=number(raw, "routed_scaling_factor", 1.0),
        has_bias=True,
        first_layer=dense,
    )
