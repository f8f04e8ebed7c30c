"""`/v1/responses`: make one, ask for it again, delete it, cancel it.

A response that runs in the background is served by the same endpoint to nobody: it ends when it is
done, when it is cancelled, or with the server. What would be refused in the foreground is refused
before its client is told that it runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from cluster.api.context import ApiContext
from cluster.api.errors import ApiError, invalid, overloaded
from cluster.api.incoming import caller, read_body
from cluster.api.openai.logprobs import EncodedLists
from cluster.api.openai.parts import Plan
from cluster.api.openai.plan import plan_chat
from cluster.api.openai.respond import COMMENT, GenerateEndpoint
from cluster.api.openai.schema import parse
from cluster.api.responses.format import ResponseFormat, begun
from cluster.api.responses.schema import ResponsesChat, ResponsesRequest, as_chat
from cluster.api.responses.truncation import truncated, with_their_calls
from cluster.api.tenants import Tenant

MAX_TURNS = 2000  # of a conversation that is read back
MAX_BACKGROUND = 64
MAX_EVENT_BYTES = 16 * 2**20  # of a stream in the background that can be read again
LOST_AFTER_S = 5.0  # beyond its timeout one in the background cannot run, wherever it does
STOP_TIMEOUT_S = 5.0  # for one in the background that is cancelled
_OF_BODIES = (b"content-encoding", b"content-length")
_CHAT_NAMES = {"messages": "input", "response_format": "text.format"}
_log = logging.getLogger("kvrelay.api")


def response_routes(ctx: ApiContext) -> list[Route]:
    calls = Responses(ctx)
    path = "/v1/responses/{id}"
    return [
        Route("/v1/responses", calls, methods=["POST"]),
        Route(path, calls.show, methods=["GET"]),
        Route(path, calls.delete, methods=["DELETE"]),
        Route(f"{path}/cancel", calls.cancel, methods=["POST"]),
        Route(f"{path}/input_items", calls.items, methods=["GET"]),
    ]


class Responses:
    """Owned by the application."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx
        self._background: dict[str, _Background] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        try:
            tenant = caller(self._ctx, http)
            body = await read_body(self._ctx, http)
            request = await self._ctx.in_thread(len(body), parse, ResponsesRequest, body)
            call = _ResponseCall(self, request, tenant, f"resp_{scope['state']['request_id']}")
            await call.prepare()
        except ClientDisconnect:
            return
        if request.background:
            answer = await self._start(call, scope)
            await answer(scope, receive, send)
            return
        await call.endpoint()(_inner(scope), _after_body(call.body, receive), send)

    async def show(self, http: Request) -> Response:
        record = await self.record(http)
        if http.query_params.get("stream") == "true":
            return self._again(record, _after(http))
        return JSONResponse(record["response"])

    def _again(self, record: dict[str, Any], first: int) -> Response:
        """The events of a stream in the background, from number `first`. Raises `ApiError`."""
        response_id = record["response"]["id"]
        running = self._background.get(response_id)
        if running is not None and running.is_streamed:
            return _event_stream(running.events(first))
        if "events" not in record:
            raise invalid(
                f"The response '{response_id}' has no stream to be read again: it was not asked for"
                " with 'background' and 'stream', it is too large, or it runs at another router",
                param="stream",
            )

        async def kept() -> AsyncIterator[bytes]:
            for event in record["events"][first:]:
                yield event.encode()

        return _event_stream(kept())

    async def items(self, http: Request) -> Response:
        record = await self.record(http)
        data = [_input_item(item, f"item_{i}") for i, item in enumerate(record["items"])]
        if http.query_params.get("order") != "asc":  # as OpenAI, where it is not said
            data.reverse()
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return JSONResponse({"object": "list", "data": data, "has_more": False} | ends)

    async def delete(self, http: Request) -> Response:
        tenant, response_id = caller(self._ctx, http), http.path_params["id"]
        await self.find(tenant, response_id)
        running = self._background.get(response_id)
        if running is not None:
            await running.cancel()
        delete = self._ctx.responses.delete
        if not await asyncio.to_thread(delete, tenant.name, response_id):
            raise unknown(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, http: Request) -> Response:
        record = await self.record(http)
        response_id = http.path_params["id"]
        running = self._background.get(response_id)
        if running is not None:
            await running.cancel()
            record = await self.record(http)
        elif not record["response"].get("background"):
            raise invalid(f"The response '{response_id}' does not run in the background")
        return JSONResponse(record["response"])

    async def record(self, http: Request) -> dict[str, Any]:
        """Raises `ApiError` (401, 404)."""
        return await self.find(caller(self._ctx, http), http.path_params["id"])

    async def find(self, tenant: Tenant, response_id: str) -> dict[str, Any]:
        """Raises `ApiError` (404)."""

        def read() -> dict[str, Any] | None:
            found = self._ctx.responses.get(tenant.name, response_id)
            record: dict[str, Any] | None = None if found is None else json.loads(found)
            return record

        record = await asyncio.to_thread(read)
        if record is None:
            raise unknown(response_id)
        response = record["response"]
        runs_until = response["created_at"] + self._ctx.limits.request_timeout_s + LOST_AFTER_S
        is_here = response_id in self._background
        if response["status"] == "in_progress" and not is_here and time.time() > runs_until:
            error = {"code": "server_error", "message": "The server stopped while it ran"}
            record["response"] = response | {"status": "failed", "error": error}
        return record

    async def keep(self, tenant: Tenant, record: dict[str, Any], lists: EncodedLists) -> bool:
        """lists: that are in `record`. False: the file cannot be written, which is no reason to
        withhold the answer."""

        def write() -> None:
            data = b"".join(lists.encode(record, ascii=True))
            self._ctx.responses.put(tenant.name, response_id, data)

        response_id = record["response"]["id"]
        try:
            await asyncio.to_thread(write)
        except sqlite3.Error:
            _log.exception("response %s is not kept", response_id)
            return False
        return True

    @property
    def ctx(self) -> ApiContext:
        return self._ctx

    async def _start(self, call: _ResponseCall, scope: Scope) -> Response:
        """What the client is answered. Raises `ApiError`."""
        if not call.request.is_kept:
            raise invalid("'background': a response in the background is stored", "background")
        if len(self._background) >= MAX_BACKGROUND:
            raise overloaded(f"{MAX_BACKGROUND} responses run in the background, the limit", 1.0)
        model, response_id = self._ctx.model_name, call.response_id
        response = begun(call.request, model, response_id, "in_progress")
        running = self._background[response_id] = _Background(self, call, scope)
        running.task.add_done_callback(lambda _: self._background.pop(response_id, None))
        try:
            await running.admitted.wait()
            if running.refusal is not None:
                return running.refusal
            if not await call.keep(response, EncodedLists()):
                raise ApiError(503, "Responses cannot be stored now", type="server_error")
        except BaseException:
            running.task.cancel()
            raise
        running.is_kept.set()
        return _event_stream(running.events(0)) if running.is_streamed else JSONResponse(response)


class _ResponseCall:
    def __init__(
        self, responses: Responses, request: ResponsesRequest, tenant: Tenant, response_id: str
    ) -> None:
        self.request, self.response_id = request, response_id
        self.on_planned: Callable[[], None] = lambda: None  # it is about to be submitted
        self.may_settle: asyncio.Event | None = None  # once set, its end may be kept; None: at once
        self.has_settled = False
        self._responses, self._tenant = responses, tenant
        self._root = response_id  # the conversation's first response
        self.body = b""

    async def prepare(self) -> None:
        """Read back what came before. Raises `ApiError`."""
        history = await self._history()
        session = self._root if self.request.is_kept else None

        def chat() -> bytes:
            return json.dumps(as_chat(self.request, history, session)).encode()

        self.body = await asyncio.to_thread(chat)

    def endpoint(self) -> GenerateEndpoint[ResponsesChat]:
        return GenerateEndpoint(
            self._responses.ctx,
            "responses",
            _read,
            _plan,
            self._format,
        )

    async def keep(self, response: dict[str, Any], lists: EncodedLists) -> bool:
        if not self.request.is_kept:
            return False
        record = {"response": response, "items": self.request.input, "root": self._root}
        return await self._responses.keep(self._tenant, record, lists)

    async def _settle(self, response: dict[str, Any], lists: EncodedLists) -> bool:
        if self.may_settle is not None:
            await self.may_settle.wait()
        self.has_settled = await self.keep(response, lists)
        return self.has_settled

    async def keep_events(self, events: list[bytes]) -> None:
        """With the response that has been kept, if it is still there."""

        def with_events(found: bytes | None) -> bytes | None:
            if found is None:
                return None
            told = [event.decode() for event in events]
            return json.dumps(json.loads(found) | {"events": told}).encode()

        update = self._responses.ctx.responses.update
        try:
            await asyncio.to_thread(update, self._tenant.name, self.response_id, with_events)
        except sqlite3.Error:
            _log.exception("the stream of response %s is not kept", self.response_id)

    def _format(
        self, ctx: ApiContext, plan: Plan, chat: ResponsesChat, request_id: str
    ) -> ResponseFormat:
        self.on_planned()
        return ResponseFormat(ctx, plan, chat, self.response_id, self._settle)

    async def _history(self) -> list[dict[str, Any]]:
        turns: list[list[dict[str, Any]]] = []
        previous = self.request.previous_response_id
        while previous is not None:
            if len(turns) == MAX_TURNS and self.request.truncation == "auto":
                return with_their_calls([item for turn in reversed(turns) for item in turn])
            if len(turns) == MAX_TURNS:
                raise invalid(f"A conversation has at most {MAX_TURNS} turns that are read back")
            record = await self._responses.find(self._tenant, previous)
            response = record["response"]
            if response["status"] not in ("completed", "incomplete"):
                raise invalid(f"The response '{previous}' is {response['status']}")
            self._root = record["root"]
            turns.append([*record["items"], *response["output"]])
            previous = response["previous_response_id"]
        return [item for turn in reversed(turns) for item in turn]


