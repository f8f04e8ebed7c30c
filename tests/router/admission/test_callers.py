"""Callers of a tenant and agents of a caller share by work, and one with much waiting keeps nobody
waiting."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.admission.blocked import MAX_HELD_BACK, Blocked
from kvrelay.router.admission.flow import MAX_IDLE
from kvrelay.router.admission.turns import Loads, Most
from kvrelay.router.record import RequestRecord
from tests.router.admission.queue_script import QueueScript

LATE_SHARE = 0.25
SIZES = st.lists(st.floats(0.1, 10.0), min_size=20, max_size=60)


# Those who share, and among whom: callers of a tenant, and agents of a caller.
each_level = pytest.mark.parametrize(("who", "among"), [("caller", "tenant"), ("root", "caller")])


def sent(s: QueueScript, who: str) -> str:
    """Serves one; returns whose it was."""
    record = s.serve()
    assert record is not None
    name: str = getattr(record.submit, who)
    return name


@each_level
@settings(max_examples=25, deadline=None)
@given(SIZES, SIZES)
def test_who_has_requests_waiting_shares_within_one_request(
    who: str, among: str, ones: list[float], others: list[float]
) -> None:
    s = QueueScript()
    for name, sizes in (("one", ones), ("other", others)):
        for units in sizes:
            s.push("", units, **{who: name})
    left, work = {"one": len(ones), "other": len(others)}, {"one": 0.0, "other": 0.0}
    while all(left.values()):
        record = s.serve()
        assert record is not None
        name = getattr(record.submit, who)
        left[name] -= 1
        work[name] += s.queue.entry(record).units
        assert abs(work["one"] - work["other"]) <= max(ones) + max(others) + 1e-6
        s.queue.check_integrity()


@each_level
def test_who_comes_after_a_flood_goes_next(who: str, among: str) -> None:
    s = QueueScript()
    for _ in range(200):
        s.push(**{who: "flood"})
    s.serve()
    for _ in range(3):
        s.push(**{who: "chat"})
        assert "chat" in {sent(s, who), sent(s, who)}


@each_level
def test_the_oldest_of_one_goes_first(who: str, among: str) -> None:
    s = QueueScript()
    flood = [s.push(units=units, **{who: "flood"}) for units in (5.0, 1.0, 3.0)]
    chat = [s.push(units=units, **{who: "chat"}) for units in (9.0, 1.0)]
    order = [s.serve() for _ in range(5)]
    assert [record for record in order if record in flood] == flood
    assert [record for record in order if record in chat] == chat


@each_level
def test_many_have_the_share_of_one_among_whom_they_are(who: str, among: str) -> None:
    s = QueueScript()
    for number in range(40):
        s.push(**{among: "many", who: f"number-{number}"})
        s.push(**{among: "one", who: "number"})
    served = [sent(s, among) for _ in range(40)]
    assert abs(served.count("one") - 20) <= 1


@each_level
def test_a_full_queue_takes_from_whom_has_most(who: str, among: str) -> None:
    s = QueueScript()
    flood = [s.push(**{who: "flood"}) for _ in range(9)]
    s.push(**{who: "chat"})
    assert s.queue.surplus(9) is flood[-1]
    s.end(flood[-1], 0.0)
    s.push(**{who: "other"})
    assert s.queue.surplus(9) is flood[-2]


@each_level
def test_what_one_waits_for_stops_only_its_own(who: str, among: str) -> None:
    s = QueueScript()
    for _ in range(2 * MAX_HELD_BACK):
        s.push(**{who: "flood"})
    chat = s.push(**{who: "chat"})
    blocked = Blocked()
    for _ in range(MAX_HELD_BACK):
        entry = s.queue.next(blocked)
        assert entry is not None
        assert getattr(entry.record.submit, who) == "flood"
        blocked.add(entry, is_held_back=True)
    entry = s.queue.next(blocked)
    assert entry is not None
    assert entry.record is chat


@each_level
def test_what_many_wait_for_stops_those_among_whom_they_are(who: str, among: str) -> None:
    """So that not all of them are tried at every message."""
    s = QueueScript()
    for number in range(20):
        s.push(**{among: "a", who: f"number-{number}"})
    other = s.push(**{among: "b"})
    blocked, tried = Blocked(), []
    while (entry := s.queue.next(blocked)) is not None:
        tried.append(entry.record)
        blocked.add(entry, is_held_back=True)
    assert len(tried) == MAX_HELD_BACK + 1
    assert other in tried


def test_one_request_at_a_time_does_not_evade_that_it_takes_more() -> None:
    s = QueueScript()
    for _ in range(200):
        s.push(caller="many")
    s.push(units=20.0, caller="heavy")
    work = {"many": 0.0, "heavy": 0.0}
    for _ in range(100):
        record = s.serve()
        assert record is not None
        work[record.submit.caller] += s.queue.entry(record).units
        s.end(record)
        if record.submit.caller == "heavy":
            s.push(units=20.0, caller="heavy")
    assert abs(work["many"] - work["heavy"]) <= 21


def test_a_turn_of_another_caller_is_not_counted_as_passing() -> None:
    s = QueueScript()
    flood = [s.push(caller="flood") for _ in range(20)]
    blocked = Blocked()
    first = s.queue.next(blocked)
    assert first is not None
    blocked.add(first)
    for _ in range(10):
        chat = s.queue.entry(s.push(caller="chat"))
        s.queue.charge(0.0, chat.record)
        blocked.are_passed(0.0, chat)
    assert first.passes.count == 10, "its turn had come"
    fresh, last = Blocked(), s.queue.entry(flood[-1])
    for record in flood[:8]:  # the others have their turns
        s.queue.charge(0.0, record)
    fresh.count_passes(last)
    assert last.passes.count == 2, "two went before it that had had as much"


def test_the_longest_of_the_caller_with_most_work_is_late_first() -> None:
    s = QueueScript()
    flood = [s.push(units=units, caller="flood") for units in (2.0, 3.0, 2.0)]
    chat = s.push(units=5.0, caller="chat")
    flow = s.queue.entry(chat).flow
    assert flow.longest is s.queue.entry(flood[1])
    s.queue.put_late(flood[1])
    assert flow.longest is s.queue.entry(chat)


def test_callers_of_whom_nothing_waits_are_forgotten() -> None:
    s = QueueScript()
    for _ in range(10 * MAX_IDLE):
        s.push(caller="flood")
    flow = next(iter(s.queue.levels[0].flows.values()))
    for number in range(5 * MAX_IDLE):
        record = s.push(units=30.0, caller=f"caller-{number}")
        if number % 2:
            s.end(record, 0.0)
        else:
            s.queue.charge(0.0, record)
        assert len(flow.members) <= MAX_IDLE + 1
    s.queue.check_integrity()
    for _ in range(9 * MAX_IDLE):
        s.serve()
    assert set(flow.members) == {"flood"}, "what they had is made up for"


@dataclass
class Naive:
    """Callers as lists, looked through each time."""

    virtual: float = 0.0
    num_before_late: int = 0
    finish: dict[str, float] = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)
    waiting: list[RequestRecord] = field(default_factory=list)  # by arrival
    late: list[RequestRecord] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)

    def start(self, caller: str) -> float:
        return max(self.floor[caller], self.finish.get(caller, 0.0))

    def push(self, record: RequestRecord) -> None:
        caller = record.submit.caller
        if all(each.submit.caller != caller for each in (*self.waiting, *self.late)):
            self.floor[caller] = self.virtual
        self.waiting.append(record)

    def next(self) -> RequestRecord | None:
        parts = [self.waiting, self.late]
        for part in parts[:: -1 if self.num_before_late * LATE_SHARE >= 1 else 1]:
            firsts: dict[str, RequestRecord] = {}
            for each in part:
                firsts.setdefault(each.submit.caller, each)
            if firsts:
                turns = {self.start(who): each for who, each in firsts.items()}
                first = min(turns)
                tied = [each for who, each in firsts.items() if self.start(who) == first]
                return min(tied, key=lambda each: each.arrival)
        return None

    def remove(self, record: RequestRecord) -> None:
        if record in self.late:
            self.late.remove(record)
            self.num_before_late = 0
        else:
            self.waiting.remove(record)
            self.num_before_late += bool(self.late)
        if not self.waiting and not self.late:
            self.__init__(num_before_late=self.num_before_late)  # type: ignore[misc]

    def charge(self, record: RequestRecord, units: float) -> None:
        caller = record.submit.caller
        start = self.start(caller)
        self.remove(record)
        if self.waiting or self.late:
            self.virtual = max(self.virtual, start)
            self.finish[caller] = start + units


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_order_is_that_of_a_model_that_looks_at_all(data: st.DataObject) -> None:
    s, naive = QueueScript(low_share=LATE_SHARE), Naive()
    running: list[RequestRecord] = []
    for _ in range(data.draw(st.integers(1, 80))):
        match data.draw(st.sampled_from(("push", "push", "push", "serve", "late", "drop"))):
            case "push":
                caller = data.draw(st.sampled_from("abcd"))
                naive.push(s.push(units=float(data.draw(st.integers(1, 6))), caller=caller))
            case "late" if naive.waiting:
                record = data.draw(st.sampled_from(naive.waiting))
                s.queue.put_late(record)
                naive.waiting.remove(record)
                naive.late.append(record)
            case "drop" if naive.waiting or naive.late:
                record = data.draw(st.sampled_from([*naive.waiting, *naive.late]))
                s.end(record, 0.0)
                naive.remove(record)
            case "serve":
                expected = naive.next()
                assert s.serve() is expected
                if expected is not None:
                    naive.charge(expected, s.queue.entry(expected).units)
                    running.append(expected)
        s.queue.check_integrity()
    for record in running:
        s.end(record)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9)), max_size=60))
def test_who_has_most_is_who_a_look_at_all_finds(changes: list[tuple[str, int]]) -> None:
    most, values = Most[str](), dict[str, int]()
    for number, (name, value) in enumerate(changes):
        values[name] = value
        most.put(name, value, number)
        top = most.top()
        assert (0 if top is None else values[top]) == max(values.values())
        assert top is None or values[top]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.5, 1000.0), min_size=1, max_size=40), st.floats(0.0, 2000.0))
def test_sums_by_size_are_about_right(units: list[float], each: float) -> None:
    loads = Loads()
    for own in units:
        loads.change(0.0, 1.0)
        loads.change(1.0, own)
    exact = sum(min(own, each) for own in units[1:])
    about = loads.up_to(each, without=units[0])
    assert exact - 1e-6 <= about <= 2 * exact + 1e-6


WAITING = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),  # its caller,
        st.sampled_from(["", "x", "y"]),  # its agent,
        st.integers(1, 30),  # the memory that it needs, and whether it is late
        st.booleans(),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(WAITING, st.lists(st.tuples(st.integers(1, 32), st.booleans()), max_size=20))
def test_what_fits_is_found_as_if_all_were_looked_at(waiting, looks) -> None:
    s = QueueScript()
    for caller, root, needs, is_late in waiting:
        record = s.push(caller=caller, root=root, needs=needs)
        if is_late:
            s.queue.put_late(record)
    for less_than, leaves in looks:
        level, flow = s.queue.find(0, "")
        if level is None or flow is None:
            return
        order = [
            entry
            for caller in flow._turns[False]
            for agent in caller._turns[False]
            for entry in agent.on_time.values()
        ]
        fits = next((entry for entry in order if entry.needs < less_than), None)
        assert flow.first({}, (), less_than, is_late=False) is fits
        s.queue.check_integrity()
        if leaves and fits is not None:
            s.queue.charge(0.0, fits.record)


def test_where_nothing_fits_a_pass_looks_at_none_of_a_thousand() -> None:
    s = QueueScript()
    for number in range(1000):
        s.push(caller=f"c{number % 10}", root=f"a{number % 100}", needs=500 + number)
    small = s.push(caller="c0", root="a0", needs=10)
    _, flow = s.queue.find(0, "")
    assert flow is not None
    s.queue.settle(small, 0.0)  # the least of all has left
    looked = []

    class Skip(set[str]):
        def __contains__(self, request_id: object) -> bool:
            looked.append(request_id)
            return False

    assert flow.first(Skip(), (), 400, is_late=False) is None
    assert flow.least_needs[False] == 500
    found = flow.first(Skip(), (), 501, is_late=False)
    assert found is not None
    assert found.needs == 500
    assert looked == [found.record.request_id]
