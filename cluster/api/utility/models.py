"""The calls that add a model to those that are served, and remove one: for operators only."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import check_operator, read_body
from kvrelay.cluster.api.operator import give
from kvrelay.cluster.config import ModelEntry
from kvrelay.cluster.orders import ChangeModels
from kvrelay.engine.settings import explain_error


def changing_routes(ctx: ApiContext) -> list[ApiRoute]:
    calls = _ModelCalls(ctx)
    return [
        ApiRoute("POST", "/models", calls.add, "Serve one more model", _entry()),
        ApiRoute("DELETE", "/models/{name}", calls.remove, "Serve a model no more"),
    ]


def _entry() -> dict[str, Any]:
    """Says in OpenAPI's words what a body has."""
    _, schemas = msgspec.json.schema_components([ModelEntry])
    schema = msgspec.json.decode(msgspec.json.encode(schemas[ModelEntry.__name__]))
    return {"application/json": {"schema": schema}}


class _ModelCalls:
    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    async def add(self, http: Request) -> Response:
        check_operator(self._ctx, http)
        body: Any = None
        try:
            body = msgspec.json.decode(await read_body(self._ctx, http))
            entry = msgspec.convert(body, ModelEntry)
        except msgspec.ValidationError as error:
            why = explain_error(str(error), body, ModelEntry) if isinstance(body, dict) else error
            raise invalid(f"The body is no [[models]]: {why}") from None
        except msgspec.DecodeError as error:
            raise invalid(f"The body is not JSON: {error}") from None
        await give(self._ctx.operations, ChangeModels(entry.name, entry))
        return JSONResponse({"begun": "add", "model": entry.name}, 202)

    async def remove(self, http: Request) -> Response:
        """`drain_s`: how long its requests may take to end, instead of `cluster.drain_s`."""
        check_operator(self._ctx, http)
        name, text = http.path_params["name"], http.query_params.get("drain_s")
        if text is not None and not (text.isdecimal() and int(text) <= 86_400):
            raise invalid(f"'drain_s': expected seconds from 0 to 86400, got {text[:40]!r}")
        if name not in {each.model_name for each in self._ctx.all}:
            known = ", ".join(each.model_name for each in self._ctx.all)
            raise ApiError(404, f"There is no model {name[:200]!r}; there are: {known}")
        await give(
            self._ctx.operations, ChangeModels(name, None, None if text is None else int(text))
        )
        return JSONResponse({"begun": "remove", "model": name}, 202)
