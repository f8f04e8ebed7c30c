"""The calls about keys and usage, by the names and in the form of OpenAI's administration API.

Keys are made and revoked by the operators' key alone, or from the console: a key that could make
others would be there after it was revoked.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import check_operator, limit_of, page_of, read_body
from kvrelay.cluster.api.keys.record import DAY_S, PREFIX, ApiKey, Counts, Scope
from kvrelay.cluster.api.keys.store import KEEP_DAYS
from kvrelay.cluster.api.openai.schema import parse

KEYS = "/v1/organization/admin_api_keys"
USAGE = "/v1/organization/usage/completions"
_OBJECT = "organization.admin_api_key"
_GROUPS = {"project_id": "tenant", "api_key_id": "key", "model": "model"}
_MAX_BUCKETS = KEEP_DAYS
_NOT_KEPT = {"cache-control": "no-store"}
_Limit = Annotated[int, Field(ge=0, le=10**12)]


class KeyRequest(BaseModel):
    """What the body of POST /v1/organization/admin_api_keys has."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=200)]
    expires_in_seconds: Annotated[int, Field(ge=1, le=10**9)] | None = None
    scopes: Annotated[tuple[str, ...], Field(strict=False, min_length=1, max_length=3)] = (
        Scope.GENERATE,
    )
    tenant: str = ""  # whose calls its calls are; where there is one, that
    requests_per_minute: _Limit = 0  # over all routers; 0: no limit
    tokens_per_minute: _Limit = 0
    tokens_per_day: _Limit = 0  # a day begins at midnight UTC


def key_routes(ctx: ApiContext) -> list[ApiRoute]:
    calls = _KeyCalls(ctx)
    return [
        ApiRoute("POST", KEYS, calls.create, "Make an API key", KeyRequest),
        ApiRoute("GET", KEYS, calls.listed, "API keys that were made"),
        ApiRoute("GET", f"{KEYS}/{{id}}", calls.show, "One of them"),
        ApiRoute("DELETE", f"{KEYS}/{{id}}", calls.revoke, "Revoke it"),
        ApiRoute("GET", USAGE, calls.usage, "Tokens by day, tenant, key and model"),
    ]


