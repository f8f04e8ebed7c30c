"""Request bodies: read under a limit of size and of time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from cluster.api.context import ApiLimits
from cluster.api.errors import ApiError


async def read_body(request: Request, limits: ApiLimits) -> bytes:
    """The whole body. Raises `ApiError` (400, 408, 413) and starlette's `ClientDisconnect`."""
    limit = limits.max_body_bytes
    declared = request.headers.get("content-length", "0")
    if not (declared.isascii() and declared.isdigit() and len(declared) < 20):
        raise ApiError(400, f"content-length {declared[:40]!r} is not a number of bytes")
    # A client reads its answer after it has sent its body: a body that is not much too long is
    # taken in and thrown away, so that the client sees why it was refused.
    if int(declared) > 2 * limit:
        raise _too_large(limit)
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
                else:
                    chunks.append(chunk)
    except TimeoutError:
        raise ApiError(
            408,
            f"The body did not arrive within {limits.body_timeout_s:g} s",
            type="timeout_error",
            code="request_timeout",
        ) from None
    if size > limit:
        raise _too_large(limit)
    return b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"The body is larger than the limit of {limit} bytes", code="request_too_large"
    )
