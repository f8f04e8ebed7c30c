"""Tokenizers that are published in other formats than tokenizer.json: Kimi's `tiktoken.model`,
against tiktoken itself, and Mistral's `tekken.json`, against transformers."""

from __future__ import annotations

import json
import random
import unicodedata
from base64 import b64encode
from pathlib import Path

import llguidance
import pytest
import tiktoken
import tokenizers
from tokenizers import Regex, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.mistral.tokenizer import MistralConverter

from kvrelay.cluster.api.text.detokenizer import Detokenizer
from kvrelay.cluster.api.text.tokenizer import Tokenizer, TokenizerError
from kvrelay.engine.model.checkpoint.tokenizer import PATTERN
from kvrelay.engine.model.sampling.vocabulary import read_vocabulary

TEXT = (
    "Grüße, it's I'm WE'LL They've don'T 世界你好，这是一个测试。日本語のテキスト、カタカナ "
    "한국어 텍스트 Привет, мир! Ελληνικά עברית العربية ไทย हिन्दी e\u0301 ǅ ʰ ſ 'ſ İ K "
    "😀👨‍👩‍👧 1234567890 ９９ ①②  \t\n\r\n   def f(x):\n\treturn x ** 2  # ok\n\u2028\u3000 "
)
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 7: "<think>"}
TEMPLATE = "{% for m in messages %}<|im_user|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
SEEDS, TEXTS = range(4), 300


def made_up_ranks(seed: int) -> dict[bytes, int]:
    """A vocabulary that was trained on TEXT, and tokens that no training gives: of any two."""
    draw = random.Random(seed)
    trained = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([cut, spelled])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    words = TEXT.split(" ")
    trained.train_from_iterator(
        [" ".join(draw.choices(words, k=40)) for _ in range(20)], trainer=trainer
    )
    by_id = sorted(trained.get_vocab().items(), key=lambda pair: pair[1])
    plain = {char: byte for byte, char in bytes_to_unicode().items()}
    tokens = [bytes(plain[char] for char in text) for text, _ in by_id]
    for _ in range(100):
        tokens.append(draw.choice(tokens) + draw.choice(tokens))
    ranks: dict[bytes, int] = {}
    for token in tokens:
        ranks.setdefault(token, len(ranks))
    return ranks


def write(path: Path, ranks: dict[bytes, int], **stated: object) -> Path:
    lines = [b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    added = {
        str(len(ranks) + place): {"content": name, "special": name != "<think>"}
        for place, name in NAMED.items()
    }
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}
    names = {"bos_token": "[BOS]", "eos_token": "[EOS]", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps({**config, **names, **stated}))
    return path


def reference_of(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """As Moonshot's own code makes it."""
    base = len(ranks)
    names = [NAMED.get(place, f"<|reserved_token_{base + place}|>") for place in range(256)]
    special = {name: base + place for place, name in enumerate(names)}
    return tiktoken.Encoding(
        "made up", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


def some_text(draw: random.Random, characters: str) -> str:
    match draw.randrange(3):
        case 0:
            start = draw.randrange(len(TEXT))
            return (TEXT * 2)[start : start + draw.randrange(200)]
        case 1:
            return "".join(draw.choices(characters, k=draw.randrange(30)))
    parts = [
        "a",
        "ab",
        "B",
        " ",
        "  ",
        "\n",
        "'s",
        "'S",
        "1",
        "世",
        "é",
        "ſ",
        "ǅ",
        "ʰ",
        *NAMED.values(),
    ]
    return "".join(draw.choices(parts, k=draw.randrange(40)))


@pytest.fixture(scope="module")
def characters() -> str:
    """All that are assigned."""
    every = map(chr, range(0x110000))
    return "".join(c for c in every if unicodedata.category(c) not in ("Cs", "Cn", "Co"))


@pytest.mark.parametrize("seed", SEEDS)
def test_texts_have_the_tokens_that_tiktoken_gives(
    tmp_path: Path, characters: str, seed: int
) -> None:
    ranks = made_up_ranks(seed)
    assert len(ranks) > 500
    tokenizer, reference = Tokenizer(write(tmp_path, ranks)), reference_of(ranks)
    draw = random.Random(seed)
    for text in (TEXT, *(some_text(draw, characters) for _ in range(TEXTS))):
        tokens = reference.encode(text, allowed_special="all")
        assert tokenizer.encode(text) == tokens, text
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text
        assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode()
        plain = reference.encode(text, disallowed_special=())  # as in a message
        assert tokenizer.encode(text, is_prompt=False) == plain, text
        stream = Detokenizer(tokenizer)
        pieces = [*map(stream.push, plain), stream.finish()]
        assert "".join(pieces) == tokenizer.decode(plain) == text


def test_reserved_ids_have_the_names_that_are_stated(tmp_path: Path) -> None:
    ranks = made_up_ranks(0)
    tokenizer = Tokenizer(write(tmp_path, ranks))
    base = len(ranks)
    assert tokenizer.vocab_size == base + 256
    for place, name in NAMED.items():
        assert tokenizer.token_id(name) == base + place
        assert tokenizer.is_special(base + place) == (name != "<think>")
    assert tokenizer.token_id(f"<|reserved_token_{base + 255}|>") == base + 255
    assert tokenizer.eos_token_ids == (base + 1,)
    assert tokenizer.num_start_tokens == 0
    said = [{"role": "user", "content": "a<|im_end|>"}]
    tokens = tokenizer.chat_prompt(said).tokens
    assert tokens[0] == base + 3
    assert tokens[-1] == base + 2
    assert tokens.count(base + 2) == 1


def test_grammars_know_its_tokens(tmp_path: Path) -> None:
    ranks = made_up_ranks(0)
    vocabulary = read_vocabulary(write(tmp_path, ranks), [])
    assert vocabulary.vocab_size == len(ranks) + 256
    assert vocabulary.eos_token == len(ranks) + 1
    matcher = llguidance.LLMatcher(vocabulary, llguidance.grammar_from("regex", "世界|x"))
    for byte in "世界".encode():
        assert matcher.consume_token(ranks[bytes([byte])])
    assert matcher.is_accepting()


def write_tekken(path: Path, ranks: dict[bytes, int], room: int) -> Path:
    """room: for tokens in the vocabulary; the file has more."""
    special = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]"}
    stated = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(ranks),
            "default_vocab_size": room + 20,
            "default_num_special_tokens": 20,
            "version": "v13",
        },
        "vocab": [
            {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None}
            for token, rank in ranks.items()
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True} for rank, text in special.items()
        ],
    }
    (path / "tekken.json").write_text(json.dumps(stated))
    return path


