"""Chat completions that are kept (`store: true`): listed, asked for again, changed, deleted.

They are records of the store of responses: their tenant's own, as durable, and forgotten as late. A
list is of the last MAX_LISTED of a tenant, or fewer where they are large; those that are not in the
page that is asked for are read only to be compared. Log-probabilities are not kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, overloaded
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import (
    counted,
    no_entry,
    owner,
    page_of,
    page_query,
    read_body,
)
from kvrelay.cluster.api.openai.formats import ChatFormat, message_of
from kvrelay.cluster.api.openai.parts import Piece, Plan
from kvrelay.cluster.api.openai.schema import ChatRequest, MetadataRequest, parse
from kvrelay.cluster.api.pages import PageQuery, list_body
from kvrelay.cluster.api.responses.store import ResponseStore
from kvrelay.cluster.api.tenants import Tenant

PREFIX = "chatcmpl-"
MAX_LISTED = 1000
MAX_LISTED_BYTES = 32 * 2**20  # their records together
MAX_PAGE_BYTES = 2**20  # unless one completion has more
_BEGINNING = '{"completion": '  # each record's, so that one is shown without reading the rest
_TRIES = 4  # to change what others change meanwhile
_log = logging.getLogger("kvrelay.api")

Record = dict[str, Any]


def chat_format(ctx: ApiContext, plan: Plan, request: ChatRequest, request_id: str) -> ChatFormat:
    kind = StoredChatFormat if request.store else ChatFormat
    return kind(ctx, plan, request, request_id)


class StoredChatFormat(ChatFormat):
    """A chat completion that is kept when it is complete, if it can be."""

    def __init__(self, ctx: ApiContext, plan: Plan, request: ChatRequest, request_id: str) -> None:
        super().__init__(ctx, plan, request, request_id)
        self._ctx, self._tenant, self._request = ctx, plan.tenant, request
        self._deltas: dict[int, list[Record]] = {choice.index: [] for choice in plan.choices}
        self._reasons: dict[int, str | None] = {}
        self._completion: Record | None = None

    def chunks(self, piece: Piece) -> list[Record]:
        made = super().chunks(piece)
        for chunk in made:
            (choice,) = chunk["choices"]
            self._deltas[choice["index"]].append(choice["delta"])
            self._reasons[choice["index"]] = choice["finish_reason"]
        return made

    def closing(self, usage: Record) -> list[Record]:
        choices = [
            {"index": i, "message": message_of(deltas), "finish_reason": self._reasons.get(i)}
            for i, deltas in self._deltas.items()
        ]
        self._completion = self._answer.envelope("chat.completion", choices) | {"usage": usage}
        return super().closing(usage)

    async def whole(self, pieces: Sequence[Piece], usage: Record) -> Record:
        content = await super().whole(pieces, usage)
        self._completion = content
        return content

    async def settled(self) -> None:
        assert self._completion is not None
        metadata = self._request.metadata or {}
        choices = [choice | {"logprobs": None} for choice in self._completion["choices"]]
        completion = self._completion | {"choices": choices, "metadata": metadata}
        asked = [message.model_dump(exclude_none=True) for message in self._request.messages]
        record = {"completion": completion, "messages": asked}
        name = completion["id"]

        def write() -> None:
            self._ctx.responses.put(self._tenant.name, name, json.dumps(record).encode())

        try:
            await self._ctx.store.write(write)
        except ApiError as error:  # no reason to withhold the answer
            _log.warning("chat completion %s is not kept: %s", name, error.message)


class StoredChats:
    """Owned by the application."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    def routes(self) -> list[ApiRoute]:
        path, listed = "/v1/chat/completions/{id}", "/v1/chat/completions"
        table: list[tuple[str, str, Any, str, type[BaseModel] | None]] = [
            ("GET", listed, self._list, "Completions that are kept", None),
            ("GET", path, self._show, "One of them", None),
            ("POST", path, self._update, "Change its metadata", MetadataRequest),
            ("DELETE", path, self._delete, "Forget it", None),
            ("GET", f"{path}/messages", self._messages, "What it was asked with", None),
        ]
        return [
            ApiRoute(method, place, counted(self._ctx, call), summary, body)
            for method, place, call, summary, body in table
        ]

    async def _find(self, tenant: Tenant, name: str) -> bytes:
        """Raises `ApiError` (404)."""
        found = None
        if name.startswith(PREFIX):
            found = await self._ctx.store.read(self._ctx.responses.get, tenant.name, name)
        if found is None:
            raise _unknown(name)
        return found

    async def _list(self, http: Request, tenant: Tenant) -> Response:
        owner(self._ctx, http)
        query = page_query(http, default="asc")
        asked, prefix = http.query_params, "metadata["
        wanted = {key[len(prefix) : -1]: asked[key] for key in asked if key.startswith(prefix)}
        page = _Page(self._ctx.responses, tenant.name, query, asked.get("model"), wanted)
        return _json(await self._ctx.store.read(page.read))

    async def _show(self, http: Request, tenant: Tenant) -> Response:
        data = await self._find(tenant, http.path_params["id"])
        _, shown, _ = await self._ctx.in_json_thread(len(data), _taken_apart, data)
        return _json(shown.encode())

    async def _update(self, http: Request, tenant: Tenant) -> Response:
        name, body = http.path_params["id"], await read_body(self._ctx, http)
        request = await self._ctx.in_json_thread(len(body), parse, MetadataRequest, body)

        def changed(data: bytes) -> tuple[bytes, bytes]:
            completion, _, rest = _taken_apart(data)
            shown = json.dumps(completion | {"metadata": request.metadata})
            return shown.encode(), f"{_BEGINNING}{shown}{rest}".encode()

        for _ in range(_TRIES):
            data = await self._find(tenant, name)
            shown, record = await self._ctx.in_json_thread(len(data), changed, data)
            replace = self._ctx.responses.replace
            if await self._ctx.store.write(replace, tenant.name, name, data, record):
                return _json(shown)
        raise overloaded(f"Other calls change '{name[:100]}' at the same time", 1.0)

    async def _delete(self, http: Request, tenant: Tenant) -> Response:
        name, delete = http.path_params["id"], self._ctx.responses.delete
        is_one = name.startswith(PREFIX)
        if not is_one or not await self._ctx.store.write(delete, tenant.name, name):
            raise _unknown(name)
        gone = {"id": name, "object": "chat.completion.deleted", "deleted": True}
        return JSONResponse(gone)

    async def _messages(self, http: Request, tenant: Tenant) -> Response:
        name = http.path_params["id"]
        data = await self._find(tenant, name)

        def shown() -> Response:
            asked = json.loads(data)["messages"]
            listed = [{"id": f"{name}-{i}", **each} for i, each in enumerate(asked)]
            return JSONResponse(page_of(http, listed, default="asc"))

        return await self._ctx.in_json_thread(len(data), shown)


