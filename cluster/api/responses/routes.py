"""`/v1/responses`: make one, ask for it again, delete it, cancel it.

A response that runs in the background is served by the same endpoint to nobody: it ends when it is
done, when it is cancelled, or with the server.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from cluster.api.context import ApiContext
from cluster.api.errors import ApiError, invalid
from cluster.api.incoming import caller, read_body
from cluster.api.openai.plan import Plan, plan_chat
from cluster.api.openai.respond import GenerateEndpoint, error_response
from cluster.api.openai.schema import parse
from cluster.api.responses.format import ResponseFormat, begun
from cluster.api.responses.schema import ResponsesChat, ResponsesRequest, as_chat
from cluster.api.tenants import Tenant

MAX_TURNS = 2000  # of a conversation that is read back
MAX_BACKGROUND = 64


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
            request = parse(ResponsesRequest, await read_body(http, self._ctx.limits))
            call = _ResponseCall(self, request, tenant, f"resp_{scope['state']['request_id']}")
            await call.prepare()
            if request.background:
                await self._start(call, scope, send)
                return
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await call.endpoint()(scope, _after_body(call.body, receive), send)

    async def show(self, http: Request) -> Response:
        return JSONResponse((await self.record(http))["response"])

    async def items(self, http: Request) -> Response:
        record = await self.record(http)
        data = [{"id": f"item_{i}", **item} for i, item in enumerate(record["items"])]
        return JSONResponse({"object": "list", "data": data, "has_more": False})

    async def delete(self, http: Request) -> Response:
        tenant, response_id = caller(self._ctx, http), http.path_params["id"]
        delete = self._ctx.responses.delete
        if not await asyncio.to_thread(delete, tenant.name, response_id):
            raise unknown(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, http: Request) -> Response:
        record = await self.record(http)
        response_id = http.path_params["id"]
        running = self._background.get(response_id)
        if running is not None:
            running.cancelled.set()
            await asyncio.wait([running.task], timeout=5.0)
            record = await self.record(http)
        elif not record["response"].get("background"):
            raise invalid(f"The response '{response_id}' does not run in the background")
        return JSONResponse(record["response"])

    async def record(self, http: Request) -> dict[str, Any]:
        """Raises `ApiError` (401, 404)."""
        return await self.find(caller(self._ctx, http), http.path_params["id"])

    async def find(self, tenant: Tenant, response_id: str) -> dict[str, Any]:
        """Raises `ApiError` (404)."""
        found = await asyncio.to_thread(self._ctx.responses.get, tenant.name, response_id)
        if found is None:
            raise unknown(response_id)
        record: dict[str, Any] = json.loads(found)
        return record

    async def keep(self, tenant: Tenant, record: dict[str, Any]) -> None:
        data, response_id = json.dumps(record).encode(), record["response"]["id"]
        await asyncio.to_thread(self._ctx.responses.put, tenant.name, response_id, data)

    @property
    def ctx(self) -> ApiContext:
        return self._ctx

    async def _start(self, call: _ResponseCall, scope: Scope, send: Send) -> None:
        if not call.request.is_kept or call.request.stream:
            raise invalid("'background': a response in the background is stored and not streamed")
        if len(self._background) >= MAX_BACKGROUND:
            raise ApiError(429, f"{MAX_BACKGROUND} responses run in the background, the limit")
        model = self._ctx.model_name
        response = begun(call.request, model, call.response_id, "in_progress")
        await call.keep(response)
        running = _Background(self, call, scope)
        self._background[call.response_id] = running
        running.task.add_done_callback(lambda _: self._background.pop(call.response_id, None))
        await JSONResponse(response)(scope, _never, send)


class _ResponseCall:
    def __init__(
        self, responses: Responses, request: ResponsesRequest, tenant: Tenant, response_id: str
    ) -> None:
        self.request, self.response_id = request, response_id
        self._responses, self._tenant = responses, tenant
        self._root = response_id  # the conversation's first response
        self.body = b""

    async def prepare(self) -> None:
        """Read back what came before. Raises `ApiError`."""
        history = await self._history()
        session = self._root if self.request.is_kept else None
        self.body = json.dumps(as_chat(self.request, history, session)).encode()

    def endpoint(self) -> GenerateEndpoint[ResponsesChat]:
        return GenerateEndpoint(
            self._responses.ctx,
            "responses",
            lambda body: parse(ResponsesChat, body),
            plan_chat,
            self._format,
        )

    async def keep(self, response: dict[str, Any]) -> None:
        if self.request.is_kept:
            record = {"response": response, "items": self.request.input, "root": self._root}
            await self._responses.keep(self._tenant, record)

    def _format(
        self, ctx: ApiContext, plan: Plan, chat: ResponsesChat, request_id: str
    ) -> ResponseFormat:
        return ResponseFormat(ctx, plan, chat, self.response_id, self.keep)

    async def _history(self) -> list[dict[str, Any]]:
        turns: list[list[dict[str, Any]]] = []
        previous = self.request.previous_response_id
        while previous is not None:
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
    """A response that runs without a client. It is kept when it is done, whatever came of it."""

    def __init__(self, responses: Responses, call: _ResponseCall, scope: Scope) -> None:
        self.cancelled = asyncio.Event()
        self._responses, self._call, self._scope = responses, call, scope
        self._status, self._body = 0, b""
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        call = self._call
        receive = _after_body(call.body, self._disconnected)
        await call.endpoint()(
            {**self._scope, "state": dict(self._scope["state"])}, receive, self._take
        )
        if self._status == 200:
            return  # it was kept
        model = self._responses.ctx.model_name
        status = "cancelled" if self.cancelled.is_set() else "failed"
        response = begun(call.request, model, call.response_id, status)
        if status == "failed" and self._body:
            response["error"] = json.loads(self._body)["error"]
        await call.keep(response)

    async def _disconnected(self) -> Message:
        await self.cancelled.wait()
        return {"type": "http.disconnect"}

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        else:
            self._body += message.get("body", b"")


def unknown(response_id: str) -> ApiError:
    message = f"Response with id '{response_id[:100]}' not found."
    return ApiError(404, message, param="id", code="response_not_found")


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


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError
