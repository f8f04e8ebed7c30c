"""The controller, step by step: nobody is used before everybody knows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.cluster.control.controller import Controller
from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import (
    GiveUp,
    Machine,
    MachinesChanged,
    Record,
    RouterStarted,
    SendPeers,
    StartWorker,
    StopWorker,
    WorkerLost,
)
from kvrelay.cluster.control.view import cluster_view
from kvrelay.cluster.status import ControllerStatus
from kvrelay.engine.node import Note, Send, Wake, Woken
from kvrelay.engine.stats import Role, RouterUp, WorkerInfo
from kvrelay.router.messages import WorkerDown, WorkerUp
from kvrelay.worker.messages import Peer, PeersUpdated, StartFailed, WorkerStarted
from tests.cluster.control.configs import changed, made

ROUTER = Peer("router-0", "h0", 1, 1)
CONFIG = made(
    first=(("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE)),
    routers=(ROUTER.node,),
    backoff_s=1.0,
    max_backoff_s=8.0,
    stable_s=60.0,
)
ONE = (Machine("m1", "h1", 8.0),)
TWO = (*ONE, Machine("m2", "h2", 8.0))


def info(worker: str, epoch: int) -> WorkerInfo:
    role = Role.PREFILL if worker.startswith("prefill") else Role.DECODE
    return WorkerInfo(worker, role, epoch, 64, 16, 1024, 2048, 512, b"f")


class Script:
    """A controller and what it said, Notes and what it keeps aside."""

    protocol = 1  # that routers speak

    def __init__(self, config: ControllerConfig = CONFIG, machines: Any = ONE) -> None:
        self.now = 0.0
        self.controller = Controller(config)
        assert self.controller.start(0.0) == []
        for router in config.routers:
            self.say(RouterStarted(replace(ROUTER, node=router, protocol=self.protocol), 8000))
        self.first = self.say(MachinesChanged(machines))

    def say(self, message: Any, at: float | None = None) -> list[Any]:
        self.now = self.now if at is None else at
        effects = self.controller.receive(self.now, message)
        return [e for e in effects if not isinstance(e, Note | Record)]

    def started(self, worker: str, epoch: int) -> list[Any]:
        return self.say(WorkerStarted(info(worker, epoch), "h", 100 + epoch))

    def bring_up(self, worker: str, epoch: int) -> list[Any]:
        """All acknowledge; returns what was said at the end."""
        last: list[Any] = []
        for effect in self.started(worker, epoch):
            if isinstance(effect, SendPeers):
                last = self.say(PeersUpdated(effect.to, effect.about, effect.epoch))
        return last

    def state(self, worker: str) -> ProcessState:
        return self.controller.workers[worker].state


def of(kind: type, effects: list[Any]) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


def test_every_worker_is_started_once_there_are_machines() -> None:
    script = Script(machines=())
    assert script.first == []
    effects = script.say(MachinesChanged(TWO))
    assert of(StartWorker, effects) == [
        StartWorker("prefill-0", Role.PREFILL, 1, "m1"),
        StartWorker("decode-0", Role.DECODE, 1, "m2"),
    ]
    assert script.say(MachinesChanged(TWO)) == []


def test_others_hear_which_version_a_worker_has_and_so_do_operators() -> None:
    script = Script()
    new = WorkerStarted(info("decode-0", 1), "h", 101, protocol=7, package="9.9")
    told = of(SendPeers, script.say(new))
    assert told[1].peers == (Peer("decode-0", "h", 101, 1, protocol=7, package="9.9"),)
    script.started("prefill-0", 1)  # an old one, which does not say
    view = cluster_view(script.controller, ControllerStatus(known=True), {}, "h", "http")
    assert {each.worker: each.version for each in view.workers} == {
        "decode-0": "9.9",
        "prefill-0": "unknown",
    }
    assert [each.version for each in view.routers] == ["unknown"]


def test_a_worker_is_announced_only_when_all_have_been_introduced() -> None:
    script = Script()
    prefill = script.started("prefill-0", 1)
    assert of(SendPeers, prefill) == [
        SendPeers("prefill-0", "prefill-0", 1, (ROUTER,)),
        SendPeers("router-0", "prefill-0", 1, (Peer("prefill-0", "h", 101, 1),)),
    ]
    decode = script.started("decode-0", 1)
    me = Peer("decode-0", "h", 101, 1)
    assert of(SendPeers, decode) == [
        SendPeers("decode-0", "decode-0", 1, (ROUTER, Peer("prefill-0", "h", 101, 1))),
        SendPeers("router-0", "decode-0", 1, (me,)),
        SendPeers("prefill-0", "decode-0", 1, (me,)),
    ]
    assert script.say(PeersUpdated("decode-0", "decode-0", 1)) == []
    assert script.say(PeersUpdated("prefill-0", "decode-0", 1)) == []
    assert script.say(PeersUpdated("router-0", "decode-0", 1)) == [
        Send("decode-0", RouterUp("router-0")),
        Send("router-0", WorkerUp(info("decode-0", 1))),
    ]
    assert script.state("decode-0") is ProcessState.UP
    assert script.state("prefill-0") is ProcessState.INTRODUCING
    assert not script.controller.all_up()


def test_workers_of_one_role_are_introduced_and_not_waited_for() -> None:
    workers = (("decode-0", Role.DECODE), ("decode-1", Role.DECODE), ("prefill-0", Role.PREFILL))
    script = Script(made(first=workers, routers=(ROUTER.node,)))
    script.bring_up("decode-0", 1)
    script.bring_up("prefill-0", 1)
    first, other = Peer("decode-0", "h", 101, 1), Peer("prefill-0", "h", 101, 1)
    me = Peer("decode-1", "h", 101, 1)
    assert of(SendPeers, script.started("decode-1", 1)) == [
        SendPeers("decode-1", "decode-1", 1, (ROUTER, first, other)),
        SendPeers("router-0", "decode-1", 1, (me,)),
        SendPeers("decode-0", "decode-1", 1, (me,)),
        SendPeers("prefill-0", "decode-1", 1, (me,)),
    ]
    script.say(PeersUpdated("decode-1", "decode-1", 1))
    script.say(PeersUpdated("router-0", "decode-1", 1))
    assert script.state("decode-1") is ProcessState.INTRODUCING
    script.say(PeersUpdated("prefill-0", "decode-1", 1))  # decode-0 says nothing: it hangs
    assert script.state("decode-1") is ProcessState.UP
    assert script.say(PeersUpdated("decode-0", "decode-1", 1)) == []


def test_workers_learn_where_listeners_are_who_need_not_learn_of_them() -> None:
    listener = Peer("listener", "h0", 1, 1)
    script = Script(changed(CONFIG, listeners=(listener,)))
    assert of(SendPeers, script.started("decode-0", 1)) == [
        SendPeers("decode-0", "decode-0", 1, (ROUTER, listener)),
        SendPeers("router-0", "decode-0", 1, (Peer("decode-0", "h", 101, 1),)),
    ]


def test_what_a_worker_wants_told_is_noted() -> None:
    controller = Controller(CONFIG)
    controller.receive(0.0, MachinesChanged(ONE))
    started = WorkerStarted(info("decode-0", 1), "h", 1, notices=("no disk tier: it is locked",))
    notes = of(Note, controller.receive(0.0, started))
    assert notes == [Note("warning", "worker_notice", "decode-0: no disk tier: it is locked")]


def test_a_lost_worker_is_taken_down_and_started_again_under_a_new_epoch() -> None:
    script = Script()
    script.bring_up("prefill-0", 1)
    script.bring_up("decode-0", 1)
    assert script.controller.all_up()
    assert script.say(WorkerLost("decode-0", 1, "killed")) == [
        StopWorker("decode-0", 1),
        Wake(1.0, "backoff 1 decode-0"),
        Send("router-0", WorkerDown("decode-0", 1, "killed")),
    ]
    assert script.say(WorkerLost("decode-0", 1, "again")) == []
    again = script.say(Woken("backoff 1 decode-0"), at=1.0)
    assert of(StartWorker, again) == [StartWorker("decode-0", Role.DECODE, 2, "m1")]
    assert script.bring_up("decode-0", 2)[-1] == Send("router-0", WorkerUp(info("decode-0", 2)))
    assert script.controller.all_up()


def test_news_of_an_older_epoch_changes_nothing() -> None:
    script = Script()
    script.say(WorkerLost("decode-0", 1, "killed"))
    script.say(Woken("backoff 1 decode-0"))
    for late in (
        WorkerStarted(info("decode-0", 1), "h", 1),
        WorkerLost("decode-0", 1, "late"),
        StartFailed("decode-0", 1, "late", False),
        PeersUpdated("decode-0", "decode-0", 1),
        Woken("starting 1 decode-0"),
        Woken("backoff 1 decode-0"),
        WorkerLost("nobody", 1, "unknown"),
    ):
        assert script.say(late) == []
    assert script.state("decode-0") is ProcessState.STARTING


def test_the_pause_grows_to_its_cap_and_shrinks_after_a_stable_time() -> None:
    script = Script()
    pauses = []
    for epoch in range(1, 7):
        script.bring_up("decode-0", epoch)
        lost = script.say(WorkerLost("decode-0", epoch, "killed"))
        (wake,) = of(Wake, lost)
        pauses.append(wake.after_s)
        script.say(Woken(wake.tag))
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    script.bring_up("decode-0", 7)
    (wake,) = of(Wake, script.say(WorkerLost("decode-0", 7, "killed"), at=60.0))
    assert wake.after_s == 1.0


def test_a_peer_that_is_lost_is_not_waited_for() -> None:
    script = Script()
    script.started("prefill-0", 1)
    script.started("decode-0", 1)
    script.say(PeersUpdated("decode-0", "decode-0", 1))
    script.say(PeersUpdated("router-0", "decode-0", 1))
    lost = script.say(WorkerLost("prefill-0", 1, "killed"))
    assert lost[-1] == Send("router-0", WorkerUp(info("decode-0", 1)))
    assert of(Send, lost)[0] == Send("decode-0", RouterUp("router-0"))


def test_a_worker_that_cannot_be_introduced_is_started_again() -> None:
    script = Script()
    effects = script.started("decode-0", 1)
    (wake,) = of(Wake, effects)
    lost = script.say(Woken(wake.tag))
    assert of(StopWorker, lost) == [StopWorker("decode-0", 1)]
    assert of(Send, lost) == []
    assert script.state("decode-0") is ProcessState.BACKOFF


def test_a_worker_that_does_not_start_in_time_is_started_again() -> None:
    script = Script()
    lost = script.say(Woken("starting 1 decode-0"))
    assert of(StopWorker, lost) == [StopWorker("decode-0", 1)]
    assert script.state("decode-0") is ProcessState.BACKOFF
    assert script.state("prefill-0") is ProcessState.STARTING


def test_a_start_that_failed_is_tried_elsewhere() -> None:
    script = Script(machines=TWO)
    script.say(StartFailed("prefill-0", 1, "no memory", False))
    again = script.say(Woken("backoff 1 prefill-0"))
    assert of(StartWorker, again) == [StartWorker("prefill-0", Role.PREFILL, 2, "m2")]


def test_a_machine_that_is_gone_is_not_used() -> None:
    script = Script(machines=TWO)
    script.say(MachinesChanged(TWO[1:]))
    script.say(WorkerLost("prefill-0", 1, "machine lost"))
    again = script.say(Woken("backoff 1 prefill-0"))
    assert of(StartWorker, again) == [StartWorker("prefill-0", Role.PREFILL, 2, "m2")]


def test_without_a_machine_a_worker_waits_for_one() -> None:
    script = Script()
    script.say(MachinesChanged(()))
    script.say(WorkerLost("prefill-0", 1, "machine lost"))
    assert script.say(Woken("backoff 1 prefill-0")) == []
    assert script.state("prefill-0") is ProcessState.DOWN
    again = script.say(MachinesChanged(ONE))
    assert of(StartWorker, again) == [StartWorker("prefill-0", Role.PREFILL, 2, "m1")]


@pytest.mark.parametrize("permanent", [True, False])
def test_a_cluster_that_cannot_come_up_gives_up_with_the_reason(permanent: bool) -> None:
    script = Script()
    given_up = []
    for epoch in range(1, 4):
        effects = script.say(StartFailed("decode-0", epoch, "no such model", permanent))
        given_up.append(of(GiveUp, effects))
        script.say(Woken(f"backoff {epoch} decode-0"))
    reason = [GiveUp("no such model")]
    assert given_up == ([reason, [], []] if permanent else [[], [], reason])


def test_once_a_worker_was_up_nothing_is_given_up() -> None:
    script = Script()
    script.bring_up("prefill-0", 1)
    for epoch in range(1, 6):
        assert of(GiveUp, script.say(StartFailed("decode-0", epoch, "no", True))) == []
        script.say(Woken(f"backoff {epoch} decode-0"))
    assert script.controller.workers["decode-0"].last_error == "no"


def test_an_unexpected_message_is_noted() -> None:
    (note,) = Controller(CONFIG).receive(0.0, object())
    assert (note.level, note.counter) == ("warning", "unexpected_message")
