"""What every call begins with: the tenant of its API key, or whether an operator calls; its body;
how much of a list it wants."""

from __future__ import annotations

import asyncio
import hmac
import reprlib
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from kvrelay.cluster.api.errors import ApiError, invalid, overloaded, unauthorized
from kvrelay.cluster.api.keys.record import Scope
from kvrelay.cluster.api.limiter import CALLER, TENANT, Caller, LimitReached, network_of
from kvrelay.cluster.api.pages import PageQuery, list_of
from kvrelay.cluster.api.tenants import Tenant

if TYPE_CHECKING:
    from kvrelay.cluster.api.context import ApiContext

_SEND_KEY = (
    ": send their key, api.operations_key or what is in operations.key of the server's state "
    "directory, as the API key"
)
# zlib's, by content-encoding. zstd is not in this version of Python's library.
_WINDOW_BITS = {
    "gzip": 16 + zlib.MAX_WBITS,
    "x-gzip": 16 + zlib.MAX_WBITS,
    "deflate": zlib.MAX_WBITS,
}
_INFLATED_AT_ONCE = 256 * 1024
# So many are always taken, since the number of connections bounds them, and parsed in the event
# loop; a larger body is parsed in a thread.
SMALL_BODY_BYTES = 64 * 1024


def caller(ctx: ApiContext, http: HTTPConnection) -> Tenant:
    """Raises `ApiError` (401, 403). Nothing but the key counts, and the key is never shown; a row
    of a batch comes from within, with its tenant."""
    known: Tenant | None = http.scope.get("state", {}).get("tenant")
    if known is not None:
        _is_called_by(ctx, http, known)
        return known
    key = _key_of(http)
    if not key:
        tenant = ctx.tenants.find(None)
        why = "No API key was given: send it as 'Authorization: Bearer KEY'"
    else:
        tenant = ctx.tenants.find(key) or ctx.keys.tenant_of(key, ctx.tenants)
        why = "The API key is not one of this server's"
        if is_operator(ctx, http):
            why = "This is the key of operators, who generate nothing: send one of a client"
    if tenant is None:
        raise unauthorized(why)
    _is_called_by(ctx, http, tenant)
    return tenant


def _is_called_by(ctx: ApiContext, http: HTTPConnection, tenant: Tenant) -> None:
    TENANT.set(tenant.name)
    CALLER.set(caller_at(ctx, tenant.name, http.client.host if http.client else ""))


def caller_at(ctx: ApiContext, tenant: str, host: str) -> Caller:
    """Who shares the API with others: by the address alone, where all are one tenant."""
    address = network_of(host)
    return (tenant, address) if ctx.tenants.are_several else (address,)


def owner(ctx: ApiContext, http: HTTPConnection) -> Tenant:
    """The tenant of a call that shows what others have asked, or changes it without knowing an id
    that cannot be guessed. Where clients have no keys they are all one tenant: then it is for
    operators, unless `api.insecure`. Raises `ApiError` (401)."""
    tenant = caller(ctx, http)
    if not (ctx.tenants.key_required or ctx.settings.insecure or is_operator(ctx, http)):
        raise unauthorized(
            f"Without keys, sessions and lists of requests, answers and files are for operators"
            f"{_SEND_KEY}, or set api.key, or api.insecure to show them to all"
        )
    return tenant


def _key_of(http: HTTPConnection) -> str:
    """ "": there is none."""
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
    key = key.strip()
    if "x-api-key" in http.headers and not key:  # Anthropic's clients
        scheme, key = "bearer", http.headers["x-api-key"].strip()
    return key if scheme.lower() == "bearer" else ""


def check_operator(
    ctx: ApiContext, http: HTTPConnection, scope: Scope | None = Scope.OPERATE
) -> None:
    """Keys of tenants say who may generate, not who may operate; nor does it count from where a
    call comes. Raises `ApiError` (401)."""
    if not is_operator(ctx, http, scope):
        raise unauthorized("This is for operators" + _SEND_KEY)


def is_operator(ctx: ApiContext, http: HTTPConnection, scope: Scope | None = Scope.OPERATE) -> bool:
    """Whether it has the operators' key, a session of the console, or a key that was made with that
    scope; None: no such key will do. Takes as long whatever the operators' key is."""
    wanted = ctx.settings.operations_key.encode()
    given = _key_of(http)
    digests = (sha256(each).digest() for each in (given.encode("utf-8", "surrogatepass"), wanted))
    is_key = hmac.compare_digest(*digests) and bool(wanted)
    return is_key or ctx.console_sessions.admits(given) or ctx.keys.allows(given, scope)


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


def page_query(http: Request, most: int = 100) -> PageQuery:
    """most: entries of a page. Raises ApiError."""
    order = http.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid(f"'order': expected asc or desc, got {order[:40]!r}", param="order")
    return PageQuery(order == "asc", http.query_params.get("after"), limit_of(http, 20, most))


def no_entry(after: str) -> ApiError:
    return invalid(f"'after': there is no entry {after[:100]!r}", param="after")


def page_of(http: Request, data: list[dict[str, Any]]) -> dict[str, Any]:
    """A page of a list whose entries have ids, oldest first. Raises ApiError."""
    is_asc, after, limit = page_query(http)
    wanted = data if is_asc else data[::-1]
    if after is not None:
        places = [i for i, entry in enumerate(wanted) if entry["id"] == after]
        if not places:
            raise no_entry(after)
        wanted = wanted[places[0] + 1 :]
    return list_of(wanted[:limit], len(wanted) > limit)


