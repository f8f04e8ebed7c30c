"""Messages between processes: MessagePack frames on direct, authenticated TCP connections.

A connection carries messages in one direction: whoever sends connects, proves itself (see
`handshake`), and writes frames, each with a MAC (see `frames`) around one message (see `codec`);
back come acknowledgements. Answers have a connection of the other side.

Delivery is exactly once and in order, across connections that break (see `link`), until one side
loses the other; then both hear of it. Messages wait in a bounded queue while the peer is slow or
cannot be reached at first; what does not fit, or waited too long, is dropped and counted. Whatever
is not a proper frame of an authenticated peer closes its connection, is counted, and has no other
effect. A message that only another version understands is dropped alone, counted, and named once
in the log; whoever sent it has a deadline for what it asked for. Connections that have not proved
themselves are few, have seconds, and make room for the next: they keep no peer out (see `pending`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from kvrelay.engine.node import NodeId
from kvrelay.engine.wire import codec
from kvrelay.engine.wire.channel import own_version
from kvrelay.engine.wire.context import (
    Address,
    OnPeerLost,
    TlsEnds,
    TlsIdentity,
    WireContext,
    WireLimits,
    tune_socket,
)
from kvrelay.engine.wire.frames import FrameReader, FrameWriter, Kind, ProtocolError
from kvrelay.engine.wire.handshake import (
    NONCE_BYTES,
    PREAMBLE,
    PROOF_BYTES,
    REJECTED,
    Hello,
    StreamId,
    check_proof,
    make_ack,
    make_reply,
    make_resume,
    parse_hello,
    session_keys,
)
from kvrelay.engine.wire.link import Link
from kvrelay.engine.wire.pending import PendingConnections

log = logging.getLogger("kvrelay.wire")

OnMessage = Callable[[NodeId, Any], object]  # (destination, message)

MAX_ACKS_BYTES = 1 << 16  # unread by the peer: no more are written
MAX_REPORTED = 256  # kinds of messages that were not understood, by peer: one line in the log each
BACKLOG = 1024
ACCEPT_PAUSE_S = 0.1  # where no connection can be accepted: no file is left


@dataclass(slots=True)
class _Stream:
    """What has arrived of the latest stream from one peer to one node here. At most one connection
    brings more of it."""

    id: StreamId
    received: int = 0  # or REJECTED
    connection: _Inbound | None = None


class Wire:
    """One process's end of every connection. Owned by a `NodeHost`; used on its event loop only.

    `node_id` is its node, which peers address.
    """

    def __init__(
        self,
        node_id: NodeId,
        token: bytes,
        on_message: OnMessage,
        on_peer_lost: OnPeerLost = lambda _peer, _epoch: None,
        limits: WireLimits | None = None,
        epoch: int = 1,
        tls: TlsIdentity | None = None,
    ) -> None:
        """`on_peer_lost` hears of a peer and its epoch: messages to it, or from it, were lost, or
        may have been. Raises TlsError."""
        assert token, "a cluster without a token would authenticate anybody"
        self.node_id = node_id
        limits = limits or WireLimits()
        ends = None if tls is None else TlsEnds.of(tls)
        self.context = WireContext(node_id, epoch, token, limits, on_peer_lost, ends)
        self.limits = self.context.limits
        self.counters = self.context.counters
        self.on_message = on_message
        self.unauthenticated: PendingConnections[_Inbound] = PendingConnections(
            limits.max_unauthenticated, limits.max_unauthenticated_of_address
        )
        self.inbound: set[_Inbound] = set()
        self._links: dict[NodeId, Link] = {}
        self._streams: dict[tuple[NodeId, NodeId], _Stream] = {}  # by sender and destination
        self._accepting: asyncio.Task[None] | None = None
        self._reported: set[tuple[NodeId, str]] = set()  # what was not understood, by sender

    async def listen(self, host: str, port: int = 0) -> tuple[str, int]:
        """Accept connections on `host`; returns the address that peers connect to.
        Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
        listening.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listening))
        bound = listening.getsockname()
        self.context.host = bound[0]
        return bound[0], bound[1]

    async def _accept(self, listening: socket.socket) -> None:
        """One at a time: what peers send is read in between, however many connect."""
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    accepted, address = await loop.sock_accept(listening)
                except OSError:
                    self.counters["accept_failed"] += 1
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                connection = _Inbound(self)
                dropped = self.unauthenticated.add(connection, address[0])
                if dropped is not None:
                    dropped.reject("too_many_unauthenticated")
                connection.open(accepted)

    def replace_identity(self, tls: TlsIdentity) -> None:
        """Show this certificate on connections that are made from now on. Raises TlsError for one
        that cannot be used."""
        assert self.context.tls is not None, "what listens in clear text goes on to"
        self.context.tls = TlsEnds.of(tls)

    def set_address(
        self,
        node: NodeId,
        host: str,
        port: int,
        epoch: int,
        protocol: int = 1,
        package: str = "unknown",
    ) -> None:
        """Where `node` listens, and what it speaks. A newer epoch drops what was queued for the
        older one."""
        address = Address(host, port, epoch, protocol, package)
        link = self._links.get(node)
        if link is not None:
            if epoch < link.address.epoch:
                return
            if address == link.address:
                link.address = address
                return
            link.close()
        self._links[node] = Link(self.context, node, address)

    def knows(self, node: NodeId) -> bool:
        """Whether it has the address of `node`."""
        return node in self._links

    def hears(self, node: NodeId) -> bool:
        """Whether `node` is connected, to say something to a node here."""
        streams = self._streams.items()
        return any(key[0] == node and stream.connection is not None for key, stream in streams)

    def forget(self, node: NodeId, epoch: int) -> None:
        """`node` of this epoch is gone: close the connection, drop what is queued."""
        link = self._links.get(node)
        if link is not None and link.address.epoch <= epoch:
            link.close()
            del self._links[node]

    def send(self, to: NodeId, message: Any) -> str | None:
        """Queue `message` for `to`; never blocks. Dropped and counted if it cannot be kept. Returns
        why it fits into no frame, if it does not."""
        link = self._links.get(to)
        if link is None:
            self.counters["unknown_peer"] += 1
            return None
        if codec.since(type(message)) > link.address.protocol:
            self.counters["too_new_for_peer"] += 1
            return None
        try:
            body = codec.encode(message)
        except codec.FrameError as error:
            self.counters["unencodable"] += 1
            return str(error)
        most = self.limits.max_frame_bytes
        if len(body) > most:
            self.counters["oversized_out"] += 1
            return f"{type(message).__name__} has {len(body)} bytes, a frame may have {most}"
        link.send(body)
        return None

    def join(self, hello: Hello, connection: _Inbound) -> _Stream:
        """The stream that `connection`, which has proved itself, brings from now on. Raises
        ProtocolError for one that was superseded."""
        key, new = (hello.sender, hello.to), hello.stream
        known, link = self._streams.get(key), self._links.get(hello.sender)
        if link is not None and new.epoch < link.address.epoch:
            raise ProtocolError("stale_epoch")
        if known is not None:
            if new.epoch < known.id.epoch:
                raise ProtocolError("stale_epoch")
            is_same_process = new.incarnation == known.id.incarnation
            if is_same_process and new.number < known.id.number:
                raise ProtocolError("stale_stream")
            if known.connection is not None:  # it may have been cut, and not know it
                known.connection.abort()
            if new == known.id:
                known.connection = connection
                return known
            if is_same_process:  # it has given up the last stream
                self.counters["stream_replaced"] += 1
                loop = asyncio.get_running_loop()
                loop.call_soon(self.context.on_peer_lost, hello.sender, new.epoch)
        self._streams[key] = stream = _Stream(new, connection=connection)
        return stream

    def report_unknown(self, sender: NodeId, error: codec.FrameError) -> None:
        """A message of `sender` that another version would understand was dropped."""
        self.counters["not_understood"] += 1
        if (sender, error.tag) not in self._reported and len(self._reported) < MAX_REPORTED:
            self._reported.add((sender, error.tag))
            link = self._links.get(sender)
            theirs = "unknown" if link is None else link.address.package
            versions = f"it has kvrelay {theirs}, this process {own_version()}"
            log.warning("%s from %s is dropped: %s (%s)", error.tag, sender, error, versions)

    async def close(self) -> None:
        """Close every connection; frames already handed to the kernel may still arrive."""
        if self._accepting is not None:
            self._accepting.cancel()
        for link in self._links.values():
            link.close()
        for connection in [*self.inbound, *self.unauthenticated.all()]:
            connection.abort()
        self._links.clear()
        await asyncio.sleep(0)


