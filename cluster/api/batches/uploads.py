"""Bodies that are too large for memory, written as they come; and records of files and batches."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from starlette.requests import Request

from kvrelay.cluster.api.batches.folder import Full, private_file
from kvrelay.cluster.api.batches.store import Record, StoreAway, is_full
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, disk_full, overloaded, store_away
from kvrelay.cluster.api.incoming import too_large
from kvrelay.cluster.api.keys.record import ApiKey
from kvrelay.cluster.api.limiter import ConcurrencyLimiter, LimitReached, Place

if TYPE_CHECKING:
    from kvrelay.cluster.api.context import AnyBatchStore

WINDOW_S = 86_400  # OpenAI's and Anthropic's only one
MAX_UPLOADS = 32  # at once
MAX_UPLOAD_S = 3600.0
LEAST_RATE = 16 * 1024  # bytes a second, measured anew every `body_timeout_s`
_WRITTEN_AT_ONCE = 1 << 20
_MADE_ROOM = (
    f"{MAX_UPLOADS} files are being uploaded, of which this caller had the most: its slowest, this"
    " one, made room for another caller's first"
)

_log = logging.getLogger("kvrelay.api")
P = ParamSpec("P")
T = TypeVar("T")


async def on_disk(call: Callable[P, T], *args: P.args, **kw: P.kwargs) -> T:
    """Calls what may block in a thread. Raises ApiError (503, 507)."""
    with _disk():
        return await asyncio.to_thread(call, *args, **kw)


def file_record(name: str, size: int, now: int, keep_s: int) -> Record:
    """What is kept of an input."""
    return {
        "id": f"file-{secrets.token_hex(12)}",
        "object": "file",
        "bytes": size,
        "created_at": now,
        "expires_at": now + keep_s,
        "filename": name,
        "purpose": "batch",
        "status": "processed",
    }


def batch_record(
    prefix: str, endpoint: str, input_file: str, now: int, key: ApiKey | None = None
) -> Record:
    """A batch that nobody has looked at. key: by which it was asked for, if operators made it."""
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling")
    return {
        "id": f"{prefix}_{secrets.token_hex(12)}",
        "object": "batch",
        "endpoint": endpoint,
        "errors": None,
        "input_file_id": input_file,
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_S,
        **{f"{name}_at": None for name in (*times, "cancelled")},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": None,
        "key": key.id if key else "",
    }


def cancel(store: AnyBatchStore, name: str, now: int) -> None:
    """Unless the batch is about to end."""

    def cancelling(record: Record) -> Record:
        if record["status"] not in ("validating", "in_progress"):
            return record
        return record | {"status": "cancelling", "cancelling_at": now}

    store.change_batch(name, cancelling)


class _Receiving:
    """An upload whose body comes."""

    def __init__(self, ends: asyncio.Timeout, now: float) -> None:
        self._ends, self._began, self.num_bytes = ends, now, 0

    def rate(self, now: float) -> float:
        """Returns bytes a second, since it began."""
        return self.num_bytes / max(1.0, now - self._began)

    def end(self, now: float) -> None:
        self._ends.reschedule(now)


class Uploads:
    """Receives bodies, some at once. Who has none under way gets the place of who has most, if
    there is no other: its slowest ends. Owned by `BatchCalls`."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx
        self._places = ConcurrencyLimiter(MAX_UPLOADS, what="files are being uploaded")
        self._receiving: dict[Place, _Receiving] = {}

    @contextmanager
    def _place(self) -> Iterator[Place]:
        """Keeps one of those that there are. Raises LimitReached."""
        instead, now = None, asyncio.get_running_loop().time()
        try:
            self._places.check()
        except LimitReached:
            yielding = self._places.who_yields()
            own = [each for each in self._receiving if each.caller == yielding]
            if not own:
                raise
            instead = min(own, key=lambda each: self._receiving[each].rate(now))
            self._receiving.pop(instead).end(now)
        with self._places.take(instead) as place:
            yield place

    @asynccontextmanager
    async def received(
        self,
        http: Request,
        tenant: str,
        feed: Callable[[bytes], None],
        unwritten: bytearray,
    ) -> AsyncIterator[Path]:
        """The body goes to `feed`, and what that puts into `unwritten` to a file, which is there
        within. Raises ApiError (400, 403, 408, 413, 429, 507)."""
        draft = self._ctx.batches.draft(tenant)
        try:
            with self._place() as place:
                with _disk():
                    await self._receive(http, tenant, draft, feed, unwritten, place)
                yield draft
        except LimitReached as reached:
            raise overloaded(str(reached), max(5.0, reached.retry_after_s)) from None
        except Full as full:
            raise ApiError(403, f"This API key has {full}", code="file_quota_exceeded") from None
        finally:
            draft.unlink(missing_ok=True)

    async def keep(self, tenant: str, record: Record, draft: Path) -> None:
        """Makes a file of a draft. Raises ApiError (507), and Full."""
        most = self._ctx.settings.max_tenant_file_bytes
        await on_disk(self._ctx.batches.add_file, tenant, record, draft, most)

    async def _receive(
        self,
        http: Request,
        tenant: str,
        draft: Path,
        feed: Callable[[bytes], None],
        unwritten: bytearray,
        place: Place,
    ) -> None:
        limits, size, check_room = self._ctx.settings, 0, self._ctx.batches.check_room
        declared = http.headers.get("content-length", "")
        # What is around the file in a form is small.
        most = limits.max_file_bytes + _WRITTEN_AT_ONCE
        if declared.isascii() and declared.isdigit() and int(declared[:19]) > most:
            raise too_large(limits.max_file_bytes)
        chunks, loop = http.stream().__aiter__(), asyncio.get_running_loop()
        began, num_received = loop.time(), 0  # of the window that its rate is measured in
        try:
            with open(draft, "xb", opener=private_file) as file:
                async with asyncio.timeout(MAX_UPLOAD_S) as ends:
                    own = self._receiving[place] = _Receiving(ends, began)
                    while True:
                        async with asyncio.timeout(limits.body_timeout_s):
                            chunk = await anext(chunks, None)
                        if chunk is not None:
                            feed(chunk)
                            num_received += len(chunk)
                            own.num_bytes += len(chunk)
                            if (seconds := loop.time() - began) >= limits.body_timeout_s:
                                if num_received < LEAST_RATE * seconds:
                                    raise too_slow(num_received, seconds)
                                began, num_received = loop.time(), 0
                        if size + len(unwritten) > limits.max_file_bytes:
                            raise too_large(limits.max_file_bytes)
                        if chunk is None or len(unwritten) >= _WRITTEN_AT_ONCE:
                            await asyncio.to_thread(file.write, unwritten)
                            size += len(unwritten)
                            unwritten.clear()
                            may_have = limits.max_tenant_file_bytes
                            await asyncio.to_thread(check_room, tenant, may_have)
                        if chunk is None:
                            self._receiving.pop(place, None)  # it has come
                            break
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
        except TimeoutError:
            if place.is_lost:
                raise overloaded(_MADE_ROOM, 5.0) from None
            message = f"No part of the file came within {limits.body_timeout_s:g} s"
            raise ApiError(408, message, type="timeout_error", code="request_timeout") from None
        finally:
            self._receiving.pop(place, None)


def too_slow(num_bytes: int, seconds: float) -> ApiError:
    message = (
        f"{num_bytes} bytes of the file came in {seconds:.0f} s: expected {LEAST_RATE} a second"
    )
    return ApiError(408, message, type="timeout_error", code="request_timeout")


@contextmanager
def _disk() -> Iterator[None]:
    """Raises ApiError (507) where the disk is full."""
    try:
        yield
    except StoreAway as error:
        _log.warning("%s", error)
        raise store_away() from None
    except (OSError, sqlite3.OperationalError) as error:
        if not is_full(error):
            raise
        _log.warning("a call finds no room on the disk: %s", error)
        raise disk_full() from None
