"""`/console`: the page, and `/console/events`, by which it sees the cluster change.

The page is the same for everyone and has no data. What it shows comes from calls that ask for the
operators' key, or for a tenant's, like any other client's.

The files of the page: read once, served from memory, by name.

The state of the cluster in parts, each with the tick in which it changed last.

A listener says which tick it has seen and gets the parts that changed since, so one that reads
slowly misses what was between, and nothing waits for it in memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from typing import Any

import msgspec
from msgspec import structs
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvrelay.cluster.api.console.history import (
    ALL,
    KEPT_S,
    PERIOD_S,
    POINT_FIELDS,
    WINDOW_S,
    History,
)
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, overloaded, unauthorized
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import check_operator, read_body
from kvrelay.cluster.api.limiter import ConcurrencyLimiter, LimitReached
from kvrelay.cluster.api.openai.schema import parse
from kvrelay.cluster.api.utility.version import VERSION
from kvrelay.cluster.status import ClusterStatus
from kvrelay.router.status import WORKER_FACTS, WorkerStatus

GONE_TICKS = 60  # for so long it is known that a worker is gone; who has seen less gets all

WORKER_FIELDS = (
    *("worker", "model", "role", "state", "epoch", "groups"),
    *("num_inflight", "num_decoding", "cache_hit_rate"),
    *(name for name, fact in WORKER_FACTS.items() if fact.metric),
)
_LOAD = ("num_live", "num_queued", "cache_hit_rate", "prediction_error")
_TOTALS = (
    "requests",
    "retries",
    "migrations",
    "attempts",
    "handoffs",
    "fetches",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "cached_tokens_by_source",
)

_encode = msgspec.json.encode


class Feed:
    """Owned by the console. Invariant: `_parts` and `_workers` are what the last tick saw."""

    def __init__(
        self,
        status: Callable[[], ClusterStatus],
        history: History,
        server: Callable[[], dict[str, Any]],
    ) -> None:
        """`status`: as in `ApiContext`. `server`: what seldom changes, as JSON's types."""
        self._status = status
        self._history = history
        self._server = server
        self._parts: dict[str, tuple[int, bytes]] = {}  # the tick of the last change, and JSON
        self._workers: dict[str, tuple[int, bytes]] = {}
        self._gone: dict[str, int] = {}  # worker -> tick
        self.tick_number = 0

    def tick(self) -> None:
        """See what there is now. Raises what `status` raises, and then has changed nothing."""
        status = self._status()
        self.tick_number += 1
        parts = {
            "server": self._server(),
            "model": status.model,
            "models": [
                {key: _plain(value) for key, value in structs.asdict(each).items()}
                for each in status.models
            ],
            "router": {"router": status.router, "policy": status.policy},
            "load": {key: _plain(getattr(status, key)) for key in _LOAD},
            "totals": {key: getattr(status.totals, key) for key in _TOTALS},
            "routers": status.routers,
            "store": status.state if status.state.store else None,
            "scaling": status.scaling,
        }
        for name, value in parts.items():
            self._put(self._parts, name, value)
        self._put_workers(status.workers)

    def changes(self, tick: int, num_points: int) -> bytes:
        """JSON of what is new for one who has seen `tick` (0: nothing yet) and so many points."""
        is_full = not tick or self.tick_number - tick > GONE_TICKS
        after = 0 if is_full else tick
        fields = [
            b'"tick":%d' % self.tick_number,
            b'"full":%s' % (b"true" if is_full else b"false"),
            b'"parts":' + _joined(self._parts, after),
            b'"workers":' + _joined(self._workers, after),
        ]
        gone = [name for name, at in self._gone.items() if at > after]
        if gone and not is_full:
            fields.append(b'"gone":' + _encode(gone))
        if is_full:
            fields.append(b'"worker_fields":' + _encode(WORKER_FIELDS))
            texts = {name: WORKER_FACTS[name].sentence for name in WORKER_FIELDS}
            fields.append(b'"worker_facts":' + _encode(texts))
            fields.append(b'"point_fields":' + _encode(POINT_FIELDS))
        points = self._history.since(num_points)
        fields.append(b'"points":' + _encode(points.pop(ALL)))
        fields.append(b'"points_by_model":' + _encode(points))
        return b"{" + b",".join(fields) + b"}"

    def _put(self, where: dict[str, tuple[int, bytes]], name: str, value: Any) -> None:
        data = _encode(value)
        known = where.get(name)
        if known is None or known[1] != data:
            where[name] = (self.tick_number, data)

    def _put_workers(self, workers: Iterable[WorkerStatus]) -> None:
        found = set()
        for worker in workers:
            name = worker.worker
            found.add(name)
            values = [_plain(worker.fact(key)) for key in WORKER_FIELDS]
            self._put(self._workers, name, values)
        for name in self._workers.keys() - found:
            del self._workers[name]
            self._gone[name] = self.tick_number
        oldest = self.tick_number - GONE_TICKS
        self._gone = {
            name: at for name, at in self._gone.items() if at >= oldest and name not in found
        }


