"""Several routers, step by step: who is told of whom, and when."""

from __future__ import annotations

from typing import Any

from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.cluster.control.controller import Controller
from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import (
    MachinesChanged,
    RestartWorker,
    RouterLost,
    RouterStarted,
    SendPeers,
    WorkerLost,
)
from kvrelay.cluster.control.process_messages import LinkLost
from kvrelay.cluster.control.routers import PairState
from kvrelay.cluster.control.view import cluster_view
from kvrelay.cluster.status import ControllerStatus
from kvrelay.engine.node import Send, Woken
from kvrelay.engine.stats import Role, RouterDown, RouterUp
from kvrelay.router.messages import WorkerDown, WorkerUp
from kvrelay.worker.messages import Peer, PeersUpdated
from tests.cluster.control.configs import changed, made
from tests.cluster.control.test_controller import ONE, ROUTER, Script, info, of

CONFIG = made(
    first=(("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE)),
    routers=(ROUTER.node, "router-1"),
    backoff_s=1.0,
    max_backoff_s=8.0,
)
FRONT = Peer("router-1", "h", 7, 1)


class TwoRouters(Script):
    """The first is up, the other is not."""

    def __init__(self, config: ControllerConfig = CONFIG) -> None:
        super().__init__(made())
        self.controller = Controller(config)
        assert self.controller.start(0.0) == []
        self.acknowledge(self.say(RouterStarted(ROUTER, 8000)))
        self.first = self.say(MachinesChanged(ONE))

    def router_started(self, epoch: int = 1, port: int = 8001) -> list[Any]:
        return self.say(RouterStarted(Peer("router-1", "h", 6 + epoch, epoch), port, 99))

    def acknowledge(self, effects: list[Any], *but: str) -> list[Any]:
        """All but those introduced say so; returns all that was said then."""
        said: list[Any] = []
        for effect in of(SendPeers, effects):
            if effect.to not in but:
                said += self.say(PeersUpdated(effect.to, effect.about, effect.epoch))
        return said

    def all_up(self) -> None:
        for worker in ("prefill-0", "decode-0"):
            self.acknowledge(self.started(worker, 1))
        self.acknowledge(self.router_started())
        assert self.controller.all_up()


def test_a_router_of_this_server_counts_for_being_up() -> None:
    script = TwoRouters()
    for worker in ("prefill-0", "decode-0"):
        script.acknowledge(script.started(worker, 1))
    assert not script.controller.all_up()
    script.router_started()
    assert script.controller.all_up()


def test_a_router_that_starts_and_the_workers_learn_of_each_other_before_either_is_announced() -> (
    None
):
    script = TwoRouters()
    script.acknowledge(script.started("decode-0", 1))
    effects = script.router_started()
    me = Peer("decode-0", "h", 101, 1)
    assert of(SendPeers, effects) == [
        SendPeers("controller", "router-1", 1, (FRONT,)),
        SendPeers("router-1", "router-1", 1, (me, ROUTER)),
        SendPeers("decode-0", "router-1", 1, (FRONT,)),
        SendPeers("router-0", "router-1", 1, (FRONT,)),
    ]
    assert of(Send, effects) == []
    assert script.say(PeersUpdated("router-1", "router-1", 1)) == [
        Send("router-1", RouterUp("router-0"))
    ]
    assert script.say(PeersUpdated("router-0", "router-1", 1)) == [
        Send("router-0", RouterUp("router-1"))
    ]
    assert script.say(PeersUpdated("decode-0", "router-1", 1)) == [
        Send("decode-0", RouterUp("router-1")),
        Send("router-1", WorkerUp(info("decode-0", 1))),
    ]
    assert script.say(PeersUpdated("decode-0", "router-1", 1)) == []  # once


def test_a_worker_that_starts_waits_for_no_router_and_meets_it_when_it_can() -> None:
    script = TwoRouters()
    script.router_started()
    effects = script.started("decode-0", 1)
    me = Peer("decode-0", "h", 101, 1)
    assert of(SendPeers, effects) == [
        SendPeers("decode-0", "decode-0", 1, (ROUTER, FRONT)),
        SendPeers("router-0", "decode-0", 1, (me,)),
        SendPeers("router-1", "decode-0", 1, (me,)),
    ]
    said = script.acknowledge(effects, "router-1")  # which hangs
    assert of(Send, said) == [
        Send("decode-0", RouterUp("router-0")),
        Send("router-0", WorkerUp(info("decode-0", 1))),
    ]
    assert script.say(PeersUpdated("router-1", "decode-0", 1)) == [
        Send("decode-0", RouterUp("router-1")),
        Send("router-1", WorkerUp(info("decode-0", 1))),
    ]


def test_a_router_that_comes_up_between_two_steps_of_a_worker_is_met_all_the_same() -> None:
    script = TwoRouters()
    worker = script.started("decode-0", 1)  # is told of no second router
    router = script.router_started()
    said = script.acknowledge(worker)
    assert Send("router-1", WorkerUp(info("decode-0", 1))) not in said
    assert Send("router-1", WorkerUp(info("decode-0", 1))) in script.acknowledge(router)


def test_a_lost_router_is_waited_for_and_counted_and_its_workers_are_told() -> None:
    script = TwoRouters()
    script.all_up()
    assert script.say(RouterLost("router-1", 1, "killed")) == [
        Send("prefill-0", RouterDown("router-1")),
        Send("decode-0", RouterDown("router-1")),
        Send("router-0", RouterDown("router-1")),
    ]
    assert script.say(RouterLost("router-1", 1, "again")) == []
    me = ControllerStatus(known=True)
    (_, shown) = cluster_view(script.controller, me, {}, "h", "http").routers
    assert (shown.state, shown.last_error) == ("backoff", "killed")
    assert shown.url == "http://h:8001"
    assert not script.controller.all_up()
    assert script.say(PeersUpdated("decode-0", "router-1", 1)) == []  # by the incarnation before
    said = script.acknowledge(script.router_started(epoch=2))
    assert said.count(Send("router-1", WorkerUp(info("decode-0", 1)))) == 1
    assert script.controller.all_up()
    (_, shown) = cluster_view(script.controller, me, {}, "h", "http").routers
    assert (shown.state, shown.restarts, shown.last_error) == ("up", 1, "killed")


def test_a_worker_that_drains_hears_of_a_router_that_is_lost() -> None:
    """Else it goes on with requests whose tokens nobody takes, and is not empty in time."""
    script = TwoRouters()
    script.all_up()
    script.say(RestartWorker("decode-0", "an operator asks"))
    assert script.state("decode-0") is ProcessState.DRAINING
    lost = script.say(RouterLost("router-1", 1, "killed"))
    assert Send("decode-0", RouterDown("router-1")) in lost


def test_a_router_and_a_worker_are_announced_again_after_they_have_parted() -> None:
    script = TwoRouters()
    script.all_up()
    pair = script.controller.router_set.pairs["router-1", "decode-0"]
    assert (pair.state, pair.in_use) == (PairState.ANNOUNCED, True)
    script.say(LinkLost("router-1", "decode-0", 1))
    assert (pair.state, pair.in_use) == (PairState.CONNECTED, False)
    lost = script.say(WorkerLost("decode-0", 1, "killed"))
    down = WorkerDown("decode-0", 1, "killed")
    assert of(Send, lost) == [Send("router-0", down)]  # the other one has given it up itself


def test_routers_learn_of_each_other_once_they_can_reach_each_other() -> None:
    script = TwoRouters(changed(CONFIG, routers=("router-0", "router-1", "router-2")))
    script.acknowledge(script.router_started())
    other = Peer("router-2", "h", 20, 1)
    effects = script.say(RouterStarted(other, 8002))
    assert SendPeers("router-2", "router-2", 1, (ROUTER, FRONT)) in effects
    assert SendPeers("router-1", "router-2", 1, (other,)) in effects
    assert script.say(PeersUpdated("router-1", "router-2", 1)) == [
        Send("router-1", RouterUp("router-2"))
    ]
    assert script.say(PeersUpdated("router-2", "router-2", 1)) == [
        Send("router-2", RouterUp("router-0")),
        Send("router-2", RouterUp("router-1")),
    ]
    lost = script.say(RouterLost("router-2", 1, "killed"))
    down = RouterDown("router-2")
    assert of(Send, lost) == [Send("router-0", down), Send("router-1", down)]


def test_every_router_hears_of_a_worker_that_is_lost_and_of_its_next_life() -> None:
    script = TwoRouters()
    script.all_up()
    down = WorkerDown("decode-0", 1, "killed")
    lost = script.say(WorkerLost("decode-0", 1, "killed"))
    assert of(Send, lost) == [Send("router-0", down), Send("router-1", down)]
    script.say(Woken("backoff 1 decode-0"))
    said = script.acknowledge(script.started("decode-0", 2))
    assert Send("router-1", WorkerUp(info("decode-0", 2))) in said
    assert Send("router-0", WorkerUp(info("decode-0", 2))) in said


def test_a_router_that_is_not_up_hears_nothing() -> None:
    script = TwoRouters()
    script.all_up()
    script.say(RouterLost("router-1", 1, "killed"))
    lost = script.say(WorkerLost("decode-0", 1, "killed"))
    assert [send.to for send in of(Send, lost)] == ["router-0"]
