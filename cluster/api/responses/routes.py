"""`/v1/responses`: make one, ask for it again, delete it, cancel it.

A response that runs in the background is served by the same endpoint to nobody: it ends when it is
done, when it is cancelled, or with the server. What would be refused in the foreground is refused
before its client is told that it runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid, overloaded
from kvrelay.cluster.api.incoming import caller, held_body, page_of, utility_call
from kvrelay.cluster.api.openai.formats import Format
from kvrelay.cluster.api.openai.logprobs import EncodedLists
from kvrelay.cluster.api.openai.parts import Plan
from kvrelay.cluster.api.openai.plan import chat_prompt, plan_chat
from kvrelay.cluster.api.openai.respond import GenerateEndpoint
from kvrelay.cluster.api.openai.schema import parse
from kvrelay.cluster.api.responses.background import (
    Background,
    after_body,
    event_stream,
    first_event,
    inner,
)
from kvrelay.cluster.api.responses.conversations import (
    PREFIX,
    Conversations,
    Remembered,
    check_size,
    input_item,
)
from kvrelay.cluster.api.responses.format import CompactFormat, ResponseFormat, begun
from kvrelay.cluster.api.responses.schema import (
    CompactRequest,
    ResponsesChat,
    ResponsesRequest,
    as_chat,
    check_outputs,
    is_reference,
)
from kvrelay.cluster.api.responses.truncation import truncated, with_their_calls
from kvrelay.cluster.api.responses.websocket import ResponsesSocket
from kvrelay.cluster.api.tenants import Tenant

MAX_TURNS = 2000  # of a conversation that is read back
MAX_BACKGROUND = 64  # of one tenant
LOST_AFTER_S = 5.0  # beyond its timeout one in the background cannot run, wherever it does
COMPACT_SHARE = 8  # of the context, that a summary may have
SUM_UP = (
    "Write a summary of this conversation, for an assistant that is to go on with it and sees "
    "nothing else of it: what the user wants, what was decided, found and done, with names, paths "
    "and numbers, and what comes next. Write only the summary."
)
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_\d+")
_CHAT_NAMES = {"messages": "input", "response_format": "text.format"}
_log = logging.getLogger("kvrelay.api")


def response_routes(ctx: ApiContext) -> list[BaseRoute]:
    calls = Responses(ctx)
    path = "/v1/responses/{id}"
    return [
        Route("/v1/responses", calls, methods=["POST"]),
        WebSocketRoute("/v1/responses", ResponsesSocket(ctx, calls.read).__call__),
        Route("/v1/responses/compact", Compaction(calls), methods=["POST"]),
        Route("/v1/responses/input_tokens", calls.count, methods=["POST"]),
        *calls.conversations.routes(),
        Route(path, calls.show, methods=["GET"]),
        Route(path, calls.delete, methods=["DELETE"]),
        Route(f"{path}/cancel", calls.cancel, methods=["POST"]),
        Route(f"{path}/input_items", calls.items, methods=["GET"]),
    ]


class Responses:
    """Owned by the application."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx
        self._background: dict[str, Background] = {}
        self.conversations = Conversations(ctx)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        try:
            tenant = caller(self._ctx, http)
            async with held_body(self._ctx, http) as body:
                call = await self.read(body, tenant, f"resp_{scope['state']['request_id']}")
                del body
        except ClientDisconnect:
            return
        if call.request.background:
            answer = await self._start(call, scope)
            await answer(scope, receive, send)
            return
        await call.endpoint()(inner(scope), call.receive(receive), send)

    async def read(
        self, body: bytes, tenant: Tenant, response_id: str, remembered: Remembered | None = None
    ) -> ResponseCall:
        """Raises `ApiError`."""
        request = await self._ctx.in_thread(len(body), parse, ResponsesRequest, body)
        call = ResponseCall(self, request, tenant, response_id, remembered)
        await call.prepare(len(body))
        return call

    async def count(self, http: Request) -> Response:
        """Of what a response would be asked with, the tokens."""
        response_id = f"resp_{http.scope['state']['request_id']}"
        try:
            with utility_call(self._ctx, http) as tenant:
                async with held_body(self._ctx, http) as body:
                    call = await self.read(body, tenant, response_id)
                    chat = await self._ctx.in_thread(len(call.body), _read, call.body)
                    with _in_own_words():
                        tokens = (await chat_prompt(self._ctx, chat)).tokens
        except ClientDisconnect:
            return Response(status_code=400)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(tokens)})

    async def show(self, http: Request) -> Response:
        with utility_call(self._ctx, http):
            record = await self.record(http)
            if http.query_params.get("stream") == "true":
                return self._again(record, first_event(http))
            return await asyncio.to_thread(JSONResponse, record["response"])

    def _again(self, record: dict[str, Any], first: int) -> Response:
        """The events of a stream in the background, from number `first`. Raises `ApiError`."""
        response_id = record["response"]["id"]
        running = self._background.get(response_id)
        if running is not None and running.is_streamed:
            return event_stream(running.events(first))
        if "events" not in record:
            raise invalid(
                f"The response '{response_id}' has no stream to be read again: it was not asked for"
                " with 'background' and 'stream', it is too large, or it runs at another router",
                param="stream",
            )

        async def kept() -> AsyncIterator[bytes]:
            for event in record["events"][first:]:
                yield event.encode()

        return event_stream(kept())

    async def items(self, http: Request) -> Response:
        with utility_call(self._ctx, http):
            record = await self.record(http)
            return await asyncio.to_thread(
                lambda: JSONResponse(page_of(http, _asked_items(record)))
            )

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
        return await self.understood(response_id, await self.stored(tenant, response_id))

    async def stored(self, tenant: Tenant, response_id: str) -> bytes:
        """A record as it is kept. Raises `ApiError` (404)."""
        found = await asyncio.to_thread(self._ctx.responses.get, tenant.name, response_id)
        if found is None:
            raise unknown(response_id)
        return found

    async def understood(self, response_id: str, data: bytes) -> dict[str, Any]:
        """Raises `ApiError` (404): it is the record of something else."""
        record: dict[str, Any] = await self._ctx.in_thread(len(data), json.loads, data)
        if "response" not in record:
            raise unknown(response_id)
        response = record["response"]
        runs_until = response["created_at"] + self._ctx.settings.request_timeout_s + LOST_AFTER_S
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

    async def _start(self, call: ResponseCall, scope: Scope) -> Response:
        """What the client is answered. Raises `ApiError`."""
        if not call.request.is_kept:
            raise invalid("'background': a response in the background is stored", "background")
        mine = [each for each in self._background.values() if each.tenant == call.tenant.name]
        if len(mine) >= MAX_BACKGROUND:
            raise overloaded(f"{MAX_BACKGROUND} responses run in the background, the limit", 1.0)
        model, response_id = self._ctx.model_name, call.response_id
        response = begun(call.request, model, response_id, "in_progress")
        running = Background(self._ctx, call, scope, call.tenant.name)
        self._background[response_id] = running
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
        return event_stream(running.events(0)) if running.is_streamed else JSONResponse(response)


