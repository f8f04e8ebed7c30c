"""What operators see of the cluster: the controller's part of `/status`, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvrelay.cluster.control.lifecycle import Incarnation, ProcessState
from kvrelay.cluster.control.process_messages import RouterLoad
from kvrelay.cluster.control.routers import status_of

if TYPE_CHECKING:
    from kvrelay.cluster.control.controller import Controller
    from kvrelay.cluster.control.workers import DesiredWorker

_OF_CONTROLLER = (
    *("epoch", "pid", "machine", "further_machines", "tensor_parallel_size"),
    *("restarts", "hangs", "last_error"),
)
"""What of a worker only the controller knows."""


def cluster_view(
    controller: Controller, loads: Mapping[Incarnation, RouterLoad], host: str, scheme: str
) -> dict[str, Any]:
    """`loads`: what routers have said lately; `host`, `scheme`: of their APIs."""
    routers = controller.routers.values()
    entries = []
    for router in routers:
        is_up = router.is_serving
        load = loads.get((router.node, router.epoch)) if is_up else None
        entries.append(status_of(router, host, load, scheme))
    return {
        "workers": [_worker_entry(worker) for worker in controller.workers.values()],
        "routers": entries,
        "all_up": controller.all_up(),
        "scaling": None if controller.scaling is None else controller.scaling.view(),
    }


def _worker_entry(worker: DesiredWorker) -> dict[str, Any]:
    return {
        "worker": worker.node,
        "role": str(worker.role),
        "state": "draining" if worker.is_draining else str(worker.state),
        "epoch": worker.epoch,
        "pid": worker.pid,
        "machine": worker.machine_id or "",
        "further_machines": list(worker.further),
        "tensor_parallel_size": worker.num_ranks,
        "restarts": worker.restarts,
        "hangs": worker.hangs,
        "last_error": worker.last_error,
    }


def merged_status(
    own: dict[str, Any], view: Mapping[str, Any] | None, age_s: float
) -> dict[str, Any]:
    """A router's own `/status` (of which `routers` has its own entry only) and, where a controller
    has said something, what that knows. `age_s`: of what it said."""
    own["controller"] = {"known": view is not None}
    if view is None:
        return own
    own["controller"] |= view["controller"] | {"age_s": round(age_s, 3)}
    known = {worker["worker"]: worker for worker in own["workers"]}
    for told in view["workers"]:
        entry = known.get(told["worker"])
        if entry is None:
            entry = {"worker": told["worker"], "role": told["role"]}
            own["workers"].append(entry)
        state = told["state"]
        if entry.get("state") != "backoff" or state != ProcessState.UP:
            entry["state"] = state
        entry |= {key: told[key] for key in _OF_CONTROLLER}
    wanted = {told["worker"] for told in view["workers"]}  # others have gone, and are not missed
    own["workers"] = [
        each for each in own["workers"] if each["worker"] in wanted or each["state"] != "down"
    ]
    mine = {router["router"]: router for router in own["routers"]}
    own["routers"] = [told | mine.get(told["router"], {}) for told in view["routers"]]
    own["scaling"] = view.get("scaling")
    own["restarted_tasks"] = own.get("restarted_tasks", {}) | view.get("restarted_tasks", {})
    return own
