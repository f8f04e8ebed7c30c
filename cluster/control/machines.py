"""Machines that are to end: their workers go elsewhere first.

A pod that Kubernetes takes away, a machine that a cloud wants back, `kvrelay leave`: Ray calls the
machine draining. Where others serve a model, its workers there drain to them and come back where
there is room, on machines that stay. Where there are no others, one begins elsewhere first; and
where nothing has room, they serve on for as long as the machine does.
"""

from __future__ import annotations

from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.workers import DesiredWorker, WorkerSet
from kvrelay.engine.node import Effect

# It comes to another machine, or makes room for one that does.
_ON_ITS_WAY = {*ProcessState} - {ProcessState.UP, ProcessState.DOWN, ProcessState.GONE}


def leave_machines(now: float, workers: WorkerSet) -> list[Effect]:
    """Returns the next steps; none while those before are under way."""
    ending = {machine.machine_id for machine in workers.machines if machine.is_draining}
    effects: list[Effect] = []
    if not ending:
        return effects
    alike: dict[str, list[DesiredWorker]] = {}
    for worker in workers.by_name.values():
        alike.setdefault(worker.model, []).append(worker)
    for own in alike.values():
        up = [worker for worker in own if worker.state is ProcessState.UP]
        leaving = [worker for worker in up if not ending.isdisjoint(worker.machines)]
        is_served = len(leaving) < len(up)  # elsewhere
        if not leaving or (not is_served and any(w.state in _ON_ITS_WAY for w in own)):
            continue
        if is_served:
            effects += [each for w in leaving for each in workers.drain(now, w, comes_back=True)]
        elif workers.place(leaving[0]) is None:
            continue
        elif len(leaving) > 1:
            effects += workers.drain(now, leaving[0], comes_back=True)
        else:  # streams wait for it
            effects += workers.lost(now, leaving[0], "its machine is to end")
    return effects
