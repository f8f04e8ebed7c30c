"""Tiny checkpoints of transformers as GGUF files, as llama.cpp's converter writes them: its keys
and what it changes in tensors, by family. Names of tensors are those of the `gguf` package.

Nothing here is shared with the reader. Files of this writer were compared with those of llama.cpp's
own converter, key by key and tensor by tensor, but for those of MiMo-V2 and Llama 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

Fields = Mapping[str, Any]
Keys = dict[str, Any]
Named = Iterable[tuple[str, torch.Tensor]]
EXPERT = re.compile(r"(.*experts)\.(\d+)\.(.*)")


def fields_of(config: Any) -> dict[str, Any]:
    """Those of config.json as it is published. config: transformers'"""
    names = ("num_hidden_layers", "max_position_embeddings")
    c = {**config.to_dict(), **{name: getattr(config, name) for name in names}}
    full = next(iter((c.get("per_layer_config") or {}).values()), {})  # Gemma 4
    return {
        "global_head_dim": full.get("head_dim", c.get("head_dim")),
        "num_global_key_value_heads": full.get("num_key_value_heads"),
        "swa_num_key_value_heads": 2 * (c.get("num_key_value_heads") or 0),
        **c,
    }


def keys_of_all(c: Fields) -> Keys:
    """Keys of every architecture; None: it is not written."""
    rope = c.get("rope_parameters") or {}
    near = rope.get("sliding_attention", {})
    rope = rope.get("full_attention", rope)
    experts = next((c[key] for key in COUNTS if c.get(key)), None)
    keys = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": c.get("rms_norm_eps", c.get("norm_eps")),
        "attention.key_length": c.get("head_dim"),
        "attention.value_length": c.get("head_dim"),
        "rope.freq_base": rope.get("rope_theta"),
        "rope.freq_base_swa": near.get("rope_theta"),
        "expert_count": experts,
        "expert_used_count": c.get("num_experts_per_tok", c.get("top_k_experts")),
        "expert_group_count": c.get("n_group"),
        "expert_group_used_count": c.get("topk_group"),
    }
    if rope.get("rope_type") == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }
    return keys


COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def rotated(c: Fields, default: float = 1.0) -> int:
    rope = c.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    return int(dim * rope.get("partial_rotary_factor", c.get("partial_rotary_factor", default)))


def whole_rotation(c: Fields) -> Keys:
    return {"rope.dimension_count": rotated(c)}


def qwen_moe(c: Fields) -> Keys:
    shared = c.get("shared_expert_intermediate_size")
    return {
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_feed_forward_length": shared,
    }


def delta(c: Fields) -> Keys:
    has_experts = c.get("moe_intermediate_size") is not None
    return {
        **(qwen_moe(c) if has_experts else {}),
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"],
        "ssm.time_step_rank": c["linear_num_value_heads"],
        "ssm.inner_size": c["linear_value_head_dim"] * c["linear_num_value_heads"],
        "attention.recurrent_layers": [k == "linear_attention" for k in c["layer_types"]],
        "full_attention_interval": 4,
        "rope.dimension_count": rotated(c, 0.25),
    }


def sections(c: Fields) -> Keys:
    return {**delta(c), "rope.dimension_sections": [11, 11, 10, 0]}


def mrope(c: Fields) -> Keys:
    return {"rope.dimension_sections": [*c["rope_parameters"]["mrope_section"], 0]}


def gpt_oss(c: Fields) -> Keys:
    return {
        "attention.sliding_window": c["sliding_window"],
        "expert_feed_forward_length": c["intermediate_size"],
    }


def moe(c: Fields) -> Keys:
    return {
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_count": c["n_shared_experts"],
        "leading_dense_block_count": c.get("first_k_dense_replace", 0),
        "expert_weights_scale": c["routed_scaling_factor"],
        "expert_weights_norm": c.get("norm_topk_prob") or None,
    }