class _Inbound(asyncio.Protocol):
    """A connection that a peer opened: hello, proof, then frames until it closes.

    Nothing is decoded before the proof; whatever is wrong ends in `reject`, once.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._buffer = bytearray()
        self._hello: Hello | None = None
        self._bound = b""  # the hello, and what else the proofs are about
        self._nonce = os.urandom(NONCE_BYTES)
        self._reader: FrameReader | None = None  # once proved
        self._writer: FrameWriter | None = None
        self._stream: _Stream | None = None
        self._num_acked = 0
        self._bytes_to_ack = 0
        self._transport: asyncio.Transport | None = None
        self._tls = wire.context.tls
        self._opening: asyncio.Task[None] | None = None  # until there is a transport
        self._is_over = False
        self._deadline: asyncio.TimerHandle | None = None
        self._ack_timer: asyncio.TimerHandle | None = None

    def open(self, accepted: socket.socket) -> None:
        """From now on it has its time, for the handshake of TLS too."""
        loop, limits = asyncio.get_running_loop(), self._wire.limits
        self._deadline = loop.call_later(limits.handshake_s, self.reject, "handshake_timeout")
        self._opening = opening = loop.create_task(self._open(accepted))
        opening.add_done_callback(lambda _: accepted.close() if self._transport is None else None)

    async def _open(self, accepted: socket.socket) -> None:
        context = None if self._tls is None else self._tls.server
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: self, accepted, ssl=context)
        except OSError:  # ssl's errors are too
            self._opening = None
            self.reject("tls_failed")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is none by type
        self._opening = None
        if self._is_over:
            transport.abort()
            return
        self._transport = transport
        tune_socket(transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._buffer += data
        try:
            if self._reader is None:
                self._handshake()
            if self._reader is not None and self._stream is not None:
                self._read_frames(self._reader, self._stream)
        except ProtocolError as error:
            self.reject(error.counter)

    def _handshake(self) -> None:
        assert self._transport is not None
        hello, token = self._hello, self._wire.context.token
        if hello is None:
            hello = parse_hello(self._buffer)
            if hello is None:
                return
            if hello.to != self._wire.node_id:
                raise ProtocolError("unknown_destination")
            self._hello = hello
            del self._buffer[: len(hello.raw)]
            shown = b"" if self._tls is None else self._tls.identity.fingerprint
            self._bound = hello.raw + shown
            self._transport.write(make_reply(token, self._bound, self._nonce))
        if len(self._buffer) < PROOF_BYTES:
            return
        proof = bytes(self._buffer[:PROOF_BYTES])
        check_proof(token, self._bound, self._nonce, proof)
        del self._buffer[:PROOF_BYTES]
        self._forget_stranger()
        self._stream = stream = self._wire.join(hello, self)
        self._num_acked = stream.received
        keys = session_keys(token, self._bound, self._nonce)
        self._reader = FrameReader(keys.initiator, self._wire.limits.max_frame_bytes)
        self._writer = FrameWriter(keys.responder)
        resume = make_resume(self._wire.context.incarnation, stream.received)
        self._transport.write(self._writer.seal(Kind.RESUME, resume))
        self._wire.inbound.add(self)
        self._wire.counters["accepted"] += 1

    def _read_frames(self, reader: FrameReader, stream: _Stream) -> None:
        assert self._hello is not None
        wire, to = self._wire, self._hello.to
        for kind, body in reader.read(self._buffer):
            if kind is not Kind.MESSAGE or stream.received == REJECTED:
                raise ProtocolError("bad_kind")
            try:
                message = codec.decode_message(body)
            except codec.FrameError as error:
                if not error.tag:
                    stream.received = REJECTED  # or it would be sent again, for ever
                    raise ProtocolError("bad_frame") from None
                wire.report_unknown(self._hello.sender, error)
                message = None
            stream.received += 1
            self._bytes_to_ack += len(body)
            if message is None:
                continue
            wire.counters["received"] += 1
            wire.on_message(to, message)
            if self._transport is None:  # closed by what the message made us do
                return
        self._ack_in_time(stream)

    def _ack_in_time(self, stream: _Stream) -> None:
        limits = self._wire.limits
        num = stream.received - self._num_acked
        if num >= limits.ack_frames or self._bytes_to_ack >= limits.ack_bytes:
            self._ack()
        elif num and self._ack_timer is None:
            loop = asyncio.get_running_loop()
            self._ack_timer = loop.call_later(limits.ack_delay_s, self._ack)

    def _ack(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        assert self._transport is not None
        assert self._writer is not None
        assert self._stream is not None
        self._num_acked, self._bytes_to_ack = self._stream.received, 0
        if self._transport.get_write_buffer_size() <= MAX_ACKS_BYTES:
            self._transport.write(self._writer.seal(Kind.ACK, make_ack(self._num_acked)))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None and self._buffer:
            self._wire.counters["truncated"] += 1
        self._drop()

    def reject(self, counter: str) -> None:
        self._wire.counters[counter] += 1
        transport = self._transport
        if counter == "bad_version" and transport is not None:
            self._drop()
            transport.write(PREAMBLE)  # says which one is spoken here
            transport.close()
        else:
            self.abort()

    def abort(self) -> None:
        transport = self._transport
        if self._opening is not None:
            self._opening.cancel()
        self._drop()
        if transport is not None:
            transport.abort()

    def _drop(self) -> None:
        self._is_over = True
        self._transport = None
        self._buffer.clear()
        self._forget_stranger()
        self._wire.inbound.discard(self)
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        if self._stream is not None and self._stream.connection is self:
            self._stream.connection = None

    def _forget_stranger(self) -> None:
        self._wire.unauthenticated.remove(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
