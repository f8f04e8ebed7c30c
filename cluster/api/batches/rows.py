"""Rows of a batch: how their lines are read and checked, and how one is served.

A row goes to the endpoint that an HTTP call of its tenant goes to, in this process, in the lowest
class of service. What it is called and drawn with follows from its batch and its `custom_id`, so a
row that is sent again has the same answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.types import ASGIApp, Message

from kvrelay.cluster.api.batches.store import Record, Result
from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.openai.schema import MAX_BRACKETS
from kvrelay.cluster.api.tenants import Tenant
from kvrelay.engine.service_class import ServiceClass

if TYPE_CHECKING:
    from kvrelay.cluster.api.context import ApiContext

MESSAGES = "/v1/messages"
# A row waits for these as long as its batch may: nothing is wrong with it.
_AWAY = ("no_workers", "draining", "")
ENDPOINTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    MESSAGES,
)
MAX_ID_CHARS = 512
MAX_ERRORS = 100  # that are listed
_WITHOUT_SEED = ("/v1/embeddings",)
_TIMES = ("created", "created_at", "completed_at")  # in answers
_MARK = b"\xef\xbb\xbf"  # that editors on Windows put before UTF-8
_NAME = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.){1,4096}")')
_SURROGATE = re.compile(  # half of a pair, as JSON escapes it
    rb"(?<!\\)(?:\\\\)*"
    rb"(\\u(?:[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u)[dD][c-fC-F]..))"
)
PAGE_ROWS, PAGE_BYTES = 256, 4 << 20  # that are looked at in one go

_log = logging.getLogger("kvrelay.api")


class Row(msgspec.Struct, frozen=True):
    """A line of an input, as its client wrote it."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class Place(NamedTuple):
    """Where a line of an input is."""

    row: int  # its number, from 1
    offset: int  # bytes before it
    num_bytes: int


START = Place(0, 0, 0)  # before the first


class _Body(msgspec.Struct):
    model: str | None = None


class _Asked(msgspec.Struct):
    body: _Body


class _Named(msgspec.Struct):
    custom_id: str


def places_of(path: Path, max_bytes: int, after: Place = START) -> Iterator[tuple[Place, bytes]]:
    """Yields lines that are not blank, with their places. A line of more bytes is cut."""
    number, offset = after.row, after.offset + after.num_bytes
    with path.open("rb") as file:
        if not offset and file.read(len(_MARK)) == _MARK:
            offset = len(_MARK)
        file.seek(offset)
        while line := file.readline(max_bytes + 2):
            number += 1
            size, has_end = len(line), line.endswith(b"\n")
            while not has_end and (rest := file.readline(1 << 20)):
                size += len(rest)
                has_end = rest.endswith(b"\n")
            if line.strip():
                yield Place(number, offset, size), line
            offset += size


def model_asked(line: bytes) -> str:
    """The model that a line names; "": none, or it cannot be read, which its row says."""
    try:
        return msgspec.json.decode(line, type=_Asked).body.model or ""
    except (ValueError, RecursionError):
        return ""


def models_asked(path: Path, max_bytes: int, done: Collection[int]) -> Counter[str]:
    """How many rows that are not `done` name which model."""
    places = places_of(path, max_bytes)
    return Counter(model_asked(line) for place, line in places if place.row not in done)


def next_page(
    path: Path, max_bytes: int, after: Place, models: Collection[str], done: Collection[int]
) -> tuple[list[Place], Place | None]:
    """Rows behind `after` that name one of `models` and are not `done`: a part of them, and the
    place that was looked at last (None: there are no more). Only their places are in memory."""
    page: list[Place] = []
    num_bytes = 0
    for place, line in places_of(path, max_bytes, after):
        num_bytes += place.num_bytes
        if place.row not in done and model_asked(line) in models:
            page.append(place)
        if num_bytes >= PAGE_BYTES or len(page) >= PAGE_ROWS:
            return page, place
    return page, None


def read_line(path: Path, place: Place) -> bytes:
    with path.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.num_bytes)


