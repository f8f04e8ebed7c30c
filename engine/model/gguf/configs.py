"""config.json of each architecture, by what its GGUF files state and what llama.cpp takes for
granted."""

from __future__ import annotations

from typing import Any

from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.gguf.metadata import (
    FREQS,
    NEVER,
    Config,
    Keys,
    Metadata,
    head_dim,
    partial_rotation,
    rope_scaling,
    with_mscale,
)

SIGMOID = 2  # expert_gating_func; softmax is 1
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
MOE: Keys = {"num_experts_per_tok": "expert_used_count"}
DEEPSEEK_MOE: Keys = {
    **MOE,
    "n_routed_experts": "expert_count",
    "n_shared_experts": ("expert_shared_count", 0),
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": ("leading_dense_block_count", 0),
    "norm_topk_prob": ("expert_weights_norm", False),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
}


def gemma(meta: Metadata) -> Config:
    # The largest of each scales its queries by hidden_size / heads.
    hidden, scalar = meta.need("embedding_length"), head_dim(meta)
    if (meta.arch, meta.num_layers) in (("gemma2", 46), ("gemma3", 62)):
        scalar = hidden // meta.need("attention.head_count")
    own: Config = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
        "sliding_window": meta.get("attention.sliding_window") or None,
    }
    if meta.arch == "gemma2":
        own["attn_logit_softcapping"] = meta.get("attn_logit_softcapping", 50.0)
        own["final_logit_softcapping"] = own["final_logit_softcapping"] or 30.0
        return own | {"sliding_window": own["sliding_window"] or 4096}
    pattern = meta.source.metadata.get("gemma3.attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        own["layer_types"] = [SLIDING if near else FULL for near in pattern]
    else:
        own["sliding_window_pattern"] = pattern
    own["rope_local_base_freq"] = meta.get("rope.freq_base_swa", 10000.0)
    return own | {"rope_theta": meta.get("rope.freq_base", 1e6)}


def gemma4(meta: Metadata) -> Config:
    near = meta.each("attention.sliding_window_pattern")
    heads, widths = meta.each("attention.head_count_kv"), meta.each("feed_forward_length")
    full = [layer for layer, each in enumerate(near) if not each]
    shared = meta.get("attention.shared_kv_layers", 0)
    divisors = meta.source.get(FREQS).reshape(-1)
    turning = int((divisors < NEVER).sum())
    if (divisors[:turning] != 1.0).any() or (divisors[turning:] < NEVER).any():
        raise ModelError(f"{meta.source.path}: {FREQS} is not Gemma 4's kind of rotation")
    proportional = {
        "rope_type": "proportional",
        "partial_rotary_factor": turning / len(divisors),
        "rope_theta": meta.get("rope.freq_base", 1e6),
    }
    theta = meta.get("rope.freq_base_swa", 1e4)
    with_keys = [layer for layer in full if meta.has(layer, "attn_k.weight")]
    own: Config = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": meta.need("attention.key_length_swa"),
        "global_head_dim": meta.need("attention.key_length"),
        "num_key_value_heads": next(h for h, each in zip(heads, near, strict=True) if each),
        "num_global_key_value_heads": heads[full[0]],
        "attention_k_eq_v": not meta.has(with_keys[0], "attn_v.weight"),
        "layer_types": [SLIDING if each else FULL for each in near],
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "num_kv_shared_layers": shared,
        "sliding_window": meta.need("attention.sliding_window"),
        "hidden_size_per_layer_input": meta.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": meta.source.tensors["token_embd.weight"].shape[0],
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
        "rope_parameters": {FULL: proportional, SLIDING: _plain(theta)},
        "rope_scaling": None,
        "tie_word_embeddings": True,
    }
    if meta.get("expert_count"):
        own |= {"enable_moe_block": True, "num_experts": meta.need("expert_count")}
        own |= {"top_k_experts": meta.need("expert_used_count")}
        own |= {"moe_intermediate_size": meta.need("expert_feed_forward_length")}
    return own


def _plain(theta: float) -> Config:
    return {"rope_type": "default", "rope_theta": theta}


def llama(meta: Metadata) -> Config:
    return {"sliding_window": meta.get("attention.sliding_window") or None}


def delta(meta: Metadata) -> Config:
    theta = {**_plain(meta.get("rope.freq_base", 1e7)), **partial_rotation(meta)}
    heads = meta.need("ssm.time_step_rank")
    return {
        "linear_value_head_dim": meta.need("ssm.inner_size") // heads,
        "layer_types": meta.layers_with("ssm_out.weight", yes=LINEAR, no=FULL),
        "rope_parameters": theta,
        "norm_topk_prob": True,
    }


