"""Granite 3 and 4 without experts: Llama with multipliers of what its layers pass on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrelay.engine.model.checkpoint.fields import biases, number


def granite(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What `families.base` takes. Multipliers of activations are those of the weights beside them.
    Raises ModelError."""
    residual = number(raw, "residual_multiplier", 1.0)
    return {
        "raw": raw,
        "embed_scale": number(raw, "embedding_multiplier", 1.0),
        "attention_scale": number(raw, "attention_multiplier", 1.0),
        "weight_scales": (
            ("self_attn.o_proj", residual),
            ("mlp.down_proj", residual),
            ("lm_head", 1.0 / number(raw, "logits_scaling", 1.0)),
        ),
        **biases(raw),
    }
