"""`/v1/responses`: make one, ask for it again, delete it, cancel it.

A response that runs in the background is served by the same endpoint to nobody: it ends when it is
done, when it is cancelled, or with the server. What would be refused in the foreground is refused
before its client is told that it runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid, overloaded, renamed
from kvrelay.cluster.api.http.route import ApiRoute, ApiWebSocketRoute
from kvrelay.cluster.api.incoming import caller, counted, held_body, page_of, utility_call
from kvrelay.cluster.api.limiter import CALLER, Shares
from kvrelay.cluster.api.openai.formats import Format
from kvrelay.cluster.api.openai.parts import Plan
from kvrelay.cluster.api.openai.plan import call_name, chat_prompt
from kvrelay.cluster.api.openai.schema import parse
from kvrelay.cluster.api.responses.background import Background, event_stream, first_event
from kvrelay.cluster.api.responses.call import (
    KeptResponses,
    ResponseCall,
    asked_items,
    unknown,
)
from kvrelay.cluster.api.responses.conversations import Remembered, input_item
from kvrelay.cluster.api.responses.format import CompactFormat, begun
from kvrelay.cluster.api.responses.schema import (
    CHAT_NAMES,
    CompactRequest,
    ResponsesChat,
    ResponsesRequest,
)
from kvrelay.cluster.api.responses.websocket import ResponsesSocket
from kvrelay.cluster.api.tenants import Tenant

MAX_BACKGROUND = 64  # a tenant's, shared by its addresses
Asked = TypeVar("Asked", bound=BaseModel)
SUM_UP = (
    "Write a summary of this conversation, for an assistant that is to go on with it and sees "
    "nothing else of it: what the user wants, what was decided, found and done, with names, paths "
    "and numbers, and what comes next. Write only the summary."
)


def response_routes(ctx: ApiContext) -> list[BaseRoute]:
    calls = Responses(ctx)
    path = "/v1/responses/{id}"
    return [
        ApiRoute(
            "POST", "/v1/responses", calls, "Answer items, and keep the response", ResponsesRequest
        ),
        ApiWebSocketRoute("/v1/responses", ResponsesSocket(ctx, calls.read).__call__),
        ApiRoute(
            "POST",
            "/v1/responses/compact",
            Compaction(ctx, calls.kept),
            "Sum a conversation up",
            CompactRequest,
        ),
        ApiRoute(
            "POST",
            "/v1/responses/input_tokens",
            calls.count,
            "Tokens of a prompt",
            ResponsesRequest,
        ),
        *calls.kept.conversations.routes(),
        ApiRoute("GET", path, calls.show, "A response that was kept"),
        ApiRoute("DELETE", path, counted(ctx, calls.delete), "Forget a response"),
        ApiRoute("POST", f"{path}/cancel", counted(ctx, calls.cancel), "End one in the background"),
        ApiRoute(
            "GET",
            f"{path}/input_items",
            counted(ctx, calls.items),
            "What a response was asked with",
        ),
    ]


class Responses:
    """Owned by the application."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx
        self._background: dict[str, Background] = {}
        self.kept = KeptResponses(ctx, self._background.__contains__)

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
        await call.serve(scope, receive, send)

    async def read(
        self, body: bytes, tenant: Tenant, response_id: str, remembered: Remembered | None = None
    ) -> ResponseCall:
        """Raises `ApiError`."""
        request, name = await self._ctx.in_json_thread(len(body), _named, ResponsesRequest, body)
        call = ResponseCall(self.kept, request, tenant, response_id, remembered)
        await call.prepare(len(body), name)
        return call

    async def count(self, http: Request) -> Response:
        """Counts the tokens that a response would be asked with."""
        response_id = f"resp_{http.scope['state']['request_id']}"
        try:
            with utility_call(self._ctx, http) as tenant:
                async with held_body(self._ctx, http) as body:
                    call = await self.read(body, tenant, response_id)
                    with renamed(CHAT_NAMES):
                        tokens = (await chat_prompt(call.model, call.chat, tenant)).tokens
        except ClientDisconnect:
            return Response(status_code=400)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(tokens)})

    async def show(self, http: Request) -> Response:
        with utility_call(self._ctx, http) as tenant:
            record, size = await self._record(http, tenant)
            if http.query_params.get("stream") == "true":
                return self._again(record, first_event(http))
            return await self._ctx.in_json_thread(size, JSONResponse, record["response"])

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

    async def items(self, http: Request, tenant: Tenant) -> Response:
        record, size = await self._record(http, tenant)
        shown = lambda: JSONResponse(page_of(http, asked_items(record)))  # noqa: E731
        return await self._ctx.in_json_thread(size, shown)

    async def delete(self, http: Request, tenant: Tenant) -> Response:
        response_id = http.path_params["id"]
        await self.kept.find(tenant, response_id)
        running = self._background.get(response_id)
        if running is not None:
            await running.cancel()
        delete = self._ctx.responses.delete
        if not await self._ctx.store.write(delete, tenant.name, response_id):
            raise unknown(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, http: Request, tenant: Tenant) -> Response:
        record, size = await self._record(http, tenant)
        response_id = http.path_params["id"]
        running = self._background.get(response_id)
        if running is not None:
            await running.cancel()
            record, size = await self._record(http, tenant)
        elif not record["response"].get("background"):
            raise invalid(
                f"'{response_id}': Cannot cancel a synchronous response."
            )  # OpenAI's words
        return await self._ctx.in_json_thread(size, JSONResponse, record["response"])

    async def _record(self, http: Request, tenant: Tenant) -> tuple[dict[str, Any], int]:
        """Returns it, and how many bytes it was read from. Raises `ApiError` (404)."""
        response_id = http.path_params["id"]
        data = await self.kept.stored(tenant, response_id)
        return await self.kept.understood(response_id, data), len(data)

    def _check_background(self, tenant: Tenant) -> None:
        """Raises `ApiError` (429) where another would be more than its caller's share."""
        places, own = Shares(MAX_BACKGROUND), CALLER.get()[-1:]
        mine = [each for each in self._background.values() if each.tenant == tenant.name]
        for each in mine:
            places.hold(each.caller[-1:])
        if places.has_room(own):
            return
        message = f"{MAX_BACKGROUND} responses run in the background, the limit"
        if len(mine) < MAX_BACKGROUND:
            message = f"{places.of(own)} responses of this caller run in the background, its share"
            message += f" of {MAX_BACKGROUND}"
        raise overloaded(message, 1.0)

    async def _start(self, call: ResponseCall, scope: Scope) -> Response:
        """Returns what the client is answered. Raises `ApiError`."""
        if not call.request.is_kept:
            raise invalid(
                "'background': background can only be used when `store` is true", "background"
            )
        self._check_background(call.tenant)
        model, response_id = call.model.shown_model(call.request.model), call.response_id
        response = begun(call.request, model, response_id, "in_progress")
        running = Background(self._ctx, call, scope, call.tenant.name)
        self._background[response_id] = running
        running.task.add_done_callback(lambda _: self._background.pop(response_id, None))
        try:
            await running.admitted.wait()
            if running.refusal is not None:
                return running.refusal
            if why := await call.keep(response):
                message = f"Responses cannot be stored now: {why}"
                raise ApiError(503, message, type="server_error")
        except BaseException:
            running.task.cancel()
            raise
        running.is_kept.set()
        if running.is_streamed:
            return event_stream(running.events(0))
        return JSONResponse(response | {"status": "queued"})  # OpenAI's, of what was just accepted