def latent(meta: Metadata, unit: float = 0.1) -> Config:
    rotated = meta.need("rope.dimension_count")
    value = meta.get("attention.value_length_mla")
    key = meta.get("attention.key_length_mla")
    if key is None or value is None:  # in files of the first kind, before llama.cpp split kv_b
        key, value = meta.need("attention.key_length"), meta.need("attention.value_length")
    return {
        "head_dim": None,
        "num_key_value_heads": meta.need("attention.head_count"),
        "kv_lora_rank": meta.need("attention.kv_lora_rank"),
        "q_lora_rank": meta.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "partial_rotary_factor": None,
        **with_mscale(meta, unit),
    }


def deepseek2(meta: Metadata) -> Config:
    grouped = meta.get("expert_group_count", 1) > 1
    own = latent(meta)
    if is_sigmoid(meta):
        return own
    # To transformers, V2's weights are never made to sum to one.
    method = "group_limited_greedy" if grouped else "greedy"
    return own | {"topk_method": method}


def is_sigmoid(meta: Metadata) -> bool:
    return meta.get("expert_gating_func", 1) == SIGMOID


def sparse(meta: Metadata) -> Config:
    full, shared = "full", "shared"
    if meta.arch != "glm-dsa":
        return latent(meta)
    return {
        **latent(meta),
        "indexer_types": meta.layers_with("indexer.attn_k.weight", yes=full, no=shared),
    }


def kimi_linear(meta: Metadata) -> Config:
    kinds = meta.layers_with("attn_kv_a_mqa.weight", yes=FULL, no=LINEAR)
    dim = meta.need("kda.head_dim")
    return {
        **latent(meta),
        "linear_attn_config": {
            "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == FULL],
            "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == LINEAR],
            "head_dim": dim,
            "num_heads": meta.shape("ssm_beta.weight")[0],
            "short_conv_kernel_size": meta.need("ssm.conv_kernel"),
        },
        "layer_types": kinds,
        "linear_head_dim": dim,
        "linear_num_heads": meta.shape("ssm_beta.weight")[0],
        "linear_conv_kernel_dim": meta.need("ssm.conv_kernel"),
    }


def gpt_oss(meta: Metadata) -> Config:
    layers = range(meta.num_layers)
    scaling = rope_scaling(meta)
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling["truncate"] = False
    return {
        "layer_types": [FULL if layer % 2 else SLIDING for layer in layers],
        "sliding_window": meta.need("attention.sliding_window"),
        "rope_scaling": scaling,
        "intermediate_size": meta.need("expert_feed_forward_length"),
    }


def lfm2(meta: Metadata) -> Config:
    kinds = meta.layers_with("shortconv.conv.weight", yes="conv", no=FULL)
    return {
        "layer_types": kinds,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": meta.need("shortconv.l_cache"),
        "conv_bias": False,
        "norm_eps": meta.need("attention.layer_norm_rms_epsilon"),
        "num_key_value_heads": max(meta.each("attention.head_count_kv")),
    }


def nemotron_h(meta: Metadata) -> Config:
    stems = {
        "ssm_in": LINEAR,
        "attn_q": FULL,
        "ffn_gate_inp": "moe",
        "ffn_up": "mlp",
    }
    kinds = []
    for layer in range(meta.num_layers):
        has = (kind for stem, kind in stems.items() if meta.has(layer, f"{stem}.weight"))
        kinds.append(next(has, "nothing that is known"))
    heads = meta.need("ssm.time_step_rank")
    own: Config = {
        "layers_block_type": kinds,
        "head_dim": head_dim(meta),
        "num_key_value_heads": max(meta.each("attention.head_count_kv")),
        "intermediate_size": max(meta.each("feed_forward_length")),
        "layer_norm_epsilon": eps(meta),
        "mamba_num_heads": heads,
        "mamba_head_dim": meta.need("ssm.inner_size") // heads,
        "use_conv_bias": any(meta.has(i, "ssm_conv1d.bias") for i in range(meta.num_layers)),
        "mlp_hidden_act": "relu2",
        "moe_latent_size": meta.get("moe_latent_size"),
        "partial_rotary_factor": None,
        "time_step_min": 1e-30,  # transformers cuts steps at it, the makers' code does not
    }
    if "moe" in kinds:
        width = "moe_shared_expert_intermediate_size"
        own |= {key: stated(meta, each) for key, each in DEEPSEEK_MOE.items()}
        own[width] = meta.need("expert_shared_feed_forward_length")
    return own


def eps(meta: Metadata) -> float:
    plain = meta.get("attention.layer_norm_epsilon")
    return float(meta.get("attention.layer_norm_rms_epsilon", plain))


def stated(meta: Metadata, key: str | tuple[str, Any]) -> Any:
    return meta.need(key) if isinstance(key, str) else meta.get(*key)


