"""The life of one call to a generating endpoint, from its body to its last byte.

`GenerateEndpoint` is an ASGI application: it reads and checks the request, starts the generation
and sends the answer, whole or as server-sent events. While it does, it listens for the client's
going away, which cancels the generation at once. An error before the first byte is a status and
OpenAI's JSON; after it, an event with the same JSON that ends the stream. A stream whose first text
takes long sends its headers and comments meanwhile, so that nothing between it and its client takes
it for dead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from kvrelay.cluster.api.calls import Call
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, draining, overloaded, refused, shutting_down
from kvrelay.cluster.api.incoming import SMALL_BODY_BYTES, caller, held_body, hold
from kvrelay.cluster.api.limiter import LimitReached
from kvrelay.cluster.api.metrics import CANCELLED, CLIENT_GONE, INTERNAL_ERROR
from kvrelay.cluster.api.openai.agent_sessions import session_in, with_session
from kvrelay.cluster.api.openai.formats import COMMENT, Format
from kvrelay.cluster.api.openai.generation import Generation
from kvrelay.cluster.api.openai.parts import Piece, Plan
from kvrelay.cluster.api.openai.plan import call_name, call_of
from kvrelay.cluster.api.openai.schema import ModelRequest
from kvrelay.cluster.api.tenants import Tenant
from kvrelay.engine.request import Refusal
from kvrelay.router.messages import Failed

Request = TypeVar("Request", bound=ModelRequest)

_BYTES_AT_ONCE = 1 << 20  # bytes of an answer


class End(NamedTuple):
    """How a call ended: as metrics have it, and the status that says so."""

    outcome: str
    status: int


_CANCELLED = End(CANCELLED, CLIENT_GONE)
_BUG = End(INTERNAL_ERROR, 500)


def error_response(error: ApiError, body: dict[str, Any] | None = None) -> JSONResponse:
    """body: in another API's form than OpenAI's."""
    # What is left of a body is not read: the connection cannot be used again.
    close = {"connection": "close"} if error.status in (408, 413, 415) else {}
    return JSONResponse(body or error.body, error.status, headers=error.headers | close)


@contextlib.asynccontextmanager
async def _abandon_on_disconnect(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Listen while the answer is made; in the end, leave nothing running."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.abandon()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        generation.close()


class GenerateEndpoint(Generic[Request]):
    """One of the generating endpoints. Owned by the application; its calls share no state but the
    context's."""

    def __init__(
        self,
        ctx: ApiContext,
        name: str,
        read: Callable[[bytes], Request],
        plan: Callable[[ApiContext, Request, Tenant], Awaitable[Plan]],
        format: Callable[[ApiContext, Plan, Request, str], Format],
        refuse: Callable[[ApiError], JSONResponse] = error_response,
    ) -> None:
        """read: a body, or ApiError. refuse: an error before the first byte."""
        self._ctx = ctx
        self._name = name
        self._read = read
        self._plan = plan
        self._format = format
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        http = HttpRequest(scope, receive)
        call = Call(scope["state"]["request_id"], self._name, clock(), http.headers)
        call.is_row = "tenant" in scope["state"]  # as `caller` knows one
        timeout_s = self._ctx.settings.request_timeout_s
        call.timeout_s = scope["state"].get("timeout_s", timeout_s)  # a row has its batch's window
        end = _BUG  # whatever does not replace it: it is counted as what it is
        status, access = 0, self._ctx.access
        if access.is_on:
            scope["state"]["is_logged"], send_on = True, send

            async def send(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                await send_on(message)

        try:
            end = await self._serve(http, call, send)
        except ApiError as error:
            end = _end_of(error)
            await self._refuse(error)(scope, receive, send)
        except ClientDisconnect:
            end = _CANCELLED
        except asyncio.CancelledError:  # by the server's end alone
            end = _end_of(shutting_down())
            raise
        finally:
            call.outcome, call.status = end
            if call.result is not None:
                num_tokens = call.result.usage["completion_tokens"]
                scope["state"]["num_output_tokens"] = num_tokens
            scope["state"].setdefault("ended", [])[:] = [end]
            call.ended_at = clock()
            elapsed_s = call.ended_at - call.arrived_at
            metrics = self._ctx.metrics.of(call.model)
            metrics.ended(self._name, *end, elapsed_s, call.is_row)
            ctx = self._ctx.models.get(call.model, self._ctx)
            served = ctx.calls.ended(call)
            if access.is_on:
                prompt = call.result.prompt if call.result else ()
                ctx.access.write(scope, status, elapsed_s, call.outcome, served, prompt)

    @contextlib.contextmanager
    def _admitted(self, ctx: ApiContext) -> Iterator[None]:
        """A place among those that are served: not before the body has come, which takes as long as
        a client likes."""
        gauge, live = ctx.metrics.live_requests, ctx.live
        try:
            with self._refuse_when_full(), live.take():
                gauge.set(live.num_taken)
                yield
        finally:
            gauge.set(live.num_taken)

    @contextlib.contextmanager
    def _refuse_when_full(self) -> Iterator[None]:
        try:
            yield
        except LimitReached as taken:
            raise overloaded(str(taken), taken.retry_after_s) from None

    @contextlib.asynccontextmanager
    async def _in_time(self, call: Call) -> AsyncIterator[None]:
        """What has to be over before a request can be submitted."""
        try:
            async with asyncio.timeout_at(call.arrived_at + call.timeout_s):
                yield
        except TimeoutError:
            failed = Failed("", Refusal.DEADLINE, f"not begun within {call.timeout_s:g} s")
            raise refused(failed) from None

    async def _serve(self, http: HttpRequest, call: Call, send: Send) -> End:
        """Serve one request; return how it ended. Raises `ApiError` before the first byte only."""
        if self._ctx.operations.draining:
            raise draining()
        tenant = caller(self._ctx, http)
        clock = asyncio.get_running_loop().time
        with self._refuse_when_full():  # by the model with most room: it is not known which
            min(self._ctx.all, key=lambda each: each.live.num_taken).live.check()
        async with contextlib.AsyncExitStack() as arrived:
            async with self._in_time(call):
                request, name = await self._asked(http, call, arrived)
            ctx = self._ctx.chosen(request.model, tenant)
            call.model = ctx.model_name
            session = session_in(request, http.headers, ctx.settings.session_headers)
            about = call_of(ctx, request, tenant, name, call.timeout_s)
            about = replace(about, root=session.name)
            failed = ctx.refuse_early(about)
            if failed is not None:
                raise refused(failed)
            rates, num_taken = ctx.rates, about.num_prompt_tokens
            with self._admitted(ctx):
                rates.admit(clock(), tenant, num_taken)
                try:
                    async with self._in_time(call):
                        plan = await self._plan(ctx, request, tenant)
                    await arrived.aclose()
                    plan = replace(with_session(plan, session), call=about.name)
                    return await self._generate(ctx, http, call, send, request, plan)
                finally:
                    done = call.result if call.result and call.result.has_begun else None
                    used = 0 if done is None else done.usage["total_tokens"]
                    rates.settle(clock(), tenant, num_taken, used)

    async def _asked(
        self, http: HttpRequest, call: Call, held: contextlib.AsyncExitStack
    ) -> tuple[Request, bytes]:
        """The request, and the name of its call. held: until the request is planned. Raises
        `ApiError`."""
        body = await held.enter_async_context(held_body(self._ctx, http))
        call.received_at = asyncio.get_running_loop().time()
        if len(body) <= SMALL_BODY_BYTES:
            return self._named(body)
        return await self._ctx.in_json_thread(len(body), self._named, body)

    def _named(self, body: bytes) -> tuple[Request, bytes]:
        return self._read(body), call_name(body)

    async def _generate(
        self,
        ctx: ApiContext,
        http: HttpRequest,
        call: Call,
        send: Send,
        request: Request,
        plan: Plan,
    ) -> End:
        clock = asyncio.get_running_loop().time
        generation = Generation(ctx, plan, call)
        format = self._format(ctx, plan, request, call.request_id)
        call.submitted_at = clock()
        headers = self._ctx.rates.headers(clock(), plan.tenant)
        try:
            async with _abandon_on_disconnect(generation, http.receive):
                if plan.stream:
                    tick_s = self._ctx.settings.keepalive_s / 2  # so no silence is longer than that
                    return await _stream(generation, format, send, headers, tick_s)
                return await _whole(generation, format, send, headers)
        finally:
            call.result = generation.result()
            ctx.metrics.used(plan.tenant.name, call.result.usage)
            if call.result.has_begun:  # what was refused has used nothing
                ctx.keys.used(plan.tenant, ctx.model_name, call.result.usage)


def _end_of(error: ApiError) -> End:
    return End(error.outcome, error.status)


def _finished(generation: Generation) -> End:
    """Returns how a call ended whose choices all have."""
    reason = generation.choices[0].finish_reason
    return _BUG if reason is None else End(reason, 200)


def _not_read(body: bytes) -> NoReturn:
    raise AssertionError("a request that has been read has no body")


class ReadEndpoint(GenerateEndpoint[Request]):
    """Serves one request that was read and made into a chat before it came here."""

    def __init__(
        self,
        ctx: ApiContext,
        name: str,
        request: tuple[Request, bytes, int],
        plan: Callable[[ApiContext, Request, Tenant], Awaitable[Plan]],
        format: Callable[[ApiContext, Plan, Request, str], Format],
    ) -> None:
        """request: with the name of its call, and its size in bytes."""
        super().__init__(ctx, name, _not_read, plan, format)
        self._request = request

    async def _asked(
        self, http: HttpRequest, call: Call, held: contextlib.AsyncExitStack
    ) -> tuple[Request, bytes]:
        request, name, num_bytes = self._request
        if num_bytes > SMALL_BODY_BYTES:
            hold(held.enter_context(self._ctx.bodies.share()), num_bytes)
        call.received_at = asyncio.get_running_loop().time()
        return request, name


async def _whole(
    generation: Generation,
    format: Format,
    send: Send,
    headers: Mapping[str, str],
) -> End:
    pieces: list[Piece] = []
    async for batch in generation.batches():
        pieces.extend(map(format.condensed, batch))
    if generation.gone:
        return _CANCELLED
    content = await format.whole(pieces, generation.usage())
    await format.settled()
    body = msgspec.json.encode(content)
    start = Response(media_type="application/json", headers=headers)
    start.headers["content-length"] = str(len(body))
    await send({"type": "http.response.start", "status": 200, "headers": start.raw_headers})
    for begin in range(0, len(body), _BYTES_AT_ONCE):
        await _send_body(send, body[begin : begin + _BYTES_AT_ONCE])
        await asyncio.sleep(0)
    await _end_body(send)
    return _finished(generation)


async def _stream(
    generation: Generation, format: Format, send: Send, headers: Mapping[str, str], tick_s: float
) -> End:
    """Nothing is sent before the first text, so that a refusal can still be a status, but where
    that takes longer than `tick_s` seconds; 0: however long it takes."""
    more = [(name.encode(), value.encode()) for name, value in headers.items()]
    start = {**_START, "headers": [*_HEADERS, *more]}
    is_started = is_open = has_sent = False
    try:
        async for batch in generation.batches(tick_s):
            events = [] if is_open or not batch else format.opening(generation.usage())
            is_open = is_open or bool(batch)
            for piece in batch:
                events.extend(format.chunks(piece))
            data = b"".join(map(format.encode, events))
            if not batch and not has_sent:  # nothing since the last tick
                data = format.alive if is_open else COMMENT
            has_sent = bool(batch) and (has_sent or bool(data))
            if data and not is_started:
                is_started = True
                await send(start)
            if data:
                await _send_body(send, data)
    except ApiError as error:
        if not is_started:
            raise
        end = _end_of(error)
        events = format.failed(error) if is_open else format.refused(error, generation.usage())
        await _send_body(send, b"".join(map(format.encode, events)))
    else:
        if generation.gone:
            return _CANCELLED
        end = _finished(generation)
        events = format.closing(generation.usage())
        await format.settled()
        await _send_body(send, b"".join(map(format.encode, events)) + format.done)
    await _end_body(send)
    return end


_START = {"type": "http.response.start", "status": 200}
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _end_body(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})
