"""A model's tokens as grammars see them (library: `llguidance`).

What is text in an output is text to its grammar, and `tokenizer.json` says what is: an added token
that has the flag `special` has no text, any other has. Models have tokens of both kinds among the
marks of their calls and of their reasoning, so a grammar that wants a mark names the token by its
id; everything else that it wants is text, whichever tokens write that.

The library decides otherwise: each added token of the form `<...>` is special to it, and a text is
tokenised into special tokens that are spelled in it, which its own grammars refuse then. So it is
handed a tokenizer where special tokens have names that no text has, and where the others of that
form are tokens of the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import llguidance
from tokenizers import pre_tokenizers

from kvrelay.engine.model.checkpoint.fields import read_json
from kvrelay.engine.model.checkpoint.tokenizer import CONFIG_FILE, content_of, read_tokenizer
from kvrelay.engine.model.errors import ModelError

PRIVATE = "\U000f0000"  # no text has it: a special token's name begins with it


class GrammarError(Exception):
    """A grammar cannot be compiled, or an output cannot go on by it; one line."""


def read_vocabulary(
    model_dir: Path, eos_token_ids: Collection[int], vocab_size: int = 0
) -> llguidance.LLTokenizer:
    """The model's tokens as grammars see them; takes a second. vocab_size: of its logits, which may
    exceed the tokenizer's (no grammar allows the rest), or be less. Raises GrammarError."""
    try:
        state = read_tokenizer(model_dir)
        ends = sorted({*eos_token_ids, *_named_ends(model_dir, state)})
        text = json.dumps(_by_text(state, ends))
        try:
            return llguidance.LLTokenizer(text, n_vocab=vocab_size or None, eos_token=ends or None)
        except ValueError:  # it is less
            return llguidance.LLTokenizer(text, eos_token=ends or None)
    except (OSError, ValueError, ModelError) as error:
        raise GrammarError(f"no tokenizer for grammars: {error}") from error


def rename(state: dict[str, Any], name: Callable[[str], str]) -> None:
    """Change the names of tokens in a parsed `tokenizer.json`; `name` keeps those that it has no
    other for."""
    for entry in state["added_tokens"]:
        entry["content"] = name(entry["content"])
    model = state["model"]
    if isinstance(vocabulary := model["vocab"], dict):
        model["vocab"] = {name(text): token for text, token in vocabulary.items()}
    else:  # Unigram: pairs of a text and its score
        model["vocab"] = [[name(text), score] for text, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = name(model["unk_token"])


def _named_ends(model_dir: Path, state: dict[str, Any]) -> list[int]:
    """The token that `tokenizer_config.json` names as the end."""
    path = model_dir / CONFIG_FILE
    name = content_of(read_json(path).get("eos_token")) if path.is_file() else None
    return [added["id"] for added in state["added_tokens"] if added["content"] == name]


def _by_text(state: dict[str, Any], ends: Collection[int]) -> dict[str, Any]:
    """`state`, changed as the module says. `ends` have no text."""
    vocabulary = state["model"]["vocab"]
    if not isinstance(vocabulary, dict):  # ids are places there: the library decides
        return state
    spelled = _speller(state)
    special, kept = set(), []
    for entry in state["added_tokens"]:
        text, token = entry["content"], entry["id"]
        name = spelled(text)
        if entry["special"] or token in ends:
            special.add(text)
            entry["special"] = True
        elif text[:1] == "<" and text[-1:] == ">" and vocabulary.get(name, token) == token:
            vocabulary.pop(text, None)
            vocabulary[name] = token
            continue
        # One that the vocabulary lacks would get the id of one that is no longer before it.
        vocabulary.setdefault(text, token)
        kept.append(entry)
    state["added_tokens"] = kept
    if ends:  # without, the library knows the end by its name
        rename(state, lambda text: PRIVATE + text if text in special else text)
    return state


def _speller(state: dict[str, Any]) -> Callable[[str], str]:
    """How a vocabulary spells a text."""
    decoder = state.get("decoder") or {}
    kinds = {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}
    if "ByteLevel" not in kinds:
        return lambda text: text.replace(" ", "▁")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return lambda text: "".join(part for part, _ in bytes_of.pre_tokenize_str(text))
