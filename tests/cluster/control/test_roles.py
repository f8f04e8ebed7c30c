"""What a worker is preferred for is changed while it runs, and outlives it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import SendPeers, StartWorker, WorkerLost
from kvrelay.cluster.orders import SetRole
from kvrelay.engine.node import Note, Send, Woken
from kvrelay.engine.stats import Role
from kvrelay.router.messages import RoleChanged, WorkerUp
from kvrelay.worker.messages import PeersUpdated, StartFailed
from tests.cluster.control.test_controller import Script, info, of
from tests.cluster.control.test_routers import TwoRouters


def announced(script: Script, introductions: list[Any]) -> list[WorkerUp]:
    """What routers are told of a worker once all say that they know it."""
    said: list[Any] = []
    for each in of(SendPeers, introductions):
        said += script.say(PeersUpdated(each.to, each.about, each.epoch))
    return [each.message for each in of(Send, said) if isinstance(each.message, WorkerUp)]


def up_as(role: Role, worker: str, epoch: int) -> WorkerUp:
    return WorkerUp(replace(info(worker, epoch), role=role))


def test_every_router_hears_of_it_once_and_the_worker_does_not() -> None:
    script = TwoRouters()
    script.all_up()
    change = RoleChanged("decode-0", 1, Role.PREFILL)
    assert script.say(SetRole("decode-0", Role.PREFILL)) == [
        Send("router-0", change),
        Send("router-1", change),
    ]
    assert script.state("decode-0") is ProcessState.UP
    assert script.controller.workers["decode-0"].role is Role.PREFILL
    assert script.controller.workers["prefill-0"].role is Role.PREFILL


def test_a_role_that_does_not_change_is_not_sent() -> None:
    script = TwoRouters()
    script.all_up()
    assert script.say(SetRole("decode-0", Role.DECODE)) == []
    script.say(SetRole("decode-0", Role.BOTH))
    assert script.say(SetRole("decode-0", Role.BOTH)) == []
    assert script.say(SetRole("unknown-0", Role.PREFILL)) == []
    assert "unknown-0" not in script.controller.workers


def test_a_worker_that_computes_for_itself_alone_keeps_its_role() -> None:
    script = TwoRouters()
    script.all_up()
    worker = script.controller.workers["decode-0"]
    assert worker.info is not None
    worker.info = replace(worker.info, hands_over=False)
    (note,) = script.controller.receive(0.0, SetRole("decode-0", Role.PREFILL))
    assert note.counter == "role_not_changed"
    assert worker.role is Role.DECODE


def test_it_is_noted_with_both_roles() -> None:
    controller = Script().controller
    (note,) = of(Note, controller.receive(0.0, SetRole("decode-0", Role.PREFILL)))
    text = "decode-0 was preferred for decode, and is for prefill now"
    assert note == Note("info", "role_changed", text)
    assert controller.receive(0.0, SetRole("decode-0", Role.PREFILL)) == []


def test_the_next_life_of_a_worker_begins_with_its_new_role() -> None:
    script = Script()
    script.bring_up("prefill-0", 1)
    script.bring_up("decode-0", 1)
    script.say(SetRole("decode-0", Role.PREFILL))
    script.say(WorkerLost("decode-0", 1, "killed"))
    again = script.say(Woken("backoff 1 decode-0"), at=1.0)
    assert of(StartWorker, again) == [StartWorker("decode-0", Role.PREFILL, 2, "m1")]
    # `started` says the role that it once had: the controller knows better.
    said = announced(script, script.started("decode-0", 2))
    assert said == [up_as(Role.PREFILL, "decode-0", 2)]


@pytest.mark.parametrize(
    "news", [WorkerLost("decode-0", 1, "killed"), StartFailed("decode-0", 1, "no memory", False)]
)
def test_while_a_worker_is_down_no_router_is_told_and_it_comes_back_in_its_new_role(
    news: WorkerLost | StartFailed,
) -> None:
    script = Script()
    script.say(news)
    assert script.state("decode-0") is ProcessState.BACKOFF
    assert script.say(SetRole("decode-0", Role.BOTH)) == []
    again = script.say(Woken("backoff 1 decode-0"), at=1.0)
    assert of(StartWorker, again) == [StartWorker("decode-0", Role.BOTH, 2, "m1")]


@pytest.mark.parametrize("state", [ProcessState.STARTING, ProcessState.INTRODUCING])
def test_a_role_that_is_set_before_a_worker_is_up_is_the_one_it_is_announced_with(
    state: ProcessState,
) -> None:
    script = Script()
    introductions = script.started("decode-0", 1) if state is ProcessState.INTRODUCING else []
    assert script.state("decode-0") is state
    assert script.say(SetRole("decode-0", Role.PREFILL)) == []  # no router knows the worker
    said = announced(script, introductions or script.started("decode-0", 1))
    assert said == [up_as(Role.PREFILL, "decode-0", 1)]


def test_a_router_that_comes_later_hears_of_the_new_role_only() -> None:
    script = TwoRouters()
    script.acknowledge(script.started("decode-0", 1))
    introductions = script.router_started()
    change = RoleChanged("decode-0", 1, Role.PREFILL)
    assert script.say(SetRole("decode-0", Role.PREFILL)) == [Send("router-0", change)]
    assert announced(script, introductions) == [up_as(Role.PREFILL, "decode-0", 1)]
