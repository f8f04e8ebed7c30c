"""Random checkpoints that read images, of Gemma 3's form and of Qwen2.5-VL's: 2 layers of text,
and 2 of vision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support import tiny_qwen_vl as qwen

SPECIAL = (
    *("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)
TEMPLATE = """{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}{% if part['type'] == 'image' %}<start_of_image>\
{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant
{% endif %}"""
TOKENS_OF_IMAGE = 8  # with what Gemma has around them; Qwen has 6 of a picture of 60 x 60


FORMS = ("gemma3", "qwen2_5_vl")


def make(folder: Path, form: str = "gemma3") -> Path:
    """Writes it; needs no network. `form`: of FORMS."""
    (_make_gemma if form == "gemma3" else _make_qwen)(folder)
    return folder


def _make_gemma(folder: Path) -> None:
    images = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    # vLLM joins those around an image to one token, as Gemma's tokenizer has them.
    lines = [AddedToken("\n" * count, special=False, normalized=False) for count in range(1, 5)]
    marks = {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>"}
    _make_gemma_model(folder, *_make_tokenizer(folder, SPECIAL, TEMPLATE, marks, images, lines))
    about = {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "size": {"height": 56, "width": 56},
        "do_resize": True,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_seq_length": 4,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(processor))


def _make_qwen(folder: Path) -> None:
    marks = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    images = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    _make_qwen_model(
        folder, *_make_tokenizer(folder, qwen.SPECIAL, qwen.TEMPLATE, marks, images, [])
    )
    about: dict[str, Any] = {
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 28 * 28,
        "max_pixels": 16 * 28 * 28,
        "size": {"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen2VLVideoProcessor"}),
    ):
        (folder / name).write_text(json.dumps(about | kind))


def _make_tokenizer(
    folder: Path,
    special: tuple[str, ...],
    template: str,
    marks: dict[str, str],
    images: dict[str, str],
    more: list[AddedToken],
) -> tuple[int, dict[str, int]]:
    """Returns how many tokens it has, and the ids of those that are special."""
    from transformers import PreTrainedTokenizerFast

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(characters)}, merges=[]))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    base.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    base.add_tokens(more)
    ids = {each: base.token_to_id(each) for each in special}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base,
        additional_special_tokens=[*special[3:]],
        extra_special_tokens=images,
        **marks,
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return len(tokenizer), ids


def _make_gemma_model(folder: Path, vocab_size: int, ids: dict[str, int]) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    text = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "max_position_embeddings": 4096,
        "sliding_window": 512,
        "layer_types": ["full_attention"] * 2,
    }
    vision = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "patch_size": 14,
        "image_size": 56,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
        bos_token_id=ids["<bos>"],
        eos_token_id=[ids["<eos>"], ids["<end_of_turn>"]],
        pad_token_id=ids["<pad>"],
    )
    _save(Gemma3ForConditionalGeneration(config), folder)
    path = folder / "model.safetensors"
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model.")
        if "vision_tower." in name and "vision_model" not in name
        else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed, path, metadata={"format": "pt"})  # by the names of published checkpoints


def _make_qwen_model(folder: Path, vocab_size: int, ids: dict[str, int]) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    text = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [4, 6, 6],
        },
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    _save(Qwen2_5_VLForConditionalGeneration(config), folder)


def _save(model: Any, folder: Path) -> None:
    with torch.no_grad():
        for name, each in model.float().named_parameters():
            if each.dim() > 1:  # so that what is far back counts, more than the last token
                each.normal_(0.0, 0.05 if "embed_tokens" in name else 0.3)
    model.save_pretrained(folder)
