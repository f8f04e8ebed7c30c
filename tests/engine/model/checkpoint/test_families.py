"""config.json of every family, in the spelling of the files that are published."""

import json
import math

import pytest

from kvrelay.engine.model.checkpoint.families import FAMILIES, read_config
from kvrelay.engine.model.checkpoint.quantized_config import quantization_of
from kvrelay.engine.model.config import Experts, Latent, ModelConfig, Rope, RopeScaling
from kvrelay.engine.model.errors import ModelError

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
MISTRAL, QWEN2, QWEN3 = "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
GEMMA2, GEMMA3, PHI3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM"
GEMMA4 = "Gemma4ForCausalLM"
DEEPSEEK2, DEEPSEEK3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
GLM_LITE, MINIMAX, MISTRAL4 = (
    f"{name}ForCausalLM" for name in ("Glm4MoeLite", "MiniMaxM2", "Mistral4")
)
LLAMA4, MIMO = "Llama4ForCausalLM", "MiMoV2FlashForCausalLM"
QWEN3_MOE, SMOLLM3 = "Qwen3MoeForCausalLM", "SmolLM3ForCausalLM"


@pytest.fixture
def read(tmp_path):
    def read(architecture: str, **changes) -> ModelConfig:
        fields = {"architectures": [architecture], **BASE, **changes}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return read_config(tmp_path)

    return read


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (4096,) * 4),  # what transformers takes where the file states none
        ({"sliding_window": None}, ()),
        ({"sliding_window": 1024}, (1024,) * 4),
        ({"sliding_window": 32768}, ()),
    ],
    ids=str,
)
def test_mistral_has_one_window_for_all_layers(read, changes, windows):
    assert read(MISTRAL, **changes).windows == windows


@pytest.mark.parametrize("architecture", [QWEN2, QWEN3])
def test_qwens_windows_need_a_switch_and_start_at_a_layer(read, architecture):
    window = {"sliding_window": 1024, "max_window_layers": 3}
    assert read(architecture, **window).windows == ()
    config = read(architecture, **window, use_sliding_window=True)
    assert config.windows == (0, 0, 0, 1024)
    assert config.max_window == 0
    kinds = ["sliding_attention", "full_attention"] * 2
    config = read(architecture, **window, use_sliding_window=True, layer_types=kinds)
    assert config.windows == (1024, 0, 1024, 0)


def test_qwen3_moe_reads_either_name_of_the_number_of_experts(read):
    stated = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    for name in ("num_experts", "num_local_experts"):
        config = read(QWEN3_MOE, **stated, **{name: 8}, mlp_only_layers=[0, 1], head_dim=16)
        assert config.experts == Experts(8, 2, 24, normalize=True, first_layer=2)
    assert config.qk_norm
    assert not config.attention_bias


def test_smollm3_leaves_out_rotation_in_the_layers_that_it_names(read):
    config = read(SMOLLM3, rope_theta=5e6)
    assert config.layer_ropes == (0, 0, 0, -1)
    assert config.tie_word_embeddings
    assert (config.rope(0), config.rope(3)) == (Rope(5e6, 16), None)
    assert read(SMOLLM3, no_rope_layers=[0, 1, 1, 0]).layer_ropes == (-1, 0, 0, -1)
    assert read(SMOLLM3, no_rope_layers=[1] * 4).layer_ropes == ()


@pytest.mark.parametrize("kind", ["su", "longrope", "yarn"])
def test_phi3s_long_factors_are_recognized_by_any_of_their_names(read, kind):
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    config = read(
        PHI3,
        rope_scaling={"type": kind, **factors},
        original_max_position_embeddings=4096,
        partial_rotary_factor=0.75,
        sliding_window=262144,
    )
    spread = math.sqrt(1 + math.log(8) / math.log(4096))
    scaling = config.ropes[0].scaling
    assert config.ropes[0].dim == 12
    assert scaling == RopeScaling(
        "longrope",
        8.0,
        original_max_position=4096,
        short_factors=(1.0,) * 6,
        long_factors=(2.0,) * 6,
        attention_factor=spread,
    )
    assert scaling.is_long(4097)
    assert not scaling.is_long(4096)
    assert config.windows == ()


def test_longrope_makes_the_digest_depend_on_the_length_that_is_served(read, tmp_path):
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = read(PHI3, rope_scaling=scaling, original_max_position_embeddings=4096)
    assert config.digest(tmp_path, 4096) != config.digest(tmp_path, 8192)
    assert config.digest(tmp_path, 8192) == config.digest(tmp_path)
    plain = read(PHI3)
    assert plain.digest(tmp_path, 4096) == plain.digest(tmp_path, 8192)


