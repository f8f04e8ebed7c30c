"""A random model with a long context: agents' first prompts alone have up to 20,000 tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model

CONTEXT = 65_536
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    "special_tokens_map.json",
)


def make_model(folder: Path, initializer_range: float = 0.02, context: int = CONTEXT) -> Path:
    """Write it to `folder`, with the default model's tokenizer and chat template. With larger
    weights (`initializer_range`: their standard deviation) it says other things of other prompts.
    """
    import transformers

    source = resolve_model(DEFAULT_MODEL, progress=lambda _: None)
    vocab_size = transformers.AutoConfig.from_pretrained(source).vocab_size
    transformers.set_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=initializer_range,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in FILES:
        if (source / name).exists():
            shutil.copy(source / name, folder / name)
    return folder
