"""One connection of a client: uvicorn's HTTP protocol with a bound on everything that a client can
make it wait for or keep, before anyone knows who the client is.

Where too many are open, one whose request is not whole makes room, a WebSocket or one over HTTP, of
the address that has the most (`room`). So who opens all that there may be keeps nobody else out.

Life: accepted, or refused because there are too many -> head of a request -> its body -> answer ->
idle, or the next head. Each of these but the answer has a timer. An answer takes as long as it
takes; only a client that does not read it has a timer.
"""

from __future__ import annotations

import asyncio
import json
import select
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.http.room import OpenConnections, Stage
from kvrelay.cluster.api.http.socket import BoundedSocket
from kvrelay.cluster.api.limiter import ByteBudget, network_of

_LAST_S = 0.5  # for a request that is under way when the server is to stop
_LOOK_S = 0.01  # for the loop to read what has come
_SAY_S = 2.0  # for the answer to a connection that is refused to be read
_STEP_BYTES = 16 * 1024  # a body has got on when so much more of it has come


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int = 8192  # open at once
    max_head_bytes: int = 64 * 1024  # request line and headers; trailers
    head_timeout_s: float = 30.0  # from a request's first byte, or the connection's begin
    body_timeout_s: float = 40.0  # for what is left of a body that has been answered already
    # Between two requests. Longer than clients (httpx: 5 s) and load balancers (60 s) keep one: who
    # closes first must not be the server, or a request may be on its way on a closed connection.
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0  # for a client that does not read


def bounded_protocols(
    limits: ConnectionLimits, budget: ByteBudget
) -> tuple[type[asyncio.Protocol], type[asyncio.Protocol]]:
    """The protocol classes that uvicorn makes one of for each connection, and for each that becomes
    a WebSocket. `budget`: for messages of these."""
    room: OpenConnections[Any] = OpenConnections(limits.max_connections)
    return (
        type("LimitedProtocol", (BoundedProtocol,), {"limits": limits, "room": room}),
        type("LimitedSocket", (BoundedSocket,), {"budget": budget, "room": room}),
    )


def _too_many(message: str) -> ApiError:
    kind, code = "service_unavailable_error", "too_many_connections"
    return ApiError(503, message, type=kind, code=code, retry_after_s=1.0)


