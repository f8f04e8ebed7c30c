"""Conversations for the small hybrid: what is to be answered was said before, and is one token."""

import pytest

from kvrelay.training.corpus import (
    NAMES,
    NO_TARGET,
    NUM_FACTS,
    THINGS,
    Corpus,
    fact,
    make_tokenizer,
)

TOKENIZER = make_tokenizer()


def test_names_and_things_are_one_token_each() -> None:
    for word in NAMES + THINGS:
        assert len(TOKENIZER.encode(f" {word}").ids) == 1, word
    text = fact("Anna", "plums") + " Zürich 🦙"
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


@pytest.mark.parametrize(("length", "before"), [(128, 0), (256, 160), (1024, 400)])
def test_answers_are_what_was_said_before(length: int, before: int) -> None:
    sample = Corpus(TOKENIZER, seed=1).conversation(length, before)
    assert len(sample.tokens) == len(sample.targets) == length
    assert len(sample.answers) > NUM_FACTS
    for place in sample.answers:
        likes = sample.tokens[place - 1 : place + 1]
        known = {
            sample.tokens[at + 2] for at in range(place - 3) if sample.tokens[at : at + 2] == likes
        }
        assert known == {sample.targets[place]}


def test_the_same_seed_gives_the_same_text_and_other_sentences_are_held_out() -> None:
    one, other = (Corpus(TOKENIZER, seed=2) for _ in range(2))
    assert one.conversation(256, 100) == other.conversation(256, 100)
    sample = one.reference(64)
    assert sample.tokens[1:] == sample.targets[:-1]
    assert NO_TARGET not in sample.targets
    assert len(one.held_out) > 100
    assert not [each for each in one.held_out if each in one._sentences]
