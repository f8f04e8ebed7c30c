"""Which draft tokens are proposed, and how many a pass verifies."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrelay.engine.cost import DraftCosts
from kvrelay.engine.scheduling.drafts import (
    MAX_ROW_COST,
    MAX_SLOWDOWN,
    NGRAM_SIZE,
    SEARCHED_TOKENS,
    Draft,
    Drafts,
    NgramProposer,
)
from kvrelay.engine.sequence import Sequence
from tests.engine.sequences import sequence

POOL = 10_000


def followers_of(tokens: list[int], most: int) -> list[int]:
    """As a proposer that never saw `tokens` before: what followed the last time."""
    for at in range(len(tokens) - NGRAM_SIZE - 1, -1, -1):
        if tokens[at : at + NGRAM_SIZE] == tokens[-NGRAM_SIZE:]:
            known = list(tokens)
            for source in range(at + NGRAM_SIZE, at + NGRAM_SIZE + most):
                known.append(known[source])
            return known[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 9))
def test_a_draft_is_what_followed_the_last_n_gram_where_it_occurred_last(tokens, most) -> None:
    assert NgramProposer(0.5).propose(tokens, most) == followers_of(tokens, most)


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(0, 2))
def test_after_a_rejected_draft_the_n_gram_is_looked_up_again(tokens, token) -> None:
    proposer = NgramProposer(0.5)
    draft = proposer.propose(tokens, 4)
    known = [*tokens, token]
    if draft[:1] != [token]:
        assert proposer.propose(known, 4) == followers_of(known, 4)


def test_after_an_accepted_draft_the_next_comes_from_the_same_place() -> None:
    """It does not come from a later occurrence of the last n-gram."""
    tokens = [1, 2, 3, 7, 8, 4, 4, 4, 2, 3, 7, 9, 4, 4, 1, 2, 3]
    proposer = NgramProposer(0.5)
    assert proposer.propose(tokens, 1) == [7]
    assert proposer.propose([*tokens, 7], 2) == [8, 4]
    assert NgramProposer(0.5).propose([*tokens, 7], 2) == [9, 4]


def test_drafts_follow_a_prediction_from_the_first_token_of_output() -> None:
    prompt, prediction = [1, 2, 3, 4], [11, 12, 13, 14, 15, 16, 17]
    proposer = NgramProposer(0.5, prediction, len(prompt))
    assert proposer.propose([*prompt, 11], 3) == [12, 13, 14]
    assert proposer.propose([*prompt, 11, 12, 13], 9) == [14, 15, 16, 17]
    assert proposer.propose([*prompt, *prediction], 3) == []
    # A worker that takes over finds the same place.
    taken = NgramProposer(0.5, prediction, len(prompt))
    assert taken.propose([*prompt, 11, 12, 13], 9) == [14, 15, 16, 17]


def test_after_what_was_not_predicted_it_is_taken_up_again() -> None:
    prompt, prediction = [1, 2, 3, 4], [11, 12, 13, 14, 15, 16, 17]
    proposer = NgramProposer(0.5, prediction, len(prompt))
    assert proposer.propose([*prompt, 11, 99], 3) == []
    assert proposer.propose([*prompt, 11, 99, 13, 14, 15], 3) == [16, 17]
    # What the sequence itself has counts first.
    again = [*prompt, 11, 12, 13, 50, 51, 11, 12, 13]
    assert NgramProposer(0.5, [0, *prediction], len(prompt)).propose(again, 2) == [50, 51]


@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.lists(st.integers(0, 2), max_size=20),
    st.lists(st.integers(0, 2), max_size=30),
    st.integers(1, 9),
)
def test_any_prediction_gives_drafts_of_known_tokens(prompt, prediction, output, most) -> None:
    proposer, whole = NgramProposer(0.5, prediction, len(prompt)), [*prompt]
    for token in output:
        whole.append(token)
        draft = proposer.propose(whole, most)
        assert len(draft) <= most
        assert set(draft) <= {*prompt, *prediction, *whole}


def test_a_draft_of_a_periodic_text_is_periodic() -> None:
    tokens = [9, 1, 2, 3, 1, 2, 3, 1]
    assert NgramProposer(0.5).propose(tokens, 7) == [2, 3, 1, 2, 3, 1, 2]
    assert NgramProposer(0.5).propose([5] * 4, 5) == [5] * 5
    assert NgramProposer(0.5).propose([5] * NGRAM_SIZE, 5) == []


def test_tokens_of_any_bits_are_found_only_where_they_are() -> None:
    """Bits of neighbours look like a token that is not there."""
    rng = Random(3)
    choices = [0, 1, 256, 65_536, 1 << 20, 257, (1 << 21) - 2]
    for _ in range(300):
        tokens = rng.choices(choices, k=40)
        assert NgramProposer(0.5).propose(tokens, 3) == followers_of(tokens, 3)


def test_a_long_text_is_searched_as_far_as_is_said_and_as_it_grows() -> None:
    rng = Random(4)
    near = [rng.randrange(1000, 50_000) for _ in range(SEARCHED_TOKENS - 10)]
    tokens = [1, 2, 3, 4, *near, 1, 2, 3]
    assert NgramProposer(0.5).propose(tokens, 1) == [4]
    assert NgramProposer(0.5).propose([1, 2, 3, 4, *near, *range(100, 110), 1, 2, 3], 1) == []
    proposer, whole = NgramProposer(0.5), list[int]()
    for end in range(7, 3 * SEARCHED_TOKENS, 1111):  # more than it keeps
        whole = [*whole, *(rng.randrange(30) for _ in range(end - len(whole)))]
        last = whole[-SEARCHED_TOKENS:]
        assert proposer.propose(whole, 1) == followers_of(last, 1)


def test_the_acceptance_rate_counts_drafts_up_to_the_first_rejected_one() -> None:
    proposer = NgramProposer(0.5)
    assert proposer.propose([1, 2, 3, 4, 1, 2, 3], 3) == [4, 1, 2]
    proposer.on_verified([4, 9])
    once = 0.5 + 0.15 * 0.5
    assert proposer.acceptance_rate == pytest.approx(once - 0.15 * once)
    rate = proposer.acceptance_rate
    proposer.on_verified([1, 1, 1])  # after a draft that was verified already
    assert proposer.acceptance_rate == rate


def drafter(max_drafts: int = 7, max_rows: int = 64) -> Drafts:
    return Drafts(max_drafts, max_rows, POOL)


def looping(length: int = 40) -> Sequence:
    return sequence([1, 2, 3, 4, 5] * (length // 5), num_prompt_tokens=1)


def weights(row: float, kv: float = 0.0, depth: float = 0.05, begin: float = 0.0) -> DraftCosts:
    """Describes passes whose rows each take so much of one with a single row; and what a full pool
    adds for each. depth, begin: of the executor's drafter, likewise."""
    return DraftCosts((1.0 - row, 16.0 * row, 0.0, kv), (begin, depth, 0.0), 0.05)


