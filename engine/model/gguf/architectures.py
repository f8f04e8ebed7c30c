"""GGUF's architectures: what each is to transformers, how its keys and tensors are called there,
and what llama.cpp has changed in them. One entry for each; `llama` and `deepseek2` stand for
several families.

What a file does not state is a constant of its architecture in llama.cpp, and here. Files of which
something that counts is neither stated nor constant are refused, by `why_not` or by a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.gguf import configs
from kvrelay.engine.model.gguf import conversions as made
from kvrelay.engine.model.gguf.configs import DEEPSEEK_MOE, MOE
from kvrelay.engine.model.gguf.metadata import (
    Config,
    Keys,
    Metadata,
    head_dim,
    partial_rotation,
    rope_scaling,
)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a layer that is made of one of GGUF's, or of several."""

    name: str
    make: Callable[..., torch.Tensor]
    others: tuple[str, ...] = ()  # further ones of GGUF's, behind the one that it is listed under


Names = Mapping[str, str | Part | tuple[Part, ...]]
"""By GGUF's name of a layer's tensor, without its kind (weight, bias) where that stays as it is;
{} stands for the number of an expert."""


@dataclass(frozen=True, slots=True)
class Family:
    architecture: str  # transformers' name
    kind: str  # its model_type
    keys: Keys = field(default_factory=dict)
    more: Callable[[Metadata], Config] = lambda _: {}  # further ones, or others than all have
    names: Names = field(default_factory=dict)
    packed: Names = field(default_factory=dict)  # tensors in MXFP4 stay so
    top: Mapping[str, str] = field(default_factory=dict)
    root: str = "model."
    has_larger_norms: bool = False  # by one
    why_not: Callable[[Metadata], str] = lambda _: ""  # why a file is refused


SHARED_EXPERTS: Names = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}

TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER: Names = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "exp_probs_b.bias": Part("mlp.gate.e_score_correction_bias", made.flat),
    **SHARED_EXPERTS,
}
IN_PAIRS: Names = {
    f"attn_{which}.{kind}": Part(f"self_attn.{which}_proj.{kind}", make)
    for which, make in (("q", made.halves_of_queries), ("k", made.halves_of_keys))
    for kind in ("weight", "bias")
}
SANDWICH: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
QWEN_MOE: Keys = {
    **MOE,
    "num_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
SHARED: Keys = {**QWEN_MOE, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
SHARED_NAMES: Names = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    # Stored as a vector in some files.
    "ffn_gate_inp_shexp.weight": Part(
        "mlp.shared_expert_gate.weight", lambda _, row: row.reshape(1, -1)
    ),
}
BLOCK_SPARSE: Names = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
DELTA_KEYS: Keys = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
DELTA: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_dt.bias": Part("linear_attn.dt_bias", made.flat),
    "ssm_a": Part("linear_attn.A_log", made.logarithm),
    "ssm_conv1d.weight": Part("linear_attn.conv1d.weight", made.channels),
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
BY_KEYS: Names = {
    **DELTA,
    "ssm_dt.bias": Part("linear_attn.dt_bias", made.by_keys),
    "ssm_a": Part("linear_attn.A_log", made.logarithm_by_keys),
    "ssm_conv1d.weight": Part("linear_attn.conv1d.weight", made.channels_by_keys),
    "ssm_out.weight": Part("linear_attn.out_proj.weight", made.outputs_by_keys),
    "ssm_alpha.weight": Part("linear_attn.in_proj_a.weight", made.by_keys),
    "ssm_beta.weight": Part("linear_attn.in_proj_b.weight", made.by_keys),
    "attn_qkv.weight": Part("linear_attn.in_proj_qkv.weight", made.last_by_keys),
    "attn_gate.weight": Part("linear_attn.in_proj_z.weight", made.values_by_keys),
}
LATENT: Names = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # in older files
    "attn_k_b.weight": Part(
        "self_attn.kv_b_proj.weight", made.keys_and_values, ("attn_v_b.weight",)
    ),
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
}
INDEXER: Keys = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}
LFM2_TOP = {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}
LFM2: Names = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "shortconv.conv.weight": Part("conv.conv.weight", made.channels),
}
MAMBA: Names = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d.weight": Part("mamba.conv1d.weight", made.channels),
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": Part("mamba.dt_bias", made.flat),
    "ssm_a": Part("mamba.A_log", made.logarithm),
    "ssm_d": Part("mamba.D", made.flat),
    "ssm_norm.weight": Part("mamba.norm.weight", made.flat),
    "ssm_out": "mamba.out_proj",
}