def custom_id_of(line: bytes) -> str:
    """The name of a row, however wrong the rest of its line is; "": not even that can be read."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except (ValueError, RecursionError):
        pass
    try:
        found = _NAME.search(line)
        return msgspec.json.decode(found[1], type=str) if found else ""
    except ValueError:
        return ""


def read_row(line: bytes) -> Row:
    """Reads a line. Raises ValueError, which says what is wrong."""
    if line.count(b"[") + line.count(b"{") > MAX_BRACKETS:
        raise ValueError(f"The line has more than {MAX_BRACKETS} brackets")
    try:
        return msgspec.json.decode(line, type=Row)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if half := _SURROGATE.search(line):
            shown = half[1].decode("ascii", "replace")
            why = f"{shown} at byte {half.start(1)} is half of a surrogate pair, no character"
            raise ValueError(f"The line is not a request: {why}") from None
        raise ValueError(f"The line is not a request: {error}") from None


class Checker:
    """Checks a batch's lines before any is sent: together they may be wrong too."""

    def __init__(self, ctx: ApiContext, tenant: Tenant, endpoint: str) -> None:
        self.num_rows = 0
        self.errors: list[Record] = []
        self._ctx, self._tenant, self._endpoint = ctx, tenant, endpoint
        self._seen: set[bytes] = set()  # digests of custom ids

    def check_all(self, path: Path) -> None:
        limits = self._ctx.settings
        for place, line in places_of(path, limits.max_body_bytes):
            number = place.row
            self.num_rows += 1
            if self.num_rows > limits.max_batch_rows:
                message = f"A batch has at most {limits.max_batch_rows} requests"
                self._note("too_many_requests", message, number)
                return
            if len(line) > limits.max_body_bytes + 1:
                message = f"The line has more than {limits.max_body_bytes} bytes"
                self._note("request_too_large", message, number)
            else:
                self._check(number, line)
            if len(self.errors) >= MAX_ERRORS:
                return
        if not self.num_rows:
            self._note("empty_file", "The file has no requests", None)

    def _check(self, number: int, line: bytes) -> None:
        try:
            row = read_row(line)
        except ValueError as error:
            self._note("invalid_json_line", str(error), number)
            return
        name = blake2b(row.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if not 1 <= len(row.custom_id) <= MAX_ID_CHARS:
            message = f"'custom_id' has {len(row.custom_id)} characters, of 1 to {MAX_ID_CHARS}"
            self._note("invalid_custom_id", message, number, "custom_id")
        elif name in self._seen:
            message = f"custom_id {row.custom_id[:100]!r} was on an earlier line: give each its own"
            self._note("duplicate_custom_id", message, number, "custom_id")
        self._seen.add(name)
        if row.method != "POST":
            message = f"'method': expected POST, got {row.method[:20]!r}"
            self._note("invalid_method", message, number, "method")
        if row.url != self._endpoint:
            message = f"'url': expected the batch's {self._endpoint}, got {row.url[:60]!r}"
            self._note("mismatched_url", message, number, "url")
        for field in ("stream", "background"):
            if row.body.get(field):
                message = f"'{field}': a request of a batch has its answer in a file, leave it out"
                self._note("unsupported_parameter", message, number, f"body.{field}")
        self._check_model(row.body.get("model"), number)

    def _check_model(self, model: Any, number: int) -> None:
        if not isinstance(model, str | None):
            message = f"'model': expected a name, got {model!r:.60}"
            self._note("invalid_model", message, number, "body.model")
            return
        try:
            self._ctx.chosen(model, self._tenant)
        except ApiError as error:
            self._note(error.code or error.type, error.message, number, "body.model")

    def _note(self, code: str, message: str, line: int | None, param: str | None = None) -> None:
        self.errors.append({"code": code, "message": message, "param": param, "line": line})


@dataclass(frozen=True, slots=True)
class Answer:
    """What an endpoint says. Its status is 0 where it was told to stop."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    num_output_tokens: int = 0  # that were generated, whatever became of them

    @property
    def code(self) -> str:
        """Returns that of an error, or an empty text."""
        try:
            return str(json.loads(self.body)["error"].get("code") or "")
        except (ValueError, KeyError, TypeError, AttributeError):
            return ""

    @property
    def is_rate(self) -> bool:
        """Whether its tenant has had what it may have in a minute: that says nothing of room."""
        return self.status == 429 and self.code == "rate_limit_exceeded"

    @property
    def is_final(self) -> bool:
        """Whether it would be the same if the row were sent again."""
        return self.status == 200 or self.status in set(range(400, 500)) - {408, 409, 429}

    @property
    def has_no_room(self) -> bool:
        """Whether the row is refused for what others do, not for what it is."""
        is_late = self.status == 504 and not self.num_output_tokens
        return self.status == 429 or is_late or (self.status == 503 and self.code in _AWAY)

    @property
    def retry_after_s(self) -> float:
        given = self.headers.get("retry-after", "")
        return float(given) if given.isdigit() else 0.0


def batch_tenant(tenant: Tenant, is_due: bool) -> Tenant:
    """As it is for rows: no request of theirs goes before what somebody waits for."""
    service_class = ServiceClass.FLEX if is_due else ServiceClass.BATCH
    least = max(service_class.priority, tenant.min_priority)
    return replace(tenant, service_class=service_class, min_priority=least)


def row_id(batch: str, custom_id: str) -> str:
    """Names its request wherever it is sent, and however often."""
    name = f"{batch}:{custom_id}".encode("utf-8", "surrogatepass")
    return blake2b(name, digest_size=16).hexdigest()


_BUG = ApiError(
    500,
    "The server failed at this request: its log says why",
    type="server_error",
    code="internal_error",
)


@dataclass(frozen=True, slots=True)
class Call:
    """A row as it is sent. sent_as: its request's name on the way, which begins with `request_id`,
    and is that in the answer. timeout_s: what is left of its batch's window."""

    request_id: str
    sent_as: str
    tenant: Tenant
    timeout_s: float


async def ask(endpoint: ASGIApp, row: Row, call: Call, stop: asyncio.Event) -> Answer:
    """Sends a row to its endpoint, and returns what that says. Its body is not kept meanwhile."""
    body, url = row.body, row.url
    if url not in _WITHOUT_SEED and body.get("seed") is None:
        body["seed"] = int(call.request_id[:16], 16) >> 1
    unread = [msgspec.json.encode(body)]
    body.clear()
    status, headers, parts = 0, {}, []
    scope = _scope(url, call)

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await stop.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            parts.append(message.get("body", b""))

    try:
        await endpoint(scope, receive, send)
    except ApiError as error:
        status, headers, parts = error.status, error.headers, [msgspec.json.encode(error.body)]
    except Exception:
        _log.exception("row %s fails", call.sent_as)
        status, headers, parts = 500, {}, [msgspec.json.encode(_BUG.body)]
    said = b"".join(parts).replace(call.sent_as.encode(), call.request_id.encode())
    return Answer(status, headers, said, scope["state"].get("num_output_tokens", 0))


def _scope(path: str, call: Call) -> dict[str, Any]:
    state = {"request_id": call.sent_as, "tenant": call.tenant, "timeout_s": call.timeout_s}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": state,
    }


