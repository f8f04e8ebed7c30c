"""What goes wrong with workers, and how the request goes on; each ends exactly once."""

from __future__ import annotations

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.events import KVSnapshot
from kvrelay.engine.messages import Abort, Probe
from kvrelay.engine.node import Unsendable
from kvrelay.engine.request import FinishReason, Refusal
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.router.messages import Failed, Output
from tests.router.script import CLIENT, Script, worker_stats

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
ALL = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def started(**config: float) -> tuple[Script, str, str]:
    """Two workers of each role; the request "r" of 40 tokens is on its first attempt."""
    s = Script(*ALL, **config)
    s.submit(tokens=range(40))
    decode, prefill, _ = s.dispatched()
    assert prefill is not None
    s.sent.clear()
    return s, decode, prefill


def other(worker: str) -> str:
    role, number = worker.split("-")
    return f"{role}-{1 - int(number)}"


def test_the_stream_goes_on_elsewhere_when_the_decode_worker_dies() -> None:
    s, decode, prefill = started()
    s.delta(prefill, 40, 5)
    s.delta(decode, 41, 6, 7)
    s.down(decode)
    new_decode, new_prefill, order = s.dispatched()
    assert new_decode == other(decode)
    assert order.attempt == 2
    assert order.tokens == (*range(40), 5, 6, 7)
    assert order.num_prompt_tokens == 40
    assert order.sampling.max_tokens == 8
    assert s.take(Abort) == [], "the prefill worker had done its part, the decode worker is dead"
    if new_prefill is not None:
        s.delta(new_prefill, 43, 8, attempt=2)
    s.delta(new_decode, 43, 8, 9, attempt=2)
    s.delta(new_decode, 45, 999, attempt=2, finish=STOP)
    assert s.streamed() == [5, 6, 7, 8, 9, 999]
    s.delta(new_decode, 45, 999, attempt=2, finish=STOP)
    assert s.take(Output) == []
    s.assert_idle()


def test_a_new_epoch_of_the_decode_worker_is_the_death_of_the_old_one() -> None:
    s, decode, prefill = started()
    s.up(decode, epoch=2)
    _, _, order = s.dispatched()
    assert order.attempt == 2
    assert s.take(Abort, prefill) == [Abort("r", 1)]
    s.down(decode, epoch=1)
    s.up(decode, epoch=1)
    assert s.take(Decode) == []


def test_a_dead_prefill_worker_is_replaced_before_the_handoff() -> None:
    s, decode, prefill = started()
    s.down(prefill)
    assert s.take(Abort, decode) == [Abort("r", 1)]
    _, new_prefill, order = s.dispatched()
    assert new_prefill != prefill
    assert order.attempt == 2


def test_what_a_lost_attempt_has_computed_is_no_cache_hit_of_the_next_one() -> None:
    s, decode, _ = started()
    s.down(decode)
    new_decode, new_prefill, _ = s.dispatched()
    found = {"num_cached_tokens": 36, "cached_by_source": {"device": 36}}
    s.delta(new_prefill or new_decode, 40, 5, attempt=2, **found)
    (output,) = s.take(Output)
    assert (output.num_cached_tokens, output.cached_by_source) == (0, {})


def test_the_first_token_alone_does_not_prove_the_handoff() -> None:
    s, decode, prefill = started()
    s.delta(prefill, 40, 5)
    s.down(prefill)
    assert s.take(Abort, decode) == [Abort("r", 1)]
    assert s.dispatched()[2].tokens == (*range(40), 5)


def test_a_dead_prefill_worker_is_not_missed_after_the_handoff() -> None:
    s, decode, prefill = started()
    s.delta(prefill, 40, 5)
    s.delta(decode, 41, 6)
    s.down(prefill)
    s.delta(decode, 42, 7)
    assert s.take(Decode) == []
    assert s.streamed() == [5, 6, 7]


def test_the_last_prefill_worker_gone_means_prefill_on_the_decode_worker() -> None:
    s = Script("prefill-0", "decode-0")
    s.submit(tokens=range(40))
    s.sent.clear()
    s.down("prefill-0")
    assert s.dispatched()[:2] == ("decode-0", None)


def test_a_complete_log_needs_no_further_attempt() -> None:
    s = Script("decode-0")
    s.submit(max_tokens=3, stop_token_ids=(9,), min_tokens=0)
    s.sent.clear()
    s.delta("decode-0", 10, 5, 9, finish=None)
    assert s.one(Output).finish is STOP
    s.down("decode-0")
    s.assert_idle()


