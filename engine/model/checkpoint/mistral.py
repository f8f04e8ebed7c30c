"""Mistral's own format: params.json in place of config.json, beside consolidated*.safetensors.

Keys that vLLM reads mean here what they mean there (vllm/transformers_utils/configs/mistral.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvrelay.engine.model.checkpoint.fields import count, read_json, refuse
from kvrelay.engine.model.errors import ModelError

PARAMS_FILE = "params.json"
KEYS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "max_seq_len": "max_position_embeddings",
}
MOE_KEYS = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "route_every_n": "moe_layer_freq",
    "routed_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}
DEFAULT_LENGTH = 128_000
Raw = dict[str, Any]


def read_raw(path: Path) -> Raw:
    """config.json of the directory `path`, or what its params.json says, in the terms of the other.
    Raises ModelError."""
    if (path / PARAMS_FILE).is_file() and not (path / "config.json").is_file():
        return config_of(read_json(path / PARAMS_FILE))
    return read_json(path / "config.json")


def config_of(params: Raw) -> Raw:
    """What `params` says, in the terms of config.json. Raises ModelError."""
    refuse(params, "use_biases", "lora", "ssm", "multimodal")
    raw = {KEYS.get(key, key): value for key, value in params.items()}
    raw = {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": DEFAULT_LENGTH, **raw}
    if quantization := raw.pop("quantization", None):
        raw["quantization_config"] = _quantization(quantization)
    has_latents = raw.get("kv_lora_rank") is not None
    if (moe := raw.pop("moe", None)) is not None:
        if not has_latents:
            raise ModelError("params.json: moe without kv_lora_rank is not supported")
        raw |= {MOE_KEYS.get(key, key): value for key, value in moe.items()}
        raw["norm_topk_prob"] = True
    elif has_latents:
        raise ModelError("params.json: kv_lora_rank without moe is not supported")
    scaling = raw.pop("llama_4_scaling", None)
    if yarn := raw.pop("yarn", None):
        raw["rope_parameters"] = _rope(yarn, scaling, raw.get("rope_theta"), has_latents)
    elif scaling:
        raise ModelError("params.json: llama_4_scaling without yarn is not supported")
    return {**raw, "architectures": ["Mistral4ForCausalLM" if moe else "Ministral3ForCausalLM"]}


def _rope(yarn: Raw, scaling: Raw | None, theta: Any, has_latents: bool) -> dict[str, Any]:
    original = count(yarn, "original_max_position_embeddings")
    rope = {
        "rope_type": "yarn",
        "rope_theta": theta or 10000.0,
        "factor": yarn["factor"],
        "original_max_position_embeddings": original,
        "beta_fast": yarn.get("beta", 32),
        "beta_slow": yarn.get("alpha", 1),
    }
    if not yarn.get("apply_scale", True):
        rope["attention_factor"] = 1.0
    elif has_latents:
        raise ModelError("params.json: yarn.apply_scale with latents is not supported, only false")
    if scaling:
        length = count(scaling, "original_max_position_embeddings")
        if length != original:
            raise ModelError(
                f"params.json: llama_4_scaling over {length} positions is not supported with yarn "
                f"over {original}, only over as many"
            )
        rope["llama_4_scaling_beta"] = scaling["beta"]
    return rope


def _quantization(stated: Raw) -> dict[str, Any]:
    """Weights in FP8, where each matrix has a scale."""
    kind = stated.get("qformat_weight")
    if kind != "fp8_e4m3":
        raise ModelError(f"params.json: qformat_weight {kind!r} is not supported, only 'fp8_e4m3'")
    return {"quant_method": "fp8"}
