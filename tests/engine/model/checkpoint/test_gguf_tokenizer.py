"""Tokenizers of GGUF files: how text is cut, and what is refused. Cuts were compared with those of
llama.cpp on texts of many scripts, by a vocabulary that merges across all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, decoders

from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.gguf.file import GGUFFile
from kvrelay.engine.model.gguf.tokenizer import BY_NAME, end_token_ids, write_tokenizer

TEXT = "I'LL pay 12345 to HTTPServer, 你好ab!\n\n  x"
PARTS = {
    "gpt-2": "I|'|LL| pay| 12345| to| HTTPServer|,| 你好ab|!|\n\n | x",
    "smollm": "I|'|LL| pay| |1|2|3|4|5| to| HTTPServer|,| 你好ab|!|\n\n | x",
    "llama-bpe": "I|'LL| pay| |123|45| to| HTTPServer|,| 你好ab|!\n\n| | x",
    "glm4": "I|'LL| pay| |123|45| to| HTTPServer|,| 你好ab|!\n\n| | x",
    "qwen2": "I|'LL| pay| |1|2|3|4|5| to| HTTPServer|,| 你好ab|!\n\n| | x",
    "seed-coder": "I|'LL| pay| |1|2|3|4|5| to| HTTPServer|,| 你好ab|!|\n\n| | x",
    "tekken": "I|'LL| pay| |1|2|3|4|5| to| HTTPServer|,| 你好ab|!\n\n| | x",
    "gpt-4o": "I'LL| pay| |123|45| to| HTTPServer|,| 你好ab|!\n\n| | x",
    "kimi-k2": "I'LL| pay| |123|45| to| HTTPServer|,| |你好|ab|!\n\n| | x",
    "deepseek-v3": "I|'LL| pay| |123|45| to| HTTPServer|,| |你好|ab|!\n\n| | x",
}


@pytest.mark.parametrize("name", PARTS)
def test_text_is_cut_as_the_name_says(name: str) -> None:
    parts = BY_NAME[name].splitter().pre_tokenize_str(TEXT)
    decoder = decoders.ByteLevel()
    assert "|".join(decoder.decode([part]) for part, _ in parts) == PARTS[name]


def test_marks_belong_to_their_letters_in_qwen3_5_alone() -> None:
    text = "e\u0301a"
    one, other = (BY_NAME[name].splitter().pre_tokenize_str(text) for name in ("qwen35", "qwen2"))
    assert (len(one), len(other)) == (1, 2)


def write(path: Path, pre: str, model: str = "gpt2", **more: Any) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    letters = [chr(ord("!") + n) for n in range(90)]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<s>", "</s>", "<|call|>", "\u2581", *letters, "ab", "a\u2581"])
    writer.add_token_types([3, 3, 3] + [1] * (len(letters) + 3))
    writer.add_token_merges(["a b", "a \u2581"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(1)
    if "adds" in more:
        writer.add_add_bos_token(more["adds"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def ids(folder: Path, source: GGUFFile, text: str) -> list[int]:
    write_tokenizer(source, folder)
    found: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return found


@pytest.mark.parametrize(
    ("pre", "more", "begins"),
    [
        ("llama-bpe", {}, True),
        ("tekken", {}, True),
        ("qwen2", {}, False),
        ("llama-bpe", {"adds": False}, False),
        ("qwen2", {"adds": True}, True),
    ],
)
def test_prompts_begin_with_bos_where_the_file_or_its_cut_says_so(
    tmp_path: Path, pre: str, more: dict[str, bool], begins: bool
) -> None:
    found = ids(tmp_path, write(tmp_path / "m.gguf", pre, **more), "ab")
    assert found == ([0] if begins else []) + [94]


def test_a_cut_that_is_not_known_is_refused_by_its_name(tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "superbpe")
    with pytest.raises(
        ModelError, match=r"tokenizer\.ggml\.pre 'superbpe' is not supported"
    ) as told:
        write_tokenizer(source, tmp_path)
    assert "\n" not in str(told.value)


def test_gemma_4_merges_over_spaces(tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "", "gemma4")
    assert ids(tmp_path, source, "a ab") == [0, 95, 94]
    text = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode([95, 94])
    assert text == "a ab"


def test_names_that_end_an_answer_are_ends(tmp_path: Path) -> None:
    assert end_token_ids(write(tmp_path / "m.gguf", "gpt-4o")) == [1, 2]