def counts(found: list[Draft] | None) -> list[int]:
    return [draft.num_asked or len(draft.tokens) for draft in found or []]


def trained(made: Drafts, seq: Sequence, *, accepted: bool, times: int = 30) -> None:
    for _ in range(times):
        draft = made.plan([seq], [7], weights(0.001))
        made.on_verified(seq, draft[0].tokens if draft and accepted else [99])


def test_cheap_rows_are_filled_as_far_as_there_is_room() -> None:
    seq = looping()
    assert drafter().plan([seq], [5], weights(0.01)) == [Draft([1, 2, 3, 4, 5])]
    assert counts(drafter().plan([seq], [20], weights(0.01))) == [5], "0.5 ** 6 is not worth it"
    made = drafter()
    trained(made, seq, accepted=True)
    assert counts(made.plan([seq], [20], weights(0.01))) == [7]
    assert made.plan([seq], [0], weights(0.01)) is None
    assert drafter().is_worth_it([seq], weights(0.01))
    assert not drafter(max_drafts=0).is_worth_it([seq], weights(0.01))


def test_rejected_drafts_end_and_come_again_when_they_would_have_been_accepted() -> None:
    made, seq = drafter(), looping()
    trained(made, seq, accepted=False)
    assert made.plan([seq], [7], weights(0.05)) is None
    for _ in range(10):
        made.plan([seq], [7], weights(0.05))
        made.on_verified(seq, [1])
    assert counts(made.plan([seq], [7], weights(0.05)))[0] > 0


def test_expensive_rows_get_no_drafts() -> None:
    """A large batch has expensive rows, and so have long contexts."""
    many = [looping() for _ in range(30)]
    assert drafter().plan(many, [7] * 30, weights(0.9)) is None
    assert counts(drafter().plan(many, [7] * 30, weights(0.005))) != []
    long = [looping(4_000), looping(4_000)]
    assert drafter().plan(long, [7, 7], weights(0.01, kv=3.0)) is None
    assert counts(drafter().plan(long, [7, 7], weights(0.01, kv=0.01))) != []