class ResponseCall:
    def __init__(
        self,
        responses: Responses,
        request: ResponsesRequest,
        tenant: Tenant,
        response_id: str,
        remembered: Remembered | None = None,
    ) -> None:
        self.request, self.response_id = request, response_id
        self.on_planned: Callable[[], None] = lambda: None  # it is about to be submitted
        self.may_settle: asyncio.Event | None = None  # once set, its end may be kept; None: at once
        self.has_settled = False
        self._responses, self.tenant = responses, tenant
        self._remembered = remembered
        self._before: list[dict[str, Any]] = []  # items of earlier turns
        self._root = response_id  # the conversation's first response, or its name
        self.body = b""
        self._num_bytes = 0  # of it

    async def prepare(self, size: int) -> None:
        """Read back what came before. size: of what is asked, in bytes. Raises `ApiError`."""
        ctx = self._responses.ctx
        self.request.input = await self._resolved(self.request.input)
        with ctx.bodies.share() as take:
            history, num_bytes = await self._history(take, ctx.settings.max_body_bytes - size)
            self._before = history
            if history and self.request.truncation != "auto":
                check_outputs(history, self.request.input)
            session = self._root if self.request.is_kept else None

            def chat() -> bytes:
                return json.dumps(as_chat(self.request, history, session)).encode()

            self.body = await ctx.in_thread(size + num_bytes, chat)
        self._num_bytes = len(self.body)

    def items(self) -> list[dict[str, Any]]:
        """All that the model is to read, once it is prepared."""
        return [*self._before, *self.request.input]

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

    async def _settle(self, response: dict[str, Any], lists: EncodedLists) -> bool:
        if self.may_settle is not None:
            await self.may_settle.wait()
        await self._hand_on(response)
        self.has_settled = await self.keep(response, lists)
        return self.has_settled

    async def _hand_on(self, response: dict[str, Any]) -> None:
        """To what may be continued beside the store."""
        if self.request.conversation is not None:
            said = [_without_logprobs(item) for item in response["output"]]
            asked = _asked_items({"response": response, "items": self.request.input})
            conversations = self._responses.conversations
            try:
                await conversations.append(self.tenant, self.request.conversation, asked + said)
            except (ApiError, sqlite3.Error):  # it is deleted, or full: the answer is as good
                _log.warning("response %s is not in its conversation", self.response_id)
        if not self.request.is_kept:
            await self.remember(response)

    async def remember(self, response: dict[str, Any]) -> None:
        """For the next on the same connection, if it is one that others come on."""
        if self._remembered is not None and self._num_bytes <= self._remembered.max_bytes:
            said = [_without_logprobs(item) for item in response["output"]]
            self._remembered.put(self.response_id, [*self.items(), *said])

    def receive(self, after: Receive) -> Receive:
        """The body of the chat that the request means, once, then what `after` receives."""
        body, self.body = self.body, b""
        return after_body(body, after)

    async def keep_events(self, events: list[bytes]) -> None:
        """With the response that has been kept, if it is still there."""

        def with_events(found: bytes | None) -> bytes | None:
            if found is None:
                return None
            told = [event.decode() for event in events]
            return json.dumps(json.loads(found) | {"events": told}).encode()

        update = self._responses.ctx.responses.update
        try:
            await asyncio.to_thread(update, self.tenant.name, self.response_id, with_events)
        except sqlite3.Error:
            _log.exception("the stream of response %s is not kept", self.response_id)

    def _format(
        self, ctx: ApiContext, plan: Plan, chat: ResponsesChat, request_id: str
    ) -> ResponseFormat:
        self.on_planned()
        return ResponseFormat(ctx, plan, chat, self.response_id, self._settle)

    async def _resolved(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With the items in their places that are only named. Raises `ApiError` (400, 404)."""
        found: dict[str, dict[str, Any]] = {}  # by id
        tried: set[str] = set()
        for item in items:
            name = item.get("id")
            if not is_reference(item) or name in found:
                continue
            match = _ITEM_ID.fullmatch(name) if isinstance(name, str) else None
            if match is not None and match[1] not in tried:
                tried.add(match[1])
                if len(tried) > MAX_TURNS:
                    raise invalid(f"'input' names items of more than {MAX_TURNS} responses")
                found |= {kept["id"]: kept for kept in await self._items_of(match[1])}
            if name not in found:
                message = f"Item with id {str(name)[:100]!r} not found: it was not stored"
                raise ApiError(404, message, param="input", code="item_not_found")
        return [found[item["id"]] if is_reference(item) else item for item in items]

    async def _items_of(self, name: str) -> list[dict[str, Any]]:
        """Of a response or a conversation whose ids end in `name`."""
        with suppress(ApiError):
            record = await self._responses.find(self.tenant, f"resp_{name}")
            return [*_asked_items(record), *record["response"]["output"]]
        with suppress(ApiError):
            record = await self._responses.conversations.find(self.tenant, f"{PREFIX}{name}")
            items: list[dict[str, Any]] = record["items"]
            return items
        return []

    async def _history(
        self, take: Callable[[int], bool], most: int
    ) -> tuple[list[dict[str, Any]], int]:
        """The items, and of how many bytes they were read, `most` at the most."""
        previous, conversation = self.request.previous_response_id, self.request.conversation
        if previous is not None and conversation is not None:
            message = "'conversation' and 'previous_response_id': a response continues one of them"
            raise invalid(message, param="conversation")
        if conversation is not None:
            self._root = conversation
            record = await self._responses.conversations.find(self.tenant, conversation)
            items = [*record["items"], *self.request.input]
            return record["items"], await asyncio.to_thread(check_size, items)
        remembered = self._remembered and previous and self._remembered.get(previous)
        if remembered:
            return remembered, most
        return await self._turns(previous, take, most)

    async def _turns(
        self, previous: str | None, take: Callable[[int], bool], most: int
    ) -> tuple[list[dict[str, Any]], int]:
        """Those of the stored responses that `previous` ends."""
        turns: list[list[dict[str, Any]]] = []
        num_bytes = 0
        while previous is not None:
            try:
                data = await self._responses.stored(self.tenant, previous)
                is_more = len(turns) == MAX_TURNS or num_bytes + len(data) > most
                if is_more and self.request.truncation == "auto":
                    items = [item for turn in reversed(turns) for item in turn]
                    return with_their_calls(items), num_bytes
                if not is_more and take(len(data)):
                    record = await self._responses.understood(previous, data)
                elif not is_more:
                    raise overloaded("The bodies of other requests take all memory", 1.0)
            except ApiError as error:
                if error.status != 404:
                    raise
                message = f"Previous response with id '{previous[:100]}' not found."
                code = "previous_response_not_found"
                raise invalid(message, "previous_response_id", code) from None
            if is_more:
                limit = self._responses.ctx.settings.max_body_bytes
                raise invalid(
                    f"A conversation has at most {MAX_TURNS} turns that are read back, and"
                    f" {limit} bytes: begin a new one, or ask for 'truncation': 'auto'",
                    param="previous_response_id",
                )
            num_bytes += len(data)
            response = record["response"]
            if response["status"] not in ("completed", "incomplete"):
                raise invalid(f"The response '{previous}' is {response['status']}")
            self._root = record["root"]
            turns.append([*record["items"], *response["output"]])
            previous = response["previous_response_id"]
        return [item for turn in reversed(turns) for item in turn], num_bytes


class Compaction:
    """`/v1/responses/compact`: the model sums a conversation up, to be gone on with."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ctx, http = self._responses.ctx, Request(scope, receive)
        try:
            tenant = caller(ctx, http)
            async with held_body(ctx, http) as body:
                size = len(body)
                asked = await ctx.in_thread(size, parse, CompactRequest, body)
        except ClientDisconnect:
            return
        # The oldest is left out of a conversation that does not fit: it is compacted for that.
        request = ResponsesRequest(
            model=asked.model,
            input=[*asked.input, {"role": "user", "content": SUM_UP}],
            instructions=asked.instructions,
            previous_response_id=asked.previous_response_id,
            prompt_cache_key=asked.prompt_cache_key,
            max_output_tokens=max(1, ctx.max_model_len // COMPACT_SHARE),
            store=False,
            truncation="auto",
        )
        response_id = f"resp_{scope['state']['request_id']}"
        call = ResponseCall(self._responses, request, tenant, response_id)
        await call.prepare(size)
        items = call.items()[:-1]
        said = [
            input_item(item, f"msg_{response_id.removeprefix('resp_')}_{i}")
            for i, item in enumerate(items)
            if (item.get("type") or "message") == "message" and item.get("role") == "user"
        ]

        def format(_: ApiContext, plan: Plan, chat: ResponsesChat, request_id: str) -> Format:
            return CompactFormat(plan, response_id, said)

        endpoint = GenerateEndpoint(ctx, "responses", _read, _plan, format)
        await endpoint(inner(scope), call.receive(receive), send)


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


def _asked_items(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What a response was asked with, each item by an id that says where it is kept."""
    name = record["response"]["id"].removeprefix("resp_")
    return [input_item(item, f"item_{name}_{i}") for i, item in enumerate(record["items"])]


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """Of an answer, as a history needs it."""
    parts = item.get("content")
    if not isinstance(parts, list):
        return item
    plain = [part | {"logprobs": []} if "logprobs" in part else part for part in parts]
    return item | {"content": plain}


def unknown(response_id: str) -> ApiError:
    message = f"Response with id '{response_id[:100]}' not found."
    return ApiError(404, message, param="id", code="response_not_found")
