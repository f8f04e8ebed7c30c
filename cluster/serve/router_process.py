"""A further router as a process of its own: its node, its API, its store and its wire on one loop.

Life: its port is taken -> listening -> serving (what comes waits until workers are up) -> stopped,
or dead with its node or its API. The controller tells it of workers; it starts none itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from cluster.api.metrics import status_dict
from cluster.api.tenants import Access, Tenants
from cluster.config import Config
from cluster.control.messages import CONTROLLER, Peer, RouterStarted
from cluster.control.router_processes import RouterLoad, RouterState, router_entry
from cluster.runtime.host import LoopThread, NodeHost
from cluster.serve.router_api import SHUTDOWN_S, ServedModel, load_of, serve_api
from cluster.state.opening import open_state
from cluster.wire.wire import Wire
from cluster.worker.process import Listening, introduce
from engine.node import NodeId
from router.router import Router

START_TIMEOUT_S = 120.0


class RouterProcessError(Exception):
    """It cannot serve here; one line for the user."""


@dataclass(frozen=True, slots=True)
class RouterProcessSpec:
    """Everything that a process needs to become a further router."""

    cluster: str  # this life of the cluster
    router: NodeId
    epoch: int
    routers: tuple[NodeId, ...]  # all of the cluster
    http_port: int  # 0: any that is free
    config: Config
    model: ServedModel
    access: Access

    @property
    def node(self) -> NodeId:
        return self.router


class RouterProcess:
    """Owns everything of one router. Its methods may be called from any thread, `start` first."""

    def __init__(self, spec: RouterProcessSpec, listening: Listening) -> None:
        self.config = spec.config
        self.served_model = spec.model
        self._spec = spec
        self._listening = listening
        self._thread = LoopThread(spec.router)
        self.host = NodeHost(self._thread.loop, self._send, self._on_node_failed)
        self._opened = open_state(
            spec.config, spec.model.served_name, spec.cluster, spec.router, spec.routers
        )
        self.router = Router(
            spec.router,
            spec.config.router,
            self._opened.sessions,
            self._opened.records,
            state=self._opened.state,
            clock=perf_counter,
            controller=CONTROLLER,
        )
        self._http_port = 0
        self._wire: Wire | None = None
        self._serving: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._ended = threading.Event()
        self._failure: BaseException | None = None

    def start(self) -> RouterStarted:
        """Take the port, listen, and begin to serve. Raises RouterProcessError."""
        return self._thread.submit(self._start()).result(START_TIMEOUT_S)

    async def _start(self) -> RouterStarted:
        spec, listening = self._spec, self._listening
        sock = bind(spec.config.api.host, spec.http_port)
        self._http_port = sock.getsockname()[1]
        self._wire = listening.wire(spec.router, spec.epoch, self.host.deliver)
        host, port = await self._wire.listen(listening.host)
        self.host.add(self.router, self._opened.executor)
        self._opened.start(self.host.inbox(spec.router))
        self._serving = self._thread.loop.create_task(self._serve(sock))
        self._serving.add_done_callback(self._on_served)
        peer = Peer(spec.router, host, port, spec.epoch)
        return RouterStarted(peer, self._http_port, os.getpid())

    async def _serve(self, sock: socket.socket) -> None:
        """The API. Its libraries take a while; the router gets to know its workers meanwhile, and
        clients wait in the socket's queue."""
        try:
            tokenizer = await asyncio.to_thread(_load_tokenizer, self._spec.model.path)
            await serve_api(self, tokenizer, self._spec.access, sock, self._stop, lambda _: None)
        finally:
            sock.close()

    def introduce(self, peers: Iterable[Peer]) -> None:
        """From now on messages to `peers` go to these addresses."""
        assert self._wire is not None
        introduce(self._thread, self._wire, peers)

    def use_tenants(self, tenants: Tenants) -> None:
        """From now on."""
        self._thread.call(lambda: self._spec.access.tenants.update(tenants))

    def load(self) -> RouterLoad:
        """As it is now."""
        return self._thread.call(self._load)

    def wait(self) -> None:
        """Blocks while it serves; returns when it was stopped. Raises what its node, or its API,
        did."""
        self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Finish what can be finished in time, and close everything."""
        self._thread.submit(self._close()).result(SHUTDOWN_S + 30.0)
        self._thread.close()
        self._ended.set()

    def healthy(self) -> tuple[bool, dict[str, Any]]:
        """Whether requests can be served: at least one decode worker is up."""
        workers = self.router.status(self._thread.loop.time()).workers
        up = [worker for worker in workers if worker.state != "down"]
        detail = {"workers_up": len(up), "workers": len(workers)}
        return bool(up), detail

    def status(self) -> dict[str, Any]:
        """What this router knows."""
        status = status_dict(
            self.router.status(self._thread.loop.time()), self.served_model.served_name
        )
        assert self._wire is not None
        status["wire"] = dict(self._wire.counters)
        status["sessions"] = self.router.sessions.counts()
        status["state"] = self._opened.status()
        spec = self._spec
        host, port, scheme = spec.config.api.host, self._http_port, spec.config.tls.scheme
        up, load = RouterState.UP, self._load()
        status["routers"] = [router_entry(spec.router, spec.epoch, up, host, port, load, scheme)]
        return status

    def _load(self) -> RouterLoad:
        return load_of(self.router, self._thread.loop.time(), self._opened.status())

    async def _close(self) -> None:
        self._stop.set()
        if self._serving is not None:
            with contextlib.suppress(Exception):
                await self._serving
        if self._wire is not None:
            await self._wire.close()
        await asyncio.to_thread(self.host.close)

    def _send(self, to: NodeId, message: Any) -> None:
        assert self._wire is not None
        self._wire.send(to, message)

    def _on_served(self, serving: asyncio.Task[None]) -> None:
        if not self._stop.is_set():
            error = None if serving.cancelled() else serving.exception()
            self._fail(error or RuntimeError("its API has ended"))

    def _on_node_failed(self, _node: NodeId, error: BaseException) -> None:
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._ended.set()


def _load_tokenizer(path: Path) -> Any:
    import cluster.api.app  # noqa: F401  (slow)
    from cluster.api.text.tokenizer import Tokenizer

    return Tokenizer(path)


def bind(host: str, port: int) -> socket.socket:
    """Raises RouterProcessError."""
    from cluster.api.server import PortTaken, bind_socket

    try:
        return bind_socket(host, port)
    except PortTaken as error:
        raise RouterProcessError(str(error)) from error
    except OSError as error:
        raise RouterProcessError(f"cannot listen at {host}:{port}: {error.strerror}") from error