def test_a_silent_worker_is_probed_then_given_up() -> None:
    s, decode, prefill = started(probe_after_s=1.0, max_silent_probes=3)
    s.delta(prefill, 40, 5)
    s.pass_time(0.9)
    assert s.take(Probe) == []
    s.pass_time(0.3)
    assert s.take(Probe) == [Probe("r", 1, "router-0", 41)]
    s.delta(decode, 41)
    s.pass_time(3.4)
    assert len(s.take(Probe, decode)) == 3
    assert s.take(Decode) == []
    s.pass_time(1.0)
    new_decode, _, order = s.dispatched()
    assert (new_decode, order.attempt) == (other(decode), 2)
    assert s.take(Abort, decode) == [Abort("r", 1)]
    assert s.router.status(s.now).totals.retries == {"silent": 1}


def test_a_worker_that_says_it_is_alive_is_waited_for() -> None:
    s, decode, _ = started(probe_after_s=1.0)
    for _ in range(30):
        s.pass_time(0.5)
        if s.take(Probe, decode):
            s.delta(decode, 40)
    assert s.take(Decode) == []


def test_an_attempt_that_never_arrived_is_sent_again() -> None:
    s, decode, prefill = started()
    s.refuse(decode, Refusal.UNKNOWN)
    assert s.take(Abort) == [Abort("r", 1)]
    assert s.dispatched()[2].attempt == 2
    s.refuse(decode, Refusal.UNKNOWN)
    s.refuse(prefill, Refusal.UNKNOWN)
    assert s.sent == [], "refusals of attempt 1 come too late"


def test_a_continuation_of_other_tokens_is_replaced() -> None:
    s, decode, prefill = started()
    s.delta(prefill, 40, 5)
    s.delta(decode, 40, 6, 7)
    assert s.streamed() == [5]
    assert s.take(Abort, decode) == [Abort("r", 1)]
    assert s.dispatched()[2].tokens == (*range(40), 5)
    assert s.router.status(s.now).totals.retries == {"diverged": 1}


def test_a_prefill_workers_token_that_comes_too_late_harms_nobody() -> None:
    s, decode, prefill = started()
    s.delta(decode, 40, 6, 7)
    s.delta(prefill, 40, 5, finish=LENGTH)
    s.delta(decode, 42, 8)
    assert s.streamed() == [6, 7, 8]
    assert s.take(Decode) == []


def test_a_failed_step_is_tried_on_another_worker() -> None:
    s, decode, _ = started()
    s.refuse(decode, Refusal.WORKER_FAILED)
    assert s.dispatched()[0] == other(decode)
    s.submit("next", tokens=range(100, 140))
    assert s.dispatched()[0] == other(decode), "it is left alone for a while"


def test_a_failed_step_counts_once_however_many_requests_it_had() -> None:
    """It would shut the worker out for 30 s otherwise, instead of 0.5."""
    s = Script("decode-0", backoff_s=0.5, max_backoff_s=30.0)
    for number in range(8):
        s.submit(f"r{number}", tokens=range(100 * number, 100 * number + 10))
    s.sent.clear()
    s.now += 0.1
    for number in range(8):
        s.refuse("decode-0", Refusal.WORKER_FAILED, request_id=f"r{number}")
        s.now += 0.001
    s.pass_time(0.75)
    assert len(s.take(Decode)) == 8


@pytest.mark.parametrize("reason", [Refusal.INVALID_TOKENS, Refusal.GRAMMAR])
def test_what_a_request_brought_itself_is_charged_to_no_worker(reason: Refusal) -> None:
    s, _, prefill = started()
    s.refuse(prefill, reason)
    assert s.failure().reason is reason
    assert s.take(Decode) == []
    assert {worker.state for worker in s.router.status(s.now).workers} == {"up"}


def test_a_full_worker_costs_no_attempt_and_another_is_tried() -> None:
    s, decode, _ = started(max_attempts=1)
    s.refuse(decode, Refusal.QUEUE_FULL)
    new_decode, _, order = s.dispatched()
    assert (new_decode, order.attempt) == (other(decode), 2)


def test_a_full_pool_is_tried_again_when_the_back_off_is_over() -> None:
    s = Script("decode-0", backoff_s=1.0)
    s.submit()
    s.sent.clear()
    s.refuse("decode-0", Refusal.QUEUE_FULL)
    s.pass_time(0.9)
    assert s.take(Decode) == []
    assert s.router.status(s.now).workers[0].state == "backoff"
    s.pass_time(0.4)
    assert s.one(Decode).attempt == 2


def test_what_a_full_worker_has_refused_is_not_held_there() -> None:
    """It would be taken for a short prompt, and go before those that wait there."""
    s = Script("decode-0", backoff_s=1.0)
    s.submit(tokens=range(40))
    assert s.one(Decode).num_held == 0
    s.refuse("decode-0", Refusal.QUEUE_FULL)
    s.pass_time(1.3)
    again = s.one(Decode)
    assert (again.attempt, again.num_held) == (2, 0)


