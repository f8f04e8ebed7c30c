"""Who is served next: shares of tenants, priorities, limits, and what comes back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.record import RequestRecord
from tests.router.admission.queue_script import QueueScript

SIZES = st.lists(st.floats(0.1, 10.0), min_size=20, max_size=60)


@settings(max_examples=25, deadline=None)
@given(SIZES, SIZES, st.floats(0.2, 8.0))
def test_backlogged_tenants_share_within_one_request_of_their_weights(
    reds: list[float], blues: list[float], weight: float
) -> None:
    s = QueueScript()
    for units in reds:
        s.push("red", units, weight=weight)
    for units in blues:
        s.push("blue", units)
    bound = max(reds) / weight + max(blues)
    while s.queue.num_queued["red"] and s.queue.num_queued["blue"]:
        s.serve()
        red, blue = s.served.get((0, "red"), 0.0), s.served.get((0, "blue"), 0.0)
        assert abs(red / weight - blue) <= bound + 1e-6


def test_three_to_one_is_three_to_one() -> None:
    s = QueueScript()
    for _ in range(40):
        s.push("red", weight=3.0)
        s.push("blue")
    for served in range(1, 41):
        s.serve()
        assert abs(s.served.get((0, "red"), 0.0) - served * 0.75) <= 1.0


def test_one_tenant_is_served_in_the_order_of_arrival() -> None:
    s = QueueScript()
    logs = [s.push("red", units) for units in (5.0, 1.0, 3.0)]
    assert [s.serve() for _ in range(3)] == logs
    assert s.serve() is None


def test_who_was_away_has_saved_nothing_up() -> None:
    s = QueueScript()
    for _ in range(30):
        s.push("red")
    for _ in range(10):
        s.serve()
    for _ in range(10):
        s.push("blue")
    s.order.clear()
    for _ in range(10):
        s.serve()
    assert sum(name.startswith("blue") for name in s.order) == 5


def test_one_request_at_a_time_does_not_evade_a_small_weight() -> None:
    """Its queue is empty whenever it is served: what it had is remembered nevertheless."""
    s = QueueScript()
    for _ in range(100):
        s.push("red", weight=9.0)
    s.push("blue")
    for _ in range(50):
        record = s.serve()
        assert record is not None
        s.end(record)
        if record.submit.tenant == "blue":
            s.push("blue")
    assert s.served[0, "blue"] <= 50 / 10 + 1


@pytest.mark.parametrize("by", ["tenant", "caller"])
def test_what_took_longer_than_estimated_is_paid_for_afterwards(by: str) -> None:
    s = QueueScript()
    for _ in range(60):
        s.push(**{by: "red"})  # type: ignore[arg-type]
        s.push(**{by: "blue"})  # type: ignore[arg-type]
    work = {"red": 0.0, "blue": 0.0}
    for _ in range(60):
        record = s.serve()
        assert record is not None
        who = getattr(record.submit, by)
        took = 3.0 if who == "red" else 1.0
        work[who] += took
        s.end(record, took)
    assert abs(work["red"] - work["blue"]) <= 3.0


def test_a_lower_number_goes_first_and_the_others_get_their_small_share() -> None:
    s = QueueScript(low_share=0.1)
    for _ in range(300):
        s.push("low", priority=5)
        s.push("high", priority=-5)
    for served in range(1, 201):
        s.serve()
        assert abs(s.served.get((5, "low"), 0.0) - 0.1 * served) <= 1.2


def test_without_a_share_priorities_are_strict() -> None:
    s = QueueScript(low_share=0.0)
    for _ in range(10):
        s.push("low", priority=1)
        s.push("high")
    for _ in range(20):
        s.serve()
    assert [name[:3] for name in s.order] == ["hig"] * 10 + ["low"] * 10


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6, unique=True), st.floats(0.5, 20.0))
def test_no_priority_starves(priorities: list[int], units: float) -> None:
    """However much of higher priority comes, each is served within what its share takes."""
    s = QueueScript(low_share=0.1)
    for priority in priorities:
        s.push("low", units, priority)
    patience = len(priorities) * units / 0.1 + 2 * len(priorities) * units + 2
    while s.queue.num_queued["low"]:
        s.push("high")
        s.serve()
        assert len(s.order) <= patience


def test_a_tenant_has_no_more_running_than_it_may() -> None:
    s = QueueScript()
    for _ in range(4):
        s.push("red", max_concurrent=2)
    s.push("blue")
    first = [s.serve() for _ in range(3)]
    names = [record.submit.tenant for record in first if record is not None]
    assert sorted(names) == ["blue", "red", "red"]
    assert s.serve() is None
    ended = next(record for record in first if record is not None and record.submit.tenant == "red")
    s.end(ended)
    assert s.serve() is not None
    assert s.serve() is None


def test_what_comes_back_goes_before_new_ones_and_is_not_charged_again() -> None:
    s = QueueScript()
    reds = [s.push("red") for _ in range(6)]
    for _ in range(6):
        s.push("blue")
    taken = [s.serve(), s.serve(), s.serve()]
    lost = [record for record in taken if record in reds]
    for record in reversed(lost):
        s.queue.restore(record)
    assert len(lost) == 2
    assert [s.serve(), s.serve()] == lost
    s.order.clear()
    for _ in range(6):
        s.serve()
    assert sum(name.startswith("blue") for name in s.order) == 3


def test_what_comes_back_still_waits_for_higher_priorities() -> None:
    s = QueueScript()
    low = s.push("low", priority=1)
    s.serve()
    high = s.push("high")
    s.queue.restore(low)
    assert [s.serve(), s.serve()] == [high, low]


def test_a_full_queue_takes_from_the_tenant_that_holds_most_for_its_weight() -> None:
    s = QueueScript()
    reds = [s.push("red") for _ in range(4)]
    blues = [s.push("blue", weight=4.0) for _ in range(4)]
    assert s.queue.surplus(8) is None
    assert s.queue.surplus(7) is reds[-1]
    more = [s.push("blue", weight=4.0) for _ in range(13)]
    assert s.queue.surplus(8) is more[-1]  # the newest of the one that is furthest above now
    assert blues[0] in s.queue


def test_a_newcomer_below_its_share_displaces_one_above_and_none_else() -> None:
    s = QueueScript()
    reds = [s.push("red") for _ in range(5)]
    s.push("blue")
    assert s.queue.surplus(5) is reds[-1]
    s.end(reds[-1], 0.0)
    fresh = s.push("red")
    assert s.queue.surplus(5) is fresh


def test_a_full_queue_takes_from_the_lowest_priority_but_leaves_it_its_places() -> None:
    s = QueueScript(low_share=0.1)
    lows = [s.push("low", priority=3) for _ in range(20)]
    high = s.push("high")
    assert s.queue.surplus(20) is lows[-1]
    for record in lows[2:]:
        s.end(record, 0.0)
    highs = [high, *(s.push("high") for _ in range(18))]
    assert s.queue.surplus(20) is highs[-1]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_sums_hold_and_each_request_is_served_once_whatever_happens(data: st.DataObject) -> None:
    s = QueueScript()
    waiting: list[RequestRecord] = []
    running: list[RequestRecord] = []
    for _ in range(data.draw(st.integers(1, 60))):
        match data.draw(st.sampled_from(("push", "push", "serve", "serve", "back", "end", "drop"))):
            case "push":
                tenant, limit = data.draw(st.sampled_from((("a", 0), ("b", 0), ("c", 2))))
                units = data.draw(st.floats(0.5, 5.0))
                priority = data.draw(st.integers(0, 2))
                waiting.append(s.push(tenant, units, priority, max_concurrent=limit))
            case "serve":
                record = s.serve()
                if record is not None:
                    waiting.remove(record)
                    running.append(record)
            case "back" if running:
                record = running.pop(data.draw(st.integers(0, len(running) - 1)))
                s.queue.restore(record)
                waiting.append(record)
            case "end" if running:
                s.end(running.pop(), data.draw(st.floats(0.0, 9.0)))
            case "drop" if waiting:
                s.end(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))), 0.0)
        s.queue.check_integrity()
        assert sorted(record.request_id for record in s.queue.in_order()) == sorted(
            record.request_id for record in waiting
        )
    for record in running:
        s.end(record)
    while (record := s.serve()) is not None:
        waiting.remove(record)
        s.end(record)
    assert waiting == []
    s.queue.check_integrity()


def test_what_a_tenant_has_of_low_classes_takes_no_place_of_its_chats() -> None:
    s = QueueScript()
    rows = [s.push("a", priority=50, max_concurrent=2) for _ in range(4)]
    assert [s.serve(), s.serve(), s.serve()] == [*rows[:2], None]
    chats = [s.push("a", max_concurrent=2) for _ in range(3)]
    assert [s.serve(), s.serve(), s.serve()] == [*chats[:2], None]
    s.end(rows[0])
    s.end(rows[1])
    assert s.serve() is None, "rows have what chats leave"
    s.end(chats[0])
    assert s.serve() is chats[2]
    s.end(chats[1])
    assert s.serve() is rows[2]
    s.queue.check_integrity()


def test_rows_that_wait_do_not_fill_the_queue_for_chats() -> None:
    s = QueueScript()
    row = s.push("a", priority=50)
    chat = s.push("a")
    flows = [s.queue.entry(each).flow for each in (row, chat)]
    assert [s.queue.num_before(flow) for flow in flows] == [2, 1]
