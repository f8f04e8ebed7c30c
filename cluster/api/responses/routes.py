"""`/v1/responses`: make one, ask for it again, delete it, cancel it.

A response that runs in the background is served by the same endpoint to nobody: it ends when it is
done, when it is cancelled, or with the server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from cluster.api.context import ApiContext
from cluster.api.errors import ApiError, invalid, overloaded
from cluster.api.incoming import caller, held_body, utility_call
from cluster.api.openai.logprobs import EncodedLists
from cluster.api.openai.parts import Plan
from cluster.api.openai.plan import plan_chat
from cluster.api.openai.respond import GenerateEndpoint, error_response
from cluster.api.openai.schema import parse
from cluster.api.responses.format import ResponseFormat, begun
from cluster.api.responses.schema import ResponsesChat, ResponsesRequest, as_chat
from cluster.api.responses.truncation import truncated, with_their_calls
from cluster.api.tenants import Tenant

MAX_TURNS = 2000  # of a conversation that is read back
MAX_BACKGROUND = 64  # of one tenant
LOST_AFTER_S = 5.0  # beyond its timeout one in the background cannot run, wherever it does
STOP_TIMEOUT_S = 5.0  # for one in the background that is cancelled
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
            async with held_body(self._ctx, http) as body:
                request = await self._ctx.in_thread(len(body), parse, ResponsesRequest, body)
                call = _ResponseCall(self, request, tenant, f"resp_{scope['state']['request_id']}")
                await call.prepare(len(body))
                del body
            if request.background:
                await self._start(call, scope, send)
                return
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        await call.endpoint()(scope, _after_body(call.take_body(), receive), send)

    async def show(self, http: Request) -> Response:
        with utility_call(self._ctx, http):
            response = (await self.record(http))["response"]
            return await asyncio.to_thread(JSONResponse, response)

    async def items(self, http: Request) -> Response:
        with utility_call(self._ctx, http):
            record = await self.record(http)
            return await asyncio.to_thread(self._items, http, record)

    def _items(self, http: Request, record: dict[str, Any]) -> Response:
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
        return await self.understood(response_id, await self.read(tenant, response_id))

    async def read(self, tenant: Tenant, response_id: str) -> bytes:
        """A record as it is kept. Raises `ApiError` (404)."""
        found = await asyncio.to_thread(self._ctx.responses.get, tenant.name, response_id)
        if found is None:
            raise unknown(response_id)
        return found

    async def understood(self, response_id: str, data: bytes) -> dict[str, Any]:
        record: dict[str, Any] = await self._ctx.in_thread(len(data), json.loads, data)
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

    async def _start(self, call: _ResponseCall, scope: Scope, send: Send) -> None:
        if not call.request.is_kept or call.request.stream:
            raise invalid("'background': a response in the background is stored and not streamed")
        mine = [each for each in self._background.values() if each.tenant == call.tenant.name]
        if len(mine) >= MAX_BACKGROUND:
            raise overloaded(f"{MAX_BACKGROUND} responses run in the background, the limit", 1.0)
        model, response_id = self._ctx.model_name, call.response_id
        response = begun(call.request, model, response_id, "in_progress")
        running = self._background[response_id] = _Background(self, call, scope)
        try:
            if not await call.keep(response, EncodedLists()):
                raise ApiError(503, "Responses cannot be stored now", type="server_error")
        except BaseException:
            del self._background[response_id]
            raise
        running.task = asyncio.create_task(running.run())
        running.task.add_done_callback(lambda _: self._background.pop(response_id, None))
        await JSONResponse(response)(scope, _never, send)


class _ResponseCall:
    def __init__(
        self, responses: Responses, request: ResponsesRequest, tenant: Tenant, response_id: str
    ) -> None:
        self.request, self.response_id = request, response_id
        self._responses, self.tenant = responses, tenant
        self._root = response_id  # the conversation's first response
        self._body = b""

    async def prepare(self, size: int) -> None:
        """Read back what came before. size: of what is asked, in bytes. Raises `ApiError`."""
        ctx = self._responses.ctx
        with ctx.bodies.share() as take:
            room = ctx.limits.max_body_bytes - size
            history, num_bytes = await self._history(take, room)
            session = self._root if self.request.is_kept else None

            def chat() -> bytes:
                return json.dumps(as_chat(self.request, history, session)).encode()

            self._body = await ctx.in_thread(size + num_bytes, chat)

    def take_body(self) -> bytes:
        """It is read once, and then is no more."""
        body, self._body = self._body, b""
        return body

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
        return await self._responses.keep(self.tenant, record, lists)

    def _format(
        self, ctx: ApiContext, plan: Plan, chat: ResponsesChat, request_id: str
    ) -> ResponseFormat:
        return ResponseFormat(ctx, plan, chat, self.response_id, self.keep)

    async def _history(
        self, take: Callable[[int], bool], most: int
    ) -> tuple[list[dict[str, Any]], int]:
        """The items, and of how many bytes they were read, `most` at the most."""
        turns: list[list[dict[str, Any]]] = []
        previous = self.request.previous_response_id
        num_bytes, limit = 0, self._responses.ctx.limits.max_body_bytes
        while previous is not None:
            data = await self._responses.read(self.tenant, previous)
            if len(turns) == MAX_TURNS or num_bytes + len(data) > most:
                if self.request.truncation != "auto":
                    raise invalid(
                        f"A conversation has at most {MAX_TURNS} turns that are read back, and"
                        f" {limit} bytes: begin a new one, or ask for 'truncation': 'auto'",
                        param="previous_response_id",
                    )
                items = [item for turn in reversed(turns) for item in turn]
                return with_their_calls(items), num_bytes
            if not take(len(data)):
                raise overloaded("The bodies of other requests take all memory", 1.0)
            num_bytes += len(data)
            record = await self._responses.understood(previous, data)
            response = record["response"]
            if response["status"] not in ("completed", "incomplete"):
                raise invalid(f"The response '{previous}' is {response['status']}")
            self._root = record["root"]
            turns.append([*record["items"], *response["output"]])
            previous = response["previous_response_id"]
        return [item for turn in reversed(turns) for item in turn], num_bytes


class _Background:
    """A response that runs without a client. It is kept when it is done, whatever came of it."""

    def __init__(self, responses: Responses, call: _ResponseCall, scope: Scope) -> None:
        self.task: asyncio.Task[None] | None = None  # until its beginning has been kept
        self._cancelled = asyncio.Event()
        self._responses, self._call, self._scope = responses, call, scope
        self.tenant = call.tenant.name
        self._status, self._body = 0, b""

    async def run(self) -> None:
        call = self._call
        receive = _after_body(call.take_body(), self._disconnected)
        scope = {**self._scope, "state": dict(self._scope["state"])}
        try:
            await call.endpoint()(scope, receive, self._take)
        except Exception:
            _log.exception("response %s failed", call.response_id)
            self._status = 500
        if self._status == 200:
            return  # it was kept
        model = self._responses.ctx.model_name
        status = "cancelled" if self._cancelled.is_set() else "failed"
        response = begun(call.request, model, call.response_id, status)
        if status == "failed":
            response["error"] = self._error()
        await call.keep(response, EncodedLists())

    async def cancel(self) -> None:
        """Returns when it has ended, or after a while."""
        self._cancelled.set()
        if self.task is not None:
            await asyncio.wait([self.task], timeout=STOP_TIMEOUT_S)

    def _error(self) -> dict[str, Any]:
        if self._status in (0, 500):
            return {"code": "server_error", "message": "Internal error"}
        error = json.loads(self._body)["error"]
        return {"code": error["code"] or error["type"], "message": error["message"]}

    async def _disconnected(self) -> Message:
        await self._cancelled.wait()
        return {"type": "http.disconnect"}

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        else:
            self._body += message.get("body", b"")


def _read(body: bytes) -> ResponsesChat:
    with _in_own_words():
        return parse(ResponsesChat, body)


async def _plan(ctx: ApiContext, chat: ResponsesChat, tenant: Tenant) -> Plan:
    with _in_own_words():
        prompt = None
        if chat.asked.truncation == "auto":
            chat, prompt = await truncated(ctx, chat)
        return await plan_chat(ctx, chat, tenant, prompt)


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


def _after_body(body: bytes, receive: Receive) -> Receive:
    """Receives `body`, then what `receive` does."""
    unread: bytes | None = body
    del body

    async def received() -> Message:
        nonlocal unread
        if unread is None:
            return await receive()
        given, unread = unread, None
        return {"type": "http.request", "body": given, "more_body": False}

    return received


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError
