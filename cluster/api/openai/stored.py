"""Chat completions that are kept (`store: true`): listed, asked for again, changed, deleted.

They are records of the store of responses: their tenant's own, as durable, and forgotten as late. A
list is of the last MAX_LISTED of a tenant, or fewer where they are large. Log-probabilities are not
kept.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import caller, owner, page_of, read_body
from kvrelay.cluster.api.openai.formats import ChatFormat, message_of
from kvrelay.cluster.api.openai.parts import Piece, Plan
from kvrelay.cluster.api.openai.schema import ChatRequest, MetadataRequest, parse
from kvrelay.cluster.api.tenants import Tenant

PREFIX = "chatcmpl-"
MAX_LISTED = 1000
MAX_LISTED_BYTES = 32 * 2**20  # their records together
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
            await asyncio.to_thread(write)
        except sqlite3.Error:  # no reason to withhold the answer
            _log.exception("chat completion %s is not kept", name)


class StoredChats:
    """Owned by the application."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    def routes(self) -> list[ApiRoute]:
        path = "/v1/chat/completions/{id}"
        return [
            ApiRoute("GET", "/v1/chat/completions", self._list, "Completions that are kept"),
            ApiRoute("GET", path, self._show, "One of them"),
            ApiRoute("POST", path, self._update, "Change its metadata", MetadataRequest),
            ApiRoute("DELETE", path, self._delete, "Forget it"),
            ApiRoute("GET", f"{path}/messages", self._messages, "What it was asked with"),
        ]

    async def _find(self, tenant: Tenant, name: str) -> Record:
        """Raises `ApiError` (404)."""
        found = await asyncio.to_thread(self._ctx.responses.get, tenant.name, name)
        record: Record = {} if found is None else json.loads(found)
        if "completion" not in record:
            raise _unknown(name)
        return record

    async def _list(self, http: Request) -> Response:
        tenant, query = owner(self._ctx, http), http.query_params

        def read() -> list[Record]:
            latest = self._ctx.responses.latest
            found = latest(tenant.name, PREFIX, MAX_LISTED, MAX_LISTED_BYTES)
            return [json.loads(record)["completion"] for record in reversed(found)]

        made = await asyncio.to_thread(read)
        prefix = "metadata["
        wanted = {
            key[len(prefix) : -1]: value for key, value in query.items() if key.startswith(prefix)
        }
        data = [
            each
            for each in made
            if query.get("model") in (None, each["model"])
            and all(each["metadata"].get(key) == value for key, value in wanted.items())
        ]
        return JSONResponse(page_of(http, data, default="asc"))

    async def _show(self, http: Request) -> Response:
        record = await self._find(caller(self._ctx, http), http.path_params["id"])
        return JSONResponse(record["completion"])

    async def _update(self, http: Request) -> Response:
        tenant, name = caller(self._ctx, http), http.path_params["id"]
        request = parse(MetadataRequest, await read_body(self._ctx, http))

        def changed(found: bytes | None) -> bytes:
            record: Record = {} if found is None else json.loads(found)
            if "completion" not in record:
                raise _unknown(name)
            record["completion"]["metadata"] = request.metadata
            return json.dumps(record).encode()

        await asyncio.to_thread(self._ctx.responses.update, tenant.name, name, changed)
        return await self._show(http)

    async def _delete(self, http: Request) -> Response:
        tenant, name = caller(self._ctx, http), http.path_params["id"]
        await self._find(tenant, name)
        await asyncio.to_thread(self._ctx.responses.delete, tenant.name, name)
        gone = {"id": name, "object": "chat.completion.deleted", "deleted": True}
        return JSONResponse(gone)

    async def _messages(self, http: Request) -> Response:
        name = http.path_params["id"]
        record = await self._find(caller(self._ctx, http), name)
        data = [{"id": f"{name}-{i}", **each} for i, each in enumerate(record["messages"])]
        return JSONResponse(page_of(http, data, default="asc"))


def _unknown(name: str) -> ApiError:
    message = f"Chat completion with id '{name[:100]}' not found: only those with 'store' are kept"
    return ApiError(404, message, param="id", code="completion_not_found")
