"""A GGUF file becomes a Hugging Face directory: config, tokenizer, bf16 safetensors.

Done once per file, tensor by tensor. What llama.cpp has changed is undone: it interleaves the rows
of Llama's query and key projections for its kind of rotary embedding, adds the one to the weights
of Gemma's norms that Gemma adds as it computes, and stacks experts. Some of the configuration is
not in the file: llama.cpp knows it from the architecture, and so does this module. Where llama.cpp
and transformers differ (Phi-3's sliding window), transformers is followed.

Why not `from_pretrained(gguf_file=...)` of transformers (5.23):

* Its byte-level tokenizers give other tokens: digits of SmolLM2 and StarCoder are merged, whole
  words of Llama 3 are cut, Qwen2's text is not normalized. They take ten times as long.
* Its configurations lack Mixtral, sliding windows of Mistral and Phi-3, scaled rotary embeddings,
  the width of Qwen3's experts and Gemma's query scale.
* It holds all weights in memory at once, in one type.

Vocabularies other than byte-level BPE do go through its tokenizers, which takes several seconds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, processors
from tokenizers import decoders as decode
from tokenizers import pre_tokenizers as split
from tokenizers.models import BPE

from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.gguf.file import GGUFFile
from kvrelay.engine.request import NUMBERS


def convert(
    path: Path, target: Path, sampling: dict[str, Any], progress: Callable[[str], None]
) -> None:
    """Write `path` as a Hugging Face directory into `target`. `sampling` holds the parameters that
    the model's makers recommend; what the file itself states wins. Raises ModelError."""
    source = GGUFFile(path)
    config = _config_of(source)
    ends = _end_token_ids(source)
    bos = source.metadata.get("tokenizer.ggml.bos_token_id")
    identifiers = {"bos_token_id": bos, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    progress(f"converting {path.name}: tokenizer")
    _write_tokenizer(source, target)
    _write_json(target / "config.json", config | identifiers)
    stated = {
        name: source.metadata[key]
        for name, number in NUMBERS.items()
        if (key := f"general.sampling.{number.gguf or name}") in source.metadata
    }
    _write_json(target / "generation_config.json", identifiers | sampling | stated)
    _write_weights(source, config, target, progress)


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
    """Reads the metadata of one architecture."""

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


def _config_of(source: GGUFFile) -> dict[str, Any]:
    """config.json without the ids of special tokens. Raises ModelError."""
    arch = source.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{source.path}: GGUF architecture {arch} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}. Serve the model's checkpoint in safetensors"
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
    """Whether all four projections have one; in Qwen2 three have, always."""
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
        lacks = missing[0] if missing else f"{meta.arch}.rope.scaling.original_context_length"
        raise ModelError(f"{source.path}: longrope without {lacks}")
    spread = math.sqrt(1 + math.log(longest / original) / math.log(original))
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "factor": longest / original,
        "attention_factor": meta.get("rope.scaling.attn_factor", spread),
        **{key: source.get(name).reshape(-1).tolist() for key, name in FACTORS.items()},
    }


CONTROL, USER_DEFINED = 3, 4  # token types
ENDS_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
)  # they end an answer, whatever the file calls the end

# How text is cut before merging, as the models' own tokenizer.json files have it.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _pre_tokenizer(name: str) -> Any:
    """The splitter that `tokenizer.ggml.pre` names, or None if it is not known here."""
    if name in ("gpt-2", "gpt2"):
        return split.ByteLevel(add_prefix_space=False)
    if name in ("smollm", "starcoder"):
        digits = split.Digits(individual_digits=True)
        return split.Sequence([digits, split.ByteLevel(add_prefix_space=False)])
    patterns = dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"), _LLAMA3)
    patterns["qwen2"] = _QWEN2
    if name not in patterns:
        return None
    cut = split.Split(Regex(patterns[name]), behavior="isolated")
    return split.Sequence([cut, split.ByteLevel(add_prefix_space=False, use_regex=False)])


