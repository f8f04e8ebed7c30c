"""Workers of different sizes: each is placed by the GPUs that it takes, and keeps its size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvrelay.cluster.control.controller import Controller
from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import (
    Machine,
    MachinesChanged,
    Record,
    StartWorker,
    WorkerLost,
)
from kvrelay.cluster.control.view import cluster_view
from kvrelay.cluster.control.workers import Assigned, assign_machines
from kvrelay.cluster.orders import SetRole
from kvrelay.cluster.status import ClusterStatus, ControllerStatus, merge
from kvrelay.engine.node import Woken
from kvrelay.engine.stats import Role
from tests.cluster.control.configs import changed, made
from tests.cluster.control.test_controller import ROUTER, Script, of
from tests.cluster.control.test_machines import assign_machine

P, D = Role.PREFILL, Role.DECODE
BIG = Machine("big", "h1", 32.0, 4.0)
SMALL = Machine("small", "h2", 32.0, 2.0)
CONFIG = made(
    first=(("prefill-0", P), ("prefill-1", P), ("decode-0", D)),
    routers=(ROUTER.node,),
    backoff_s=1.0,
    decode_ranks=4,
)


def placed(effects: list[Any]) -> dict[str, tuple[str, int]]:
    """Worker -> its machine and its ranks."""
    return {e.worker: (e.machine_id, e.num_ranks) for e in of(StartWorker, effects)}


def test_a_worker_goes_where_as_many_gpus_are_free_as_it_has_ranks() -> None:
    on = [BIG, SMALL]
    assert assign_machine(D, on, [], num_ranks=4) == "big"
    assert assign_machine(D, on, [Assigned("big", P, 1)], num_ranks=4) is None
    assert assign_machine(D, on, [Assigned("big", P, 2)], num_ranks=2) == "small"
    assert assign_machine(D, on, [Assigned("big", P, 2), Assigned("small", D, 1)], num_ranks=2)
    assert assign_machine(D, on, [Assigned("big", P, 3), Assigned("small", D, 1)]) == "small"
    assert assign_machine(D, on, [Assigned("big", P, 4), Assigned("small", D, 2)]) is None


def test_where_gpus_are_not_used_ranks_are_load_and_no_limit() -> None:
    on = [Machine("a", "h1", 8.0, 1.0), Machine("b", "h2", 8.0, 1.0)]
    assigned = [Assigned("a", D, 4), Assigned("b", D, 1), Assigned("b", D, 1)]
    assert assign_machine(D, on, assigned, num_ranks=4) is None
    assert assign_machine(D, [replace(m, num_gpus=0) for m in on], assigned, num_ranks=4) == "b"
    cpus = [replace(m, num_gpus=0) for m in on]
    assert assign_machine(D, cpus, assigned, most=2, use_gpus=False, num_ranks=4) == "a"


def test_the_largest_go_first_so_that_all_fit() -> None:
    """In the order of the names, the second prefill worker would take the GPUs of the large one."""
    script = Script(CONFIG, (BIG, SMALL))
    assert placed(script.first) == {
        "decode-0": ("big", 4),
        "prefill-0": ("small", 1),
        "prefill-1": ("small", 1),
    }


def test_what_does_not_fit_waits_and_says_for_how_many_gpus() -> None:
    script = Script(CONFIG, (SMALL,))
    assert placed(script.first) == {"prefill-0": ("small", 1), "prefill-1": ("small", 1)}
    worker = script.controller.workers["decode-0"]
    assert worker.state is ProcessState.DOWN
    assert worker.last_error == "no machine has room: 4 free GPU(s) of one are needed"
    assert placed(script.say(MachinesChanged((SMALL, BIG)))) == {"decode-0": ("big", 4)}


def test_a_large_worker_that_failed_finds_its_gpus_free() -> None:
    config = changed(CONFIG, first=(*CONFIG.models[""].first, ("prefill-2", P)))
    script = Script(config, (BIG, SMALL))
    assert script.state("prefill-2") is ProcessState.DOWN
    script.say(WorkerLost("decode-0", 1, "killed"))
    script.say(WorkerLost("prefill-0", 1, "killed"))
    other = Machine("other", "h3", 32.0, 1.0)
    assert placed(script.say(MachinesChanged((BIG, other, SMALL)))) == {"prefill-2": ("other", 1)}
    assert placed(script.say(Woken("backoff 1 prefill-0"), at=1.0)) == {"prefill-0": ("small", 1)}
    assert placed(script.say(Woken("backoff 1 decode-0"), at=1.0)) == {"decode-0": ("big", 4)}


def test_a_worker_keeps_its_size_in_another_role_and_with_the_next_controller() -> None:
    script = Script(CONFIG, (BIG, SMALL))
    for worker in CONFIG.models[""].first:
        script.bring_up(worker[0], 1)
    script.say(SetRole("decode-0", P))
    effects = script.controller.receive(0.0, SetRole("prefill-0", D))
    (kept,) = [effect.kept for effect in effects if isinstance(effect, Record)]
    next_one = Controller(changed(CONFIG, kept=kept))
    next_one.start(0.0)
    for each in (script.controller, next_one):
        sizes = {w.node: (w.role, w.num_ranks) for w in each.workers.values()}
        assert sizes == {"prefill-0": (D, 1), "prefill-1": (P, 1), "decode-0": (P, 4)}
    script.say(WorkerLost("decode-0", 1, "killed"))
    again = script.say(Woken("backoff 1 decode-0"), at=1.0)
    assert of(StartWorker, again) == [StartWorker("decode-0", P, 2, "big", 4)]


def test_operators_see_the_size_of_each_worker() -> None:
    me = ControllerStatus(known=True)
    view = cluster_view(Script(CONFIG, (BIG, SMALL)).controller, me, {}, "h", "http")
    status = ClusterStatus(router="router-0", policy="seconds", model="m")
    merge(status, view, 0.0)
    shown = {each.worker: each.tensor_parallel_size for each in status.workers}
    assert shown == {"prefill-0": 1, "prefill-1": 1, "decode-0": 4}


DIVIDED = changed(
    CONFIG, first=(("prefill-0", P), ("decode-0", D)), ranks_per_machine=2, decode_ranks=4
)
PAIRS = tuple(Machine(name, f"h-{name}", 32.0, 2.0) for name in "abc")


def starts(effects: list[Any]) -> dict[str, tuple[int, str, tuple[str, ...]]]:
    return {e.worker: (e.num_ranks, e.machine_id, e.further) for e in of(StartWorker, effects)}


def test_a_worker_of_more_ranks_than_a_machine_may_have_is_divided_evenly() -> None:
    script = Script(DIVIDED, PAIRS)
    assert starts(script.first) == {"decode-0": (4, "a", ("b",)), "prefill-0": (1, "c", ())}
    # Each of its machines is full with its part.
    assigned = [Assigned("a", D, 2), Assigned("b", D, 2)]
    assert assign_machine(P, PAIRS, assigned) == "c"
    assert assign_machines(P, PAIRS, assigned, num_ranks=4, num_machines=2) is None
    assert assign_machines(P, PAIRS, [], num_ranks=6, num_machines=3) == ("a", "b", "c")
    one = [PAIRS[0], Machine("cpu-only", "h", 64.0)]  # which counts nowhere beside GPUs
    assert assign_machines(P, one, [], num_ranks=4, num_machines=2) is None


def test_where_one_of_its_machines_goes_it_waits_for_another_and_says_so() -> None:
    script = Script(DIVIDED, PAIRS)
    script.bring_up("decode-0", 1)
    script.say(MachinesChanged((PAIRS[0], PAIRS[2])))
    script.say(WorkerLost("decode-0", 1, "rank 2: it has ended"))
    again = script.say(Woken("backoff 1 decode-0"), at=1.0)
    assert of(StartWorker, again) == []
    error = script.controller.workers["decode-0"].last_error
    assert error == "no room: 2 free GPU(s) on each of 2 machines are needed"
    other = Machine("d", "h-d", 32.0, 2.0)
    again = script.say(MachinesChanged((PAIRS[0], PAIRS[2], other)))
    assert starts(again) == {"decode-0": (4, "a", ("d",))}


def test_the_next_controller_knows_all_machines_of_a_worker() -> None:
    script = Script(DIVIDED, PAIRS)
    script.bring_up("decode-0", 1)
    effects = script.controller.receive(0.0, SetRole("decode-0", P))
    (kept,) = [effect.kept for effect in effects if isinstance(effect, Record)]
    next_one = Controller(changed(DIVIDED, kept=kept))
    next_one.start(0.0)
    assert next_one.workers["decode-0"].machines == ("a", "b")
    view = cluster_view(next_one, ControllerStatus(known=True), {}, "h", "http")
    assert {w.worker: w.further_machines for w in view.workers}["decode-0"] == ("b",)


def test_without_gpus_ranks_are_divided_too() -> None:
    config = changed(DIVIDED, ranks_per_machine=1, decode_ranks=3, use_gpus=False)
    machines = tuple(replace(machine, num_gpus=0.0) for machine in PAIRS)
    assert starts(Script(config, machines).first)["decode-0"] == (3, "a", ("b", "c"))
    script = Script(config, machines[:2])
    worker = script.controller.workers["decode-0"]
    assert worker.last_error == "no room: 3 machines are needed, 2 are there"
