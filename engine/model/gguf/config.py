"""What the metadata of a GGUF file says of the model, as a Hugging Face config.json.

Some of it is not in the file: llama.cpp knows it of the architecture, and so does this module.
Where llama.cpp and transformers differ (Phi-3's sliding window), transformers is followed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.model.errors import ModelError
from engine.model.gguf.file import GGUFFile

# general.architecture -> what transformers calls the model, and its type.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
MIXTRAL = ("MixtralForCausalLM", "mixtral")  # a llama with experts
MISTRAL = ("MistralForCausalLM", "mistral")  # a llama with a sliding window
GEMMAS = ("gemma2", "gemma3")
# The largest of each scales its queries by hidden_size / heads: (architecture, layers).
SCALED_BY_HIDDEN = (("gemma2", 46), ("gemma3", 62))
FREQS = "rope_freqs.weight"
FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}


class _Metadata:
    """The metadata of one architecture."""

    def __init__(self, source: GGUFFile, arch: str) -> None:
        self.source = source
        self.arch = arch

    def get(self, key: str, default: Any = None) -> Any:
        """Stated once for all layers, or for each of them, alike."""
        value = self.source.metadata.get(f"{self.arch}.{key}", default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ModelError(f"{self.source.path}: {self.arch}.{key} differs by layer: {value}")
        return value[0]

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.source.path} does not state {self.arch}.{key}")
        return value


def config_of(source: GGUFFile) -> dict[str, Any]:
    """config.json without the ids of special tokens. Raises ModelError."""
    arch = source.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{source.path}: GGUF architecture {arch} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    meta = _Metadata(source, arch)
    if "token_embd.weight" not in source.tensors:
        raise ModelError(f"{source.path} has no tensor token_embd.weight")
    heads, hidden = meta.need("attention.head_count"), meta.need("embedding_length")
    head_dim = meta.get("attention.key_length", hidden // heads)
    name, kind = ARCHITECTURES[arch]
    experts = _experts(meta)
    window = meta.get("attention.sliding_window")
    if arch == "llama" and (experts or window):
        name, kind = MIXTRAL if experts else MISTRAL
    config = {
        "architectures": [name],
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": meta.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": meta.get("feed_forward_length")
        or meta.need("expert_feed_forward_length"),
        "vocab_size": source.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": meta.need("context_length"),
        "rms_norm_eps": meta.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "attention_bias": _has_bias(source, arch),
        "torch_dtype": "bfloat16",
    }
    rotated = meta.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if arch in ("llama", "phi3", *GEMMAS):
        config["sliding_window"] = window or None
    return config | experts | (_gemma(meta, config) if arch in GEMMAS else {})


def _has_bias(source: GGUFFile, arch: str) -> bool:
    """Of all four projections; Qwen2 has it of three, always."""
    has = {part: f"blk.0.attn_{part}.bias" in source.tensors for part in ("q", "output")}
    if arch == "qwen2":
        return False
    if has["q"] != has["output"]:
        raise ModelError(f"{source.path}: {arch} with a bias of some projections is not supported")
    return has["q"]


def _experts(meta: _Metadata) -> dict[str, Any]:
    number = meta.get("expert_count", 0)
    if not number:
        return {}
    used = meta.need("expert_used_count")
    if meta.arch == "llama":
        return {"num_local_experts": number, "num_experts_per_tok": used}
    if meta.arch != "qwen3moe":
        raise ModelError(f"{meta.source.path}: {meta.arch} with experts is not supported")
    return {
        "num_experts": number,
        "num_experts_per_tok": used,
        "moe_intermediate_size": meta.need("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    scalar = config["head_dim"]
    if (meta.arch, config["num_hidden_layers"]) in SCALED_BY_HIDDEN:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    own: dict[str, Any] = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
    }
    if meta.arch == "gemma2":
        own["attn_logit_softcapping"] = meta.get("attn_logit_softcapping", 50.0)
        own["final_logit_softcapping"] = own["final_logit_softcapping"] or 30.0
        return own | {"sliding_window": config["sliding_window"] or 4096}
    pattern = meta.source.metadata.get("gemma3.attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        own["layer_types"] = ["sliding_attention" if w else "full_attention" for w in pattern]
    else:
        own["sliding_window_pattern"] = pattern
    own["rope_local_base_freq"] = meta.get("rope.freq_base_swa", 10000.0)
    return own | {"rope_theta": meta.get("rope.freq_base", 1e6)}


def _rope_scaling(meta: _Metadata) -> dict[str, Any] | None:
    """Stated in the metadata, or, for Llama 3 and Phi-3, present as tables of divisors."""
    source = meta.source
    if FREQS in source.tensors:
        return _llama3(meta)
    original = meta.get("rope.scaling.original_context_length")
    if any(name in source.tensors for name in FACTORS.values()):
        return _longrope(meta, original)
    kind = meta.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": meta.need("rope.scaling.factor")}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": meta.need("rope.scaling.factor"),
            "original_max_position_embeddings": original or meta.need("context_length"),
        }
    raise ModelError(
        f"{source.path}: rope scaling {kind} is not supported; supported: none, linear, yarn"
    )


def _llama3(meta: _Metadata) -> dict[str, Any]:
    divisors = meta.source.get(FREQS).reshape(-1)
    spec = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = meta.get("rope.freq_base", 10000.0)
    if not np.allclose(divisors, _llama3_divisors(spec, theta, len(divisors)), rtol=1e-3):
        raise ModelError(f"{meta.source.path}: {FREQS} is not Llama 3's kind of rope scaling")
    return spec


def _llama3_divisors(spec: dict[str, Any], theta: float, half: int) -> np.ndarray:
    wavelength = 2 * np.pi * theta ** (np.arange(half) / half)
    low, high = spec["low_freq_factor"], spec["high_freq_factor"]
    blend = (spec["original_max_position_embeddings"] / wavelength - low) / (high - low)
    blend = blend.clip(0.0, 1.0)
    return 1.0 / ((1 - blend) / spec["factor"] + blend)


def _longrope(meta: _Metadata, original: int | None) -> dict[str, Any]:
    source, longest = meta.source, meta.need("context_length")
    missing = [name for name in FACTORS.values() if name not in source.tensors]
    if missing or original is None:
        told = missing[0] if missing else f"{meta.arch}.rope.scaling.original_context_length"
        raise ModelError(f"{source.path}: longrope without {told}")
    spread = math.sqrt(1 + math.log(longest / original) / math.log(original))
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "factor": longest / original,
        "attention_factor": meta.get("rope.scaling.attn_factor", spread),
        **{key: source.get(name).reshape(-1).tolist() for key, name in FACTORS.items()},
    }
