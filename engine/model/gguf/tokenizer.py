"""The tokenizer inside a GGUF file, as a Hugging Face tokenizer.json and tokenizer_config.json.

Byte-level BPE vocabularies whose way of splitting text is known are built directly, in well under a
second. Any other kind goes through transformers' own conversion, which takes several.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, processors
from tokenizers import decoders as decode
from tokenizers import pre_tokenizers as split
from tokenizers.models import BPE

from engine.model.errors import ModelError
from engine.model.gguf.file import GGUFFile

CONTROL, USER_DEFINED = 3, 4  # token types
ENDS_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
)  # they end an answer, whatever the file calls the end

# How text is cut before merging, as the models' own tokenizer.json files have it.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _pre_tokenizer(name: str) -> Any:
    """The splitter that `tokenizer.ggml.pre` names, or None if it is not known here."""
    if name in ("gpt-2", "gpt2"):
        return split.ByteLevel(add_prefix_space=False)
    if name in ("smollm", "starcoder"):
        digits = split.Digits(individual_digits=True)
        return split.Sequence([digits, split.ByteLevel(add_prefix_space=False)])
    patterns = dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"), _LLAMA3)
    patterns["qwen2"] = _QWEN2
    if name not in patterns:
        return None
    cut = split.Split(Regex(patterns[name]), behavior="isolated")
    return split.Sequence([cut, split.ByteLevel(add_prefix_space=False, use_regex=False)])


def write_tokenizer(source: GGUFFile, target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `target`. Raises ModelError."""
    meta = source.metadata
    tokens = meta.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{source.path} has no tokenizer")
    tokenizer = None
    if meta.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.merges" in meta:
        splitter = _pre_tokenizer(meta.get("tokenizer.ggml.pre", ""))
        tokenizer = None if splitter is None else _byte_level(meta, splitter)
    if tokenizer is None:
        tokenizer = _through_transformers(source.path)
    tokenizer.save(str(target / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.get(f"{meta['general.architecture']}.context_length", 0),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token < len(tokens):
            config[f"{name}_token"] = tokens[token]
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def end_token_ids(source: GGUFFile) -> list[int]:
    """Tokens that end an answer: the file's ends of sequence and turn, and well-known names."""
    meta = source.metadata
    stated = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    ends = {token for token in stated if token is not None}
    types = meta.get("tokenizer.ggml.token_type", ())
    for index, (token, kind) in enumerate(zip(meta["tokenizer.ggml.tokens"], types, strict=False)):
        if kind in (CONTROL, USER_DEFINED) and token in ENDS_OF_TURN:
            ends.add(index)
    return sorted(ends)


def _byte_level(meta: dict[str, Any], splitter: Any) -> Tokenizer:
    tokens = meta["tokenizer.ggml.tokens"]
    pre = meta["tokenizer.ggml.pre"]
    model = BPE(
        {token: index for index, token in enumerate(tokens)},
        [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]],
        ignore_merges=pre.startswith("llama"),
    )
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decode.ByteLevel()
    types = meta.get("tokenizer.ggml.token_type", ())
    added = [(t, k) for t, k in zip(tokens, types, strict=False) if k in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in added if k == CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=False) for t, k in added if k == USER_DEFINED]
    )
    if meta.get("tokenizer.ggml.add_bos_token"):
        bos = meta["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A $B",
            special_tokens=[(tokens[bos], bos)],
        )
    return tokenizer


def _through_transformers(path: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        # In a folder of its own: transformers adds the tokens of a tokenizer.json beside the file.
        with TemporaryDirectory() as alone:
            (Path(alone) / path.name).symlink_to(path.resolve())
            return AutoTokenizer.from_pretrained(alone, gguf_file=path.name).backend_tokenizer
    except Exception as error:  # many kinds, all of them: this file's tokenizer is not understood
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{path}: its tokenizer cannot be converted: {reason}") from error
