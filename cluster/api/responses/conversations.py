"""`/v1/conversations`: items that responses are asked with and add to, under one name.

A conversation is kept by the store of responses: its tenant's own, as durable, and forgotten as
long after its last change. Its record is `{"header": ...}`; its items are rows. The version before
had `{"conversation": ..., "items": [...]}`: what of that is asked for is made into rows first.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid, overloaded
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import counted, no_entry, page_query, read_body
from kvrelay.cluster.api.limiter import Held
from kvrelay.cluster.api.openai.schema import Metadata, MetadataRequest, parse
from kvrelay.cluster.api.pages import list_body
from kvrelay.cluster.api.responses.items import (
    ConversationItems,
    Most,
    Row,
    TooLarge,
    joined,
    num_bytes_of,
    row_of,
)
from kvrelay.cluster.api.responses.schema import check_items
from kvrelay.cluster.api.tenants import Tenant

PREFIX = "conv_"
MAX_ITEMS = 10_000
MAX_BYTES = 8 * 2**20  # all items together
MAX_ITEMS_AT_ONCE = 20  # OpenAI's, of those that a client adds
MAX_PAGE_BYTES = 2**20  # unless one item has more
_TRIES = 4  # to change what others change meanwhile

Record = dict[str, Any]
_Items = Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS_AT_ONCE)]


class ConversationRequest(BaseModel):
    model_config = ConfigDict(strict=True)

    items: _Items | None = None
    metadata: Metadata | None = None


class ItemsRequest(BaseModel):
    model_config = ConfigDict(strict=True)

    items: Annotated[_Items, Field(min_length=1)]


class Known(NamedTuple):
    """A conversation without its items."""

    data: bytes  # its record
    shown: Record
    num_items: int
    num_bytes: int


class Conversations:
    """Owned by the application. Invariant: a conversation has at most MAX_ITEMS items, of MAX_BYTES
    bytes together, each with an id of its own."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    def routes(self) -> list[ApiRoute]:
        path = "/v1/conversations/{id}"
        made = ConversationRequest
        table: list[tuple[str, str, Any, str, type[BaseModel] | None]] = [
            ("POST", "/v1/conversations", self._create, "Begin a conversation", made),
            ("GET", path, self._show, "A conversation", None),
            ("POST", path, self._update, "Change its metadata", MetadataRequest),
            ("DELETE", path, self._delete, "Forget it", None),
            ("GET", f"{path}/items", self._items, "Its items", None),
            ("POST", f"{path}/items", self._add, "Add to its items", ItemsRequest),
            ("GET", f"{path}/items/{{item}}", self._item, "One of its items", None),
            ("DELETE", f"{path}/items/{{item}}", self._remove, "Take an item out", None),
        ]
        return [
            ApiRoute(method, place, counted(self._ctx, call), summary, body)
            for method, place, call, summary, body in table
        ]

    @property
    def _rows(self) -> ConversationItems:
        return ConversationItems(self._ctx.responses)

    async def find(self, tenant: Tenant, name: str) -> Known:
        """Raises `ApiError` (404)."""
        for _ in range(_TRIES):
            if not name.startswith(PREFIX):
                break
            try:
                head = await self._ctx.store.read(self._rows.head, tenant.name, name)
            except KeyError:
                break
            record = await self._ctx.in_json_thread(len(head.record), json.loads, head.record)
            if "header" in record:
                return Known(head.record, record["header"], head.num_items, head.num_bytes)
            made, rows = await self._ctx.in_json_thread(len(head.record), _rows_of, record)
            change = tenant.name, name, head.record, made, rows, record["num_items"]
            await self._ctx.store.write(self._rows.move, *change)
        else:
            raise _busy(name)
        raise _unknown(name)

    async def items(self, tenant: Tenant, name: str) -> list[Record]:
        """Returns all of one that `find` has found. Raises `ApiError`."""
        rows = await self._ctx.store.read(self._rows.all, tenant.name, name)
        size = sum(map(num_bytes_of, rows))
        return await self._ctx.in_json_thread(
            size, lambda: [json.loads(joined(row)) for row in rows]
        )

    async def append(
        self, tenant: Tenant, name: str, items: Sequence[Record], size: int
    ) -> list[Row]:
        """size: of the items, about. Returns them as they were added, each as JSON. Raises
        `ApiError` (400, 404)."""
        await self.find(tenant, name)
        rows = await self._ctx.in_json_thread(size, _as_rows, items)
        most = Most(MAX_ITEMS, MAX_BYTES)
        try:
            append = self._rows.append
            ids = await self._ctx.store.write(append, tenant.name, name, rows, most)
        except KeyError:
            raise _unknown(name) from None
        except TooLarge as size_of:
            raise too_large(size_of.num_items, size_of.num_bytes) from None
        return [(own, body) for own, (_, body) in zip(ids, rows, strict=True)]

    async def _create(self, http: Request, tenant: Tenant) -> Response:
        body = await read_body(self._ctx, http) or b"{}"
        shown, record, rows = await self._ctx.in_json_thread(len(body), self._made, body)
        begin, most = self._rows.begin, Most(MAX_ITEMS, MAX_BYTES)
        try:
            await self._ctx.store.write(begin, tenant.name, shown["id"], record, rows, most)
        except TooLarge as size:
            raise too_large(size.num_items, size.num_bytes) from None
        return JSONResponse(shown)

    def _made(self, body: bytes) -> tuple[Record, bytes, list[Row]]:
        """A new one, its record, and its items. Raises `ApiError`."""
        request = parse(ConversationRequest, body)
        check_items(request.items or [])
        shown = {
            "id": PREFIX + uuid.uuid4().hex,
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": request.metadata or {},
        }
        return shown, json.dumps({"header": shown}).encode(), _as_rows(request.items or [])

    async def _show(self, http: Request, tenant: Tenant) -> Response:
        return JSONResponse((await self.find(tenant, http.path_params["id"])).shown)

    async def _update(self, http: Request, tenant: Tenant) -> Response:
        name, body = http.path_params["id"], await read_body(self._ctx, http)
        request = await self._ctx.in_json_thread(len(body), parse, MetadataRequest, body)
        for _ in range(_TRIES):
            known = await self.find(tenant, name)
            shown = known.shown | {"metadata": request.metadata}
            changed = json.dumps({"header": shown}).encode()
            replace = self._ctx.responses.replace
            if await self._ctx.store.write(replace, tenant.name, name, known.data, changed):
                return JSONResponse(shown)
        raise _busy(name)

    async def _delete(self, http: Request, tenant: Tenant) -> Response:
        name = http.path_params["id"]
        delete = self._ctx.responses.delete
        if not name.startswith(PREFIX) or not await self._ctx.store.write(
            delete, tenant.name, name
        ):
            raise _unknown(name)
        return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})

    async def _items(self, http: Request, tenant: Tenant) -> Response:
        name, query = http.path_params["id"], page_query(http)
        await self.find(tenant, name)

        def read() -> bytes:
            wanted = query.after, query.is_asc, query.limit, MAX_PAGE_BYTES
            rows, has_more = self._rows.page(tenant.name, name, *wanted)
            return _list_of(rows, has_more)

        try:
            return _json(await self._ctx.store.read(read))
        except KeyError:
            raise no_entry(query.after or "") from None

    async def _add(self, http: Request, tenant: Tenant) -> Response:
        body = await read_body(self._ctx, http)
        request = await self._ctx.in_json_thread(len(body), parse, ItemsRequest, body)
        await self._ctx.in_json_thread(len(body), check_items, request.items)
        rows = await self.append(tenant, http.path_params["id"], request.items, len(body))
        shown = await self._ctx.in_json_thread(len(body), _list_of, rows, False)
        return _json(shown)

    async def _item(self, http: Request, tenant: Tenant) -> Response:
        name, wanted = http.path_params["id"], http.path_params["item"]
        await self.find(tenant, name)
        one = self._rows.one
        try:
            item = await self._ctx.store.read(lambda: joined(one(tenant.name, name, wanted)))
        except KeyError:
            raise _no_item(wanted) from None
        return _json(item)

    async def _remove(self, http: Request, tenant: Tenant) -> Response:
        name, wanted = http.path_params["id"], http.path_params["item"]
        known = await self.find(tenant, name)
        try:
            await self._ctx.store.write(self._rows.remove, tenant.name, name, wanted)
        except KeyError:
            raise _no_item(wanted) from None
        return JSONResponse(known.shown)


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


