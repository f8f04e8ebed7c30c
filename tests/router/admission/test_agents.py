"""Agents of one caller: one with many subagents keeps another one's next turn waiting for none of
them, in the router's queue and at the workers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.request import SamplingParams
from kvrelay.router.admission.flow import MAX_IDLE
from kvrelay.router.messages import Submit
from kvrelay.router.record import RequestRecord
from tests.router.admission.queue_script import QueueScript
from tests.router.script import CLIENT, Script, worker_stats

SIZES = st.lists(st.floats(0.1, 10.0), min_size=20, max_size=60)


def test_what_goes_before_counts_another_agents_crowd_once() -> None:
    s = QueueScript()
    for _ in range(200):
        s.push(root="crowd")
    turn = s.queue.entry(s.push(root="other"))
    units, count = turn.flow.before("", "other", turn)
    assert units <= 2.0, "the crowd's share until then, within a power of two"
    assert count <= 2
    units, _ = turn.flow.before("", "crowd")
    assert units >= 200.0


def test_agents_of_whom_nothing_waits_are_forgotten() -> None:
    s = QueueScript()
    for _ in range(3 * MAX_IDLE):
        s.push(root="crowd")
    caller = s.queue.levels[0].flows[""].members[""]
    for number in range(2 * MAX_IDLE):
        s.queue.charge(0.0, s.push(units=30.0, root=f"agent-{number}"))
        assert len(caller.members) <= MAX_IDLE + 1
    s.queue.check_integrity()


def test_prompts_at_workers_are_counted_by_agent() -> None:
    s = QueueScript()
    first, second = s.push(root="a"), s.push(root="a")
    agent = s.queue.entry(first).agent.key
    s.serve()
    s.serve()
    assert s.queue.num_prefilling[agent] == 2
    first.first_token_at = 1.0
    s.queue.on_first_token(first)
    s.queue.restore(second)
    assert not s.queue.num_prefilling
    s.queue.charge(0.0, second)
    s.end(second)
    s.end(first)
    assert not s.queue.num_prefilling
    s.queue.check_integrity()


@dataclass
class Naive:
    """Callers and agents as lists, looked through each time."""

    virtual: dict[str, float] = field(default_factory=dict)  # by caller; "*": among callers
    finish: dict[str, float] = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)
    waiting: list[RequestRecord] = field(default_factory=list)

    @staticmethod
    def names(record: RequestRecord) -> tuple[tuple[str, str], ...]:
        """Group and member, of callers first."""
        caller = record.submit.caller
        return ("*", caller), (caller, f"{caller} {record.submit.root}")

    def start(self, member: str) -> float:
        return max(self.floor.get(member, 0.0), self.finish.get(member, 0.0))

    def has(self, depth: int, name: str) -> bool:
        return any(self.names(each)[depth][1] == name for each in self.waiting)

    def push(self, record: RequestRecord) -> None:
        for depth, (group, member) in enumerate(self.names(record)):
            if not self.has(depth, member):
                self.floor[member] = self.virtual.get(group, 0.0)
        self.waiting.append(record)

    def next(self) -> RequestRecord | None:
        found = self.waiting
        for depth in range(2):
            firsts: dict[str, float] = {}
            for each in found:
                member = self.names(each)[depth][1]
                firsts.setdefault(member, self.start(member))
            tied = [name for name, at in firsts.items() if at == min(firsts.values())]
            if depth == 0 and len(tied) > 1:  # by what each of them would send
                heads = [self._head([e for e in found if self.names(e)[0][1] == n]) for n in tied]
                return min(heads, key=lambda each: each.arrival)
            found = [each for each in found if self.names(each)[depth][1] in tied]
        return min(found, key=lambda each: each.arrival, default=None)

    def _head(self, found: list[RequestRecord]) -> RequestRecord:
        return min(found, key=lambda e: (self.start(self.names(e)[1][1]), e.arrival))

    def charge(self, record: RequestRecord, units: float) -> None:
        starts = [self.start(member) for _, member in self.names(record)]
        self.waiting.remove(record)
        for depth, (group, member) in enumerate(self.names(record)):
            if self.has(depth - 1, group) if depth else self.waiting:
                self.virtual[group] = max(self.virtual.get(group, 0.0), starts[depth])
                self.finish[member] = starts[depth] + units
            else:  # nobody waits, so nobody owes
                self.virtual.pop(group, None)
                prefix = "" if group == "*" else f"{group} "
                gone = [name for name in self.finish if name.startswith(prefix)]
                for name in gone:
                    del self.finish[name]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_order_is_that_of_a_model_that_looks_at_all(data: st.DataObject) -> None:
    s, naive = QueueScript(), Naive()
    for _ in range(data.draw(st.integers(1, 80))):
        if data.draw(st.sampled_from((True, True, False))):
            units = float(data.draw(st.integers(1, 6)))
            caller, root = data.draw(st.sampled_from("AB")), data.draw(st.sampled_from("abc"))
            naive.push(s.push("", units, caller=caller, root=root))
        else:
            expected = naive.next()
            assert s.serve() is expected
            if expected is not None:
                naive.charge(expected, s.queue.entry(expected).units)
        s.queue.check_integrity()


def turn(s: Script, name: str, session: str | None, first: int) -> None:
    """A prompt of 48 tokens that begins like no other."""
    tokens = tuple(range(first, first + 48))
    sampling = SamplingParams(max_tokens=4, temperature=0.0, seed=0)
    s.tell(Submit(name, sampling, CLIENT, tokens, 60.0, session=session))


def crowded(root: str) -> tuple[Script, str]:
    """Two prompts of agent "crowd" at one worker, where computing one takes a second; then another
    one of `root` comes. Returns its name."""
    s = Script("decode-0")
    s.tell(worker_stats("decode-0", prefill_tokens_per_s=48.0))
    for number in range(2):
        turn(s, f"crowd-{number}", "crowd", 50 * number)
    turn(s, "last", root, 200)
    return s, "last"


def test_a_crowd_does_not_queue_at_the_workers() -> None:
    s, last = crowded("crowd")
    assert {m.request_id for m in s.take(Decode)} == {"crowd-0"}
    record = s.router.live[last]
    assert record.waits_for == "agent"
    s.pass_time(0.6)  # it would wait for half a second at most
    assert {m.request_id for m in s.take(Decode)} == {"crowd-1"}
    assert s.router.live["crowd-1"].waited_s["agent"] == pytest.approx(0.5)
    s.delta("decode-0", 48, 7, request_id="crowd-0")
    s.delta("decode-0", 48, 7, request_id="crowd-1")
    assert {m.request_id for m in s.take(Decode)} == {last}


def test_another_agents_turn_is_sent_though_a_crowd_waits() -> None:
    s, last = crowded("other")
    assert {m.request_id for m in s.take(Decode)} == {"crowd-0", last}


def test_what_has_no_session_is_not_held_back() -> None:
    s = Script("decode-0")
    s.tell(worker_stats("decode-0", prefill_tokens_per_s=48.0))
    for number in range(3):
        turn(s, f"r{number}", None, 50 * number)
    assert len(s.take(Decode)) == 3
