"""One WebSocket of a client: uvicorn's protocol with a bound on what it keeps before the
application takes it, and a way to end a connection that asks for nothing.

What has come of a message that is not whole is in the parser's memory, so it counts like a body
over HTTP: beyond SMALL_BODY_BYTES it is read only once there is room for as much as a message may
have, so none waits in its middle for what others hold in theirs. The application counts what it has
taken itself. Reading stops while a message waits to be taken.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode

from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.http.room import OpenConnections, Stage
from kvrelay.cluster.api.incoming import SMALL_BODY_BYTES
from kvrelay.cluster.api.limiter import ByteBudget, Caller, Held, network_of

SOCKET = "socket"  # names a weak reference to the `BoundedSocket`, in the scope's state
NUM_MESSAGES = 8  # as long as they may be, that the budget is for
ROOM_S = 30.0  # in which there should be room for a message
RETRY_S = 0.02
_SAY_S = 2.0  # for the close to be read


class BoundedSocket(WebSocketsSansIOProtocol):
    """Invariant: while the parser has more than SMALL_BODY_BYTES and a part of what was read at
    once, room for a whole message is held in `budget`."""

    budget: ByteBudget
    room: OpenConnections[Any]  # all connections of the server
    _held: Held
    _num_bytes = 0  # that came since a message was taken
    _unparsed = b""  # while there is no room for the message that it is of

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        address = network_of(self.client[0]) if self.client else ""
        self.room.enter(self, address)
        self.room.put(self, Stage.ANSWER)  # the upgrade has just given one back
        self._held = self.budget.holder((address,))
        self.app_state = {**self.app_state, SOCKET: ref(self)}  # in no cycle

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > SMALL_BODY_BYTES and not self._held.num_bytes:
            self._unparsed = data
            self.transport.pause_reading()
            self._go_on(self.loop.time() + ROOM_S)
            return
        super().data_received(data)

    def _go_on(self, deadline: float) -> None:
        """Once there is room."""
        if self.close_sent or self.transport.is_closing():
            return
        if self._held.take(self.budget.limit // NUM_MESSAGES):
            data, self._unparsed = self._unparsed, b""
            self.transport.resume_reading()
            super().data_received(data)
        elif self.loop.time() < deadline:
            self.loop.call_later(RETRY_S, self._go_on, deadline)
        else:
            self.end(CloseCode.TRY_AGAIN_LATER, "the messages of others take all memory")

    async def receive(self) -> Any:
        message = await super().receive()
        self._held.close()
        self._num_bytes = 0
        return message

    def connection_lost(self, exc: Exception | None) -> None:
        self._held.close()
        self.room.leave(self)
        super().connection_lost(exc)
        # `conn` stays until the garbage collector comes by; what it had read need not.
        self.conn.parser.close()
        self.conn.reader.buffer = bytearray()

    def is_of(self, caller: Caller) -> None:
        """Its key is known: what it has counts for that caller from now on."""
        self._held.close()
        self._held = self.budget.holder(caller)

    def rest(self) -> None:
        """It asks for nothing now: it may have to make room."""
        if not self.transport.is_closing():
            self.room.put(self, Stage.IDLE)

    def work(self) -> None:
        """A message of it is answered now."""
        if not self.room.put(self, Stage.ANSWER):
            self.end(CloseCode.TRY_AGAIN_LATER, "this address has its share of connections at work")

    def refuse(self, error: ApiError) -> None:
        """It has to make room for another connection."""
        self.end(CloseCode.TRY_AGAIN_LATER, str(error.body["error"]["message"])[:120])

    def end(self, code: CloseCode, reason: str) -> None:
        if self.close_sent or self.transport.is_closing():
            return
        self.conn.send_close(code, reason)
        self.handle_parser_exception()  # says it, tells the application, and closes
        self.loop.call_later(_SAY_S, self.transport.abort)
