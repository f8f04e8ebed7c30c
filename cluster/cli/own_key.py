"""The key of operators of a server that this user has started, for commands without a flag."""

from __future__ import annotations

from collections.abc import Generator

import httpx

from kvrelay.cluster.state.server_lock import with_key

NOT_FOUND = (
    " (no server that this user has started here, with a key that it made, is at {}: give"
    " --operations-key or KVRELAY_OPERATIONS_KEY)"
)


class OwnKey(httpx.Auth):
    """Asks as it was asked to, and where that is refused once more with the key that the server has
    made, if it is one of this user on this machine; from then on at once."""

    requires_request_body = True  # it may be sent twice

    def __init__(self) -> None:
        self._keys: dict[tuple[str, str, int | None], tuple[httpx.URL, str]] = {}  # by server

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        url = request.url
        server = url.scheme, url.host, url.port
        if server not in self._keys:
            if (yield request).status_code != 401:
                return
            address, key = with_key(str(url.copy_with(raw_path=b"/")))
            self._keys[server] = httpx.URL(address), key
            if not key:
                return
        at, key = self._keys[server]
        if key:
            request.url = url.copy_with(host=at.host, port=at.port)
            request.headers["host"] = request.url.netloc.decode("ascii")
            request.headers["authorization"] = f"Bearer {key}"
        yield request
