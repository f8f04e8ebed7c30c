"""A worker as a process of its own: its node, its executors and its wire on one event loop.

Life: built (the model is loaded, the agent has registered the pool) -> listening -> introduced to
its peers -> serving, until it is stopped or its node fails. Knows nothing of who started it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cluster.control.messages import Peer
from cluster.runtime.host import Deliver, Executor, LoopThread, NodeHost
from cluster.wire.context import OnPeerLost, WireLimits
from cluster.wire.tls import TlsIdentity
from cluster.wire.wire import OnMessage, Wire
from engine.node import Node, NodeId
from engine.stats import WorkerInfo


def introduce(thread: LoopThread, wire: Wire, peers: Iterable[Peer]) -> None:
    """From now on messages of `wire`, which runs on `thread`, to `peers` go to these addresses."""
    peers = list(peers)

    def tell() -> None:
        for peer in peers:
            wire.set_address(peer.node, peer.host, peer.port, peer.epoch)

    thread.call(tell)


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


@dataclass(frozen=True, slots=True)
class Listening:
    """What a process has to know to talk to its peers."""

    host: str  # where it listens
    token: bytes
    max_frame_bytes: int
    reconnect_s: float = 10.0
    tls: TlsIdentity | None = None  # None: in clear text

    def wire(
        self,
        node: NodeId,
        epoch: int,
        on_message: OnMessage,
        on_peer_lost: OnPeerLost = lambda _peer, _epoch: None,
    ) -> Wire:
        """Of a process that is called `node`; it does not listen yet."""
        limits = WireLimits(max_frame_bytes=self.max_frame_bytes, give_up_s=self.reconnect_s)
        return Wire(node, self.token, on_message, on_peer_lost, limits, epoch, self.tls)


class WorkerProcess:
    """Owns everything of one worker. Its methods may be called from any thread, `start` first."""

    def __init__(self, built: BuiltWorker, listening: Listening) -> None:
        self._built = built
        self._listening = listening
        self._thread = LoopThread(built.node.node_id)
        self._host = NodeHost(self._thread.loop, self._send, self._on_failure)
        self._wire: Wire | None = None
        self._ended = threading.Event()
        self._failure: BaseException | None = None

    def start(self) -> tuple[str, int]:
        """Listen, and host the node; returns the address of the wire. Raises OSError."""
        return self._thread.submit(self._start()).result(30.0)

    async def _start(self) -> tuple[str, int]:
        listening = self._listening
        node = self._built.node
        epoch = self._built.info.epoch
        self._wire = listening.wire(node.node_id, epoch, self._host.deliver)
        address = await self._wire.listen(listening.host)
        self._host.add(node, self._built.make_executor(self._host.inbox(node.node_id)))
        if self._built.when_lost is not None:
            self._built.when_lost(lambda error: self._on_failure(node.node_id, error))
        return address

    def introduce(self, peers: Iterable[Peer]) -> None:
        """From now on messages to `peers` go to these addresses."""
        assert self._wire is not None
        introduce(self._thread, self._wire, peers)

    def wait(self) -> None:
        """Blocks while the worker serves; returns when it was stopped. Raises what its node did."""
        self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Close the wire and the executors. Waits for them, for a bounded time."""
        self._thread.submit(self._stop()).result(30.0)
        self._thread.close()
        self._ended.set()

    async def _stop(self) -> None:
        if self._wire is not None:
            await self._wire.close()
        await asyncio.to_thread(self._host.close)

    def _send(self, to: NodeId, message: Any) -> None:
        assert self._wire is not None
        self._wire.send(to, message)

    def _on_failure(self, _node: NodeId, error: BaseException) -> None:
        self._failure = error
        self._ended.set()
