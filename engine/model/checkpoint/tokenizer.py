"""The tokenizer of a checkpoint, in the format of tokenizer.json (library: `tokenizers`).

Most checkpoints have that file. Moonshot's (Kimi, Moonlight) have `tiktoken.model` instead: byte
strings in the order in which they are merged, for a byte-level BPE whose pattern and reserved ids
stand in the code beside it. Mistral's have `tekken.json`, which states all that. Each becomes the
same thing here.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvrelay.engine.model.checkpoint.fields import read_json
from kvrelay.engine.model.errors import ModelError

FILE, TIKTOKEN_FILE, TEKKEN_FILE = "tokenizer.json", "tiktoken.model", "tekken.json"
FILES = (FILE, TIKTOKEN_FILE, TEKKEN_FILE)
CONFIG_FILE = "tokenizer_config.json"
MOONSHOT = "TikTokenTokenizer"  # how its files name the class
RESERVED_IDS = 256  # behind them: control tokens, most of them without a name

# Moonshot's pattern: runs of Han characters, words of other letters with what is behind an
# apostrophe, up to three digits, punctuation, and white space.
_UPPER, _LOWER = (
    r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]",
    r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]",
)
_BEFORE, _BEHIND = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}[{_UPPER}]*[{_LOWER}]+{_BEHIND}",
        f"{_BEFORE}[{_UPPER}]+[{_LOWER}]*{_BEHIND}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def read_tokenizer(model_dir: Path) -> dict[str, Any]:
    """What tokenizer.json says or, without that file, would say. Where `add_bos_token` or
    `add_eos_token` is stated in tokenizer_config.json, it decides whether texts begin with BOS or
    end with EOS. Takes a second or two where there is no tokenizer.json. Raises ModelError."""
    stated = read_json(model_dir / CONFIG_FILE) if (model_dir / CONFIG_FILE).is_file() else {}
    if (model_dir / FILE).is_file():
        state = read_json(model_dir / FILE)
    elif (model_dir / TIKTOKEN_FILE).is_file():
        state = _from_tiktoken(model_dir, stated)
    elif (model_dir / TEKKEN_FILE).is_file():
        state = _from_tekken(model_dir / TEKKEN_FILE)
    else:
        raise ModelError(f"no tokenizer: {model_dir / FILE} does not exist")
    state["added_tokens"] = state.get("added_tokens") or []
    if not isinstance(state.get("model"), dict):
        raise ModelError(f"{model_dir / FILE} has no model")
    for flag, name, at_start in (
        ("add_bos_token", "bos_token", True),
        ("add_eos_token", "eos_token", False),
    ):
        if isinstance(stated.get(flag), bool):
            _set_special(state, content_of(stated.get(name)), stated[flag], at_start)
    return state


def content_of(token: Any) -> str | None:
    """A special token in tokenizer_config.json is a string or an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _from_tiktoken(model_dir: Path, stated: Mapping[str, Any]) -> dict[str, Any]:
    path = model_dir / TIKTOKEN_FILE
    named = stated.get("tokenizer_class")
    if named != MOONSHOT:
        raise ModelError(
            f"{path} is of a tokenizer {named}, whose pattern is not known; known: {MOONSHOT}"
        )
    vocabulary = _read_vocabulary(path)
    base, added = len(vocabulary), stated.get("added_tokens_decoder") or {}
    names = {int(token): entry for token, entry in added.items()}
    outside = [token for token in names if not base <= token < base + RESERVED_IDS]
    if outside:
        raise ModelError(
            f"{model_dir / CONFIG_FILE}: added token {outside[0]} is not one of the {RESERVED_IDS}"
            f" ids behind the {base} of {TIKTOKEN_FILE}"
        )
    tokens = [_added(token, names.get(token, {})) for token in range(base, base + RESERVED_IDS)]
    return _byte_level(path, vocabulary, tokens, PATTERN)