def _write_tokenizer(source: GGUFFile, target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `target`. Raises ModelError."""
    meta = source.metadata
    tokens = meta.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{source.path} has no tokenizer")
    tokenizer = None
    if meta.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.merges" in meta:
        splitter = _pre_tokenizer(meta.get("tokenizer.ggml.pre", ""))
        tokenizer = None if splitter is None else _byte_level(meta, splitter)
    if tokenizer is None:
        tokenizer = _through_transformers(source.path)
    tokenizer.save(str(target / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.get(f"{meta['general.architecture']}.context_length", 0),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token < len(tokens):
            config[f"{name}_token"] = tokens[token]
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _end_token_ids(source: GGUFFile) -> list[int]:
    """Tokens that end an answer: the file's ends of sequence and turn, and well-known names."""
    meta = source.metadata
    stated = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    ends = {token for token in stated if token is not None}
    types = meta.get("tokenizer.ggml.token_type", ())
    for index, (token, kind) in enumerate(zip(meta["tokenizer.ggml.tokens"], types, strict=False)):
        if kind in (CONTROL, USER_DEFINED) and token in ENDS_OF_TURN:
            ends.add(index)
    return sorted(ends)


def _byte_level(meta: dict[str, Any], splitter: Any) -> Tokenizer:
    tokens = meta["tokenizer.ggml.tokens"]
    pre = meta["tokenizer.ggml.pre"]
    model = BPE(
        {token: index for index, token in enumerate(tokens)},
        [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]],
        ignore_merges=pre.startswith("llama"),
    )
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decode.ByteLevel()
    types = meta.get("tokenizer.ggml.token_type", ())
    added = [(t, k) for t, k in zip(tokens, types, strict=False) if k in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in added if k == CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=False) for t, k in added if k == USER_DEFINED]
    )
    if meta.get("tokenizer.ggml.add_bos_token"):
        bos = meta["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A $B",
            special_tokens=[(tokens[bos], bos)],
        )
    return tokenizer


def _through_transformers(path: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        # In a folder of its own: transformers adds the tokens of a tokenizer.json beside the file.
        with TemporaryDirectory() as alone:
            (Path(alone) / path.name).symlink_to(path.resolve())
            return AutoTokenizer.from_pretrained(alone, gguf_file=path.name).backend_tokenizer
    except Exception as error:  # many kinds, all of them: this file's tokenizer is not understood
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{path}: its tokenizer cannot be converted: {reason}") from error


SHARD_BYTES = 4 << 30
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
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
}
# Where a type of model calls it otherwise.
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OWN = {
    "gemma2": _SANDWICH,
    "gemma3_text": _SANDWICH,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "mixtral": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
}
_INTERLEAVED = ("llama", "mistral", "mixtral")
_WITHOUT_ONE = ("gemma2", "gemma3_text")
_TABLES = (FREQS, *FACTORS.values())  # they are in config.json


def _write_weights(
    source: GGUFFile, config: dict[str, Any], target: Path, progress: Callable[[str], None]
) -> None:
    """Shards of at most about SHARD_BYTES, so that a large file needs no memory of its size."""
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size = num_shards = total = 0

    def flush(name: str) -> None:
        progress(f"converting {source.path.name}: writing {name}")
        save_file(shard, str(target / name), metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in _tensors(source, config):
        if size and size + tensor.nbytes > SHARD_BYTES:
            num_shards += 1
            flush(f"model-{num_shards:05d}.safetensors")
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    if not num_shards:
        flush("model.safetensors")
        return
    flush(f"model-{num_shards + 1:05d}.safetensors")
    index = {"metadata": {"total_size": total}, "weight_map": places}
    _write_json(target / "model.safetensors.index.json", index)


def _tensors(source: GGUFFile, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors as transformers has them; matrices in bf16, vectors in float32."""
    kind = config["model_type"]
    names = _LAYER | _OWN.get(kind, {})

    def unpack(part: tuple[str, int | None]) -> tuple[str, torch.Tensor]:
        name, expert = part
        values = source.get(name, expert)
        if kind in _INTERLEAVED and (found := re.search(r"\.attn_([qk])\.", name)):
            which = "num_attention_heads" if found[1] == "q" else "num_key_value_heads"
            values = _deinterleaved(values, config[which])
        if kind in _WITHOUT_ONE and name.endswith("norm.weight"):
            values = values - 1.0
        tensor = torch.from_numpy(np.require(values, requirements=["C", "W"]))
        renamed = _renamed(source, name, names).format(expert)
        return renamed, tensor.bfloat16() if tensor.ndim > 1 else tensor

    parts: list[tuple[str, int | None]] = []
    for name, info in source.tensors.items():
        if name.endswith("_exps.weight"):
            parts += [(name, expert) for expert in range(info.shape[0])]
        elif name not in _TABLES:
            parts.append((name, None))
    # Two at a time: unpacking is numpy, which lets go of the interpreter, and holds little memory.
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(unpack, parts)


def _deinterleaved(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from pairs (x1, x2), (x1, x2), ... to all x1, then all x2."""
    split = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def _renamed(source: GGUFFile, name: str, names: dict[str, str]) -> str:
    """With {} where the number of an expert goes."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer is None or layer[2] not in names:
        raise ModelError(f"{source.path}: tensor {name} is not part of a supported model")
    return f"model.layers.{layer[1]}.{names[layer[2]]}.{kind}"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
