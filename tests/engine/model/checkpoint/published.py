"""Configurations of the models that agent platforms serve in 2026, one of each name.

Keys and values are those of config.json, without what only training or images need. PUBLISHED:
from a copy of that file in a public repository (aiconfigurator's; Megatron-Bridge's for Kimi-Linear
and Falcon-H1, vLLM's for Mistral Large 3). SIZES: no copy was at hand; sizes as the makers tell
them, and defaults of transformers. Lists with an entry for each layer are written as they repeat.
"""

from dataclasses import dataclass, field
from typing import Any

import transformers

PUBLISHED = "published"
SIZES = "published sizes, defaults of transformers"
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
NVFP4_GROUP = {"targets": ["Linear"], "weights": NVFP4_WEIGHTS}
NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
NVFP4["config_groups"] = {"group_0": NVFP4_GROUP}


@dataclass(frozen=True)
class Published:
    name: str
    source: str
    config: dict[str, Any]
    kind: Any = None  # transformers' configuration of the language model
    layers: int = 2  # that have one of each kind of layer
    refused: str = ""  # what the refusal says; "": it loads
    file: str = "config.json"
    changes: dict[str, Any] = field(default_factory=dict)  # beside the general cuts


def wrapped(architecture: str, text: dict[str, Any], **whole: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **whole, "text_config": text}


def named(architecture: str, *parts: dict[str, Any], **own: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"architectures": [architecture]}
    for part in (*parts, own):
        config |= part
    return config


# fmt: off
QWEN3 = {
    "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_scaling": None, "sliding_window": None,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}