def falcon_h1(meta: Metadata) -> Config:
    heads, inner = meta.need("ssm.time_step_rank"), meta.need("ssm.inner_size")
    # Multipliers are in the weights.
    ones = {f"{name}_multiplier": 1.0 for name in FALCON_MULTIPLIERS}
    return {
        **ones,
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
        "mamba_d_ssm": inner,
        "mamba_d_head": inner // heads,
        "mamba_conv_bias": meta.has(0, "ssm_conv1d.bias"),
        "mamba_rms_norm": meta.has(0, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


FALCON_MULTIPLIERS = (
    *("attention_in", "attention_out", "key", "ssm_in", "ssm_out", "lm_head", "embedding"),
)


def granite(meta: Metadata) -> Config:
    return {
        "attention_multiplier": meta.get("attention.scale", head_dim(meta) ** -0.5),
        "embedding_multiplier": meta.get("embedding_scale", 1.0),
        "residual_multiplier": meta.get("residual_scale", 1.0),
        "logits_scaling": meta.get("logit_scale", 1.0),
    }


def llama4(meta: Metadata) -> Config:
    """llama.cpp takes chunks of 8192, every fourth layer without rotation, and how queries grow,
    for granted."""
    return {
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "use_qk_norm": meta.get("expert_count") != 128,
        "intermediate_size": meta.need("expert_feed_forward_length"),
        "intermediate_size_mlp": meta.need("feed_forward_length"),
    }


def mimo(meta: Metadata) -> Config:
    near, heads = (
        meta.each(f"attention.{key}") for key in ("sliding_window_pattern", "head_count_kv")
    )
    kinds = zip(near, heads, strict=True)
    by_kind = {bool(each): number for each, number in kinds}
    theta, theta_swa = meta.need("rope.freq_base"), meta.get("rope.freq_base_swa", 1e4)
    queries, dims = meta.need("attention.head_count"), head_dim(meta)
    values = meta.need("attention.value_length")
    turned = partial_rotation(meta)
    return {
        "num_key_value_heads": by_kind[False],
        "swa_num_key_value_heads": by_kind[True],
        "swa_num_attention_heads": queries,
        "v_head_dim": values,
        "swa_head_dim": dims,
        "swa_v_head_dim": values,
        "hybrid_layer_pattern": [int(bool(each)) for each in near],
        "layer_types": [SLIDING if each else FULL for each in near],
        "moe_layer_freq": [
            int(meta.has(layer, "ffn_gate_inp.weight")) for layer in range(meta.num_layers)
        ],
        "mlp_layer_types": meta.layers_with("ffn_gate_inp.weight", yes="sparse", no="dense"),
        "sliding_window": meta.need("attention.sliding_window"),
        "layernorm_epsilon": meta.need("attention.layer_norm_rms_epsilon"),
        "attention_value_scale": meta.need("attention.value_scale"),
        "swa_rope_theta": theta_swa,
        "rope_parameters": {
            FULL: {**_plain(theta), **turned},
            SLIDING: {**_plain(theta_swa), **turned},
        },
        "norm_topk_prob": True,
    }


def mistral3(meta: Metadata) -> Config:
    scaling = with_mscale(meta, 1.0)["rope_scaling"]
    growth = meta.get("attention.temperature_scale")
    if scaling is not None and growth is not None:
        scaling["llama_4_scaling_beta"] = growth
    # transformers reads the rest of this family's rotation from the same place.
    theta = meta.get("rope.freq_base", 1e6)
    parameters = {"rope_theta": theta, **(scaling or _plain(theta))}
    return {"rope_parameters": parameters, "rope_scaling": None, "sliding_window": None}


def smollm3(meta: Metadata) -> Config:
    return {"no_rope_layer_interval": 4, "pad_token_id": None}


def _phi3(meta: Metadata) -> Config:
    return llama(meta)


def needs_sigmoid(meta: Metadata) -> str:
    stated = meta.get("expert_gating_func", SIGMOID)
    return "" if stated == SIGMOID else f"expert_gating_func {stated}, only {SIGMOID} is known"


def glm4_refused(meta: Metadata) -> str:
    if meta.get("expert_count"):
        return "experts"
    is_turned = meta.source.metadata.get("glm4.rope.dimension_sections") is not None
    return "queries and keys of GLM-4V, which are in another order" if is_turned else ""


def deepseek2_refused(meta: Metadata) -> str:
    normalized = bool(meta.get("expert_weights_norm")) and not is_sigmoid(meta)
    return "softmax weights of experts that sum to one" if normalized else ""


def no_experts(meta: Metadata) -> str:
    return "experts" if meta.get("expert_count") else ""