def result_of(number: int, custom_id: str, request_id: str, answer: Answer, created: int) -> Result:
    """created: what the answer says of its time, however often it was made."""
    body = msgspec.json.decode(answer.body)
    is_error = answer.status != 200
    if not is_error:
        body |= {name: created for name in _TIMES if name in body}
        if "service_tier" in body:  # however near the end it was made
            body["service_tier"] = ServiceClass.BATCH.tier
    response = {"status_code": answer.status, "request_id": request_id, "body": body}
    line = _line(request_id, custom_id, response, None)
    return Result(number, is_error, line, (0, 0, 0, 0) if is_error else _tokens(body))


def unsent(number: int, custom_id: str, batch: str, code: str, message: str) -> Result:
    """The result of a row that has no answer, and will have none."""
    error = {"code": code, "message": message}
    name = row_id(batch, custom_id or f"line {number}")
    return Result(number, True, _line(name, custom_id, None, error))


def _line(request_id: str, custom_id: str, response: Record | None, error: Record | None) -> bytes:
    name = f"batch_req_{request_id}"
    return msgspec.json.encode(
        {"id": name, "custom_id": custom_id, "response": response, "error": error}
    )


def _tokens(body: Record) -> tuple[int, int, int, int]:
    """By the names of each API."""
    usage = body.get("usage") or {}
    asked = usage.get("input_tokens", usage.get("prompt_tokens", 0))
    made = usage.get("output_tokens", usage.get("completion_tokens", 0))
    of_input = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
    of_output = usage.get("output_tokens_details") or usage.get("completion_tokens_details") or {}
    return asked, of_input.get("cached_tokens", 0), made, of_output.get("reasoning_tokens", 0)
