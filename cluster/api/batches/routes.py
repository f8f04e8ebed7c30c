"""OpenAI's `/v1/files` and `/v1/batches`. What is asked of a batch is kept; `Runner` does it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute

from kvrelay.cluster.api.batches.folder import Full
from kvrelay.cluster.api.batches.messages import MessageBatches
from kvrelay.cluster.api.batches.multipart import FormReader
from kvrelay.cluster.api.batches.rows import ENDPOINTS
from kvrelay.cluster.api.batches.runner import Runner
from kvrelay.cluster.api.batches.store import KEEP_S, Record
from kvrelay.cluster.api.batches.uploads import Uploads, batch_record, cancel, file_record, on_disk
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid, overloaded
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import caller, no_entry, owner, page_query, read_body
from kvrelay.cluster.api.openai.schema import Metadata, parse
from kvrelay.cluster.api.pages import list_of

LEAST_KEEP_S = 3600
MAX_LISTED_FILES = 10_000  # OpenAI's, in one page
_FORM = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "properties": {
                "file": {"type": "string", "format": "binary"},
                "purpose": {"const": "batch"},
                "expires_after[anchor]": {"const": "created_at"},
                "expires_after[seconds]": {"type": "integer"},
            },
            "required": ["file", "purpose"],
        }
    }
}
_HIDDEN = ("keep_s", "key", "num_unsent")


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
        self._uploads = Uploads(ctx)
        self._runner: Runner | None = None

    def start(self, routes: Iterable[BaseRoute]) -> None:
        """routes: of the application, which serve rows too."""
        endpoints = {
            route.path: route.app
            for route in routes
            if isinstance(route, ApiRoute) and route.method == "POST"
        }
        self._runner = Runner(self._ctx, {path: endpoints[path] for path in ENDPOINTS})
        self._runner.start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.close()

    def routes(self) -> list[ApiRoute]:
        file, batch = "/v1/files/{id}", "/v1/batches/{id}"
        return [
            ApiRoute(
                "POST",
                "/v1/files",
                self._upload,
                "Keep a file for batches, as a form in parts",
                _FORM,
            ),
            ApiRoute("GET", "/v1/files", self._files, "Files that are kept"),
            ApiRoute("GET", file, self._file, "One of them"),
            ApiRoute("DELETE", file, self._delete, "Delete it"),
            ApiRoute("GET", f"{file}/content", self._content, "Its bytes"),
            ApiRoute(
                "POST",
                "/v1/batches",
                self._create,
                "Run the requests of a file when there is time",
                BatchRequest,
            ),
            ApiRoute("GET", "/v1/batches", self._batches, "Batches"),
            ApiRoute("GET", batch, self._batch, "One of them"),
            ApiRoute("POST", f"{batch}/cancel", self._cancel, "End it before all has run"),
            *MessageBatches(self._ctx, self._uploads, self.wake, self._clock).routes(),
        ]

    # Files.

    async def _upload(self, http: Request) -> Response:
        tenant, unwritten = caller(self._ctx, http), bytearray()
        form = FormReader(http.headers.get("content-type", ""), unwritten.extend)
        try:
            async with self._uploads.received(http, tenant.name, form.feed, unwritten) as draft:
                if not form.is_whole:
                    raise invalid("The form ends before its last boundary")
                if form.filename is None:
                    raise invalid("'file' is missing: send the file as a part of the form", "file")
                record = self._file_record(form, draft.stat().st_size)
                await self._uploads.keep(tenant.name, record, draft)
        except ClientDisconnect:
            return Response(status_code=400)
        return JSONResponse(record)

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
        return file_record(form.filename or "", size, now, int(keep_s))

    async def _find_file(self, http: Request) -> tuple[str, Record]:
        """Also the tenant's name. Raises ApiError (401, 404)."""
        tenant, name = caller(self._ctx, http).name, http.path_params["id"]
        found = await on_disk(self._ctx.batches.file, tenant, name)
        if found is None:
            raise _no_file(name)
        return tenant, found

    async def _files(self, http: Request) -> Response:
        tenant, purpose = owner(self._ctx, http), http.query_params.get("purpose", "")
        asked = page_query(http, most=MAX_LISTED_FILES)
        try:
            page = await on_disk(self._ctx.batches.files, tenant.name, asked, purpose)
        except KeyError:
            raise no_entry(asked.after or "") from None
        return await asyncio.to_thread(lambda: JSONResponse(list_of(*page)))

    async def _file(self, http: Request) -> Response:
        return JSONResponse((await self._find_file(http))[1])

    async def _content(self, http: Request) -> Response:
        _, record = await self._find_file(http)
        try:
            path = await on_disk(self._ctx.batches.fetched, record["id"])
        except FileNotFoundError:
            raise _no_file(record["id"]) from None
        return FileResponse(path, media_type="application/jsonl", filename=record["filename"])

    async def _delete(self, http: Request) -> Response:
        tenant, record = await self._find_file(http)
        try:
            await on_disk(self._ctx.batches.delete_file, tenant, record["id"])
        except Full as batch:
            message = f"The file is the input of {batch}, which has not ended: cancel it first"
            raise ApiError(409, message, type="conflict_error", code="file_in_use") from None
        return JSONResponse({"id": record["id"], "object": "file", "deleted": True})

    # Batches.

    async def _create(self, http: Request) -> Response:
        tenant = caller(self._ctx, http)
        request = parse(BatchRequest, await read_body(self._ctx, http))
        store, now = self._ctx.batches, int(self._clock())
        file = await on_disk(store.file, tenant.name, request.input_file_id)
        if file is None:
            raise _no_file(request.input_file_id, "input_file_id")
        if file["purpose"] != "batch":
            message = f"'input_file_id': its purpose is {file['purpose']}, expected batch"
            raise invalid(message, "input_file_id")
        keep = request.output_expires_after
        record = batch_record("batch", request.endpoint, request.input_file_id, now, tenant.key)
        record |= {"metadata": request.metadata, "keep_s": keep.seconds if keep else None}
        try:
            await on_disk(store.add_batch, tenant.name, record)
        except Full as full:
            raise overloaded(f"This API key has {full}", 60.0) from None
        self.wake()
        return JSONResponse(_shown(record))

    async def _batches(self, http: Request) -> Response:
        tenant, asked = owner(self._ctx, http), page_query(http)
        try:
            found, has_more = await on_disk(self._ctx.batches.batches, tenant.name, asked)
        except KeyError:
            raise no_entry(asked.after or "") from None
        page = list(map(_shown, found))
        return await asyncio.to_thread(lambda: JSONResponse(list_of(page, has_more)))

    async def _find_batch(self, http: Request) -> Record:
        """Returns the batch that a call names. Raises ApiError (401, 404)."""
        tenant, name = caller(self._ctx, http), http.path_params["id"]
        found = await on_disk(self._ctx.batches.batch, tenant.name, name)
        if found is None:
            message = f"Batch with id {name[:100]!r} not found"
            raise ApiError(404, message, param="id", code="batch_not_found")
        return found

    async def _batch(self, http: Request) -> Response:
        return JSONResponse(_shown(await self._find_batch(http)))

    async def _cancel(self, http: Request) -> Response:
        name = (await self._find_batch(http))["id"]
        await on_disk(cancel, self._ctx.batches, name, int(self._clock()))
        found = await self._find_batch(http)
        if found["cancelling_at"] is None:
            message = f"The batch is {found['status']}: only one that has not ended is cancelled"
            raise ApiError(409, message, type="conflict_error", code="batch_has_ended")
        self.wake()
        return JSONResponse(_shown(found))

    def wake(self) -> None:
        if self._runner is not None:
            self._runner.wake()


def _shown(record: Record) -> Record:
    return {name: value for name, value in record.items() if name not in _HIDDEN}


def _no_file(name: str, param: str = "id") -> ApiError:
    message = f"File with id {name[:100]!r} not found"
    return ApiError(404, message, param=param, code="file_not_found")
