"""`/v1/responses` as a WebSocket: one response after the other on one connection.

Each message of the client asks for a response as a body over HTTP does, with `"type":
"response.create"`; each message of the server is an event of its stream. What is not stored
(`store: false`) can be continued on the connection that it was made on: the last of them is
remembered there, until another follows, one that continues it fails, or the connection ends.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, draining, invalid, overloaded
from kvrelay.cluster.api.http.site import check_origin
from kvrelay.cluster.api.http.socket import SOCKET, BoundedSocket
from kvrelay.cluster.api.incoming import SMALL_BODY_BYTES, caller, hold, place
from kvrelay.cluster.api.limiter import CALLER
from kvrelay.cluster.api.openai.schema import check_brackets
from kvrelay.cluster.api.responses.conversations import Remembered
from kvrelay.cluster.api.responses.format import begun, error_event
from kvrelay.cluster.api.tenants import Tenant
from kvrelay.engine.logs import REQUEST

if TYPE_CHECKING:
    from kvrelay.cluster.api.responses.call import ResponseCall

IDLE_S = 600.0  # without a message of the client
MAX_WAITING = 8  # messages of the client that wait for the one that is answered
WRITE_TIMEOUT_S = 60.0  # for a client that does not read
Read = Callable[[bytes, Tenant, str, Remembered], Awaitable["ResponseCall"]]
"""A body, whose it is, the response's id, and what the connection remembers. Raises `ApiError`."""
_NOT_HERE = ("stream", "stream_options", "type", "generate")  # a connection always streams


class ResponsesSocket:
    """Owned by the application; its connections share no state but the context's."""

    def __init__(self, ctx: ApiContext, read: Read) -> None:
        self._ctx, self._read = ctx, read

    async def __call__(self, socket: WebSocket) -> None:
        try:
            tenant = caller(self._ctx, socket)
            check_origin(self._ctx.settings, socket.headers)
            if self._ctx.operations.draining:
                raise draining()
        except ApiError as error:
            self._count(error)
            answer = JSONResponse(error.body, error.status, headers=error.headers)
            await socket.send_denial_response(answer)
            return
        await socket.accept()
        connection = _Connection(self._ctx, self._read, socket, tenant)
        reading = asyncio.create_task(connection.read())
        try:
            while await connection.has_message():
                try:
                    await connection.answer()
                except ApiError as error:
                    self._count(error)
                    await connection.send(error_event(error))
        except (ClientDisconnect, WebSocketDisconnect):
            pass
        finally:
            reading.cancel()
            connection.close()

    def _count(self, error: ApiError) -> None:
        self._ctx.metrics.of("").count("responses", error.outcome, error.status)