def test_back_off_doubles_until_tokens_come() -> None:
    s = Script("decode-0", backoff_s=1.0, max_attempts=9)
    s.submit(max_tokens=100)
    waits = []
    for attempt in range(1, 5):
        if attempt == 4:
            s.delta("decode-0", 10, *range(5, 21), attempt=attempt)
        s.sent.clear()
        s.refuse("decode-0", Refusal.WORKER_FAILED, attempt=attempt)
        began = s.now
        while not s.take(Decode):
            s.pass_time(0.25)
        waits.append(round(s.now - began))
    assert waits == [1, 2, 4, 1]


def test_a_prefill_worker_that_refuses_does_not_stop_a_handed_over_request() -> None:
    s, decode, prefill = started()
    s.delta(decode, 40, 5)
    s.refuse(prefill, Refusal.WORKER_FAILED)
    s.refuse(prefill, Refusal.DEADLINE)
    assert s.take(Decode) == []
    s.delta(decode, 41, 6)
    assert s.streamed() == [5, 6]


def test_a_prompt_too_large_for_the_prefill_worker_is_sent_elsewhere() -> None:
    s = Script("prefill-0", "decode-0", policy="round_robin")
    s.submit(tokens=range(40))
    s.sent.clear()
    s.refuse("prefill-0", Refusal.NEVER_FITS)
    assert s.dispatched()[:2] == ("decode-0", None)


@pytest.mark.parametrize("reason", [Refusal.NEVER_FITS, Refusal.CONTEXT_LENGTH, Refusal.DEADLINE])
def test_what_no_worker_would_do_fails_at_once(reason: Refusal) -> None:
    s, decode, _ = started()
    s.refuse(decode, reason)
    failed = s.failure()
    assert failed.reason is reason
    assert failed.detail == "because", "and not at which worker"
    assert s.take(Decode) == []


def test_a_repeated_order_is_not_a_failure() -> None:
    s, decode, _ = started()
    s.refuse(decode, Refusal.DUPLICATE)
    assert s.take(Probe, decode) == [Probe("r", 1, "router-0", 40)]
    assert s.take(Decode) == []


def test_attempts_are_bounded() -> None:
    s = Script(*ALL, max_attempts=3, backoff_s=0.01)
    s.submit(tokens=range(40))
    for attempt in (1, 2, 3):
        decode, _, order = s.dispatched()
        assert order.attempt == attempt
        s.refuse(decode, Refusal.WORKER_FAILED, attempt=attempt)
        s.pass_time(1.0)
    failed = s.failure()
    assert failed.reason is Refusal.ATTEMPTS
    assert "3 attempts" in failed.detail
    assert "because" in failed.detail


def test_a_worker_that_failed_the_request_is_used_again_if_it_is_the_only_one() -> None:
    s = Script("decode-0")
    s.submit()
    s.sent.clear()
    s.refuse("decode-0", Refusal.WORKER_FAILED)
    s.pass_time(1.0)
    assert s.dispatched()[0] == "decode-0"


def test_a_worker_without_statistics_for_long_gets_no_new_requests() -> None:
    s = Script("decode-0", "decode-1", probe_after_s=2.0)
    s.tell(worker_stats("decode-0"))
    s.tell(worker_stats("decode-1"))
    s.now += 3.0
    s.tell(worker_stats("decode-1"))
    for n in range(6):
        s.submit(f"r{n}", tokens=range(100 * n, 100 * n + 9))
    assert len(s.take(Decode, "decode-1")) == 6


def test_the_deadline_ends_it_everywhere() -> None:
    s = Script("prefill-0", "decode-0")
    s.submit(tokens=range(40), timeout_s=3.0)
    s.sent.clear()
    s.delta("prefill-0", 40, 5)
    s.pass_time(2.9)
    s.take(Output)
    assert s.sent == []
    s.pass_time(0.5)
    failed = s.failure()
    assert failed.reason is Refusal.DEADLINE
    assert "1 of at most 8 tokens" in failed.detail
    assert [to for to, m in s.sent if m == Abort("r", 1)] == ["decode-0", "prefill-0"]
    s.pass_time(60.0)
    assert s.take(Output) == []


def test_later_attempts_have_what_is_left_of_the_time() -> None:
    s, decode, _ = started()
    s.now += 20.0
    s.down(decode)
    assert s.dispatched()[2].timeout_s == 40.0


