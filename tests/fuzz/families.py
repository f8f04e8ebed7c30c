"""`python -m tests.fuzz.families`: configurations of each model family, drawn by a seed, against
transformers.

A configuration is drawn from what the family's files may state: heads and their sizes, rotary
embeddings, windows, biases, tied embeddings, norms' epsilon, soft caps, experts and how they are
chosen, states. What a key is by default counts too: any key may be left out. A tiny checkpoint with
random weights has to give the logits of transformers, in float32, at three positions of a prompt
that comes in three chunks, by the kernels of the CPU and by torch, or be refused by name.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers

from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.cpu.kernels import KernelsUnavailable
from kvrelay.engine.model.errors import ModelError
from tests.engine.model import tiny

TOLERANCE = 1e-4
PROMPT = tiny.tokens_of(61, seed=1)
CHUNKS = (PROMPT[:37], PROMPT[37:38], PROMPT[38:])
LAST = (36, 37, 60)  # positions that logits are compared at
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
Fields = dict[str, Any]


class Draw:
    """Draws the values of one configuration."""

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)

    def one(self, *values: Any) -> Any:
        return self.random.choice(values)

    def some(self, **choices: Sequence[Any]) -> Fields:
        """Each of the keys, or not."""
        drawn = {key: self.random.choice(values) for key, values in choices.items()}
        return {key: value for key, value in drawn.items() if self.random.random() < 0.6}

    def kinds(self, layers: int, *kinds: str) -> list[str]:
        """One for each layer; each kind comes."""
        rest = self.random.choices(kinds, k=max(0, layers - len(kinds)))
        drawn = [*kinds, *rest]
        self.random.shuffle(drawn)
        return drawn[:layers]


def shape(draw: Draw) -> Fields:
    heads, kv_heads = draw.one((6, 2), (4, 4), (4, 1), (8, 2))
    sizes = {"hidden_size": draw.one(48, 96, 128), "num_hidden_layers": draw.one(2, 3, 4)}
    sizes |= {"intermediate_size": draw.one(64, 160)}
    if sizes["hidden_size"] % heads:
        sizes["hidden_size"] = 96
    drawn = draw.some(rms_norm_eps=(1e-6, 1e-5, 1e-2), tie_word_embeddings=(True, False))
    heads_ = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {**tiny.SHAPE, **sizes, **heads_, **drawn}


def head_dim(draw: Draw, *dims: int) -> Fields:
    return draw.some(head_dim=dims or (16, 32))


def dim_of(fields: Fields, default: int = 0) -> int:
    return (
        fields.get("head_dim")
        or default
        or (fields["hidden_size"] // fields["num_attention_heads"])
    )


def rope(draw: Draw, dim: int, *kinds: str, partial: Sequence[float] = ()) -> Fields:
    """A rotary embedding, in either spelling, for heads of `dim`."""
    kind = draw.one(*(kinds or ("default", "linear", "llama3", "yarn", "dynamic")))
    spec: Fields = {"rope_type": kind}
    theta = draw.some(rope_theta=(1e4, 5e5))
    part = draw.some(partial_rotary_factor=partial) if partial else {}
    turned = int(dim * part.get("partial_rotary_factor", partial[0] if partial else 1.0))
    original = {"original_max_position_embeddings": 64}
    if kind in ("linear", "dynamic"):
        spec["factor"] = draw.one(2.0, 8.0)
    if kind == "llama3":
        spec |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original}
    if kind == "yarn":
        spec |= {"factor": draw.one(2.0, 8.0), **original}
        spec |= draw.some(beta_fast=(32.0, 16), beta_slow=(1.0, 2), truncate=(True, False))
        spec |= draw.one({}, {}, {"attention_factor": 1.2}, {"mscale": 0.7, "mscale_all_dim": 0.9})
    if kind == "longrope":
        lists = {"short_factor": 1.5, "long_factor": 4.0}
        spec |= {
            name: [draw.random.uniform(1, most) for _ in range(turned // 2)]
            for name, most in lists.items()
        }
        spec |= draw.some(attention_factor=(1.1,))
        part |= {"original_max_position_embeddings": draw.one(32, tiny.MAX_LEN)}
    if not theta and kind == "default" and not part:
        return {}
    if draw.one(True, False):
        return {"rope_parameters": {"rope_theta": 1e4, **spec, **theta}, **part}
    return {"rope_scaling": spec, "rope_theta": 1e4, **theta, **part}


def window(draw: Draw) -> Fields:
    return draw.some(sliding_window=(tiny.WINDOW, 7, None))


def experts(draw: Draw, number: str, *, groups: bool = False, shared: str = "") -> Fields:
    """number: the key that says how many there are."""
    drawn = {number: draw.one(8, 12), "num_experts_per_tok": draw.one(1, 2, 3)}
    drawn |= {"moe_intermediate_size": draw.one(32, 48)}
    drawn |= draw.some(norm_topk_prob=(True, False))
    if groups:
        drawn |= draw.some(routed_scaling_factor=(1.7, 1.0))
        drawn |= draw.one({"n_group": 1, "topk_group": 1}, {"n_group": 4, "topk_group": 2})
        if drawn["num_experts_per_tok"] == 1:
            drawn["num_experts_per_tok"] = 2
    if shared:
        drawn |= draw.some(**{shared: (1, 2)})
    return drawn


def latent(draw: Draw) -> Fields:
    dims = {"kv_lora_rank": draw.one(32, 48), "qk_nope_head_dim": draw.one(16, 24)}
    dims |= {"qk_rope_head_dim": draw.one(8, 16), "v_head_dim": draw.one(16, 24)}
    return {**dims, "q_lora_rank": draw.one(32, 48, None)}


def llama(draw: Draw) -> Fields:
    made = shape(draw) | head_dim(draw) | draw.some(attention_bias=(True, False))
    made |= draw.some(hidden_act=("silu", "gelu_pytorch_tanh"))
    return made | rope(draw, dim_of(made))


def mistral(draw: Draw) -> Fields:
    made = shape(draw) | head_dim(draw)
    return made | window(draw) | rope(draw, dim_of(made))


def switched_window(draw: Draw, layers: int) -> Fields:
    made = {"use_sliding_window": draw.one(True, False), "sliding_window": tiny.WINDOW}
    made |= draw.one({"max_window_layers": 1}, {"layer_types": draw.kinds(layers, FULL, SLIDING)})
    return draw.one({}, made)


def qwen2(draw: Draw) -> Fields:
    made = shape(draw)
    made |= switched_window(draw, made["num_hidden_layers"])
    return made | rope(draw, dim_of(made))


def qwen3(draw: Draw) -> Fields:
    made = shape(draw) | head_dim(draw) | draw.some(attention_bias=(True, False))
    made |= switched_window(draw, made["num_hidden_layers"])
    return made | rope(draw, dim_of(made, 128))


def smollm3(draw: Draw) -> Fields:
    made = shape(draw) | draw.some(attention_bias=(True, False))
    layers = made["num_hidden_layers"]
    made |= draw.one(
        {"no_rope_layer_interval": 2},
        {"no_rope_layers": [draw.one(0, 1) for _ in range(layers)]},
        {},
    )
    if draw.one(True, False):
        made |= {"use_sliding_window": True, "sliding_window": tiny.WINDOW}
    return {"pad_token_id": 0, **made, **rope(draw, dim_of(made))}


def phi3(draw: Draw) -> Fields:
    made = shape(draw) | window(draw)
    dim, parts = dim_of(made), (1.0, 0.5) if dim_of(made) % 4 == 0 else (1.0,)
    kinds = ("default", "longrope", "longrope")
    return {"pad_token_id": 0, **made, **rope(draw, dim, *kinds, partial=parts)}


def gemma2(draw: Draw) -> Fields:
    made = shape(draw) | {"head_dim": draw.one(16, 32), "sliding_window": tiny.WINDOW}
    made |= draw.some(
        query_pre_attn_scalar=(24, 64),
        attn_logit_softcapping=(5.0, None),
        final_logit_softcapping=(7.0, None),
        attention_bias=(True, False),
    )
    return made | rope(draw, dim_of(made), "default", "linear", "yarn")


def gemma3(draw: Draw) -> Fields:
    made = shape(draw) | {"head_dim": draw.one(16, 32), "sliding_window": tiny.WINDOW}
    made |= draw.some(
        query_pre_attn_scalar=(24, 64),
        final_logit_softcapping=(7.0, None),
        attention_bias=(True, False),
    )
    layers = made["num_hidden_layers"]
    kinds = {"layer_types": draw.kinds(layers, FULL, SLIDING)}
    made |= draw.one({"sliding_window_pattern": 2}, kinds, {})
    far = {"rope_type": "default", **draw.some(rope_theta=(1e6, 1e5))}
    if draw.one(True, False):
        far |= {"rope_type": "linear", "factor": 8.0}
    newer = {FULL: {"rope_theta": 1e6, **far}, SLIDING: {"rope_type": "default", "rope_theta": 2e4}}
    older = {"rope_theta": far.pop("rope_theta", 1e6), **draw.some(rope_local_base_freq=(2e4,))}
    older |= {"rope_scaling": far} if far["rope_type"] == "linear" else {}
    return made | draw.one({"rope_parameters": newer}, older, {})


def gemma4(draw: Draw) -> Fields:
    made = shape(draw) | {"head_dim": 32, "global_head_dim": draw.one(32, 64)}
    made |= {key: tiny.GEMMA4[key] for key in ("output_hidden_states", "pad_token_id")}
    made |= {"sliding_window": tiny.WINDOW, "vocab_size_per_layer_input": tiny.VOCAB}
    layers = draw.one(4, 6)
    kinds = [*draw.kinds(layers - 2, FULL, SLIDING), SLIDING, FULL]
    made |= {"num_hidden_layers": layers, "layer_types": kinds}
    made |= {"num_kv_shared_layers": draw.one(0, 2)}
    made |= {"hidden_size_per_layer_input": draw.one(0, 16)}
    made |= draw.some(final_logit_softcapping=(7.0, None), use_double_wide_mlp=(True, False))
    if made["num_attention_heads"] == 8 and draw.one(True, False):
        made |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    if draw.one(True, False):
        sizes = {"num_experts": 8, "top_k_experts": draw.one(1, 3), "moe_intermediate_size": 32}
        made |= {"enable_moe_block": True, **sizes}
    if draw.one(True, False):
        far = {"rope_type": "proportional", "partial_rotary_factor": draw.one(0.25, 0.5)}
        near = {"rope_type": "default", "rope_theta": 2e4}
        made["rope_parameters"] = {FULL: {**far, "rope_theta": 1e5}, SLIDING: near}
    return made


def mixtral(draw: Draw) -> Fields:
    made = shape(draw) | {"head_dim": draw.one(16, 32)} | window(draw)
    made |= {"num_local_experts": draw.one(4, 6), "num_experts_per_tok": draw.one(1, 2, 3)}
    return made | rope(draw, dim_of(made))


def qwen3_moe(draw: Draw) -> Fields:
    made = shape(draw) | head_dim(draw) | experts(draw, "num_experts")
    made |= draw.some(attention_bias=(True, False), mlp_only_layers=([], [0]))
    if draw.one(True, False):
        made |= {"use_sliding_window": True, "sliding_window": tiny.WINDOW}
    return made | rope(draw, dim_of(made))


def with_latent(draw: Draw, *kinds: str) -> Fields:
    made = shape(draw) | latent(draw)
    made |= {"num_key_value_heads": made["num_attention_heads"]}
    made |= experts(draw, "n_routed_experts", groups=True, shared="n_shared_experts")
    made |= draw.some(first_k_dense_replace=(0, 1))
    return made | rope(draw, made["qk_rope_head_dim"], *(kinds or ("default", "yarn", "yarn")))


def deepseek2(draw: Draw) -> Fields:
    made = with_latent(draw)
    made.pop("norm_topk_prob", None)
    return made | draw.some(topk_method=("greedy", "group_limited_greedy"))


def deepseek3(draw: Draw) -> Fields:
    return with_latent(draw) | draw.some(rope_interleave=(True, False))


def kimi_k25(draw: Draw) -> Fields:
    return deepseek3(draw) | {"q_lora_rank": 48}  # without, transformers saves other tensors


def glm4_moe(draw: Draw) -> Fields:
    made = shape(draw) | {"head_dim": draw.one(16, 32)}
    made |= experts(draw, "n_routed_experts", groups=True, shared="n_shared_experts")
    made |= draw.some(
        first_k_dense_replace=(0, 1), attention_bias=(True, False), use_qk_norm=(True, False)
    )
    return made | rope(draw, dim_of(made), "default", "linear", "yarn", partial=(0.5, 0.25, 1.0))


def glm4_moe_lite(draw: Draw) -> Fields:
    made = with_latent(draw)
    dense = made.pop("first_k_dense_replace", 1)
    sparse = made["num_hidden_layers"] - dense
    made["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * sparse
    return made | draw.some(rope_interleave=(True, False))


def gpt_oss(draw: Draw) -> Fields:
    made = shape(draw) | {"head_dim": draw.one(16, 32), "num_local_experts": draw.one(4, 8)}
    made |= {"num_experts_per_tok": draw.one(1, 2, 3), "sliding_window": tiny.WINDOW}
    made |= draw.some(
        attention_bias=(True, False),
        layer_types=(draw.kinds(made["num_hidden_layers"], FULL, SLIDING),),
    )
    made.pop("tie_word_embeddings", None)
    return made | rope(draw, dim_of(made), "default", "yarn", "yarn")


def llama4(draw: Draw) -> Fields:
    made = tiny.LLAMA4 | shape(draw) | {"head_dim": draw.one(16, 32)}
    made |= draw.some(
        use_qk_norm=(True, False),
        attn_temperature_tuning=(True, False),
        interleave_moe_layer_step=(1, 2),
        attn_scale=(0.1, 0.4),
        floor_scale=(8, 16),
    )
    return made | rope(draw, dim_of(made), "default", "llama3")


def mimo_v2(draw: Draw) -> Fields:
    _, own = tiny.FAMILIES["mimo-v2"]
    made = shape(draw) | {"num_attention_heads": 8, "num_key_value_heads": draw.one(1, 2)}
    made |= (
        own | experts(draw, "n_routed_experts") | {"head_dim": 32, "v_head_dim": draw.one(16, 24)}
    )
    layers = made["num_hidden_layers"]
    made["layer_types"] = draw.kinds(layers, FULL, SLIDING)
    dense = draw.one(0, 1)
    made["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    return made | draw.some(attention_value_scale=(0.707, 1.3), sliding_window=(tiny.WINDOW, 7))


def minimax_m2(draw: Draw) -> Fields:
    made = shape(draw) | {"head_dim": 32, "num_local_experts": 8}
    made |= {"num_experts_per_tok": draw.one(1, 2, 3)} | draw.some(rotary_dim=(16, 32))
    return made | draw.some(rope_theta=(1e4, 5e6))


def growth(draw: Draw, dim: int) -> Fields:
    made = tiny.GROWTH["rope_parameters"]
    made = made | draw.some(llama_4_scaling_beta=(0.3,), factor=(4.0,), beta_fast=(16.0,))
    return {"rope_parameters": made}


def ministral3(draw: Draw) -> Fields:
    made = shape(draw) | {"head_dim": draw.one(16, 32)} | window(draw)
    return made | growth(draw, dim_of(made))


def mistral4(draw: Draw) -> Fields:
    made = with_latent(draw, "default") | {"n_group": 1, "topk_group": 1}
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        made.pop(key, None)
    return made | growth(draw, 0) | draw.some(rope_interleave=(True, False))


def seed_oss(draw: Draw) -> Fields:
    made = shape(draw) | {"head_dim": draw.one(16, 32)}
    made |= draw.some(attention_bias=(True, False), attention_out_bias=(True, False))
    return made | rope(draw, dim_of(made), "default", "linear", "yarn", "dynamic")


def falcon_h1(draw: Draw) -> Fields:
    made = shape(draw) | head_dim(draw) | dict(tiny.MAMBA)
    made |= draw.some(
        mamba_rms_norm=(True, False),
        mamba_conv_bias=(True, False),
        mamba_d_conv=(2, 3, 4),
        key_multiplier=(0.5, 2.0),
        embedding_multiplier=(0.5, 3.0),
    )
    made["mamba_n_groups"] = 1 if made.get("mamba_rms_norm") else draw.one(1, 2)
    return made | rope(draw, dim_of(made), "default", "linear")


def kimi_linear(draw: Draw) -> Fields:
    _, own = tiny.HYBRID["kimi-linear"]
    made = shape(draw)
    made |= own | draw.some(rms_norm_eps=(1e-2, 1e-5)) | latent(draw) | {"q_lora_rank": None}
    made |= {"num_key_value_heads": made["num_attention_heads"]}
    made["layer_types"] = draw.kinds(made["num_hidden_layers"], LINEAR, FULL)
    return made | draw.some(routed_scaling_factor=(1.7,), num_shared_experts=(1, 2))


def lfm2(draw: Draw) -> Fields:
    made = shape(draw) | draw.some(
        conv_bias=(True, False), conv_L_cache=(2, 4), norm_eps=(1e-2, 1e-6)
    )
    made.pop("rms_norm_eps", None)
    made |= draw.one({"block_auto_adjust_ff_dim": False}, {"block_multiple_of": 32})
    made["layer_types"] = draw.kinds(made["num_hidden_layers"], "conv", FULL)
    return made | draw.some(rope_theta=(1e4, 1e6))


def nemotron_h(draw: Draw) -> Fields:
    _, own = tiny.HYBRID["nemotron-h"]
    kinds = draw.kinds(draw.one(4, 5, 6), LINEAR, "moe", FULL, "mlp")
    made = shape(draw) | own | {"layers_block_type": kinds, "num_hidden_layers": len(kinds)}
    made.pop("rms_norm_eps", None)
    return made | draw.some(
        use_conv_bias=(True, False),
        norm_topk_prob=(True, False),
        n_groups=(1, 2, 4),
        layer_norm_epsilon=(1e-2, 1e-5),
    )


def delta(draw: Draw) -> Fields:
    made = shape(draw) | {"head_dim": draw.one(32, 64)} | dict(tiny.DELTA)
    made["layer_types"] = draw.kinds(made["num_hidden_layers"], LINEAR, FULL)
    made |= {"linear_num_key_heads": draw.one(1, 2), "linear_key_head_dim": draw.one(16, 24)}
    made |= draw.some(linear_conv_kernel_dim=(2, 3, 4))
    spec = {"rope_type": "default", "rope_theta": draw.one(1e4, 1e6)}
    spec |= draw.some(partial_rotary_factor=(0.25, 0.5))
    return made | draw.one({}, {"rope_parameters": spec})


def delta_moe(draw: Draw) -> Fields:
    made = delta(draw) | experts(draw, "num_experts")
    return made | {"shared_expert_intermediate_size": draw.one(32, 48)}


def granite(draw: Draw) -> Fields:
    made = llama(draw) | draw.some(
        embedding_multiplier=(0.5, 12.0),
        residual_multiplier=(0.22, 1.5),
        logits_scaling=(0.5, 8.0),
    )
    made.pop("head_dim", None)
    return made | {"attention_multiplier": draw.one(0.1, 0.3)}


def glm(draw: Draw) -> Fields:
    made = shape(draw) | {"head_dim": draw.one(16, 32), "pad_token_id": 0}
    made |= draw.some(attention_bias=(True, False))
    return made | rope(draw, dim_of(made), "default", "linear", partial=(0.5, 0.25, 1.0))


def qwen2_moe(draw: Draw) -> Fields:
    made = shape(draw) | experts(draw, "num_experts")
    made |= {"shared_expert_intermediate_size": draw.one(32, 48)}
    made |= draw.some(qkv_bias=(True, False), mlp_only_layers=([], [0]))
    return made | rope(draw, dim_of(made))


def lfm2_moe(draw: Draw) -> Fields:
    made = lfm2(draw) | experts(draw, "num_experts")
    for key in ("block_auto_adjust_ff_dim", "block_multiple_of"):
        made.pop(key, None)
    made |= draw.some(use_expert_bias=(True, False), routed_scaling_factor=(1.7,))
    return made | {"num_dense_layers": draw.one(0, 1)}


def qwen2_vl(draw: Draw) -> Fields:
    made = shape(draw) | {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    spec = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": draw.one(1e4, 1e6)}
    return made | draw.one({"rope_parameters": spec}, {"rope_parameters": {**spec, "factor": 1.0}})


def qwen3_vl(draw: Draw) -> Fields:
    made = qwen2_vl(draw) | draw.some(attention_bias=(True, False), head_dim=(16, 32))
    made["rope_parameters"]["mrope_section"] = [dim_of(made, 128) // 2 - 6, 3, 3]
    return made


def qwen3_vl_moe(draw: Draw) -> Fields:
    made = qwen3_vl(draw) | experts(draw, "num_experts")
    return made | draw.some(mlp_only_layers=([], [0]))


T: Any = transformers
FAMILIES: dict[str, tuple[Any, Callable[[Draw], Fields]]] = {
    "llama": (T.LlamaConfig, llama),
    "mistral": (T.MistralConfig, mistral),
    "qwen2": (T.Qwen2Config, qwen2),
    "qwen3": (T.Qwen3Config, qwen3),
    "smollm3": (T.SmolLM3Config, smollm3),
    "phi3": (T.Phi3Config, phi3),
    "gemma2": (T.Gemma2Config, gemma2),
    "gemma3": (T.Gemma3TextConfig, gemma3),
    "gemma4": (T.Gemma4TextConfig, gemma4),
    "mixtral": (T.MixtralConfig, mixtral),
    "qwen3-moe": (T.Qwen3MoeConfig, qwen3_moe),
    "deepseek2": (T.DeepseekV2Config, deepseek2),
    "deepseek3": (T.DeepseekV3Config, deepseek3),
    "kimi-k25": (T.Kimi_K25Config, kimi_k25),
    "glm4-moe": (T.Glm4MoeConfig, glm4_moe),
    "glm4-moe-lite": (T.Glm4MoeLiteConfig, glm4_moe_lite),
    "gpt-oss": (T.GptOssConfig, gpt_oss),
    "llama4": (T.Llama4TextConfig, llama4),
    "mimo-v2": (T.MiMoV2FlashConfig, mimo_v2),
    "minimax-m2": (T.MiniMaxM2Config, minimax_m2),
    "ministral3": (T.Ministral3Config, ministral3),
    "mistral4": (T.Mistral4Config, mistral4),
    "seed-oss": (T.SeedOssConfig, seed_oss),
    "granite": (T.GraniteConfig, granite),
    "glm": (T.GlmConfig, glm),
    "glm4": (T.Glm4Config, glm),
    "qwen2-moe": (T.Qwen2MoeConfig, qwen2_moe),
    "qwen2-vl": (T.Qwen2VLConfig, qwen2_vl),
    "qwen2.5-vl": (T.Qwen2_5_VLConfig, qwen2_vl),
    "qwen3-vl": (T.Qwen3VLConfig, qwen3_vl),
    "qwen3-vl-moe": (T.Qwen3VLMoeConfig, qwen3_vl_moe),
    "lfm2-moe": (T.Lfm2MoeConfig, lfm2_moe),
    "falcon-h1": (T.FalconH1Config, falcon_h1),
    "kimi-linear": (T.KimiLinearConfig, kimi_linear),
    "lfm2": (T.Lfm2Config, lfm2),
    "nemotron-h": (T.NemotronHConfig, nemotron_h),
    "qwen3-next": (T.Qwen3NextConfig, delta_moe),
    "qwen3.5": (T.Qwen3_5TextConfig, delta),
    "qwen3.5-moe": (T.Qwen3_5MoeTextConfig, delta_moe),
}


@dataclass(slots=True)
class Outcome:
    compared: int = 0
    worst: float = 0.0  # difference of a logit
    refused: Counter[str] = field(default_factory=Counter)
    impossible: Counter[str] = field(default_factory=Counter)  # to transformers
    different: list[str] = field(default_factory=list)


def fields_of(family: str, seed: int) -> Fields:
    return FAMILIES[family][1](Draw(f"{family} {seed}"))


def expected(model: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model.to(dtype)(torch.tensor([PROMPT])).logits[0, list(LAST)]
    return logits.double()


def own_error(model: torch.nn.Module, logits: torch.Tensor) -> float:
    """By how much transformers differs from itself with its experts one by one, in float64."""
    model.set_experts_implementation("eager")
    exact = expected(model, torch.float64)
    model.to(torch.float32)
    return float((exact - logits).abs().max())


def got(path: Path, kind: str) -> torch.Tensor:
    driver = tiny.Driver(path, kind, threads=1)
    return torch.stack([driver.feed(("a", chunk))[0] for chunk in CHUNKS]).double()


def compare(family: str, seed: int, into: Outcome) -> None:
    """Draws configuration `seed` of `family` and notes what became of it."""
    kind, _ = FAMILIES[family]
    # As a file is published, or as transformers writes it, with all defaults.
    compare_fields(kind, fields_of(family, seed), into, bool(seed % 2), str(seed))


def compare_fields(
    kind: Any, fields: Fields, into: Outcome, as_given: bool = True, name: str = ""
) -> None:
    """kind: transformers' configuration. as_given: config.json has these fields alone. `name`: what
    it is called where it differs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            model = tiny.write_checkpoint(kind, fields, path)
            wanted = expected(model, torch.float32)
        except Exception as error:  # whatever a configuration does to transformers
            into.impossible[f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"] += 1
            return
        if as_given and kind not in tiny.PARTS:
            named = {"architectures": [type(model).__name__], "model_type": kind.model_type}
            (path / "config.json").write_text(json.dumps({**fields, **named}))
        try:
            read_config(path)
        except ModelError as error:
            into.refused[str(error).replace(folder, "")[:100]] += 1
            return
        into.compared += 1
        for ops in ("cpu", "torch"):
            try:
                worst = float((got(path, ops) - wanted).abs().max())
            except KernelsUnavailable:
                continue
            except Exception as error:
                into.different.append(f"{name} {ops}: {type(error).__name__}: {error}\n  {fields}")
                continue
            # Where a choice of experts hangs on rounding, transformers differs from itself.
            if not worst <= TOLERANCE:
                own = own_error(model, wanted)
                if own > TOLERANCE / 4:
                    into.impossible[f"transformers differs from itself in float64: {own:.0e}"] += 1
                    continue
                into.different.append(f"{name} {ops}: {worst:.1e} (own {own:.0e})\n  {fields}")
            into.worst = max(into.worst, worst)


Compare = Callable[[str, int, Outcome], object]  # one configuration of a family, by its number


def fuzz(family: str, count: int, seed: int, compare: Compare = compare) -> Outcome:
    """`count` configurations from number `seed` on."""
    outcome = Outcome()
    for number in range(seed, seed + count):
        compare(family, number, outcome)
    return outcome


def lines_of(family: str, outcome: Outcome, took_s: float) -> Iterator[str]:
    numbers = f"{outcome.compared} compared, {len(outcome.different)} different"
    yield f"{family}: {numbers}, largest {outcome.worst:.0e}, {took_s:.0f} s"
    for what, counted in (("refused", outcome.refused), ("not compared", outcome.impossible)):
        for reason, times in counted.most_common():
            yield f"  {what} {times}: {reason}"
    yield from (f"  DIFFERENT {each}" for each in outcome.different)


def main(
    families: Collection[str] = FAMILIES, compare: Compare = compare, about: str = __doc__ or ""
) -> None:
    parser = argparse.ArgumentParser(description=about.split("\n\n")[0])
    parser.add_argument("--family", action="append", choices=sorted(families))
    parser.add_argument("--count", type=int, default=200, help="configurations of each family")
    parser.add_argument("--seed", type=int, default=0, help="number of the first one")
    options = parser.parse_args()
    is_wrong = False
    for family in options.family or families:
        began = time.monotonic()
        outcome = fuzz(family, options.count, options.seed, compare)
        for line in lines_of(family, outcome, time.monotonic() - began):
            print(line, flush=True)
        is_wrong |= bool(outcome.different) or not outcome.compared
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
