"""Which machine a worker runs on. Pure: the controller asks, the runtime carries it out.

Prefill and decode disturb each other least on machines of their own, so a worker goes where the
fewest of the other role are, then where the least runs for the size of the machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.stats import Role


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the cluster that is alive. `machine_id` is the runtime's name for it."""

    machine_id: str
    host: str  # where its workers listen
    num_cpus: float
    num_gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Assigned:
    """A worker that is starting or up, and where."""

    machine_id: str
    role: Role


def assign_machine(
    role: Role,
    machines: Iterable[Machine],
    assigned: Iterable[Assigned],
    avoid: str | None = None,
    most: int = 0,
    gpus_each: int = 1,
) -> str | None:
    """The machine for one more worker of `role`; None if none has room.

    Where any machine has GPUs, only those count, `gpus_each` for a worker; where none has, or they
    are not used (0), each has room for `most`, if that is not 0. `avoid` is where the last attempt
    failed: it is taken only if there is no other.
    """
    machines, assigned = list(machines), list(assigned)
    if gpus_each and any(machine.num_gpus for machine in machines):
        machines = [m for m in machines if _num_on(m, assigned) < int(m.num_gpus) // gpus_each]
    elif most:
        machines = [m for m in machines if _num_on(m, assigned) < most]
    if not machines:
        return None

    def cost(machine: Machine) -> tuple[bool, int, float, str]:
        others = sum(p.machine_id == machine.machine_id and p.role != role for p in assigned)
        load = _num_on(machine, assigned) / max(machine.num_gpus or machine.num_cpus, 1.0)
        return machine.machine_id == avoid, others, load, machine.machine_id

    return min(machines, key=cost).machine_id


def _num_on(machine: Machine, assigned: list[Assigned]) -> int:
    return sum(p.machine_id == machine.machine_id for p in assigned)


def resources_of(text: str, machines: Iterable[Machine]) -> dict[str, float]:
    """What Ray knows of a machine such as `text` says ("GPU=8"), or as the largest that there is;
    empty if there is none."""
    if text:
        return {name: float(n) for name, n in (part.split("=") for part in text.split(","))}
    largest = max(machines, key=lambda machine: (machine.num_gpus, machine.num_cpus), default=None)
    if largest is None:
        return {}
    return {"GPU": largest.num_gpus} if largest.num_gpus else {"CPU": largest.num_cpus}
