"""Which pages in a browser may call, where clients have no keys.

A browser runs pages of any site, and reaches whatever its machine reaches. Two things keep such a
page out. A call has to name the server by one of its own names: a page whose own name has been
bound to the server's address (DNS rebinding) cannot, since that name is in every call of it. And a
call that a page makes has to come from a page of this server, or from one of `api.cors_origins`.
Where clients have keys, a page cannot call anyway: no key is in a cookie, so no browser adds one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.config import ApiSection

_OWN = ("same-origin", "none")  # "none": a person has typed or clicked it


class SiteCheck:
    """Before every route, and every WebSocket, of a server without keys."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ApiSection,
        tenants: Tenants,
        answer: Callable[[Scope, ApiError], JSONResponse],
    ) -> None:
        """`answer`: to a refused call, in the form that its path has."""
        self._app, self._settings = app, settings
        self._tenants, self._answer = tenants, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            is_call = scope["type"] in ("http", "websocket")
            if is_call and not self._tenants.key_required:
                headers = Headers(scope=scope)
                check_host(self._settings, headers)
                check_page(self._settings, headers, scope.get("method", "WEBSOCKET"))
        except ApiError as error:
            scope.setdefault("state", {})["outcome"] = error.outcome
            answer = self._answer(scope, error)
            if scope["type"] == "websocket":
                await WebSocket(scope, receive, send).send_denial_response(answer)
            else:
                await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)


def check_host(settings: ApiSection, headers: Headers) -> None:
    """An address is no name that somebody else can have bound, and a call without (HTTP/1.0) comes
    from no browser. Raises ApiError (403)."""
    given = headers.get("host")
    if given is None:
        return
    try:
        named = (urlsplit(f"//{given}").hostname or "").rstrip(".")
    except ValueError:
        named = ""
    own = ("localhost", settings.host, socket.gethostname(), *settings.names.split())
    if named and named in (name.lower() for name in own):
        return
    try:
        ip_address(named)
    except ValueError:
        raise ApiError(
            403,
            f"Without keys this server is called by its address, as localhost or by one of"
            f" api.names, and not as {given[:100]!r}: add that name to api.names, or set api.key",
            code="forbidden",
        ) from None


def check_page(settings: ApiSection, headers: Headers, method: str) -> None:
    """Raises ApiError (403) for a call of a page of another site."""
    check_origin(settings, headers)
    site, is_shown = headers.get("sec-fetch-site", "none"), method in ("GET", "HEAD")
    if site in _OWN or "origin" in headers:  # which has been looked at
        return
    if not (is_shown and headers.get("sec-fetch-mode") == "navigate"):  # a link leads here
        raise _refused("of another site")


def check_origin(settings: ApiSection, headers: Headers) -> None:
    """A browser says which page posts, or opens a WebSocket. Raises ApiError (403)."""
    origin = headers.get("origin")
    allowed = settings.cors_origins.split()
    if origin is None or "*" in allowed or origin in allowed:
        return
    if urlsplit(origin).netloc != headers.get("host"):
        raise _refused(f"of {origin[:100]!r}")


def _refused(whose: str) -> ApiError:
    message = f"Pages {whose} may not call: set api.cors_origins"
    return ApiError(403, message, code="forbidden")
