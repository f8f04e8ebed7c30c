"""`/console`: the page, and `/console/events`, by which it sees the cluster change.

The page is the same for everyone and has no data. What it shows comes from calls that ask for the
operators' key, or for a tenant's, like any other client's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvrelay.cluster.api.console.feed import Feed
from kvrelay.cluster.api.console.history import KEPT_S, PERIOD_S, WINDOW_S, History
from kvrelay.cluster.api.console.pages import HEADERS, INDEX, page_files, respond
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, overloaded
from kvrelay.cluster.api.incoming import check_operator, is_cross_site
from kvrelay.cluster.api.limiter import ConcurrencyLimiter, LimitReached
from kvrelay.cluster.api.utility.version import VERSION

MAX_LISTENERS = 32
WRITE_TIMEOUT_S = 5.0  # for a listener to take an event
_PROBLEM_S = 60.0  # between two lines about the same trouble

_log = logging.getLogger("kvrelay.api")


class Console:
    """Owned by the application. Between `start` and `close` it reads the metrics once a second,
    and the cluster's status as long as someone listens."""

    def __init__(self, ctx: ApiContext) -> None:
        server = {
            "version": VERSION,
            "models": [ctx.model_name, *ctx.aliases],
            "max_model_len": ctx.max_model_len,
            "can_set_role": ctx.set_role is not None,
            "key_required": ctx.tenants.key_required,
            "period_s": PERIOD_S,
            "window_s": WINDOW_S,
            "kept_s": KEPT_S,
        }
        self._ctx = ctx
        self.history = History(ctx.metrics)
        # `ctx.status` is looked up each time: whoever serves may set another.
        self.feed = Feed(lambda: ctx.status(), self.history, server)
        self.listeners = ConcurrencyLimiter(MAX_LISTENERS)
        self._ticked = asyncio.Event()
        self._seen_at = 0.0  # when the status was read last
        self._told_at = -_PROBLEM_S
        self._task: asyncio.Task[None] | None = None

    def routes(self) -> list[Route]:
        return [
            Route("/console", self._page, methods=["GET"]),
            Route("/console/", self._page, methods=["GET"]),
            Route("/console/events", self._events, methods=["GET"]),
            Route("/console/snapshot", self._snapshot, methods=["GET"]),
            Route("/console/{file}", self._file, methods=["GET"]),
        ]

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def wait_tick(self) -> None:
        await self._ticked.wait()

    def see(self) -> None:
        """The status as it is now, unless it was read just before."""
        if time.monotonic() - self._seen_at >= PERIOD_S / 2:
            self.feed.tick()
            self._seen_at = time.monotonic()

    async def _run(self) -> None:
        while True:
            try:
                self.history.sample(time.time())
                if self.listeners.num_taken:
                    self.see()
            except Exception:  # of the status: listeners see that nothing changes
                if time.monotonic() - self._told_at >= _PROBLEM_S:
                    self._told_at = time.monotonic()
                    _log.exception("the console cannot read the status")
            self._ticked.set()
            self._ticked = asyncio.Event()
            await asyncio.sleep(PERIOD_S)

    async def _page(self, http: Request) -> Response:
        return respond(http, page_files()[INDEX if http.url.path.endswith("/") else ""])

    async def _file(self, http: Request) -> Response:
        name: str = http.path_params["file"]
        file = page_files().get(name)
        if file is None:
            raise ApiError(404, f"The console has no file {name[:80]!r}")
        return respond(http, file)

    async def _events(self, http: Request) -> Response:
        self._check(http)
        self.see()
        return _EventStream(self) if http.method == "GET" else Response()

    async def _snapshot(self, http: Request) -> Response:
        """All of it at once, with the last point only."""
        self._check(http)
        self.see()
        data = self.feed.changes(0, max(0, self.history.num_points - 1))
        return Response(data, headers={"cache-control": "no-store"}, media_type="application/json")

    def _check(self, http: Request) -> None:
        """Another site's page may send a call from an operator's browser. It could not read the
        answer, but would take a place."""
        check_operator(self._ctx, http)
        if is_cross_site(http):
            raise ApiError(403, "Only the console's own page may listen", code="forbidden")


class _EventStream(Response):
    """Server-sent events: all there is, then what changed, until the client goes or the server
    stops. A client that takes no event for WRITE_TIMEOUT_S loses its place, and its connection is
    closed when it reads again, or by the connection's own limit."""

    def __init__(self, console: Console) -> None:
        super().__init__(media_type="text/event-stream")
        # `x-accel-buffering`: proxies pass on each event as it comes.
        more = {**HEADERS, "cache-control": "no-store", "x-accel-buffering": "no"}
        self.headers.update(more)
        del self.headers["content-length"]
        self._console = console

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        listeners = self._console.listeners
        try:
            with listeners.take():
                await self._send_start(send)
                gone = asyncio.create_task(_until_gone(receive))
                try:
                    await self._send_events(scope.get("state", {}), gone, send)
                finally:
                    gone.cancel()
        except LimitReached as taken:
            message = f"{listeners.limit} listen already, which is the limit"
            raise overloaded(message, taken.retry_after_s) from None
        await send({"type": "http.response.body", "body": b""})

    async def _send_start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _send_events(
        self, state: MutableMapping[str, Any], gone: asyncio.Task[None], send: Send
    ) -> None:
        """state: of the call; its "stopping" says that the server is to stop."""
        console = self._console
        tick = num_points = 0
        while not gone.done() and not state.get("stopping"):
            data = console.feed.changes(tick, num_points)
            tick, num_points = console.feed.tick_number, console.history.num_points
            event = b"event: changes\nid: %d\ndata: %s\n\n" % (tick, data)
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except TimeoutError:
                return
            next_tick = asyncio.create_task(console.wait_tick())
            await asyncio.wait({gone, next_tick}, return_when=asyncio.FIRST_COMPLETED)
            next_tick.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
