"""Requests that no worker has memory for now: who passes them, and what is held for them."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.waiting import MAX_PASSED, MAX_PASSED_SHARE
from kvrelay.router.dispatch import Dispatcher
from kvrelay.router.messages import Cancel, Submit, TenantShare
from kvrelay.router.requests import MAX_TRIED_AT_ONCE
from tests.router.script import BLOCK, CLIENT, Script, worker_stats

LARGE, SHORT = 40, 2  # blocks
TIMEOUT_S = 600.0


class Memory(Script):
    """Two workers with 24 of 64 blocks free, and streams that have the rest for long."""

    def __init__(self) -> None:
        super().__init__("decode-0", "decode-1", max_memory_wait_s=0.5)
        for name in ("decode-0", "decode-1"):
            self.say(name, 24)
        self.num_sent = 0

    def say(self, worker: str, num_free: int) -> None:
        stats = worker_stats(worker, num_free_blocks=num_free, num_running=1, decode_step_s=0.03)
        self.tell(stats)

    def ask(self, request_id: str, blocks: int, tenant: str = "a", **options: Any) -> None:
        self.num_sent += 1
        tokens = tuple(range(1000 * self.num_sent, 1000 * self.num_sent + blocks * BLOCK - 3))
        params = SamplingParams(max_tokens=8)
        share = TenantShare()
        self.tell(
            Submit(
                request_id, params, CLIENT, tokens, TIMEOUT_S, tenant=tenant, share=share, **options
            )
        )

    def goes_out(self) -> dict[str, str]:
        """Who has been sent where since the last call."""
        out = {m.request_id: to for to, m in self.sent if isinstance(m, Decode)}
        self.take(Decode)
        return out

    def pass_by(self, count: int, tenant: str = "b", caller: str = "") -> list[str]:
        """Short ones come and end, one after the other: where they went."""
        workers = []
        for _ in range(count):
            name = f"short {self.num_sent}"
            self.ask(name, SHORT, tenant, caller=caller)
            workers += self.goes_out().values()
            self.tell(Cancel(name))
        return workers


@pytest.fixture
def s() -> Memory:
    script = Memory()
    # One of each is there, so that no worker counts as empty.
    script.ask("first", SHORT)
    script.ask("second", SHORT)
    assert set(script.goes_out().values()) == {"decode-0", "decode-1"}
    return script


def test_one_that_fits_nowhere_is_passed_and_then_memory_is_held_for_it_at_one_worker(
    s: Memory,
) -> None:
    s.ask("large", LARGE)
    assert s.goes_out() == {}
    assert len(s.pass_by(MAX_PASSED)) == MAX_PASSED
    s.ask("short", SHORT, "b")
    went = s.goes_out()
    held = went["large"]
    assert went["short"] != held
    others = s.pass_by(2 * MAX_PASSED)
    assert others == [went["short"]] * 2 * MAX_PASSED, "it is not held any more"
    s.delta(held, LARGE * BLOCK - 3, 7, request_id="large")
    s.now += 1.0
    s.say(held, 24)
    s.down(others[0])
    s.goes_out()
    assert s.pass_by(4) == [held] * 4
    for name in ("first", "second", "large", "short"):
        s.tell(Cancel(name))
    s.assert_idle()


def test_no_more_pass_it_where_many_are_sent_at_once(s: Memory) -> None:
    s.ask("large", LARGE)
    s.pass_by(MAX_PASSED - 5)
    for name in ("decode-0", "decode-1"):
        s.say(name, 0)
    for i in range(9):
        s.ask(f"queued {i}", SHORT, "b")
    before = len(s.goes_out())
    s.up("decode-2", num_blocks=24)
    assert list(s.goes_out()).index("large") == 5 - before


@pytest.mark.parametrize("end", ["cancelled", "worker dies", "deadline"])
def test_memory_is_held_no_longer_than_the_one_that_waits_for_it(s: Memory, end: str) -> None:
    def held_by(worker: str) -> int:
        return next(
            e for e in s.router._requests.dispatcher.endpoints if e.worker == worker
        ).held_blocks

    s.ask("large", LARGE)
    s.pass_by(MAX_PASSED)
    s.ask("short", SHORT, "b")
    held = s.goes_out()["large"]
    assert held_by(held) == LARGE
    if end == "worker dies":
        s.down(held)
    elif end == "deadline":
        s.pass_time(TIMEOUT_S + 1)
    else:
        s.tell(Cancel("large"))
    assert held_by(held) == 0
    for name in ("first", "second", "large", "short"):
        s.tell(Cancel(name))
    s.assert_idle()


def test_memory_is_held_after_a_share_of_its_time_too(s: Memory) -> None:
    s.ask("large", LARGE)
    s.pass_by(1)
    s.now += TIMEOUT_S * MAX_PASSED_SHARE
    s.say("decode-0", 24)
    s.say("decode-1", 24)
    s.ask("short", SHORT, "b")
    assert set(s.goes_out()) == {"large", "short"}


def test_memory_is_held_for_one_at_a_time(s: Memory) -> None:
    for number in range(3):
        s.ask(f"large {number}", LARGE)
    s.pass_by(MAX_PASSED)
    s.ask("short", SHORT, "b")
    went = s.goes_out()
    assert set(went) == {"large 0", "short"}
    assert s.pass_by(10) == [went["short"]] * 10
    s.delta(went["large 0"], LARGE * BLOCK - 3, 7, request_id="large 0")
    s.ask("another", SHORT, "b")
    assert "large 1" in s.goes_out()


def test_large_ones_of_a_tenant_do_not_use_up_the_tries_of_others(s: Memory) -> None:
    for number in range(20):
        s.ask(f"large {number}", LARGE)
    s.ask("short", SHORT, "b")
    assert set(s.goes_out()) == {"short"}


@pytest.mark.parametrize("num_large", [4, 100])
def test_large_ones_of_one_tenant_do_not_stop_its_short_ones(s: Memory, num_large: int) -> None:
    for number in range(num_large):
        s.ask(f"large {number}", LARGE + number % 3)
    for number in range(20):
        s.ask(f"short {number}", SHORT)
    assert list(s.goes_out()) == [f"short {number}" for number in range(14)], "as many as fit"


def test_large_ones_of_one_caller_do_not_stop_others_of_its_tenant(s: Memory) -> None:
    for number in range(20):
        s.ask(f"large {number}", LARGE + number % 3, caller="one")
    s.ask("short", SHORT, caller="other")
    assert set(s.goes_out()) == {"short"}


def test_with_large_ones_of_many_callers_none_is_left_out(s: Memory) -> None:
    for number in range(3 * MAX_TRIED_AT_ONCE):
        s.ask(f"large {number}", LARGE - number % 2, caller=f"caller {number}")
    s.ask("short", SHORT, caller="other")
    s.pass_time(2.0)
    assert set(s.goes_out()) == {"short"}


def test_a_large_one_is_passed_by_no_more_than_a_few_of_another_caller(s: Memory) -> None:
    for number in range(3):
        s.ask(f"large {number}", LARGE, caller="one")
    assert len(s.pass_by(MAX_PASSED, "a", caller="other")) == MAX_PASSED
    s.ask("short", SHORT, caller="other")
    assert "large 0" in s.goes_out()


def test_of_large_ones_that_need_no_less_one_is_tried(
    s: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        s.ask(f"large {number}", LARGE + number % 3)
    tried, place = [], Dispatcher.place

    def counted(self: Dispatcher, now: float, record: Any, *args: Any, **kinds: Any) -> Any:
        tried.append(record.request_id)
        return place(self, now, record, *args, **kinds)

    monkeypatch.setattr(Dispatcher, "place", counted)
    s.ask("short", SHORT)
    assert tried == ["large 0", "short"]


def test_of_one_tenant_too_none_is_passed_by_more_than_a_few(s: Memory) -> None:
    for number in range(8):
        s.ask(f"large {number}", LARGE)
    s.pass_by(MAX_PASSED, "a")
    s.ask("short", SHORT)
    for number in range(8):
        held = s.goes_out()[f"large {number}"]
        s.delta(held, LARGE * BLOCK - 3, 7, request_id=f"large {number}")
        s.tell(Cancel(f"large {number}"))


def test_one_whose_prefix_is_cached_needs_less(s: Memory) -> None:
    known = range(7, 7 + LARGE * BLOCK)
    s.holds("decode-0", device=known)
    s.say("decode-0", 24)
    s.ask("large", LARGE, tenant="")
    s.submit("turn", tokens=(*known, *range(2 * BLOCK)))
    assert set(s.goes_out()) == {"turn"}


def test_with_large_ones_of_many_tenants_none_is_left_out(s: Memory) -> None:
    for number in range(3 * MAX_TRIED_AT_ONCE):
        s.ask(f"large {number}", LARGE, f"tenant {number}")
    s.ask("short", SHORT, "b")
    s.pass_time(2.0)
    assert set(s.goes_out()) == {"short"}


def test_a_stream_that_resumes_goes_before_prompts_of_any_priority(s: Memory) -> None:
    s.ask("stream", SHORT, "c", priority=5)
    worker = s.goes_out()["stream"]
    s.delta(worker, SHORT * BLOCK - 3, 7, request_id="stream")
    for name in ("decode-0", "decode-1"):
        s.say(name, -100)
    s.ask("prompt", SHORT, "b", priority=-5)
    assert s.goes_out() == {}
    s.down(worker)
    other = next(name for name in ("decode-0", "decode-1") if name != worker)
    assert s.goes_out() == {}
    s.say(other, 24)
    s.ask("last", SHORT, "b")
    assert next(iter(s.goes_out())) == "stream"


def test_a_stream_that_resumes_needs_not_wait_for_the_memory_that_is_held(s: Memory) -> None:
    s.ask("stream", SHORT, "c")
    worker = s.goes_out()["stream"]
    s.delta(worker, SHORT * BLOCK - 3, 7, request_id="stream")
    s.ask("large", LARGE)
    s.pass_by(MAX_PASSED)
    s.ask("short", SHORT, "b")
    held = s.goes_out()["large"]
    left = next(name for name in ("decode-0", "decode-1") if name != held)
    assert worker == left
    s.down(left)
    assert s.goes_out() == {"stream": held}
