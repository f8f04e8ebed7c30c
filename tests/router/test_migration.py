"""Running requests that move to another worker: one stream, whatever happens on the way."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.messages import Abort
from kvrelay.engine.request import FinishReason, Refusal
from kvrelay.engine.stats import Role
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.router.messages import Cancel, Failed, Output, RoleChanged
from kvrelay.router.router import PAUSE
from tests.router.script import CLIENT, Script, worker_stats
from tests.router.test_explain import explained

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
PAIR, THREE = ("decode-0", "decode-1"), ("decode-0", "decode-1", "decode-2")
REFUSALS = [Refusal.QUEUE_FULL, Refusal.EXECUTION, Refusal.UNKNOWN]


def change(s: Script, worker: str, role: Role, epoch: int = 1) -> None:
    s.tell(RoleChanged(worker, epoch, role))


def running(*workers: str, **config: Any) -> tuple[Script, str]:
    """The request "r" has two tokens, from the worker that is returned."""
    s = Script(*(workers or PAIR), **config)
    s.submit(tokens=range(40))
    worker, prefill, _ = s.dispatched()
    assert prefill is None
    s.delta(worker, 40, 5, 6)
    return s, worker


def moving(*workers: str, **config: Any) -> tuple[Script, str, str]:
    """It is about to move from the first of two workers to the second."""
    s, old = running(*workers, **config)
    change(s, old, Role.PREFILL)
    new, prefill, order = s.dispatched()
    assert (order.attempt, prefill) == (2, None)
    assert order.tokens == (*range(40), 5, 6)
    return s, old, new


def by_worker(s: Script, field: str) -> dict[str, Any]:
    return {w.worker: getattr(w, field) for w in s.router.status(s.now).workers}


def finish(s: Script, worker: str, attempt: int, *tokens: int) -> None:
    """The last token comes from `worker`, then the client has just these, and "r" is nowhere."""
    s.delta(worker, 40 + len(tokens), 999, attempt=attempt, finish=STOP)
    assert s.streamed() == [*tokens, 999]
    assert s.take(Failed) == []
    s.assert_idle()


def others(s: Script, worker: str) -> list[str]:
    return [each for each in by_worker(s, "role") if each != worker]


# -- a role that changes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "streamed"),
    [((42, 7), ()), ((42, 7, 8, 9), (8, 9)), ((43, 8), (8,)), ((41, 6, 7), ())],
    ids=["known", "known and new", "new", "known for long"],
)
def test_a_request_moves_with_the_first_token_of_its_new_worker(
    first: tuple[int, ...], streamed: tuple[int, ...]
) -> None:
    s, old, new = moving()
    assert new != old
    s.delta(old, 42, 7)
    assert s.take(Abort) == [], "the old worker generates until the new one does"
    assert by_worker(s, "num_inflight") == {old: 1, new: 1}
    num_before = len(s.sent)
    s.delta(new, *first, attempt=2)
    assert s.take(Abort, old) == [Abort("r", 1)]
    assert by_worker(s, "num_decoding") == {old: 0, new: 1}
    assert [m.tokens for _, m in s.sent[num_before:]] == ([streamed] if streamed else [])
    s.delta(new, 43, 8, 9, 10, attempt=2)
    finish(s, new, 2, 5, 6, 7, 8, 9, 10)
    assert s.sent == []
    totals = s.router.status(s.now).totals
    assert (totals.migrations, totals.attempts, totals.retries) == (1, 2, {})


def test_what_the_old_worker_sends_after_the_move_is_ignored() -> None:
    s, old, new = moving()
    s.delta(new, 42, 7, attempt=2)
    assert s.take(Abort, old) == [Abort("r", 1)]
    s.delta(old, 42, 7, 8)
    s.refuse(old, Refusal.EXECUTION)
    assert s.take(Abort) == [Abort("r", 1)]
    assert s.take(Decode) == []
    s.delta(new, 43, 8, attempt=2)
    finish(s, new, 2, 5, 6, 7, 8)


def test_the_new_worker_takes_over_when_it_has_the_kv_not_when_its_prefill_worker_has() -> None:
    s = Script("prefill-0", "prefill-1", *PAIR)
    s.submit(tokens=range(40))
    old, prefill, _ = s.dispatched()
    assert prefill is not None
    s.delta(prefill, 40, 5)
    s.delta(old, 41, 6)
    change(s, old, Role.PREFILL)
    new, prefill, order = s.dispatched()
    assert new != old
    assert prefill not in (None, old)
    assert order.tokens == (*range(40), 5, 6)
    s.delta(str(prefill), 42, 7, attempt=2)
    assert s.take(Abort) == []
    s.delta(old, 42, 7, 8)
    s.delta(new, 43, 8, attempt=2)
    assert s.take(Abort) == [Abort("r", 1)]
    finish(s, new, 2, 5, 6, 7, 8)


def test_a_request_whose_prompt_is_not_computed_yet_stays() -> None:
    s = Script(*PAIR)
    s.submit(tokens=range(40))
    worker, _, _ = s.dispatched()
    change(s, worker, Role.PREFILL)
    assert s.sent == []
    s.delta(worker, 40, 5)
    s.delta(worker, 41, 999, finish=STOP)
    assert s.router.status(s.now).totals.migrations == 0
    s.assert_idle()


def test_all_that_decodes_there_moves_and_what_decodes_elsewhere_stays() -> None:
    s = Script(*PAIR)
    at: dict[str, str] = {}
    for n in range(8):
        s.submit(f"r{n}", tokens=range(100 * n, 100 * n + 9))
        at[f"r{n}"] = s.dispatched()[0]
        s.delta(at[f"r{n}"], 9, 5, request_id=f"r{n}")
    change(s, "decode-0", Role.PREFILL)
    moved = [m.request_id for m in s.take(Decode, "decode-1")]
    assert moved == [name for name, worker in at.items() if worker == "decode-0"]
    assert 0 < len(moved) < 8
    assert (s.take(Decode), s.take(Prefill)) == ([], [])


@pytest.mark.parametrize("role", [Role.BOTH, Role.DECODE])
def test_requests_stay_where_decoding_goes_on(role: Role) -> None:
    s, worker = running()
    change(s, worker, role)
    s.pass_time(1.0)
    assert s.take(Decode) == []
    assert by_worker(s, "role")[worker] is role


def test_a_role_that_is_told_again_moves_nothing() -> None:
    s, worker = running()
    s.tell(worker_stats(others(s, worker)[0], num_free_blocks=0, num_running=4))
    change(s, worker, Role.PREFILL)
    s.tell(worker_stats(others(s, worker)[0]))
    change(s, worker, Role.PREFILL)
    s.pass_time(1.0)
    assert s.take(Decode) == [], "what found no room stays"


def test_a_role_that_changes_all_the_time_moves_a_request_less_and_less_often() -> None:
    s, worker = running(tick_s=0.05)
    attempt, began = 1, s.now
    moved_at: list[float] = []
    while len(moved_at) < 7 and s.now < began + 20.0:
        change(s, worker, Role.PREFILL)
        decodes = [(to, m.attempt) for to, m in s.sent if isinstance(m, Decode)]
        change(s, worker, Role.DECODE)
        if s.take(Decode):
            ((worker, attempt),) = decodes
            s.delta(worker, 42, 7, attempt=attempt)
            moved_at.append(s.now)
        s.pass_time(0.05)
    pauses = [later - earlier for earlier, later in pairwise(moved_at)]
    assert pauses == pytest.approx([PAUSE.base_s * 2**n for n in range(6)], abs=0.06)
    finish(s, worker, attempt, 5, 6, 7)


@pytest.mark.parametrize("how", ["dies", "changes its role"])
def test_without_decode_workers_a_prefill_worker_goes_on(how: str) -> None:
    s = Script("prefill-0", "decode-0")
    s.submit(tokens=range(40))
    assert s.dispatched()[:2] == ("decode-0", "prefill-0")
    s.delta("prefill-0", 40, 5)
    s.delta("decode-0", 41, 6)
    if how == "dies":
        s.down("decode-0")
    else:
        change(s, "decode-0", Role.PREFILL)
    worker, prefill, order = s.dispatched()
    assert (worker, prefill, order.tokens) == ("prefill-0", None, (*range(40), 5, 6))
    s.delta("prefill-0", 42, 7, attempt=2)
    finish(s, "prefill-0", 2, 5, 6, 7)
    s.submit("next", tokens=range(100, 140))
    assert s.dispatched()[1] is None


# -- what fails on the way --------------------------------------------------------------------


def test_a_new_worker_that_dies_before_its_first_token_leaves_the_request_where_it_is() -> None:
    s, old, new = moving(*THREE, max_attempts=2)
    s.down(new)
    assert (s.take(Abort), s.take(Decode)) == ([], [])
    s.delta(old, 42, 7)
    assert s.take(Abort) == []
    s.down(old)  # the first failure that counts
    last, _, order = s.dispatched()
    assert last not in (old, new)
    assert (order.attempt, order.tokens) == (3, (*range(40), 5, 6, 7))
    s.delta(last, 43, 8, attempt=3)
    finish(s, last, 3, 5, 6, 7, 8)


@pytest.mark.parametrize("loss", ["down", "refused", "diverged"])
def test_an_old_worker_that_fails_before_the_move_leaves_it_to_the_new_one(loss: str) -> None:
    s, old, new = moving(max_attempts=1)
    match loss:
        case "down":
            s.down(old)
            assert s.take(Abort) == []
        case "refused":
            s.refuse(old, Refusal.EXECUTION)
        case "diverged":
            s.delta(old, 41, 66, 77)
            assert s.take(Abort) == [Abort("r", 1)]
    assert by_worker(s, "num_inflight") == {old: 0, new: 1}
    assert s.take(Decode) == []
    s.take(Abort, old)
    s.delta(new, 42, 7, attempt=2)
    assert s.take(Abort) == []
    finish(s, new, 2, 5, 6, 7)


@pytest.mark.parametrize("loss", [*REFUSALS, "diverged"])
def test_a_request_that_its_new_worker_cannot_go_on_with_stays(loss: str) -> None:
    s, old, new = moving(max_attempts=1)
    if loss == "diverged":
        s.delta(new, 41, 66, attempt=2)
        assert s.take(Abort, new) == [Abort("r", 2)]
    else:
        s.refuse(new, Refusal(loss), attempt=2)
    assert (s.take(Abort), s.take(Decode)) == ([], [])
    assert by_worker(s, "num_inflight") == {old: 1, new: 0}
    s.delta(old, 42, 7)
    finish(s, old, 1, 5, 6, 7)


def test_a_new_worker_that_stays_silent_is_given_up_and_the_stream_goes_on() -> None:
    s, old, new = moving(probe_after_s=1.0, max_silent_probes=2, max_attempts=1)
    for number in range(4):
        s.pass_time(1.1)
        s.delta(old, 42 + number, 10 + number)
    assert s.take(Abort, new) == [Abort("r", 2)]
    assert (s.take(Abort), s.take(Decode)) == ([], [])
    finish(s, old, 1, 5, 6, 10, 11, 12, 13)


@pytest.mark.parametrize("reason", [STOP, LENGTH])
def test_a_request_that_finishes_before_it_has_moved_ends_once(reason: FinishReason) -> None:
    s, old, new = moving()
    rest = (7, 999) if reason is STOP else (7, 8, 9, 10, 11, 12)
    s.delta(old, 42, *rest, finish=reason)
    assert s.take(Abort, new) == [Abort("r", 2)]
    assert s.take(Abort) == []
    s.assert_idle()
    s.delta(new, 42, *rest, attempt=2, finish=reason)
    outputs = s.take(Output)
    assert [o.finish for o in outputs] == [None, reason]
    assert [t for o in outputs for t in o.tokens] == [5, 6, *rest]


@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_a_request_that_ends_while_it_moves_is_aborted_at_both_workers(end: str) -> None:
    s, old, new = moving(probe_after_s=100.0)
    if end == "cancel":
        s.tell(Cancel("r"))
        assert s.take(Failed) == []
    else:
        s.pass_time(59.5)
        assert s.take(Abort) == []
        s.pass_time(1.0)
        assert s.one(Failed, CLIENT).reason is Refusal.DEADLINE
    assert s.take(Abort, new) == [Abort("r", 2)]
    assert s.take(Abort, old) == [Abort("r", 1)]
    s.assert_idle()


# -- what is told of it afterwards ------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "seconds"),
    [
        ("moves", {1: 2.75, 2: 1.0}),
        ("new dies", {1: 3.75}),
        ("old dies", {1: 0.75, 2: 3.0}),
        ("old finishes", {1: 3.75}),
    ],
)
def test_the_phases_of_a_request_that_moved_add_up(way: str, seconds: dict[int, float]) -> None:
    s, old = running(*THREE)
    s.now += 0.5
    change(s, old, Role.PREFILL)
    new, _, _ = s.dispatched()
    s.now += 0.25
    s.delta(old, 42, 7)
    if way in ("new dies", "old dies"):
        s.down(new if way == "new dies" else old)
    worker, attempt = (new, 2) if way in ("moves", "old dies") else (old, 1)
    s.now += 2.0
    s.delta(worker, 42, 7, 8, attempt=attempt, phases={"load": 0.25, "prefill": 0.5})
    s.now += 1.0
    finish(s, worker, attempt, 5, 6, 7, 8)
    phases = explained(s).phases
    assert min(phase.seconds for phase in phases) >= 0.0
    found = {n: sum(p.seconds for p in phases if p.attempt == n) for n in (0, 1, 2)}
    assert {number: total for number, total in found.items() if total} == seconds


def test_phases_add_up_though_the_new_prefill_worker_was_first_with_a_token() -> None:
    s = Script("prefill-0", *PAIR)
    s.submit(tokens=range(40))
    old, _, _ = s.dispatched()
    s.now += 0.5
    s.delta("prefill-0", 40, 5)
    s.now += 0.25
    change(s, old, Role.PREFILL)
    new, prefill, _ = s.dispatched()
    assert prefill == "prefill-0"
    for worker, position in (("prefill-0", 41), (new, 42), (new, 43)):
        s.now += 1.0
        s.delta(worker, position, position, attempt=2)
    finish(s, new, 2, 5, 41, 42, 43)
    assert min(phase.seconds for phase in explained(s).phases) >= 0.0
