"""What runs in the processes that the Ray runtime starts. Nothing here knows Ray.

An actor's constructor does nothing, so that it is up at once and its death is noticed from then on.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from cluster.api.tenants import Tenants
from cluster.control.messages import Peer, RouterFailed, RouterStarted, StartFailed, WorkerStarted
from cluster.control.router_processes import RouterLoad
from cluster.serve.router_process import RouterProcess, RouterProcessError, RouterProcessSpec
from cluster.worker.process import Listening, WorkerProcess
from engine.node import NodeId

if TYPE_CHECKING:
    from cluster.worker.build import WorkerSpec

TELL_S = 0.5  # for the news of why a process ends to leave it


class _Actor:
    """A node in a process of its own."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._process: Any = None  # the node's, once it has started

    def __repr__(self) -> str:  # also what `ps` shows
        return f"kvrelay {self._node}"

    def introduce(self, peers: tuple[Peer, ...]) -> None:
        assert self._process is not None
        self._process.introduce(peers)

    def wait(self) -> None:
        """Returns never: the call fails when the process dies, and the process dies when its node
        has failed, since the state of a node that raised is not to be trusted. Before that the call
        raises why."""
        assert self._process is not None
        try:
            self._process.wait()
        except BaseException:
            logging.shutdown()
            ending = threading.Timer(TELL_S, os._exit, (1,))
            ending.daemon = True
            ending.start()
            raise

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


class WorkerActor(_Actor):
    def start(self, spec: WorkerSpec, listening: Listening) -> WorkerStarted | StartFailed:
        """Build the worker and serve. What would fail again is told as permanent."""
        from cluster.worker.build import build_worker
        from cluster.worker.kv_plan import BuildError  # not what a router has to wait for

        os.environ.setdefault("OMP_NUM_THREADS", str(spec.threads))
        try:
            built = build_worker(spec)
            self._process = WorkerProcess(built, listening)
            host, port = self._process.start()
        except BuildError as error:
            return StartFailed(spec.worker, spec.epoch, str(error), permanent=True)
        return WorkerStarted(built.info, host, port, os.getpid(), built.notices)


class RouterActor(_Actor):
    def start(self, spec: RouterProcessSpec, listening: Listening) -> RouterStarted | RouterFailed:
        try:
            self._process = process = RouterProcess(spec, listening)
            return process.start()
        except RouterProcessError as error:
            return RouterFailed(spec.router, spec.epoch, str(error), permanent=True)

    def use_tenants(self, tenants: Tenants) -> None:
        if self._process is not None:
            self._process.use_tenants(tenants)

    def load(self) -> RouterLoad:
        if self._process is None:
            return RouterLoad(0, 0, None)
        load: RouterLoad = self._process.load()
        return load