def test_a_few_slow_passes_do_not_end_drafts_of_one_sequence_for_ever() -> None:
    made, seq = drafter(), looping()
    trained(made, seq, accepted=True)
    assert counts(made.plan([seq], [7], weights(0.95)))[0] > 0
    assert MAX_ROW_COST < 0.5


def test_sequences_do_not_wait_much_longer_for_the_drafts_of_others() -> None:
    made = drafter()
    seqs = [looping() for _ in range(8)]
    for seq in seqs:
        trained(made, seq, accepted=True)
    row = 0.02
    total = sum(counts(made.plan(seqs, [7] * 8, weights(row))))
    pass_s = 1.0 - row + 8 * row
    assert 0 < total * row / pass_s <= MAX_SLOWDOWN - 1
    assert (total + 1) * row / pass_s > MAX_SLOWDOWN - 1


def test_sequences_with_a_higher_acceptance_rate_come_first() -> None:
    made = drafter(max_rows=8)
    good, bad = looping(), looping()
    trained(made, good, accepted=True)
    trained(made, bad, accepted=False)
    assert counts(made.plan([bad, good], [7, 7], weights(0.001))) == [0, 6], "8 rows in all"


def test_a_new_sequence_begins_with_the_acceptance_rate_of_the_others() -> None:
    made = drafter()
    for _ in range(20):
        seq = looping()
        trained(made, seq, accepted=False, times=10)
        made.forget(seq)
    assert made.plan([looping()], [7], weights(0.1)) is None


def test_drafts_are_tried_before_costs_were_measured() -> None:
    found: Any = drafter().plan([looping()], [7])
    assert counts(found)[0] > 0


def asking(max_drafts: int = 7) -> Drafts:
    return Drafts(max_drafts, 64, POOL, has_drafter=True)


def without_repetition() -> Sequence:
    return sequence(list(range(40)), num_prompt_tokens=1)


def asked(made: Drafts, seq: Sequence, accepted: int, times: int) -> None:
    """So many times the drafter is asked, and that many of its tokens are right."""
    for _ in range(times):
        found = made.plan([seq], [7], weights(0.01))
        count = found[0].num_asked if found else 0
        made.on_verified(seq, [1] * (1 + min(accepted, count)), count)


def test_a_drafter_is_asked_for_as_many_tokens_as_pay() -> None:
    made, seq = asking(), without_repetition()
    first = made.plan([seq], [7], weights(0.01))
    assert first
    assert 0 < first[0].num_asked < 7, "half of them are expected to be right"
    asked(made, seq, accepted=7, times=30)
    assert counts(made.plan([seq], [7], weights(0.01))) == [7]
    assert counts(made.plan([seq], [3], weights(0.01))) == [3]
    assert made.plan([seq], [7], weights(0.01, depth=0.9)) is None, "it takes as long as the model"


def test_a_drafter_that_is_wrong_is_asked_no_more_but_now_and_then() -> None:
    made, seq = asking(), without_repetition()
    asked(made, seq, accepted=0, times=20)
    tried = []
    for _ in range(400):
        found = made.plan([seq], [7], weights(0.01, depth=0.2))
        tried.append(found is not None)
        made.on_verified(seq, [1], found[0].num_asked if found else 0)
    assert 1 < sum(tried) < 40


def test_a_drafter_that_was_slow_is_measured_again_now_and_then() -> None:
    """Or one slow moment, of a machine that others used, would end its drafts for ever."""
    made, seq = asking(), without_repetition()
    asked(made, seq, accepted=7, times=30)
    tried = []
    for _ in range(250):
        found = made.plan([seq], [7], weights(0.01, depth=0.9))
        tried.append(found is not None)
        count = found[0].num_asked if found else 0
        made.on_verified(seq, [1] * (1 + count if count else 8), count)  # or eight passes in a row
    assert not any(tried[:6])
    assert 1 < sum(tried) < 25


def test_of_n_grams_and_a_drafter_the_one_that_gains_more_is_used() -> None:
    made, seq = asking(), looping()
    trained(made, seq, accepted=True)
    assert made.plan([seq], [5], weights(0.01)) == [Draft([1, 2, 3, 4, 5])]
    other = asking()
    for _ in range(20):
        other.plan([seq], [7], weights(0.001, depth=0.001))
        other.on_verified(seq, [99, 98, 97], 3)  # not what n-grams say, but what the drafter does
    found = other.plan([seq], [5], weights(0.01))
    assert found
    assert found[0].num_asked > 0


def accepting(made: Drafts, seq: Sequence, share: float) -> None:
    """The drafter is right so often, as far as `made` knows."""
    made._asked_rates[seq] = share


