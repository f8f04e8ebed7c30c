"""A GGUF file becomes a Hugging Face directory: bf16 safetensors, config, tokenizer.

Done once per file. llama.cpp interleaves the rows of Llama's query and key projections for its kind
of rotary embedding; that is undone here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from engine.model.errors import ModelError
from engine.model.gguf_file import GGUFFile
from engine.model.gguf_tokenizer import end_token_ids, write_tokenizer

SHARD_BYTES = 4 << 30
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
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
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FREQS = "rope_freqs.weight"
_SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}


def convert(
    path: Path, target: Path, sampling: dict[str, Any], progress: Callable[[str], None]
) -> None:
    """Write `path` as a Hugging Face directory into `target`. `sampling` holds the parameters that
    the model's makers recommend; what the file itself states wins. Raises ModelError."""
    source = GGUFFile(path)
    config = _config(source)
    ends = end_token_ids(source)
    bos = source.metadata.get("tokenizer.ggml.bos_token_id")
    identifiers = {"bos_token_id": bos, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    progress(f"converting {path.name}: tokenizer")
    write_tokenizer(source, target)
    _write_json(target / "config.json", config | identifiers)
    stated = {
        name: source.metadata[f"general.sampling.{key}"]
        for key, name in _SAMPLING.items()
        if f"general.sampling.{key}" in source.metadata
    }
    _write_json(target / "generation_config.json", identifiers | sampling | stated)
    _write_weights(source, config, target, progress)


def _config(source: GGUFFile) -> dict[str, Any]:
    meta = source.metadata
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES or meta.get(f"{arch}.expert_count", 0):
        kind = f"{arch} with experts" if arch in ARCHITECTURES else arch
        raise ModelError(
            f"{source.path}: GGUF architecture {kind} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )

    def need(key: str) -> Any:
        if f"{arch}.{key}" not in meta:
            raise ModelError(f"{source.path} does not state {arch}.{key}")
        return meta[f"{arch}.{key}"]

    if "token_embd.weight" not in source.tensors:
        raise ModelError(f"{source.path} has no tensor token_embd.weight")
    heads, hidden = need("attention.head_count"), need("embedding_length")
    return {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": meta.get(f"{arch}.attention.key_length", hidden // heads),
        "intermediate_size": need("feed_forward_length"),
        "vocab_size": source.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.get(f"{arch}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(source, arch),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "torch_dtype": "bfloat16",
    }


def _rope_scaling(source: GGUFFile, arch: str) -> dict[str, Any] | None:
    """Stated in the metadata, or, for Llama 3, present only as a table of frequency divisors."""
    meta = source.metadata
    if _FREQS in source.tensors:
        divisors = source.get(_FREQS).reshape(-1)
        spec = {
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        theta = meta.get(f"{arch}.rope.freq_base", 10000.0)
        if not np.allclose(divisors, _llama3_divisors(spec, theta, len(divisors)), rtol=1e-3):
            raise ModelError(f"{source.path}: {_FREQS} is not Llama 3's kind of rope scaling")
        return spec
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": meta[f"{arch}.rope.scaling.factor"]}
    raise ModelError(f"{source.path}: rope scaling {kind} is not supported")


def _llama3_divisors(spec: dict[str, Any], theta: float, half: int) -> np.ndarray:
    wavelength = 2 * np.pi * theta ** (np.arange(half) / half)
    low, high = spec["low_freq_factor"], spec["high_freq_factor"]
    blend = (spec["original_max_position_embeddings"] / wavelength - low) / (high - low)
    blend = blend.clip(0.0, 1.0)
    return 1.0 / ((1 - blend) / spec["factor"] + blend)


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

    def unpack(name: str) -> tuple[str, torch.Tensor]:
        values = source.get(name)
        if config["model_type"] == "llama" and (found := re.search(r"\.attn_([qk])\.", name)):
            which = "num_attention_heads" if found[1] == "q" else "num_key_value_heads"
            values = _halves(values, config[which])
        tensor = torch.from_numpy(np.require(values, requirements=["C", "W"]))
        return _renamed(source, name), tensor.bfloat16() if tensor.ndim > 1 else tensor

    # Two at a time: unpacking is numpy, which lets go of the interpreter, and holds little memory.
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(unpack, [name for name in source.tensors if name != _FREQS])


def _halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from pairs (x1, x2), (x1, x2), ... to all x1, then all x2."""
    split = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def _renamed(source: GGUFFile, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer is None or layer[2] not in _LAYER:
        raise ModelError(f"{source.path}: tensor {name} is not part of a supported model")
    return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.{kind}"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
