"""Prompts for text in the middle, by what a model's tokenizer has for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from kvrelay.cluster.api.text.tokenizer import NoInfill, Tokenizer, infill_prompt


def made(tmp_path: Path, smollm2_dir: Path, *added: str, start: str = "") -> Tokenizer:
    """The default model's tokenizer with more special tokens; each prompt begins with `start`."""
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    tokenizer.add_special_tokens([*added, *([start] if start else [])])
    if start:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, tokenizer.token_to_id(start))]
        )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    return Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("names", "written"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "0 before 1 after 2"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "0 before 1 after 2"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "0 before 1 after 2"),
        (("[SUFFIX]", "[PREFIX]"), "0 after 1 before"),
    ],
)
@pytest.mark.parametrize("start", ["", "<s>"])
def test_both_texts_stand_between_the_tokens_of_the_model(
    tmp_path: Path, smollm2_dir: Path, names: tuple[str, ...], written: str, start: str
) -> None:
    tokenizer = made(tmp_path, smollm2_dir, *names, start=start)
    texts = {"before": "def f(x):\n    return ", "after": "\n\nprint(f(2))"}
    found = infill_prompt(tokenizer, tokenizer.encode(texts["before"]), texts["after"])
    expected = [tokenizer.token_id(start)] if start else []
    for part in written.split():
        if part in texts:
            expected += tokenizer.encode(texts[part], add_special_tokens=False)
        else:
            expected.append(tokenizer.token_id(names[int(part)]))
    assert found == expected


def test_a_model_without_such_tokens_says_so(smollm2_dir: Path) -> None:
    tokenizer = Tokenizer(smollm2_dir)
    with pytest.raises(NoInfill, match="no tokens"):
        infill_prompt(tokenizer, tokenizer.encode("a"), "b")


def test_a_mark_in_the_suffix_is_text(tmp_path: Path, smollm2_dir: Path) -> None:
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    tokenizer = made(tmp_path, smollm2_dir, *names)
    found = infill_prompt(tokenizer, tokenizer.encode("a"), f"b{names[2]}c")
    assert [found.count(tokenizer.token_id(name)) for name in names] == [1, 1, 1]
    assert names[2] in tokenizer.decode(found[:-1], skip_special_tokens=False)
