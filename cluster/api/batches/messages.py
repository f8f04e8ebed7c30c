"""Anthropic's `/v1/messages/batches`, over the store and the runner that OpenAI's batches have.

The requests come in one body, which becomes a file of rows, and is checked before the call is
answered. Results are kept as OpenAI's and shown as Anthropic's.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import msgspec
from starlette.concurrency import iterate_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvrelay.cluster.api.batches.folder import Full, private_file
from kvrelay.cluster.api.batches.rows import MESSAGES, Checker
from kvrelay.cluster.api.batches.store import KEEP_S, Record
from kvrelay.cluster.api.batches.uploads import (
    Uploads,
    batch_record,
    cancel,
    file_record,
    on_disk,
)
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid, overloaded
from kvrelay.cluster.api.http.route import REF, ApiRoute
from kvrelay.cluster.api.incoming import caller, limit_of, owner
from kvrelay.cluster.api.openai.schema import MAX_BRACKETS
from kvrelay.cluster.api.pages import PageQuery, list_of
from kvrelay.cluster.api.tenants import Tenant

PATH = f"{MESSAGES}/batches"
_PREFIX = "msgbatch"  # their names begin so
_READ_CHARS = 64 * 1024
_PAGE = 20
_ENDS = ("completed", "failed", "expired", "cancelled")
_UNSENT = {"batch_cancelled": "canceled", "batch_expired": "expired"}


class JsonText:
    """A JSON text in a file, of which one value is in memory at once. Raises ValueError."""

    def __init__(self, file: TextIO, max_chars: int) -> None:
        """max_chars: that a value may have."""
        self._file, self._most = file, max_chars
        self._text, self._at = "", 0
        self._decode = json.JSONDecoder().raw_decode

    def _read(self) -> bool:
        """Twice as much as there is; False: that was all."""
        left = self._text[self._at :]
        if len(left) > self._most or left.count("[") + left.count("{") > MAX_BRACKETS:
            raise ValueError(
                f"a request has more than {self._most} characters or {MAX_BRACKETS} brackets"
            )
        more = self._file.read(max(_READ_CHARS, len(left)))
        self._text, self._at = left + more, 0
        return bool(more)

    def peek(self) -> str:
        """The next character that is no space; at the end none."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def skip(self, *wanted: str) -> str:
        """Passes one of these characters, and returns which."""
        found = self.peek()
        if found not in wanted:
            raise ValueError(f"expected {' or '.join(wanted)}, got {found or 'its end'!r}")
        self._at += 1
        return found

    def value(self, first: str) -> Any:
        """The next, which begins with `first`: an object or a text, whose end can be seen."""
        if self.peek() != first:
            raise ValueError(f"expected {first}, got {self.peek() or 'its end'!r}")
        while True:
            try:
                found, self._at = self._decode(self._text, self._at)
                return found
            except json.JSONDecodeError as error:
                if not self._read():
                    raise ValueError(f"it is not JSON: {error.msg}") from None
            except RecursionError:
                raise ValueError("a request is nested too deep") from None


def requests_of(text: JsonText) -> Iterator[Any]:
    """Yields the entries of `requests` in an object. Raises ValueError."""
    text.skip("{")
    if (name := text.value('"')) != "requests":
        raise ValueError(f"{name[:40]!r} is there; expected 'requests' alone")
    text.skip(":")
    text.skip("[")
    if text.peek() == "]":
        raise ValueError("'requests' is empty")
    separator = ","
    while separator == ",":
        yield text.value("{")
        separator = text.skip(",", "]")
    text.skip("}")
    if text.peek():
        raise ValueError("something follows it")


def _write_rows(body: Path, rows: Path, max_chars: int) -> None:
    """Writes a line for each request in `body`. Raises ApiError (400)."""
    number = 0
    with body.open(encoding="utf-8-sig") as read, open(rows, "xb", opener=private_file) as file:
        try:
            for asked in requests_of(JsonText(read, max_chars)):
                if not isinstance(asked.get("params"), dict):
                    raise ValueError("expected an object with 'custom_id' and 'params'")
                row = {"custom_id": asked.get("custom_id"), "method": "POST", "url": MESSAGES}
                file.write(msgspec.json.encode(row | {"body": asked["params"]}) + b"\n")
                number += 1
            file.flush()
            os.fsync(file.fileno())
        except (ValueError, RecursionError) as error:  # also of UTF-8
            raise invalid(f"requests.{number}: {error}") from None


