"""The tokenizer of a checkpoint, in the format of tokenizer.json (library: `tokenizers`).

Most checkpoints have that file. Moonshot's (Kimi, Moonlight) have `tiktoken.model` instead: byte
strings in the order of their ranks, for a byte-level BPE whose pattern and reserved ids stand in
the code beside it. Both become the same thing here.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvrelay.engine.model.checkpoint.fields import read_json
from kvrelay.engine.model.errors import ModelError

FILE, TIKTOKEN_FILE, CONFIG_FILE = "tokenizer.json", "tiktoken.model", "tokenizer_config.json"
FILES = (FILE, TIKTOKEN_FILE)
MOONSHOT = "TikTokenTokenizer"  # how its files name the class
RESERVED_IDS = 256  # behind the ranks: control tokens, most of them without a name

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
    end with EOS. Takes a second or two for tiktoken.model. Raises ModelError."""
    stated = read_json(model_dir / CONFIG_FILE) if (model_dir / CONFIG_FILE).is_file() else {}
    if (model_dir / FILE).is_file():
        state = read_json(model_dir / FILE)
    elif (model_dir / TIKTOKEN_FILE).is_file():
        state = _from_tiktoken(model_dir, stated)
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
    ranks = _read_ranks(path)
    spelled = {token: "".join(map(BYTE_CHARS.__getitem__, token)) for token in ranks}
    base, added = len(ranks), stated.get("added_tokens_decoder") or {}
    names = {int(token): entry for token, entry in added.items()}
    outside = [token for token in names if not base <= token < base + RESERVED_IDS]
    if outside:
        raise ModelError(
            f"{model_dir / CONFIG_FILE}: added token {outside[0]} is not one of the {RESERVED_IDS}"
            f" ids behind the {base} of {TIKTOKEN_FILE}"
        )
    tokens = [_added(token, names.get(token, {})) for token in range(base, base + RESERVED_IDS)]
    texts = {*spelled.values(), *(each["content"] for each in tokens)}
    if len(texts) < base + RESERVED_IDS:
        raise ModelError(f"{model_dir / CONFIG_FILE}: two tokens have the same name")
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated"}
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
            "ignore_merges": True,  # a piece that is a token is not merged
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": [[spelled[left], spelled[right]] for left, right in _merges(ranks)],
        },
    }


def _added(token: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip")}
    content = content_of(dict(entry)) or f"<|reserved_token_{token}|>"
    special = bool(entry.get("special", True))
    return {"id": token, "content": content, **flags, "normalized": False, "special": special}


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Byte strings in the order of their ranks, which are 0, 1, ... Raises ModelError."""
    found: dict[bytes, int] = {}
    try:
        for number, line in enumerate(path.read_bytes().splitlines()):
            token, rank = line.split()
            if int(rank) != number:
                raise ModelError(f"{path}: line {number + 1} has rank {int(rank)}, not {number}")
            found[b64decode(token, validate=True)] = number
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if len(found) < 256 or any(bytes([byte]) not in found for byte in range(256)):
        raise ModelError(f"{path} does not have each single byte among its {len(found)} tokens")
    return found


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Pairs of tokens that make a token, in the order in which they are merged: any two neighbours
    that make the token of the lowest rank, the first of these in the text."""
    for token in ranks:
        cuts = (c for c in range(1, len(token)) if token[:c] in ranks and token[c:] in ranks)
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
