"""The controller's part of the cluster's status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvrelay.cluster.control.lifecycle import Incarnation, ProcessState
from kvrelay.cluster.control.process_messages import RouterLoad
from kvrelay.cluster.control.routers import api_url
from kvrelay.cluster.status import ClusterView, ControllerStatus, RouterProcessStatus
from kvrelay.engine.node import NodeId
from kvrelay.router.status import WorkerStatus

if TYPE_CHECKING:
    from kvrelay.cluster.control.controller import Controller
    from kvrelay.cluster.control.workers import DesiredWorker


def cluster_view(
    controller: Controller,
    me: ControllerStatus,
    loads: Mapping[Incarnation, RouterLoad],
    host: str,
    scheme: str,
) -> ClusterView:
    """`me`: its process; `loads`: what routers said last; `host`, `scheme`: of their APIs."""
    routers = []
    for router in controller.routers.values():
        is_up = router.is_serving
        load = loads.get((router.node, router.epoch)) if is_up else None
        port = router.http_port
        is_others = router.peer is not None and router.node not in controller.config.routers
        at = router.peer.host if router.peer is not None and is_others else host
        status = router_status(router.node, router.epoch, router.state, at, port, load, scheme)
        status.pid, status.restarts = router.pid, max(0, router.epoch - 1)
        status.last_error = router.last_error
        status.version = router.peer.package if router.peer else None
        routers.append(status)
    scaling = {model: each.view() for model, each in controller.scaling.items()}
    return ClusterView(
        controller=me,
        workers=[_worker(worker) for worker in controller.workers.values()],
        routers=routers,
        scaling=next(iter(scaling.values()), None),
        weights=[each.view() for each in controller.rollouts.values() if each.is_shown],
        scaling_by_model={model: each for model, each in scaling.items() if model},
    )


def router_status(
    router: NodeId,
    epoch: int,
    state: ProcessState,
    host: str,
    http_port: int,
    load: RouterLoad | None,
    scheme: str = "http",
) -> RouterProcessStatus:
    """`host`, `http_port`: of its API; `load`: None if it does not say."""
    return RouterProcessStatus(
        router=router,
        epoch=epoch,
        state=str(state),
        http_port=http_port,
        url=api_url(host, http_port, scheme),
        num_live=None if load is None else load.num_live,
        num_queued=None if load is None else load.num_queued,
        store_up=None if load is None else load.store_up,
    )


def _worker(worker: DesiredWorker) -> WorkerStatus:
    return WorkerStatus(
        worker=worker.node,
        role=worker.role,
        state="draining" if worker.is_draining else str(worker.state),
        epoch=worker.epoch,
        pid=worker.pid,
        machine=worker.machine_id or "",
        further_machines=tuple(worker.further),
        tensor_parallel_size=worker.num_ranks,
        restarts=worker.restarts,
        hangs=worker.hangs,
        last_error=worker.last_error,
        version=worker.peer.package if worker.peer else None,
        model=worker.model or None,
        start_s=worker.started.took_s or None if worker.started else None,
    )
