"""A GGUF file becomes a Hugging Face directory: config, tokenizer, safetensors.

Done once per file, tensor by tensor. What llama.cpp has changed is undone (`conversions`): it
interleaves the rows of Llama's query and key projections for its kind of rotary embedding, adds the
one to the weights of norms that Gemma adds as it computes, and stacks experts. Some of the
configuration is not in the file: llama.cpp knows it from the architecture, and so does
`architectures`. Where llama.cpp and transformers differ (Phi-3's sliding window, gpt-oss's YaRN),
transformers is followed. Layers that draft tokens are left out.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.gguf.architectures import ARCHITECTURES, REFUSED, config_of, family_of
from kvrelay.engine.model.gguf.file import GGUFFile
from kvrelay.engine.model.gguf.metadata import Metadata
from kvrelay.engine.model.gguf.tokenizer import end_token_ids, write_tokenizer
from kvrelay.engine.model.gguf.weights import keeps_packed, write_weights
from kvrelay.engine.request import NUMBERS


def convert(
    path: Path, target: Path, sampling: dict[str, Any], progress: Callable[[str], None]
) -> None:
    """Write `path` as a Hugging Face directory into `target`. `sampling` holds the parameters that
    the model's makers recommend; what the file itself states wins. Raises ModelError."""
    source = GGUFFile(path)
    meta = _metadata(source)
    family = family_of(meta)
    config = config_of(meta, family)
    if keeps_packed(meta, family):
        config["quantization_config"] = {"quant_method": "mxfp4"}
    ends = end_token_ids(source)
    bos = source.metadata.get("tokenizer.ggml.bos_token_id")
    identifiers = {"bos_token_id": bos, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    config["pad_token_id"] = source.metadata.get("tokenizer.ggml.padding_token_id")
    progress(f"converting {path.name}: tokenizer")
    write_tokenizer(source, target)
    _write_json(target / "config.json", config | identifiers)
    stated = {
        name: source.metadata[key]
        for name, number in NUMBERS.items()
        if (key := f"general.sampling.{number.gguf or name}") in source.metadata
    }
    _write_json(target / "generation_config.json", identifiers | sampling | stated)
    write_weights(meta, family, config, target, progress)


def _metadata(source: GGUFFile) -> Metadata:
    """Raises ModelError for a file of an architecture that is not known."""
    arch = source.metadata.get("general.architecture")
    if arch in REFUSED:
        raise ModelError(f"{source.path}: GGUF of {arch} is not supported: {REFUSED[arch]}")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{source.path}: GGUF architecture {arch} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}. Serve the model's checkpoint in safetensors"
        )
    if "token_embd.weight" not in source.tensors:
        raise ModelError(f"{source.path} has no tensor token_embd.weight")
    return Metadata(source, arch)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