def _named(kind: type[Asked], body: bytes) -> tuple[Asked, bytes]:
    """What a body asks for, and its name. Raises `ApiError` (400)."""
    return parse(kind, body), call_name(body)


class Compaction:
    """`/v1/responses/compact`: the model sums a conversation up, to be gone on with."""

    def __init__(self, ctx: ApiContext, kept: KeptResponses) -> None:
        self._ctx, self._kept = ctx, kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ctx, http = self._ctx, Request(scope, receive)
        try:
            tenant = caller(ctx, http)
            async with held_body(ctx, http) as body:
                asked, name = await ctx.in_json_thread(len(body), _named, CompactRequest, body)
                size = len(body)
                del body
        except ClientDisconnect:
            return
        own = {
            "input": [*asked.input, {"role": "user", "content": SUM_UP}],
            "store": False,
        }
        given = {name: getattr(asked, name) for name in CompactRequest.model_fields}
        request = ResponsesRequest(**given | own)
        response_id = f"resp_{scope['state']['request_id']}"
        call = ResponseCall(self._kept, request, tenant, response_id)
        await call.prepare(size, name)
        items = call.items()[:-1]
        said = [
            input_item(item, f"msg_{response_id.removeprefix('resp_')}_{i}")
            for i, item in enumerate(items)
            if (item.get("type") or "message") == "message" and item.get("role") == "user"
        ]

        def format(_: ApiContext, plan: Plan, chat: ResponsesChat, request_id: str) -> Format:
            return CompactFormat(plan, response_id, said)

        await call.answer(format)(scope, receive, send)
