"""The FastAPI application: its routes, its errors, and an id for every call.

All that can be wrong is answered in OpenAI's error format, also unknown paths and methods; below
`/v1/messages` in Anthropic's. A bug of ours is logged with its traceback and answered with a 500
that does not show it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay.cluster.api.access import AccessLog
from kvrelay.cluster.api.anthropic.routes import MESSAGES, message_routes, refuse
from kvrelay.cluster.api.batches.routes import BatchCalls
from kvrelay.cluster.api.calls import client_request_id
from kvrelay.cluster.api.console.routes import Console
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, unknown_model
from kvrelay.cluster.api.explain import explanation_routes
from kvrelay.cluster.api.incoming import caller, is_operator
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
from kvrelay.cluster.api.openai.formats import CompletionFormat
from kvrelay.cluster.api.openai.plan import plan_chat, plan_completion
from kvrelay.cluster.api.openai.respond import GenerateEndpoint, error_response
from kvrelay.cluster.api.openai.schema import ChatRequest, CompletionRequest, parse
from kvrelay.cluster.api.openai.stored import StoredChats, chat_format
from kvrelay.cluster.api.operations import operation_routes
from kvrelay.cluster.api.responses.routes import response_routes
from kvrelay.cluster.api.sessions import session_routes
from kvrelay.cluster.api.utility.adapters import adapter_routes
from kvrelay.cluster.api.utility.models import changing_routes
from kvrelay.cluster.api.utility.openapi import document_routes
from kvrelay.cluster.api.utility.tokens import token_routes
from kvrelay.cluster.api.utility.weights import weight_routes
from kvrelay.engine.logs import REQUEST

_log = logging.getLogger("kvrelay.api")


class _RequestIds:
    """Outermost: names each call, and stands between a bug and the client. The answer's header and
    the log have the name that the client gives its request, if it gives one. A slash at the end of
    a path of the API means nothing."""

    def __init__(self, app: ASGIApp, access: AccessLog) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
        status = 0

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (b"x-request-id", shown_id.encode())
                message = {**message, "headers": [*message.get("headers", []), header]}
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        except Exception:
            _log.exception("request %s (%s) failed", shown_id, request_id)
            if status:
                raise  # the server closes the connection: the client sees that the answer is cut
            bug = ApiError(500, f"Internal error; request {shown_id}", type="server_error")
            await _error_response(scope["path"], bug)(scope, receive, named_send)
        finally:
            if self._access.is_on and not state.get("is_logged"):
                elapsed_s = time.monotonic() - began_at
                self._access.write(scope, status, elapsed_s, state.get("outcome", ""))
            REQUEST.reset(token)


def create_app(ctx: ApiContext) -> FastAPI:
    """The application that serves `ctx`. Has to run in the loop of `ctx.client`."""
    console, batches = Console(ctx), BatchCalls(ctx)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        console.start()
        batches.start(app.router.routes)
        yield
        await batches.close()
        await console.close()
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
    app.add_middleware(_RequestIds, access=ctx.access)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ApiError, partial(_on_api_error, ctx))
    chat = GenerateEndpoint(ctx, "chat", partial(parse, ChatRequest), plan_chat, chat_format)
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
    app.router.routes += [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/chat/completions/batch", chats, methods=["POST"]),
        *StoredChats(ctx).routes(),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        *(Route(path, score, methods=["POST"]) for path in ("/v1/score", "/score")),
        *(Route(f"{version}/rerank", rerank, methods=["POST"]) for version in ("/v1", "/v2", "")),
        *batches.routes(),
        *message_routes(ctx),
        *response_routes(ctx),
        *token_routes(ctx),
        *document_routes(ctx),
        *session_routes(ctx),
        *explanation_routes(ctx),
        *operation_routes(ctx),
        *adapter_routes(ctx),
        *weight_routes(ctx),
        *changing_routes(ctx),
        *console.routes(),
        *_model_routes(ctx),
    ]
    return app


def _model_routes(ctx: ApiContext) -> list[Route]:
    created = int(time.time())

    def card(name: str, model: ApiContext, root: str, parent: str | None = None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "kvrelay",
            "root": root,
            "parent": parent,
            "max_model_len": model.max_model_len,
        }

    def cards_for(http: Request) -> dict[str, dict[str, Any]]:
        """As in vLLM and SGLang, `root` is the model that a name stands for, and an adapter's
        folder: that is for operators."""
        tenant, sees_paths = caller(ctx, http), is_operator(ctx, http)
        cards = {n: card(n, each, each.model_name) for n, each in ctx.names_for(tenant).items()}
        for name, (each, adapter) in ctx.adapters_for(tenant).items():
            root = adapter.source if sees_paths else name
            cards[name] = card(name, each, root, each.model_name)
        return cards

    async def models(http: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": list(cards_for(http).values())})

    async def model(http: Request) -> JSONResponse:
        cards, name = cards_for(http), http.path_params["name"]
        if name not in cards:
            raise unknown_model(name, cards)
        return JSONResponse(cards[name])

    return [
        Route("/v1/models", models, methods=["GET"]),  # and HEAD
        Route("/v1/models/{name:path}", model, methods=["GET"]),
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
    response = _error_response(request.url.path, answer)
    response.headers.update(error.headers or {})
    return response


async def _on_api_error(ctx: ApiContext, request: Request, error: Exception) -> Response:
    """Answers errors of every route but those that generate, which count how their calls end."""
    assert isinstance(error, ApiError)
    request.state.outcome = error.outcome
    ctx.metrics.of("").requests.labels(_endpoint_of(request.url.path), error.outcome).inc()
    return _error_response(request.url.path, error)


def _endpoint_of(path: str) -> str:
    """As a metric's label: a route was found for `path`, so clients do not invent new ones."""
    if path == f"{MESSAGES}/count_tokens":
        return "count_tokens"
    return path.removeprefix("/v1").split("/")[1]


def _error_response(path: str, error: ApiError) -> JSONResponse:
    """In the form of the API that `path` belongs to."""
    is_anthropic = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return refuse(error) if is_anthropic else error_response(error)
