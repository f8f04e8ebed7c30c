"""What operators ask of the controller, through a router's process: the view, and audits."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from cluster.control.auditor import Auditor
from cluster.control.audits import AuditDesk, SharedAudit, audit_dict
from cluster.control.process_messages import (
    AuditAnswer,
    AuditQuestion,
    ClusterView,
    LoadRequest,
    RouterLoad,
    RouterReport,
)
from cluster.control.router_processes import RouterState
from cluster.control.view import Life, cluster_view
from cluster.control.wanted import WorkerState
from cluster.runtime.host import NodeHost
from cluster.serve.orders import ControlSpec
from cluster.wire.wire import Wire
from engine.node import NodeId

if TYPE_CHECKING:
    from cluster.control.controller import Controller

log = logging.getLogger("kvrelay.control")

AUDITOR: NodeId = "auditor"
PUSH_AFTER_S = 0.02  # changes that come together are told together
LOAD_TIMEOUT_S = 2.0  # for routers to say what they serve


class Control(Protocol):
    """The controller's process, as the desk sees it."""

    spec: ControlSpec
    host: NodeHost
    wire: Wire
    controller: Controller
    restarted: Counter[str]

    @property
    def has_ray(self) -> bool: ...
    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None: ...


class OperatorsDesk:
    """Owned by the controller's process; lives on its loop."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._audits = AuditDesk(control.host, Auditor(AUDITOR))
        self._shared_audit = SharedAudit(self.audit)
        self._loads: dict[Life, RouterLoad] = {}
        self._asked: dict[NodeId, asyncio.Future[RouterLoad]] = {}
        self._is_pushing = False

    def receive(self, message: RouterReport | AuditQuestion) -> None:
        match message:
            case RouterReport(router, epoch, load):
                self._loads[router, epoch] = load
                asked = self._asked.pop(router, None)
                if asked is not None and not asked.done():
                    asked.set_result(load)
                view = ClusterView(msgspec.msgpack.encode(self.view()))
                self._control.wire.send(router, view)
            case AuditQuestion(router, number):
                self._control.spawn(self._answer_audit(router, number))

    def push_soon(self) -> None:
        """Something has changed that operators look at: routers need not wait until they report."""
        if not self._is_pushing:
            self._is_pushing = True
            self._control.host.loop.call_later(PUSH_AFTER_S, self._push)

    def _push(self) -> None:
        self._is_pushing = False
        view = ClusterView(msgspec.msgpack.encode(self.view()))
        for router in self._control.controller.router_processes.peers:
            self._control.wire.send(router.node, view)

    def view(self) -> dict[str, Any]:
        """See `cluster.control.view`."""
        control, spec = self._control, self._control.spec
        routers = control.controller.router_processes.routers.values()
        lives = {(router.node, router.epoch) for router in routers}
        self._loads = {life: load for life, load in self._loads.items() if life in lives}
        host, scheme = spec.config.api.host, spec.config.tls.scheme
        view = cluster_view(control.controller, self._loads, host, scheme)
        me = {"epoch": spec.epoch, "pid": os.getpid(), "has_ray": control.has_ray}
        return view | {"restarted_tasks": dict(control.restarted), "controller": me}

    async def _answer_audit(self, router: NodeId, number: int) -> None:
        data = b""
        try:
            data = msgspec.msgpack.encode(await self._shared_audit.ask())
        except TimeoutError:
            log.warning("an audit had no answer")
        self._control.wire.send(router, AuditAnswer(number, data))

    async def audit(self) -> dict[str, Any]:
        """Where the workers' blocks are, and what is leaked; see `cluster.control.audits`."""
        workers = self._control.controller.workers.values()
        report = await self._audits.ask([w.node for w in workers if w.state is WorkerState.UP])
        loads = await self._ask_routers()
        num_live = sum(1 if load is None else load.num_live for load in loads)
        left = [line for load in loads if load is not None for line in load.left]
        return audit_dict(report, num_live, left)

    async def _ask_routers(self) -> list[RouterLoad | None]:
        """What each that is up serves now; None: it does not say."""
        routers = self._control.controller.router_processes.routers.values()
        up = [router.node for router in routers if router.state is RouterState.UP]
        loop = asyncio.get_running_loop()
        asked: dict[NodeId, asyncio.Future[RouterLoad]] = {r: loop.create_future() for r in up}
        self._asked = dict(asked)
        for router in up:
            self._control.wire.send(router, LoadRequest())
        if asked:
            await asyncio.wait(asked.values(), timeout=LOAD_TIMEOUT_S)
        return [future.result() if future.done() else None for future in asked.values()]
