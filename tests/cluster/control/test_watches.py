"""Workers that are up and make no progress: asked, and ended by force if they do not answer."""

from __future__ import annotations

from typing import Any

from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import StartWorker, StopWorker
from kvrelay.engine.node import Send, Wake, Woken
from kvrelay.engine.stats import Progress, ProgressReport, ProgressRequest, RouterUp
from kvrelay.router.messages import WorkerDown, WorkerSuspected
from tests.cluster.control.test_controller import Script, of

WORKER = "decode-0"


def complain(script: Script, epoch: int = 1, router: str = "router-0") -> list[Any]:
    return script.say(WorkerSuspected(router, WORKER, epoch, "it has said nothing for 3.0 s"))


def up() -> Script:
    script = Script()
    script.bring_up("prefill-0", 1)
    script.bring_up(WORKER, 1)
    return script


def pass_time(script: Script, seconds: int, *, complaints: bool = True) -> list[Any]:
    """One question a second, as it was asked for; routers complain as often."""
    effects: list[Any] = []
    for _ in range(seconds):
        script.now += 1.0
        if complaints:
            effects += complain(script)
        effects += script.say(Woken(f"suspect 1 {WORKER}"))
    return effects


def report(progress: Progress = Progress.MADE, epoch: int = 1) -> ProgressReport:
    return ProgressReport(WORKER, epoch, 7, progress)


def test_a_worker_that_does_not_answer_is_killed_and_started_again() -> None:
    script = up()
    effects = complain(script)
    assert of(Send, effects) == [Send(WORKER, ProgressRequest("controller"))]
    assert of(StopWorker, pass_time(script, 4)) == []
    effects = pass_time(script, 1)
    assert of(StopWorker, effects) == [StopWorker(WORKER, 1)]
    why = "it has said nothing for 3.0 s, and it does not answer"
    assert Send("router-0", WorkerDown(WORKER, 1, why)) in effects
    (pause,) = [wake for wake in of(Wake, effects) if wake.tag.startswith("backoff")]
    assert of(StartWorker, script.say(Woken(pause.tag)))[0].epoch == 2


def test_one_that_answers_is_left_alone_and_told_of_the_routers_again() -> None:
    """The router may only have been forgotten, or have no way to it."""
    script = up()
    complain(script)
    pass_time(script, 3)
    assert script.say(report()) == [Send(WORKER, RouterUp("router-0"))]
    assert pass_time(script, 1, complaints=False) == []
    complain(script)
    assert of(StopWorker, pass_time(script, 4)) == [], "the grace begins again"
    assert script.state(WORKER) is ProcessState.UP


def test_one_that_answers_that_it_makes_no_progress_is_killed() -> None:
    script = up()
    complain(script)
    script.say(report(Progress.NONE))
    assert of(StopWorker, pass_time(script, 5)) == [StopWorker(WORKER, 1)]


def test_a_worker_that_compiles_answers_and_lives() -> None:
    script = up()
    complain(script)
    script.say(report(Progress.LATE))
    assert of(StopWorker, pass_time(script, 3)) == []


def test_without_complaints_the_suspicion_ends() -> None:
    script = up()
    complain(script)
    assert of(StopWorker, pass_time(script, 10, complaints=False)) == []
    assert script.state(WORKER) is ProcessState.UP


def test_complaints_of_an_earlier_life_and_of_one_that_is_not_up_are_nothing() -> None:
    script = Script()
    script.started(WORKER, 1)
    assert complain(script) == []
    script = up()
    assert complain(script, epoch=0) == []
    assert script.say(report(epoch=0)) == []


def test_a_controller_that_was_stopped_itself_asks_first() -> None:
    script = up()
    complain(script)
    script.now += 600.0
    complain(script)
    effects = script.say(Woken(f"suspect 1 {WORKER}"))
    assert of(StopWorker, effects) == []
    assert of(Send, effects) == [Send(WORKER, ProgressRequest("controller"))]
