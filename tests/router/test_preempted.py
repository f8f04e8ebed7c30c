"""Requests that wait for memory at their worker move to one that has some."""

from __future__ import annotations

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.messages import Abort, Preempted
from kvrelay.router.router import PAUSE
from tests.router.script import Script, worker_stats
from tests.router.test_migration import PAIR, THREE, finish, others, running


def full(s: Script, *workers: str, num_free_blocks: int = 0) -> None:
    for worker in workers:
        s.tell(worker_stats(worker, num_free_blocks=num_free_blocks, num_running=4))


def test_a_request_that_was_preempted_moves_where_memory_is_free() -> None:
    s, old = running(*THREE)
    crowded, roomy = others(s, old)
    full(s, crowded)
    for _ in range(3):  # the worker says it again and again
        s.tell(Preempted(old, 1, "r", 1))
    assert s.dispatched()[0] == roomy
    assert s.take(Abort) == [], "the old worker may be first to have memory"
    s.delta(roomy, 42, 7, attempt=2)
    assert s.take(Abort) == [Abort("r", 1)]
    s.pass_time(5.0)
    assert s.take(Decode) == [], "nothing waits for memory any more"
    finish(s, roomy, 2, 5, 6, 7)


def test_where_both_attempts_wait_for_memory_a_third_worker_may_have_some() -> None:
    s, old = running(*THREE)
    crowded, roomy = others(s, old)
    full(s, crowded)
    s.tell(Preempted(old, 1, "r", 1))
    assert s.dispatched()[0] == roomy
    full(s, old, roomy)
    full(s, crowded, num_free_blocks=64)
    s.pass_time(1.0)
    assert s.take(Decode) == [], "the second one may be about to go on"
    s.tell(Preempted(roomy, 1, "r", 2))
    s.pass_time(1.0)
    assert s.dispatched()[0] == crowded
    assert s.take(Abort) == [Abort("r", 1)], "the first one, which has waited longest"
    s.delta(crowded, 42, 7, attempt=3)
    assert s.take(Abort) == [Abort("r", 2)]
    finish(s, crowded, 3, 5, 6, 7)


def test_a_request_that_was_preempted_stays_until_another_worker_has_memory() -> None:
    s, old = running(*THREE)
    rest = others(s, old)
    full(s, *rest)
    s.tell(Preempted(old, 1, "r", 1))
    s.pass_time(2.0)
    assert s.take(Decode) == []
    full(s, *rest, num_free_blocks=5)  # it has 42 tokens, of 4 to a block
    s.pass_time(1.0)
    assert s.take(Decode) == []
    s.delta(old, 42)  # it is known there, and still waits
    full(s, rest[1], num_free_blocks=40)
    s.pass_time(0.3)
    assert s.dispatched()[0] == rest[1]
    assert s.router.status(s.now).totals.migrations == 1


@pytest.mark.parametrize("awaits_prefill", [True, False])
def test_a_request_moves_before_its_first_token_if_no_other_worker_computes_it(
    awaits_prefill: bool,
) -> None:
    """The read of its handoff did not settle, and has left no memory for it."""
    s = Script("prefill-0", "decode-0", "decode-1", policy="round_robin")
    for worker in ("decode-0", "decode-1"):
        s.tell(worker_stats(worker))
    s.submit(tokens=range(40))
    old, prefill, _ = s.dispatched()
    assert prefill is not None
    s.tell(Preempted(old, 1, "r", 1, awaits_prefill=awaits_prefill))
    s.pass_time(1.0)
    assert bool(s.take(Decode)) is not awaits_prefill


def test_a_request_that_generates_again_stays_though_memory_is_free_elsewhere() -> None:
    s, old = running()
    (other,) = others(s, old)
    full(s, other)
    s.tell(Preempted(old, 1, "r", 1))
    s.pass_time(1.0)
    s.delta(old, 42, 7)
    full(s, other, num_free_blocks=64)
    s.pass_time(2.0)
    assert s.take(Decode) == []
    s.tell(Preempted(old, 1, "r", 1))
    assert s.dispatched()[0] == other


def test_a_request_without_a_token_moves_too_and_starts_where_there_is_room() -> None:
    s = Script(*PAIR)
    s.submit(tokens=range(40))
    old, _, _ = s.dispatched()
    s.tell(Preempted(old, 1, "r", 1))
    new, _, order = s.dispatched()
    assert (new != old, order.attempt) == (True, 2)
    s.delta(new, 40, 5, attempt=2)
    assert s.one(Abort, old) == Abort("r", 1)
    finish(s, new, 2, 5)


def test_only_the_worker_that_has_the_request_can_say_that_it_was_preempted() -> None:
    s, old = running(*THREE)
    other = others(s, old)[0]
    for preempted in [(other, 1, "r", 1), (old, 2, "r", 1), (old, 1, "r", 2), (old, 1, "x", 1)]:
        s.tell(Preempted(*preempted))
    s.pass_time(1.0)
    assert s.take(Decode) == []


def test_a_request_tries_again_when_its_new_worker_has_failed_and_it_still_waits() -> None:
    s, old = running(*THREE)
    s.tell(Preempted(old, 1, "r", 1))
    new, _, _ = s.dispatched()
    s.down(new)
    assert s.take(Decode) == [], "it moved just now"
    s.pass_time(PAUSE.base_s + 0.3)
    last, _, order = s.dispatched()
    assert last not in (old, new)
    s.delta(last, 42, 7, attempt=order.attempt)
    assert s.take(Abort) == [Abort("r", 1)]
    finish(s, last, 3, 5, 6, 7)
