"""What comes in, what waits, what is refused, and with which words."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.events import KVSnapshotRequest
from kvrelay.engine.request import FinishReason, Refusal, SamplingParams
from kvrelay.engine.waiting import MAX_PASSED
from kvrelay.router.dispatch import Dispatcher
from kvrelay.router.messages import Cancel, Failed, Submit
from kvrelay.router.record import Attempt, Rejection, RequestRecord
from kvrelay.router.requests import MAX_TRIED_AT_ONCE
from tests.router.admission.overload import Overload
from tests.router.script import CLIENT, Script


def test_a_prompt_longer_than_the_context_is_refused_with_the_sizes() -> None:
    s = Script("decode-0")
    s.submit(tokens=range(256))
    failed = s.failure()
    assert failed.reason is Refusal.CONTEXT_LENGTH
    assert "256 tokens" in failed.detail
    assert "255 fit" in failed.detail
    s.submit("fits", tokens=range(255))
    assert s.one(Decode).sampling.max_tokens == 1


def test_max_tokens_is_cut_to_the_context() -> None:
    s = Script("decode-0")
    s.submit(tokens=range(200), max_tokens=10**9)
    assert s.one(Decode).sampling.max_tokens == 56


def test_what_no_pool_could_hold_is_refused_with_the_sizes() -> None:
    s = Script()
    s.up("decode-0", num_blocks=20)
    s.up("decode-1", num_blocks=25)
    s.submit(tokens=range(90), max_tokens=14)
    failed = s.failure()
    assert failed.reason is Refusal.NEVER_FITS
    for size in ("90 prompt", "14 output", "26 KV blocks", "has 25"):
        assert size in failed.detail
    s.take(KVSnapshotRequest)
    s.submit("fits", tokens=range(90), max_tokens=10)
    assert [to for to, m in s.sent if isinstance(m, Decode)] == ["decode-1"]


def test_an_empty_prompt_is_refused() -> None:
    s = Script("decode-0")
    s.submit(tokens=())
    assert s.failure().reason is Refusal.CONTEXT_LENGTH


def test_a_timeout_that_leaves_no_time_is_refused() -> None:
    s = Script("decode-0")
    for n, timeout_s in enumerate((0.0, -1.0, float("nan"))):
        s.submit(f"r{n}", timeout_s=timeout_s)
        assert s.failure().reason is Refusal.DEADLINE


def test_an_endless_timeout_is_cut() -> None:
    s = Script("decode-0", max_timeout_s=100.0)
    s.submit(timeout_s=float("inf"))
    assert s.one(Decode).timeout_s == 100.0


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    s = Script("decode-0", max_queue=3, max_inflight_per_worker=2)
    for n in range(6):
        s.submit(f"r{n}")
    assert [m.request_id for m in s.take(Decode)] == ["r0", "r1"]
    failed = s.one(Failed, CLIENT)
    assert failed.request_id == "r5"
    assert failed.reason is Refusal.QUEUE_FULL
    assert failed.retry_after_s is not None
    assert failed.retry_after_s >= 1.0
    assert s.router.status(s.now).num_queued == 3
    s.delta("decode-0", 10, 999, request_id="r0", finish=FinishReason.STOP)
    assert s.one(Decode).request_id == "r2"


def test_a_worker_is_sent_an_eighth_more_than_it_runs_and_the_rest_takes_turns() -> None:
    """Else whoever comes next would wait at the worker, behind all that others have sent."""
    s = Script()
    s.up("decode-0", max_num_seqs=8)

    def submit(name: str, caller: str) -> None:
        tokens, params = tuple(range(12)), SamplingParams(max_tokens=8)
        s.tell(Submit(name, params, CLIENT, tokens, 60.0, caller=caller))

    for n in range(30):
        submit(f"flood {n}", "flood")
    assert len(s.take(Decode)) == 9
    submit("chat", "chat")
    for n in range(2):
        s.delta("decode-0", 12, 999, request_id=f"flood {n}", finish=FinishReason.STOP)
    assert [each.request_id for each in s.take(Decode)] == ["flood 9", "chat"]


def test_a_queue_of_zero_serves_what_can_be_served_at_once() -> None:
    s = Script("decode-0", max_queue=0, max_inflight_per_worker=1)
    s.submit("a")
    s.submit("b")
    assert s.one(Decode).request_id == "a"
    assert s.one(Failed).request_id == "b"


def test_lower_priority_numbers_go_first_then_the_order_of_arrival() -> None:
    s = Script("decode-0", max_inflight_per_worker=1)
    s.submit("running")
    for name, priority in (("c", 5), ("a", -1), ("d", 5), ("b", 0)):
        s.submit(name, priority=priority)
    s.sent.clear()
    order = []
    current = "running"
    for _ in range(4):
        s.tell(Cancel(current))
        current = s.one(Decode).request_id
        order.append(current)
    assert order == ["a", "b", "c", "d"]


def test_a_request_that_comes_back_keeps_its_place_even_in_a_full_queue() -> None:
    s = Script("decode-0", max_queue=1, max_inflight_per_worker=1)
    s.submit("first")
    s.submit("second")
    s.sent.clear()
    s.refuse("decode-0", Refusal.UNKNOWN, request_id="first")
    assert s.one(Decode).request_id == "first"
    assert s.take(Failed) == []
    s.down("decode-0")
    assert s.router.status(s.now).num_queued == 2
    assert s.take(Failed) == []


def test_without_workers_it_waits_and_is_served_when_one_comes() -> None:
    s = Script()
    s.submit()
    s.pass_time(30.0)
    assert s.sent == []
    s.up("decode-0")
    assert s.one(Decode).request_id == "r"
    s.delta("decode-0", 10, 999, finish=FinishReason.STOP)
    explanation = s.router.explanations.get("r")
    assert explanation is not None
    first = explanation.phases[0]
    assert (first.name, first.seconds) == ("queue", 30.0)


def test_without_workers_it_fails_when_the_wait_is_over() -> None:
    s = Script(no_workers_wait_s=10.0)
    s.submit()
    s.pass_time(9.0)
    assert s.sent == []
    s.pass_time(1.5)
    failed = s.failure()
    assert failed.reason is Refusal.NO_WORKERS
    assert failed.retry_after_s is not None


def test_without_workers_the_deadline_is_no_workers_too() -> None:
    s = Script(no_workers_wait_s=10.0)
    s.submit(timeout_s=2.0)
    s.pass_time(2.5)
    assert s.failure().reason is Refusal.NO_WORKERS


def test_the_wait_for_workers_begins_when_the_last_one_is_gone() -> None:
    s = Script("decode-0", no_workers_wait_s=10.0, max_inflight_per_worker=1)
    s.submit("running")
    s.submit("queued")
    s.pass_time(9.0)
    s.down("decode-0")
    s.sent.clear()
    s.pass_time(9.0)
    assert s.take(Failed) == []
    s.pass_time(2.0)
    assert len(s.take(Failed)) == 2
    s.assert_idle()


def test_a_deadline_in_the_queue_says_so() -> None:
    s = Script("decode-0", max_inflight_per_worker=1)
    s.submit("running")
    s.submit("queued", timeout_s=2.0)
    s.pass_time(2.5)
    failed = s.one(Failed)
    assert (failed.request_id, failed.reason) == ("queued", Refusal.DEADLINE)
    assert "queued for" in failed.detail


def test_sizes_are_checked_when_the_first_worker_comes() -> None:
    s = Script()
    s.submit("long", tokens=range(300))
    s.submit("short", max_tokens=10**6)
    assert s.take(Failed) == []
    s.up("decode-0")
    assert s.one(Failed).request_id == "long"
    assert s.one(Decode).sampling.max_tokens == 246


def test_a_request_is_not_shortened_because_its_worker_is_away() -> None:
    s = Script("decode-0")
    s.up("decode-1", max_model_len=128)
    s.submit(tokens=range(40), max_tokens=10**6)
    s.delta("decode-0", 40, 5)
    s.sent.clear()
    s.down("decode-0")
    s.pass_time(5.0)
    assert s.take(Decode) == []
    s.up("decode-0", epoch=2)
    assert s.one(Decode, "decode-0").sampling.max_tokens == 216


def test_one_that_fits_only_the_larger_worker_waits_for_it_and_blocks_nobody() -> None:
    s = Script(max_inflight_per_worker=1)
    s.up("decode-0", num_blocks=10)
    s.up("decode-1")
    s.submit("large", tokens=range(100))
    s.submit("large too", tokens=range(100))
    s.submit("small", tokens=range(5))
    sent = [(to, m.request_id) for to, m in s.sent if isinstance(m, Decode)]
    assert sent == [("decode-1", "large"), ("decode-0", "small")]


def test_one_that_finds_no_place_is_passed_by_those_that_do_and_is_next_where_it_fits() -> None:
    s = Script(max_inflight_per_worker=1)
    s.up("decode-0", num_blocks=10)
    s.up("decode-1")
    s.submit("large", tokens=range(100))
    s.submit("large too", tokens=range(100))
    s.sent.clear()
    for number in range(2 * MAX_PASSED):
        s.submit(f"small {number}", tokens=range(5))
        s.tell(Cancel(f"small {number}"))
    assert len([d for d in s.take(Decode) if d.request_id.startswith("small")]) == 2 * MAX_PASSED
    s.tell(Cancel("large"))
    assert s.one(Decode).request_id == "large too"


def test_a_message_looks_at_few_of_those_that_find_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = Script(max_inflight_per_worker=1)
    s.up("decode-0", num_blocks=10)
    s.up("decode-1")
    for number in range(50):
        s.submit(f"large {number}", tokens=range(100))
    tried: list[str] = []
    place = Dispatcher.place

    def counted(
        self: Dispatcher, now: float, record: RequestRecord, *options: Any
    ) -> Attempt | Rejection | None:
        tried.append(record.request_id)
        return place(self, now, record, *options)

    monkeypatch.setattr(Dispatcher, "place", counted)
    s.submit("one more", tokens=range(100))
    assert len(tried) <= MAX_TRIED_AT_ONCE


def test_a_refusal_names_the_timeout_only_where_that_is_too_short() -> None:
    """Without a limit on waits, a new client is refused by its timeout, or by who is expected."""
    s = Overload()
    s.offer(10.0, 0.0, 60.0, timeout_s=20.0)
    s.run(60.0)
    s.drain()
    told = [c.refused[0].detail for c in s.clients if c.refused]
    pattern = (
        r"wait for about ([\d.]+) s, and of its timeout of 20 s serving takes at least ([\d.]+) s$"
    )
    by_timeout = [found for detail in told if (found := re.search(pattern, detail))]
    by_others = [d for d in told if d.endswith("is the limit while others are expected back")]
    assert by_timeout
    assert by_others
    assert len(by_timeout) + len(by_others) == len(told)
    for found in by_timeout:
        assert float(found[1]) >= 20.0 * 0.9 - float(found[2]) - 0.1  # both are rounded