def _plain(value: Any) -> Any:
    """Rates jitter: what is too small to see is no change."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _joined(parts: dict[str, tuple[int, bytes]], after: int) -> bytes:
    """A JSON object of the parts that changed after this tick."""
    changed = (_encode(name) + b":" + data for name, (at, data) in parts.items() if at > after)
    return b"{" + b",".join(changed) + b"}"


_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
INDEX = "index.html"
_BASE = b"{{base}}"  # before the names of files, in the page


@dataclass(frozen=True, slots=True)
class PageFile:
    body: bytes
    media_type: str
    tag: str


@cache
def page_files() -> dict[str, PageFile]:
    """By name. The page is there twice: as INDEX for `/console/`, and as "" for `/console`, from
    where the same files are found below `console/`."""
    found = {}
    for file in files("kvrelay.cluster.api.console").joinpath("static").iterdir():
        end = file.name.rpartition(".")[2]
        if end in _TYPES:
            found[file.name] = _made(file.read_bytes(), _TYPES[end])
    page = found[INDEX].body
    found[""] = _made(page.replace(_BASE, b"console/"), _TYPES["html"])
    found[INDEX] = _made(page.replace(_BASE, b""), _TYPES["html"])
    return found


def _made(body: bytes, media_type: str) -> PageFile:
    return PageFile(body, media_type, f'"{blake2b(body, digest_size=12).hexdigest()}"')


def respond(http: Request, file: PageFile) -> Response:
    """304 for who has it already."""
    headers = {**HEADERS, "etag": file.tag, "cache-control": "no-cache"}
    known = http.headers.get("if-none-match", "")
    if file.tag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)


class TicketRequest(BaseModel):
    """What the body of POST /console/session has."""

    model_config = ConfigDict(strict=True)

    ticket: str


MAX_LISTENERS = 32
WRITE_TIMEOUT_S = 5.0  # for a listener to take an event
_NOT_KEPT = {"cache-control": "no-store"}
_PROBLEM_S = 60.0  # between two lines about the same trouble

_log = logging.getLogger("kvrelay.api")


class Console:
    """Owned by the application. Between `start` and `close` it reads the metrics once a second,
    and the cluster's status as long as someone listens."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx
        self.history = History(ctx.metrics)
        self.feed = Feed(lambda: ctx.operations.status(), self.history, self._server)
        self.listeners = ConcurrencyLimiter(MAX_LISTENERS, what="consoles listen")
        self._ticked = asyncio.Event()
        self._seen_at = 0.0  # when the status was read last
        self._logged_at = -_PROBLEM_S
        self._task: asyncio.Task[None] | None = None

    def _server(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "models": [*self._ctx.models],
            "key_required": self._ctx.tenants.key_required,
            "period_s": PERIOD_S,
            "window_s": WINDOW_S,
            "kept_s": KEPT_S,
        }

    def routes(self) -> list[ApiRoute]:
        return [
            ApiRoute("GET", "/console", self._page, "A page that shows the server live"),
            ApiRoute("GET", "/console/", self._page, "A page that shows the server live"),
            ApiRoute(
                "POST", "/console/ticket", self._ticket, "A ticket that opens the console once"
            ),
            ApiRoute(
                "POST",
                "/console/session",
                self._begin,
                "A session of the console for a ticket",
                TicketRequest,
            ),
            ApiRoute("GET", "/console/events", self._events, "The status as a stream of events"),
            ApiRoute(
                "GET", "/console/snapshot", self._snapshot, "The status and its history, once"
            ),
            ApiRoute("GET", "/console/{file}", self._file, "Scripts and styles of the page"),
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
                self.history.sample(time.time(), [each.model_name for each in self._ctx.all])
                if self.listeners.num_taken:
                    self.see()
            except Exception:  # in the status: listeners see that nothing changes
                if time.monotonic() - self._logged_at >= _PROBLEM_S:
                    self._logged_at = time.monotonic()
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

    async def _ticket(self, http: Request) -> Response:
        check_operator(self._ctx, http, None)  # a session is not over when a key is revoked
        return JSONResponse({"ticket": self._ctx.console_sessions.ticket()}, headers=_NOT_KEPT)

    async def _begin(self, http: Request) -> Response:
        """A session for a ticket, which is of no use afterwards."""
        given = parse(TicketRequest, await read_body(self._ctx, http)).ticket
        session = self._ctx.console_sessions.begin(given)
        if not session:
            raise unauthorized(
                "This address of the console was used, or is too old: `kvrelay console` prints"
                " another"
            )
        return JSONResponse({"session": session}, headers=_NOT_KEPT)

    async def _events(self, http: Request) -> Response:
        check_operator(self._ctx, http)
        self.see()
        return _EventStream(self) if http.method == "GET" else Response()

    async def _snapshot(self, http: Request) -> Response:
        """Answers with all of it at once, and the last point only."""
        check_operator(self._ctx, http)
        self.see()
        data = self.feed.changes(0, max(0, self.history.num_points - 1))
        return Response(data, headers=_NOT_KEPT, media_type="application/json")


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
            raise overloaded(str(taken), taken.retry_after_s) from None
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
