"""Checkpoints in Mistral's own format, made of those of transformers."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

NAMES = (
    (r"^model\.embed_tokens\.", "tok_embeddings."),
    (r"^lm_head\.", "output."),
    (r"^model\.", ""),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.(q|k|v|o)_proj\.", r".attention.w\1."),
    (r"\.self_attn\.(q_a|q_b|kv_b)_proj\.", r".attention.w\1."),
    (r"\.self_attn\.kv_a_proj_with_mqa\.", ".attention.wkv_a_with_mqa."),
    (r"\.self_attn\.(q_a|kv_a)_layernorm\.", r".attention.\1_norm."),
    (r"\.mlp\.(gate\.|shared_experts\.|experts\.)", r".\1"),
    (r"\.mlp\.", ".feed_forward."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
)


def to_mistral(path: Path, params: dict) -> None:
    """Writes the checkpoint in `path` anew."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if name.endswith("experts.gate_up_proj"):
            for index, both in enumerate(tensor):
                prefix = name.removesuffix("gate_up_proj") + f"{index}."
                tensors[prefix + "gate_proj.weight"], tensors[prefix + "up_proj.weight"] = (
                    half.clone() for half in both.chunk(2)
                )
        elif name.endswith("experts.down_proj"):
            for index, down in enumerate(tensor):
                prefix = name.removesuffix("down_proj") + f"{index}."
                tensors[prefix + "down_proj.weight"] = down.clone()
        elif re.search(r"self_attn\.[qk]_proj", name):  # halves of each head's rows to pairs
            halves = tensor.unflatten(0, (-1, 2, params["head_dim"] // 2))
            tensors[name] = halves.transpose(1, 2).flatten(0, 2).contiguous()
        else:
            tensors[name] = tensor
    for pattern, new in NAMES:
        tensors = {re.sub(pattern, new, name): tensor for name, tensor in tensors.items()}
    (path / "model.safetensors").unlink()
    (path / "config.json").unlink()
    names = sorted(tensors)
    for part in (0, 1):
        file = path / f"consolidated-{part + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[part::2]}, file)
    (path / "params.json").write_text(json.dumps(params))
