"""A response that runs without a client, and the events of its stream.

It is served by the endpoint of those in the foreground to nobody: what that would send is kept
here, for whoever asks while it runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Scope

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid
from kvrelay.cluster.api.limiter import CALLER
from kvrelay.cluster.api.openai.formats import COMMENT
from kvrelay.cluster.api.responses.format import begun, error_event

if TYPE_CHECKING:
    from kvrelay.cluster.api.responses.call import ResponseCall

MAX_EVENT_BYTES = 16 * 2**20  # a stream in the background with more cannot be read again
STOP_TIMEOUT_S = 5.0  # for one that is cancelled
_log = logging.getLogger("kvrelay.api")


class Background:
    """A response that runs without a client. Life: planned and admitted, or refused; then its
    beginning is kept, then its end, whatever came of it."""

    def __init__(self, ctx: ApiContext, call: ResponseCall, scope: Scope, tenant: str) -> None:
        self.admitted = asyncio.Event()  # or refused, see `refusal`
        self.refusal: Response | None = None  # what its client is answered instead
        self.is_kept = call.may_settle = asyncio.Event()  # its beginning
        self.is_streamed = bool(call.request.stream)
        self.tenant, self.caller = tenant, CALLER.get()
        call.on_planned = self.admitted.set
        self._cancelled = asyncio.Event()
        self._more = asyncio.Event()  # replaced when it is set
        self._ctx, self._call, self._scope = ctx, call, scope
        self._status, self._body = 0, b""
        self._headers: dict[str, str] = {}
        self._events: list[bytes] = []  # as sent, by their numbers
        self._num_event_bytes = 0
        self._has_ended = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        call = self._call
        try:
            await call.serve(self._scope, self._disconnected, self._take)
        except Exception:
            _log.exception("response %s failed", call.response_id)
            self._status = 500
        try:
            await self._end()
        finally:
            self._has_ended = True
            self._tell()

    async def _end(self) -> None:
        call = self._call
        if not self.admitted.is_set():
            self.refusal = self._refused()
            self.admitted.set()
            return
        await self.is_kept.wait()
        if call.has_settled:
            if self.is_streamed and self._num_event_bytes <= MAX_EVENT_BYTES:
                await call.keep_events(self._events)
            return
        model = call.model.shown_model(call.request.model)
        status = "cancelled" if self._cancelled.is_set() else "failed"
        response = begun(call.request, model, call.response_id, status)
        if status == "failed":
            response["error"] = self._error()
        await call.keep(response)

    async def events(self, first: int) -> AsyncIterator[bytes]:
        """From number `first` to the end of the stream, with a comment where it is silent."""
        while True:
            while first < len(self._events):
                yield self._events[first]
                first += 1
            if self._num_event_bytes > MAX_EVENT_BYTES:
                message = f"The stream has more than {MAX_EVENT_BYTES} bytes: ask for the response"
                error = ApiError(500, message, type="server_error")
                yield b"event: error\ndata: " + json.dumps(error_event(error)).encode() + b"\n\n"
                return
            if self._has_ended:
                return
            try:
                async with asyncio.timeout(self._ctx.settings.keepalive_s or None):
                    await self._more.wait()
            except TimeoutError:
                yield COMMENT

    async def cancel(self) -> None:
        """Returns when it has ended, or after a while."""
        self._cancelled.set()
        await asyncio.wait([self.task], timeout=STOP_TIMEOUT_S)

    def _refused(self) -> Response:
        """Also where it ended before it could be planned, by a bug."""
        if self._status in (0, 200, 500):
            bug = ApiError(500, "Internal error", type="server_error")
            return JSONResponse(bug.body, bug.status)
        return Response(self._body, self._status, self._headers, "application/json")

    def _error(self) -> dict[str, Any]:
        if self._status == 200 and self._events:  # the stream's last event says it
            last = json.loads(self._events[-1].partition(b"\ndata: ")[2])
            found: dict[str, Any] | None = last.get("response", {}).get("error")
            if found is not None:
                return found
        if self._status in (0, 200, 500):
            return {"code": "server_error", "message": "Internal error"}
        error = json.loads(self._body)["error"]
        return {"code": error["code"] or error["type"], "message": error["message"]}

    async def _disconnected(self) -> Message:
        await self._cancelled.wait()
        return {"type": "http.disconnect"}

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            wanted = ("retry-after", "www-authenticate")
            named = ((name.decode(), value.decode()) for name, value in message["headers"])
            self._headers = {name: value for name, value in named if name in wanted}
        elif self._status != 200:
            self._body += message.get("body", b"")
        elif self.is_streamed:
            self._record(message.get("body", b""))

    def _record(self, body: bytes) -> None:
        events = [event + b"\n\n" for event in body.split(b"\n\n") if event.startswith(b"event:")]
        self._num_event_bytes += sum(map(len, events))
        if self._num_event_bytes > MAX_EVENT_BYTES:
            self._events.clear()
        else:
            self._events += events
        self._tell()

    def _tell(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


def first_event(http: Request) -> int:
    """The number of the first event that is wanted. Raises `ApiError`."""
    given = http.query_params.get("starting_after")
    if given is None:
        return 0
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise invalid(
            f"'starting_after': expected the number of an event, got {given[:40]!r}",
            param="starting_after",
        )
    return int(given) + 1


def event_stream(events: AsyncIterator[bytes]) -> Response:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")