def test_gemma2_alternates_windows_and_caps_its_scores(read):
    config = read(GEMMA2, hidden_act="gelu_pytorch_tanh", query_pre_attn_scalar=144)
    assert config.windows == (4096, 0, 4096, 0)
    assert (config.attention_softcap, config.logits_softcap) == (50.0, 30.0)
    assert (config.attention_scale, config.embed_scale) == (1 / 12, 8.0)
    assert (config.head_dim, config.activation, config.norm_offset) == (256, "gelu_tanh", 1.0)
    assert config.sandwich_norms
    assert config.tie_word_embeddings
    config = read(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (config.attention_softcap, config.logits_softcap) == (0.0, 0.0)


@pytest.mark.parametrize(
    "spelled",
    [
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window_pattern": 2,
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ],
    ids=["older", "newer"],
)
def test_gemma3_has_a_rotation_for_near_and_one_for_far(read, spelled):
    for architecture in (GEMMA3, "Gemma3ForConditionalGeneration"):
        fields = {"sliding_window": 1024, "head_dim": 32, **spelled}
        if architecture != GEMMA3:
            fields = {"text_config": {**BASE, **fields}}
        config = read(architecture, **fields)
        assert config.ropes == (Rope(1e6, 32, RopeScaling("linear", 8.0)), Rope(2e4, 32))
        assert config.layer_ropes == (1, 0, 1, 0)
        assert config.windows == (1024, 0, 1024, 0)
        assert config.attention_softcap == 0.0
        assert config.qk_norm


def test_what_multimodal_gemma3_files_leave_out_is_known(read):
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = read("Gemma3ForConditionalGeneration", text_config=text, eos_token_id=[1, 106])
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_position_embeddings) == (262208, 131072)
    assert config.layer_ropes == ((1,) * 5 + (0,)) * 5 + (1,) * 4
    assert config.eos_token_ids == (1, 106)


def test_yarn_stretches_the_length_that_the_file_states(read):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = read(QWEN2, rope_scaling=scaling)
    assert config.max_position_embeddings == 131072
    assert config.ropes[0].scaling.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_deepseek_caches_one_latent_and_puts_mscale_into_the_scale(read):
    scaling = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    config = read(DEEPSEEK2, **LATENT, rope_scaling=scaling)
    assert config.latent == Latent(32, None, 16, 8, 16, scale=4.0)
    assert (config.num_kv_heads, config.head_dim) == (1, 40)
    assert config.kv_spec(16, "bfloat16").num_planes == 1
    mscale = 0.1 * 0.707 * math.log(40) + 1
    assert config.attention_scale == pytest.approx(24**-0.5 * mscale**2)
    assert config.ropes[0].scaling.attention_factor == 1.0
    assert config.max_position_embeddings == 163840
    assert config.experts == Experts(
        8, 2, 24, normalize=False, scale=2.5, shared_size=48, first_layer=1
    )


def test_deepseeks_choice_of_experts_by_groups(read):
    groups = {"n_group": 4, "topk_group": 2}
    experts = read(DEEPSEEK2, **LATENT, **groups).experts
    assert (experts.num_groups, experts.num_chosen_groups) == (1, 1), "greedy without a method"
    experts = read(DEEPSEEK2, **LATENT, **groups, topk_method="group_limited_greedy").experts
    assert (experts.num_groups, experts.num_chosen_groups) == (4, 2)
    config = read(DEEPSEEK3, **(LATENT | groups | {"q_lora_rank": 48}), rope_interleave=False)
    experts = config.experts
    assert (experts.scoring, experts.has_bias, experts.normalize) == ("sigmoid", True, True)
    assert (config.latent.q_rank, config.latent.interleaved) == (48, False)


