"""Messages on their way out: a numbered stream to one peer, over one connection after the other.

    idle -> connecting -> up -> (broken) connecting -> up ...
                 |                             |
                 +---------- peer lost --------+

A message is kept until the peer acknowledges it. When a connection breaks, the link connects again;
the peer then says how many messages of the stream it has, and the others are sent again: its node
sees neither a gap nor a repeat. The peer is lost if it cannot be reached for `give_up_s`, if it is
another process than before, if it rejects the stream, if messages for it no longer fit meanwhile,
or, at once, if its own machine refuses the connection: its process is gone. Then what was kept is
dropped, and the next message begins a new stream.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from typing import cast

from kvrelay.engine.node import NodeId
from kvrelay.engine.wire.channel import own_version
from kvrelay.engine.wire.context import Address, WireContext, fingerprint, tune_socket
from kvrelay.engine.wire.frames import FrameReader, FrameWriter, Kind, ProtocolError
from kvrelay.engine.wire.handshake import (
    MAX_CONTROL_BYTES,
    NONCE_BYTES,
    REPLY_BYTES,
    VERSION,
    Resume,
    StreamId,
    check_preamble,
    check_reply,
    make_hello,
    make_proof,
    parse_ack,
    parse_resume,
    session_keys,
)

log = logging.getLogger("kvrelay.wire")

STABLE_S = 1.0
"""A connection that breaks sooner, and on which nothing was acknowledged, is no reason for a new
deadline, or for an attempt without a pause."""


class Link:
    """The messages to one peer, and the connection that they take while there is one.

    Invariant: of the stream, the peer has acknowledged `_num_acked` messages; `_unacked` were
    written on this connection, `_again` on an earlier one only, `_waiting` never; in this order.
    At most one connection or attempt at a time.
    """

    def __init__(self, context: WireContext, peer: NodeId, address: Address) -> None:
        self.context = context
        self.peer = peer
        self.address = address
        self.closed = False
        self.outbound: _Outbound | None = None  # resumed, may be paused
        self.stream = next(context.streams)
        self._peer_incarnation: bytes | None = None  # None: not reached with this stream
        self._num_acked = 0
        self._unacked: deque[bytes] = deque()
        self._again: deque[bytes] = deque()
        self._waiting: deque[bytes] = deque()
        self._kept_bytes = 0  # in _unacked and _again
        self._waiting_bytes = 0
        self._connecting: asyncio.Task[None] | None = None
        self._connected_at = 0.0
        self._has_progressed = False  # since it was connected
        self._deadline = 0.0
        self._num_tries = 0  # to connect, since it was well
        self._is_reported = False  # that its version is another

    def send(self, body: bytes) -> None:
        """Write the message, or queue it; dropped and counted if there is no room."""
        limits = self.context.limits
        if not self._waiting and not self._again and self._may_write(len(body)):
            self._write(body)
            return
        if (
            len(self._waiting) >= limits.max_queued_frames
            or self._waiting_bytes + len(body) > limits.max_queued_bytes
        ):
            self.context.counters["queue_full"] += 1
            asyncio.get_running_loop().call_soon(self._check_overflow)
            return
        self._waiting.append(body)
        self._waiting_bytes += len(body)
        if self.outbound is None and self._connecting is None:
            self._deadline = asyncio.get_running_loop().time() + limits.give_up_s
            self._connect_soon()

    def flush(self) -> None:
        while self._again and self.outbound is not None and not self.outbound.paused:
            body = self._again.popleft()
            self._kept_bytes -= len(body)
            self.context.counters["resent"] += 1
            self._write(body)
        while not self._again and self._waiting and self._may_write(len(self._waiting[0])):
            body = self._waiting.popleft()
            self._waiting_bytes -= len(body)
            self._write(body)

    def acknowledged(self, count: int) -> None:
        """The peer has `count` messages of the stream. Raises ProtocolError if it cannot."""
        num = count - self._num_acked
        if not 0 <= num <= len(self._unacked):
            raise ProtocolError("bad_ack")
        for _ in range(num):
            self._kept_bytes -= len(self._unacked.popleft())
        self._num_acked = count
        self._has_progressed |= num > 0
        self.flush()

    def broken(self) -> None:
        """The connection is gone. The peer may be there, and not know of it yet."""
        if self.closed:
            return
        self.outbound = None
        self.context.counters["broken"] += 1
        self._unacked.extend(self._again)  # whatever was written is kept, in order
        self._again.clear()
        now = asyncio.get_running_loop().time()
        if self._has_progressed or now - self._connected_at >= STABLE_S:
            self._deadline = now + self.context.limits.give_up_s
            self._num_tries = 0
        if self._connecting is None:
            self._connect_soon()

    def close(self) -> None:
        self.closed = True
        self._drop()

    def _may_write(self, size: int) -> bool:
        if self.outbound is None or self.outbound.paused:
            return False
        limits = self.context.limits
        return not self._unacked or (
            len(self._unacked) < limits.max_unacked_frames
            and self._kept_bytes + size <= limits.max_unacked_bytes
        )

    def _write(self, body: bytes) -> None:
        assert self.outbound is not None
        self._unacked.append(body)
        self._kept_bytes += len(body)
        self.outbound.write(body)

    def _drop(self) -> None:
        """The connection, and every message that is kept."""
        connecting, self._connecting = self._connecting, None
        if connecting is not None and connecting is not asyncio.current_task():
            connecting.cancel()
        outbound, self.outbound = self.outbound, None
        if outbound is not None:
            outbound.close()
        counters = self.context.counters
        counters["undeliverable"] += len(self._waiting)
        counters["unacknowledged"] += len(self._unacked) + len(self._again)
        for messages in (self._unacked, self._again, self._waiting):
            messages.clear()
        self._kept_bytes = self._waiting_bytes = 0

    def _check_overflow(self) -> None:
        """Without a connection, what did not fit would be a gap in what the peer has so far."""
        if self._peer_incarnation is not None and self.outbound is None:
            self._lose_peer()

    def _lose_peer(self) -> None:
        if self.closed:
            return
        self._drop()
        self.stream = next(self.context.streams)
        self._peer_incarnation = None
        self._num_acked = 0
        self._num_tries = 0
        self.context.counters["lost"] += 1
        self.context.on_peer_lost(self.peer, self.address.epoch)

    def _connect_soon(self) -> None:
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        limits, counters = self.context.limits, self.context.counters
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(limits.reconnect.pause_s(self._num_tries))
            self._num_tries += 1
            try:
                async with asyncio.timeout(limits.handshake_s):
                    outbound, resume = await self._attempt()
                break
            except ProtocolError as error:
                counters[error.counter] += 1
                if error.counter == "bad_version":
                    self._report_version(error)
            except (OSError, TimeoutError) as error:
                counters["connect_failed"] += 1
                was_up = self._peer_incarnation is not None
                is_refused = isinstance(error, ConnectionRefusedError)
                if is_refused and was_up and self.context.is_here(self.address.host):
                    self._lose_peer()
                    return
            if loop.time() + limits.reconnect.pause_s(self._num_tries) > self._deadline:
                self._lose_peer()
                return
        self._connecting = None
        self._connected_at = loop.time()
        self._resume(outbound, resume)

    def _resume(self, outbound: _Outbound, resume: Resume) -> None:
        num_kept = len(self._unacked)
        is_same = self._peer_incarnation in (None, resume.incarnation)
        if not is_same or not 0 <= resume.count - self._num_acked <= num_kept:
            outbound.close()
            self._lose_peer()
            return
        reconnected = self._peer_incarnation is not None
        self.context.counters["reconnected" if reconnected else "connected"] += 1
        self._peer_incarnation = resume.incarnation
        self.acknowledged(resume.count)
        self._has_progressed = False
        self._again, self._unacked = self._unacked, self._again
        self.outbound = outbound
        self.flush()

    def _report_version(self, error: ProtocolError) -> None:
        if not self._is_reported:
            where = f"{self.peer} at {self.address.host}:{self.address.port}"
            theirs = f"{where} (kvrelay {self.address.package}) speaks {error}"
            ours = f"this process (kvrelay {own_version()}) version {VERSION}"
            log.error("%s, and %s: install versions that go together", theirs, ours)
        self._is_reported = True

    async def _attempt(self) -> tuple[_Outbound, Resume]:
        loop = asyncio.get_running_loop()
        host, port, limits = self.address.host, self.address.port, self.context.limits
        tls = None if self.context.tls is None else self.context.tls.client
        # With TLS the peer has to answer as well, and may be busy.
        async with asyncio.timeout(limits.handshake_s if tls else limits.connect_s):
            _, outbound = await loop.create_connection(lambda: _Outbound(self), host, port, ssl=tls)
        try:
            resume = await outbound.resumed
        except BaseException:
            outbound.close()
            raise
        if not outbound.is_open:
            raise ConnectionResetError("closed right after the handshake")
        return outbound, resume


class _Outbound(asyncio.Protocol):
    """A connection to a peer: hello, its proof, ours, where to resume; then our messages, and what
    it acknowledges."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._buffer = bytearray()
        context = link.context
        stream = StreamId(context.epoch, context.incarnation, link.stream)
        self._hello = make_hello(context.node_id, link.peer, stream, os.urandom(NONCE_BYTES))
        self._bound = b""  # the hello, and what else the proofs are about
        self._transport: asyncio.Transport | None = None
        self._writer: FrameWriter | None = None  # once proved
        self._reader: FrameReader | None = None
        self.paused = False
        self.resumed: asyncio.Future[Resume] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is none by type
        tune_socket(transport)
        transport.write(self._hello)
        self._bound = self._hello
        if (tls := transport.get_extra_info("ssl_object")) is not None:
            self._bound += fingerprint(tls.getpeercert(binary_form=True))

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._buffer += data
        try:
            if self._reader is None:
                self._handshake()
            if self._reader is not None:
                self._read_frames(self._reader)
        except ProtocolError as error:
            if self.resumed.done():
                self._link.context.counters[error.counter] += 1
            else:
                self.resumed.set_exception(error)
            if self._transport is not None:
                self._transport.abort()

    def _handshake(self) -> None:
        assert self._transport is not None
        check_preamble(self._buffer)
        if len(self._buffer) < REPLY_BYTES:
            return
        if len(self._buffer) > REPLY_BYTES:  # it has nothing to say before our proof
            raise ProtocolError("unexpected_data")
        token, hello = self._link.context.token, self._bound
        nonce = check_reply(token, hello, bytes(self._buffer))
        self._buffer.clear()
        self._transport.write(make_proof(token, b"initiator", hello, nonce))
        keys = session_keys(token, hello, nonce)
        self._writer = FrameWriter(keys.initiator)
        self._reader = FrameReader(keys.responder, MAX_CONTROL_BYTES)

    def _read_frames(self, reader: FrameReader) -> None:
        for kind, body in reader.read(self._buffer):
            if not self.resumed.done():
                if kind is not Kind.RESUME:
                    raise ProtocolError("bad_kind")
                self.resumed.set_result(parse_resume(body))
            elif kind is not Kind.ACK:
                raise ProtocolError("bad_kind")
            elif self._link.outbound is self:
                self._link.acknowledged(parse_ack(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.resumed.done():
            self.resumed.set_exception(ConnectionResetError("closed during the handshake"))
        elif self._link.outbound is self:
            self._link.broken()

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self._link.outbound is self:
            self._link.flush()

    def write(self, body: bytes) -> None:
        if self._transport is not None:
            assert self._writer is not None
            self._transport.write(self._writer.seal(Kind.MESSAGE, body))
            self._link.context.counters["sent"] += 1

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