QWEN3_NEXT = {
    "head_dim": 256, "hidden_act": "silu", "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "full_attention_interval": 4, "max_position_embeddings": 262144,
}
QWEN35 = {
    **QWEN3_NEXT,
    "attention_bias": False, "attn_output_gate": True, "mamba_ssm_dtype": "float32",
    "eos_token_id": 248044, "tie_word_embeddings": False, "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
        "rope_theta": 10000000, "partial_rotary_factor": 0.25,
    },
}
QWEN35_27B = {
    **QWEN35,
    "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
    "linear_num_value_heads": 48, "num_attention_heads": 24, "num_key_value_heads": 4,
    "num_hidden_layers": 64, "layer_types": 16 * [LINEAR, LINEAR, LINEAR, FULL],
}
LATENTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
YARN40 = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}
DEEPSEEK3 = {
    **LATENTS,
    "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "topk_group": 4,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_key_value_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "rms_norm_eps": 1e-6, "rope_scaling": YARN40, "rope_theta": 10000, "vocab_size": 129280,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
KIMI = {
    **DEEPSEEK3,
    "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1, "n_group": 1,
    "model_type": "kimi_k2", "n_routed_experts": 384, "num_attention_heads": 64,
    "num_key_value_heads": 64, "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
    "topk_group": 1, "vocab_size": 163840, "num_nextn_predict_layers": 0,
}
KIMI_K2 = {
    "max_position_embeddings": 131072, "quantization_config": FP8_BLOCKS,
    "rope_scaling": {**YARN40, "beta_fast": 1.0, "factor": 32.0},
}
KIMI_K25 = {
    **KIMI, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
    "rope_scaling": {**YARN40, "factor": 64.0},
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "type": "int"},
            }
        },
    },
}
KIMI_K27 = {
    **KIMI_K25, "model_type": "deepseek_v3", "eos_token_id": 163586,
    "rope_scaling": None,
    "rope_parameters": {**YARN40, "factor": 64.0, "rope_theta": 50000.0, "rope_type": "yarn"},
    "quantization_config": NVFP4,
}
KIMI_K26 = {
    **KIMI_K25,
    "model_type": "deepseek_v3", "eos_token_id": 163586, "quantization_config": NVFP4,
}
GLM45 = {
    "attention_bias": True, "eos_token_id": [151329, 151336, 151338], "head_dim": 128,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 5120, "n_group": 1,
    "intermediate_size": 12288, "max_position_embeddings": 131072, "topk_group": 1,
    "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 96, "num_key_value_heads": 8,
    "num_experts_per_tok": 8, "num_hidden_layers": 92, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000, "use_qk_norm": True,
    "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "vocab_size": 151552,
}
MINIMAX = {
    "attn_type_list": 62 * [1], "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 1536, "num_attention_heads": 48, "num_key_value_heads": 8,
    "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_local_experts": 256,
    "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_qk_norm": True,
    "use_routing_bias": True, "tie_word_embeddings": False, "vocab_size": 200064,
    "quantization_config": FP8_BLOCKS,
}
GPT_OSS = {
    "attention_bias": True, "eos_token_id": 200002, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "intermediate_size": 2880, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "vocab_size": 201088,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "quantization_config": {"quant_method": "mxfp4"},
}
LLAMA4 = {
    "attention_bias": False, "attention_chunk_size": 8192, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "model_type": "llama4_text", "num_attention_heads": 40,
    "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 202048,
}
SCOUT = {
    **LLAMA4,
    "interleave_moe_layer_step": 1, "max_position_embeddings": 10485760,
    "num_local_experts": 16, "use_qk_norm": True,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
}
MAVERICK = {
    **LLAMA4,
    "interleave_moe_layer_step": 2, "max_position_embeddings": 1048576, "rope_scaling": None,
    "num_local_experts": 128, "use_qk_norm": False,
}
MINISTRAL3 = {
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 32,
    "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "sliding_window": None, "vocab_size": 131072,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn",
    },
}
MISTRAL4 = {
    **LATENTS, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "q_lora_rank": 1024,
    "first_k_dense_replace": 0, "hidden_act": "silu", "hidden_size": 4096, "n_group": 1,
    "intermediate_size": 12288, "max_position_embeddings": 1048576, "topk_group": 1,
    "model_type": "mistral4", "moe_intermediate_size": 2048, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts_per_tok": 4, "num_hidden_layers": 36, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6, "routed_scaling_factor": 1.0, "vocab_size": 131072,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 128.0, "llama_4_scaling_beta": 0.1,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 8192,
        "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "yarn",
    },
}
LARGE3 = {
    "dim": 7168, "n_layers": 61, "head_dim": 192, "hidden_dim": 16384, "n_heads": 128,
    "n_kv_heads": 128, "norm_eps": 1e-5, "vocab_size": 131072, "rope_theta": 10000.0,
    **LATENTS, "max_position_embeddings": 294912, "q_lora_rank": 1536,
    "moe": {
        "num_experts": 128, "num_experts_per_tok": 4, "num_shared_experts": 1,
        "expert_hidden_dim": 4096, "first_k_dense_replace": 3, "route_every_n": 1,
        "routed_scale": 1.0, "num_expert_groups": 1, "num_expert_groups_per_tok": 1,
    },
    "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 8192},
    "yarn": {
        "alpha": 1, "apply_scale": False, "beta": 32, "factor": 36,
        "original_max_position_embeddings": 8192,
    },
}
GEMMA3 = {
    "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
    "model_type": "gemma3_text", "num_attention_heads": 32, "num_hidden_layers": 62,
    "num_key_value_heads": 16, "query_pre_attn_scalar": 168, "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}
PHI4_MINI = {
    "attention_bias": False, "bos_token_id": 199999, "eos_token_id": 199999,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "num_attention_heads": 24, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.75, "rope_theta": 10000.0, "sliding_window": 262144,
    "tie_word_embeddings": True, "vocab_size": 200064,
    "rope_scaling": {
        "type": "longrope", "short_factor": 48 * [1.0],
        "long_factor": [min(1.118320672**index, 32.0) for index in range(48)],
    },
}
GEMMA4 = {
    "attention_bias": False, "attention_k_eq_v": True, "enable_moe_block": True,
    "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2816, "intermediate_size": 2112,
    "max_position_embeddings": 262144, "model_type": "gemma4_text", "num_experts": 128,
    "moe_intermediate_size": 704, "num_attention_heads": 16, "num_key_value_heads": 8,
    "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-6, "sliding_window": 1024, "tie_word_embeddings": True,
    "vocab_size": 262144, "layer_types": 5 * [*(5 * [SLIDING]), FULL],
    "hidden_size_per_layer_input": 0, "top_k_experts": 8,  # not in that copy
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
KIMI_LINEAR = {
    **LATENTS, "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu",
    "hidden_size": 2304, "intermediate_size": 9216, "mla_use_nope": True, "num_experts": 256,
    "model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 1024,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32, "num_expert_group": 1, "num_experts_per_token": 8,
    "num_hidden_layers": 27, "num_key_value_heads": 32, "num_shared_experts": 1,
    "q_lora_rank": None, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "topk_group": 1,
    "routed_scaling_factor": 2.446, "use_grouped_topk": True, "vocab_size": 163840,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "short_conv_kernel_size": 4,
    },
}
KIMI_LINEAR_CUT = {"linear_attn_config": {
    **KIMI_LINEAR["linear_attn_config"], "full_attn_layers": [4], "kda_layers": [1, 2, 3],
}}
NEMOTRON3 = {
    "attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "expand": 2, "head_dim": 128,
    "hidden_size": 2688, "intermediate_size": 1856, "mamba_head_dim": 64, "n_groups": 8,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_hidden_act": "silu", "mamba_num_heads": 64, "mlp_hidden_act": "relu2",
    "max_position_embeddings": 262144, "model_type": "nemotron_h", "n_routed_experts": 128,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "n_shared_experts": 1, "norm_eps": 1e-5, "norm_topk_prob": True, "n_group": 1,
    "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52,
    "num_key_value_heads": 2, "routed_scaling_factor": 2.5, "ssm_state_size": 128,
    "tie_word_embeddings": False, "topk_group": 1, "use_conv_bias": True, "vocab_size": 131072,
}
LFM2 = {
    "block_auto_adjust_ff_dim": True, "block_ff_dim": 12288, "block_multiple_of": 256,
    "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048,
    "max_position_embeddings": 128000, "norm_eps": 1e-5, "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1000000.0,
    "model_type": "lfm2", "vocab_size": 65536,
}
FALCON_H1 = {
    "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "head_dim": 64,
    "embedding_multiplier": 5.656854249492381, "hidden_size": 1024, "hidden_act": "silu",
    "intermediate_size": 2048, "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625,
    "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128,
    "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_rms_norm": False, "mamba_expand": 2,
    "max_position_embeddings": 16384, "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "num_attention_heads": 8, "num_hidden_layers": 36, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "rope_theta": 1e11, "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587, "vocab_size": 32784,
}
MIMO = {
    "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
    "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192,
    "swa_v_head_dim": 128, "rope_theta": 5000000, "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334, "sliding_window": 128, "sliding_window_size": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, *(7 * [0, 1, 1, 1, 1, 1]), 0],
    "moe_layer_freq": [0, *(47 * [1])], "moe_intermediate_size": 2048, "hidden_act": "silu",
    "n_routed_experts": 256, "n_shared_experts": None, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "routed_scaling_factor": None, "layernorm_epsilon": 1e-5,
    "attention_bias": False, "attention_value_scale": 0.707, "vocab_size": 152576,
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "max_position_embeddings": 262144, "tie_word_embeddings": False,
    "quantization_config": FP8_BLOCKS,
}
K25, K25_KIND = "KimiK25ForConditionalGeneration", transformers.Kimi_K25Config
Q35, Q35_KIND = "Qwen3_5ForConditionalGeneration", transformers.Qwen3_5TextConfig
UNKNOWN = "architecture {} is not supported"


def unknown(name: str, source: str, config: dict[str, Any]) -> Published:
    (architecture,) = config["architectures"]
    return Published(name, source, config, refused=UNKNOWN.format(architecture))


MODELS = (
    Published(
        "Qwen3",
        PUBLISHED,
        named("Qwen3ForCausalLM", QWEN3, {
            "hidden_size": 5120, "intermediate_size": 25600, "max_position_embeddings": 40960,
            "max_window_layers": 64, "num_attention_heads": 64, "num_hidden_layers": 64,
            "num_key_value_heads": 8, "rope_theta": 1000000,
        }),
        transformers.Qwen3Config,
    ),
    Published(
        "Qwen3-Coder",
        PUBLISHED,
        named("Qwen3MoeForCausalLM", QWEN3, {
            "decoder_sparse_step": 1, "hidden_size": 6144, "intermediate_size": 8192,
            "max_position_embeddings": 262144, "max_window_layers": 62, "mlp_only_layers": [],
            "moe_intermediate_size": 2560, "norm_topk_prob": True, "num_attention_heads": 96,
            "num_experts": 160, "num_experts_per_tok": 8, "num_hidden_layers": 62,
            "num_key_value_heads": 8, "rope_theta": 10000000,
        }),
        transformers.Qwen3MoeConfig,
    ),
    Published(
        "Qwen3-Next",
        PUBLISHED,
        named("Qwen3NextForCausalLM", QWEN3_NEXT, {
            "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5120,
            "linear_num_value_heads": 32, "mlp_only_layers": [], "moe_intermediate_size": 512,
            "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
            "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000000,
            "shared_expert_intermediate_size": 512, "vocab_size": 151936,
        }), transformers.Qwen3NextConfig, layers=4),
    Published(
        "Qwen3.5",
        PUBLISHED,
        wrapped("Qwen3_5MoeForConditionalGeneration", {
            **QWEN35, "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
            "layer_types": 10 * [LINEAR, LINEAR, LINEAR, FULL], "num_hidden_layers": 40,
            "linear_num_value_heads": 32, "moe_intermediate_size": 512,
            "num_attention_heads": 16, "num_key_value_heads": 2, "num_experts": 256,
            "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512,
        }), transformers.Qwen3_5MoeTextConfig, layers=4),
    Published("Qwen3.6", PUBLISHED, wrapped(Q35, QWEN35_27B), Q35_KIND, layers=4),
    Published("Qwen3.8", SIZES, wrapped(Q35, QWEN35_27B), Q35_KIND, layers=4),
    Published(
        "GLM-4.5", SIZES, named("Glm4MoeForCausalLM", GLM45), transformers.Glm4MoeConfig, layers=4,
    ),
    Published(
        "GLM-4.6",
        SIZES,
        named("Glm4MoeForCausalLM", GLM45, max_position_embeddings=202752),
        transformers.Glm4MoeConfig,
        layers=4,
    ),
    Published(
        "GLM-4.7",
        SIZES,
        named("Glm4MoeForCausalLM", GLM45, max_position_embeddings=202752),
        transformers.Glm4MoeConfig,
        layers=4,
    ),
    Published(
        "GLM-4.7-Flash",
        SIZES,
        named("Glm4MoeLiteForCausalLM", {
            "num_hidden_layers": 47, "hidden_size": 2048, "num_attention_heads": 20,
            "num_key_value_heads": 20, "head_dim": 64, "intermediate_size": 10240,
            "vocab_size": 154880, "max_position_embeddings": 202752, "n_routed_experts": 64,
            "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
            "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": 768,
            "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
            "routed_scaling_factor": 1.8, "tie_word_embeddings": False,
        }),
        transformers.Glm4MoeLiteConfig,
    ),
    unknown(
        "GLM-5",
        PUBLISHED,
        named("GlmMoeDsaForCausalLM", DEEPSEEK3, {
            "eos_token_id": [154820, 154827, 154829], "head_dim": 64, "hidden_size": 6144,
            "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "n_group": 1,
            "intermediate_size": 12288, "num_attention_heads": 64, "num_key_value_heads": 64,
            "num_hidden_layers": 78, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
            "topk_group": 1, "v_head_dim": 256, "vocab_size": 154880, "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
            "rope_scaling": None, "rope_interleave": True, "indexer_rope_interleave": True,
            "max_position_embeddings": 202752,
        }),
    ),
    Published(
        "Kimi K2",
        PUBLISHED,
        named("DeepseekV3ForCausalLM", KIMI, KIMI_K2),
        transformers.DeepseekV3Config,
    ),
    Published("Kimi K2.5", PUBLISHED, wrapped(K25, KIMI_K25), K25_KIND),
    Published("Kimi K2.6", PUBLISHED, wrapped(K25, KIMI_K26), K25_KIND),
    Published("Kimi K2.7-Code", PUBLISHED, wrapped(K25, KIMI_K27), K25_KIND),
    Published(
        "Kimi-Linear", PUBLISHED, named("KimiLinearForCausalLM", KIMI_LINEAR),
        transformers.KimiLinearConfig, layers=4, changes=KIMI_LINEAR_CUT,
    ),
    unknown(
        "Kimi K3",
        PUBLISHED,
        wrapped("KimiK3ForConditionalGeneration", {
            **KIMI_LINEAR, "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
            "attn_res_block_size": 12, "hidden_act": "situ", "hidden_size": 7168,
            "intermediate_size": 33792, "latent_moe_use_norm": True, "num_experts": 896,
            "mla_use_output_gate": True, "moe_intermediate_size": 3072,
            "num_attention_heads": 96, "num_experts_per_token": 16, "q_lora_rank": 1536,
            "num_hidden_layers": 93, "routed_expert_hidden_size": 3584, "num_shared_experts": 2,
            "num_key_value_heads": 96, "routed_scaling_factor": 1.0,
            "linear_attn_config": {
                "full_attn_layers": [*range(4, 93, 4), 93], "head_dim": 128, "num_heads": 96,
                "kda_layers": [layer for layer in range(1, 92) if layer % 4],
                "gate_lower_bound": -5.0, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
            },
        }),
    ),
    Published(
        "DeepSeek V3.1",
        PUBLISHED,
        named("DeepseekV3ForCausalLM", DEEPSEEK3, quantization_config=FP8_BLOCKS),
        transformers.DeepseekV3Config,
        layers=4,
    ),
    unknown(
        "DeepSeek V3.2",
        PUBLISHED,
        named("DeepseekV32ForCausalLM", DEEPSEEK3, {
            "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
        }, quantization_config=FP8_BLOCKS),
    ),
    unknown(
        "DeepSeek V4",
        PUBLISHED,
        named("DeepseekV4ForCausalLM", {
            "compress_ratios": [0, 0, *(21 * [4, 128])], "compress_rope_theta": 160000,
            "expert_dtype": "fp4", "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512,
            "hidden_size": 4096, "index_head_dim": 128, "index_n_heads": 64,
            "index_topk": 512, "max_position_embeddings": 1048576, "n_routed_experts": 256,
            "moe_intermediate_size": 2048, "n_shared_experts": 1, "num_attention_heads": 64,
            "num_experts_per_tok": 6, "num_hidden_layers": 43, "num_hash_layers": 3,
            "num_key_value_heads": 1, "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024,
            "qk_rope_head_dim": 64, "scoring_func": "sqrtsoftplus", "sliding_window": 128,
            "swiglu_limit": 10.0, "vocab_size": 129280, "quantization_config": FP8_BLOCKS,
        }),
    ),
    Published(
        "MiniMax M2",
        SIZES,
        named("MiniMaxM2ForCausalLM", MINIMAX, max_position_embeddings=196608),
        transformers.MiniMaxM2Config,
    ),
    Published(
        "MiniMax M2.7",
        PUBLISHED,
        named("MiniMaxM2ForCausalLM", MINIMAX, max_position_embeddings=204800),
        transformers.MiniMaxM2Config,
    ),
    unknown(
        "MiniMax M3",
        PUBLISHED,
        named("MiniMaxM3ForCausalLM", MINIMAX, {
            "dense_intermediate_size": 12288, "first_k_dense_replace": 3,
            "hidden_act": "swigluoai", "hidden_size": 6144, "intermediate_size": 3072,
            "max_position_embeddings": 1048576, "n_shared_experts": 1, "use_gemma_norm": True,
            "num_attention_heads": 64, "num_key_value_heads": 4, "num_experts_per_tok": 4,
            "num_hidden_layers": 60, "num_local_experts": 128, "qk_norm_type": "per_head",
            "partial_rotary_factor": 0.5, "routed_scaling_factor": 2.0, "swiglu_alpha": 1.702,
            "moe_intermediate_size": 3072, "shared_intermediate_size": 3072, "swiglu_limit": 7.0,
            "moe_layer_freq": [0, 0, 0, *(57 * [1])], "attn_type_list": None,
            "quantization_config": None,
            "sparse_attention_config": {
                "sparse_attention_freq": [0, 0, 0, *(57 * [1])], "sparse_block_size": 128,
                "sparse_index_dim": 128, "sparse_local_block": 1, "sparse_num_index_heads": 4,
                "sparse_score_type": "max", "sparse_topk_blocks": 16, "use_sparse_attention": True,
            },
        }),
    ),
    Published(
        "gpt-oss-20b",
        PUBLISHED,
        named("GptOssForCausalLM", GPT_OSS, {
            "num_hidden_layers": 24, "num_local_experts": 32,
        }, layer_types=12 * [SLIDING, FULL]),
        transformers.GptOssConfig,
    ),
    Published(
        "gpt-oss-120b",
        PUBLISHED,
        named("GptOssForCausalLM", GPT_OSS, {
            "num_hidden_layers": 36, "num_local_experts": 128,
        }, layer_types=18 * [SLIDING, FULL]),
        transformers.GptOssConfig,
    ),
    Published(
        "Seed-OSS",
        SIZES,
        named("SeedOssForCausalLM", {
            "attention_bias": True, "attention_out_bias": False, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27648,
            "max_position_embeddings": 524288, "mlp_bias": False, "num_attention_heads": 80,
            "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
            "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
            "tie_word_embeddings": False, "vocab_size": 155136,
        }),
        transformers.SeedOssConfig,
    ),
    Published(
        "Ministral 3",
        SIZES,
        wrapped("Mistral3ForConditionalGeneration", MINISTRAL3, tie_word_embeddings=False),
        transformers.Ministral3Config,
    ),
    Published(
        "Mistral Small 4",
        SIZES,
        wrapped("Mistral3ForConditionalGeneration", MISTRAL4, tie_word_embeddings=False),
        transformers.Mistral4Config,
    ),
    Published(
        "Mistral Large 3",
        PUBLISHED,
        LARGE3,
        transformers.Mistral4Config,
        layers=4,
        file="params.json",
    ),
    Published(
        "Gemma 3",
        SIZES,
        wrapped("Gemma3ForConditionalGeneration", GEMMA3, eos_token_id=[1, 106]),
        transformers.Gemma3Config,
        layers=6,
    ),
    Published("Gemma 4", PUBLISHED, wrapped("Gemma4ForConditionalGeneration", GEMMA4),
              transformers.Gemma4TextConfig),
    Published(
        "Llama 4",
        PUBLISHED,
        wrapped("Llama4ForConditionalGeneration", SCOUT),
        transformers.Llama4Config,
        layers=4,
    ),
    Published(
        "Llama 4 Maverick",
        PUBLISHED,
        wrapped("Llama4ForConditionalGeneration", MAVERICK),
        transformers.Llama4Config,
        layers=4,
    ),
    Published(
        "MiMo-V2", PUBLISHED, named("MiMoV2FlashForCausalLM", MIMO), transformers.MiMoV2FlashConfig,
        changes={"swa_num_attention_heads": 32, "swa_num_key_value_heads": 4},  # as few
    ),
    Published("Nemotron 3", PUBLISHED, named("NemotronHForCausalLM", NEMOTRON3),
        transformers.NemotronHConfig, 4,  # transformers cuts steps at time_step_min
        changes={"hybrid_override_pattern": "MEM*", "time_step_min": 1e-30}),
    Published(
        "LFM2", SIZES, named("Lfm2ForCausalLM", LFM2), transformers.Lfm2Config, layers=4),
    Published(  # whose logits would be too close to each other
        "Falcon-H1", PUBLISHED, named("FalconH1ForCausalLM", FALCON_H1),
        transformers.FalconH1Config, layers=4, changes={"lm_head_multiplier": 1.0},
    ),
    Published(
        "Phi-4-mini", SIZES,
        named("Phi3ForCausalLM", PHI4_MINI),
        transformers.Phi3Config,
        changes={"hidden_size": 6 * 128},  # which makes the size of its heads
    ),
)