@pytest.mark.parametrize(
    ("architecture", "changes", "told"),
    [
        (MISTRAL, {"sliding_window": -5}, "sliding_window is -5"),
        (QWEN2, {"layer_types": ["full_attention"]}, "layer_types of 1 layers for 4"),
        (QWEN2, {"layer_types": ["chunked"] * 4}, "layer_types chunked is not supported"),
        (QWEN2, {"rope_scaling": {"type": "mrope"}}, "rope scaling mrope is not supported"),
        (PHI3, {"partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2 rotates 3 of 16"),
        (
            PHI3,
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor is 1 numbers, a list of 8",
        ),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        (GEMMA2, {"hidden_activation": "gelu"}, "hidden_act gelu is not supported"),
        (QWEN3_MOE, {"num_experts": 8, "mlp_only_layers": [2]}, r"mlp_only_layers \[2\]"),
        (QWEN3_MOE, {"num_experts": 8, "decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        (QWEN3_MOE, {"num_experts": 4}, "8 of 4 experts in 1 of 1 groups is not possible"),
        (DEEPSEEK2, {**LATENT, "topk_method": "noaux_tc"}, "topk_method noaux_tc"),
        (DEEPSEEK2, {**LATENT, "norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        (DEEPSEEK2, {**LATENT, "attention_bias": True}, "attention_bias True is not supported"),
        (DEEPSEEK3, {**LATENT, "n_group": 3}, "2 of 8 experts in 4 of 3 groups"),
        (DEEPSEEK3, {**LATENT, "moe_layer_freq": 2}, "moe_layer_freq 2"),
        (MINIMAX, {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, only"),
        (MINIMAX, {"shared_intermediate_size": 64}, "shared_intermediate_size 64"),
        (GLM_LITE, {**LATENT, "mlp_layer_types": ["sparse", "dense"]}, "dense layers after sparse"),
        (MISTRAL4, {**LATENT, "n_group": 2}, "n_group 2 is not supported, only 1"),
        (LLAMA4, {"num_experts_per_tok": 2}, "num_experts_per_tok 2 is not supported, only 1"),
        (LLAMA4, {"moe_layers": [0, 2]}, r"moe_layers \[0, 2\], only \[0, 1, 2, 3\] is supported"),
        (LLAMA4, {"layer_types": ["full_attention"] * 4}, r"no_rope_layers \[1, 1, 1, 0\] do not"),
        (MIMO, {"swa_head_dim": 64}, "swa_head_dim 64 is not supported with head_dim 192"),
        (MIMO, {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias True"),
        (MIMO, {"hybrid_layer_pattern": [0, 1]}, "kinds of 2 layers for 4"),
        (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not"),
        (GEMMA4, {"num_kv_shared_layers": 3}, "num_kv_shared_layers 3 of 4 leaves a kind of"),
        (GEMMA4, {"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input 7 is not"),
        (GEMMA4, {"layer_types": ["chunked"] * 4}, "of 4 layers are not supported"),
        (
            GEMMA4,
            {
                "num_kv_shared_layers": 1,
                "use_double_wide_mlp": True,
                "enable_moe_block": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "use_double_wide_mlp with enable_moe_block is not supported",
        ),
        (
            "Mistral3ForConditionalGeneration",
            {"text_config": {"model_type": "llama"}},
            "text_config is of llama; supported: deepseek_v3, gemma3_text",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_family_cannot_have_is_refused_in_one_line(read, architecture, changes, told):
    with pytest.raises(ModelError, match=told) as error:
        read(architecture, **changes)
    assert "\n" not in str(error.value)


def test_a_part_of_a_model_has_the_ends_and_the_output_layer_of_the_whole(read):
    text = {**BASE, "model_type": "ministral3", "head_dim": 16, "eos_token_id": [7, 9]}
    config = read(
        "Mistral3ForConditionalGeneration",
        text_config={**text, "bos_token_id": 3, "tie_word_embeddings": False},
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    assert config.eos_token_ids == (2, 7, 9)
    assert config.bos_token_id == 3
    assert config.tie_word_embeddings


def test_a_part_may_be_quantized_by_itself(tmp_path):
    stated = {"quant_method": "gptq", "bits": 3}
    raw = {"text_config": {"quantization_config": stated}}
    found = quantization_of(tmp_path, raw)
    assert found is not None
    assert (found.method, found.groups[0].bits) == ("gptq", 3)


@pytest.mark.parametrize("is_flat", [True, False])
def test_texts_of_a_vision_model_rotate_by_one_position(read, is_flat):
    """Qwen2.5-VL's first files have all keys on one level."""
    scaling = {"type": "mrope", "mrope_section": [16, 24, 24]}
    text = {**BASE, "rope_theta": 1e6, "rope_scaling": scaling}
    fields = text if is_flat else {"text_config": {**text, "model_type": "qwen2_5_vl_text"}}
    config = read("Qwen2_5_VLForConditionalGeneration", model_type="qwen2_5_vl", **fields)
    assert config.ropes == (Rope(1e6, 16),)
    assert config.attention_bias
    assert config.windows == ()


def test_queries_grow_where_the_file_says_so(read):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = read("Ministral3ForCausalLM", rope_parameters=scaling)
    assert not config.changes_queries
    config = read("Ministral3ForCausalLM", rope_parameters={**scaling, "llama_4_scaling_beta": 0.1})
    assert (config.query_growth, config.query_growth_length) == (0.1, 1024)


def test_all_families_are_named_where_one_is_unknown(read):
    with pytest.raises(ModelError) as error:
        read("FalconForCausalLM")
    assert all(name in str(error.value) for name in FAMILIES)
