"""Routers of several servers: they say where they are, and the next controller finds them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import (
    AdoptRouter,
    MachinesChanged,
    RouterLost,
    RouterStarted,
    WorkerLost,
)
from kvrelay.engine.node import Send, Woken
from kvrelay.engine.stats import RouterDown, RouterUp
from kvrelay.router.messages import WorkerDown, WorkerUp
from kvrelay.worker.messages import Peer, WorkerStarted
from tests.cluster.control.configs import changed
from tests.cluster.control.test_adoption import CONFIG, Lives
from tests.cluster.control.test_controller import ONE, info, of

SHARED = changed(CONFIG, routers=())
HERE = RouterStarted(Peer("router-0@a", "h", 6, 1), 8000, 9)
THERE = RouterStarted(Peer("router-0@b", "g", 6, 1), 8000, 9)


@pytest.fixture
def lives() -> Lives:
    """Two servers' routers, and both workers, are up."""
    lives = Lives()
    lives.begin((), SHARED)
    lives.say(MachinesChanged(ONE))
    for started in (HERE, THERE):
        lives.say(started)
    for worker in ("prefill-0", "decode-0"):
        lives.say(WorkerStarted(info(worker, 1), "h", 100, 7))
    assert lives.controller.all_up()
    return lives


def downs(lives: Lives) -> list[Send]:
    return [sent for sent in lives.sent if isinstance(sent.message, WorkerDown | RouterDown)]


def test_routers_that_join_meet_all_workers_and_each_other(lives: Lives) -> None:
    for started in (HERE, THERE):
        node = started.peer.node
        for worker in ("prefill-0", "decode-0"):
            assert Send(node, WorkerUp(info(worker, 1))) in lives.sent
            assert Send(worker, RouterUp(node)) in lives.sent
    assert Send("router-0@a", RouterUp("router-0@b")) in lives.sent
    lives.sent.clear()
    lives.say(THERE)  # it says so every second
    assert lives.sent == []


def test_the_next_controller_calls_them_and_they_lose_nothing(lives: Lives) -> None:
    lives.begin((), SHARED)
    assert of(AdoptRouter, lives.done) == [AdoptRouter(HERE.peer), AdoptRouter(THERE.peer)]
    lives.say(THERE)
    lives.say(HERE)
    assert downs(lives) == []
    assert lives.controller.routers["router-0@b"].state is ProcessState.UP
    assert Send("router-0@b", WorkerUp(info("decode-0", 1))) in lives.sent


def test_one_that_went_with_the_leader_is_forgotten_by_workers_and_routers(lives: Lives) -> None:
    lives.begin((), SHARED)
    lives.say(THERE)
    lives.sent.clear()
    lives.say(Woken("router adopting 1 router-0@a"))
    gone = RouterDown("router-0@a")
    assert {sent.to for sent in downs(lives)} == {"prefill-0", "decode-0", "router-0@b"}
    assert {sent.message for sent in downs(lives)} == {gone}
    assert list(lives.controller.routers) == ["router-0@b"]
    assert [each.peer.node for each in lives.kept.joined] == ["router-0@b"]


def test_a_worker_that_died_between_two_leaders_is_told_to_the_routers_of_both(
    lives: Lives,
) -> None:
    lives.deaf.add("decode-0")
    lives.begin((), SHARED)
    lives.say(THERE)
    lives.say(WorkerLost("decode-0", 1, "its process has ended"))
    assert {sent.to for sent in downs(lives)} == {"router-0@a", "router-0@b"}


def test_one_that_starts_again_replaces_its_older_self(lives: Lives) -> None:
    lives.sent.clear()
    again = replace(THERE, peer=replace(THERE.peer, epoch=2, port=7))
    lives.say(again)
    assert Send("decode-0", RouterDown("router-0@b")) in lives.sent
    assert Send("decode-0", RouterUp("router-0@b")) in lives.sent
    assert lives.controller.routers["router-0@b"].epoch == 2
    lives.sent.clear()
    lives.say(THERE)  # late
    lives.say(RouterLost("router-0@b", 1, "its process has ended"))
    assert lives.sent == []


def test_one_that_was_lost_and_lives_gives_up_what_workers_have_aborted(lives: Lives) -> None:
    lives.say(RouterLost("router-0@b", 1, "the connection to it was lost"))
    lives.sent.clear()
    lives.say(THERE)
    down = [sent for sent in downs(lives) if sent.to == "router-0@b"]
    assert {sent.message.worker for sent in down} == {"prefill-0", "decode-0"}
    up = Send("router-0@b", WorkerUp(info("decode-0", 1)))
    assert lives.sent.index(up) > max(lives.sent.index(sent) for sent in down)
