"""`/openapi.json` and `/docs`: what can be called, made from what requests are checked by."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from html import escape
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from cluster.api.anthropic.schema import CountRequest, MessagesRequest
from cluster.api.context import ApiContext
from cluster.api.openai.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from cluster.api.openai.schema import ChatRequest, CompletionRequest, ForkRequest, MetadataRequest
from cluster.api.responses.conversations import (
    ConversationRequest,
    ItemsRequest,
)
from cluster.api.responses.schema import CompactRequest, ResponsesRequest
from cluster.api.utility.tokens import DetokenizeRequest, TokenizeRequest
from cluster.api.utility.version import VERSION

_REF = "#/components/schemas/{model}"
_PLACE = {"in": "path", "required": True, "schema": {"type": "string"}}

# (method, path, what it does, body)
CALLS: Sequence[tuple[str, str, str, type[BaseModel] | None]] = (
    ("post", "/v1/chat/completions", "Answer a conversation", ChatRequest),
    ("get", "/v1/chat/completions", "Completions that are kept", None),
    ("get", "/v1/chat/completions/{id}", "One of them", None),
    ("post", "/v1/chat/completions/{id}", "Change its metadata", MetadataRequest),
    ("delete", "/v1/chat/completions/{id}", "Forget it", None),
    ("get", "/v1/chat/completions/{id}/messages", "What it was asked with", None),
    ("post", "/v1/completions", "Continue a text", CompletionRequest),
    ("post", "/v1/embeddings", "Texts as vectors", EmbeddingRequest),
    ("post", "/v1/rerank", "Documents by how near they are to a query", RerankRequest),
    ("post", "/v1/score", "How near texts are to each other", ScoreRequest),
    ("post", "/v1/responses", "Answer items, and keep the response", ResponsesRequest),
    ("get", "/v1/responses/{id}", "A response that was kept", None),
    ("delete", "/v1/responses/{id}", "Forget a response", None),
    ("get", "/v1/responses/{id}/input_items", "What a response was asked with", None),
    ("post", "/v1/responses/{id}/cancel", "End a response in the background", None),
    ("post", "/v1/responses/compact", "Sum a conversation up", CompactRequest),
    ("post", "/v1/responses/input_tokens", "Tokens of a prompt", ResponsesRequest),
    ("post", "/v1/conversations", "Begin a conversation", ConversationRequest),
    ("get", "/v1/conversations/{id}", "A conversation", None),
    ("post", "/v1/conversations/{id}", "Change its metadata", MetadataRequest),
    ("delete", "/v1/conversations/{id}", "Forget it", None),
    ("get", "/v1/conversations/{id}/items", "Its items", None),
    ("post", "/v1/conversations/{id}/items", "Add to its items", ItemsRequest),
    ("get", "/v1/conversations/{id}/items/{item}", "One of its items", None),
    ("delete", "/v1/conversations/{id}/items/{item}", "Take an item out", None),
    ("post", "/v1/messages", "Answer Anthropic's messages", MessagesRequest),
    ("post", "/v1/messages/count_tokens", "Tokens of a prompt", CountRequest),
    ("get", "/v1/models", "The models that are served", None),
    ("get", "/v1/models/{id}", "One of them", None),
    ("get", "/v1/sessions", "Conversations whose KV is kept", None),
    ("get", "/v1/sessions/{id}", "One of them", None),
    ("delete", "/v1/sessions/{id}", "Forget it", None),
    ("post", "/v1/sessions/{id}/park", "Move its KV to a lower tier", None),
    ("post", "/v1/sessions/{id}/resume", "Bring its KV back", None),
    ("post", "/v1/sessions/{id}/pin", "Keep its KV", None),
    ("post", "/v1/sessions/{id}/unpin", "Keep its KV no longer", None),
    ("post", "/v1/sessions/{id}/fork", "Another session from the same KV", ForkRequest),
    ("post", "/tokenize", "The tokens of a text or a chat", TokenizeRequest),
    ("post", "/detokenize", "The text of tokens", DetokenizeRequest),
    ("get", "/health", "Whether requests can be served", None),
    ("get", "/ping", "Whether the server answers", None),
    ("get", "/version", "Of the server", None),
    ("get", "/status", "Workers, caches and totals", None),
    ("get", "/metrics", "For Prometheus", None),
)


@cache
def document(*names: str) -> dict[str, Any]:
    """OpenAPI 3.1. names: of the models that are served."""
    models: list[Any] = [(body, "validation") for *_, body in CALLS if body is not None]
    made, found = models_json_schema(models, ref_template=_REF)
    paths: dict[str, Any] = {}
    for method, path, summary, body in CALLS:
        call: dict[str, Any] = {"summary": summary, "responses": _answers(body is not None)}
        places = [name for name in ("id", "item") if f"{{{name}}}" in path]
        if places:
            call["parameters"] = [_PLACE | {"name": name} for name in places]
        if body is not None:
            schema = made[(body, "validation")]
            content = {"application/json": {"schema": schema}}
            call["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path, {})[method] = call
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
    names = ctx.model_name, *ctx.aliases

    async def openapi(_: Request) -> Response:
        return JSONResponse(document(*names))

    async def docs(_: Request) -> Response:
        return HTMLResponse(page(*names))

    return [
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/docs", docs, methods=["GET"]),
    ]


@cache
def page(*names: str) -> str:
    """One page without scripts and without anything from elsewhere."""
    schemas = document(*names)["components"]["schemas"]
    rows = [_row(*call, schemas) for call in CALLS]
    return _PAGE.replace("ROWS", "\n".join(rows)).replace("VERSION", escape(VERSION))


def _row(
    method: str, path: str, summary: str, body: type[BaseModel] | None, schemas: dict[str, Any]
) -> str:
    head = f"<b>{method.upper()}</b> <code>{escape(path)}</code> {escape(summary)}"
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
