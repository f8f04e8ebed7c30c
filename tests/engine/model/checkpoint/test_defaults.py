"""What a config.json leaves out means what it means to transformers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvrelay.engine.model.checkpoint.families import parse
from tests.docs.families import architecture_of
from tests.engine.model.tiny import PARTS, SHAPE, VOCAB
from tests.fuzz.families import FAMILIES

STATED = {  # by every file
    **{key: value for key, value in SHAPE.items() if key != "initializer_range"},
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 8,
    "max_position_embeddings": 131072,
}
ROUTED = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 32}
ALSO_STATED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek2", "deepseek3", "glm4-moe", "glm4-moe-lite", "mistral4"), ROUTED),
    "qwen3-moe": {"num_experts": 128},
    "kimi-linear": {"num_experts": 128, "moe_intermediate_size": 32},
    "gemma4": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB},
    "nemotron-h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2},
    "mimo-v2": {"layer_types": ["full_attention"] * 8, "mlp_layer_types": ["sparse"] * 8, **ROUTED},
}
# Weights that draft, which a checkpoint of transformers does not have.
NOT_COMPARED = {"num_mtp_layers"}
WHOLE = [family for family, (kind, _) in FAMILIES.items() if kind not in PARTS]


@pytest.mark.parametrize("family", WHOLE)
def test_a_key_that_is_left_out_has_the_default_of_transformers(family: str) -> None:
    kind, _ = FAMILIES[family]
    stated = STATED | ALSO_STATED.get(family, {})
    named = {"architectures": [architecture_of(family)]}
    ours = parse({**stated, **named}, {})
    theirs = parse({**kind(**stated).to_dict(), **named}, {})
    found = {
        field.name: (getattr(ours, field.name), getattr(theirs, field.name))
        for field in fields(ours)
    }
    different = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
    assert not {*different} - NOT_COMPARED, different
