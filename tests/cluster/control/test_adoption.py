"""A controller that comes after another one: what runs goes on, and what does not is started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvrelay.cluster.control.controller import Controller, ControllerConfig
from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import (
    AdoptWorker,
    Checkpoint,
    MachinesChanged,
    Record,
    RouterStarted,
    SendPeers,
    SetRole,
    StartRouter,
    StartWorker,
    StopWorker,
    WorkerLost,
)
from kvrelay.cluster.control.process_messages import LinkLost
from kvrelay.engine.node import Note, Send, Woken
from kvrelay.engine.stats import (
    Progress,
    ProgressReport,
    ProgressRequest,
    Role,
    RouterDown,
    RouterUp,
)
from kvrelay.router.messages import WorkerDown, WorkerUp
from kvrelay.worker.messages import Peer, PeersUpdated, WorkerStarted
from tests.cluster.control.test_controller import ONE, info, of

ROUTER = Peer("router-0", "h", 6, 3)
CONFIG = ControllerConfig(
    workers=(("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE)),
    routers=(),
    further_routers=("router-0",),
    backoff_s=1.0,
)


class Lives:
    """Controllers one after the other. Introductions are made at once; `sent` is all that was sent
    to nodes, `done` all other effects."""

    def __init__(self) -> None:
        self.now = 0.0
        self.kept = Checkpoint()
        self.sent: list[Any] = []
        self.done: list[Any] = []
        self.deaf: set[str] = set()  # these say nothing
        self.begin(())

    def begin(self, running: tuple[RouterStarted, ...], config: ControllerConfig = CONFIG) -> None:
        self.sent.clear()
        self.done.clear()
        self.controller = Controller(replace(config, kept=self.kept, running_routers=running))
        self.perform(self.controller.start(self.now))

    def say(self, message: Any) -> None:
        self.perform(self.controller.receive(self.now, message))

    def perform(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Record(kept):
                    self.kept = kept
                case Send():
                    self.sent.append(effect)
                case SendPeers(to, about, epoch):
                    self.say(PeersUpdated(to, about, epoch))
                case AdoptWorker(worker, epoch) if worker not in self.deaf:
                    self.say(WorkerStarted(info(worker, epoch), "h", 100, 7))
                case Note():
                    pass
                case _:
                    self.done.append(effect)

    def bring_up(self) -> None:
        self.say(MachinesChanged(ONE))
        self.say(RouterStarted(replace(ROUTER, epoch=1), 8000, 9))
        for worker in ("prefill-0", "decode-0"):
            self.say(WorkerStarted(info(worker, 1), "h", 100, 7))
        assert self.controller.all_up()


@pytest.fixture
def lives() -> Lives:
    lives = Lives()
    lives.bring_up()
    return lives


RUNNING = (RouterStarted(replace(ROUTER, epoch=1), 8000, 9),)


def test_what_runs_is_up_again_at_once_and_nothing_is_started(lives: Lives) -> None:
    lives.begin(RUNNING)
    assert lives.controller.all_up()
    assert of(StartWorker, lives.done) + of(StartRouter, lives.done) == []
    assert of(StopWorker, lives.done) == []
    assert not [s for s in lives.sent if isinstance(s.message, WorkerDown | RouterDown)]
    for worker in ("prefill-0", "decode-0"):
        assert Send("router-0", WorkerUp(info(worker, 1))) in lives.sent
        assert Send(worker, RouterUp("router-0")) in lives.sent
    assert [w.pid for w in lives.controller.workers.values()] == [7, 7]


def test_a_worker_that_does_not_answer_is_started_again_and_its_router_is_told(
    lives: Lives,
) -> None:
    lives.deaf.add("decode-0")
    lives.begin(RUNNING)
    lives.say(MachinesChanged(ONE))
    assert lives.controller.workers["decode-0"].state is ProcessState.ADOPTING
    lives.say(Woken("adopting 1 decode-0"))
    assert of(StopWorker, lives.done) == [StopWorker("decode-0", 1)]
    (down,) = [s for s in lives.sent if isinstance(s.message, WorkerDown)]
    assert (down.to, down.message.worker, down.message.epoch) == ("router-0", "decode-0", 1)
    lives.say(Woken("backoff 1 decode-0"))
    assert [(s.worker, s.epoch) for s in of(StartWorker, lives.done)] == [("decode-0", 2)]


def test_a_worker_with_other_settings_ends_and_is_started_with_those_of_now(lives: Lives) -> None:
    config = replace(CONFIG, settings="of now")
    lives.begin(RUNNING, config)
    lives.say(MachinesChanged(ONE))
    stopped, started = of(StopWorker, lives.done), of(StartWorker, lives.done)
    assert {(s.worker, s.epoch) for s in stopped} == {("prefill-0", 1), ("decode-0", 1)}
    assert {(s.worker, s.epoch) for s in started} == {("prefill-0", 2), ("decode-0", 2)}
    for worker in ("prefill-0", "decode-0"):
        lives.say(WorkerStarted(info(worker, 2), "h", 100, 8))
    lives.begin(RUNNING, config)
    assert lives.controller.all_up()
    assert of(StopWorker, lives.done) == []


def test_a_worker_too_many_ends_and_the_others_go_on(lives: Lives) -> None:
    lives.begin(RUNNING, replace(CONFIG, workers=(("decode-0", Role.DECODE),)))
    assert lives.controller.all_up()
    assert of(StopWorker, lives.done) == [StopWorker("prefill-0", 1)]
    assert of(StartWorker, lives.done) == []


def test_one_whose_process_is_gone_is_not_waited_for(lives: Lives) -> None:
    lives.deaf.add("decode-0")
    lives.begin(RUNNING)
    lives.say(WorkerLost("decode-0", 1, "its process has ended"))
    assert lives.controller.workers["decode-0"].state is ProcessState.BACKOFF


def test_one_that_was_starting_is_ended_and_started_under_a_new_epoch() -> None:
    lives = Lives()
    lives.say(MachinesChanged(ONE))
    lives.begin(())
    assert of(StopWorker, lives.done) == [StopWorker("prefill-0", 1), StopWorker("decode-0", 1)]
    lives.say(MachinesChanged(ONE))
    assert [(s.worker, s.epoch) for s in of(StartWorker, lives.done)] == [
        ("prefill-0", 2),
        ("decode-0", 2),
    ]


def test_a_router_that_died_meanwhile_is_forgotten_by_workers_before_its_next_life(
    lives: Lives,
) -> None:
    lives.begin(())
    assert of(StartRouter, lives.done) == [StartRouter("router-0", 2, 0)]
    gone = Send("decode-0", RouterDown("router-0"))
    assert gone in lives.sent
    lives.say(RouterStarted(replace(ROUTER, epoch=2), 8000, 10))
    assert lives.sent.index(gone) < lives.sent.index(Send("decode-0", RouterUp("router-0")))


def test_a_role_that_was_changed_is_kept(lives: Lives) -> None:
    lives.say(SetRole("prefill-0", Role.BOTH))
    lives.begin(RUNNING)
    both = replace(info("prefill-0", 1), role=Role.BOTH)
    assert Send("router-0", WorkerUp(both)) in lives.sent


def test_a_worker_that_is_wanted_no_more_is_ended(lives: Lives) -> None:
    lives.begin(RUNNING, replace(CONFIG, workers=CONFIG.workers[1:]))
    assert of(StopWorker, lives.done) == [StopWorker("prefill-0", 1)]
    assert lives.controller.all_up()


def test_a_router_that_lost_messages_meets_the_worker_again_once_that_has_answered(
    lives: Lives,
) -> None:
    lives.sent.clear()
    lives.say(LinkLost("router-0", "decode-0", 1))
    assert lives.sent == [
        Send("decode-0", RouterDown("router-0")),
        Send("decode-0", ProgressRequest("controller")),
    ]
    lives.sent.clear()
    lives.say(ProgressReport("decode-0", 1, 5, Progress.MADE))
    assert Send("router-0", WorkerUp(info("decode-0", 1))) in lives.sent
    assert Send("decode-0", RouterUp("router-0")) in lives.sent
    assert lives.controller.all_up()
