"""The FastAPI application: its routes, its errors, and an id for every call.

All that can be wrong is answered in OpenAI's error format, also unknown paths and methods; to who
calls Anthropic's API, in Anthropic's. A bug of ours is logged with its traceback and answered with
a 500 that does not show it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay.cluster.api.access import AccessLog
from kvrelay.cluster.api.anthropic.routes import MESSAGES, message_routes, refuse
from kvrelay.cluster.api.batches.routes import BatchCalls
from kvrelay.cluster.api.calls import client_request_id
from kvrelay.cluster.api.console.routes import Console
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.explain import explanation_routes
from kvrelay.cluster.api.http.route import ApiRoute, ApiWebSocketRoute
from kvrelay.cluster.api.http.site import SiteCheck
from kvrelay.cluster.api.keys.routes import key_routes
from kvrelay.cluster.api.metrics import CLIENT_GONE, INTERNAL_ERROR, ApiMetrics
from kvrelay.cluster.api.openai.chats import ChatsFormat, ChatsRequest, plan_chats
from kvrelay.cluster.api.openai.embeddings import (
    EmbeddingFormat,
    EmbeddingRequest,
    RerankFormat,
    RerankRequest,
    ScoreFormat,
    ScoreRequest,
    plan_embeddings,
)
from kvrelay.cluster.api.openai.formats import ChatFormat, CompletionFormat
from kvrelay.cluster.api.openai.plan import plan_chat, plan_completion
from kvrelay.cluster.api.openai.respond import GenerateEndpoint, error_response
from kvrelay.cluster.api.openai.schema import ChatRequest, CompletionRequest, parse
from kvrelay.cluster.api.openai.token_calls import token_call_routes
from kvrelay.cluster.api.operations import operation_routes
from kvrelay.cluster.api.responses.routes import response_routes
from kvrelay.cluster.api.sessions import session_routes
from kvrelay.cluster.api.utility.adapters import adapter_routes
from kvrelay.cluster.api.utility.model_list import PATH as MODELS
from kvrelay.cluster.api.utility.model_list import VERSION_HEADER, model_list_routes
from kvrelay.cluster.api.utility.models import changing_routes
from kvrelay.cluster.api.utility.openapi import document_routes
from kvrelay.cluster.api.utility.tokens import token_routes
from kvrelay.cluster.api.utility.weights import weight_routes
from kvrelay.engine.logs import REQUEST

_log = logging.getLogger("kvrelay.api")
_NAMED = (b"x-request-id",)
_NEAR = "How near texts are to each other"
_RANK = "Documents by how near they are to a query"


class _RequestIds:
    """Outermost: names each call, counts how it was answered, and stands between a bug and the
    client. The answer's header and the log have the name that the client gives its request, if it
    gives one. A slash at the end of a path of the API means nothing."""

    def __init__(self, app: ASGIApp, access: AccessLog, metrics: ApiMetrics) -> None:
        self._app = app
        self._access = access
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._count_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith("/v1/") and scope["path"].endswith("/"):
            scope["path"] = scope["path"].rstrip("/")
        request_id, began_at = uuid.uuid4().hex, time.monotonic()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        client_id = client_request_id(Headers(scope=scope))
        shown_id = client_id or request_id
        token = REQUEST.set(f"{client_id}/{request_id}" if client_id else request_id)
        status, ended = 0, state.setdefault("ended", [])

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = (b"x-request-id", b"request-id") if _is_anthropic(scope) else _NAMED
                more = [(name, shown_id.encode()) for name in named]
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        except Exception:
            _log.exception("request %s (%s) failed", shown_id, request_id)
            self._count_bug(scope)
            if status:
                raise  # the server closes the connection: the client sees that the answer is cut
            bug = ApiError(500, f"Internal error; request {shown_id}", type="server_error")
            await _error_response(scope, bug)(scope, receive, named_send)
        finally:
            if self._access.is_on and not state.get("is_logged"):
                elapsed_s = time.monotonic() - began_at
                self._access.write(scope, status, elapsed_s, state.get("outcome", ""))
            if status == 200 and ended:  # the head of a stream, and what became of it
                status = ended[0].status
            self._metrics.answered(_template(scope), scope["method"], status or CLIENT_GONE)
            REQUEST.reset(token)

    def _count_bug(self, scope: Scope) -> None:
        """Unless a call that generates has done so."""
        scope["state"]["outcome"] = INTERNAL_ERROR
        if not any(each.outcome == INTERNAL_ERROR for each in scope["state"]["ended"]):
            self._metrics.of("").count(_endpoint_of(scope), INTERNAL_ERROR, 500)

    async def _count_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def seen_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "websocket.http.response.start":
                status = message["status"]
            elif not status:
                status = 101 if message["type"] == "websocket.accept" else 403
            await send(message)

        scope.setdefault("state", {})["ended"] = []
        try:
            await self._app(scope, receive, seen_send)
        except Exception:
            status = 500
            self._count_bug(scope)
            raise
        finally:
            self._metrics.answered(_template(scope), "WEBSOCKET", status or CLIENT_GONE)


def create_app(ctx: ApiContext) -> FastAPI:
    """The application that serves `ctx`. Has to run in the loop of `ctx.client`."""
    console, batches = Console(ctx), BatchCalls(ctx)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        console.start()
        ctx.keys.start()
        batches.start(app.router.routes)
        yield
        await batches.close()
        await console.close()
        await ctx.keys.close()
        ctx.close()

    app = FastAPI(
        title="KVRelay", openapi_url=None, redirect_slashes=False, lifespan=lifespan, debug=False
    )
    if origins := ctx.settings.cors_origins.split():
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.add_middleware(
        SiteCheck, settings=ctx.settings, tenants=ctx.tenants, answer=_error_response
    )
    app.add_middleware(_RequestIds, access=ctx.access, metrics=ctx.metrics)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ApiError, partial(_on_api_error, ctx))
    app.router.routes += [
        *_generating_routes(ctx),
        *token_call_routes(ctx),
        *batches.routes(),
        *message_routes(ctx),
        *response_routes(ctx),
        *token_routes(ctx),
        *document_routes(ctx),
        *session_routes(ctx),
        *key_routes(ctx),
        *explanation_routes(ctx),
        *operation_routes(ctx),
        *adapter_routes(ctx),
        *weight_routes(ctx),
        *changing_routes(ctx),
        *console.routes(),
        *model_list_routes(ctx),
    ]
    return app


def _generating_routes(ctx: ApiContext) -> list[ApiRoute]:
    chat = GenerateEndpoint(ctx, "chat", partial(parse, ChatRequest), plan_chat, ChatFormat)
    chats = GenerateEndpoint(ctx, "chat", partial(parse, ChatsRequest), plan_chats, ChatsFormat)
    read_completion = partial(parse, CompletionRequest)
    completions = GenerateEndpoint(
        ctx, "completions", read_completion, plan_completion, CompletionFormat
    )
    embeddings = GenerateEndpoint(
        ctx, "embeddings", partial(parse, EmbeddingRequest), plan_embeddings, EmbeddingFormat
    )
    score = GenerateEndpoint(
        ctx, "score", partial(parse, ScoreRequest), plan_embeddings, ScoreFormat
    )
    rerank = GenerateEndpoint(
        ctx, "rerank", partial(parse, RerankRequest), plan_embeddings, RerankFormat
    )
    return [
        ApiRoute("POST", "/v1/chat/completions", chat, "Answer a conversation", ChatRequest),
        ApiRoute(
            "POST",
            "/v1/chat/completions/batch",
            chats,
            "Answer several conversations",
            ChatsRequest,
        ),
        ApiRoute("POST", "/v1/completions", completions, "Continue a text", CompletionRequest),
        ApiRoute("POST", "/v1/embeddings", embeddings, "Texts as vectors", EmbeddingRequest),
        *(ApiRoute("POST", path, score, _NEAR, ScoreRequest) for path in ("/v1/score", "/score")),
        *(
            ApiRoute("POST", f"{version}/rerank", rerank, _RANK, RerankRequest)
            for version in ("/v1", "/v2", "")
        ),
    ]


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answers unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    messages = {
        404: f"Unknown URL: {request.method} {path}",
        405: f"{request.method} is not allowed for {path}",
    }
    answer = ApiError(error.status_code, messages.get(error.status_code, str(error.detail)))
    response = _error_response(request.scope, answer)
    response.headers.update(error.headers or {})
    return response


async def _on_api_error(ctx: ApiContext, request: Request, error: Exception) -> Response:
    """Answers errors of every route but those that generate, which count how their calls end."""
    assert isinstance(error, ApiError)
    request.state.outcome = error.outcome
    ctx.metrics.of("").count(_endpoint_of(request.scope), error.outcome, error.status)
    return _error_response(request.scope, error)


def _template(scope: Scope) -> str:
    """The path of the route that took a call, as it was registered; "": none did."""
    route: ApiRoute | ApiWebSocketRoute | None = scope.get("route")
    return "" if route is None else route.path_format


def _endpoint_of(scope: Scope) -> str:
    """As a metric's label; clients do not invent new ones."""
    path = _template(scope)
    if path == f"{MESSAGES}/count_tokens":
        return "count_tokens"
    return path.removeprefix("/v1").split("/")[1] if path else ""


def _error_response(scope: Scope, error: ApiError) -> JSONResponse:
    """In the form of the API that is called."""
    return refuse(error) if _is_anthropic(scope) else error_response(error)


def _is_anthropic(scope: Scope) -> bool:
    """Whether the call is of Anthropic's API, by its path or, where both have it, by its header."""
    path: str = scope["path"]
    if path == MODELS or path.startswith(f"{MODELS}/"):
        return VERSION_HEADER in Headers(scope=scope)
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")
