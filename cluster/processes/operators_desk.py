"""What operators ask of the controller, through a router's process: the view, and audits."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kvrelay.cluster.control.audits import SharedAudit, audit_dict
from kvrelay.cluster.control.lifecycle import Incarnation
from kvrelay.cluster.control.process_messages import (
    AuditAnswer,
    AuditQuestion,
    ClusterView,
    RouterLoad,
    RouterReport,
)
from kvrelay.cluster.control.view import cluster_view
from kvrelay.cluster.processes.orders import ControlSpec
from kvrelay.engine.host import NodeHost
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Audit, AuditRequest
from kvrelay.engine.wire.wire import Wire
from kvrelay.worker.messages import CONTROLLER

if TYPE_CHECKING:
    from kvrelay.cluster.control.controller import Controller

PUSH_AFTER_S = 0.02  # changes that come together are told together
ANSWER_TIMEOUT_S = 5.0
"""Workers and routers answer an audit between two messages; one that does not by then hangs."""


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
        self._shared_audit = SharedAudit(self.audit)
        self._loads: dict[Incarnation, RouterLoad] = {}
        self._asked: dict[NodeId, asyncio.Future[Audit]] = {}  # by the audit that runs
        self._is_pushing = False

    def receive(self, message: RouterReport | AuditQuestion | Audit) -> None:
        match message:
            case Audit(node):
                asked = self._asked.get(node)
                if asked is not None and not asked.done():
                    asked.set_result(message)
            case RouterReport(router, epoch, load):
                self._loads[router, epoch] = load
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
        for router in self._control.controller.router_set.peers:
            self._control.wire.send(router.node, view)

    def view(self) -> dict[str, Any]:
        """See `cluster.control.view`."""
        control, spec = self._control, self._control.spec
        routers = control.controller.routers.values()
        lives = {(router.node, router.epoch) for router in routers}
        self._loads = {life: load for life, load in self._loads.items() if life in lives}
        host, scheme = spec.config.api.host, spec.config.tls.scheme
        view = cluster_view(control.controller, self._loads, host, scheme)
        me = {"epoch": spec.epoch, "pid": os.getpid(), "has_ray": control.has_ray}
        return view | {"restarted_tasks": dict(control.restarted), "controller": me}

    async def _answer_audit(self, router: NodeId, number: int) -> None:
        data = msgspec.msgpack.encode(await self._shared_audit.ask())
        self._control.wire.send(router, AuditAnswer(number, data))

    async def audit(self) -> dict[str, Any]:
        """Where the workers' blocks are, and what is leaked; see `cluster.control.audits`."""
        controller = self._control.controller
        up_workers = [w.node for w in controller.workers.values() if w.is_serving]
        routers = controller.routers.values()
        up_routers = [router.node for router in routers if router.is_serving]
        found = await self._ask([*up_workers, *up_routers])
        num_live, left = 0, list[str]()
        for router in up_routers:
            audit = found[router]
            num_live += 1 if audit is None else audit.counts["live"]  # it may serve one
            left += () if audit is None else audit.left
        return audit_dict({worker: found[worker] for worker in up_workers}, num_live, left)

    async def _ask(self, nodes: list[NodeId]) -> dict[NodeId, Audit | None]:
        """What each of `nodes` holds; None: it did not answer in time."""
        loop = asyncio.get_running_loop()
        asked: dict[NodeId, asyncio.Future[Audit]] = {node: loop.create_future() for node in nodes}
        self._asked = asked
        for node in nodes:
            self._control.wire.send(node, AuditRequest(CONTROLLER))
        if asked:
            await asyncio.wait(asked.values(), timeout=ANSWER_TIMEOUT_S)
        return {node: each.result() if each.done() else None for node, each in asked.items()}
