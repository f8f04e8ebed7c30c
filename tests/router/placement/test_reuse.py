"""What is learned from the prompts that come: which are continued, how soon, and what to keep."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.kv.block_hash import HASH_BYTES
from kvrelay.router.placement.retention_policy import GAPS_S, RequestKind, Reuse

NUM_TOKENS = 160


def names(conversation: object, count: int) -> list[bytes]:
    """Hashes the first blocks of a conversation."""
    return [f"{conversation}/{block}".encode().ljust(HASH_BYTES) for block in range(count)]


def come(reuse: Reuse, now: float, conversation: object, num_blocks: int) -> int:
    """A prompt of so many blocks; its kind."""
    return reuse.on_prompt(now, names(conversation, num_blocks), NUM_TOKENS)


def test_turns_of_a_conversation_are_told_apart() -> None:
    reuse = Reuse()
    kinds = [come(reuse, float(turn), "a", 4 + 3 * turn) for turn in range(4)]
    assert len(set(kinds)) == 4
    assert come(reuse, 9.0, "b", 9) == kinds[0], "another conversation begins"


def test_late_turns_are_of_one_kind() -> None:
    reuse = Reuse()
    kinds = [come(reuse, float(turn), "a", 4 + 3 * turn) for turn in range(12)]
    assert len(set(kinds)) == len(set(kinds[:6])) < 12
    assert max(kinds) < len(reuse.kinds)


def test_a_prompt_that_is_sent_again_continues_itself() -> None:
    reuse = Reuse()
    first = come(reuse, 0.0, "a", 7)
    assert come(reuse, 5.0, "a", 7) != first
    assert reuse.kinds[first].continued_within(100.0) == 1.0


def test_a_first_block_in_common_continues_nothing() -> None:
    reuse = Reuse()
    kind = come(reuse, 0.0, "a", 1)
    other = reuse.on_prompt(1.0, names("a", 1) + names("b", 5), 90)
    assert come(reuse, 2.0, "c", 6) == other != kind
    assert reuse.kinds[kind].continued_within(1e9) == 0.0


def test_prompts_without_a_full_block_are_counted_and_not_remembered() -> None:
    reuse = Reuse()
    assert [reuse.on_prompt(float(n), [], 5) for n in range(3)] == [0, 0, 0]
    assert reuse.rate(reuse.kinds[0]) > 0


def test_gaps_are_from_one_turn_to_the_next() -> None:
    reuse = Reuse()
    for conversation in range(100):
        come(reuse, 50.0 * conversation, conversation, 6)
        if conversation % 2:
            come(reuse, 50.0 * conversation + 10.0, conversation, 12)
    first = reuse.kinds[come(reuse, 9000.0, "new", 6)]
    assert first.continued_within(5.0) == pytest.approx(0.0)
    assert first.continued_within(20.0) == pytest.approx(0.5, abs=0.03)
    assert first.continued_within(1e9) == pytest.approx(0.5, abs=0.03)


def test_a_request_is_continued_once_however_many_branch_off() -> None:
    reuse = Reuse()
    kind = come(reuse, 0.0, "a", 6)
    for branch in range(5):
        reuse.on_prompt(1.0 + branch, names("a", 6) + names(branch, 3), 200)
    assert reuse.kinds[kind].continued_within(1e9) == 1.0


@given(st.lists(st.floats(0.0, 3.0), min_size=len(GAPS_S) + 1, max_size=len(GAPS_S) + 1))
@settings(deadline=None, max_examples=40)
def test_more_time_never_makes_it_less_likely(gaps: list[float]) -> None:
    kind = RequestKind(num_requests=sum(gaps) + 1.0, gaps=gaps)
    times = sorted([0.0, 0.1, *GAPS_S, *(1.3 * gap_s for gap_s in GAPS_S)])
    shares = [kind.continued_within(seconds) for seconds in times]
    assert shares == sorted(shares)
    assert 0.0 <= shares[0] <= shares[-1] <= 1.0


def test_only_so_many_prompts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.router.placement.retention_policy.MAX_REMEMBERED", 10)
    reuse = Reuse()
    first = come(reuse, 0.0, 0, 6)
    for conversation in range(1, 11):
        come(reuse, float(conversation), conversation, 6)
    assert come(reuse, 20.0, 10, 12) != first, "the latest is known"
    assert come(reuse, 21.0, 0, 12) == first, "the oldest is forgotten"


def traffic(share_continued: float, seed: int = 1, count: int = 1500) -> Reuse:
    """A request a second, of 160 tokens; some begin conversations that go on after 20 s."""
    rng, reuse = Random(seed), Reuse()
    due: list[tuple[float, int, int]] = []
    for number in range(count):
        now = float(number)
        if due and due[0][0] <= now:
            _, conversation, turn = due.pop(0)
        else:
            conversation, turn = number, 0
        come(reuse, now, conversation, 10 * (turn + 1))
        if rng.random() < (share_continued if turn == 0 else 0.9):
            due.append((now + 20.0, conversation, turn + 1))
    return reuse


def found(reuse: Reuse, shares: list[float], room_tokens: float) -> float:
    """Tokens per second that are found again, in a cache that is emptied from its oldest end."""
    rates = [reuse.rate(kind) for kind in reuse.kinds]
    inflow = sum(share * rate for share, rate in zip(shares, rates, strict=True))
    lifetime_s = min(GAPS_S[-1], room_tokens / inflow) if inflow else GAPS_S[-1]
    return sum(
        share * rate * kind.continued_within(lifetime_s)
        for share, rate, kind in zip(shares, rates, reuse.kinds, strict=True)
    )


def test_where_there_is_room_for_all_everything_is_kept() -> None:
    reuse = traffic(0.1)
    assert reuse.worth_retaining(1e9) == [1.0] * len(reuse.kinds)


def test_where_room_is_short_what_is_seldom_continued_goes_first() -> None:
    reuse = traffic(0.05)
    kinds = [come(reuse, 2000.0 + turn, "a", 10 + 10 * turn) for turn in range(3)]
    inflow = sum(reuse.rate(kind) for kind in reuse.kinds)
    shares = reuse.worth_retaining(12.0 * inflow)  # all of it lasts 12 s, and is wanted after 20
    assert shares[kinds[0]] < 1.0
    assert shares[kinds[1]] == shares[kinds[2]] == 1.0


@pytest.mark.parametrize("room_s", [0.01, 1.0, 5.0, 12.0, 25.0, 200.0, 1e6])
@pytest.mark.parametrize("share_continued", [0.02, 0.5, 1.0])
def test_what_is_kept_finds_as_much_as_keeping_all_or_any_one_kind(
    room_s: float, share_continued: float
) -> None:
    reuse = traffic(share_continued, count=600)
    room = room_s * sum(reuse.rate(kind) for kind in reuse.kinds)
    shares = reuse.worth_retaining(room)
    assert all(0.0 <= share <= 1.0 for share in shares)
    best = found(reuse, shares, room)
    count = len(reuse.kinds)
    alone = [[float(kind == other) for other in range(count)] for kind in range(count)]
    for others in ([1.0] * count, *alone):
        assert best >= 0.9 * found(reuse, others, room)


def test_nothing_is_learned_from_no_traffic() -> None:
    reuse = Reuse()
    assert reuse.worth_retaining(0.0) == [1.0] * len(reuse.kinds)
    assert reuse.worth_retaining(1e6) == [1.0] * len(reuse.kinds)
