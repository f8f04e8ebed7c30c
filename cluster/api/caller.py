"""Who calls: the tenant of an API key."""

from __future__ import annotations

from starlette.requests import Request

from cluster.api.context import ApiContext
from cluster.api.errors import unauthorized
from cluster.tenants import Tenant


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
