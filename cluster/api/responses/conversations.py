"""`/v1/conversations`: items that responses are asked with and add to, under one name.

A conversation is a record of the store of responses: its tenant's own, as durable, and forgotten as
long after its last change.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import caller, page_of, read_body
from kvrelay.cluster.api.limiter import Held
from kvrelay.cluster.api.openai.schema import Metadata, MetadataRequest, parse
from kvrelay.cluster.api.responses.schema import check_items
from kvrelay.cluster.api.tenants import Tenant

PREFIX = "conv_"
MAX_ITEMS = 10_000
MAX_BYTES = 8 * 2**20  # all items together
MAX_ITEMS_AT_ONCE = 20  # OpenAI's, of those that a client adds

Record = dict[str, Any]
_Items = Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS_AT_ONCE)]


class ConversationRequest(BaseModel):
    model_config = ConfigDict(strict=True)

    items: _Items | None = None
    metadata: Metadata | None = None


class ItemsRequest(BaseModel):
    model_config = ConfigDict(strict=True)

    items: Annotated[_Items, Field(min_length=1)]


class Conversations:
    """Owned by the application. Invariant: a conversation has at most MAX_ITEMS items, of MAX_BYTES
    bytes together, each with an id of its own."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    def routes(self) -> list[ApiRoute]:
        path = "/v1/conversations/{id}"
        return [
            ApiRoute(
                "POST",
                "/v1/conversations",
                self._create,
                "Begin a conversation",
                ConversationRequest,
            ),
            ApiRoute("GET", path, self._show, "A conversation"),
            ApiRoute("POST", path, self._update, "Change its metadata", MetadataRequest),
            ApiRoute("DELETE", path, self._delete, "Forget it"),
            ApiRoute("GET", f"{path}/items", self._items, "Its items"),
            ApiRoute("POST", f"{path}/items", self._add, "Add to its items", ItemsRequest),
            ApiRoute("GET", f"{path}/items/{{item}}", self._item, "One of its items"),
            ApiRoute("DELETE", f"{path}/items/{{item}}", self._remove, "Take an item out"),
        ]

    async def find(self, tenant: Tenant, name: str) -> Record:
        """Raises `ApiError` (404)."""
        found = await asyncio.to_thread(self._ctx.responses.get, tenant.name, name)
        record: Record = {} if found is None else json.loads(found)
        if "conversation" not in record:
            raise _unknown(name)
        return record

    async def append(self, tenant: Tenant, name: str, items: list[Record]) -> list[Record]:
        """Returns them as they were added. Raises `ApiError` (400, 404)."""
        added: list[Record] = []

        def add(record: Record) -> None:
            added[:] = [identified(record, item) for item in items]
            record["items"] += added
            check_size(record["items"])

        await self._change(tenant, name, add)
        return added

    async def _change(self, tenant: Tenant, name: str, change: Callable[[Record], None]) -> Record:
        """Raises `ApiError` (404), and what `change` does."""

        def changed(found: bytes | None) -> bytes:
            record: Record = {} if found is None else json.loads(found)
            if "conversation" not in record:
                raise _unknown(name)
            change(record)
            return json.dumps(record).encode()

        update = self._ctx.responses.update
        data = await asyncio.to_thread(update, tenant.name, name, changed)
        made: Record = json.loads(data or b"{}")
        return made

    async def _create(self, http: Request) -> Response:
        tenant = caller(self._ctx, http)
        body = await read_body(self._ctx, http) or b"{}"
        record, data = await self._ctx.in_json_thread(len(body), self._made, body)
        name = record["conversation"]["id"]
        await asyncio.to_thread(self._ctx.responses.put, tenant.name, name, data)
        return JSONResponse(record["conversation"])

    def _made(self, body: bytes) -> tuple[Record, bytes]:
        """A new one, and its JSON. Raises `ApiError`."""
        request = parse(ConversationRequest, body)
        check_items(request.items or [])
        record: Record = {
            "conversation": {
                "id": PREFIX + uuid.uuid4().hex,
                "object": "conversation",
                "created_at": int(time.time()),
                "metadata": request.metadata or {},
            },
            "items": [],
            "num_items": 0,  # ever
        }
        record["items"] = [identified(record, item) for item in request.items or []]
        check_size(record["items"])
        return record, json.dumps(record).encode()

    async def _show(self, http: Request) -> Response:
        record = await self.find(caller(self._ctx, http), http.path_params["id"])
        return JSONResponse(record["conversation"])

    async def _update(self, http: Request) -> Response:
        tenant = caller(self._ctx, http)
        request = parse(MetadataRequest, await read_body(self._ctx, http))

        def change(record: Record) -> None:
            record["conversation"]["metadata"] = request.metadata

        record = await self._change(tenant, http.path_params["id"], change)
        return JSONResponse(record["conversation"])

    async def _delete(self, http: Request) -> Response:
        tenant, name = caller(self._ctx, http), http.path_params["id"]
        await self.find(tenant, name)
        await asyncio.to_thread(self._ctx.responses.delete, tenant.name, name)
        return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})

    async def _items(self, http: Request) -> Response:
        record = await self.find(caller(self._ctx, http), http.path_params["id"])
        return JSONResponse(page_of(http, record["items"]))

    async def _add(self, http: Request) -> Response:
        tenant = caller(self._ctx, http)
        body = await read_body(self._ctx, http)
        request = await self._ctx.in_json_thread(len(body), parse, ItemsRequest, body)
        await self._ctx.in_json_thread(len(body), check_items, request.items)
        added = await self.append(tenant, http.path_params["id"], request.items)
        ends = {"first_id": added[0]["id"], "last_id": added[-1]["id"]}
        return JSONResponse({"object": "list", "data": added, "has_more": False} | ends)

    async def _item(self, http: Request) -> Response:
        record = await self.find(caller(self._ctx, http), http.path_params["id"])
        return JSONResponse(_item_of(record, http.path_params["item"]))

    async def _remove(self, http: Request) -> Response:
        tenant, wanted = caller(self._ctx, http), http.path_params["item"]

        def remove(record: Record) -> None:
            record["items"].remove(_item_of(record, wanted))

        record = await self._change(tenant, http.path_params["id"], remove)
        return JSONResponse(record["conversation"])


