"""One request for a response: what came before it is read back, it is served as a chat, and what
came of it is kept, for those that continue it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid, renamed
from kvrelay.cluster.api.incoming import hold, too_large
from kvrelay.cluster.api.openai.formats import Format
from kvrelay.cluster.api.openai.parts import Plan
from kvrelay.cluster.api.openai.plan import plan_chat
from kvrelay.cluster.api.openai.respond import ReadEndpoint
from kvrelay.cluster.api.responses.conversations import (
    PREFIX,
    Conversations,
    Remembered,
    check_size,
    input_item,
)
from kvrelay.cluster.api.responses.format import ResponseFormat
from kvrelay.cluster.api.responses.schema import (
    CHAT_NAMES,
    ResponsesChat,
    ResponsesRequest,
    as_chat,
    check_outputs,
    is_reference,
)
from kvrelay.cluster.api.tenants import Tenant

MAX_TURNS = 2000  # that are read back of a conversation
LOST_AFTER_S = 5.0  # beyond its timeout one in the background cannot run, wherever it does
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_\d+")
_log = logging.getLogger("kvrelay.api")
MakeFormat = Callable[[ApiContext, Plan, ResponsesChat, str], Format]


class KeptResponses:
    """Owned by the application: records of the store, and the conversations beside them."""

    def __init__(self, ctx: ApiContext, is_running: Callable[[str], bool]) -> None:
        """is_running: whether a response runs in the background here."""
        self.ctx = self._ctx = ctx
        self._is_running = is_running
        self.conversations = Conversations(ctx)

    async def find(self, tenant: Tenant, response_id: str) -> dict[str, Any]:
        """Raises `ApiError` (404)."""
        return await self.understood(response_id, await self.stored(tenant, response_id))

    async def stored(self, tenant: Tenant, response_id: str) -> bytes:
        """Returns a record as it is kept. Raises `ApiError` (404)."""
        get = self._ctx.responses.get
        found = await self._ctx.store.read(get, tenant.name, response_id)
        if found is None:
            raise unknown(response_id)
        return found

    async def understood(self, response_id: str, data: bytes) -> dict[str, Any]:
        """Raises `ApiError` (404): it is the record of something else."""
        record: dict[str, Any] = await self._ctx.in_json_thread(len(data), json.loads, data)
        if "response" not in record:
            raise unknown(response_id)
        response = record["response"]
        runs_until = response["created_at"] + self._ctx.settings.request_timeout_s + LOST_AFTER_S
        is_here = self._is_running(response_id)
        if response["status"] == "in_progress" and not is_here and time.time() > runs_until:
            error = {"code": "server_error", "message": "The server stopped while it ran"}
            record["response"] = response | {"status": "failed", "error": error}
        return record

    async def keep(self, tenant: Tenant, record: dict[str, Any]) -> str:
        """Returns why it is not kept, which is no reason to withhold the answer; "": it is."""

        def write() -> None:
            self._ctx.responses.put(tenant.name, response_id, msgspec.json.encode(record))

        response_id = record["response"]["id"]
        try:
            await self._ctx.store.write(write)
        except ApiError as error:
            _log.warning("response %s is not kept: %s", response_id, error.message)
            return error.message
        return ""


class ResponseCall:
    def __init__(
        self,
        kept: KeptResponses,
        request: ResponsesRequest,
        tenant: Tenant,
        response_id: str,
        remembered: Remembered | None = None,
    ) -> None:
        """remembered: what the connection remembers that it came on."""
        self.request, self.response_id = request, response_id
        self.on_planned: Callable[[], None] = lambda: None  # it is about to be submitted
        self.may_settle: asyncio.Event | None = None  # once set, its end may be kept; None: at once
        self.has_settled = False
        self._ctx, self._kept, self.tenant = kept.ctx, kept, tenant
        self._remembered = remembered
        self._before: list[dict[str, Any]] = []  # items of earlier turns
        self._root = response_id  # the conversation's first response, or its name
        self.chat: ResponsesChat  # once it is prepared, as are the next two
        self._name: bytes  # the call's
        self._num_bytes: int  # that the model is to read, all together
        self.model = kept.ctx.chosen(request.model, tenant)  # raises ApiError

    async def prepare(self, size: int, name: bytes) -> None:
        """Reads back what came before. size: of the body that asks; name: by it. Raises
        `ApiError`."""
        ctx, self._name = self._ctx, name
        self.request.input = await self._resolved(self.request.input)
        with ctx.bodies.share() as take:
            history, num_bytes = await self._history(take, ctx.settings.max_body_bytes - size)
            self._before = history
            if history:
                check_outputs(history, self.request.input)
            self._num_bytes = size + num_bytes
            if self._num_bytes > ctx.settings.max_body_bytes:
                raise too_large(ctx.settings.max_body_bytes)
            session = self._root if self.request.is_kept else None
            self.chat = await ctx.in_json_thread(
                self._num_bytes, as_chat, self.request, history, session
            )

    def items(self) -> list[dict[str, Any]]:
        """Returns all that the model is to read."""
        return [*self._before, *self.request.input]

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application. Prepared before, served once."""
        await self.answer(self._format)(scope, receive, send)

    def answer(self, format: MakeFormat) -> ReadEndpoint[ResponsesChat]:
        request = self.chat, self._name, self._num_bytes
        return ReadEndpoint(self._ctx, "responses", request, _plan, format)

    async def keep(self, response: dict[str, Any]) -> str:
        """Keeps one that is to be kept; returns what `KeptResponses.keep` does."""
        record = {"response": response, "items": self.request.input, "root": self._root}
        return await self._kept.keep(self.tenant, record)

    async def _settle(self, response: dict[str, Any]) -> bool:
        if self.may_settle is not None:
            await self.may_settle.wait()
        await self._hand_on(response)
        if self.request.is_kept:
            why = await self.keep(response)
            self.has_settled = not why
            if why:
                _warn(response, "not_stored", f"This response is not stored: {why}")
                await self.remember(response)
        return self.has_settled

    async def _hand_on(self, response: dict[str, Any]) -> None:
        """To what may be continued beside the store. Where that fails, the answer says so: it is as
        good, and the next turn would lack it without a word."""
        name = self.request.conversation
        if name is not None:
            said = [_without_logprobs(item) for item in response["output"]]
            asked = asked_items({"response": response, "items": self.request.input})
            append = self._kept.conversations.append
            try:
                await append(self.tenant, name, asked + said, self._num_bytes)
            except ApiError as error:
                _log.warning("response %s is not in its conversation", self.response_id)
                response["conversation"] = None
                lost = f"This turn is not in '{name}', and the next one there would lack it"
                _warn(response, "not_in_conversation", f"{lost}: {error.message}")
        if not self.request.is_kept:
            await self.remember(response)

    async def remember(self, response: dict[str, Any]) -> None:
        """For the next on the same connection, if it is one that others come on."""
        if self._remembered is not None:
            said = [_without_logprobs(item) for item in response["output"]]
            items, size = [*self.items(), *said], self._num_bytes
            encoded = await self._ctx.in_json_thread(size, msgspec.json.encode, items)
            self._remembered.put(self.response_id, encoded)

    async def keep_events(self, events: list[bytes]) -> None:
        """With the response that has been kept, if it is still there."""

        def write() -> None:
            found = store.get(self.tenant.name, self.response_id)
            if found is not None:
                sent = msgspec.json.encode([event.decode() for event in events])
                more = found[:-1] + b',"events":' + sent + b"}"
                store.replace(self.tenant.name, self.response_id, found, more)

        store = self._ctx.responses
        try:
            await self._ctx.store.write(write)
        except ApiError as error:
            message = "the stream of response %s is not kept: %s"
            _log.warning(message, self.response_id, error.message)

    def _format(
        self, ctx: ApiContext, plan: Plan, chat: ResponsesChat, request_id: str
    ) -> ResponseFormat:
        self.on_planned()
        return ResponseFormat(ctx, plan, chat, self.response_id, self._settle)

    async def _resolved(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With the items in their places that are only named. Raises `ApiError` (400, 404)."""
        found: dict[str, dict[str, Any]] = {}  # by id
        tried: set[str] = set()
        for item in items:
            name = item.get("id")
            if not is_reference(item) or name in found:
                continue
            match = _ITEM_ID.fullmatch(name) if isinstance(name, str) else None
            if match is not None and match[1] not in tried:
                tried.add(match[1])
                if len(tried) > MAX_TURNS:
                    raise invalid(f"'input' names items of more than {MAX_TURNS} responses")
                found |= {kept["id"]: kept for kept in await self._items_of(match[1])}
            if name not in found:
                message = f"Item with id {str(name)[:100]!r} not found: it was not stored"
                raise ApiError(404, message, param="input", code="item_not_found")
        return [found[item["id"]] if is_reference(item) else item for item in items]

    async def _items_of(self, name: str) -> list[dict[str, Any]]:
        """Returns those of a response or a conversation whose ids end in `name`."""
        with suppress(ApiError):
            record = await self._kept.find(self.tenant, f"resp_{name}")
            return [*asked_items(record), *record["response"]["output"]]
        with suppress(ApiError):
            await self._kept.conversations.find(self.tenant, f"{PREFIX}{name}")
            return await self._kept.conversations.items(self.tenant, f"{PREFIX}{name}")
        return []

    async def _history(
        self, take: Callable[[int], bool], most: int
    ) -> tuple[list[dict[str, Any]], int]:
        """The items, and of how many bytes they were read, `most` at the most."""
        previous, conversation = self.request.previous_response_id, self.request.conversation
        if previous is not None and conversation is not None:
            message = "'conversation' and 'previous_response_id': a response continues one of them"
            raise invalid(message, param="conversation")
        if conversation is not None:
            self._root = conversation
            conversations = self._kept.conversations
            known = await conversations.find(self.tenant, conversation)
            asked = self.request.input
            size = self._ctx.settings.max_body_bytes - most
            await self._ctx.in_json_thread(size, check_size, known, asked)
            hold(take, known.num_bytes)
            items = await conversations.items(self.tenant, conversation)
            return items, known.num_bytes
        if self._remembered and previous and self._remembered.name == previous:
            size = self._remembered.num_bytes
            return await self._ctx.in_json_thread(size, self._remembered.items), size
        return await self._turns(previous, take, most)

    async def _turns(
        self, previous: str | None, take: Callable[[int], bool], most: int
    ) -> tuple[list[dict[str, Any]], int]:
        """Those of the stored responses that `previous` ends."""
        turns: list[list[dict[str, Any]]] = []
        num_bytes = 0
        while previous is not None:
            try:
                data = await self._kept.stored(self.tenant, previous)
                is_more = len(turns) == MAX_TURNS or num_bytes + len(data) > most
                if not is_more:
                    hold(take, len(data))
                    record = await self._kept.understood(previous, data)
            except ApiError as error:
                if error.status != 404:
                    raise
                message = f"Previous response with id '{previous[:100]}' not found."
                code = "previous_response_not_found"
                raise invalid(message, "previous_response_id", code) from None
            if is_more:
                limit = self._ctx.settings.max_body_bytes
                raise invalid(
                    f"A conversation has at most {MAX_TURNS} turns that are read back, and"
                    f" {limit} bytes: begin a new one",
                    param="previous_response_id",
                )
            num_bytes += len(data)
            response = record["response"]
            if response["status"] not in ("completed", "incomplete"):
                raise invalid(f"The response '{previous}' is {response['status']}")
            self._root = record["root"]
            turns.append([*record["items"], *response["output"]])
            previous = response["previous_response_id"]
        return [item for turn in reversed(turns) for item in turn], num_bytes


async def _plan(ctx: ApiContext, chat: ResponsesChat, tenant: Tenant) -> Plan:
    with renamed(CHAT_NAMES):
        return await plan_chat(ctx, chat, tenant)


def asked_items(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what a response was asked with, each item by an id that says where it is kept."""
    name = record["response"]["id"].removeprefix("resp_")
    return [input_item(item, f"item_{name}_{i}") for i, item in enumerate(record["items"])]


def _warn(response: dict[str, Any], code: str, message: str) -> None:
    response.setdefault("warnings", []).append({"code": code, "message": message})


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """Returns an item of an answer, as a history needs it."""
    parts = item.get("content")
    if not isinstance(parts, list):
        return item
    plain = [part | {"logprobs": []} if "logprobs" in part else part for part in parts]
    return item | {"content": plain}


def unknown(response_id: str) -> ApiError:
    message = f"Response with id '{response_id[:100]}' not found."
    return ApiError(404, message, param="id", code="response_not_found")
