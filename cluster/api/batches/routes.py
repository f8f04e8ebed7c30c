"""OpenAI's `/v1/files` and `/v1/batches`. What is asked of a batch is kept; `Runner` does it."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from kvrelay.cluster.api.batches.multipart import FormReader
from kvrelay.cluster.api.batches.rows import ENDPOINTS
from kvrelay.cluster.api.batches.runner import Runner
from kvrelay.cluster.api.batches.store import KEEP_S, Full, Record, private_file
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, disk_full, invalid, overloaded
from kvrelay.cluster.api.incoming import caller, owner, page_of, read_body, too_large
from kvrelay.cluster.api.openai.schema import Metadata, parse

WINDOW_S = 86_400  # OpenAI's only one
LEAST_KEEP_S = 3600
MAX_UPLOADS = 8  # at once
MAX_UPLOAD_S = 3600.0
_WRITTEN_AT_ONCE = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CANCELLABLE = ("validating", "in_progress")

P = ParamSpec("P")
T = TypeVar("T")


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(strict=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_KEEP_S, le=int(KEEP_S))


class BatchRequest(BaseModel):
    model_config = ConfigDict(strict=True)

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchCalls:
    """Answers for files and batches. Owned by the application."""

    def __init__(self, ctx: ApiContext, clock: Callable[[], float] = time.time) -> None:
        self._ctx, self._clock = ctx, clock
        self._num_uploads = 0
        self._runner: Runner | None = None

    def start(self, routes: Iterable[BaseRoute]) -> None:
        """routes: of the application, which serve rows too."""
        endpoints = {
            route.path: route.app
            for route in routes
            if isinstance(route, Route) and "POST" in (route.methods or ())
        }
        self._runner = Runner(self._ctx, {path: endpoints[path] for path in ENDPOINTS})
        self._runner.start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.close()

    def routes(self) -> list[Route]:
        file, batch = "/v1/files/{id}", "/v1/batches/{id}"
        return [
            Route("/v1/files", self._upload, methods=["POST"]),
            Route("/v1/files", self._files, methods=["GET"]),
            Route(file, self._file, methods=["GET"]),
            Route(file, self._delete, methods=["DELETE"]),
            Route(f"{file}/content", self._content, methods=["GET"]),
            Route("/v1/batches", self._create, methods=["POST"]),
            Route("/v1/batches", self._batches, methods=["GET"]),
            Route(batch, self._batch, methods=["GET"]),
            Route(f"{batch}/cancel", self._cancel, methods=["POST"]),
        ]

    async def _kept(self, call: Callable[P, T], *args: P.args, **kw: P.kwargs) -> T:
        """Calls the store in a thread. Raises ApiError (507)."""
        with _on_disk():
            return await asyncio.to_thread(call, *args, **kw)

    # Files.

    async def _upload(self, http: Request) -> Response:
        tenant = caller(self._ctx, http)
        if self._num_uploads >= MAX_UPLOADS:
            raise overloaded(f"{MAX_UPLOADS} files are being uploaded, which is the limit", 5.0)
        draft = self._ctx.batches.draft(tenant.name)
        self._num_uploads += 1
        try:
            form, size = await self._received(http, draft, tenant.name)
            if form.filename is None:
                raise invalid("'file' is missing: send the file as a part of the form", "file")
            record = self._file_record(form, size)
            most = self._ctx.settings.max_tenant_file_bytes
            await self._kept(self._ctx.batches.add_file, tenant.name, record, draft, most)
        except Full as full:
            raise ApiError(403, f"This API key has {full}", code="file_quota_exceeded") from None
        except ClientDisconnect:
            return Response(status_code=400)
        finally:
            self._num_uploads -= 1
            draft.unlink(missing_ok=True)
        return JSONResponse(record)

    async def _received(self, http: Request, draft: Path, tenant: str) -> tuple[FormReader, int]:
        """Writes the file of a form. Raises ApiError (400, 408, 413, 415, 507) and Full."""
        limits, size = self._ctx.settings, 0
        declared = http.headers.get("content-length", "")
        # What is around the file in the form is small.
        most = limits.max_file_bytes + _WRITTEN_AT_ONCE
        if declared.isascii() and declared.isdigit() and int(declared[:19]) > most:
            raise too_large(limits.max_file_bytes)
        unwritten = bytearray()
        form = FormReader(http.headers.get("content-type", ""), unwritten.extend)
        chunks = http.stream().__aiter__()
        try:
            with _on_disk(), open(draft, "xb", opener=private_file) as file:
                async with asyncio.timeout(MAX_UPLOAD_S):
                    while True:
                        async with asyncio.timeout(limits.body_timeout_s):
                            chunk = await anext(chunks, None)
                        if chunk is not None:
                            form.feed(chunk)
                        if size + len(unwritten) > limits.max_file_bytes:
                            raise too_large(limits.max_file_bytes)
                        if chunk is None or len(unwritten) >= _WRITTEN_AT_ONCE:
                            await asyncio.to_thread(file.write, unwritten)
                            size += len(unwritten)
                            unwritten.clear()
                            room = self._ctx.batches.check_room, tenant
                            await asyncio.to_thread(*room, limits.max_tenant_file_bytes)
                        if chunk is None:
                            break
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
        except TimeoutError:
            message = f"No part of the file came within {limits.body_timeout_s:g} s"
            raise ApiError(408, message, type="timeout_error", code="request_timeout") from None
        if not form.is_whole:
            raise invalid("The form ends before its last boundary")
        return form, size

    def _file_record(self, form: FormReader, size: int) -> Record:
        """Returns what is kept of a file. Raises ApiError (400)."""
        purpose, now = form.fields.get("purpose", ""), int(self._clock())
        if purpose != "batch":
            raise invalid(f"'purpose': expected batch, got {purpose[:40]!r}", "purpose")
        keep_s = form.fields.get("expires_after[seconds]", str(int(KEEP_S)))
        is_number = keep_s.isascii() and keep_s.isdigit() and len(keep_s) < 9
        if not is_number or not LEAST_KEEP_S <= int(keep_s) <= KEEP_S:
            raise invalid(
                f"'expires_after': expected {LEAST_KEEP_S} to {int(KEEP_S)} seconds, got "
                f"{keep_s[:20]!r}",
                "expires_after",
            )
        return {
            "id": f"file-{secrets.token_hex(12)}",
            "object": "file",
            "bytes": size,
            "created_at": now,
            "expires_at": now + int(keep_s),
            "filename": form.filename,
            "purpose": purpose,
            "status": "processed",
        }

    async def _find_file(self, http: Request) -> tuple[str, Record]:
        """Also the tenant's name. Raises ApiError (401, 404)."""
        tenant, name = caller(self._ctx, http).name, http.path_params["id"]
        found = await self._kept(self._ctx.batches.file, tenant, name)
        if found is None:
            raise _no_file(name)
        return tenant, found

    async def _files(self, http: Request) -> Response:
        tenant, purpose = owner(self._ctx, http), http.query_params.get("purpose")
        found = await self._kept(self._ctx.batches.files, tenant.name)
        data = [record for record in found if purpose in (None, record["purpose"])]
        return JSONResponse(page_of(http, data))

    async def _file(self, http: Request) -> Response:
        return JSONResponse((await self._find_file(http))[1])

    async def _content(self, http: Request) -> Response:
        _, record = await self._find_file(http)
        path = self._ctx.batches.path(record["id"])
        if not path.exists():
            raise _no_file(record["id"])
        return FileResponse(path, media_type="application/jsonl", filename=record["filename"])

    async def _delete(self, http: Request) -> Response:
        tenant, record = await self._find_file(http)
        try:
            await self._kept(self._ctx.batches.delete_file, tenant, record["id"])
        except Full as batch:
            message = f"The file is the input of {batch}, which has not ended: cancel it first"
            raise ApiError(409, message, type="conflict_error", code="file_in_use") from None
        return JSONResponse({"id": record["id"], "object": "file", "deleted": True})

    # Batches.

    async def _create(self, http: Request) -> Response:
        tenant = caller(self._ctx, http)
        request = parse(BatchRequest, await read_body(self._ctx, http))
        store, now = self._ctx.batches, int(self._clock())
        file = await self._kept(store.file, tenant.name, request.input_file_id)
        if file is None:
            raise _no_file(request.input_file_id, "input_file_id")
        if file["purpose"] != "batch":
            message = f"'input_file_id': its purpose is {file['purpose']}, expected batch"
            raise invalid(message, "input_file_id")
        keep = request.output_expires_after
        record = _batch_record(request, now) | {"keep_s": keep.seconds if keep else None}
        try:
            await self._kept(store.add_batch, tenant.name, record)
        except Full as full:
            raise overloaded(f"This API key has {full}", 60.0) from None
        self._wake()
        return JSONResponse(_shown(record))

    async def _batches(self, http: Request) -> Response:
        found = await self._kept(self._ctx.batches.batches, owner(self._ctx, http).name)
        return JSONResponse(page_of(http, list(map(_shown, found))))

    async def _find_batch(self, http: Request) -> Record:
        """Returns the batch that a call names. Raises ApiError (401, 404)."""
        tenant, name = caller(self._ctx, http), http.path_params["id"]
        found = await self._kept(self._ctx.batches.batch, tenant.name, name)
        if found is None:
            message = f"Batch with id {name[:100]!r} not found"
            raise ApiError(404, message, param="id", code="batch_not_found")
        return found

    async def _batch(self, http: Request) -> Response:
        return JSONResponse(_shown(await self._find_batch(http)))

    async def _cancel(self, http: Request) -> Response:
        name, now = (await self._find_batch(http))["id"], int(self._clock())

        def cancelling(record: Record) -> Record:
            if record["status"] not in _CANCELLABLE:
                return record
            return record | {"status": "cancelling", "cancelling_at": now}

        await self._kept(self._ctx.batches.change_batch, name, cancelling)
        found = await self._find_batch(http)
        if found["cancelling_at"] is None:
            message = f"The batch is {found['status']}: only one that has not ended is cancelled"
            raise ApiError(409, message, type="conflict_error", code="batch_has_ended")
        self._wake()
        return JSONResponse(_shown(found))

    def _wake(self) -> None:
        if self._runner is not None:
            self._runner.wake()


def _batch_record(request: BatchRequest, now: int) -> Record:
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling")
    return {
        "id": f"batch_{secrets.token_hex(12)}",
        "object": "batch",
        "endpoint": request.endpoint,
        "errors": None,
        "input_file_id": request.input_file_id,
        "completion_window": request.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_S,
        **{f"{name}_at": None for name in (*times, "cancelled")},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": request.metadata,
    }


def _shown(record: Record) -> Record:
    return {name: value for name, value in record.items() if name != "keep_s"}


def _no_file(name: str, param: str = "id") -> ApiError:
    message = f"File with id {name[:100]!r} not found"
    return ApiError(404, message, param=param, code="file_not_found")


@contextmanager
def _on_disk() -> Iterator[None]:
    """Raises ApiError (507) where the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise disk_full() from None
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_FULL:
            raise
        raise disk_full() from None
