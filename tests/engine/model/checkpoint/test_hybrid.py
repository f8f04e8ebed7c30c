"""config.json of families with recurrent layers, in the spelling of the files that are published,
cut to a few layers."""

import json
import math
from dataclasses import replace

import pytest

from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.config import ATTENTION, MLP, Experts, ModelConfig, Rope
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.parallel.shard import check_divides
from kvrelay.engine.model.state_layout import (
    GATED_DELTA_NET,
    KIMI_DELTA_ATTENTION,
    MAMBA2,
    SHORT_CONVOLUTION,
)

DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
QWEN3_NEXT = {  # Qwen3-Next-80B-A3B
    "architectures": ["Qwen3NextForCausalLM"],
    **DELTA,
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
}
QWEN3_5_MOE = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        **DELTA,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
}
LFM2 = {  # LFM2-1.2B
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "vocab_size": 65536,
}
FALCON_H1 = {  # Falcon-H1-1.5B
    "architectures": ["FalconH1ForCausalLM"],
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "key_multiplier": 0.5,
    "lm_head_multiplier": 0.0390625,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
    "max_position_embeddings": 131072,
    "mlp_multipliers": [0.75, 0.375],
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.25, 0.25, 0.125, 0.5, 0.3],
    "ssm_out_multiplier": 0.25,
    "vocab_size": 65537,
}
KIMI_LINEAR = {  # Kimi-Linear-48B-A3B
    "architectures": ["KimiLinearForCausalLM"],
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 5,
    "num_key_value_heads": 32,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "v_head_dim": 128,
    "vocab_size": 163840,
}

NEMOTRON_H = {  # Nemotron-H-8B
    "architectures": ["NemotronHForCausalLM"],
    "attention_head_dim": 128,
    "conv_kernel": 4,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M*-",
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "max_position_embeddings": 8192,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
    "time_step_limit": [0.0, math.inf],
    "use_conv_bias": True,
    "vocab_size": 131072,
}


@pytest.fixture
def read(tmp_path):
    def read(fields: dict, **changes) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps({**fields, **changes}))
        return read_config(tmp_path)

    return read


def test_qwen3_next_has_three_delta_nets_for_each_attention(read):
    config = read(QWEN3_NEXT)
    assert config.layer_kinds == ((GATED_DELTA_NET,) * 3 + (ATTENTION,)) * 2
    layout = config.state_layout
    assert (layout.num_units, layout.parts, layout.copies) == (16, (128, 128, 256), (1, 1, 1))
    assert 16 * layout.unit_size == 3 * 8192 + 32 * 128 * 128
    assert config.ropes == (Rope(1e7, 64),)
    assert (config.output_gate, config.qk_norm, config.norm_offset) == (True, True, 1.0)
    sizes = {"num_experts": 512, "num_per_token": 10, "intermediate_size": 512}
    shared = {"shared_size": 512, "shared_gate": True}
    assert config.experts == Experts(**sizes, normalize=True, **shared)


def test_qwen3_5_is_read_from_its_text_part(read):
    config = read(QWEN3_5_MOE)
    assert config.layer_kinds == (GATED_DELTA_NET,) * 3 + (ATTENTION,)
    assert config.ropes == (Rope(1e7, 64),)
    assert config.experts is not None
    assert (config.experts.normalize, config.experts.shared_gate) == (True, True)


def test_lfm2_names_its_layers_with_attention(read):
    config = read(LFM2)
    assert config.layer_kinds == (SHORT_CONVOLUTION, SHORT_CONVOLUTION, ATTENTION)
    assert (config.intermediate_size, config.rms_norm_eps) == (8192, 1e-5)
    layout = config.state_layout
    assert layout.num_units * layout.unit_size == 2 * 2048
    assert config.tie_word_embeddings


def test_falcon_h1_has_both_in_every_layer(read):
    config = read(FALCON_H1)
    assert config.layer_kinds == (MAMBA2,) * 2
    assert config.attends(0)
    layout = config.state_layout  # keys and queries of all heads, and those of a part
    parts, copies = (256, 256, 3072 // layout.num_units), (layout.num_units, layout.num_units, 1)
    assert (layout.parts, layout.copies) == (parts, copies)
    assert layout.num_units * layout.num_heads == 48
    assert dict(config.weight_scales)["self_attn.k_proj"] == 0.5
    assert config.recurrent is not None
    assert config.recurrent.scales == (0.3125, 0.3125, 0.15625, 0.625, 0.375)


def test_kimi_linear_counts_its_layers_from_one(read):
    config = read(KIMI_LINEAR)
    assert config.layer_kinds == (KIMI_DELTA_ATTENTION,) * 3 + (ATTENTION, KIMI_DELTA_ATTENTION)
    assert [config.rope(layer) for layer in range(5)] == [None] * 5
    assert config.max_position_embeddings == 1048576
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.first_layer) == (256, 1)
    assert not config.attends(0)
    assert config.attends(3)