def _as_rows(items: Sequence[Record]) -> list[Row]:
    return [row_of(input_item(item)) for item in items]


def _rows_of(record: Record) -> tuple[bytes, list[Row]]:
    """Takes a record of the version before apart: the new one, and its items."""
    header = json.dumps({"header": record["conversation"]}).encode()
    return header, [row_of(item) for item in record["items"]]


def input_item(item: Record, item_id: str = "") -> Record:
    """As clients expect it: with an id, if it has none that one, and content as parts."""
    own = {"id": item_id, **{key: value for key, value in item.items() if value is not None}}
    if (item.get("type") or "message") != "message":
        return own
    if isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        part = {"type": kind, "text": item["content"]}
        own["content"] = [part | {"annotations": []} if kind == "output_text" else part]
    return {"type": "message", "status": "completed"} | own


def check_size(known: Known, items: list[Record]) -> None:
    """That these may be added, about. Raises `ApiError` (400)."""
    num_items = known.num_items + len(items)
    num_bytes = known.num_bytes + sum(num_bytes_of(row_of(item)) for item in items)
    if num_items > MAX_ITEMS or num_bytes > MAX_BYTES:
        raise too_large(num_items, num_bytes)


def too_large(num_items: int, num_bytes: int) -> ApiError:
    return invalid(
        f"A conversation has at most {MAX_ITEMS} items of {MAX_BYTES} bytes, with these it has"
        f" {num_items} of {num_bytes}: begin another, or compact it",
        code="conversation_too_large",
    )


def _list_of(rows: Sequence[Row], has_more: bool) -> bytes:
    return list_body([(row[0], joined(row)) for row in rows], has_more)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _no_item(wanted: str) -> ApiError:
    message = f"The conversation has no item '{wanted[:100]}'"
    return ApiError(404, message, param="item_id", code="item_not_found")


def _busy(name: str) -> ApiError:
    return overloaded(f"Other calls change '{name[:100]}' at the same time", 1.0)


def _unknown(name: str) -> ApiError:
    message = f"Conversation with id '{name[:100]}' not found."
    return ApiError(404, message, param="conversation", code="conversation_not_found")