_REQUEST = {
    "type": "object",
    "properties": {
        "custom_id": {"type": "string"},
        "params": {"$ref": REF.format(model="MessagesRequest")},
    },
    "required": ["custom_id", "params"],
}
_BODY = {
    "application/json": {
        "schema": {
            "type": "object",
            "properties": {"requests": {"type": "array", "items": _REQUEST}},
            "required": ["requests"],
        }
    }
}


class MessageBatches:
    """Answers for message batches. Owned by `BatchCalls`."""

    def __init__(
        self,
        ctx: ApiContext,
        uploads: Uploads,
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._ctx, self._uploads, self._wake, self._clock = ctx, uploads, wake, clock

    def routes(self) -> list[ApiRoute]:
        batch = f"{PATH}/{{id}}"
        return [
            ApiRoute(
                "POST", PATH, self._create, "Answer Anthropic's messages when there is time", _BODY
            ),
            ApiRoute("GET", PATH, self._list, "Batches of messages"),
            ApiRoute("GET", batch, self._get, "One of them"),
            ApiRoute("DELETE", batch, self._delete, "Delete it, with its results"),
            ApiRoute("POST", f"{batch}/cancel", self._cancel, "End it before all has run"),
            ApiRoute("GET", f"{batch}/results", self._results, "What became of each request"),
        ]

    async def _create(self, http: Request) -> Response:
        tenant, unwritten = caller(self._ctx, http), bytearray()
        received = self._uploads.received(http, tenant.name, unwritten.extend, unwritten)
        rows = self._ctx.batches.draft(tenant.name)
        try:
            async with received as body:
                most = self._ctx.settings.max_body_bytes
                await on_disk(_write_rows, body, rows, most)
                body.unlink()
                record = await self._added(tenant, rows)
        except ClientDisconnect:
            return Response(status_code=400)
        finally:
            rows.unlink(missing_ok=True)
        self._wake()
        return JSONResponse(self._shown(record, http))

    async def _added(self, tenant: Tenant, rows: Path) -> Record:
        checker = Checker(self._ctx, tenant, MESSAGES)
        await on_disk(checker.check_all, rows)
        if checker.errors:
            error = checker.errors[0]
            place = "" if error["line"] is None else f"requests.{error['line'] - 1}: "
            raise invalid(f"{place}{error['message']}")
        now, size = int(self._clock()), rows.stat().st_size
        file = file_record("messages.jsonl", size, now, int(KEEP_S))
        await self._uploads.keep(tenant.name, file, rows)
        record = batch_record(_PREFIX, MESSAGES, file["id"], now, tenant.key)
        counts = record["request_counts"] | {"total": checker.num_rows}
        record |= {"status": "in_progress", "in_progress_at": now, "request_counts": counts}
        try:
            await on_disk(self._ctx.batches.add_batch, tenant.name, record)
        except Full as full:
            await on_disk(self._ctx.batches.delete_file, tenant.name, file["id"])
            raise overloaded(f"This API key has {full}", 60.0) from None
        return record

    async def _list(self, http: Request) -> Response:
        """The youngest first. Before one are those that are younger: the nearest of them."""
        tenant, limit = owner(self._ctx, http), limit_of(http, _PAGE, 1000)
        param = "before_id" if "before_id" in http.query_params else "after_id"
        is_asc, place = param == "before_id", http.query_params.get(param)
        asked = PageQuery(is_asc, place, limit)
        try:
            found, has_more = await on_disk(
                self._ctx.batches.batches, tenant.name, asked, f"{_PREFIX}_"
            )
        except KeyError:
            raise invalid(f"'{param}': there is no batch {(place or '')[:100]!r}", param) from None
        page = [self._shown(each, http) for each in (found[::-1] if is_asc else found)]
        answer = list_of(page, has_more)
        del answer["object"]
        return await asyncio.to_thread(JSONResponse, answer)

    async def _find(self, http: Request) -> tuple[str, Record]:
        """Also the tenant's name. Raises ApiError (401, 404)."""
        tenant, name = caller(self._ctx, http).name, http.path_params["id"]
        found = await on_disk(self._ctx.batches.batch, tenant, name)
        if found is None or found["endpoint"] != MESSAGES:
            raise ApiError(404, f"Message batch {name[:100]!r} not found", param="id")
        return tenant, found

    async def _get(self, http: Request) -> Response:
        _, found = await self._find(http)
        return JSONResponse(self._shown(found, http))

    async def _cancel(self, http: Request) -> Response:
        _, found = await self._find(http)
        if found["status"] in _ENDS:
            raise invalid("The batch has ended: there is nothing to cancel")
        await on_disk(cancel, self._ctx.batches, found["id"], int(self._clock()))
        self._wake()
        return await self._get(http)

    async def _delete(self, http: Request) -> Response:
        tenant, found = await self._find(http)
        if not await on_disk(self._ctx.batches.delete_batch, tenant, found["id"]):
            raise invalid("The batch has not ended: cancel it first")
        return JSONResponse({"id": found["id"], "type": "message_batch_deleted"})

    async def _results(self, http: Request) -> Response:
        _, found = await self._find(http)
        if found["status"] not in _ENDS:
            raise invalid("The batch has not ended: there are no results yet")
        names = (found[f"{kind}_file_id"] for kind in ("output", "error"))
        try:
            paths = [await on_disk(self._ctx.batches.fetched, name) for name in names if name]
        except FileNotFoundError:
            raise ApiError(404, "The results have been deleted") from None

        async def lines() -> AsyncIterator[bytes]:
            for path in paths:
                with path.open("rb") as file:
                    async for line in iterate_in_threadpool(file):
                        yield _result(json.loads(line))

        return StreamingResponse(lines(), media_type="application/x-jsonl")

    def _shown(self, record: Record, http: Request) -> Record:
        has_ended, counts = record["status"] in _ENDS, record["request_counts"]
        ended_at = next((record[f"{end}_at"] for end in _ENDS if record[f"{end}_at"]), None)
        url = f"{str(http.base_url).rstrip('/')}{PATH}/{record['id']}/results"
        is_cancelled = record["cancelling_at"] is not None
        status = "ended" if has_ended else "canceling" if is_cancelled else "in_progress"
        tally = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
        if has_ended:
            unsent = record.get("num_unsent", 0)
            how = "canceled" if record["status"] == "cancelled" else "expired"
            tally |= {"succeeded": counts["completed"], how: unsent}
            tally["errored"] = counts["failed"] - unsent
        else:
            tally["processing"] = counts["total"]
        return {
            "id": record["id"],
            "type": "message_batch",
            "processing_status": status,
            "request_counts": tally,
            "created_at": _time(record["created_at"]),
            "expires_at": _time(record["expires_at"]),
            "ended_at": _time(ended_at),
            "cancel_initiated_at": _time(record["cancelling_at"]),
            "archived_at": None,
            "results_url": url if has_ended else None,
        }


def _time(at_s: float | None) -> str | None:
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat()


def _result(row: Record) -> bytes:
    """A line of a file of results, as Anthropic's."""
    response, error = row["response"], row["error"]
    result: Record
    if response is not None and response["status_code"] == 200:
        result = {"type": "succeeded", "message": response["body"]}
    elif error is not None and error["code"] in _UNSENT:
        result = {"type": _UNSENT[error["code"]]}
    else:
        body = response["body"] if response else {"error": error}
        if body.get("type") != "error":
            wrapped = {"type": "api_error", "message": body["error"]["message"]}
            body = {"type": "error", "error": wrapped}
        result = {"type": "errored", "error": body | {"request_id": None}}
    return msgspec.json.encode({"custom_id": row["custom_id"], "result": result}) + b"\n"