class _Background:
    """A response that runs without a client. Life: planned and admitted, or refused; then its
    beginning is kept, then its end, whatever came of it."""

    def __init__(self, responses: Responses, call: _ResponseCall, scope: Scope) -> None:
        self.admitted = asyncio.Event()  # or refused, see `refusal`
        self.refusal: Response | None = None  # what its client is answered instead
        self.is_kept = call.may_settle = asyncio.Event()  # its beginning
        self.is_streamed = bool(call.request.stream)
        call.on_planned = self.admitted.set
        self._cancelled = asyncio.Event()
        self._more = asyncio.Event()  # replaced when it is set
        self._responses, self._call, self._scope = responses, call, scope
        self._status, self._body = 0, b""
        self._headers: dict[str, str] = {}
        self._events: list[bytes] = []  # as sent, by their numbers
        self._num_event_bytes = 0
        self._has_ended = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        call = self._call
        receive = _after_body(call.body, self._disconnected)
        try:
            await call.endpoint()(_inner(self._scope), receive, self._take)
        except Exception:
            _log.exception("response %s failed", call.response_id)
            self._status = 500
        try:
            await self._end()
        finally:
            self._has_ended = True
            self._tell()

    async def _end(self) -> None:
        call = self._call
        if not self.admitted.is_set():
            self.refusal = self._refused()
            self.admitted.set()
            return
        await self.is_kept.wait()
        if call.has_settled:
            if self.is_streamed and self._num_event_bytes <= MAX_EVENT_BYTES:
                await call.keep_events(self._events)
            return
        model = self._responses.ctx.model_name
        status = "cancelled" if self._cancelled.is_set() else "failed"
        response = begun(call.request, model, call.response_id, status)
        if status == "failed":
            response["error"] = self._error()
        await call.keep(response, EncodedLists())

    async def events(self, first: int) -> AsyncIterator[bytes]:
        """From number `first` to the end of the stream, with a comment where it is silent."""
        while True:
            while first < len(self._events):
                yield self._events[first]
                first += 1
            if self._num_event_bytes > MAX_EVENT_BYTES:
                message = f"The stream has more than {MAX_EVENT_BYTES} bytes: ask for the response"
                error = ApiError(500, message, type="server_error")
                yield b"event: error\ndata: " + json.dumps(error_event(error)).encode() + b"\n\n"
                return
            if self._has_ended:
                return
            try:
                async with asyncio.timeout(self._responses.ctx.limits.keepalive_s or None):
                    await self._more.wait()
            except TimeoutError:
                yield COMMENT

    async def cancel(self) -> None:
        """Returns when it has ended, or after a while."""
        self._cancelled.set()
        await asyncio.wait([self.task], timeout=STOP_TIMEOUT_S)

    def _refused(self) -> Response:
        """Also where it ended before it could be planned, by a bug."""
        if self._status in (0, 200, 500):
            bug = ApiError(500, "Internal error", type="server_error")
            return JSONResponse(bug.body, bug.status)
        return Response(self._body, self._status, self._headers, "application/json")

    def _error(self) -> dict[str, Any]:
        if self._status == 200 and self._events:  # the stream's last event says it
            last = json.loads(self._events[-1].partition(b"\ndata: ")[2])
            found: dict[str, Any] | None = last.get("response", {}).get("error")
            if found is not None:
                return found
        if self._status in (0, 200, 500):
            return {"code": "server_error", "message": "Internal error"}
        error = json.loads(self._body)["error"]
        return {"code": error["code"] or error["type"], "message": error["message"]}

    async def _disconnected(self) -> Message:
        await self._cancelled.wait()
        return {"type": "http.disconnect"}

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            wanted = ("retry-after", "www-authenticate")
            named = ((name.decode(), value.decode()) for name, value in message["headers"])
            self._headers = {name: value for name, value in named if name in wanted}
        elif self._status != 200:
            self._body += message.get("body", b"")
        elif self.is_streamed:
            self._record(message.get("body", b""))

    def _record(self, body: bytes) -> None:
        events = [event + b"\n\n" for event in body.split(b"\n\n") if event.startswith(b"event:")]
        self._num_event_bytes += sum(map(len, events))
        if self._num_event_bytes > MAX_EVENT_BYTES:
            self._events.clear()
        else:
            self._events += events
        self._tell()

    def _tell(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


def _after(http: Request) -> int:
    """The number of the first event that is wanted. Raises `ApiError`."""
    given = http.query_params.get("starting_after")
    if given is None:
        return 0
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise invalid(
            f"'starting_after': expected the number of an event, got {given[:40]!r}",
            param="starting_after",
        )
    return int(given) + 1


def _event_stream(events: AsyncIterator[bytes]) -> Response:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


def error_event(error: ApiError) -> dict[str, Any]:
    """An error in a stream, beside the response."""
    return {"type": "error", "status": error.status, **error.body}


def _read(body: bytes) -> ResponsesChat:
    with _in_own_words():
        return parse(ResponsesChat, body)


async def _plan(ctx: ApiContext, chat: ResponsesChat, tenant: Tenant) -> Plan:
    with _in_own_words():
        tokens = None
        if chat.asked.truncation == "auto":
            chat, tokens = await truncated(ctx, chat)
        return await plan_chat(ctx, chat, tenant, tokens)


@contextmanager
def _in_own_words() -> Iterator[None]:
    """Errors about the chat that a request means name what the request has."""
    try:
        yield
    except ApiError as error:
        for theirs, ours in _CHAT_NAMES.items():
            error.message = error.message.replace(f"'{theirs}'", f"'{ours}'")
            error.param = ours if error.param == theirs else error.param
        raise


def _input_item(item: dict[str, Any], item_id: str) -> dict[str, Any]:
    """As clients expect it: with an id, and content as parts."""
    if item.get("type", "message") != "message" or not isinstance(item.get("content"), str):
        return {"id": item_id, **item}
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    content = [{"type": kind, "text": item["content"]}]
    return {"id": item_id, "type": "message", **item, "content": content}


def unknown(response_id: str) -> ApiError:
    message = f"Response with id '{response_id[:100]}' not found."
    return ApiError(404, message, param="id", code="response_not_found")


def _inner(scope: Scope) -> Scope:
    """Of the chat that a request means, whose body is another."""
    headers = [each for each in scope["headers"] if each[0] not in _OF_BODIES]
    return {**scope, "headers": headers, "state": dict(scope["state"])}


def _after_body(body: bytes, receive: Receive) -> Receive:
    """Receives `body`, then what `receive` does."""
    is_read = False

    async def received() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return received
