"""What a model is asked: nothing that it is measured with."""

from pathlib import Path

import pytest

from kvrelay.training.draft.prompts import WORDS, Questions, read_prompts


def test_questions_that_are_held_out_have_subjects_of_their_own() -> None:
    asked, held_out = (set(Questions(5, part).take(2_000)) for part in (False, True))
    assert len(asked) == 2_000
    assert not asked & held_out
    for words in WORDS.values():
        assert words[11::12]
        for word in words[11::12]:
            assert not any(f" {word}." in each or f" {word}?" in each for each in asked), word


def test_the_benchmarks_prompts_and_their_subjects_are_not_asked() -> None:
    requests = pytest.importorskip("benchmarks.engine.speculation").requests
    texts = Questions(5, False).take(3_000) + Questions(5, True).take(1_000)
    assert not {*requests().values()} & {*texts}
    for subject in ("lighthouse", "France,", "twenty animals", "Oslo"):
        assert not any(subject in each for each in texts), subject


def test_questions_are_the_same_for_the_same_seed() -> None:
    assert Questions(5, False).take(50) == Questions(5, False).take(50)
    assert Questions(5, False).take(50) != Questions(6, False).take(50)


def test_own_prompts_come_in_turn_but_for_those_held_out(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"prompt {n}\n" for n in range(13)))
    own = read_prompts(path)
    assert Questions(1, True, own).take(2) == ["prompt 11", "prompt 11"]
    questions = Questions(1, False, own)
    assert questions.take(3) == ["prompt 0", "prompt 1", "prompt 2"]
    assert questions.take(10)[-2:] == ["prompt 12", "prompt 0"]
    path.write_text("one\n\none\n")
    with pytest.raises(ValueError, match="has 1 prompts, one a line: at least 12 are needed"):
        read_prompts(path)
