"""The order by a target for the first token: who is on time goes first, and none starves."""

from __future__ import annotations

from typing import Any

from kvrelay.engine.request import SamplingParams
from kvrelay.router.admission.admission import Admission
from kvrelay.router.admission.blocked import Blocked
from kvrelay.router.admission.fair_queue import FairQueue
from kvrelay.router.averages import Average
from kvrelay.router.config import RouterConfig
from kvrelay.router.messages import Submit
from kvrelay.router.record import RequestRecord

RATE = 1000.0  # prompt tokens per second
TARGET_S = 2.0


class Waiting:
    """Requests that wait for one worker, and the order in which they would go."""

    def __init__(self, **config: Any) -> None:
        self.now = 0.0
        self.config = RouterConfig(ttft_target_s=TARGET_S, **config)
        self.queue = FairQueue(self.config.low_priority_share)
        self.admission = Admission(self.config, self.queue, Average(1.0))
        self.records: dict[str, RequestRecord] = {}

    def come(self, name: str, num_tokens: int) -> RequestRecord:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
        submit = Submit(name, sampling, "client", (1,) * num_tokens, 600.0)
        number = len(self.records)
        record = RequestRecord(submit, sampling, number, self.now, self.now + 600.0, self.now)
        self.records[name] = record
        self.queue.push(record, self.admission.units(record))
        self.admission.on_queued(self.now, record, [RATE])
        return record

    def order(self) -> list[str]:
        found = []
        while entry := self.queue.next(Blocked()):
            found.append(entry.record.request_id)
            self.queue.charge(self.now, entry.record)
        self.queue.check_integrity()
        return found


def test_the_longest_gives_way_so_that_most_are_on_time() -> None:
    waiting = Waiting()
    for name, num_tokens in (("a", 400), ("long", 1300), ("b", 500), ("c", 300)):
        waiting.come(name, num_tokens)
    assert waiting.order() == ["a", "b", "c", "long"]


def test_all_that_can_be_on_time_keep_their_order() -> None:
    waiting = Waiting()
    for name in "abcd":
        waiting.come(name, 300)
    assert waiting.order() == list("abcd")


def test_without_a_target_nothing_changes() -> None:
    waiting = Waiting()
    waiting.admission._config = RouterConfig()
    for name, num_tokens in (("a", 400), ("long", 5000), ("b", 500)):
        waiting.come(name, num_tokens)
    assert waiting.order() == ["a", "long", "b"]


def test_one_in_twenty_is_late_so_that_none_starves() -> None:
    waiting = Waiting(low_priority_share=0.05)
    waiting.come("late", 3000)
    for number in range(60):
        waiting.now += 0.03
        record = waiting.come(f"r{number}", 20)
        first = waiting.queue.next(Blocked())
        assert first is not None
        waiting.queue.charge(waiting.now, first.record)
        if first.record.request_id == "late":
            assert 18 <= number <= 22
            return
        assert first.record is record
    raise AssertionError("the late one was never served")


def test_a_late_one_goes_only_where_it_is_in_nobodys_way() -> None:
    waiting = Waiting()
    late = waiting.come("late", 3000)
    waiting.come("other", 100)
    accepts = waiting.admission.accepts
    assert not accepts(0.0, late, 3.0, 0.0, 0.1)  # memory is short
    assert not accepts(0.0, late, 3.0, 1.0, 0.9)  # prompts queue there
    assert accepts(0.0, late, 3.0, 0.1, 0.9)


def test_one_that_turns_out_to_be_late_lets_others_go_first() -> None:
    waiting = Waiting()
    first, second = waiting.come("a", 300), waiting.come("b", 300)
    accepts = waiting.admission.accepts
    assert not accepts(0.0, first, 2.5, 0.0, 0.9)
    assert accepts(0.0, second, 0.5, 0.0, 0.1)
    assert waiting.order() == ["b", "a"]


def test_a_prompt_that_can_never_be_on_time_is_served_when_it_is_alone() -> None:
    waiting = Waiting()
    alone = waiting.come("alone", 9000)
    assert waiting.admission.accepts(0.0, alone, 9.0, 0.0, 1.0)


def test_the_newest_late_request_is_refused_first_where_the_queue_is_full() -> None:
    waiting = Waiting(max_queue=3)
    for name, num_tokens in (("a", 400), ("long", 1300), ("b", 500), ("c", 300)):
        waiting.come(name, num_tokens)
    surplus = waiting.queue.surplus(3)
    assert surplus is waiting.records["long"]


def test_arrivals_and_late_ones_are_counted() -> None:
    waiting = Waiting()
    waiting.come("a", 400)
    waiting.come("b", 400)
    traffic = waiting.admission.traffic
    assert traffic.prompts.total() == 2
    assert len(traffic.prompts) == 1