def several(made: Drafts, count: int, share: float, make: Any) -> list[Sequence]:
    seqs = [make() for _ in range(count)]
    for seq in seqs:
        accepting(made, seq, share)
    return seqs


def test_n_grams_are_offered_where_the_drafter_is_right_more_often_but_too_dear() -> None:
    made = asking()
    seqs = several(made, 4, 0.6, looping)
    found = made.plan(seqs, [7] * 4, weights(0.02, depth=0.5, begin=0.5))
    assert found
    assert all(draft.tokens and not draft.num_asked for draft in found)
    cheap = made.plan(seqs, [7] * 4, weights(0.02, depth=0.001))
    assert cheap
    assert all(draft.num_asked for draft in cheap)


def test_a_pass_of_the_drafter_is_shared_by_all_sequences() -> None:
    """What does not pay for one does for four; what each token costs does not."""
    made = asking()
    seqs = several(made, 4, 0.6, without_repetition)
    costs = weights(0.01, depth=0.4, begin=0.05)
    assert made.plan(seqs[:1], [7], DraftCosts(costs.rows, (0.1, 0.6, 0.0), 0.05)) is None
    found = made.plan(seqs, [7] * 4, weights(0.01, depth=0.4, begin=0.05))
    assert found
    assert {draft.num_asked for draft in found} != {0}
    each = DraftCosts(costs.rows, (0.0, 0.0, 16 * 0.6), 0.05)
    assert made.plan(seqs, [7] * 4, each) is None


def test_both_sources_may_have_a_part_in_one_pass() -> None:
    made = asking()
    repeating, other = looping(), without_repetition()
    trained(made, repeating, accepted=True)
    asked(made, other, accepted=7, times=30)
    accepting(made, repeating, 0.3)
    first, second = made.plan([repeating, other], [7, 7], weights(0.01)) or []
    assert first.tokens
    assert second.num_asked > 0


def test_with_sixteen_sequences_the_drafter_is_not_asked_and_keeps_nothing_after_a_while() -> None:
    made = asking()
    seqs = several(made, 16, 0.5, without_repetition)
    assert made.makes_slots(16)
    for _ in range(12):
        assert made.plan(seqs, [7] * 16, weights(0.04)) is None
        for seq in seqs:
            made.on_verified(seq, [1])
    assert not made.makes_slots(16)
    assert made.makes_slots(1)
    asked(made, seqs[0], accepted=3, times=1)
    assert made.makes_slots(16), "once it is asked again"


def test_what_a_new_worker_has_not_measured_yet_is_tried_with_up_to_four_sequences() -> None:
    for count, is_asked in ((1, True), (2, True), (4, True), (16, False)):
        made = asking()
        seqs = several(made, count, 0.5, without_repetition)
        found = made.plan(seqs, [7] * count, DraftCosts((0.01, 0.005, 0.0, 0.0)))
        assert (found is not None) == is_asked, count


def test_the_less_exactly_costs_are_known_the_more_drafts_have_to_gain() -> None:
    exact, rough = weights(0.13), weights(0.13)._replace(error=0.4)
    seq, made = looping(), drafter()
    counts_of = [sum(counts(made.plan([seq], [7], costs))) for costs in (exact, rough)]
    assert counts_of[0] > counts_of[1]


@example([(0.5, 0), (0.5, 2), (0.875, 2)], 0.0, 0.25, 0.125)  # what is cut leaves too little
@given(
    st.lists(st.tuples(st.floats(0.05, 0.95), st.integers(0, 7)), min_size=1, max_size=5),
    st.floats(0.0, 0.3),
    st.floats(0.0, 0.3),
    st.floats(0.0, 0.3),
)
def test_a_plan_yields_more_for_its_time_than_a_pass_without_drafts(
    each, row, depth, begin
) -> None:
    """And never more than it has room for."""
    made = asking()
    seqs = [without_repetition() for _ in each]
    for seq, (share, _) in zip(seqs, each, strict=True):
        accepting(made, seq, share)
    rooms = [room for _, room in each]
    costs = weights(row, depth=depth, begin=begin)
    found = made.plan(seqs, rooms, costs)
    if found is None:
        return
    numbers = [draft.num_asked for draft in found]
    assert all(number <= room for number, room in zip(numbers, rooms, strict=True))
    pass_s = 1.0 - row + len(seqs) * row
    tokens = sum(
        sum(share**at for at in range(1, number + 1))
        for (share, _), number in zip(each, numbers, strict=True)
    )
    cost = (sum(numbers) * min(row, MAX_ROW_COST * pass_s) + begin + depth * max(numbers)) / pass_s
    assert tokens / len(seqs) > cost
