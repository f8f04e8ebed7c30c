"""Classes of service at a router: what low classes have at workers is in nobody else's way."""

from __future__ import annotations

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.service_class import ServiceClass
from kvrelay.engine.waiting import MAX_PASSED
from kvrelay.router.messages import Cancel
from tests.router.admission.test_memory_waits import LARGE, SHORT, Memory
from tests.router.script import Script, worker_stats

BATCH = ServiceClass.BATCH.priority


def test_the_class_goes_to_the_workers() -> None:
    s = Script("decode-0", "prefill-0")
    for priority in (-3, 0, 5, BATCH):
        s.submit(f"r{priority}", range(200), priority=priority)
        classes = {m.service_class for _, m in s.sent if hasattr(m, "service_class")}
        assert classes == {ServiceClass.of(priority)}
        s.sent.clear()


def test_low_requests_that_fill_the_workers_leave_as_many_places_for_the_others() -> None:
    s = Script("decode-0", max_inflight_per_worker=4)
    for i in range(8):
        s.submit(f"low{i}", priority=BATCH)
    assert len(s.take(Decode)) == 4
    for i in range(6):
        s.submit(f"r{i}", range(i, 10 + i))
    assert [m.request_id for m in s.take(Decode)] == ["r0", "r1", "r2", "r3"]
    s.tell(Cancel("low0"))
    s.tell(Cancel("r0"))
    assert [m.request_id for m in s.take(Decode)] == ["r4"], "its class goes first"


@pytest.mark.parametrize(("priority", "goes_to"), [(0, "decode-0"), (5, "decode-1")])
def test_memory_and_rows_of_low_requests_push_only_low_ones_away(
    priority: int, goes_to: str
) -> None:
    s = Script("decode-0", "decode-1", max_memory_wait_s=0.5)
    prefix = range(100)
    s.holds("decode-0", device=prefix)
    low = {"num_decoding": 30, "num_low_decoding": 30, "num_low_blocks": 64}
    decoding = {"decoding_tokens": 64 * 4, "low_decoding_tokens": 64 * 4}
    weights = (0.01, 0.02, 0.01, 0.0)
    busy = worker_stats("decode-0", num_free_blocks=0, decode_weights=weights, **low, **decoding)
    s.tell(busy)
    s.tell(worker_stats("decode-1", decode_weights=weights))
    s.submit("r", (*prefix, 7, 8), priority=priority)
    assert s.dispatched()[0] == goes_to


def test_prompts_of_low_requests_are_not_waited_for() -> None:
    s = Script("decode-0", "decode-1")
    for name in ("decode-0", "decode-1"):
        s.tell(worker_stats(name))
    s.submit("low", range(60), priority=BATCH)
    where = s.dispatched()[0]
    s.holds(where, device=range(1000, 1040))
    s.submit("r", range(1000, 1200))
    assert s.dispatched()[0] == where
    record = s.router.live["r"]
    assert record.current is not None
    assert record.current.decision is not None
    assert record.current.decision.options.best.seconds.queue == 0
    for request_id in ("low", "r"):
        s.tell(Cancel(request_id))
    assert s.router.check_idle() == []


def test_no_memory_is_held_for_a_low_request_and_higher_ones_may_always_pass_it() -> None:
    s = Memory()
    for name in ("one", "other"):
        s.ask(name, SHORT, priority=BATCH)
    assert {*s.goes_out().values()} == {"decode-0", "decode-1"}
    s.ask("large", LARGE, "a", priority=BATCH)
    assert not s.goes_out()
    assert len(s.pass_by(2 * MAX_PASSED)) == 2 * MAX_PASSED
    assert not s.goes_out(), "it was not sent out to wait"
    endpoints = [*s.router._dispatcher.endpoints]
    assert not any(each.held_blocks for each in endpoints)
    for i in range(MAX_PASSED):  # those of its class pass it so often
        s.ask(f"low {i}", SHORT, "b", priority=BATCH)
        s.tell(Cancel(f"low {i}"))
    assert "large" in s.goes_out()
    assert not any(each.held_blocks for each in endpoints)


def test_work_of_low_classes_keeps_no_other_in_the_queue() -> None:
    s = Script("decode-0", max_inflight_per_worker=64)
    for i in range(60):
        s.submit(f"low{i}", range(100), priority=BATCH)
    queue, admission = s.router._requests.queue, s.router._requests.admission
    admission._drain.workers_per_s = 10.0
    s.sent.clear()
    s.submit("low", range(100), priority=BATCH, timeout_s=20.0)
    s.submit("r", priority=0, timeout_s=20.0)
    assert [m.request_id for m in s.take(Decode)] == ["r"]
    queue.check_integrity()
