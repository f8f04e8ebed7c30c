"""`/openapi.json` and `/docs`: every route, and the fields that requests are checked by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from kvrelay.cluster.api.anthropic.schema import CountRequest, MessagesRequest
from kvrelay.cluster.api.batches.routes import BatchRequest
from kvrelay.cluster.api.console.routes import TicketRequest
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.openai.chats import ChatsRequest
from kvrelay.cluster.api.openai.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from kvrelay.cluster.api.openai.schema import (
    ChatRequest,
    CompletionRequest,
    ForkRequest,
    MetadataRequest,
)
from kvrelay.cluster.api.operations import RoleRequest
from kvrelay.cluster.api.responses.conversations import ConversationRequest, ItemsRequest
from kvrelay.cluster.api.responses.schema import CompactRequest, ResponsesRequest
from kvrelay.cluster.api.utility.adapters import AdapterRequest, LoadRequest, UnloadRequest
from kvrelay.cluster.api.utility.tokens import DetokenizeRequest, TokenizeRequest
from kvrelay.cluster.api.utility.version import VERSION

_REF = "#/components/schemas/{model}"
_PLACE = {"in": "path", "required": True, "schema": {"type": "string"}}

# Method and path of a route -> what it does, and the model of its body.
CALLS: Mapping[str, tuple[str, type[BaseModel] | None]] = {
    "POST /v1/chat/completions": ("Answer a conversation", ChatRequest),
    "POST /v1/chat/completions/batch": ("Answer several conversations", ChatsRequest),
    "GET /v1/chat/completions": ("Completions that are kept", None),
    "GET /v1/chat/completions/{id}": ("One of them", None),
    "POST /v1/chat/completions/{id}": ("Change its metadata", MetadataRequest),
    "DELETE /v1/chat/completions/{id}": ("Forget it", None),
    "GET /v1/chat/completions/{id}/messages": ("What it was asked with", None),
    "POST /v1/completions": ("Continue a text", CompletionRequest),
    "POST /v1/embeddings": ("Texts as vectors", EmbeddingRequest),
    "POST /v1/rerank": ("Documents by how near they are to a query", RerankRequest),
    "POST /v2/rerank": ("Documents by how near they are to a query", RerankRequest),
    "POST /rerank": ("Documents by how near they are to a query", RerankRequest),
    "POST /v1/score": ("How near texts are to each other", ScoreRequest),
    "POST /score": ("How near texts are to each other", ScoreRequest),
    "POST /v1/responses": ("Answer items, and keep the response", ResponsesRequest),
    "GET /v1/responses/{id}": ("A response that was kept", None),
    "DELETE /v1/responses/{id}": ("Forget a response", None),
    "GET /v1/responses/{id}/input_items": ("What a response was asked with", None),
    "POST /v1/responses/{id}/cancel": ("End a response in the background", None),
    "POST /v1/responses/compact": ("Sum a conversation up", CompactRequest),
    "POST /v1/responses/input_tokens": ("Tokens of a prompt", ResponsesRequest),
    "POST /v1/conversations": ("Begin a conversation", ConversationRequest),
    "GET /v1/conversations/{id}": ("A conversation", None),
    "POST /v1/conversations/{id}": ("Change its metadata", MetadataRequest),
    "DELETE /v1/conversations/{id}": ("Forget it", None),
    "GET /v1/conversations/{id}/items": ("Its items", None),
    "POST /v1/conversations/{id}/items": ("Add to its items", ItemsRequest),
    "GET /v1/conversations/{id}/items/{item}": ("One of its items", None),
    "DELETE /v1/conversations/{id}/items/{item}": ("Take an item out", None),
    "POST /v1/files": ("Keep a file for batches, as a form in parts", None),
    "GET /v1/files": ("Files that are kept", None),
    "GET /v1/files/{id}": ("One of them", None),
    "DELETE /v1/files/{id}": ("Delete it", None),
    "GET /v1/files/{id}/content": ("Its bytes", None),
    "POST /v1/batches": ("Run the requests of a file when there is time", BatchRequest),
    "GET /v1/batches": ("Batches", None),
    "GET /v1/batches/{id}": ("One of them", None),
    "POST /v1/batches/{id}/cancel": ("End it before all has run", None),
    "POST /v1/messages": ("Answer Anthropic's messages", MessagesRequest),
    "POST /v1/messages/batches": ("Answer Anthropic's messages when there is time", None),
    "GET /v1/messages/batches": ("Batches of messages", None),
    "GET /v1/messages/batches/{id}": ("One of them", None),
    "DELETE /v1/messages/batches/{id}": ("Delete it, with its results", None),
    "POST /v1/messages/batches/{id}/cancel": ("End it before all has run", None),
    "GET /v1/messages/batches/{id}/results": ("What became of each request", None),
    "POST /v1/messages/count_tokens": ("Tokens of a prompt", CountRequest),
    "GET /v1/models": ("The models that are served", None),
    "GET /v1/models/{name}": ("One of them", None),
    "GET /v1/adapters": ("Adapters that requests may name as their model", None),
    "POST /v1/adapters": ("Register an adapter", AdapterRequest),
    "DELETE /v1/adapters/{name}": ("Forget it", None),
    "POST /v1/load_lora_adapter": ("Register an adapter, as in vLLM", LoadRequest),
    "POST /v1/unload_lora_adapter": ("Forget it, as in vLLM", UnloadRequest),
    "GET /v1/sessions": ("Conversations whose KV is kept", None),
    "GET /v1/sessions/{id}": ("One of them", None),
    "DELETE /v1/sessions/{id}": ("Forget it", None),
    "POST /v1/sessions/{id}/park": ("Move its KV to a lower tier", None),
    "POST /v1/sessions/{id}/resume": ("Bring its KV back", None),
    "POST /v1/sessions/{id}/pin": ("Keep its KV", None),
    "POST /v1/sessions/{id}/unpin": ("Keep its KV no longer", None),
    "POST /v1/sessions/{id}/fork": ("Another session from the same KV", ForkRequest),
    "POST /tokenize": ("The tokens of a text or a chat", TokenizeRequest),
    "POST /detokenize": ("The text of tokens", DetokenizeRequest),
    "GET /tokenizer_info": ("Special tokens and chat template of the model", None),
    "GET /health": ("Whether requests can be served", None),
    "GET /health/live": ("Whether the server answers", None),
    "GET /health/ready": ("Whether new requests should come here", None),
    "GET /ping": ("Whether the server answers", None),
    "POST /ping": ("Whether the server answers", None),
    "GET /version": ("Version of the server", None),
    "GET /status": ("Workers, caches and totals", None),
    "GET /metrics": ("For Prometheus", None),
    "GET /audit": ("What the workers hold, and what nobody owns", None),
    "POST /workers/{worker}/role": ("Prefer a worker for another role", RoleRequest),
    "POST /drain": ("Take no new request, and end when all are answered", None),
    "POST /restart": ("Replace every process, one after the other", None),
    "POST /rollback": ("Go back to the version and the settings before", None),
    "POST /models": ("Serve one more model", None),
    "DELETE /models/{name}": ("Serve a model no more", None),
    "GET /requests": ("Requests that were answered lately", None),
    "GET /requests/{id}/explanation": ("Why it went where it went, in seconds", None),
    "GET /console": ("A page that shows the server live", None),
    "GET /console/": ("A page that shows the server live", None),
    "GET /console/events": ("The status as a stream of events", None),
    "GET /console/snapshot": ("The status and its history, once", None),
    "POST /console/ticket": ("A ticket that opens the console once", None),
    "POST /console/session": ("A session of the console for a ticket", TicketRequest),
    "GET /console/{file}": ("Scripts and styles of the page", None),
    "GET /openapi.json": ("This document", None),
    "GET /docs": ("This document as a page", None),
}


def calls(routes: Sequence[BaseRoute]) -> Iterator[tuple[str, Route, str, type[BaseModel] | None]]:
    """Yields the method, the route and the entry in CALLS of all that an application answers."""
    for route in routes:
        if isinstance(route, Route):
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield method, route, *CALLS[f"{method} {route.path_format}"]


def document(routes: Sequence[BaseRoute], names: Sequence[str]) -> dict[str, Any]:
    """Describes `routes` by OpenAPI 3.1. names: of the models that are served."""
    known = [*calls(routes)]
    models: list[Any] = [(body, "validation") for *_, body in known if body is not None]
    made, found = models_json_schema(models, ref_template=_REF)
    paths: dict[str, Any] = {}
    for method, route, summary, body in known:
        path = route.path_format
        tag = path.removeprefix("/v1").split("/")[1]
        call: dict[str, Any] = {
            "summary": summary,
            "tags": [tag],
            "responses": _answers(body is not None),
        }
        if route.param_convertors:
            call["parameters"] = [_PLACE | {"name": name} for name in route.param_convertors]
        if body is not None:
            schema = made[(body, "validation")]
            content = {"application/json": {"schema": schema}}
            call["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path, {})[method.lower()] = call
    schemas = found.get("$defs", {})
    for schema in schemas.values():
        model = schema.get("properties", {}).get("model")
        if model is not None:
            model["enum"] = [*names, None] if "anyOf" in model else list(names)
    key = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "KVRelay", "version": VERSION},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": key}},
        "security": [{"key": []}, {}],
    }


def _answers(generates: bool) -> dict[str, Any]:
    answers = {"200": {"description": "The answer"}}
    if generates:
        answers["400"] = {"description": "The request is wrong; the message says what"}
        answers["429"] = {"description": "Not now: retry after the header's seconds"}
    return answers | {"default": {"description": "An error, as JSON"}}


def document_routes(ctx: ApiContext) -> list[Route]:

    @cache  # made once: the schemas take 0.1 s
    def made(app: Starlette) -> tuple[dict[str, Any], str]:
        described = document(app.routes, tuple(ctx.models))
        return described, page(app.routes, described)

    async def openapi(http: Request) -> Response:
        return JSONResponse(made(http.app)[0])

    async def docs(http: Request) -> Response:
        return HTMLResponse(made(http.app)[1])

    return [
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/docs", docs, methods=["GET"]),
    ]


def page(routes: Sequence[BaseRoute], described: dict[str, Any]) -> str:
    """Shows `document` as one page without scripts and without anything from elsewhere."""
    schemas = described["components"]["schemas"]
    rows = [_row(*call, schemas) for call in calls(routes)]
    return _PAGE.replace("ROWS", "\n".join(rows)).replace("VERSION", escape(VERSION))


def _row(
    method: str,
    route: Route,
    summary: str,
    body: type[BaseModel] | None,
    schemas: dict[str, Any],
) -> str:
    head = f"<b>{method}</b> <code>{escape(route.path_format)}</code> {escape(summary)}"
    if body is None:
        return f"<p>{head}</p>"
    schema = schemas.get(body.__name__, {})
    required = schema.get("required", [])
    fields = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_kind(field))}</td>"
        f"<td>{_default(name, field, required)}</td></tr>"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<details><summary>{head}</summary><table>{fields}</table></details>"


def _default(name: str, field: dict[str, Any], required: Sequence[str]) -> str:
    return "required" if name in required else escape(repr(field.get("default", "")))


def _kind(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"]).rsplit("/", 1)[-1]
    if "anyOf" in field:
        return " or ".join(_kind(each) for each in field["anyOf"])
    if "enum" in field or "const" in field:
        return ", ".join(map(repr, field.get("enum", [field.get("const")])))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any"))


_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>KVRelay's API</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
summary{cursor:pointer}p,details{margin:.4em 0}td{padding:.1em 1em .1em 0;vertical-align:top}
table{margin:.3em 1.2em}code{background:#8882;padding:0 .2em}</style></head><body>
<h1>KVRelay's API</h1><p>Version VERSION; as <a href="openapi.json">OpenAPI</a>.</p>
ROWS
</body></html>
"""