def test_workers_that_die_while_it_is_queued_do_not_matter() -> None:
    s = Script(*ALL)
    for worker in ALL:
        s.down(worker)
    s.submit()
    s.pass_time(5.0)
    assert s.sent == []
    s.up("decode-1", epoch=2)
    assert s.one(Decode, "decode-1").attempt == 1
    assert s.take(Prefill) == []


def test_many_requests_lose_their_worker_at_once_and_all_go_on_in_order() -> None:
    s = Script("decode-0", "decode-1", max_queue=0)
    for n in range(20):
        s.submit(f"r{n}", tokens=range(100 * n, 100 * n + 9))
    first = [m.request_id for to, m in s.sent if isinstance(m, Decode) and to == "decode-0"]
    assert len(first) == 10
    s.sent.clear()
    s.down("decode-0")
    assert [m.request_id for m in s.take(Decode, "decode-1")] == first
    assert s.sent == []
    assert CLIENT not in [to for to, _ in s.sent]


def test_who_fails_by_itself_is_tried_once_more_and_charged_to_no_worker() -> None:
    s, decode, _ = started()
    s.refuse(decode, Refusal.EXECUTION)
    second, _, order = s.dispatched()
    assert second == other(decode)
    states = {status.worker: status.state for status in s.router.status(s.now).workers}
    assert states[decode] == "up", "it is used as before"
    s.refuse(second, Refusal.EXECUTION, attempt=order.attempt)
    failed = s.failure()
    assert failed.reason is Refusal.EXECUTION
    assert "by itself 2 times" in failed.detail


class Killed(Script):
    """Workers that are there again at once when they have ended."""

    def __init__(self) -> None:
        super().__init__("decode-0", "decode-1", backoff_s=0.01, max_lost_workers=6)
        self.epochs = {"decode-0": 1, "decode-1": 1}
        self.num_lost = 0

    def kill(self, worker: str) -> None:
        self.num_lost += 1
        self.down(worker, self.epochs[worker])
        self.epochs[worker] += 1
        self.up(worker, epoch=self.epochs[worker])
        self.tell(KVSnapshot(worker, self.epochs[worker], 0, ()))

    def bring(self, worker: str, position: int, count: int, name: str, attempt: int) -> None:
        epoch = self.epochs[worker]
        tokens = range(5, 5 + count)
        self.delta(worker, position, *tokens, request_id=name, attempt=attempt, epoch=epoch)


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 4), (1, 4), (16, 6)])
def test_who_ends_worker_after_worker_is_refused_whatever_it_brings(
    num_tokens: int, expected: int
) -> None:
    """It was tried for an hour, if it brought one token each time."""
    s = Killed()
    s.submit("killer", tokens=range(40), max_tokens=200)
    position = 40
    while s.num_lost < 40:
        decode, _, order = s.dispatched()
        if num_tokens:
            s.bring(decode, position, num_tokens, "killer", order.attempt)
            position += num_tokens
        s.kill(decode)
        failed = s.take(Failed)
        if failed:
            assert failed[0].reason is Refusal.ATTEMPTS
            assert f"{s.num_lost} workers ended while they served it" in failed[0].detail
            break
    assert s.num_lost == expected


def test_suspects_are_kept_apart_and_only_the_one_that_ends_workers_is_refused() -> None:
    s = Killed()
    names = ["killer", *(f"good{number}" for number in range(6))]
    for number, name in enumerate(names):
        s.submit(name, tokens=range(30 * number, 30 * number + 20), max_tokens=100)
    where: dict[str, tuple[str, int]] = {}
    tokens = dict.fromkeys(names, 20)
    failed: list[str] = []
    for _ in range(600):
        for to, order in [(to, m) for to, m in s.sent if isinstance(m, Decode)]:
            where[order.request_id] = to, order.attempt
        s.take(Decode)
        if "killer" in where:
            ended, _ = where["killer"]
            where = {name: at for name, at in where.items() if at[0] != ended}
            s.kill(ended)
        for name, (to, attempt) in [*where.items()]:
            if tokens[name] < 120:
                s.bring(to, tokens[name], 1, name, attempt)
                tokens[name] += 1
        failed += [each.request_id for each in s.take(Failed)]
        s.pass_time(0.25)
    assert failed == ["killer"]
    assert all(tokens[name] == 120 for name in names[1:])
    assert s.num_lost <= 6


def test_what_fits_into_no_message_is_refused_at_once() -> None:
    s = Script(*ALL)
    s.submit("huge", tokens=range(100, 140))
    decode, _, order = s.dispatched()
    s.tell(Unsendable(decode, order, "Decode cannot be encoded: int too big"))
    failed = s.failure()
    assert (failed.request_id, failed.reason) == ("huge", Refusal.UNENCODABLE)
    assert "int too big" in failed.detail