class _Connection:
    """Invariant: one response at a time; at most MAX_WAITING messages wait for their turn, whose
    bytes are held like those of bodies; those that are remembered, apart."""

    def __init__(self, ctx: ApiContext, read: Read, socket: WebSocket, tenant: Tenant) -> None:
        self._ctx, self._read = ctx, read
        self._socket, self._tenant = socket, tenant
        # uvicorn's connection, if there is one: it rests while nothing is asked for.
        below: ref[BoundedSocket] | None = socket.scope.get("state", {}).get(SOCKET)
        self._below = None if below is None else below()
        if self._below is not None:
            self._below.is_of(CALLER.get())
        self._waiting: asyncio.Queue[_Message] = asyncio.Queue(MAX_WAITING)
        self._message: _Message | None = None
        self._num_waiting = 0  # bytes of these and of the one that is being read
        self._gone = asyncio.Event()
        self._held = ctx.bodies.holder()
        kept = ctx.remembered.holder()
        self._remembered = Remembered(kept, ctx.settings.max_body_bytes)
        self._status, self._body = 0, b""
        self._has_failed = False

    async def read(self) -> None:
        """Takes messages while others are answered, to see that the client goes away."""
        while (message := await self._socket.receive())["type"] != "websocket.disconnect":
            text = (message.get("text") or "").encode()
            try:
                if self._waiting.full():
                    raise overloaded(f"{MAX_WAITING} messages wait already", 1.0)
                self._waiting.put_nowait(self._held_message(text))
            except ApiError as error:
                await self.send(error_event(error))
            del message, text
        self._gone.set()

    def _held_message(self, text: bytes) -> _Message:
        """Counts it until it has been read. Raises `ApiError` (429)."""
        num_held = len(text) if self._num_waiting + len(text) > SMALL_BODY_BYTES else 0
        if num_held:
            hold(self._held.take, num_held)
        self._num_waiting += len(text)
        return _Message(text, num_held)

    def _let_go(self, message: _Message) -> None:
        self._num_waiting -= len(message.text)
        self._held.give_back(message.num_held)

    def close(self) -> None:
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._message = None
        self._remembered.forget(self._remembered.name)
        self._held.close()

    async def has_message(self) -> bool:
        """Waits for what `answer` answers. False: the connection has ended, or nothing has come for
        long."""
        if not self._waiting.empty():
            self._message = self._waiting.get_nowait()
            return True
        if self._below is not None:
            self._below.rest()
        try:
            self._message = await self._next_message()
        finally:
            if self._below is not None:
                self._below.work()
        return self._message is not None

    async def _next_message(self) -> _Message | None:
        waits = [asyncio.create_task(each) for each in (self._waiting.get(), self._gone.wait())]
        try:
            await asyncio.wait(waits, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        got = waits[0]
        if got.done() and not got.cancelled():
            message = got.result()
            assert isinstance(message, _Message)
            return message
        if not self._gone.is_set():
            await self._socket.close(1001, f"no message for {IDLE_S:g} s")
        return None

    async def answer(self) -> None:
        """One response. Raises `ApiError` before its first event, and what `send` does."""
        message, self._message = self._message, None  # it is in memory only until it has been read
        assert message is not None
        request_id = uuid.uuid4().hex
        REQUEST.set(request_id)  # for what this connection's task does
        self._status, self._body, self._has_failed = 0, b"", True
        previous = None
        try:
            try:
                self._tenant = caller(self._ctx, self._socket)  # its key may have been revoked
                text = message.text
                asked = await self._ctx.in_json_thread(len(text), _created, text)
                previous = asked.previous
                response_id = f"resp_{request_id}"
                call = await self._read(asked.body, self._tenant, response_id, self._remembered)
                is_generated = asked.is_generated
                del asked
            finally:
                self._let_go(message)
            del text, message
            if call.request.background:
                raise invalid("'background': a WebSocket answers in the foreground", "background")
            if not is_generated:
                await self._warm_up(call)
                return
            await call.serve(self._scope(request_id), self._left, self._take)
        finally:
            if self._has_failed:
                self._remembered.forget(previous)

    async def _warm_up(self, call: ResponseCall) -> None:
        """What is said is remembered, and continued by the next. It counts like any call. Raises
        `ApiError` (429)."""
        with place(self._ctx, self._tenant):
            await self._remember(call)

    async def _remember(self, call: ResponseCall) -> None:
        model = call.model.shown_model(call.request.model)
        response = begun(call.request, model, call.response_id, "completed")
        await call.remember(response)
        self._has_failed = False
        for i, kind in enumerate(("response.created", "response.completed")):
            await self.send({"type": kind, "sequence_number": i, "response": response})

    def _scope(self, request_id: str) -> dict[str, Any]:
        """Makes the scope of the call over HTTP that a message means."""
        scope = {key: self._socket.scope[key] for key in ("headers", "client", "server", "path")}
        state = {**self._socket.scope.get("state", {}), "request_id": request_id}
        return {**scope, "type": "http", "method": "POST", "query_string": b"", "state": state}

    async def _left(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _take(self, message: Message) -> None:
        """What the call over HTTP would send."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        if self._status != 200:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                event = {"type": "error", "status": self._status, **json.loads(self._body)}
                await self.send(event)
            return
        for event in message.get("body", b"").split(b"\n\n"):
            name, _, data = event.partition(b"\ndata: ")
            if data:  # no comment
                self._has_failed = name == b"event: response.failed"
                await self._send(data.decode())

    async def send(self, event: dict[str, Any]) -> None:
        """Raises ClientDisconnect."""
        await self._send(json.dumps(event))

    async def _send(self, text: str) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._socket.send_text(text)
        except (TimeoutError, RuntimeError, WebSocketDisconnect):
            raise ClientDisconnect from None


class _Message(NamedTuple):
    text: bytes
    num_held: int  # bytes that count until it has been read


class _Asked(NamedTuple):
    """What a message asks for."""

    body: bytes  # as over HTTP
    is_generated: bool
    previous: Any  # the response that it continues


def _created(text: bytes) -> _Asked:
    """Reads a message, and of its fields only what is needed here. Raises `ApiError` (400)."""
    check_brackets(text)
    try:
        given = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        raise _wrong(text) from None

    def value(name: str, otherwise: Any) -> Any:
        return msgspec.json.decode(given[name]) if name in given else otherwise

    if (kind := value("type", None)) != "response.create":
        raise _wrong_type(kind)
    own: dict[str, Any] = {name: raw for name, raw in given.items() if name not in _NOT_HERE}
    body = msgspec.json.encode({**own, "stream": True})
    is_generated = value("generate", True) is not False
    return _Asked(body, is_generated, value("previous_response_id", None))


def _wrong(text: bytes) -> ApiError:
    """What is wrong with a message that is no object in JSON."""
    try:
        given = json.loads(text)
    except ValueError as error:
        return invalid(f"The message is not valid JSON: {error}")
    except RecursionError:
        return invalid("The message has brackets within brackets, too deep to be read")
    if not isinstance(given, dict):
        return _wrong_type(None)
    return invalid("The message is not valid JSON: it has NaN, Infinity, or half of a surrogate")


def _wrong_type(kind: Any) -> ApiError:
    return invalid(f"'type': expected 'response.create', got {kind!r:.60}", param="type")
