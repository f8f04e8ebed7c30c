"""Routes of the API: what each does, and what its body may be, stand beside its registration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import Scope

REF = "#/components/schemas/{model}"  # where the schema of a pydantic model is
Body = type[BaseModel] | Mapping[str, Any]
"""The model that a body is read by; or, where no model reads it, OpenAPI's `content` of it."""


class ApiRoute(Route):
    """One method of one path. `/openapi.json`, `/docs` and the metrics read it from here, so there
    is no second list of routes that could miss one. Not FastAPI's `APIRoute`: that takes functions
    alone, and the endpoints that generate are ASGI applications, which see their client leave."""

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[..., Any],
        summary: str,
        body: Body | None = None,
    ) -> None:
        """summary: what a call does. body: None where none is read."""
        super().__init__(path, endpoint, methods=[method])  # with GET comes HEAD
        self.method, self.summary, self.body = method, summary, body

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, "route": self}  # as FastAPI's do


class ApiWebSocketRoute(WebSocketRoute):
    """A WebSocket, of which OpenAPI knows nothing; metrics do."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, "route": self}
