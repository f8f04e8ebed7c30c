"""DeepSeek sparse attention (DeepSeek V3.2, GLM-5): what config.json says of the indexer. The rest
of these models is DeepSeek-V3's.

The two differ in how the indexer's rows are rotated: DeepSeek V3.2's are stored first with second
half, as no other rotated rows of it are, and GLM-5's in pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvrelay.engine.kv.spec import KVHeads
from kvrelay.engine.model.checkpoint.fields import count, layer_heads
from kvrelay.engine.model.config import Indexer, ModelConfig
from kvrelay.engine.model.errors import ModelError

Raw = Mapping[str, Any]
DeepseekV3 = Callable[[Raw], ModelConfig]
KINDS = {"F": "full", "full": "full", "S": "shared", "shared": "shared"}


def deepseek_v32(raw: Raw, deepseek_v3: DeepseekV3) -> ModelConfig:
    """DeepSeek V3 with an indexer in each layer. Raises ModelError."""
    raw = {"index_n_heads": 64, "indexer_rope_interleave": False, **raw}
    return _with_indexer(_with_dense_layers(raw), deepseek_v3, ())


def glm_moe_dsa(raw: Raw, deepseek_v3: DeepseekV3) -> ModelConfig:
    """GLM-5: the same, where some layers may have no indexer. Raises ModelError."""
    sizes = {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32}
    others = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "rms_norm_eps": 1e-5}
    raw = {**sizes, **others, "indexer_rope_interleave": True, **raw}
    return _with_indexer(_with_dense_layers(raw), deepseek_v3, _scoring_layers(raw))


def _with_dense_layers(raw: Raw) -> Raw:
    kinds, layers = raw.get("mlp_layer_types"), count(raw, "num_hidden_layers")
    dense = raw.get("first_k_dense_replace", 3) if kinds is None else kinds.count("dense")
    if kinds is not None and kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise ModelError(
            f"config.json: mlp_layer_types {kinds} is not supported;"
            f" {layers} layers are needed, of which the first ones may be dense"
        )
    return {**raw, "first_k_dense_replace": dense}


def _scoring_layers(raw: Raw) -> tuple[int, ...]:
    """Those whose indexer is "full"; the others share what the one before has chosen."""
    layers = count(raw, "num_hidden_layers")
    kinds = raw.get("indexer_types") or raw.get("index_topk_pattern")
    if kinds is None:
        every, offset = raw.get("index_topk_freq") or 1, raw.get("index_skip_topk_offset", 2)
        shared = (max(layer - offset + 1, 0) % every for layer in range(layers))
        kinds = ["S" if each else "F" for each in shared]
    found = [KINDS.get(kind, "") for kind in kinds]
    if len(found) != layers or "" in found or found[0] != "full":
        raise ModelError(
            f"config.json: indexer_types {kinds!r} is not supported; one of full and shared is"
            f" needed for each of {layers} layers, the first one full"
        )
    full = tuple(layer for layer, kind in enumerate(found) if kind == "full")
    return () if len(full) == layers else full


def _with_indexer(raw: Raw, deepseek_v3: DeepseekV3, layers: tuple[int, ...]) -> ModelConfig:
    config = deepseek_v3(raw)
    latent = config.latent
    assert latent is not None
    indexer = Indexer(
        num_heads=count(raw, "index_n_heads"),
        head_dim=count(raw, "index_head_dim", 128),
        topk=count(raw, "index_topk", 2048),
        interleaved=bool(raw["indexer_rope_interleave"]),
        layers=layers,
    )
    if latent.q_rank is None or indexer.head_dim < latent.rope_dim:
        raise ModelError(
            f"config.json: q_lora_rank {latent.q_rank} with index_head_dim {indexer.head_dim} is"
            f" not supported; a rank and at least qk_rope_head_dim ({latent.rope_dim}) are needed"
        )
    each = (
        KVHeads(1, config.head_dim, indexer.head_dim if indexer.scores_in(layer) else 0)
        for layer in range(config.num_layers)
    )
    return replace(config, latent=replace(latent, indexer=indexer), **layer_heads(each))