class Remembered:
    """The last response of a connection that is not stored, with all that came before it. Owned by
    the connection, which closes it. Invariant: its bytes are held."""

    def __init__(self, held: Held, max_bytes: int) -> None:
        """max_bytes: if the items have more, or `held` gets no more, they are not remembered."""
        self._held, self._max_bytes = held, max_bytes
        self.name = ""
        self._items = b""  # as JSON, which takes far less memory than what it says
        self.num_bytes = 0

    def put(self, name: str, items: bytes) -> None:
        """items: a list in JSON."""
        self.forget(self.name)
        if len(items) <= self._max_bytes and self._held.take(len(items)):
            self.name, self._items, self.num_bytes = name, items, len(items)

    def items(self) -> list[dict[str, Any]]:
        """Takes long where there are many."""
        found: list[dict[str, Any]] = msgspec.json.decode(self._items)
        return found

    def forget(self, name: Any) -> None:
        if name == self.name:
            self._held.close()
            self.name, self._items, self.num_bytes = "", b"", 0


def identified(record: Record, item: Record) -> Record:
    """As it is kept: with an id that no other item of the conversation has."""
    name = record["conversation"]["id"].removeprefix(PREFIX)
    own = input_item(item, f"item_{name}_{record['num_items']}")
    record["num_items"] += 1
    is_taken = any(other["id"] == own["id"] for other in record["items"])
    return own | {"id": f"item_{name}_{record['num_items'] - 1}"} if is_taken else own


def input_item(item: Record, item_id: str) -> Record:
    """As clients expect it: with an id, and content as parts."""
    own = {"id": item_id, **{key: value for key, value in item.items() if value is not None}}
    if (item.get("type") or "message") != "message":
        return own
    if isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        part = {"type": kind, "text": item["content"]}
        own["content"] = [part | {"annotations": []} if kind == "output_text" else part]
    return {"type": "message", "status": "completed"} | own


def check_size(items: list[Record]) -> int:
    """Their bytes. Raises `ApiError` (400)."""
    size = len(json.dumps(items))
    if len(items) > MAX_ITEMS or size > MAX_BYTES:
        raise invalid(
            f"A conversation has at most {MAX_ITEMS} items of {MAX_BYTES} bytes, with these it has"
            f" {len(items)} of {size}: begin another, or compact it",
            code="conversation_too_large",
        )
    return size


def _item_of(record: Record, wanted: str) -> Record:
    found: Record | None = next((item for item in record["items"] if item["id"] == wanted), None)
    if found is None:
        message = f"The conversation has no item '{wanted[:100]}'"
        raise ApiError(404, message, param="item_id", code="item_not_found")
    return found


def _unknown(name: str) -> ApiError:
    message = f"Conversation with id '{name[:100]}' not found."
    return ApiError(404, message, param="conversation", code="conversation_not_found")
