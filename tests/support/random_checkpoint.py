"""Writes a small checkpoint of random weights: `python random_checkpoint.py KIND SOURCE TARGET`, by
an interpreter that has transformers. The tokenizer is that of SOURCE."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

COMMON = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS: dict[str, dict[str, Any]] = {
    "granite": {},
    "olmo2": {},
    "qwen3_moe": {"head_dim": 32, **EXPERTS},
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "layer_types": LAYERS,
        "tie_word_embeddings": False,  # else the last token comes again
    },
    # vLLM's CPU build has latent attention of this size alone.
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 3,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "num_local_experts": 0,
        "shared_intermediate_size": 128,
    },
}


def write(kind: str, source: Path, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=49152, **COMMON | KINDS[kind])
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copy(source / name, target / name)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
