"""A matcher with the default model's tokens: what a grammar lets through."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import llguidance
import pytest

from kvrelay.engine.model.sampling.grammar import compile_grammar
from kvrelay.engine.model.sampling.vocabulary import GrammarError, read_vocabulary


class Matching:
    def __init__(self, vocabulary: llguidance.LLTokenizer) -> None:
        self.vocabulary = vocabulary
        self._compiled: dict[str, llguidance.LLMatcher] = {}

    def tokens(self, text: str, special: Mapping[str, int] | None = None) -> list[int]:
        """`special`: parts of the text that are one token."""
        ids = special or {}
        pattern = "|".join(map(re.escape, ids))
        parts = re.split(f"({pattern})", text) if ids else [text]
        tokens: list[int] = []
        for part in parts:
            tokens += [ids[part]] if part in ids else self.vocabulary.tokenize_str(part)
        return tokens

    def accepts(self, grammar: str, text: str, special: Mapping[str, int] | None = None) -> bool:
        """Whether `text` is a whole output by `grammar`."""
        tokens = self.tokens(text, special)
        matcher = self.compiled(grammar)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def compiled(self, grammar: str) -> llguidance.LLMatcher:
        """In its initial state."""
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = compile_grammar(self.vocabulary, grammar)
        found.reset()
        return found

    def error(self, grammar: str) -> str:
        """Why it does not compile; empty: it does."""
        try:
            compile_grammar(self.vocabulary, grammar)
        except GrammarError as error:
            return str(error)
        return ""


@pytest.fixture(scope="session")
def matching(smollm2_dir: Path) -> Matching:
    return Matching(read_vocabulary(smollm2_dir, ()))