class _KeyCalls:
    def __init__(self, ctx: ApiContext) -> None:
        self._ctx, self._keys = ctx, ctx.keys

    async def create(self, http: Request) -> Response:
        check_operator(self._ctx, http, None)
        asked = parse(KeyRequest, await read_body(self._ctx, http))
        scopes = _scopes(asked.scopes)
        now = time.time()
        key = ApiKey(
            id="",
            name=asked.name,
            hashed="",
            ending="",
            scopes=scopes,
            tenant=self._tenant(asked.tenant, scopes),
            created_at=now,
            expires_at=now + asked.expires_in_seconds if asked.expires_in_seconds else None,
            requests_per_minute=asked.requests_per_minute,
            tokens_per_minute=asked.tokens_per_minute,
            tokens_per_day=asked.tokens_per_day,
        )
        made, secret = await self._keys.create(key)
        return JSONResponse(_shown(made, None) | {"value": secret}, headers=_NOT_KEPT)

    def _tenant(self, name: str, scopes: tuple[Scope, ...]) -> str:
        """Whose calls the key's calls are; "": it generates nothing. Raises ApiError."""
        tenants = self._ctx.tenants
        if Scope.GENERATE not in scopes:
            if name:
                raise invalid(f"'tenant': scopes {', '.join(scopes)} have none", "tenant")
            return ""
        if not tenants.key_required:
            why = "everybody may generate here without a key: set api.key or [[tenant]] first"
            raise invalid(f"'scopes': {why}", "scopes")
        names = tenants.names()
        if not name and len(names) == 1:
            return names[0]
        if name not in names:
            there = ", ".join(names)
            raise invalid(f"'tenant': there is none {name[:80]!r}; there are: {there}", "tenant")
        return name

    async def listed(self, http: Request) -> Response:
        check_operator(self._ctx, http)
        seen = await self._keys.last_seen()
        keys = sorted(self._keys.by_id.values(), key=lambda key: (key.created_at, key.id))
        return JSONResponse(page_of(http, [_shown(key, seen.get(key.id)) for key in keys]))

    async def show(self, http: Request) -> Response:
        check_operator(self._ctx, http)
        key = self._keys.by_id.get(http.path_params["id"])
        if key is None:
            raise _no_key(http.path_params["id"])
        return JSONResponse(_shown(key, (await self._keys.last_seen()).get(key.id)))

    async def revoke(self, http: Request) -> Response:
        check_operator(self._ctx, http, None)
        key = await self._keys.revoke(http.path_params["id"])
        if key is None:
            raise _no_key(http.path_params["id"])
        return JSONResponse({"id": key.id, "object": f"{_OBJECT}.deleted", "deleted": True})

    async def usage(self, http: Request) -> Response:
        check_operator(self._ctx, http, Scope.METRICS)
        asked = http.query_params
        if asked.get("bucket_width", "1d") != "1d":
            raise invalid(f"'bucket_width': expected 1d, got {asked['bucket_width'][:20]!r}")
        groups = asked.getlist("group_by") + asked.getlist("group_by[]")
        if wrong := [each for each in groups if each not in _GROUPS]:
            raise invalid(f"'group_by': expected {', '.join(_GROUPS)}, got {wrong[0][:40]!r}")
        last = (_seconds(http, "end_time", int(time.time()) + 1) - 1) // DAY_S
        first = max(_seconds(http, "start_time") // DAY_S, last - KEEP_DAYS)
        if page := asked.get("page"):
            first = int(page) if page.isascii() and page.isdigit() and len(page) < 9 else last + 1
        limit = limit_of(http, 7, _MAX_BUCKETS)
        until = min(last, first + limit - 1)
        used = await self._keys.all_used(first, until) if first <= until else {}
        sums: defaultdict[int, defaultdict[tuple[str, ...], Counts]] = defaultdict(
            lambda: defaultdict(Counts)
        )
        for use, had in used.items():
            by = tuple(getattr(use, _GROUPS[each]) for each in groups)
            sums[use.day][by] = sums[use.day][by].plus(had)
        has_more = until < last
        return JSONResponse(
            {
                "object": "page",
                "data": [_bucket(day, sums[day], groups) for day in range(first, until + 1)],
                "has_more": has_more,
                "next_page": str(until + 1) if has_more else None,
            }
        )


def _scopes(given: tuple[str, ...]) -> tuple[Scope, ...]:
    for each in given:
        if each not in list(Scope):
            raise invalid(f"'scopes': expected {', '.join(Scope)}, got {each[:40]!r}", "scopes")
    return tuple(sorted({Scope(each) for each in given}))


def _seconds(http: Request, name: str, default: int | None = None) -> int:
    """A time since 1970. Raises ApiError."""
    given = http.query_params.get(name, "" if default is None else str(default))
    if not (given.isascii() and given.isdigit() and len(given) < 12):
        raise invalid(f"'{name}': expected seconds since 1970, got {given[:40]!r}", name)
    return int(given)


def _no_key(name: str) -> ApiError:
    return ApiError(404, f"There is no API key {name[:80]!r}", param="id", code="key_not_found")


def _shown(key: ApiKey, seen_at: float | None) -> dict[str, Any]:
    def seconds(at: float | None) -> int | None:
        return None if at is None else int(at)

    return {
        "id": key.id,
        "object": _OBJECT,
        "name": key.name,
        "redacted_value": f"{PREFIX}...{key.ending}",
        "created_at": int(key.created_at),
        "expires_at": seconds(key.expires_at),
        "last_used_at": seconds(seen_at),
        "revoked_at": seconds(key.revoked_at),
        "state": key.state(time.time()),
        "owner": {"type": "user", "role": "owner", "name": key.tenant or None},
        "scopes": list(key.scopes),
        "tenant": key.tenant,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "tokens_per_day": key.tokens_per_day,
    }


def _bucket(day: int, sums: dict[tuple[str, ...], Counts], groups: list[str]) -> dict[str, Any]:
    return {
        "object": "bucket",
        "start_time": day * DAY_S,
        "end_time": (day + 1) * DAY_S,
        "results": [
            {
                "object": "organization.usage.completions.result",
                "input_tokens": had.input,
                "input_cached_tokens": had.cached,
                "output_tokens": had.output,
                "num_model_requests": had.requests,
                **dict.fromkeys(_GROUPS),
                **dict(zip(groups, by, strict=True)),
            }
            for by, had in sorted(sums.items())
        ],
    }
