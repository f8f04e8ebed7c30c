"""What is kept of a request that migrates: bookings, its session, its explanation."""

from __future__ import annotations

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.messages import Abort, Preempted, TokenDeltas
from kvrelay.engine.request import FinishReason, Refusal, TokenDelta
from kvrelay.engine.stats import Role
from kvrelay.router.messages import Failed, RoleChanged
from tests.router.placement.test_roles import Chooser, become_both, endpoint, work
from tests.router.script import Script
from tests.router.sessions.session_script import SessionScript
from tests.router.test_explain import explained
from tests.router.test_migration import PAIR, by_worker, change, finish, moving


@pytest.mark.parametrize("reason", [Refusal.NEVER_FITS, Refusal.CONTEXT_LENGTH])
def test_a_request_that_never_fits_where_it_is_to_go_stays(reason: Refusal) -> None:
    s, old, new = moving(max_attempts=1)
    s.refuse(new, reason, attempt=2)
    assert s.take(Failed) == []
    s.delta(old, 42, 7)
    finish(s, old, 1, 5, 6, 7)


def begun(*workers: str) -> tuple[Script, str, str]:
    """A request of 40 tokens has been handed over and decodes. Returns its workers, too."""
    s = Script(*workers)
    s.submit(tokens=range(40))
    decode, prefill, _ = s.dispatched()
    assert prefill is not None
    s.delta(prefill, 40, 5)
    s.delta(decode, 41, 6)
    return s, decode, prefill


def test_a_prefill_worker_that_decodes_the_next_attempt_has_it_booked() -> None:
    s, decode, prefill = begun("prefill-0", "decode-0")
    change(s, decode, Role.PREFILL)
    assert s.dispatched()[0] == prefill
    s.delta(prefill, 42, 7, attempt=2)
    assert by_worker(s, "num_inflight") == {decode: 0, prefill: 1}


def test_a_prefill_worker_of_both_attempts_has_the_second_booked_when_the_old_one_dies() -> None:
    s, decode, prefill = begun("prefill-0", *PAIR)
    change(s, decode, Role.PREFILL)
    assert s.dispatched()[1] == prefill
    s.down(decode)
    assert by_worker(s, "num_inflight")[prefill] == 1


def test_a_late_refusal_of_the_first_prefill_worker_does_not_end_the_first_attempt() -> None:
    s, decode, prefill = begun("prefill-0", *PAIR)
    change(s, decode, Role.PREFILL)
    s.take(Decode)
    s.refuse(prefill, Refusal.WORKER_FAILED, attempt=1)
    assert s.take(Abort, decode) == []


def test_the_time_after_a_migration_is_not_explained_as_lost() -> None:
    s, old, _ = begun("prefill-0", "prefill-1", *PAIR)
    s.now += 0.5
    s.tell(Preempted(old, 1, "r", 1))
    new, prefill, _ = s.dispatched()
    assert prefill is not None
    s.now += 1.0
    s.delta(prefill, 42, 7, attempt=2)
    s.now += 0.01
    s.delta(new, 43, 8, attempt=2)
    s.now += 5.0
    finish(s, new, 2, 5, 6, 7, 8)
    lost_s = sum(phase.seconds for phase in explained(s).phases if phase.name == "lost")
    assert lost_s < 2.0


def test_a_turn_that_ends_before_it_has_moved_was_decoded_by_the_old_worker() -> None:
    s = SessionScript("decode-0", "decode-1")
    request_id = s.begin("a", range(40))
    s.deliver(request_id, 5, 6)
    current = s.router.live[request_id].current
    assert current is not None
    old = current.decode.worker
    s.tell(RoleChanged(old, 1, Role.PREFILL))
    assert s.router.live[request_id].leaving is current
    last = TokenDelta(request_id, 1, 42, (999,), finish=FinishReason.STOP)
    s.tell(TokenDeltas(old, 1, (last,)))
    (info,) = s.ask("show", "a").sessions
    assert info.worker == old


def test_prompts_for_others_stall_what_decodes_beside_them() -> None:
    names = ("decode-0", "decode-1")
    chooser = become_both(Chooser(*(endpoint(name, num_decoding=20) for name in names)))
    assert chooser.choose(work(2000)).best.seconds.stall > 0