def _renamed(names: Names, part: str, other: str) -> Names:
    """With `part` of transformers' names called otherwise."""
    return {
        key: each.replace(part, other)
        if isinstance(each, str)
        else Part(each.name.replace(part, other), each.make, each.others)
        for key, each in names.items()
        if not isinstance(each, tuple)
    }


MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    {"num_local_experts": "expert_count", **MOE},
    configs.llama,
    {**IN_PAIRS, **BLOCK_SPARSE},
)
MISTRAL = Family("MistralForCausalLM", "mistral", more=configs.llama, names=IN_PAIRS)
MISTRAL3 = Family("MistralForCausalLM", "mistral", more=configs.mistral3, names=IN_PAIRS)
DEEPSEEK3 = Family("DeepseekV3ForCausalLM", "deepseek_v3", DEEPSEEK_MOE, configs.latent, LATENT)
NEMOTRON_H = Family(
    "NemotronHForCausalLM",
    "nemotron_h",
    {
        "conv_kernel": "ssm.conv_kernel",
        "ssm_state_size": "ssm.state_size",
        "n_groups": "ssm.group_count",
    },
    configs.nemotron_h,
    {
        "attn_norm": "norm",
        **_renamed(MAMBA, "mamba.", "mixer."),
        **_renamed(
            {
                key: each
                for key, each in {**LAYER, **IN_PAIRS}.items()
                if key.startswith(("attn_q", "attn_k", "attn_v", "attn_output"))
            },
            "self_attn.",
            "mixer.",
        ),
        **_renamed(
            {key: each for key, each in LAYER.items() if key.startswith(("ffn_", "exp_"))},
            "mlp.",
            "mixer.",
        ),
    },
    top={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    root="backbone.",
    why_not=configs.needs_sigmoid,
)

ARCHITECTURES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama", names=IN_PAIRS),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", why_not=configs.no_experts),
    "qwen2vl": Family("Qwen2ForCausalLM", "qwen2", why_not=configs.no_experts),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", why_not=configs.no_experts),
    "qwen3vl": Family("Qwen3ForCausalLM", "qwen3", why_not=configs.no_experts),
    "qwen2moe": Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        SHARED,
        lambda meta: {"norm_topk_prob": False, "qkv_bias": meta.has(0, "attn_q.bias")},
        SHARED_NAMES,
    ),
    "qwen3moe": Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", QWEN_MOE, lambda _: {"norm_topk_prob": True}
    ),
    "qwen3vlmoe": Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", QWEN_MOE, lambda _: {"norm_topk_prob": True}
    ),
    "qwen3next": Family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {**SHARED, **DELTA_KEYS},
        configs.delta,
        {
            **DELTA,
            **SHARED_NAMES,
            "ssm_in": "linear_attn.in_proj_qkvz",  # in files of the first days
            "attn_qkv.weight": Part(
                "linear_attn.in_proj_qkvz.weight", made.grouped, ("attn_gate.weight",)
            ),
            "ssm_ba": "linear_attn.in_proj_ba",
        },
        has_larger_norms=True,
    ),
    "qwen35": Family(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        DELTA_KEYS,
        configs.delta,
        BY_KEYS,
        has_larger_norms=True,
    ),
    "qwen35moe": Family(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        {**SHARED, **DELTA_KEYS},
        configs.delta,
        {**BY_KEYS, **SHARED_NAMES},
        has_larger_norms=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        "phi3",
        more=configs.llama,
        names={"ffn_up": "mlp.gate_up_proj"},
        why_not=configs.no_experts,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "gemma2",
        more=configs.gemma,
        names=SANDWICH,
        has_larger_norms=True,
        why_not=configs.no_experts,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        more=configs.gemma,
        names=SANDWICH,
        has_larger_norms=True,
        why_not=configs.no_experts,
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        "gemma4_text",
        more=configs.gemma4,
        names={
            **SANDWICH,
            "layer_output_scale.weight": Part("layer_scalar", made.flat),
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": Part("router.scale", made.flat),
            "ffn_down_exps.scale": Part("router.per_expert_scale", made.flat),
            "ffn_down_exps.weight": Part("experts.down_proj", made.same),
            "ffn_gate_up_exps.weight": Part("experts.gate_up_proj", made.same),
        },
        top={
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "gpt_oss",
        {"num_local_experts": "expert_count", **MOE},
        configs.gpt_oss,
        {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": Part("self_attn.sinks", made.flat),
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.weight": Part(
                "mlp.experts.gate_up_proj", made.alternating_columns, ("ffn_up_exps.weight",)
            ),
            "ffn_gate_exps.bias": Part(
                "mlp.experts.gate_up_proj_bias", made.alternating, ("ffn_up_exps.bias",)
            ),
            "ffn_down_exps.weight": Part("mlp.experts.down_proj", made.turned),
            "ffn_down_exps.bias": Part("mlp.experts.down_proj_bias", made.same),
        },
        {
            "ffn_gate_exps.weight": (
                Part(
                    "mlp.experts.gate_up_proj_blocks",
                    made.alternating_pairs,
                    ("ffn_up_exps.weight",),
                ),
                Part(
                    "mlp.experts.gate_up_proj_scales",
                    made.alternating_exponents,
                    ("ffn_up_exps.weight",),
                ),
            ),
            "ffn_down_exps.weight": (
                Part("mlp.experts.down_proj_blocks", made.pairs),
                Part("mlp.experts.down_proj_scales", made.exponents),
            ),
        },
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        "glm4",
        names={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        why_not=configs.glm4_refused,
    ),
    "glm4moe": Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        DEEPSEEK_MOE,
        lambda meta: {"use_qk_norm": meta.has(0, "attn_q_norm.weight")},
        {"post_attention_norm": "post_attention_layernorm"},
        why_not=configs.needs_sigmoid,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        "granite",
        more=configs.granite,
        names=IN_PAIRS,
        why_not=configs.no_experts,
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        "llama4_text",
        {
            "num_local_experts": "expert_count",
            **MOE,
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        configs.llama4,
        {
            **{
                key: f"feed_forward.{name}"
                for key, name in {
                    "ffn_gate": "gate_proj",
                    "ffn_up": "up_proj",
                    "ffn_down": "down_proj",
                    "ffn_gate_shexp": "shared_expert.gate_proj",
                    "ffn_up_shexp": "shared_expert.up_proj",
                    "ffn_down_shexp": "shared_expert.down_proj",
                    "ffn_gate_inp": "router",
                }.items()
            },
            "ffn_gate_exps.weight": Part(
                "feed_forward.experts.gate_up_proj",
                made.one_behind_the_other,
                ("ffn_up_exps.weight",),
            ),
            "ffn_down_exps.weight": Part("feed_forward.experts.down_proj", made.turned),
        },
    ),
    "deepseek2": Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        DEEPSEEK_MOE,
        configs.deepseek2,
        LATENT,
        why_not=configs.deepseek2_refused,
    ),
    "deepseek32": Family(
        "DeepseekV32ForCausalLM",
        "deepseek_v32",
        {**DEEPSEEK_MOE, **INDEXER},
        configs.sparse,
        LATENT,
        why_not=configs.needs_sigmoid,
    ),
    "glm-dsa": Family(
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        {**DEEPSEEK_MOE, **INDEXER},
        configs.sparse,
        LATENT,
        why_not=configs.needs_sigmoid,
    ),
    "kimi-linear": Family(
        "KimiLinearForCausalLM",
        "kimi_linear",
        {
            "num_experts": "expert_count",
            "num_experts_per_token": "expert_used_count",
            "num_expert_group": ("expert_group_count", 1),
            "topk_group": ("expert_group_used_count", 1),
            "num_shared_experts": ("expert_shared_count", 0),
            "moe_intermediate_size": "expert_feed_forward_length",
            "first_k_dense_replace": ("leading_dense_block_count", 0),
            "routed_scaling_factor": ("expert_weights_scale", 1.0),
        },
        configs.kimi_linear,
        {
            **LATENT,
            **BLOCK_SPARSE,
            **_renamed(SHARED_EXPERTS, "mlp.", "block_sparse_moe."),
            "exp_probs_b.bias": Part("block_sparse_moe.gate.e_score_correction_bias", made.flat),
            "ssm_a": Part("self_attn.A_log", made.logarithm_of_kimi),
            "ssm_dt.bias": Part("self_attn.dt_bias", made.flat),
            "ssm_beta": "self_attn.b_proj",
            "ssm_f_a": "self_attn.f_a_proj",
            "ssm_f_b": "self_attn.f_b_proj",
            "ssm_g_a": "self_attn.g_a_proj",
            "ssm_g_b": "self_attn.g_b_proj",
            "ssm_norm": "self_attn.o_norm",
            **{
                f"ssm_conv1d_{each}.weight": Part(f"self_attn.{each}_conv1d.weight", made.channels)
                for each in "qkv"
            },
        },
        why_not=configs.needs_sigmoid,
    ),
    "lfm2": Family("Lfm2ForCausalLM", "lfm2", more=configs.lfm2, names=LFM2, top=LFM2_TOP),
    "lfm2moe": Family(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        {**QWEN_MOE, "num_dense_layers": ("leading_dense_block_count", 0)},
        lambda meta: {**configs.lfm2(meta), "norm_topk_prob": True, "use_expert_bias": True},
        {
            **LFM2,
            "ffn_gate_inp": "feed_forward.gate",
            "ffn_gate_exps": "feed_forward.experts.{}.w1",
            "ffn_up_exps": "feed_forward.experts.{}.w3",
            "ffn_down_exps": "feed_forward.experts.{}.w2",
            "exp_probs_b.bias": Part("feed_forward.expert_bias", made.flat),
        },
        top=LFM2_TOP,
        why_not=configs.needs_sigmoid,
    ),
    "mimo2": Family(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        {**MOE, "n_routed_experts": "expert_count"}
        | {"moe_intermediate_size": "expert_feed_forward_length"},
        configs.mimo,
        {"attn_sinks.weight": Part("self_attn.attention_sink_bias", made.flat)},
        why_not=configs.needs_sigmoid,
    ),
    "minimax-m2": Family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        {
            "num_local_experts": "expert_count",
            **MOE,
            "intermediate_size": "expert_feed_forward_length",
            "rotary_dim": "rope.dimension_count",
        },
        names={
            **BLOCK_SPARSE,
            "exp_probs_b.bias": Part("block_sparse_moe.e_score_correction_bias", made.flat),
        },
        why_not=configs.needs_sigmoid,
    ),
    "mistral3": Family(
        "Ministral3ForCausalLM", "ministral3", more=configs.mistral3, names=IN_PAIRS
    ),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
    "seed_oss": Family(
        "SeedOssForCausalLM",
        "seed_oss",
        more=lambda meta: {"attention_out_bias": meta.has(0, "attn_output.bias")},
        names={"post_attention_norm": "post_attention_layernorm"},
    ),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", more=configs.smollm3, names=IN_PAIRS),
    "falcon-h1": Family(
        "FalconH1ForCausalLM",
        "falcon_h1",
        {
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_d_state": "ssm.state_size",
            "mamba_n_heads": "ssm.time_step_rank",
            "mamba_n_groups": "ssm.group_count",
        },
        configs.falcon_h1,
        {
            **MAMBA,
            "ffn_norm": Part("pre_ff_layernorm.weight", made.flat),  # without its kind
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        top={"output_norm": "model.final_layernorm"},
    ),
}
ROTATION = ("partial_rotary_factor",)
REFUSED = {
    "mistral4": "it does not state how queries grow with their position",
}
"""Architectures of families that the decoder knows, of which files do not state all."""