def glm4_moe(c: Fields) -> Keys:
    return {**moe(c), "rope.dimension_count": rotated(c, 0.5), "expert_gating_func": 2}


def latent(c: Fields) -> Keys:
    mscale = (c.get("rope_parameters") or {}).get("mscale_all_dim")
    return {
        **moe(c),
        "expert_gating_func": None if c["model_type"] == "deepseek_v2" else 2,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": c["q_lora_rank"],
        "attention.kv_lora_rank": c["kv_lora_rank"],
        "attention.key_length": c["kv_lora_rank"] + c["qk_rope_head_dim"],
        "attention.value_length": c["kv_lora_rank"],
        "attention.key_length_mla": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
        "attention.value_length_mla": c["v_head_dim"],
        "rope.dimension_count": c["qk_rope_head_dim"],
        "rope.scaling.yarn_log_multiplier": mscale and 0.1 * mscale,
    }


def glm4_lite(c: Fields) -> Keys:
    return {**latent(c), "leading_dense_block_count": c["mlp_layer_types"].count("dense")}


def indexer(c: Fields) -> Keys:
    kinds = c.get("indexer_types")
    return {
        **latent(c),
        "attention.indexer.head_count": c["index_n_heads"],
        "attention.indexer.key_length": c["index_head_dim"],
        "attention.indexer.top_k": c["index_topk"],
        "attention.indexer.types": kinds and [kind == "full" for kind in kinds],
    }


def kimi_linear(c: Fields) -> Keys:
    attends = [kind == "full_attention" for kind in c["layer_types"]]
    return {
        **latent({"norm_topk_prob": None, **c, "n_shared_experts": c["num_shared_experts"]}),
        "attention.head_count_kv": [int(each) for each in attends],
        "attention.value_length": None,
        "leading_dense_block_count": 1,
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "kda.head_dim": c["linear_head_dim"],
        "expert_used_count": c["num_experts_per_token"],
    }


