"""Tokens to text: against decoding everything at once, and against cutting at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvrelay.cluster.api.text.detokenizer import Detokenizer
from kvrelay.cluster.api.text.tokenizer import Tokenizer

TEXTS = [
    "The capital of France is Paris.",
    "  leading spaces,\n\nnew lines\tand tabs ",
    "Grüße, 世界! Здравствуй мир. नमस्ते",
    "👩‍👩‍👧‍👦 and 🇫🇷, e\u0301 combined",
    "a replacement \ufffd inside \ufffd",
]


def pushed(detokenizer: Detokenizer, tokens: Sequence[int]) -> list[str]:
    texts = []
    for token in tokens:
        texts.append(detokenizer.push(token))
        if detokenizer.stopped:
            return texts
    return [*texts, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    pieces = pushed(Detokenizer(tokenizer), tokenizer.encode(text))
    assert "".join(pieces) == text


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(max_codepoint=0x1FFFF, exclude_categories=["C"]), max_size=40))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assume(tokenizer.decode(tokens) == text)  # this vocabulary lacks some bytes
    assert "".join(pushed(Detokenizer(tokenizer), tokens)) == text


def test_an_incomplete_character_is_held_back_and_shown_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("🦜")
    assert len(tokens) > 1
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in tokens[:-1]] == [""] * (len(tokens) - 1)
    assert set(detokenizer.finish()) == {"\ufffd"}


def test_what_never_becomes_utf8_is_not_held_for_ever(tokenizer: Tokenizer) -> None:
    (broken,) = {t for t in tokenizer.encode("🦜") if tokenizer.token_bytes(t) == b"\xf0\x9f"}
    pieces = pushed(Detokenizer(tokenizer), [broken] * 100)
    longest_wait = max(len(run) for run in "".join("x" if p else "." for p in pieces).split("x"))
    assert longest_wait < 10
    assert "".join(pieces).count("\ufffd") >= 90


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_token_ids[0]
    tokens = [end, *tokenizer.encode("one"), end, *tokenizer.encode(" two"), end]
    assert "".join(pushed(Detokenizer(tokenizer), tokens)) == "one two"


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Words with a space before them as '▁', and bytes where a character has no token."""
    words = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁Hello",
        "▁world",
        "▁",
        "s",
    ]
    model = tokenizers.models.BPE(
        vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens(["▁▁"])
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece_like().save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def ids(tokenizer: Tokenizer, *words: str) -> list[int]:
    vocab = sentencepiece_like().get_vocab()
    return [vocab[word] for word in words]


def test_sentencepiece_keeps_spaces_between_words(sentencepiece: Tokenizer) -> None:
    tokens = ids(sentencepiece, "▁Hello", "▁world", "s", "<s>", "▁world", "▁", "▁Hello")
    text = "".join(pushed(Detokenizer(sentencepiece), tokens))
    assert text == sentencepiece.decode(tokens) == "Hello worlds world  Hello"


def test_sentencepiece_bytes_become_characters(sentencepiece: Tokenizer) -> None:
    data = "é🦜é".encode()
    tokens = ids(sentencepiece, "▁Hello", *(f"<0x{byte:02X}>" for byte in data), "▁world")
    pieces = pushed(Detokenizer(sentencepiece), tokens)
    assert "".join(pieces) == "Helloé🦜é world"
    assert "\ufffd" not in "".join(pieces)
    assert sentencepiece.token_bytes(tokens[1]) == data[:1]
    assert sentencepiece.token_bytes(tokens[0]) == b" Hello"
    (spaces,) = sentencepiece.encode("▁▁")  # Gemma's vocabulary has such as added tokens
    assert sentencepiece.token_bytes(spaces) == b"  "


def test_characters_of_bytes_go_on_after_a_prompt_of_such(sentencepiece: Tokenizer) -> None:
    def tokens_of(data: bytes) -> list[int]:
        return ids(sentencepiece, *(f"<0x{byte:02X}>" for byte in data))

    prompt = tokens_of("🦜🦜🦜".encode())
    more = [*tokens_of("🦜é".encode()), *ids(sentencepiece, "▁world")]
    assert "".join(pushed(Detokenizer(sentencepiece, context=prompt), more)) == "🦜é world"
    for cut in (1, 2, 3):  # a prompt that ends within a character
        output = [*prompt[-cut:], *more]
        pieces = pushed(Detokenizer(sentencepiece, context=prompt[:-cut]), output)
        assert "".join(pieces) == sentencepiece.decode(output)


def test_text_that_continues_a_prompt_keeps_its_first_space(sentencepiece: Tokenizer) -> None:
    prompt, output = ids(sentencepiece, "<s>", "▁Hello"), ids(sentencepiece, "▁world")
    assert "".join(pushed(Detokenizer(sentencepiece, context=prompt), output)) == " world"
    assert "".join(pushed(Detokenizer(sentencepiece), output)) == "world"


@settings(max_examples=60, deadline=None)
@given(
    text=st.text("abAB. \n", max_size=40),
    stop=st.lists(st.text("abAB. \n", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_text_ends_exactly_before_the_first_stop_string(
    tokenizer: Tokenizer, text: str, stop: list[str]
) -> None:
    tokens = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, stop=stop)
    result = "".join(pushed(detokenizer, tokens))
    found = [at for at in map(text.find, stop) if at >= 0]
    assert detokenizer.stopped == bool(found)
    assert detokenizer.num_released == len(result)
    if not found:
        assert result == text
    else:
        # Of several, the one that is complete first ends the text, so later tokens do not count.
        assert text.startswith(result)
        assert any(text.startswith(s, len(result)) for s in stop)
        assert not any(s in result for s in stop)


def test_a_stop_string_over_several_tokens_never_shows(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("count to END-OF-TEXT and on")
    pieces = pushed(Detokenizer(tokenizer, stop=["END-OF-TEXT"]), tokens)
    assert "".join(pieces) == "count to "


def test_what_only_looked_like_a_stop_string_is_shown(tokenizer: Tokenizer) -> None:
    text = "an END-OF-TIME"
    pieces = pushed(Detokenizer(tokenizer, stop=["END-OF-TEXT"]), tokenizer.encode(text))
    assert "".join(pieces) == text


def test_stop_strings_count_after_min_tokens_only(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(" one two one two")
    detokenizer = Detokenizer(tokenizer, stop=[" one"], min_tokens=2)
    assert "".join(pushed(detokenizer, tokens)) == " one two"
