"""Random checkpoints of Qwen3-VL and Qwen3.5 that read images: a few layers of text and of vision,
with tokenizer, chat template, and what pictures are prepared by."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pictures
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvrelay.engine.images import Image, Images
from kvrelay.engine.model.vision.config import Vision

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}{% if part['type'] == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>\
{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
UNIT = 32  # pixels of a token's side
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 4 * UNIT**2, "longest_edge": 40 * UNIT**2},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.6, 0.4],
}
TEXT = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "patch_size": 16,
    "out_hidden_size": 96,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}


def picture(seed: int, height: int = 64, width: int = 96, mode: str = "RGB") -> bytes:
    """A PNG of noise in patches, so that what is seen differs from place to place."""
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    rough = np.random.default_rng(seed).integers(0, 256, (7, 9, channels), np.uint8)
    image = Pictures.fromarray(rough[:, :, 0] if channels == 1 else rough, mode)
    file = BytesIO()
    image.resize((width, height), Pictures.Resampling.BILINEAR).save(file, "PNG")
    return file.getvalue()


def prompt_of(vision: Vision, *parts: int | bytes, seed: int = 0) -> Images:
    """Numbers are texts of so many tokens; bytes are images."""
    mark, tokens = vision.image_token, list[int]()
    for part in parts:
        if isinstance(part, bytes):
            tokens += [mark - 2, mark, mark - 1]
        else:
            tokens += np.random.default_rng((part, seed)).integers(0, 250, part).tolist()
    return Images(tuple(tokens), tuple(Image.of(p) for p in parts if isinstance(p, bytes)))


def make(folder: Path, *, hybrid: bool = False) -> Any:
    """Writes one; returns transformers' model of it. Needs no network."""
    size, ids = _make_tokenizer(folder)
    model = _make_model(folder, size, ids, hybrid=hybrid)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model


def _make_tokenizer(folder: Path) -> tuple[int, dict[str, int]]:
    """Returns how many tokens it has, and the ids of those that are special."""
    from transformers import PreTrainedTokenizerFast

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(characters)}, merges=[]))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    base.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(tokenizer), {each: base.token_to_id(each) for each in SPECIAL}


def _make_model(folder: Path, vocab_size: int, ids: dict[str, int], *, hybrid: bool) -> Any:
    import transformers

    kind = transformers.Qwen3_5Config if hybrid else transformers.Qwen3VLConfig
    whole = (
        transformers.Qwen3_5ForConditionalGeneration
        if hybrid
        else transformers.Qwen3VLForConditionalGeneration
    )
    vision = {**VISION, **({"deepstack_visual_indexes": []} if hybrid else {})}
    config = kind(
        text_config={**TEXT, **(HYBRID if hybrid else {}), "vocab_size": vocab_size},
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        eos_token_id=ids["<|im_end|>"],
    )
    torch.manual_seed(7)
    model = whole._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                each.add_(torch.randn_like(each) * 0.2)
            elif name.endswith("dt_bias"):
                each.sub_(4.0)
            elif "conv1d" in name:  # small outputs would be normalized, with their errors
                each.copy_(torch.randn_like(each))
            elif each.dim() > 1:  # so that what is far back counts, more than the last token
                scale = 0.05 if "visual.patch" in name else 0.12 if hybrid else 0.2
                if hybrid and "lm_head" in name:  # its states make more of rounding
                    scale /= 2
                rows = 0.2 if hybrid else 0.7
                each.copy_(torch.randn_like(each) * (rows if "embed" in name else scale))
    model.save_pretrained(folder)
    return model.eval()