def test_tekken_has_the_tokens_of_transformers(tmp_path: Path, characters: str) -> None:
    ranks = made_up_ranks(5)
    room = len(ranks) - 50
    tokenizer = Tokenizer(write_tekken(tmp_path, ranks, room))
    reference = MistralConverter(str(tmp_path / "tekken.json")).converted()
    assert tokenizer.vocab_size == reference.get_vocab_size() == room + 20
    draw = random.Random(5)
    for text in (TEXT, *(some_text(draw, characters) for _ in range(TEXTS)), "[INST]a<SPECIAL_9>"):
        tokens = tokenizer.encode(text)
        assert tokens == [1, *reference.encode(text).ids], text
        assert tokenizer.decode(tokens[1:], skip_special_tokens=False) == text
    stated = json.loads((tmp_path / "tekken.json").read_text())
    del stated["special_tokens"]
    (tmp_path / "tekken.json").write_text(json.dumps(stated))
    with pytest.raises(TokenizerError, match=r"tekken\.json is not understood: KeyError"):
        Tokenizer(tmp_path)


def test_flags_concern_it_as_well(tmp_path: Path) -> None:
    ranks = made_up_ranks(0)
    write(tmp_path, ranks, add_bos_token=True)
    assert Tokenizer(tmp_path).encode("")[0] == len(ranks)


def test_what_is_no_such_tokenizer_is_refused(tmp_path: Path) -> None:
    ranks = made_up_ranks(0)
    write(tmp_path, ranks, tokenizer_class="QWenTokenizer")
    with pytest.raises(TokenizerError, match="is of a tokenizer QWenTokenizer, whose pattern"):
        Tokenizer(tmp_path)
    write(tmp_path, ranks, added_tokens_decoder={"9999": {"content": "[BOS]"}})
    with pytest.raises(TokenizerError, match="added token 9999 is not one of the 256 ids behind"):
        Tokenizer(tmp_path)
    base = len(ranks)
    same = {str(base + place): {"content": "[BOS]"} for place in range(2)}
    write(tmp_path, ranks, added_tokens_decoder=same)
    with pytest.raises(TokenizerError, match="two tokens have the same name"):
        Tokenizer(tmp_path)
    write(tmp_path, {token: rank for token, rank in ranks.items() if token != b"A"})
    with pytest.raises(TokenizerError, match=r"tiktoken\.model: line \d+ has rank \d+, not \d+"):
        Tokenizer(tmp_path)
    few = [token for token in ranks if token != b"A"]
    write(tmp_path, {token: rank for rank, token in enumerate(few)})
    with pytest.raises(TokenizerError, match="has no token of byte 65 among its"):
        Tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").write_text("!!! 0\n")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer(tmp_path)
