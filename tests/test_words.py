"""Words: identifiers are the field's, and none of those that were renamed comes back."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure import PACKAGES, ROOT

# Word in an identifier -> what it is called now.
WORDS = {
    "calendar": "reservations by the time when they are due",
    "fed": "scheduled, computed or drafted",
    "foretold": "drafted",
    "frontend": "router process",
    "frontends": "router processes",
    "guess": "draft token",
    "guesses": "draft tokens",
    "halves": "fp16",
    "heed": "on_kv_events",
    "integers": "int16, int8",
    "keeper": "retain_on",
    "keepers": "retention policy",
    "keeping": "retention",
    "lender": "producer of a prefix export; fetch source",
    "lenders": "fetch sources",
    "lending": "prefix export; fetch",
    "lendings": "fetches",
    "loan": "prefix export",
    "loans": "prefix exports",
    "narrowed": "low-precision",
    "outbox": "messages",
    "pace": "step timing",
    "placements": "replica sync",
    "promise": "reservation",
    "promises": "reservations",
}
# Whole identifier -> what it is called now.
IDENTIFIERS = {
    "KVRead": "KVConfirmRequest",
    "Keeper": "RetainOn",
    "Lender": "Producer",
    "LoggedRequest": "RequestRecord",
    "NamedPrompt": "HashedPrompt",
    "Pace": "StepTiming",
    "Placed": "PromptRouted",
    "Places": "ConcurrencyLimiter",
    "ReadBlocks": "CopyBlocks",
    "ReadDone": "CopyDone",
    "TierNames": "TierHashes",
    "block_names": "block_hashes",
    "chain_names": "chain_hashes",
    "packed_names": "packed_hashes",
}
SOURCES = [
    path for top in PACKAGES for end in ("py", "c", "h") for path in (ROOT / top).rglob(f"*.{end}")
]
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
_NAME = re.compile(r"^\w?[\"']([A-Za-z_][\w.]*)[\"']$")  # a text that is one
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\])*\"", re.DOTALL)


def identifiers(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from re.findall(r"[A-Za-z_]\w*", _COMMENT.sub(" ", text))
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.string
        elif token.type == tokenize.STRING:  # metrics, attributes, keys
            yield from _NAME.findall(token.string)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_identifier_has_a_word_that_was_renamed(path: Path) -> None:
    found = set(identifiers(path))
    wrong = {each: IDENTIFIERS[each] for each in found & IDENTIFIERS.keys()}
    for each in found:
        for word in _WORD.findall(each):
            if word.lower() in WORDS:
                wrong[each] = WORDS[word.lower()]
    assert not wrong, f"call them by the field's words: {wrong}"


def test_the_words_of_an_identifier_are_found() -> None:
    assert _WORD.findall("num_lendings_KVReadDone2") == [
        "num",
        "lendings",
        "KV",
        "Read",
        "Done",
        "2",
    ]
