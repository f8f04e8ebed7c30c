"""Machines that are to end: workers go elsewhere before that, and nothing comes there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import Machine, MachinesChanged, StartWorker, StopWorker
from kvrelay.engine.node import Note, Woken
from kvrelay.engine.stats import Role
from tests.cluster.control.configs import made
from tests.cluster.control.test_controller import CONFIG, ROUTER, TWO, Script, of

DECODES = made(first=(("decode-0", Role.DECODE), ("decode-1", Role.DECODE)), routers=(ROUTER.node,))
ALONE = made(first=(("decode-0", Role.DECODE),), routers=(ROUTER.node,))
UP, DRAINING = ProcessState.UP, ProcessState.DRAINING


def up(
    config: ControllerConfig, machines: tuple[Machine, ...] = TWO
) -> tuple[Script, dict[str, str]]:
    script = Script(config, machines)
    homes = {each.worker: each.machine_id for each in of(StartWorker, script.first)}
    for worker in homes:
        script.bring_up(worker, 1)
    assert all(script.state(worker) is UP for worker in homes)
    return script, homes


def ends(machines: tuple[Machine, ...], *names: str) -> MachinesChanged:
    return MachinesChanged(
        tuple(replace(each, is_draining=each.machine_id in names) for each in machines)
    )


def drained(script: Script, worker: str) -> list[Any]:
    """Its time to drain is over, and the pause after that: what was said then."""
    epoch = script.controller.workers[worker].epoch
    script.say(Woken(f"drain {epoch} {worker}"), at=script.now + 10_000)
    return script.say(Woken(f"backoff {epoch} {worker}"), at=script.now + 2)


def test_its_worker_drains_to_the_others_and_comes_back_on_a_machine_that_stays() -> None:
    script, homes = up(DECODES)
    leaving = next(worker for worker, machine in homes.items() if machine == "m1")
    other = next(worker for worker in homes if worker != leaving)
    said = script.say(ends(TWO, "m1"))
    assert (script.state(leaving), script.state(other)) == (DRAINING, UP)
    assert not of(StopWorker, said), "what it does goes on, or moves"
    (start,) = of(StartWorker, drained(script, leaving))
    assert (start.worker, start.machine_id) == (leaving, "m2")
    script.bring_up(leaving, 2)
    assert not of(StopWorker, script.say(ends(TWO, "m1"))), "it is where it can stay"


def test_where_all_are_on_it_one_begins_elsewhere_before_the_next_goes() -> None:
    script, homes = up(DECODES, TWO[:1])
    assert set(homes.values()) == {"m1"}
    script.say(ends(TWO, "m1"))
    states = [script.state(worker) for worker in homes]
    assert sorted(states) == [DRAINING, UP]
    first, second = sorted(homes, key=lambda worker: script.state(worker) is UP)
    (start,) = of(StartWorker, drained(script, first))
    assert start.machine_id == "m2"
    assert script.state(second) is UP, "somebody has to serve"
    script.bring_up(first, 2)
    assert script.state(second) is DRAINING


def test_the_only_one_begins_anew_where_there_is_room() -> None:
    script, _ = up(ALONE, TWO[:1])
    assert script.say(ends(TWO[:1], "m1")) == [], "better than none"
    assert script.state("decode-0") is UP
    (stop,) = of(StopWorker, script.say(ends(TWO, "m1")))
    assert stop.worker == "decode-0"
    (start,) = of(StartWorker, script.say(Woken("backoff 1 decode-0"), at=script.now + 60))
    assert start.machine_id == "m2"


def test_nothing_is_placed_on_it_and_operators_hear_of_it() -> None:
    script = Script(CONFIG, ends(TWO, "m1").machines)
    assert {each.machine_id for each in of(StartWorker, script.first)} == {"m2"}
    both = script.controller.receive(1.0, ends(TWO, "m1", "m2"))
    notes = [each for each in both if isinstance(each, Note)]
    texts = [note.text for note in notes if note.counter == "machines_changed"]
    assert texts == ["machines: h2 is to end; 2 are there"]
