"""GGUF files as llama.cpp's converter writes them: its names, and Llama's query and key rows
interleaved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

GGUF_NAMES = (
    (r"^model\.embed_tokens", "token_embd"),
    (r"^model\.norm", "output_norm"),
    (r"^lm_head", "output"),
    (r"^model\.layers\.", "blk."),
    (r"input_layernorm", "attn_norm"),
    (r"self_attn\.(q|k)_norm", r"attn_\1_norm"),
    (r"self_attn\.(q|k|v|qkv)_proj", r"attn_\1"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"pre_feedforward_layernorm", "ffn_norm"),
    (r"post_feedforward_layernorm", "post_ffw_norm"),
    (r"(block_sparse_moe|mlp)\.gate\.", "ffn_gate_inp."),
    (r"(block_sparse_moe|mlp)\.experts\.\d+\.(w1|gate_proj)", "ffn_gate_exps"),
    (r"(block_sparse_moe|mlp)\.experts\.\d+\.(w3|up_proj)", "ffn_up_exps"),
    (r"(block_sparse_moe|mlp)\.experts\.\d+\.(w2|down_proj)", "ffn_down_exps"),
    (r"mlp\.gate_up_proj", "ffn_up"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
)


def gguf_name(name: str, arch: str) -> str:
    after_attention = "post_attention_norm" if arch.startswith("gemma") else "ffn_norm"
    name = name.replace("post_attention_layernorm", after_attention)
    for pattern, replacement in GGUF_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def as_llama_cpp_has_it(name: str, value: np.ndarray, arch: str, config: Any) -> np.ndarray:
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return value + 1.0
    if arch == "llama" and (found := re.search(r"attn_([qk])\.", name)):
        heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
        halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
    return value


def begin(
    path: Path, arch: str, config: Any, extra: Mapping[str, Any], tokenizer: str = "gpt2"
) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in extra.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{arch}.{key}", value)
    letters = [chr(ord("!") + n) for n in range(90)]
    tokens = ["<s>", "</s>", "<|im_end|>", *letters, "ab", "abc", *(f"~{n}" for n in range(36))]
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")
    return writer


def end(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Any,
    arch: str,
    extra: Mapping[str, Any] | None = None,
    factors: Mapping[str, np.ndarray] | None = None,
    tokenizer: str = "gpt2",
) -> None:
    """`extra`: further metadata. `factors`: of rotations, by their names in the file."""
    writer = begin(path, arch, config, extra or {}, tokenizer)
    stacked: dict[str, list[np.ndarray]] = {}
    for name in sorted(tensors):  # experts in their order
        short = gguf_name(name, arch)
        value = as_llama_cpp_has_it(short, tensors[name].float().numpy(), arch, config)
        stacked.setdefault(short, []).append(value)
    for name, values in stacked.items():
        writer.add_tensor(name, np.stack(values) if "_exps." in name else values[0])
    for name, each in (factors or {}).items():
        writer.add_tensor(f"{name}.weight", each)
    end(writer)


def write_model(path: Path, model: Any, arch: str, **options: Any) -> None:
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    write_gguf(path, tensors, model.config, arch, **options)
