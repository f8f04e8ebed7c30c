"""`/openapi.json` and `/docs`: every route, and the fields that requests are checked by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from html import escape
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.http.route import REF, ApiRoute
from kvrelay.cluster.api.utility.version import VERSION

_PLACE = {"in": "path", "required": True, "schema": {"type": "string"}}


def described(routes: Sequence[BaseRoute]) -> Iterator[ApiRoute]:
    """Yields all of an application that OpenAPI can describe: no WebSockets."""
    return (route for route in routes if isinstance(route, ApiRoute))


def document(routes: Sequence[BaseRoute], names: Sequence[str]) -> dict[str, Any]:
    """Describes `routes` by OpenAPI 3.1. names: of the models that are served."""
    known = [*described(routes)]
    models: list[Any] = [(each.body, "validation") for each in known if isinstance(each.body, type)]
    made, found = models_json_schema(models, ref_template=REF)
    paths: dict[str, Any] = {}
    for route in known:
        path, body = route.path_format, route.body
        tag = path.removeprefix("/v1").split("/")[1]
        call: dict[str, Any] = {
            "summary": route.summary,
            "tags": [tag],
            "responses": _answers(body is not None),
        }
        if route.param_convertors:
            call["parameters"] = [_PLACE | {"name": name} for name in route.param_convertors]
        if isinstance(body, type):
            body = {"application/json": {"schema": made[(body, "validation")]}}
        if body is not None:
            call["requestBody"] = {"required": True, "content": body}
        paths.setdefault(path, {})[route.method.lower()] = call
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


def document_routes(ctx: ApiContext) -> list[ApiRoute]:

    @lru_cache(maxsize=1)  # the schemas take 0.1 s
    def made(app: Starlette, names: tuple[str, ...]) -> tuple[dict[str, Any], str]:
        found = document(app.routes, names)
        return found, page(app.routes, found)

    async def openapi(http: Request) -> Response:
        return JSONResponse(made(http.app, tuple(ctx.models))[0])

    async def docs(http: Request) -> Response:
        return HTMLResponse(made(http.app, tuple(ctx.models))[1])

    return [
        ApiRoute("GET", "/openapi.json", openapi, "This document"),
        ApiRoute("GET", "/docs", docs, "This document as a page"),
    ]


def page(routes: Sequence[BaseRoute], document: dict[str, Any]) -> str:
    """Shows `document` as one page without scripts and without anything from elsewhere."""
    schemas = document["components"]["schemas"]
    rows = [_row(route, document["paths"], schemas) for route in described(routes)]
    return _PAGE.replace("ROWS", "\n".join(rows)).replace("VERSION", escape(VERSION))


def _row(route: ApiRoute, paths: dict[str, Any], schemas: dict[str, Any]) -> str:
    path, method = route.path_format, route.method
    head = f"<b>{method}</b> <code>{escape(path)}</code> {escape(route.summary)}"
    asked = paths[path][method.lower()].get("requestBody")
    if asked is None:
        return f"<p>{head}</p>"
    (content,) = asked["content"].values()
    schema = content["schema"]
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rsplit("/", 1)[-1]]
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
