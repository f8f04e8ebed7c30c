"""`/v1/messages` and `/v1/messages/count_tokens`: what is planned, and Anthropic's JSON of what is
answered: a whole message, the events of a stream, an error."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from kvrelay.cluster.api.anthropic.schema import (
    CHAT_NAMES,
    TTL_S,
    CountRequest,
    MessagesChat,
    MessagesRequest,
    as_chat,
    read_messages,
    read_request,
)
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, renamed
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import held_body, utility_call
from kvrelay.cluster.api.openai.formats import BlockFormat
from kvrelay.cluster.api.openai.parts import Plan
from kvrelay.cluster.api.openai.plan import chat_prompt, plan_chat
from kvrelay.cluster.api.openai.respond import GenerateEndpoint, error_response
from kvrelay.cluster.api.output.events import THINK, Arguments, CallBegin, Reasoning, Text
from kvrelay.cluster.api.tenants import Tenant
from kvrelay.engine.kv.tier import Retention
from kvrelay.engine.service_class import ServiceClass

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_TIERS = {ServiceClass.PRIORITY: "priority", ServiceClass.BATCH: "batch"}


def error_body(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessageFormat(BlockFormat):
    """`/v1/messages`."""

    alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, ctx: ApiContext, plan: Plan, request: MessagesChat, request_id: str) -> None:
        super().__init__(plan)
        self._model, self._id = ctx.shown_model(request.model), f"msg_{request_id}"
        self._marks_cache, self._keep_s = request.keep_s is not None, request.keep_s or 0.0
        self._tier = _TIERS.get(plan.service_class, "standard")
        self._num_calls = 0
        self._content: list[dict[str, Any]] = []  # blocks that are closed
        self._block: dict[str, Any] = {}  # that is being written
        self._text = ""  # what was written to it

    def opening(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self._answer(usage)}, {"type": "ping"}]

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        return [error_body(error)]

    def _open_block(self, event: Text | Reasoning | CallBegin) -> list[dict[str, Any]]:
        self._text = ""
        match event:
            case Text():
                self._block = {"type": "text", "text": ""}
            case Reasoning():
                self._block = {"type": "thinking", "thinking": "", "signature": ""}
            case CallBegin(name, call_id):
                self._num_calls += 1
                call_id = call_id or self._new_call_id(f"{self._id}-{self._num_calls}")
                self._block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        return [self._event("start", content_block=self._block)]

    def _write(self, event: Text | Reasoning | Arguments) -> list[dict[str, Any]]:
        self._text += event.text
        match event:
            case Text(text):
                delta = {"type": "text_delta", "text": text}
            case Reasoning(text):
                delta = {"type": "thinking_delta", "thinking": text}
            case Arguments(text):
                delta = {"type": "input_json_delta", "partial_json": text}
        return [self._event("delta", delta=delta)]

    def _close_block(self, *, is_last: bool) -> list[dict[str, Any]]:
        made, block = [], self._block
        match block["type"]:
            case "thinking":
                delta = {"type": "signature_delta", "signature": self._id}
                made.append(self._event("delta", delta=delta))
                closed = block | {"thinking": self._text, "signature": self._id}
            case "tool_use":
                closed = block | {"input": _object(self._text)}
            case _:
                closed = block | {"text": self._text}
        made.append(self._event("stop"))
        self._content.append(closed)
        return made

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"content_block_{name}", "index": len(self._content), **fields}

    def _end(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        ended = {"type": "message_delta", "delta": self._stopped(), "usage": self._usage(usage)}
        return [ended, {"type": "message_stop"}]

    def _answer(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [*self._content],
            **self._stopped(),
            "usage": self._usage(usage),
        }

    def _stopped(self) -> dict[str, Any]:
        """Why the message ended, where it has."""
        if self._last is None or self._last.finish_reason is None:
            return {"stop_reason": None, "stop_sequence": None}
        reason = _REASONS.get(self._last.finish_reason, "end_turn")
        if self._last.stopped_by is not None:
            reason = "stop_sequence"
        elif self._parser.has_calls and self._last.finish_reason == "stop":
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": self._last.stopped_by}

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Anthropic's prompt has three parts: read from the cache, written to it where the request
        marks something, and the rest."""
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        computed = usage["prompt_tokens"] - cached
        created = computed if self._marks_cache else 0
        is_long = self._keep_s > TTL_S["5m"]
        return {
            "input_tokens": computed - created,
            "cache_creation_input_tokens": created,
            "cache_creation": {
                "ephemeral_5m_input_tokens": 0 if is_long else created,
                "ephemeral_1h_input_tokens": created if is_long else 0,
            },
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "service_tier": self._tier,
        } | {k: v for k, v in usage["prompt_tokens_details"].items() if k == "kv"}


def _object(text: str) -> dict[str, Any]:
    """The input of a call. One that was cut short has the fields that are whole."""
    try:
        value = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {"value": value}


MESSAGES = "/v1/messages"


def refuse(error: ApiError) -> JSONResponse:
    return error_response(error, error_body(error))


def message_routes(ctx: ApiContext) -> list[ApiRoute]:
    messages = GenerateEndpoint(ctx, "messages", read_messages, _plan, MessageFormat, refuse)
    count = partial(_count, ctx)
    return [
        ApiRoute("POST", MESSAGES, messages, "Answer Anthropic's messages", MessagesRequest),
        ApiRoute("POST", f"{MESSAGES}/count_tokens", count, "Tokens of a prompt", CountRequest),
    ]


async def _plan(ctx: ApiContext, request: MessagesChat, tenant: Tenant) -> Plan:
    _, think_end = ctx.dialect.thinks or THINK
    outside = ctx.dialect.outside
    # Nothing could end the reasoning.
    if ctx.tokenizer.token_id(think_end) is None or (outside and outside.reasons):
        request = request.model_copy(update={"thinking_budget": None})
    with renamed(CHAT_NAMES):
        plan = await plan_chat(ctx, request, tenant)
    if request.keep_s is None:
        return plan
    kept = Retention(max(request.keep_s, ctx.retention_s))
    choices = (replace(each, spec=replace(each.spec, retention=kept)) for each in plan.choices)
    return replace(plan, choices=tuple(choices))


async def _count(ctx: ApiContext, http: Request) -> Response:
    try:
        with utility_call(ctx, http) as tenant:
            async with held_body(ctx, http) as body:
                request = await ctx.in_json_thread(len(body), read_request, CountRequest, body)
                chat = await ctx.in_json_thread(len(body), as_chat, request)
                prompt = await chat_prompt(ctx.chosen(chat.model, tenant), chat, tenant)
    except ClientDisconnect:  # the client is gone
        return Response(status_code=400)
    return JSONResponse({"input_tokens": len(prompt.tokens)})
