"""Which machine a worker runs on. Pure: the controller asks, the runtime carries it out.

Prefill and decode disturb each other least on machines of their own, so a worker goes where the
fewest of the other role are, then where the least runs for the size of the machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.cluster.control.messages import Machine as Machine
from kvrelay.engine.stats import Role


@dataclass(frozen=True, slots=True)
class Assigned:
    """A worker that is starting or up, and where."""

    machine_id: str
    role: Role
    num_ranks: int = 1  # its processes, each with a GPU where they are used


def assign_machines(
    role: Role,
    machines: Iterable[Machine],
    assigned: Iterable[Assigned],
    avoid: str | None = None,
    most: int = 0,
    num_ranks: int = 1,
    use_gpus: bool = True,
    num_machines: int = 1,
) -> tuple[str, ...] | None:
    """The machines for one more worker of `role` and `num_ranks` processes, divided evenly among
    `num_machines`: that of the first rank first; None if too few have room.

    Where any machine has GPUs, only those count, one for each rank; where none has, or they are not
    used, each has room for `most` workers, if that is not 0. `avoid` is where the last attempt
    failed: it is taken only if there is no other.
    """
    machines, assigned = list(machines), list(assigned)
    if use_gpus and any(machine.num_gpus for machine in machines):
        each = num_ranks // num_machines
        machines = [m for m in machines if _ranks_on(m, assigned) + each <= int(m.num_gpus)]
    elif most:
        machines = [m for m in machines if len(_on(m, assigned)) < most]
    if len(machines) < num_machines:
        return None

    def cost(machine: Machine) -> tuple[bool, int, float, str]:
        others = sum(each.role != role for each in _on(machine, assigned))
        load = _ranks_on(machine, assigned) / max(machine.num_gpus or machine.num_cpus, 1.0)
        return machine.machine_id == avoid, others, load, machine.machine_id

    return tuple(machine.machine_id for machine in sorted(machines, key=cost)[:num_machines])


def _on(machine: Machine, assigned: list[Assigned]) -> list[Assigned]:
    return [each for each in assigned if each.machine_id == machine.machine_id]


def _ranks_on(machine: Machine, assigned: list[Assigned]) -> int:
    return sum(each.num_ranks for each in _on(machine, assigned))


def resources_of(text: str, machines: Iterable[Machine]) -> dict[str, float]:
    """What Ray knows of a machine such as `text` says ("GPU=8"), or as the largest that there is;
    empty if there is none."""
    if text:
        return {name: float(n) for name, n in (part.split("=") for part in text.split(","))}
    largest = max(machines, key=lambda machine: (machine.num_gpus, machine.num_cpus), default=None)
    if largest is None:
        return {}
    return {"GPU": largest.num_gpus} if largest.num_gpus else {"CPU": largest.num_cpus}
