"""Messages between processes: MessagePack frames on direct, authenticated TCP connections.

A connection carries one direction: whoever sends connects, proves itself (see `handshake`), and
writes frames, each with a MAC (see `frames`) around one message (see `codec`); answers come back on
a connection of the other side.

Delivery is at most once and in order per pair. Frames wait in a bounded queue while the peer
cannot be reached; what does not fit, or waited too long, is dropped and counted. Whatever is not
a proper frame of an authenticated peer closes its connection, is counted, and has no other effect.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, cast

from cluster.wire import codec
from cluster.wire.frames import FrameReader, ProtocolError
from cluster.wire.handshake import (
    NONCE_BYTES,
    PROOF_BYTES,
    Hello,
    check_proof,
    make_reply,
    parse_hello,
    session_keys,
)
from cluster.wire.link import Address, Link, OnPeerLost, WireContext, WireLimits, tune_socket
from engine.node import NodeId

OnMessage = Callable[[NodeId, Any], None]  # (destination, message)


class Wire:
    """One process's end of every connection. Owned by a `NodeHost`; used on its event loop only.

    `serves` are the nodes of this process that peers may address; `node_id` names the process.
    """

    def __init__(
        self,
        node_id: NodeId,
        token: bytes,
        on_message: OnMessage,
        on_peer_lost: OnPeerLost = lambda _peer, _epoch: None,
        limits: WireLimits | None = None,
    ) -> None:
        assert token, "a cluster without a token would authenticate anybody"
        self.node_id = node_id
        self.context = WireContext(node_id, token, limits or WireLimits(), on_peer_lost)
        self.limits = self.context.limits
        self.counters = self.context.counters
        self.serves = {node_id}
        self.on_message = on_message
        self.strangers: set[_Inbound] = set()
        self.inbound: set[_Inbound] = set()
        self._links: dict[NodeId, Link] = {}
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int = 0) -> tuple[str, int]:
        """Accept connections on `host`; returns the address that peers connect to.
        Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Inbound(self), host, port)
        bound = self._server.sockets[0].getsockname()
        return bound[0], bound[1]

    def set_address(self, node: NodeId, host: str, port: int, epoch: int) -> None:
        """Where `node` listens. A newer epoch drops what was queued for the older one."""
        address = Address(host, port, epoch)
        link = self._links.get(node)
        if link is not None:
            if epoch < link.address.epoch or address == link.address:
                return
            link.close()
        self._links[node] = Link(self.context, node, address)

    def forget(self, node: NodeId, epoch: int) -> None:
        """`node` of this epoch is gone: close the connection, drop what is queued."""
        link = self._links.get(node)
        if link is not None and link.address.epoch <= epoch:
            link.close()
            del self._links[node]

    def send(self, to: NodeId, message: Any) -> None:
        """Queue `message` for `to`; never blocks. Dropped and counted if it cannot be kept."""
        link = self._links.get(to)
        if link is None:
            self.counters["unknown_peer"] += 1
            return
        try:
            body = codec.encode(message)
        except codec.FrameError:
            self.counters["unencodable"] += 1
            return
        if len(body) > self.limits.max_frame_bytes:
            self.counters["oversized_out"] += 1
            return
        link.send(body)

    async def close(self) -> None:
        """Close every connection; frames already handed to the kernel may still arrive."""
        if self._server is not None:
            self._server.close()
        for link in self._links.values():
            link.close()
        for connection in [*self.inbound, *self.strangers]:
            connection.abort()
        self._links.clear()
        await asyncio.sleep(0)


class _Inbound(asyncio.Protocol):
    """A connection that a peer opened: hello, proof, then frames until it closes.

    Nothing is decoded before the proof; whatever is wrong ends in `_reject`, once.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._buffer = bytearray()
        self._hello: Hello | None = None
        self._nonce = os.urandom(NONCE_BYTES)
        self._frames: FrameReader | None = None  # once proved
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is none by type
        wire = self._wire
        if len(wire.strangers) >= wire.limits.max_strangers:
            self._reject("too_many_strangers")
            return
        wire.strangers.add(self)
        tune_socket(transport)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(wire.limits.handshake_s, self._reject, "handshake_timeout")

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._buffer += data
        try:
            if self._frames is None:
                self._handshake()
            if self._frames is not None:
                self._read_frames(self._frames, self._hello)
        except ProtocolError as error:
            self._reject(error.counter)
        except codec.FrameError:
            self._reject("bad_frame")

    def _handshake(self) -> None:
        assert self._transport is not None
        hello, token = self._hello, self._wire.context.token
        if hello is None:
            hello = parse_hello(self._buffer)
            if hello is None:
                return
            if hello.to not in self._wire.serves:
                raise ProtocolError("unknown_destination")
            self._hello = hello
            del self._buffer[: len(hello.raw)]
            self._transport.write(make_reply(token, hello.raw, self._nonce))
        if len(self._buffer) < PROOF_BYTES:
            return
        proof = bytes(self._buffer[:PROOF_BYTES])
        check_proof(token, hello.raw, self._nonce, proof)
        del self._buffer[:PROOF_BYTES]
        keys = session_keys(token, hello.raw, self._nonce)
        self._frames = FrameReader(keys.initiator, self._wire.limits.max_frame_bytes)
        self._forget_stranger()
        self._wire.inbound.add(self)
        self._wire.counters["accepted"] += 1

    def _read_frames(self, frames: FrameReader, hello: Hello | None) -> None:
        assert hello is not None
        wire = self._wire
        for _kind, body in frames.read(self._buffer):
            message = codec.decode_message(body)
            wire.counters["received"] += 1
            wire.on_message(hello.to, message)
            if self._transport is None:  # closed by what the message made us do
                return

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None and self._buffer:
            self._wire.counters["truncated"] += 1
        self._drop()

    def _reject(self, counter: str) -> None:
        self._wire.counters[counter] += 1
        self.abort()

    def abort(self) -> None:
        transport = self._transport
        self._drop()
        if transport is not None:
            transport.abort()

    def _drop(self) -> None:
        self._transport = None
        self._buffer.clear()
        self._forget_stranger()
        self._wire.inbound.discard(self)

    def _forget_stranger(self) -> None:
        self._wire.strangers.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
