"""Which of the two copies that a handoff leaves is kept: shared by room, or neither."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from random import Random

import pytest

from kvrelay.engine.request import SamplingParams
from kvrelay.router.messages import Submit
from kvrelay.router.placement.cost import CostModel
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.placement.policy import Fleet
from kvrelay.router.placement.retention_policy import MIN_REQUESTS, REFRESH_S, RetentionPolicy
from kvrelay.router.record import (
    EVICT_FIRST,
    Attempt,
    RequestRecord,
    RetainOn,
    dispatch_messages,
)
from tests.router.fleet import endpoint
from tests.router.placement.test_reuse import names
from tests.router.script import CLIENT

NUM_TOKENS = 160


class Copies:
    """The policy over one worker of each role. No prompt is continued by a later one, unless
    it is said whose it is."""

    def __init__(self, decode_blocks: int, prefill_blocks: int, **info: int) -> None:
        self.decode = endpoint("decode-0", info={"num_blocks": decode_blocks})
        self.prefill = endpoint("prefill-0", info={"num_blocks": prefill_blocks, **info})
        decodes, prefills = Fleet("", CostModel()), Fleet("", CostModel())
        decodes.add(0.0, self.decode)
        prefills.add(0.0, self.prefill)
        self.policy = RetentionPolicy(decodes, prefills)
        self.numbers = count()
        self.now = 0.0

    def choose(
        self,
        *,
        conversation: object = None,
        num_blocks: int = 10,
        session: str | None = None,
        handed_over: bool = True,
    ) -> RetainOn:
        self.now += 1.0
        number = next(self.numbers)
        blocks = names(f"one-off {number}" if conversation is None else conversation, num_blocks)
        record = recorded(f"r{number}", session)
        return self.policy.choose(self.now, record, blocks, self.prefill if handed_over else None)


def recorded(request_id: str, session: str | None = None) -> RequestRecord:
    sampling = SamplingParams(max_tokens=8)
    submit = Submit(request_id, sampling, CLIENT, (1,) * NUM_TOKENS, 60.0, session=session)
    return RequestRecord(submit, sampling, 1, 0.0, 60.0, 0.0)


@pytest.mark.parametrize(("prefill_blocks", "share"), [(1000, 0.25), (3000, 0.5), (9000, 0.75)])
def test_copies_are_shared_in_proportion_to_room(prefill_blocks: int, share: float) -> None:
    copies = Copies(3000, prefill_blocks)
    kept = [copies.choose() for _ in range(200)]
    for end in range(1, len(kept) + 1):
        here = kept[:end].count(RetainOn.PREFILL)
        assert abs(here - share * end) <= 1, "of any run of them"
    assert RetainOn.NONE not in kept


def test_lower_tiers_are_room_and_what_requests_hold_is_not() -> None:
    copies = Copies(4000, 1000, num_host_blocks=2000, num_disk_blocks=1000)
    copies.decode.book(0.0, "other", 0, 2000)
    kept = Counter(copies.choose() for _ in range(300))
    assert kept[RetainOn.PREFILL] == pytest.approx(300 * 4 / 6, abs=2)


def test_shares_follow_the_room() -> None:
    copies = Copies(3000, 3000)
    for _ in range(100):
        copies.choose()
    copies.prefill.book(0.0, "other", 0, 3000)  # full now
    copies.now += REFRESH_S
    copies.choose()
    assert {copies.choose() for _ in range(100)} == {RetainOn.DECODE}


def test_what_is_computed_where_it_is_decoded_is_kept_there() -> None:
    copies = Copies(1000, 9000)
    assert {copies.choose(handed_over=False) for _ in range(100)} == {RetainOn.DECODE}


def requests(copies: Copies, session: str | None = None) -> Iterator[tuple[str, RetainOn]]:
    """Mostly prompts that nobody continues, and three conversations that go on every 10 s."""
    rng = Random(1)
    turns = [0] * 3
    for number in range(MIN_REQUESTS + 1500):
        if number % 10 < 3:
            talk = number % 10
            turns[talk] = turns[talk] + 1 if turns[talk] < 40 else 1
            name = f"talk {talk} {number // 400}"
            kept = copies.choose(conversation=name, num_blocks=6 + 3 * turns[talk], session=session)
            kind = "talk"
        else:
            kept = copies.choose(num_blocks=rng.randint(4, 20), session=session)
            kind = "one-off"
        if number >= MIN_REQUESTS + 500:
            yield kind, kept


def test_what_is_unlikely_to_come_again_is_dropped_where_room_is_short() -> None:
    counts = Counter(requests(Copies(90, 90)))
    talk = {retain_on: counts["talk", retain_on] for retain_on in RetainOn}
    one_off = {retain_on: counts["one-off", retain_on] for retain_on in RetainOn}
    assert one_off[RetainOn.NONE] > 0.6 * sum(one_off.values())
    assert talk[RetainOn.NONE] < 0.2 * sum(talk.values())


def test_where_there_is_room_everything_is_kept() -> None:
    kept = {retain_on for _, retain_on in requests(Copies(1_000_000, 1_000_000))}
    assert kept == {RetainOn.DECODE, RetainOn.PREFILL}


def test_kv_of_a_session_is_always_kept_where_it_is_decoded() -> None:
    kept = {retain_on for _, retain_on in requests(Copies(90, 90), session="s")}
    assert kept == {RetainOn.DECODE}


def test_nothing_is_dropped_before_enough_is_known() -> None:
    copies = Copies(1, 1)
    kept = [copies.choose() for _ in range(MIN_REQUESTS)]
    assert RetainOn.NONE not in kept


@pytest.mark.parametrize(
    ("retain_on", "here", "there"),
    [
        (RetainOn.BOTH, True, True),
        (RetainOn.DECODE, True, False),
        (RetainOn.PREFILL, False, True),
        (RetainOn.NONE, False, False),
    ],
)
def test_workers_are_told_whose_copy_is_spare(retain_on: RetainOn, here: bool, there: bool) -> None:
    def told(prefill: Endpoint | None) -> list[bool]:
        attempt = Attempt(1, endpoint("decode-0"), prefill, 0.0, retain_on=retain_on)
        sends = dispatch_messages("router-0", recorded("r"), attempt, 60.0)
        return [send.message.retention != EVICT_FIRST for send in sends]

    assert told(endpoint("prefill-0")) == [here, there]
    assert told(None) == [here]
