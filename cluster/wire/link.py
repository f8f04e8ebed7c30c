"""Frames on their way out: one queue and at most one connection per peer.

A link connects when there is something to send, reconnects with a growing pause while frames
wait, and gives up, dropping them, when the peer stays away. See `wire` for the frames.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from cluster.wire.frames import FrameWriter, Kind, ProtocolError
from cluster.wire.handshake import (
    NONCE_BYTES,
    REPLY_BYTES,
    check_preamble,
    check_reply,
    make_hello,
    make_proof,
    session_keys,
)
from engine.node import NodeId

OnPeerLost = Callable[[NodeId, int], None]  # (peer, epoch)


@dataclass(frozen=True, slots=True)
class WireLimits:
    max_frame_bytes: int = 64 << 20
    max_queued_bytes: int = 64 << 20  # per peer
    max_queued_frames: int = 8192  # per peer
    max_strangers: int = 128  # connections that have not proved themselves yet
    handshake_s: float = 5.0
    give_up_s: float = 10.0  # frames for a peer that cannot be reached wait this long
    backoff_s: float = 0.05
    max_backoff_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    epoch: int


@dataclass(slots=True)
class WireContext:
    """What every connection of one process shares."""

    node_id: NodeId
    token: bytes
    limits: WireLimits
    on_peer_lost: OnPeerLost
    counters: Counter[str] = field(default_factory=Counter)


class Link:
    """The frames on their way to one peer, and the connection they take while there is one.

    At most one connection or attempt at a time, so the order of `send` is the order of delivery.
    """

    def __init__(self, context: WireContext, peer: NodeId, address: Address) -> None:
        self.context = context
        self.peer = peer
        self.address = address
        self.closed = False
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self.outbound: _Outbound | None = None  # proved, may be paused
        self._connecting: asyncio.Task[None] | None = None

    def send(self, body: bytes) -> None:
        """Write the message, or queue it; dropped and counted if there is no room."""
        limits = self.context.limits
        if self.outbound is not None and not self.outbound.paused and not self._queue:
            self.outbound.write(body)
            return
        if (
            len(self._queue) >= limits.max_queued_frames
            or self._queued_bytes + len(body) > limits.max_queued_bytes
        ):
            self.context.counters["queue_full"] += 1
            return
        self._queue.append(body)
        self._queued_bytes += len(body)
        if self.outbound is None and self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def flush(self) -> None:
        while self._queue and self.outbound is not None and not self.outbound.paused:
            body = self._queue.popleft()
            self._queued_bytes -= len(body)
            self.outbound.write(body)

    def lost(self) -> None:
        """The proved connection is gone, and what it had not delivered with it."""
        if self.closed:
            return
        self.outbound = None
        self.context.counters["lost"] += 1
        if self._queue and self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        self.context.on_peer_lost(self.peer, self.address.epoch)

    def close(self) -> None:
        self.closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self.outbound is not None:
            self.outbound.close()
            self.outbound = None
        self._drop_queue()

    def _drop_queue(self) -> None:
        self.context.counters["undeliverable"] += len(self._queue)
        self._queue.clear()
        self._queued_bytes = 0

    async def _connect(self) -> None:
        limits, backoff_s = self.context.limits, self.context.limits.backoff_s
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limits.give_up_s
        while True:
            try:
                async with asyncio.timeout(limits.handshake_s):
                    self.outbound = await self._attempt()
                break
            except ProtocolError as error:
                self.context.counters[error.counter] += 1
            except (OSError, TimeoutError):
                self.context.counters["connect_failed"] += 1
            if loop.time() + backoff_s > deadline:
                self._connecting = None
                self._drop_queue()
                self.context.on_peer_lost(self.peer, self.address.epoch)
                return
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, limits.max_backoff_s)
        self._connecting = None
        self.context.counters["connected"] += 1
        self.flush()

    async def _attempt(self) -> _Outbound:
        loop = asyncio.get_running_loop()
        host, port = self.address.host, self.address.port
        _, outbound = await loop.create_connection(lambda: _Outbound(self), host, port)
        try:
            await outbound.proved
        except BaseException:
            outbound.close()
            raise
        if not outbound.is_open:
            raise ConnectionResetError("closed right after the handshake")
        return outbound


class _Outbound(asyncio.Protocol):
    """A connection to a peer: hello, its proof, our proof, then frames. The peer says no more."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._buffer = b""
        self._hello = make_hello(link.context.node_id, link.peer, os.urandom(NONCE_BYTES))
        self._transport: asyncio.Transport | None = None
        self._frames: FrameWriter | None = None  # once proved
        self.paused = False
        self.proved: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is none by type
        tune_socket(transport)
        transport.write(self._hello)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._buffer += data
        if self.proved.done() or len(self._buffer) > REPLY_BYTES:
            self._link.context.counters["unexpected_data"] += 1
            self._transport.abort()
            return
        try:
            check_preamble(self._buffer)
            if len(self._buffer) == REPLY_BYTES:
                token, hello = self._link.context.token, self._hello
                nonce = check_reply(token, hello, self._buffer)
                self._transport.write(make_proof(token, b"initiator", hello, nonce))
                self._frames = FrameWriter(session_keys(token, hello, nonce).initiator)
                self.proved.set_result(None)
        except ProtocolError as error:
            self.proved.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.proved.done():
            self.proved.set_exception(ConnectionResetError("closed during the handshake"))
        elif self._link.outbound is self:
            self._link.lost()

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._link.flush()

    def write(self, body: bytes) -> None:
        if self._transport is not None:
            assert self._frames is not None
            self._transport.write(self._frames.seal(Kind.MESSAGE, body))
            self._link.context.counters["sent"] += 1

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def tune_socket(transport: asyncio.Transport) -> None:
    """Small frames leave at once, and a peer that fell silent is noticed within seconds."""
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 3),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", 8000),  # milliseconds
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
