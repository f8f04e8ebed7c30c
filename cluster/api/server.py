"""Serving the application over HTTP with uvicorn.

The socket is bound first, so that a port that is taken is one clear error. What clients can make a
connection wait for or keep is bounded (`cluster.api.http.connection`). Shutting down waits for live
requests, but not for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp

from kvrelay.cluster.api.http.connection import ConnectionLimits, bounded_protocols
from kvrelay.cluster.api.limiter import ByteBudget
from kvrelay.cluster.api.listening import BACKLOG, bind_socket
from kvrelay.engine.wire.context import TlsIdentity

_log = logging.getLogger("kvrelay.api")


def _within_files(limits: ConnectionLimits) -> ConnectionLimits:
    """At most half of the files that this process may open: the others are for workers, stores and
    what else has to go on when clients have taken theirs."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    if most < 0 or most >= limits.max_connections:  # below 0: any number
        return limits
    _log.warning("at most %d connections, of the files that may be open (ulimit -n)", most)
    return replace(limits, max_connections=most)


class ServerCertificate:
    """What HTTPS shows. Another one is for connections that are made from then on; `context` stays
    the same."""

    def __init__(self, identity: TlsIdentity) -> None:
        """`identity`: is shown at first. Raises TlsError."""
        self.context = self._current = _https(identity)
        self.context.sni_callback = self._choose

    def replace(self, identity: TlsIdentity) -> None:
        """Raises TlsError for one that cannot be used; then the last one stays."""
        self._current = _https(identity)

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: object) -> None:
        """Called for each connection, before the certificate is sent."""
        connection.context = self._current


def _https(identity: TlsIdentity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    identity.show_in(context)
    return context


class _Server(uvicorn.Server):
    """Leaves signals to whoever owns the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_app(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    sock: socket.socket | None = None,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[int], None] | None = None,
    connections: ConnectionLimits = ConnectionLimits(),
    certificate: ServerCertificate | None = None,
    shutdown_timeout_s: Callable[[], float] = lambda: 15.0,
    max_message_bytes: int = 8 * 2**20,
    messages: ByteBudget | None = None,
) -> None:
    """Serve until `stop` is set; without `stop`, until SIGINT or SIGTERM.

    `sock`: from `bind_socket`, instead of host and port. `certificate`: for HTTPS. `on_ready` gets
    the port once requests are taken. `max_message_bytes`: of a WebSocket, whose messages are held
    in `messages` until the application takes them (room for eight, where it is not given). Raises
    `PortTaken`. When stopping, requests get `shutdown_timeout_s()` to finish.
    """
    sock = sock or bind_socket(host, port)
    connections = _within_files(connections)
    budget = ByteBudget(8 * max_message_bytes) if messages is None else messages
    http, websocket = bounded_protocols(connections, budget)
    config = uvicorn.Config(
        app,
        http=http,
        timeout_keep_alive=connections.idle_timeout_s,  # type: ignore[arg-type]  # it may be a fraction
        ws=websocket,
        ws_max_size=max_message_bytes,
        ws_per_message_deflate=False,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
    )
    config.load()
    config.ssl = None if certificate is None else certificate.context
    server = uvicorn.Server(config) if stop is None else _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if on_ready is not None and not serving.done():
            on_ready(sock.getsockname()[1])
        if stop is not None:
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            config.timeout_graceful_shutdown = max(1, round(shutdown_timeout_s()))
            server.should_exit = True
        await serving
    finally:
        if not serving.done():
            serving.cancel()
        sock.close()
