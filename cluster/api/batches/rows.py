"""Rows of a batch: how their lines are read and checked, and how one is served.

A row goes to the endpoint that an HTTP call of its tenant goes to, in this process, in the lowest
class of service. What it is called and drawn with follows from its batch and its `custom_id`, so a
row that is sent again has the same answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from kvrelay.cluster.api.batches.store import Record, Result
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.openai.schema import MAX_BRACKETS
from kvrelay.cluster.api.tenants import Tenant
from kvrelay.engine.service_class import ServiceClass

MESSAGES = "/v1/messages"
ENDPOINTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    MESSAGES,
)
MAX_ID_CHARS = 512
MAX_ERRORS = 100  # that are listed
_WITHOUT_SEED = ("/v1/embeddings",)
_TIMES = ("created", "created_at", "completed_at")  # in answers


class Row(msgspec.Struct, frozen=True):
    """A line of an input, as its client wrote it."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


def lines_of(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields those that are not blank, by their numbers from 1. A line of more bytes is cut."""
    number = 0
    with path.open("rb") as file:
        while line := file.readline(max_bytes + 2):
            number += 1
            has_end = line.endswith(b"\n")
            while not has_end and (rest := file.readline(1 << 20)):
                has_end = rest.endswith(b"\n")
            if line.strip():
                yield number, line


def read_row(line: bytes) -> Row:
    """Reads a line. Raises ValueError, which says what is wrong."""
    if line.count(b"[") + line.count(b"{") > MAX_BRACKETS:
        raise ValueError(f"The line has more than {MAX_BRACKETS} brackets")
    try:
        return msgspec.json.decode(line, type=Row)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
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
        for number, line in lines_of(path, limits.max_body_bytes):
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

    @property
    def code(self) -> str:
        """Returns that of an error, or an empty text."""
        found: str = json.loads(self.body)["error"].get("code") or ""
        return found


def batch_tenant(tenant: Tenant, is_due: bool) -> Tenant:
    """As it is for rows: no request of theirs goes before what somebody waits for."""
    service_class = ServiceClass.FLEX if is_due else ServiceClass.BATCH
    least = max(service_class.priority, tenant.min_priority)
    return replace(tenant, service_class=service_class, min_priority=least)


def row_id(batch: str, custom_id: str) -> str:
    """Names its request wherever it is sent, and however often."""
    name = f"{batch}:{custom_id}".encode("utf-8", "surrogatepass")
    return blake2b(name, digest_size=16).hexdigest()


async def ask(
    endpoint: ASGIApp, row: Row, request_id: str, sent_as: str, tenant: Tenant, stop: asyncio.Event
) -> Answer:
    """Sends the row to its endpoint, and returns what that says. sent_as: the request's name on the
    way, which begins with `request_id`, and is that in the answer."""
    body = dict(row.body)
    if row.url not in _WITHOUT_SEED and body.get("seed") is None:
        body["seed"] = int(request_id[:16], 16) >> 1
    unread = [msgspec.json.encode(body)]
    status, headers, parts = 0, {}, []

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
        await endpoint(_scope(row.url, sent_as, tenant), receive, send)
    except ApiError as error:
        return Answer(error.status, error.headers, msgspec.json.encode(error.body))
    return Answer(status, headers, b"".join(parts).replace(sent_as.encode(), request_id.encode()))


def _scope(path: str, request_id: str, tenant: Tenant) -> dict[str, Any]:
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
        "state": {"request_id": request_id, "tenant": tenant},
    }


def result_of(number: int, row: Row, request_id: str, answer: Answer, created: int) -> Result:
    """created: what the answer says of its time, however often it was made."""
    body = msgspec.json.decode(answer.body)
    is_error = answer.status != 200
    if not is_error:
        body |= {name: created for name in _TIMES if name in body}
        if "service_tier" in body:  # however near the end it was made
            body["service_tier"] = ServiceClass.BATCH.tier
    response = {"status_code": answer.status, "request_id": request_id, "body": body}
    line = _line(request_id, row.custom_id, response, None)
    return Result(number, is_error, line, (0, 0, 0, 0) if is_error else _tokens(body))


def unsent(number: int, row: Row, batch: str, code: str, message: str) -> Result:
    """The result of a row that will not be sent."""
    error = {"code": code, "message": message}
    return Result(number, True, _line(row_id(batch, row.custom_id), row.custom_id, None, error))


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
