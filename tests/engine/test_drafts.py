"""What is guessed of the tokens to come, and how many guesses are fed along."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafts import DEAREST_ROW, LONGEST, NGRAM, Drafter, Lookup
from engine.kv.block_hash import BlockChain, CacheScope
from engine.kv.tier import DEFAULT_RETENTION
from engine.request import SamplingParams
from engine.sequence import Sequence

POOL = 10_000


def guess_of(tokens: list[int], most: int) -> list[int]:
    """As a lookup that never saw `tokens` before: what followed the last time."""
    for at in range(len(tokens) - NGRAM - 1, -1, -1):
        if tokens[at : at + NGRAM] == tokens[-NGRAM:]:
            known = list(tokens)
            for source in range(at + NGRAM, at + NGRAM + most):
                known.append(known[source])
            return known[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 9))
def test_a_guess_is_what_followed_the_last_tokens_where_they_stood_last(tokens, most) -> None:
    assert Lookup(0.5).guess(tokens, most) == guess_of(tokens, most)


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(0, 2))
def test_after_one_that_did_not_hold_it_is_looked_for_anew(tokens, token) -> None:
    lookup = Lookup(0.5)
    guess = lookup.guess(tokens, 4)
    known = [*tokens, token]
    if guess[:1] != [token]:
        assert lookup.guess(known, 4) == guess_of(known, 4)


def test_after_one_that_held_it_goes_on_where_that_was_found() -> None:
    """And not where the last tokens stood since."""
    tokens = [1, 2, 3, 7, 8, 4, 4, 4, 2, 3, 7, 9, 4, 4, 1, 2, 3]
    lookup = Lookup(0.5)
    assert lookup.guess(tokens, 1) == [7]
    assert lookup.guess([*tokens, 7], 2) == [8, 4]
    assert Lookup(0.5).guess([*tokens, 7], 2) == [9, 4]


def test_a_guess_goes_round_where_the_text_does() -> None:
    tokens = [9, 1, 2, 3, 1, 2, 3, 1]
    assert Lookup(0.5).guess(tokens, 7) == [2, 3, 1, 2, 3, 1, 2]
    assert Lookup(0.5).guess([5] * 4, 5) == [5] * 5
    assert Lookup(0.5).guess([5] * NGRAM, 5) == []


def test_numbers_of_any_bytes_are_found_only_where_tokens_begin() -> None:
    """Bytes of neighbours look like a token that is not there."""
    rng = Random(3)
    choices = [0, 1, 256, 65_536, 1 << 24, 257, (1 << 32) - 1]
    for _ in range(300):
        tokens = rng.choices(choices, k=40)
        assert Lookup(0.5).guess(tokens, 3) == guess_of(tokens, 3)


def test_the_share_that_holds_is_learned_up_to_the_first_that_does_not() -> None:
    lookup = Lookup(0.5)
    assert lookup.guess([1, 2, 3, 4, 1, 2, 3], 3) == [4, 1, 2]
    lookup.learn([4, 9])
    once = 0.5 + 0.15 * 0.5
    assert lookup.held == pytest.approx(once - 0.15 * once)
    held = lookup.held
    lookup.learn([1, 1, 1])  # after a guess that was seen already
    assert lookup.held == held


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(
        request_id="r",
        attempt=0,
        router="router",
        tokens=tokens,
        num_prompt_tokens=1,
        sampling=SamplingParams(),
        deadline=1.0,
        arrived_at=0.0,
        chain=BlockChain(b"", CacheScope(), 16),
        retention=DEFAULT_RETENTION,
    )


def drafter(most: int = 7, max_rows: int = 64) -> Drafter:
    return Drafter(most, max_rows, POOL)


def looping(length: int = 40) -> Sequence:
    return sequence([1, 2, 3, 4, 5] * (length // 5))


def weights(row: float, kv: float = 0.0) -> tuple[float, ...]:
    """Of passes of which a row takes so much of one with a single row; and what a full pool adds
    for each."""
    return (1.0 - row, 16.0 * row, 0.0, kv)


def counts(found: list[list[int]] | None) -> list[int]:
    return [len(guess) for guess in found or []]


def taught(made: Drafter, seq: Sequence, *, holds: bool, times: int = 30) -> None:
    for _ in range(times):
        guess = made.plan([seq], [7], weights(0.001))
        made.learn(seq, guess[0] if guess and holds else [99])


def test_cheap_rows_are_filled_as_far_as_there_is_room() -> None:
    seq = looping()
    assert drafter().plan([seq], [5], weights(0.01)) == [[1, 2, 3, 4, 5]]
    assert counts(drafter().plan([seq], [20], weights(0.01))) == [5], "0.5 ** 6 is not worth it"
    made = drafter()
    taught(made, seq, holds=True)
    assert counts(made.plan([seq], [20], weights(0.01))) == [7]
    assert made.plan([seq], [0], weights(0.01)) is None
    assert drafter(most=0).plan([seq], [20], weights(0.01)) is None


def test_what_does_not_hold_is_fed_no_more_and_tried_again_when_it_would_have_held() -> None:
    made, seq = drafter(), looping()
    taught(made, seq, holds=False)
    assert made.plan([seq], [7], weights(0.05)) is None
    for _ in range(10):
        made.plan([seq], [7], weights(0.05))
        made.learn(seq, [1])
    assert counts(made.plan([seq], [7], weights(0.05)))[0] > 0


def test_dear_rows_are_left_out() -> None:
    """Of a large batch, and of long contexts."""
    many = [looping() for _ in range(30)]
    assert drafter().plan(many, [7] * 30, weights(0.9)) is None
    assert counts(drafter().plan(many, [7] * 30, weights(0.005))) != []
    long = [looping(4_000), looping(4_000)]
    assert drafter().plan(long, [7, 7], weights(0.01, kv=3.0)) is None
    assert counts(drafter().plan(long, [7, 7], weights(0.01, kv=0.01))) != []


def test_a_few_slow_passes_do_not_end_drafts_of_one_sequence_for_ever() -> None:
    made, seq = drafter(), looping()
    taught(made, seq, holds=True)
    assert counts(made.plan([seq], [7], weights(0.95)))[0] > 0
    assert DEAREST_ROW < 0.5


def test_others_do_not_wait_much_longer_for_those_that_guess() -> None:
    made = drafter()
    seqs = [looping() for _ in range(8)]
    for seq in seqs:
        taught(made, seq, holds=True)
    row = 0.02
    total = sum(counts(made.plan(seqs, [7] * 8, weights(row))))
    pass_s = 1.0 - row + 8 * row
    assert 0 < total * row / pass_s <= LONGEST - 1
    assert (total + 1) * row / pass_s > LONGEST - 1


def test_those_whose_guesses_hold_come_first() -> None:
    made = drafter(max_rows=8)
    good, bad = looping(), looping()
    taught(made, good, holds=True)
    taught(made, bad, holds=False)
    assert counts(made.plan([bad, good], [7, 7], weights(0.001))) == [0, 6], "8 rows in all"


def test_new_ones_are_expected_to_be_as_others_were() -> None:
    made = drafter()
    for _ in range(20):
        seq = looping()
        taught(made, seq, holds=False, times=10)
        made.forget(seq)
    assert made.plan([looping()], [7], weights(0.1)) is None


def test_before_anything_was_measured_rows_are_tried() -> None:
    found: Any = drafter().plan([looping()], [7], ())
    assert counts(found)[0] > 0
