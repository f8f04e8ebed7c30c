"""What is text in an output is text to its grammar, whatever form a model's added tokens have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from kvrelay.cluster.api.constraints.grammar import grammar_of, tokens_named
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.model.sampling.grammar import compile_grammar
from kvrelay.engine.model.sampling.vocabulary import read_vocabulary
from tests.cluster.api.text.families import FAMILIES, Family

_NAMED = b"\xff[%d]"  # a token, where an output is bytes


class Model:
    def __init__(self, family: Family, folder: Path) -> None:
        self.directory = family.write(folder / family.name)
        self.tokenizer = Tokenizer(self.directory)
        self.vocabulary = read_vocabulary(self.directory, self.tokenizer.eos_token_ids)
        self.plain = tokenizers.Tokenizer.from_file(str(self.directory / "tokenizer.json"))

    def grammar(self, kind: str, value: Any) -> str:
        return grammar_of(kind, value, {}, self.tokenizer.added_ids(tokens_named(kind, value)))

    def accepts(self, grammar: str, *parts: str | int) -> bool:
        """Whether an output of texts, character by character, and of tokens is whole; by masks and
        with the tokens that have to follow, as a worker does it."""
        matcher = compile_grammar(self.vocabulary, grammar)
        left = b"".join(p.encode() if isinstance(p, str) else _NAMED % p for p in parts)
        while left:
            forced = matcher.compute_ff_tokens()
            tokens = forced or [self._first(left)]
            for token in tokens:
                mask = matcher.compute_bitmask()
                written = _NAMED % token
                if not left.startswith(written):
                    written = self.vocabulary.decode_bytes([token])
                allowed = mask[token // 8] >> token % 8 & 1
                if not left.startswith(written) or not allowed or not matcher.consume_token(token):
                    return False
                left = left.removeprefix(written)
        return matcher.is_accepting()

    def _first(self, left: bytes) -> int:
        if named := re.match(rb"\xff\[(\d+)\]", left):
            return int(named[1])
        return self.tokenizer.encode(left.decode(errors="replace")[0], is_prompt=False)[0]


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    return Model(request.param, tmp_path)


def test_only_what_the_output_leaves_out_is_special_to_a_grammar(model: Model) -> None:
    ends = model.tokenizer.eos_token_ids
    for token in range(model.plain.get_vocab_size()):
        has_text = not model.tokenizer.is_special(token) and token not in ends
        written = model.vocabulary.decode_bytes([token])
        if model.tokenizer.token_bytes(token) == b"\xff":
            continue  # the library marks special tokens by it; no text has that byte
        assert model.vocabulary.is_special_token(token) != has_text, token
        if has_text:
            assert written == model.tokenizer.token_bytes(token)


@pytest.mark.slow
def test_text_may_spell_any_token(model: Model) -> None:
    for entry in model.plain.get_added_tokens_decoder().values():
        text = f"a{entry.content.replace('▁', ' ')}b"
        assert model.accepts(model.grammar("choice", [text]), text), text
        written = json.dumps(text, ensure_ascii=False)
        assert model.accepts(model.grammar("json", {"const": text}), written), text


def test_text_may_be_written_by_a_token_that_has_text(model: Model) -> None:
    grammar = model.grammar("regex", r"(.|\n)*")
    for token, entry in model.plain.get_added_tokens_decoder().items():
        is_text = not model.tokenizer.is_special(token)
        assert model.accepts(grammar, "a", token, "b") == is_text, entry.content


def test_a_grammar_may_name_tokens(model: Model) -> None:
    """In Lark, and by what structural tags begin and end with."""
    tokens = model.plain.get_added_tokens_decoder()
    names = {entry.content: token for token, entry in [*tokens.items()][:40]}
    for name, token in names.items():
        if not tokens_named("grammar", name) or token in model.tokenizer.eos_token_ids:
            continue
        text = f"{name} / {name} # {name}"
        if name[0] == "<":
            grammar = model.grammar("grammar", f"start: {json.dumps(text)} {name} /a/ // {name}")
            assert model.accepts(grammar, text, token, "a"), name
        tag = {"begin": f"{name}x", "schema": {"const": 1}, "end": name}
        grammar = model.grammar("structural_tag", {"structures": [tag], "triggers": [name]})
        assert model.accepts(grammar, "Hi", token, "x1", token, "!"), name
