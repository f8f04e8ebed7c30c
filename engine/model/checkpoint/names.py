"""Names of tensors: layers are read by those that transformers has for Llama, and checkpoints that
have others are recognised by them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from kvrelay.engine.model.config import ModelConfig

if TYPE_CHECKING:
    import torch

Renames = tuple[tuple[str, str], ...]
"""Parts of a name and what they are in the checkpoint, replaced in order."""

MISTRAL: Renames = (  # consolidated.safetensors, written by Mistral's own code
    ("model.embed_tokens.", "tok_embeddings."),
    ("model.norm.", "norm."),
    ("lm_head.", "output."),
    ("model.layers.", "layers."),
    (".input_layernorm.", ".attention_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".self_attn.kv_a_proj_with_mqa.", ".attention.wkv_a_with_mqa."),
    (".self_attn.kv_a_layernorm.", ".attention.kv_a_norm."),
    (".self_attn.kv_b_proj.", ".attention.wkv_b."),
    (".self_attn.q_a_proj.", ".attention.wq_a."),
    (".self_attn.q_a_layernorm.", ".attention.q_a_norm."),
    (".self_attn.q_b_proj.", ".attention.wq_b."),
    (".self_attn.q_proj.", ".attention.wq."),
    (".self_attn.k_proj.", ".attention.wk."),
    (".self_attn.v_proj.", ".attention.wv."),
    (".self_attn.o_proj.", ".attention.wo."),
    (".mlp.gate.", ".gate."),
    (".mlp.shared_experts.", ".shared_experts."),
    (".mlp.experts.", ".experts."),
    (".mlp.", ".feed_forward."),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
)
LLAMA4: Renames = (
    (".mlp.gate.", ".feed_forward.router."),
    (".mlp.shared_experts.", ".feed_forward.shared_expert."),
    (".mlp.", ".feed_forward."),
)

NEMOTRON_H: Renames = (
    ("model.embed_tokens.", "backbone.embeddings."),
    ("model.norm.", "backbone.norm_f."),
    ("model.layers.", "backbone.layers."),
    (".input_layernorm.", ".norm."),
    (".self_attn.", ".mixer."),
    (".mamba.", ".mixer."),
    (".mlp.", ".mixer."),
)

GLM4: Renames = (
    (".post_attention_layernorm.", ".post_self_attn_layernorm."),
    (".pre_feedforward_layernorm.", ".post_attention_layernorm."),
    (".post_feedforward_layernorm.", ".post_mlp_layernorm."),
)

MIMO: Renames = ((".self_attn.sinks", ".self_attn.attention_sink_bias"),)


def renames_of(names: Collection[str]) -> Renames:
    """What a checkpoint with tensors of these names calls those that are asked for."""
    if "tok_embeddings.weight" in names and "model.embed_tokens.weight" not in names:
        return MISTRAL
    if "backbone.norm_f.weight" in names:
        return NEMOTRON_H
    if any(".feed_forward.router." in name for name in names):
        return LLAMA4
    if any(name.endswith(".post_mlp_layernorm.weight") for name in names):
        return GLM4
    if any(name.endswith(".attention_sink_bias") for name in names):
        return MIMO
    return ()


def renamed(name: str, renames: Renames) -> str:
    for part, other in renames:
        name = name.replace(part, other)
    return name


TEXT_KINDS = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "KimiK25ForConditionalGeneration": "deepseek_v3",
    "Kimi_K25ForConditionalGeneration": "deepseek_v3",
    "Llama4ForConditionalGeneration": "llama4_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}
"""The kind of the language model within another, where its text_config states none."""


ROOTS = ("model.", "model.language_model.", "language_model.model.")
"""What names start with; the last two in checkpoints of which the language model is a part."""


class Tensors(Protocol):
    """What a checkpoint gives by names."""

    def has(self, name: str) -> bool: ...

    def get(self, name: str, *shape: int) -> torch.Tensor: ...


def table_and_head(
    checkpoint: Tensors, config: ModelConfig
) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Returns how names begin, the embeddings, and what makes logits."""
    name, sizes = "embed_tokens.weight", (config.vocab_size, config.hidden_size)
    root = next((root for root in ROOTS if checkpoint.has(root + name)), ROOTS[0])
    head = table = checkpoint.get(root + name, *sizes)
    names = ("lm_head.weight", "language_model.lm_head.weight")
    stored = next(filter(checkpoint.has, names), None)
    if stored or not config.tie_word_embeddings:
        # Where one is stored it counts, as to transformers, whatever the file says of ties.
        own = checkpoint.get(stored or names[0], *sizes)
        is_tied = config.tie_word_embeddings and bool((own == table).all())
        head = table if is_tied else own
    scale = dict(config.weight_scales).get("lm_head", 1.0)
    return root, table, head if scale == 1.0 else head * scale
