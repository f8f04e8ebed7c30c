"""Workers that are silent or late: their requests go elsewhere, and the controller is told."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.messages import Abort
from kvrelay.engine.node import Woken
from kvrelay.engine.stats import Progress
from kvrelay.router.messages import WorkerSuspected
from kvrelay.router.router import TICK
from tests.router.script import Script, worker_stats

BOTH = ("decode-0", "decode-1")


def pass_time(s: Script, seconds: float, *alive: str, progress: dict[str, Progress]) -> None:
    """Workers in `alive` tell their statistics, four times a second."""
    for _ in range(round(4 * seconds)):
        for worker in alive:
            s.tell(worker_stats(worker, progress=progress.get(worker, Progress.MADE)))
        s.pass_time(0.25)


def started(workers: Iterable[str] = BOTH) -> tuple[Script, str]:
    """The request "r" has its first two tokens from the worker that is returned."""
    s = Script(*workers)
    pass_time(s, 1.0, *workers, progress={})
    s.submit()
    worker = s.dispatched()[0]
    s.delta(worker, 10, 5, 6)
    s.sent.clear()
    return s, worker


def other(worker: str) -> str:
    return BOTH[1 - BOTH.index(worker)]


def test_streams_of_a_worker_that_falls_silent_go_on_elsewhere_within_seconds() -> None:
    """They waited for four probes, 20 s."""
    s, silent = started()
    pass_time(s, 2.5, other(silent), progress={})
    assert s.take(Decode) == []
    pass_time(s, 1.0, other(silent), progress={})
    worker, _, order = s.dispatched()
    assert worker == other(silent)
    assert order.tokens == (*range(10), 5, 6)
    assert s.take(Abort, silent) == [Abort("r", 1)]
    assert s.router.status(s.now).totals.retries == {"silent": 1}
    s.submit("next", tokens=range(50, 60))
    assert s.dispatched()[0] == worker, "it gets nothing new"


def test_the_controller_is_told_of_a_silent_worker_again_and_again() -> None:
    s, silent = started()
    pass_time(s, 6.0, other(silent), progress={})
    told = s.take(WorkerSuspected, "controller")
    assert {(each.router, each.worker, each.epoch) for each in told} == {("router-0", silent, 1)}
    assert 3 <= len(told) <= 4
    assert "has said nothing for 3." in told[0].why
    pass_time(s, 3.0, *BOTH, progress={})
    assert s.take(WorkerSuspected) == [], "it speaks again"
    s.submit("next", tokens=range(50, 60))
    assert s.take(Decode)


def test_an_idle_router_notices_as_well() -> None:
    s = Script(*BOTH)
    pass_time(s, 1.0, *BOTH, progress={})
    pass_time(s, 4.0, "decode-0", progress={})
    assert s.take(WorkerSuspected)[0].worker == "decode-1"


def test_the_only_worker_keeps_its_requests_when_it_is_silent() -> None:
    s, _ = started(("decode-0",))
    pass_time(s, 4.0, progress={})
    assert s.take(Decode) == []
    assert s.take(Abort) == []
    assert s.take(WorkerSuspected)


def test_requests_leave_a_worker_whose_step_is_late_and_it_is_not_complained_of() -> None:
    """It answered every probe that it was alive."""
    s, late = started()
    pass_time(s, 1.0, *BOTH, progress={late: Progress.LATE})
    assert s.dispatched()[0] == other(late)
    assert s.router.status(s.now).totals.retries == {"late": 1}
    assert s.take(WorkerSuspected) == []
    pass_time(s, 1.0, *BOTH, progress={late: Progress.NONE})
    assert s.take(WorkerSuspected)[0].worker == late


def test_lateness_uses_up_no_attempt_but_a_request_that_is_always_late_ends() -> None:
    """A machine may be slow, and the request is not what it is slow by; but some hang a step."""
    s = Script(*BOTH, max_attempts=3, backoff_s=0.01)
    pass_time(s, 1.0, *BOTH, progress={})
    s.submit()
    for number in range(1, 7):
        late, _, order = s.dispatched()
        assert order.attempt == number
        pass_time(s, 0.5, *BOTH, progress={late: Progress.LATE})
    assert "6 attempts" in s.failure().detail


def test_a_router_that_was_stopped_itself_blames_no_worker() -> None:
    s, _ = started()
    s.now += 600.0
    s.wakes.clear()
    s.tell(Woken(TICK))
    pass_time(s, 2.0, *BOTH, progress={})
    assert s.take(WorkerSuspected) == []
    assert "silent" not in s.router.status(s.now).totals.retries


def test_a_worker_that_never_spoke_is_told_of_and_used() -> None:
    """It may not know this router yet."""
    s = Script(*BOTH)
    s.submit()
    s.dispatched()
    s.pass_time(4.0)
    assert {each.worker for each in s.take(WorkerSuspected)} == set(BOTH)
    assert s.take(Decode) == []