@pytest.mark.parametrize(
    ("fields", "changes", "told"),
    [
        (QWEN3_NEXT, {"linear_num_key_heads": 5}, "32 linear_num_value_heads over 5"),
        (QWEN3_NEXT, {"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim is 9; 2 to 8"),
        (QWEN3_NEXT, {"attention_bias": True}, "attention_bias True"),
        (QWEN3_NEXT, {"attn_output_gate": False}, "attn_output_gate false"),
        (QWEN3_NEXT, {"layer_types": ["sliding_attention"] * 8}, "layer_types sliding_attention"),
        (LFM2, {"layer_types": ["conv"]}, "layer_types of 1 layers"),
        (FALCON_H1, {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "norm_before_gate"),
        (FALCON_H1, {"time_step_limit": [0.001, 0.1]}, "time_step_limit 0.001 to 0.1"),
        (FALCON_H1, {"mamba_n_heads": 47}, "mamba_d_ssm 3072 in 47 heads"),
        (FALCON_H1, {"ssm_multipliers": [1.0]}, "ssm_multipliers is 1 numbers"),
        (KIMI_LINEAR, {"mla_use_nope": False}, "mla_use_nope False"),
        (NEMOTRON_H, {"hybrid_override_pattern": "M-X"}, "a layer that is 'X'"),
        (NEMOTRON_H, {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'"),
        (NEMOTRON_H, {"moe_latent_size": 1024}, "moe_latent_size 1024"),
        (NEMOTRON_H, {"n_groups": 7}, "128 Mamba heads in 7 groups"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_would_change_the_result_is_refused_by_name(read, fields, changes, told):
    with pytest.raises(ModelError, match=told):
        read(fields, **changes)


def test_nemotron_h_has_one_block_a_layer(read):
    config = read(NEMOTRON_H)
    assert config.layer_kinds == (MAMBA2, MLP, MAMBA2, ATTENTION, MLP)
    assert config.kv_groups() == ((0, (3,)),)
    assert config.recurrent_layers == [0, 2]
    assert [config.has_mlp(layer) for layer in range(5)] == [False, True, False, False, True]
    assert (config.head_dim, config.rope(3), config.is_gated) == (128, None, False)
    mixer = 4096 * (18560 + 8192) + 4 * 10240 + 2 * 128 + 8192  # Mamba 2 has so many
    attention, mlp = 2 * 4096 * 128 * (32 + 8), 2 * 4096 * 21504
    rest = 6 * 4096 + 2 * 131072 * 4096
    assert config.num_parameters == 2 * mixer + attention + 2 * mlp + rest


def test_ranks_of_layers_of_one_block_are_refused_by_name(read):
    with pytest.raises(ModelError, match=r"layers of one block \(mamba2\); possible: 1"):
        check_divides(read(NEMOTRON_H), 2)


@pytest.mark.parametrize(
    ("published", "sizes"),
    [
        (QWEN3_NEXT, "1, 2, 4, 8, 16"),
        (QWEN3_5_MOE, "1, 2, 4, 8, 16"),
        (LFM2, "1, 2, 4, 8, 16, 32"),
        (FALCON_H1, "1, 2, 4, 8"),
        (KIMI_LINEAR, "1, 2, 4, 8, 16, 32"),
    ],
)
def test_published_models_are_divided_among_these_many_ranks(read, published, sizes):
    config = read(published)
    with pytest.raises(ModelError, match=f"; possible: {sizes}$"):
        check_divides(config, 5)
    for size in map(int, sizes.split(",")):
        check_divides(config, size)
        assert config.num_state_units % size == 0


def test_sizes_that_do_not_divide_recurrent_layers_are_refused_by_name(read):
    model = read(QWEN3_NEXT, num_attention_heads=24, intermediate_size=5376)
    model = replace(model, experts=None)
    with pytest.raises(
        ModelError, match=r"= 3 .* heads of recurrent layers \(32\); possible: 1, 2,"
    ):
        check_divides(model, 3)
    model = replace(model, recurrent=replace(model.recurrent, num_heads=48))
    with pytest.raises(ModelError, match=r"= 6 .* key heads of recurrent layers \(16\); possible:"):
        check_divides(model, 6)
    mamba = read(FALCON_H1, num_attention_heads=12, mamba_n_groups=2, intermediate_size=4608)
    with pytest.raises(ModelError, match=r"= 3 .* KV heads \(2\); possible: 1, 2, 4"):
        check_divides(mamba, 3)
    three = replace(mamba, num_kv_heads=3)
    with pytest.raises(
        ModelError, match=r"= 3 .* groups of recurrent layers \(2\); possible: 1, 6"
    ):
        check_divides(three, 3)
