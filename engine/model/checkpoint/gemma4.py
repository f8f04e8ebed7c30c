"""Gemma 4: layers without a window have larger heads, the last layers read keys and values of
earlier ones, layers may have an input beside the hidden rows, and experts beside an MLP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvrelay.engine.kv.spec import KVHeads
from kvrelay.engine.model.checkpoint.fields import count, layer_heads, refuse
from kvrelay.engine.model.checkpoint.rope import SLIDING, read_rope
from kvrelay.engine.model.config import Experts
from kvrelay.engine.model.errors import ModelError

FULL = "full_attention"
EVERY = 6  # layers, of which the last attends to all, where a file names no kinds
DEFAULTS = {
    "vocab_size": 262144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}


def gemma4(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What `families.base` takes. Raises ModelError."""
    raw = {**DEFAULTS, **{key: value for key, value in raw.items() if value is not None}}
    if raw.pop("use_bidirectional_attention", "vision") != "vision":  # that of images alone
        raise ModelError("config.json: use_bidirectional_attention is not supported")
    refuse(raw, "attention_bias")
    layers, vocabulary = count(raw, "num_hidden_layers"), count(raw, "vocab_size")
    if raw.get("vocab_size_per_layer_input", vocabulary) != vocabulary:
        raise ModelError(
            f"config.json: vocab_size_per_layer_input {raw['vocab_size_per_layer_input']} is not"
            f" supported with vocab_size {vocabulary}"
        )
    numbers = range(1, layers + 1)
    kinds = raw.get("layer_types") or [FULL if i % EVERY == 0 else SLIDING for i in numbers]
    kinds = [*kinds[:-1], FULL]  # as transformers has it, whatever the file says
    if len(kinds) != layers or {*kinds} - {FULL, SLIDING}:
        raise ModelError(f"config.json: layer_types {kinds} of {layers} layers are not supported")
    near = [kind == SLIDING for kind in kinds]
    heads = [_heads(raw, index, kind) for index, kind in enumerate(kinds)]
    if len({*zip(heads, kinds, strict=True)}) > len({*kinds}):
        raise ModelError(f"config.json: heads {heads} that differ among layers of a kind")
    dims = {kind: each.key_dim for each, kind in zip(heads, kinds, strict=True)}
    ropes = [read_rope(raw, dims.get(kind, dims[FULL]), 1e4, kind) for kind in (FULL, SLIDING)]
    shared = raw.get("num_kv_shared_layers") or 0
    if shared and raw.get("use_double_wide_mlp") and raw.get("enable_moe_block"):
        raise ModelError("config.json: use_double_wide_mlp with enable_moe_block is not supported")
    return {
        "raw": raw,
        **layer_heads(heads),
        "ropes": tuple(ropes),
        "layer_ropes": tuple(map(int, near)),
        "windows": tuple(count(raw, "sliding_window") if each else 0 for each in near),
        "kv_owners": kv_owners(kinds, shared),
        "sharing_mlp": 2 if raw.get("use_double_wide_mlp") else 1,
        "value_norm": True,
        "qk_norm": True,
        "attention_scale": 1.0,
        "logits_softcap": float(raw.get("final_logit_softcapping") or 0.0),
        "embed_scale": math.sqrt(count(raw, "hidden_size")),
        "sandwich_norms": True,
        "layer_inputs": raw["hidden_size_per_layer_input"],
        "layer_scales": True,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "experts": _experts(raw) if raw.get("enable_moe_block") else None,
    }


def _heads(raw: Mapping[str, Any], layer: int, kind: str) -> KVHeads:
    """What a layer's file calls by its kind or, as transformers writes it, by its number."""
    if (each := raw.get("per_layer_config")) is not None:  # where it is stated, it says all
        own = each.get(str(layer), {})
    else:
        own = {} if kind == SLIDING else {"head_dim": raw["global_head_dim"]}
        whole = raw.get("num_global_key_value_heads") if raw.get("attention_k_eq_v") else None
        own |= {"num_key_value_heads": whole} if whole and own else {}
    dim = count({**raw, **own}, "head_dim")
    return KVHeads(count({**raw, **own}, "num_key_value_heads"), dim, dim)


def kv_owners(kinds: list[str], shared: int) -> tuple[int, ...]:
    """For each layer whose keys and values it reads: the last `shared` ones have those of the last
    layer of their kind before them. Raises ModelError."""
    if not shared:
        return ()
    first = len(kinds) - shared
    owners = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    if {*kinds} - {*owners}:
        raise ModelError(
            f"config.json: num_kv_shared_layers {shared} of {len(kinds)} leaves a kind of layer"
            " without keys and values"
        )
    return (*range(first), *(owners[kind] for kind in kinds[first:]))


def _experts(raw: Mapping[str, Any]) -> Experts:
    return Experts(
        num_experts=count(raw, "num_experts"),
        num_per_token=count(raw, "top_k_experts", raw.get("num_experts_per_tok")),
        intermediate_size=count(raw, "moe_intermediate_size"),
        normalize=True,
        shared_size=count(raw, "intermediate_size"),
        has_norms=True,
    )