def _from_tekken(path: Path) -> dict[str, Any]:
    """Control tokens come first, then as many texts as the vocabulary has room for. Prompts
    begin with BOS, as in Mistral's own code."""
    raw = read_json(path)
    try:
        config = raw["config"]
        first, size = config["default_num_special_tokens"], config["default_vocab_size"]
        named = {each["rank"]: each["token_str"] for each in raw["special_tokens"]}
        tokens = [_added(at, {"content": named.get(at, f"<SPECIAL_{at}>")}) for at in range(first)]
        texts = [b64decode(each["token_bytes"]) for each in raw["vocab"][: size - first]]
        vocabulary = {text: first + rank for rank, text in enumerate(texts)}
        state = _byte_level(path, vocabulary, tokens, config["pattern"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} is not understood: {error!r}") from error
    _set_special(state, "<s>", wanted=True, at_start=True)
    return state


def _byte_level(
    path: Path, vocabulary: Mapping[bytes, int], tokens: list[dict[str, Any]], pattern: str
) -> dict[str, Any]:
    """A byte-level BPE in which a text that is a token is not merged. vocabulary: in the order of
    their merges, with their ids. tokens: added ones. Raises ModelError."""
    missing = [byte for byte in range(256) if bytes([byte]) not in vocabulary]
    if missing:
        raise ModelError(f"{path} has no token of byte {missing[0]} among its {len(vocabulary)}")
    spelled = {token: "".join(map(BYTE_CHARS.__getitem__, token)) for token in vocabulary}
    texts = {*spelled.values(), *(each["content"] for each in tokens)}
    if len(texts) < len(vocabulary) + len(tokens):
        raise ModelError(f"{path}: two tokens have the same name")
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{**split, "invert": False}, {**bytes_, "use_regex": False}],
        },
        "post_processor": None,
        "decoder": {**bytes_, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            # An added token of an id before them is in the vocabulary, or has another id.
            "vocab": {
                each["content"]: each["id"] for each in tokens if each["id"] < len(vocabulary)
            }
            | {spelled[token]: number for token, number in vocabulary.items()},
            "merges": [[spelled[left], spelled[right]] for left, right in _merges(vocabulary)],
        },
    }


def _added(token: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip")}
    content = content_of(dict(entry)) or f"<|reserved_token_{token}|>"
    special = bool(entry.get("special", True))
    return {"id": token, "content": content, **flags, "normalized": False, "special": special}


def _read_vocabulary(path: Path) -> dict[bytes, int]:
    """Byte strings by their ranks, which are 0, 1, ... Raises ModelError."""
    found: dict[bytes, int] = {}
    try:
        for number, line in enumerate(path.read_bytes().splitlines()):
            token, rank = line.split()
            if int(rank) != number:
                raise ModelError(f"{path}: line {number + 1} has rank {int(rank)}, not {number}")
            found[b64decode(token, validate=True)] = number
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return found


def _merges(vocabulary: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Pairs of tokens that make a token, in the order in which they are merged: any two neighbours
    that make the token of the lowest rank, the first of these in the text."""
    for token in vocabulary:
        every = range(1, len(token))
        cuts = (c for c in every if token[:c] in vocabulary and token[c:] in vocabulary)
        # Where two of a token overlap, as in x y x, the first is x + y: bytes come again in the
        # token after len(x) of them.
        first: list[int] = []
        others: list[int] = []
        for cut in cuts:
            (first if token[cut:] == token[:-cut] else others).append(cut)
        yield from ((token[:cut], token[cut:]) for cut in (*first, *others))


def _byte_chars() -> list[str]:
    """How byte-level BPE writes each byte as a printable character (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(256, 512))
    return [chr(byte if byte in printable else next(rest)) for byte in range(256)]


BYTE_CHARS = _byte_chars()


def _set_special(state: dict[str, Any], token: str | None, wanted: bool, at_start: bool) -> None:
    """Have texts begin or end with `token`, or not. What else is added to them stays."""
    number = next((each["id"] for each in state["added_tokens"] if each["content"] == token), None)
    if token is None or number is None:  # the tokenizer has none
        return
    whole = state.get("post_processor")
    parts = [] if whole is None else whole.get("processors", [whole])
    template = next((part for part in parts if part["type"] == "TemplateProcessing"), None)
    if template is None:
        if not wanted or any(part["type"] != "ByteLevel" for part in parts):
            return
        template = {"type": "TemplateProcessing", "single": [_piece("A")], "special_tokens": {}}
        template["pair"] = [_piece("A"), _piece("B", 1)]
        state["post_processor"] = {"type": "Sequence", "processors": [*parts, template]}
    single: list[dict[str, Any]] = template["single"]
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    at = 0 if at_start else len(single)
    if not wanted:
        template["single"] = [piece for piece in single if piece != special]
    elif special not in single[at - 1 if at else 0 :][:1]:
        single.insert(at, special)
        template["special_tokens"][token] = {"id": token, "ids": [number], "tokens": [token]}


def _piece(name: str, type_id: int = 0) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": type_id}}