def family_of(meta: Metadata) -> Family:
    """That of a file. Raises ModelError."""
    chosen = ARCHITECTURES[meta.arch]
    if meta.arch == "llama" and meta.get("expert_count"):
        chosen = MIXTRAL
    elif meta.arch == "llama" and meta.get("attention.sliding_window"):
        chosen = MISTRAL
    elif meta.arch == "mistral3" and meta.get("rope.scaling.type", "none") != "yarn":
        chosen = MISTRAL3
    elif meta.arch == "deepseek2" and configs.is_sigmoid(meta):
        chosen = DEEPSEEK3
    if why := chosen.why_not(meta):
        raise ModelError(f"{meta.source.path}: {meta.arch} with {why} is not supported")
    return chosen


def config_of(meta: Metadata, family: Family) -> Config:
    """config.json without the ids of special tokens. Raises ModelError."""
    source, heads = meta.source, meta.need("attention.head_count")
    kv_heads = source.metadata.get(f"{meta.arch}.attention.head_count_kv", heads)
    width = source.metadata.get(f"{meta.arch}.feed_forward_length")
    config: Config = {
        "architectures": [family.architecture],
        "model_type": family.kind,
        "hidden_size": meta.need("embedding_length"),
        "num_hidden_layers": meta.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if isinstance(kv_heads, int) else None,
        "head_dim": head_dim(meta),
        "intermediate_size": (width if isinstance(width, int) else 0)
        or meta.get("expert_feed_forward_length"),
        "vocab_size": source.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": meta.need("context_length"),
        "rms_norm_eps": configs.eps(meta),
        "rope_theta": meta.get("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "attention_bias": meta.has(0, "attn_q.bias") or meta.has(0, "attn_qkv.bias"),
        "torch_dtype": "bfloat16",
        **{key: configs.stated(meta, each) for key, each in family.keys.items()},
        **partial_rotation(meta),
    }
    more = family.more(meta)
    if "rope_scaling" not in more:
        more = {"rope_scaling": rope_scaling(meta), **more}
    return {
        key: each
        for key, each in (config | more).items()
        if each is not None or key not in ("head_dim", "num_key_value_heads", *ROTATION)
    }