class _UnchunkedCycle(RequestResponseCycle):
    """An answer to HTTP/1.0, which knows no chunks: one whose length is not known ends with its
    connection (RFC 9112, 6.1), which is not kept anyway."""

    _is_open_ended = False

    async def send(self, message: Any) -> None:
        if not self.response_started:
            names = {name.lower() for name, _ in message.get("headers", ())}
            if b"content-length" not in names:
                self.chunked_encoding, self._is_open_ended = False, True
        elif self._is_open_ended:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class BoundedProtocol(HttpToolsProtocol):
    """Invariant: a timer runs unless a request is being answered to a client that reads: of the
    head or the body that is awaited, of writing, or uvicorn's own between requests."""

    limits = ConnectionLimits()
    room: OpenConnections[BoundedProtocol | BoundedSocket]  # all of the server
    _is_refused = False
    _in_body = False  # a head is complete, its body is not
    _is_too_large = False  # the head that is being parsed
    _is_last = False  # the server is to stop: the next answer ends the connection
    _num_hosts = 0  # headers of that name
    _why = ""  # what came is not a request, where the parser does not say so
    _num_unseen = 0  # bytes of a body that came since it last got on
    _head_bytes = 0  # that came since the last part of a body, or the last request's end
    _read_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        address = network_of(self.client[0]) if self.client else ""
        most = self.limits.max_connections
        if len(self.connections) > most:
            message = f"{most} connections are open, which is the limit"
            dropped = self.room.drop_for(address)
            if dropped is None:
                self.refuse(_too_many(message))
                return
            dropped.refuse(_too_many(f"{message}: this one made room for another"))
        self.room.enter(self, address)
        self._await_more(self.limits.head_timeout_s)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._read_timer is None and not self._in_body:
            self._await_more(self.limits.head_timeout_s)
        self._head_bytes += len(data)  # callbacks reset it
        super().data_received(data)
        if self._head_bytes and self.room.stage(self) is Stage.IDLE and not self._in_body:
            self.room.put(self, Stage.HEAD)
        if self._head_bytes > self.limits.max_head_bytes and not self._is_refused:
            self._is_too_large = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_hosts = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._num_hosts += name.lower() == b"host"

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_head_bytes:
            self._is_too_large = True
            raise ValueError("the head is too large")  # ends the parsing: `send_400_response`
        is_old = self.parser.get_http_version() == "1.0"
        if self._num_hosts > 1 or (self._num_hosts == 0 and not is_old):  # RFC 9112, 3.2
            self._why = f"A request has one Host header, this one has {self._num_hosts}"
            raise ValueError(self._why)
        has_room = self._is_answering or self.room.put(self, Stage.BODY)
        self._head_bytes = self._num_unseen = 0
        self._in_body = True
        self._await_more(self.limits.body_timeout_s)
        served = self.app
        if not has_room:
            self.app = self._refuse_request
        super().on_headers_complete()
        self.app = served
        if not has_room and self.cycle is not None:
            self.cycle.keep_alive = False
        if self._is_last and self.cycle is not None:
            self.cycle.keep_alive = False
        if is_old and self.cycle is not None:
            self.cycle.__class__ = _UnchunkedCycle  # its task has not begun

    def handle_websocket_upgrade(self) -> None:
        self._stop_reading_timer()
        if not self.room.put(self, Stage.ANSWER):
            self.refuse(self._over_share())
            return
        self.room.leave(self)
        super().handle_websocket_upgrade()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        self._num_unseen += len(body)
        if self._num_unseen >= _STEP_BYTES:
            self._num_unseen = 0
            self._go_on(Stage.BODY)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._in_body = False
        self._stop_reading_timer()
        super().on_message_complete()
        if self.cycle is None:  # it becomes a WebSocket
            return
        self._go_on(Stage.ANSWER)
        if self.cycle.response_complete and not self.transport.is_closing():
            # It was answered before its end came, which has stopped the timer of the answer's end.
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later(self.limits.write_timeout_s)
        elif self._is_answering:  # the next in line, whose body may not be whole
            if self._in_body and not self.pipeline:
                self.room.put(self, Stage.BODY)
        else:
            self.room.put(self, Stage.IDLE)
            if self._is_last:
                self.loop.call_later(_LAST_S, self._close_idle)

    def shutdown(self) -> None:
        """The server is to stop. An answer without an end of its own has to see it. A client that
        keeps its connection may be sending on it at this moment, or as soon as its answer is whole:
        that is answered too, and says that the connection ends."""
        self._is_last = True
        if self._is_answering:
            self.cycle.scope["state"]["stopping"] = True
        else:
            self.loop.call_later(_LAST_S, self._close_idle)

    def _close_idle(self) -> None:
        if self._is_answering or self._in_body or self._head_bytes or self.transport.is_closing():
            return
        if self._has_unread():  # it came while this process had no turn: a reset would lose it
            self.loop.call_later(_LOOK_S, self._close_idle)
        else:
            self.transport.close()

    def _has_unread(self) -> bool:
        """Whether something has come that the loop has not read yet."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
        return bool(poll.poll(0))

    def send_400_response(self, msg: str) -> None:
        """What came is not a request, or is too much of one."""
        if self._is_too_large:
            limit = self.limits.max_head_bytes
            message = f"The headers are larger than the limit of {limit} bytes"
            self.refuse(ApiError(431, message, code="headers_too_large"))
        else:
            self.refuse(ApiError(400, self._why or msg))

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later(self.limits.write_timeout_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_later(self.limits.write_timeout_s)

    def resume_writing(self) -> None:
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_refused = True
        self.room.leave(self)
        self._stop_reading_timer()
        self._unset_keepalive_if_required()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def _await_more(self, timeout_s: float) -> None:
        self._stop_reading_timer()
        self._read_timer = self.loop.call_later(timeout_s, self._on_late, timeout_s)

    def _stop_reading_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _on_late(self, timeout_s: float) -> None:
        if self._is_answering:
            # It is the answer's turn: who answers has a limit for the body (`read_body`), and
            # nothing is read for the next request in line.
            self._await_more(timeout_s)
            return
        message = f"The request's headers did not arrive within {timeout_s:g} s"
        self.refuse(ApiError(408, message, type="timeout_error", code="request_timeout"))

    def _over_share(self) -> ApiError:
        most = self.limits.max_connections
        return _too_many(f"this address has its share of {most} connections with a request")

    async def _refuse_request(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers in place of the application."""
        error = self._over_share()
        await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)

    def _go_on(self, stage: Stage) -> None:
        """From its body, unless it was answered before that had come."""
        if self.room.stage(self) is Stage.BODY:
            self.room.put(self, stage)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _abort_later(self, timeout_s: float) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(timeout_s, self.transport.abort)

    def refuse(self, error: ApiError) -> None:
        """Say why, where no answer has begun that it would get into, and end the connection."""
        self._is_refused = True
        self.room.leave(self)
        self._stop_reading_timer()
        has_begun = self._is_answering and (self.cycle.response_started or self.pipeline)
        if has_begun or (self._in_body and not self._is_answering):
            self.transport.abort()
            return
        if self._is_answering:  # to whoever answers its client has gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = json.dumps(error.body).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        headers |= {**error.headers, "connection": "close"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body)
        self.transport.close()
        self._abort_later(_SAY_S)