def mistral3(c: Fields) -> Keys:
    rope = c["rope_parameters"]
    return {
        **whole_rotation(c),
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def granite(c: Fields) -> Keys:
    return {
        **whole_rotation(c),
        "attention.scale": c["attention_multiplier"],
        "embedding_scale": c["embedding_multiplier"],
        "residual_scale": c["residual_multiplier"],
        "logit_scale": c["logits_scaling"],
    }


def llama4(c: Fields) -> Keys:
    return {
        **whole_rotation(c),
        "feed_forward_length": c["intermediate_size_mlp"],
        "expert_feed_forward_length": c["intermediate_size"],
        "interleave_moe_layer_step": c["interleave_moe_layer_step"],
    }


def lfm2(c: Fields) -> Keys:
    kv_heads = c["num_key_value_heads"]
    keys = {
        "attention.head_count_kv": [0 if k == "conv" else kv_heads for k in c["layer_types"]],
        "shortconv.l_cache": c["conv_L_cache"],
    }
    if c.get("num_experts"):
        keys |= {"expert_feed_forward_length": c["moe_intermediate_size"]}
        keys |= {"leading_dense_block_count": c["num_dense_layers"], "expert_gating_func": 2}
    return keys


def mimo(c: Fields) -> Keys:
    near = [kind == "sliding_attention" for kind in c["layer_types"]]
    heads = c["num_key_value_heads"]
    return {
        "attention.head_count_kv": [c["swa_num_key_value_heads"] if n else heads for n in near],
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": [int(each) for each in near],
        "attention.value_length": c["v_head_dim"],
        "attention.value_scale": c["attention_value_scale"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_gating_func": 2,
        "rope.dimension_count": rotated(c),
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
    }


def minimax(c: Fields) -> Keys:
    return {
        "expert_feed_forward_length": c["intermediate_size"],
        "expert_gating_func": 2,
        "rope.dimension_count": rotated(c),
    }


def nemotron(c: Fields) -> Keys:
    kinds, width = c["layers_block_type"], c["moe_intermediate_size"]
    if "moe" not in kinds:
        width = c["intermediate_size"]
    wide = [width if kind in ("moe", "mlp") else 0 for kind in kinds]
    kv_heads = [c["num_key_value_heads"] if k == "full_attention" else 0 for k in kinds]
    keys = {
        "context_length": 1 << 20,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
        "rope.scaling.finetuned": False,
        "feed_forward_length": wide,
        "ssm.conv_kernel": c["conv_kernel"],
        "ssm.state_size": c["ssm_state_size"],
        "ssm.group_count": c["n_groups"],
        "ssm.inner_size": c["mamba_num_heads"] * c["mamba_head_dim"],
        "ssm.time_step_rank": c["mamba_num_heads"],
        "rope.dimension_count": c["hidden_size"] // c["num_attention_heads"],
        "rope.freq_base": None,
    }
    if "moe" not in kinds:
        return {**keys, **dict.fromkeys(("expert_count", "expert_used_count"))}
    width = c["moe_shared_expert_intermediate_size"]
    keys |= {**moe({**c, "n_shared_experts": 1}), "leading_dense_block_count": None}
    return keys | {"expert_shared_feed_forward_length": width}


def falcon_h1(c: Fields) -> Keys:
    return {
        "ssm.conv_kernel": c["mamba_d_conv"],
        "ssm.inner_size": c["mamba_d_ssm"],
        "ssm.state_size": c["mamba_d_state"],
        "ssm.time_step_rank": c["mamba_n_heads"],
        "ssm.group_count": c["mamba_n_groups"],
    }


def gemma4(c: Fields) -> Keys:
    near = [kind == "sliding_attention" for kind in c["layer_types"]]
    width, shared = c["intermediate_size"], c["num_kv_shared_layers"]
    heads, full = c["num_key_value_heads"], c.get("num_global_key_value_heads")
    keys = {
        "attention.key_length": c["global_head_dim"],
        "attention.value_length": c["global_head_dim"],
        "attention.key_length_swa": c["head_dim"],
        "attention.value_length_swa": c["head_dim"],
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": near,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": c["hidden_size_per_layer_input"],
        "final_logit_softcapping": c.get("final_logit_softcapping"),
        "rope.dimension_count": c["global_head_dim"],
        "rope.dimension_count_swa": c["head_dim"],
        "expert_feed_forward_length": c.get("moe_intermediate_size"),
    }
    if full:
        keys["attention.head_count_kv"] = [heads if each else full for each in near]
    if c.get("use_double_wide_mlp"):
        first = len(near) - shared
        keys["feed_forward_length"] = [width * (1 + (i >= first)) for i in range(len(near))]
    return keys


# What is changed in a tensor, by its name in the checkpoint.


def unchanged(_: Fields, name: str, tensor: torch.Tensor) -> Named:
    yield name, tensor


def in_pairs(c: Fields, name: str, tensor: torch.Tensor) -> Named:
    if found := re.search(r"\.([qk])_proj\.", name):
        heads = c["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    yield name, tensor


def states(_: Fields, name: str, tensor: torch.Tensor) -> Named:
    """Changes those of recurrent layers."""
    if name.endswith(".A_log"):
        tensor = -torch.exp(tensor)
    elif name.endswith(".dt_bias"):
        name = name.removesuffix(".dt_bias") + ".dt_proj.bias"
    elif "conv1d.weight" in name or "conv.conv.weight" in name:
        tensor = tensor.squeeze(1)
    yield name, tensor


def larger_norms(c: Fields, name: str, tensor: torch.Tensor) -> Named:
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    yield from states(c, name, tensor)


def qwen3_next(c: Fields, name: str, tensor: torch.Tensor) -> Named:
    if "in_proj_qkvz" not in name:
        yield from larger_norms(c, name, tensor)
        return
    heads, key = c["linear_num_key_heads"], c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] // heads * c["linear_value_head_dim"]
    parts = tensor.view(heads, -1, tensor.shape[1]).split([key, key, values, values], dim=1)
    queries, keys, value, gate = (each.flatten(0, 1) for each in parts)
    stem = name.removesuffix("in_proj_qkvz.weight")
    yield f"{stem}in_proj_qkv.weight", torch.cat((queries, keys, value))
    yield f"{stem}in_proj_z.weight", gate


def tiled(c: Fields, name: str, tensor: torch.Tensor) -> Named:
    """Heads of values that share a key, next to each other, are spread."""
    keys, dim = c["linear_num_key_heads"], c["linear_value_head_dim"]
    each = c["linear_num_value_heads"] // keys
    first = 2 * keys * c["linear_key_head_dim"]

    def spread(rows: torch.Tensor, size: int) -> torch.Tensor:
        split = rows.reshape(keys, each, size, *rows.shape[1:])
        return split.transpose(0, 1).reshape(rows.shape)

    if "linear_attn." in name:
        if "in_proj_qkv." in name or "conv1d" in name:
            tensor = torch.cat((tensor[:first], spread(tensor[first:], dim)))
        elif "in_proj_z" in name:
            tensor = spread(tensor, dim)
        elif re.search(r"in_proj_[ab]|A_log|dt_bias", name):
            tensor = spread(tensor, 1)
        elif "out_proj" in name:
            tensor = spread(tensor.T, dim).T
    yield from larger_norms(c, name, tensor)


def gpt_oss_experts(_: Fields, name: str, tensor: torch.Tensor) -> Named:
    name = name.replace("sinks", "sinks.weight")
    stem = re.sub(r"_bias$", ".bias", name)
    if "down_proj" in name:
        is_bias = name.endswith("_bias")
        yield stem if is_bias else f"{name}.weight", tensor if is_bias else tensor.mT
    elif name.endswith("_bias"):
        yield stem.replace("gate_up_proj", "gate_proj"), tensor[..., ::2]
        yield stem.replace("gate_up_proj", "up_proj"), tensor[..., 1::2]
    elif "gate_up_proj" in name:
        yield name.replace("gate_up_proj", "gate_proj.weight"), tensor.mT[:, ::2]
        yield name.replace("gate_up_proj", "up_proj.weight"), tensor.mT[:, 1::2]
    else:
        yield name, tensor


def llama4_experts(_: Fields, name: str, tensor: torch.Tensor) -> Named:
    if name.endswith("gate_up_proj"):
        gate, up = tensor.mT.chunk(2, dim=1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor.mT
    else:
        yield name, tensor


def absorbed(c: Fields, name: str, tensor: torch.Tensor) -> Named:
    if not name.endswith("kv_b_proj.weight"):
        yield from states(c, name, tensor)
        return
    heads, dim = c["num_attention_heads"], c["qk_nope_head_dim"]
    keys, values = tensor.view(heads, -1, tensor.shape[1]).split([dim, c["v_head_dim"]], dim=1)
    yield name.replace("kv_b", "k_b"), keys.mT
    yield name.replace("kv_b", "v_b"), values


def kimi(c: Fields, name: str, tensor: torch.Tensor) -> Named:
    for new, each in absorbed(c, name, tensor):
        yield new, each.reshape(1, -1, 1, each.shape[-1]) if "conv1d" in new else each


def lfm2_names(c: Fields, name: str, tensor: torch.Tensor) -> Named:
    name = name.replace("expert_bias", "expert_bias.bias")
    yield from states(
        c, name.replace("model.layers", "layers") if ".experts." in name else name, tensor
    )


def sink_names(_: Fields, name: str, tensor: torch.Tensor) -> Named:
    yield name + ("" if name.endswith(("weight", "bias")) else ".weight"), tensor


def sink_bias(_: Fields, name: str, tensor: torch.Tensor) -> Named:
    yield name.replace("attention_sink_bias", "attention_sink_bias.weight"), tensor


def mamba(c: Fields, name: str, tensor: torch.Tensor) -> Named:
    if name.endswith((".A_log", ".D")):
        tensor = tensor[:, None]
    if name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        tensor = tensor.reshape(c.get("n_groups") or c["mamba_n_groups"], -1)
    if "mixer.experts" in name:
        name = name.replace("backbone", "model").replace("mixer.experts", "mlp.experts")
    for new, each in in_pairs(c, name, tensor) if "mixer" in name else [(name, tensor)]:
        yield from states(c, new, each)


def with_multipliers(c: Fields, name: str, tensor: torch.Tensor) -> Named:
    into, parts = c["attention_in_multiplier"], [1.0]
    factors = {
        "mlp.down_proj": c["mlp_multipliers"][1],
        "feed_forward.down_proj": c["mlp_multipliers"][1],
        "feed_forward.gate_proj": c["mlp_multipliers"][0],
        "k_proj": c["key_multiplier"] * into,
        "q_proj": into,
        "v_proj": into,
        "o_proj": c["attention_out_multiplier"],
        "mamba.out_proj": c["ssm_out_multiplier"],
        "lm_head": c["lm_head_multiplier"],
        "embed_tokens": c["embedding_multiplier"],
    }
    if "in_proj" in name:
        width, keys = c["mamba_d_ssm"], c["mamba_n_groups"] * c["mamba_d_state"]
        sizes = [width, width, keys, keys, c["mamba_n_heads"]]
        parts = [each * c["ssm_in_multiplier"] for each in c["ssm_multipliers"]]
        split = tensor.split(sizes)
        tensor = torch.cat([each * scale for each, scale in zip(split, parts, strict=True)])
    else:
        tensor = tensor * next((f for part, f in factors.items() if f".{part}." in f".{name}"), 1)
    yield from mamba(c, name, tensor)


def gemma4_names(_: Fields, name: str, tensor: torch.Tensor) -> Named:
    if name.endswith("router.scale"):
        name = f"{_block(name)}.ffn_gate_inp.scale"
    elif name.endswith("per_expert_scale"):
        name = f"{_block(name)}.ffn_down_exps.scale"
    elif ".experts." in name or name.endswith("layer_scalar"):
        name += ".weight"
    yield name, tensor


def _block(name: str) -> str:
    found = re.search(r"layers\.(\d+)\.", name)
    assert found is not None
    return f"blk.{found[1]}"


def llama3_factors(c: Fields) -> torch.Tensor:
    rope, dim = c["rope_parameters"], rotated(c)
    turns = rope["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
    length = 2 * torch.pi * turns
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    factors = []
    for each in length.tolist():
        if each < original / high:
            factors.append(1.0)
        elif each > original / low:
            factors.append(factor)
        else:
            smooth = (original / each - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors)


def gemma4_factors(c: Fields) -> torch.Tensor:
    half = c["global_head_dim"] // 2
    part = c["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    turning = int(c["global_head_dim"] * part / 2)
    return torch.tensor([1.0] * turning + [1e30] * (half - turning))


Writer = tuple[str, Callable[[Fields], Keys], Callable[[Fields, str, torch.Tensor], Named]]
WRITERS: dict[str, Writer] = {  # by model_type
    "llama": ("llama", whole_rotation, in_pairs),
    "qwen2_moe": ("qwen2moe", qwen_moe, unchanged),
    "qwen3_moe": ("qwen3moe", qwen_moe, unchanged),
    "qwen3_next": ("qwen3next", delta, qwen3_next),
    "qwen3_5_text": ("qwen35", sections, tiled),
    "qwen3_5_moe_text": ("qwen35moe", sections, tiled),
    "qwen2_vl_text": ("qwen2vl", mrope, unchanged),
    "qwen3_vl_text": ("qwen3vl", mrope, unchanged),
    "gpt_oss": ("gpt-oss", gpt_oss, gpt_oss_experts),
    "gemma4_text": ("gemma4", gemma4, gemma4_names),
    "glm4": ("glm4", lambda c: {"rope.dimension_count": rotated(c, 0.5)}, unchanged),
    "glm4_moe": ("glm4moe", glm4_moe, unchanged),
    "glm4_moe_lite": ("deepseek2", glm4_lite, absorbed),
    "deepseek_v2": ("deepseek2", latent, absorbed),
    "deepseek_v3": ("deepseek2", latent, absorbed),
    "deepseek_v32": ("deepseek32", indexer, absorbed),
    "glm_moe_dsa": ("glm-dsa", indexer, absorbed),
    "kimi_linear": ("kimi-linear", kimi_linear, kimi),
    "ministral3": ("mistral3", mistral3, in_pairs),
    "granite": ("granite", granite, in_pairs),
    "llama4_text": ("llama4", llama4, llama4_experts),
    "lfm2": ("lfm2", lfm2, lfm2_names),
    "lfm2_moe": ("lfm2moe", lfm2, lfm2_names),
    "mimo_v2_flash": ("mimo2", mimo, sink_bias),
    "minimax_m2": ("minimax-m2", minimax, unchanged),
    "nemotron_h": ("nemotron_h_moe", nemotron, mamba),
    "seed_oss": ("seed_oss", lambda _: {}, unchanged),
    "smollm3": ("smollm3", whole_rotation, in_pairs),
    "falcon_h1": ("falcon-h1", falcon_h1, with_multipliers),
}
WIDE = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv", "norm")  # matrices that stay float32


def tensors_of(c: Fields, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """GGUF's of a checkpoint's tensors."""
    arch, _, change = WRITERS[c["model_type"]]
    architectures = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}
    known = architectures.get("glm-dsa" if arch == "deepseek32" else arch)
    names = gguf.get_tensor_name_map(known, c["num_hidden_layers"])
    stacked: dict[str, dict[int, torch.Tensor]] = {}
    rope = c.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_factors(c).numpy()
    if arch == "gemma4":
        yield "rope_freqs.weight", gemma4_factors(c).numpy()
    for name, tensor in tensors.items():
        for new, each in change(c, name, tensor.float()):
            if found := EXPERT.fullmatch(new):
                stacked.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = each
                continue
            yield _mapped(names, new), np.ascontiguousarray(each.numpy())
    for name, each in stacked.items():
        yield _mapped(names, name), np.stack([each[index].numpy() for index in sorted(each)])


def _mapped(names: gguf.TensorNameMap, name: str) -> str:
    if name.startswith("blk."):
        return name
    if name.endswith("e_score_correction_bias"):
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def write(
    path: Path,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    kind: Kind = Kind.F32,
    extra: Keys | None = None,
) -> None:
    """config: transformers', of the language model. `kind`: of matrices whose rows allow it, the
    others have float32. extra: further keys, or other values."""
    c = fields_of(config)
    arch, keys, _ = WRITERS[c["model_type"]]
    if arch == "nemotron_h_moe" and "moe" not in c["layers_block_type"]:
        arch = "nemotron_h"
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (keys_of_all(c) | keys(c) | (extra or {})).items():
        if value is not None:
            _add(writer, f"{arch}.{key}", value)
    add_tokens(writer, c["vocab_size"])
    per_block, _ = gguf.GGML_QUANT_SIZES[kind]
    for name, values in tensors_of(c, tensors):
        is_wide = values.ndim < 2 or any(each in name for each in WIDE)
        if kind == Kind.F32 or is_wide or values.shape[-1] % per_block:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_uint32(key, value)


def add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    letters = [chr(ord("!") + n) for n in range(90)]
    tokens = ["<s>", "</s>", "<|im_end|>", *letters, "ab", "abc"]
    tokens += [f"~{n}" for n in range(count - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
