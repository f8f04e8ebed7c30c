"""On which machines workers are placed."""

from __future__ import annotations

from typing import Any

from kvrelay.cluster.control.messages import Machine
from kvrelay.cluster.control.workers import Assigned, assign_machines
from kvrelay.engine.stats import Role

P, D = Role.PREFILL, Role.DECODE


def assign_machine(*args: Any, **options: Any) -> str | None:
    """Returns the place for a worker on one machine."""
    found = assign_machines(*args, **options)
    return None if found is None else found[0]


def machines(*names: str, gpus: float = 0.0) -> list[Machine]:
    return [Machine(name, f"host-{name}", 8.0, gpus) for name in names]


def fill(roles: list[Role], on: list[Machine]) -> list[tuple[str, Role]]:
    assigned: list[Assigned] = []
    for role in roles:
        machine = assign_machine(role, on, assigned)
        assert machine is not None
        assigned.append(Assigned(machine, role))
    return [(p.machine_id, p.role) for p in assigned]


def test_one_machine_takes_everything() -> None:
    assert fill([P, D, D], machines("a")) == [("a", P), ("a", D), ("a", D)]


def test_two_machines_are_split_by_role() -> None:
    assert fill([P, D], machines("a", "b")) == [("a", P), ("b", D)]
    assert fill([P, D, P, D], machines("a", "b")) == [("a", P), ("b", D), ("a", P), ("b", D)]


def test_workers_of_one_role_spread_out() -> None:
    assert fill([D, D, D], machines("a", "b", "c")) == [("a", D), ("b", D), ("c", D)]


def test_a_bigger_machine_takes_more() -> None:
    on = [Machine("big", "h1", 16.0), Machine("small", "h2", 4.0)]
    names = [name for name, _ in fill([D] * 5, on)]
    assert names.count("big") == 4


def test_where_there_are_gpus_each_takes_one_worker_and_no_more() -> None:
    on = [*machines("a", "b", gpus=1.0), *machines("cpu-only")]
    assert sorted(fill([P, D], on)) == [("a", P), ("b", D)]
    assert assign_machine(D, on, [Assigned("a", P), Assigned("b", D)]) is None


def test_without_a_machine_there_is_no_place() -> None:
    assert assign_machine(P, [], []) is None


def test_the_machine_that_failed_is_the_last_choice() -> None:
    on = machines("a", "b")
    assert assign_machine(P, on, [Assigned("b", D)], avoid="a") == "b"
    assert assign_machine(P, machines("a"), [], avoid="a") == "a"