def counted(
    ctx: ApiContext, call: Callable[[Request, Tenant], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint whose calls are utility calls."""

    async def answer(http: Request) -> Response:
        with utility_call(ctx, http) as tenant:
            return await call(http, tenant)

    return answer


def check_token_ids(ctx: ApiContext, param: str, tokens: Collection[int]) -> None:
    """Raises `ApiError` (400), which names one that is none."""
    size = ctx.tokenizer.vocab_size
    wrong = [t for t in (min(tokens), max(tokens)) if not 0 <= t < size] if tokens else []
    if wrong:
        raise invalid(
            f"'{param}': {reprlib.repr(wrong[0])} is not a token id, they are 0 to {size - 1}:"
            " out of vocabulary",
            param=param,
        )


@contextmanager
def utility_call(ctx: ApiContext, http: Request) -> Iterator[Tenant]:
    """The tenant of a call that generates nothing and costs work all the same: it keeps a place,
    and counts as a request. Raises `ApiError` (401, 429)."""
    tenant = caller(ctx, http)
    with place(ctx, tenant):
        yield tenant


@contextmanager
def place(ctx: ApiContext, tenant: Tenant) -> Iterator[None]:
    """For work of a call that is counted so. Raises `ApiError` (429)."""
    try:
        with ctx.live.take():
            ctx.rates.admit(asyncio.get_running_loop().time(), tenant, 0)
            yield
    except LimitReached as taken:
        raise overloaded(str(taken), taken.retry_after_s) from None


async def read_body(ctx: ApiContext, request: Request) -> bytes:
    """Reads a small body as `held_body` does."""
    async with held_body(ctx, request) as body:
        return body


@asynccontextmanager
async def held_body(ctx: ApiContext, request: Request) -> AsyncIterator[bytes]:
    """The whole body, inflated, whose bytes count until it is no longer needed. Raises `ApiError`
    (400, 408, 413, 415, 429) and starlette's `ClientDisconnect`."""
    with ctx.bodies.share() as take:
        yield await _received(ctx, request, take)


def _check_media_type(ctx: ApiContext, request: Request) -> None:
    """Pages in a browser may post forms, plain text, and bytes of no type to any server without
    asking it (CORS), but not JSON. Raises ApiError (415)."""
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type == "application/json" or media_type.endswith("+json"):
        return
    has_body = "transfer-encoding" in request.headers or request.headers.get(
        "content-length", "0"
    ).strip("0")
    if media_type:
        why = f"content-type {media_type[:40]!r} is not supported: send application/json"
    elif has_body and not ctx.tenants.key_required:
        why = "Without keys a body needs a content-type: send application/json"
    else:
        return
    raise ApiError(415, why, code="unsupported_content_type")


async def _received(ctx: ApiContext, request: Request, take: Callable[[int], bool]) -> bytes:
    _check_media_type(ctx, request)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in (*_WINDOW_BITS, "identity", ""):
        raise ApiError(
            415,
            f"content-encoding {encoding[:40]!r} is not supported: send gzip, deflate, or the body"
            " as it is",
            code="unsupported_content_encoding",
        )
    limits = ctx.settings
    limit = limits.max_body_bytes
    declared = request.headers.get("content-length", "0")
    if not (declared.isascii() and declared.isdigit() and len(declared) < 20):
        raise ApiError(400, f"content-length {declared[:40]!r} is not a number of bytes")
    # A client reads its answer after it has sent its body: a body that is not much too long is
    # taken in and thrown away, so that the client sees why it was refused.
    if int(declared) > 2 * limit:
        raise too_large(limit)
    size = 0
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > 2 * limit:
                    break
                if size > limit:
                    chunks.clear()
                    continue
                if size > SMALL_BODY_BYTES:
                    hold(take, len(chunk))
                chunks.append(chunk)
        if encoding in _WINDOW_BITS and size <= limit:
            return await _inflated(ctx, b"".join(chunks), encoding, take)
    except TimeoutError:
        raise ApiError(
            408,
            f"The body did not arrive within {limits.body_timeout_s:g} s",
            type="timeout_error",
            code="request_timeout",
        ) from None
    if size > limit:
        raise too_large(limit)
    return b"".join(chunks)


async def _inflated(
    ctx: ApiContext, body: bytes, encoding: str, take: Callable[[int], bool]
) -> bytes:
    """A part at a time, so that no more is made than may be."""
    inflate = zlib.decompressobj(_WINDOW_BITS[encoding])
    parts: list[bytes] = []
    size = 0
    try:
        if encoding == "deflate" and body[:1] and (body[0] & 0x0F != 8 or body[0] >> 4 > 7):
            inflate = zlib.decompressobj(-zlib.MAX_WBITS)  # without zlib's header, as some send it
        while not inflate.eof:
            part = await ctx.in_json_thread(
                _INFLATED_AT_ONCE, inflate.decompress, body, _INFLATED_AT_ONCE
            )
            body, size = inflate.unconsumed_tail, size + len(part)
            if size > ctx.settings.max_body_bytes:
                raise too_large(ctx.settings.max_body_bytes)
            if size > SMALL_BODY_BYTES:
                hold(take, len(part))
            parts.append(part)
            if not part and not body:
                break
    except zlib.error as error:
        raise invalid(f"The body is not valid {encoding}: {error}") from None
    if not inflate.eof or inflate.unused_data:
        raise invalid(f"The body is not one whole {encoding} stream")
    return b"".join(parts)


def hold(take: Callable[[int], bool], num_bytes: int) -> None:
    """take: as of `ByteBudget.share`. Raises `ApiError` (429)."""
    if not take(num_bytes):
        raise overloaded("The bodies of other requests take all memory", 1.0)


def too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"The body is larger than the limit of {limit} bytes", code="request_too_large"
    )
