"""What operators and their tools ask a server: `/health`, `/status`, `/metrics`, `/audit`;
`/workers/{worker}/role`, which changes what a worker is preferred for; `/drain`, `/restart` and
`/rollback`.

All but the state of health (`/health`, `/health/live`, `/health/ready`, `/ping`, `/version`) is for
operators only.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, controller_away, invalid
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import check_operator, read_body
from kvrelay.cluster.api.keys.record import Scope
from kvrelay.cluster.api.metrics import OfCluster
from kvrelay.cluster.api.openai.schema import parse
from kvrelay.cluster.api.operator import give
from kvrelay.cluster.api.utility.version import VERSION
from kvrelay.cluster.orders import ControllerAway, Service, ServiceRequest, SetRole
from kvrelay.engine.stats import Role

_ROLE = "/workers/{worker}/role"


class RoleRequest(BaseModel):
    """What the body of POST /workers/{worker}/role has."""

    model_config = ConfigDict(strict=True)

    role: str


def operation_routes(ctx: ApiContext) -> list[ApiRoute]:
    calls = _Operations(ctx)
    return [
        ApiRoute("GET", "/health", calls.health, "Whether requests can be served"),
        ApiRoute("GET", "/health/live", calls.ping, "Whether the server answers"),
        ApiRoute("GET", "/health/ready", calls.ready, "Whether new requests should come here"),
        ApiRoute("GET", "/ping", calls.ping, "Whether the server answers"),
        ApiRoute("POST", "/ping", calls.ping, "Whether the server answers"),
        ApiRoute("GET", "/version", calls.version, "Version of the server"),
        ApiRoute("GET", "/status", calls.status, "Workers, caches and totals"),
        ApiRoute("GET", "/metrics", calls.metrics, "For Prometheus"),
        ApiRoute("GET", "/audit", calls.audit, "What the workers hold, and what nobody owns"),
        ApiRoute("POST", _ROLE, calls.set_role, "Prefer a worker for another role", RoleRequest),
        ApiRoute("POST", "/drain", calls.drain, "Take no new request, and end when all have ended"),
        ApiRoute("POST", "/restart", calls.restart, "Replace each process, one after the other"),
        ApiRoute("POST", "/rollback", calls.rollback, "Back to the version and settings before"),
    ]


class _Operations:
    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    async def health(self, http: Request) -> Response:
        is_healthy, detail = self._healthy(http)
        status = {"status": "ok" if is_healthy else "unavailable"}
        return JSONResponse(detail | status, 200 if is_healthy else 503)

    async def ready(self, http: Request) -> Response:
        """Whether new requests should come here."""
        is_healthy, detail = self._healthy(http)
        if self._ctx.operations.draining:
            return JSONResponse(detail | {"status": "draining"}, 503)
        status = {"status": "ready" if is_healthy else "unavailable"}
        return JSONResponse(detail | status, 200 if is_healthy else 503)

    def _healthy(self, http: Request) -> tuple[bool, dict[str, Any]]:
        """Looks at the model that `?model=` names, else at any. Raises ApiError (404), without
        a list of names: that is for those who have a key."""
        name = http.query_params.get("model", "")
        if name and name not in self._ctx.models:
            said = f"no model of this server is called '{name[:200]}'"
            raise ApiError(404, said, param="model", code="model_not_found")
        return self._ctx.operations.healthy(self._ctx.models[name].model_name if name else "")

    async def drain(self, http: Request) -> Response:
        return await self._order(http, Service.DRAIN)

    async def restart(self, http: Request) -> Response:
        return await self._order(http, Service.RESTART)

    async def rollback(self, http: Request) -> Response:
        return await self._order(http, Service.ROLLBACK)

    async def _order(self, http: Request, service: Service) -> Response:
        check_operator(self._ctx, http)
        await give(self._ctx.operations, ServiceRequest(service))
        return JSONResponse({"begun": str(service)}, 202)

    async def ping(self, http: Request) -> Response:
        """That there is an answer is the answer."""
        return JSONResponse({})

    async def version(self, http: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def status(self, http: Request) -> Response:
        check_operator(self._ctx, http, Scope.METRICS)
        data = self._ctx.operations.status().json()
        return Response(data, media_type="application/json")

    async def metrics(self, http: Request) -> Response:
        check_operator(self._ctx, http, Scope.METRICS)
        registry, cluster = self._ctx.metrics.registry, self._ctx.cluster
        content = generate_latest(OfCluster(registry, cluster) if cluster else registry)
        return Response(content, media_type=CONTENT_TYPE_LATEST)

    async def audit(self, http: Request) -> Response:
        check_operator(self._ctx, http)
        try:
            return JSONResponse(await self._ctx.operations.audit())
        except ControllerAway:
            raise controller_away() from None

    async def set_role(self, http: Request) -> Response:
        check_operator(self._ctx, http)
        wanted = parse(RoleRequest, await read_body(self._ctx, http)).role
        roles = [str(role) for role in Role]
        if wanted not in roles:
            raise invalid(f"'role': expected one of {roles}, got {wanted[:40]!r}", param="role")
        worker = http.path_params["worker"]
        known = await give(self._ctx.operations, SetRole(worker, Role(wanted)))
        return JSONResponse({"worker": worker, "role": wanted, **known})
