"""What calls have in common: the tenant of their API key, and how much of a list they want."""

from __future__ import annotations

from starlette.requests import Request

from cluster.api.context import ApiContext
from cluster.api.errors import invalid, unauthorized
from cluster.api.tenants import Tenant


def caller(ctx: ApiContext, http: Request) -> Tenant:
    """Raises `ApiError` (401). Nothing but the key counts, and the key is never shown."""
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        tenant = ctx.tenants.find(None)
        why = "No API key was given: send it as 'Authorization: Bearer KEY'"
    else:
        tenant = ctx.tenants.find(key)
        why = "The API key is not one of this server's"
    if tenant is None:
        raise unauthorized(why)
    return tenant


def limit_of(http: Request, default: int, most: int) -> int:
    """How many entries of a list are asked for. Raises ApiError."""
    given = http.query_params.get("limit", str(default))
    limit = int(given) if given.isascii() and given.isdigit() and len(given) < 9 else 0
    if not 1 <= limit <= most:
        raise invalid(
            f"'limit': expected a whole number from 1 to {most}, got {given[:40]!r}",
            param="limit",
        )
    return limit
