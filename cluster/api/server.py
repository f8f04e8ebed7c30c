"""Serving the application over HTTP with uvicorn.

The socket is bound first, so that a port that is taken is one clear error. A client that stops
reading, or that connects and asks for nothing, loses its connection after a bounded time; what it
had asked for is cancelled by that. Shutting down waits for live requests, but not for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

BACKLOG = 512


class PortTaken(Exception):
    """Something else listens at the address; the text says what to do."""


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0: any free one. Raises `PortTaken`, and `OSError` for an address
    that this machine does not have."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # Connections inherit it. Else a token waits until the client has acknowledged the last.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)  # now: two sockets may be bound to one port, but only one listens
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} of {host} is taken: stop what listens there, or choose another port"
            ) from error
        raise
    sock.setblocking(False)
    return sock


def _protocol(write_timeout_s: float, first_request_timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with a limit on how long a client may keep it waiting."""

    class BoundedProtocol(HttpToolsProtocol):
        """Invariant: while the transport's buffer is over its high mark, a timer runs that ends
        the connection; another one runs until the first request is there."""

        _write_timer: asyncio.TimerHandle | None = None
        _request_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._request_timer = self.loop.call_later(first_request_timeout_s, transport.abort)

        def on_headers_complete(self) -> None:
            if self._request_timer is not None:
                self._request_timer.cancel()
            super().on_headers_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write_timer = self.loop.call_later(write_timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._write_timer, self._request_timer):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

    return BoundedProtocol


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
    certificate: tuple[str, str] | None = None,
    write_timeout_s: float = 60.0,
    shutdown_timeout_s: float = 15.0,
) -> None:
    """Serve until `stop` is set; without `stop`, until SIGINT or SIGTERM.

    `sock`: from `bind_socket`, instead of host and port. `certificate`: the PEM files with it and
    with its key, for HTTPS. `on_ready` gets the port once requests
    are taken. Raises `PortTaken`. When stopping, requests get `shutdown_timeout_s` to finish.
    """
    sock = sock or bind_socket(host, port)
    cert, key = certificate or (None, None)
    config = uvicorn.Config(
        app,
        http=_protocol(write_timeout_s, first_request_timeout_s=30.0),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        ssl_certfile=cert,
        ssl_keyfile=key,
        timeout_graceful_shutdown=max(1, round(shutdown_timeout_s)),
    )
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
            server.should_exit = True
        await serving
    finally:
        if not serving.done():
            serving.cancel()
        sock.close()
