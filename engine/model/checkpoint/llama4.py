"""Llama 4: three of four layers attend in chunks, the others without rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrelay.engine.model.checkpoint.fields import count, number, refuse
from kvrelay.engine.model.checkpoint.rope import read_rope
from kvrelay.engine.model.config import Experts
from kvrelay.engine.model.errors import ModelError

DEFAULTS = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "num_experts_per_tok": 1,
}


def llama4(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What `families.base` takes. Raises ModelError."""
    refuse(raw, "attention_bias")
    raw = {**DEFAULTS, **raw}
    layers, every = count(raw, "num_hidden_layers"), count(raw, "no_rope_layer_interval", 4)
    rotated = raw.get("no_rope_layers") or [int((i + 1) % every > 0) for i in range(layers)]
    kinds = ["chunked_attention" if each else "full_attention" for each in rotated]
    if len(kinds) != layers or (raw.get("layer_types") or kinds) != kinds:
        raise ModelError(f"config.json: no_rope_layers {rotated} do not fit the other layers")
    growth = number(raw, "attn_scale", 0.1) if raw["attn_temperature_tuning"] else 0.0
    chunk = count(raw, "attention_chunk_size", 8192)
    return {
        "raw": {**raw, "intermediate_size": count(raw, "intermediate_size_mlp", 16384)},
        "ropes": (read_rope(raw, count(raw, "head_dim"), 500000.0),),
        "layer_ropes": tuple(0 if each else -1 for each in rotated),
        # One that long hides nothing.
        "attention_chunk": chunk if chunk < count(raw, "max_position_embeddings") else 0,
        "interleaved": True,
        "plain_qk_norm": bool(raw["use_qk_norm"]),
        "query_growth": growth,
        "query_growth_length": count(raw, "floor_scale", 8192) if growth else 0,
        "growth_unrotated": True,
        "experts": _experts(raw, layers),
    }


def _experts(raw: Mapping[str, Any], layers: int) -> Experts:
    step = count(raw, "interleave_moe_layer_step", 1)
    sparse = list(range(step - 1, layers, step))
    if (raw.get("moe_layers") or sparse) != sparse:
        raise ModelError(f"config.json: moe_layers {raw['moe_layers']}, only {sparse} is supported")
    if raw["num_experts_per_tok"] != 1:
        chosen = raw["num_experts_per_tok"]
        raise ModelError(f"config.json: num_experts_per_tok {chosen} is not supported, only 1")
    width = count(raw, "intermediate_size", 8192)
    return Experts(
        num_experts=count(raw, "num_local_experts", 16),
        num_per_token=1,
        intermediate_size=width,
        normalize=False,
        scoring="sigmoid",
        shared_size=width,
        first_layer=step - 1,
        step=step,
        scales_inputs=True,
    )
