"""A GGUF file becomes a Hugging Face directory: bf16 safetensors, config, tokenizer.

Done once per file. What llama.cpp has changed is undone: it interleaves the rows of Llama's query
and key projections for its kind of rotary embedding, adds the one to the weights of Gemma's norms
that Gemma adds as it computes, and stacks experts.
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
from engine.model.gguf.config import FACTORS, FREQS, config_of
from engine.model.gguf.file import GGUFFile
from engine.model.gguf.tokenizer import end_token_ids, write_tokenizer

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
_SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}


def convert(
    path: Path, target: Path, sampling: dict[str, Any], progress: Callable[[str], None]
) -> None:
    """Write `path` as a Hugging Face directory into `target`. `sampling` holds the parameters that
    the model's makers recommend; what the file itself states wins. Raises ModelError."""
    source = GGUFFile(path)
    config = config_of(source)
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
