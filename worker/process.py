"""A worker as a process of its own: its node, its executors and its wire on one event loop.

Life: built (the model is loaded, the agent has registered the pool) -> listening -> introduced to
its peers -> serving, until a controller ends it, its node fails, or no controller has been there
for `orphan_s`. It outlives the controller that had it started: the next one adopts it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import psutil

from kvrelay.engine.host import Deliver, Executor, LoopThread, NodeExit, NodeHost
from kvrelay.engine.node import Node, NodeId
from kvrelay.engine.stats import InfoChange, WorkerInfo
from kvrelay.engine.wire.channel import own_version
from kvrelay.engine.wire.codec import PROTOCOL
from kvrelay.engine.wire.context import OnPeerLost, TlsError, TlsIdentity, WireLimits
from kvrelay.engine.wire.wire import OnMessage, Wire
from kvrelay.worker.messages import (
    CONTROLLER,
    Adopt,
    End,
    Peer,
    PeersUpdated,
    UpdatePeers,
    WorkerStarted,
)

log = logging.getLogger("kvrelay.worker")

WATCH_S = 1.0  # between two looks whether the controller is there


def update_peers(wire: Wire, peers: Iterable[Peer]) -> None:
    """From now on messages of `wire` to `peers` go to these addresses."""
    for peer in peers:
        about = peer.protocol, peer.package
        wire.set_address(peer.node, peer.host, peer.port, peer.epoch, *about)


@dataclass(frozen=True, slots=True)
class BuiltWorker:
    """A worker that could run: what a build gives to whoever hosts it."""

    node: Node
    info: WorkerInfo
    make_executor: Callable[[Deliver], Executor]  # its answers go to the given function
    notices: tuple[str, ...] = ()  # what an operator should know of it, one line each
    # Told a function to call, once and from any thread, when the worker cannot go on because of
    # something that is not its node. None: there is nothing such.
    when_lost: Callable[[Callable[[Exception], None]], None] | None = None
    leave_kv: Callable[[], None] = lambda: None  # what is in host memory, to the next worker


@dataclass(frozen=True, slots=True)
class Listening:
    """What a process has to know to talk to its peers."""

    host: str  # where it listens
    token: bytes
    max_frame_bytes: int
    reconnect_s: float = 10.0
    orphan_s: float = 120.0  # so long a worker lives without a controller
    tls: TlsIdentity | None = None  # None: in clear text

    def wire(
        self,
        node: NodeId,
        epoch: int,
        on_message: OnMessage,
        on_peer_lost: OnPeerLost = lambda _peer, _epoch: None,
    ) -> Wire:
        """Makes that of a process that is called `node`; it does not listen yet."""
        limits = WireLimits(max_frame_bytes=self.max_frame_bytes, give_up_s=self.reconnect_s)
        return Wire(node, self.token, on_message, on_peer_lost, limits, epoch, self.tls)


class WorkerProcess:
    """Owns everything of one worker. Its methods may be called from any thread, `start` first."""

    def __init__(
        self, built: BuiltWorker, listening: Listening, device: str = "", log: str = ""
    ) -> None:
        """`device`, `log`: as in WorkerStarted."""
        self._built = built
        self._listening = listening
        self._device, self._log = device, log
        self._thread = LoopThread(built.node.node_id)
        self._host = NodeHost(self._thread.loop, self._send, self._on_failure)
        self._wire: Wire | None = None
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._started: WorkerStarted | None = None
        self._alone_s = 0.0
        self.is_alone = False  # it ends because nobody will ever use it again

    def start(self) -> WorkerStarted:
        """Listen, and host the node. Raises OSError."""
        return self._thread.submit(self._start()).result(30.0)

    async def _start(self) -> WorkerStarted:
        listening, built = self._listening, self._built
        node = built.node
        self._wire = listening.wire(node.node_id, built.info.epoch, self._deliver)
        host, port = await self._wire.listen(listening.host)
        self._host.add(node, built.make_executor(self._host.inbox(node.node_id)))
        if built.when_lost is not None:
            built.when_lost(lambda error: self._on_failure(node.node_id, error))
        self._thread.loop.call_later(WATCH_S, self._watch_controller)
        took_s = time.time() - psutil.Process().create_time()
        self._started = WorkerStarted(
            *(built.info, host, port, os.getpid(), built.notices),
            protocol=PROTOCOL,
            package=own_version(),
            device=self._device,
            took_s=took_s,
            log=self._log,
        )
        return self._started

    def wait(self) -> None:
        """Blocks while the worker serves; returns when it was ended. Raises what its node did."""
        self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Close the wire and the executors. Waits for them, for a bounded time."""
        self._thread.submit(self._close()).result(30.0)
        self._thread.close()

    async def _close(self) -> None:
        if self._wire is not None:
            await self._wire.close()
        await asyncio.to_thread(self._host.close)

    def _deliver(self, to: NodeId, message: Any) -> None:
        """What is for the process is not for its node."""
        assert self._wire is not None
        assert self._started is not None
        match message:
            case UpdatePeers(about, epoch, peers, tls):
                update_peers(self._wire, peers)
                if tls is not None:
                    self._show(tls)
                self._wire.send(CONTROLLER, PeersUpdated(to, about, epoch))
            case Adopt(controller):
                update_peers(self._wire, [controller])
                self._wire.send(CONTROLLER, self._started)
            case End(epoch, has_heir):
                if epoch >= self._built.info.epoch:
                    if has_heir:
                        self._built.leave_kv()
                    self._ended.set()
            case _:
                self._host.deliver(to, message)

    def _show(self, tls: TlsIdentity) -> None:
        assert self._wire is not None
        try:
            self._wire.replace_identity(tls)
        except TlsError as error:  # it was checked on the controller's machine
            log.error("the certificate stays as it is: %s", error)

    def _watch_controller(self) -> None:
        assert self._wire is not None
        self._alone_s = 0.0 if self._wire.hears(CONTROLLER) else self._alone_s + WATCH_S
        if self._alone_s > self._listening.orphan_s:
            self.is_alone = True
            why = f"no controller for {self._listening.orphan_s:g} s"
            self._on_failure(self._built.node.node_id, NodeExit(why))
        self._thread.loop.call_later(WATCH_S, self._watch_controller)

    def _send(self, to: NodeId, message: Any) -> str | None:
        assert self._wire is not None
        if isinstance(message, InfoChange) and self._started is not None:
            # The next controller hears of it.
            self._started = replace(self._started, info=message.changed(self._started.info))
        return self._wire.send(to, message)

    def _on_failure(self, _node: NodeId, error: BaseException) -> None:
        self._failure = error
        self._ended.set()