@dataclass(frozen=True)
class _Page:
    """A part of the list of a tenant. `model`, `metadata`: what all in it have."""

    store: ResponseStore
    tenant: str
    query: PageQuery
    model: str | None
    metadata: dict[str, str]

    def read(self) -> bytes:
        """Its JSON. Blocks, for a disk. Raises `ApiError`."""
        entries: list[tuple[str, bytes]] = []
        size, places = 0, self._places()
        for place in places:
            if len(entries) == self.query.limit and not (self.model or self.metadata):
                return list_body(entries, True)  # the next need not be read
            data = self.store.at(self.tenant, place)
            completion, text, _ = _taken_apart(data) if data else ({}, "", "")
            if not completion or not self._has(completion):
                continue
            size += len(text)
            if len(entries) == self.query.limit or (entries and size > MAX_PAGE_BYTES):
                return list_body(entries, True)
            entries.append((completion["id"], text.encode()))
        return list_body(entries, False)

    def _has(self, completion: Record) -> bool:
        given = completion["metadata"]
        return self.model in (None, completion["model"]) and all(
            given.get(key) == value for key, value in self.metadata.items()
        )

    def _places(self) -> list[int]:
        latest = self.store.latest(self.tenant, PREFIX, MAX_LISTED, MAX_LISTED_BYTES)
        found = latest[::-1] if self.query.is_asc else latest
        first = 0
        if self.query.after is not None:
            names = [name for _, name in found]
            if self.query.after not in names:
                raise no_entry(self.query.after)
            first = names.index(self.query.after) + 1
        return [place for place, _ in found[first:]]


def _taken_apart(data: bytes) -> tuple[Record, str, str]:
    """The completion of a record, its JSON, and what comes after that."""
    text = data.decode()
    assert text.startswith(_BEGINNING)
    completion, end = json.JSONDecoder().raw_decode(text, len(_BEGINNING))
    return completion, text[len(_BEGINNING) : end], text[end:]


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _unknown(name: str) -> ApiError:
    message = f"Chat completion with id '{name[:100]}' not found: only those with 'store' are kept"
    return ApiError(404, message, param="id", code="completion_not_found")
