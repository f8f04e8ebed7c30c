"""Gemma 2 and 3: norms around attention and MLP, soft caps, and windows in most layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvrelay.engine.model.checkpoint.fields import biases, count, number, refuse
from kvrelay.engine.model.checkpoint.rope import SLIDING, read_rope, rope_spec
from kvrelay.engine.model.checkpoint.windows import windows_of

Raw = Mapping[str, Any]
GEMMA3_DEFAULTS: Raw = {  # files of the multimodal models leave these out
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}


def _gemma(raw: Raw, **changes: Any) -> dict[str, Any]:
    raw = {"hidden_activation": "gelu_pytorch_tanh", **raw}
    return {
        "raw": raw,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "attention_scale": number(raw, "query_pre_attn_scalar", 256) ** -0.5,
        "embed_scale": math.sqrt(count(raw, "hidden_size")),
        "sandwich_norms": True,
        "norm_offset": 1.0,
        **biases(raw),
        **changes,
    }


def gemma2(raw: Raw) -> dict[str, Any]:
    """What `families.base` takes. Raises ModelError."""
    raw = {"head_dim": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **raw}
    return _gemma(
        raw,
        windows=windows_of(raw, raw.get("sliding_window", 4096), lambda index: index % 2 == 0),
        attention_softcap=float(raw["attn_logit_softcapping"] or 0.0),
        logits_softcap=float(raw["final_logit_softcapping"] or 0.0),
    )


def gemma3(raw: Raw) -> dict[str, Any]:
    """What `families.base` takes. Raises ModelError."""
    raw = {**GEMMA3_DEFAULTS, **raw}
    refuse(raw, "attn_logit_softcapping")
    every = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6))
    pattern = [(index + 1) % every != 0 for index in range(count(raw, "num_hidden_layers"))]
    kinds = raw.get("layer_types") or [SLIDING if near else "full_attention" for near in pattern]
    head_dim = count(raw, "head_dim")
    near = {
        "max_position_embeddings": raw["max_position_embeddings"],
        "rope_theta": raw.get("rope_local_base_freq", 10000.0),
        "rope_parameters": rope_spec(raw, SLIDING) if raw.get("rope_parameters") else {},
    }
    return _gemma(
        raw,
        ropes=(
            read_rope(raw, head_dim, 1e6, "full_attention"),
            read_rope(near, head_dim),
        ),
        layer_ropes=tuple(int(kind == SLIDING) for kind in kinds),
        windows=windows_of(raw, raw.get("sliding_window", 4096), lambda index: pattern[index]),
        logits_softcap=float(raw.get("final_logit_softcapping") or 0.0),
        qk_norm=True,
    )
