"""The tokenizer in a GGUF file, as tokenizer.json and tokenizer_config.json.

`tokenizer.ggml.model` says of which kind it is, and of byte-level BPE (`gpt2`) `tokenizer.ggml.pre`
how text is cut before merging. Names that are not known are refused: another cut gives other
tokens, and nobody would see why answers are worse.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, processors
from tokenizers import decoders as decode
from tokenizers import pre_tokenizers as split
from tokenizers.models import BPE

from kvrelay.engine.model.checkpoint.tokenizer import PATTERN as KIMI
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.gguf.file import GGUFFile

CONTROL, USER_DEFINED = 3, 4  # token types
SPACE = "\u2581"
ENDS_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    *("<|return|>", "<|call|>"),  # gpt-oss
    *("<|eot|>", "<|eom|>", "<|eom_id|>"),  # Llama 3 and 4
    *("<|user|>", "<|observation|>"),  # GLM
    "<turn|>",  # Gemma 4
)  # they end an answer, whatever the file calls the end

# How text is cut before merging, as the models' own tokenizer.json files have it.
_APOSTROPHE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    rf"{_APOSTROPHE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    rf"{_APOSTROPHE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BEFORE, _REST = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_case(behind: str, digits: str) -> str:
    """Words end before a capital letter. behind: what may follow a word."""
    words = f"{_BEFORE}[{_UPPER}]*[{_LOWER}]+{behind}|{_BEFORE}[{_UPPER}]+[{_LOWER}]*{behind}"
    return f"{words}|{digits}|{_REST}"


_TEKKEN = _by_case("", r"\p{N}")
_GPT4O = _by_case(_APOSTROPHE + "?", r"\p{N}{1,3}")
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Cut:
    """How text is cut: by these patterns, one after the other. (): as GPT-2's, behind digits one by
    one where they are `single_digits`."""

    names: str  # tokenizer.ggml.pre
    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    whole_words: bool = False  # what is a token is not merged
    adds_bos: bool = False  # where the file does not say
    is_normalized: bool = False  # to NFC

    def splitter(self) -> Any:
        last = split.ByteLevel(add_prefix_space=False, use_regex=not self.patterns)
        cuts = [split.Split(Regex(each), behavior="isolated") for each in self.patterns]
        digits = [split.Digits(individual_digits=True)] if self.single_digits else []
        return split.Sequence([*digits, *cuts, last])


CUTS = (
    Cut("gpt-2 gpt2 phi-2 exaone4 mpt olmo"),
    Cut("smollm starcoder refact command-r codeshell exaone", single_digits=True),
    Cut(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2",
        (_LLAMA3,),
        whole_words=True,
        adds_bos=True,
    ),
    Cut("glm4 glm5", (_LLAMA3,), whole_words=True),
    Cut("smaug-bpe dbrx chatglm-bpe", (_LLAMA3,)),
    Cut("qwen2 deepseek-r1-qwen megrez", (_QWEN2,), is_normalized=True),
    Cut("hunyuan stablelm2 solar-open", (_QWEN2,)),
    Cut("qwen35", (_QWEN35,), is_normalized=True),
    Cut("seed-coder", (_SEED,)),
    Cut("tekken", (_TEKKEN,), whole_words=True, adds_bos=True),
    Cut("gpt-4o llama4 minimax-m2 kanana2", (_GPT4O,)),
    Cut("kimi-k2", (KIMI,), whole_words=True),
    Cut("deepseek-v3 hunyuan-dense joyai-llm", (r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
)
BY_NAME = {name: cut for cut in CUTS for name in cut.names.split()}


def write_tokenizer(source: GGUFFile, target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `target`. Raises ModelError."""
    meta = source.metadata
    tokens = meta.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{source.path} has no tokenizer")
    _tokenizer_of(source, meta).save(str(target / "tokenizer.json"))
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


def _tokenizer_of(source: GGUFFile, meta: dict[str, Any]) -> Tokenizer:
    kind, has_merges = meta.get("tokenizer.ggml.model"), "tokenizer.ggml.merges" in meta
    if kind == "gemma4" and has_merges:
        return _with_added(_gemma4(meta), meta, adds_bos=True)
    if kind != "gpt2" or not has_merges:
        return _through_transformers(source.path)
    pre = meta.get("tokenizer.ggml.pre", "")
    if pre not in BY_NAME:
        raise ModelError(
            f"{source.path}: tokenizer.ggml.pre {pre!r} is not supported, nobody knows here how it"
            f" cuts text; supported: {', '.join(BY_NAME)}. Serve the model's checkpoint in"
            " safetensors"
        )
    cut = BY_NAME[pre]
    return _with_added(_byte_level(meta, cut), meta, cut.adds_bos)


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


def _merging(meta: dict[str, Any], **options: Any) -> BPE:
    return BPE(
        {token: index for index, token in enumerate(meta["tokenizer.ggml.tokens"])},
        [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]],
        **options,
    )


def _byte_level(meta: dict[str, Any], cut: Cut) -> Tokenizer:
    tokenizer = Tokenizer(_merging(meta, ignore_merges=cut.whole_words))
    if cut.is_normalized:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = cut.splitter()
    tokenizer.decoder = decode.ByteLevel()
    return tokenizer


def _gemma4(meta: dict[str, Any]) -> Tokenizer:
    """Merges of characters, with spaces as SentencePiece has them, over the whole text."""
    unknown = meta["tokenizer.ggml.tokens"][meta.get("tokenizer.ggml.unknown_token_id", 3)]
    model = _merging(meta, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    parts = [decode.Replace(SPACE, " "), decode.ByteFallback(), decode.Fuse()]
    tokenizer.decoder = decode.Sequence(parts)
    return tokenizer


def _with_added(tokenizer: Tokenizer, meta: dict[str, Any], adds_bos: bool) -> Tokenizer:
    """adds_bos: where the file does not say."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta.get("tokenizer.ggml.token_type", ())
    added = [(t, k) for t, k in zip(tokens, types, strict=False) if k in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in added if k == CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=False) for t, k in added if k == USER_DEFINED]
    )
    bos = meta.get("tokenizer.ggml.bos_token_id")
    if meta.get("tokenizer.ggml.add_bos_token", adds_bos) and bos is not None:
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
