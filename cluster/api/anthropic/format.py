"""Anthropic's JSON of an answer: a whole message and the events of a stream, and of an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvrelay.cluster.api.anthropic.schema import TTL_S, MessagesChat
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.openai.formats import Format, joined
from kvrelay.cluster.api.openai.parts import Piece, Plan
from kvrelay.cluster.api.output.events import Arguments, CallBegin, Event, Reasoning, Text

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


def error_body(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessageFormat(Format):
    """`/v1/messages`. One choice."""

    names_events = True
    alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, ctx: ApiContext, plan: Plan, request: MessagesChat, request_id: str) -> None:
        assert plan.reading is not None
        self._model, self._id = ctx.model_name, f"msg_{request_id}"
        self._new_call_id = plan.reading.new_id
        self._parser = plan.reading.parser()
        self._marks_cache, self._keep_s = request.keep_s is not None, request.keep_s or 0.0
        self._num_blocks = self._num_calls = 0
        self._open: dict[str, Any] | None = None  # the content block that is being written
        self._reason: str | None = None
        self._stopped_by: str | None = None

    def opening(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        message = self._message([], None) | {"usage": self._usage(usage)}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for event in self._events(piece):
            made += self._written(event)
        return made

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        delta = {"stop_reason": self._reason, "stop_sequence": self._stopped_by}
        told = {"type": "message_delta", "delta": delta, "usage": self._usage(usage)}
        return [*self._end_block(), told, {"type": "message_stop"}]

    async def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        inputs: list[str] = []  # of each block, the JSON of its input
        for event in self._events(joined(pieces, 0)):
            if isinstance(event, Arguments):
                inputs[-1] += event.text
                continue
            content.append(self._block(event))
            inputs.append("")
            if isinstance(event, Text):
                content[-1]["text"] = event.text
            elif isinstance(event, Reasoning):
                content[-1] |= {"thinking": event.text, "signature": self._id}
        for block, text in zip(content, inputs, strict=True):
            if block["type"] == "tool_use":
                block["input"] = _object(text)
        return self._message(content, self._reason) | {"usage": self._usage(usage)}

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        return [error_body(error)]

    def _events(self, piece: Piece) -> list[Event]:
        events = self._parser.read(piece.text, is_last=piece.finish_reason is not None)
        if piece.finish_reason is not None:
            self._stopped_by = piece.stopped_by
            self._reason = _REASONS.get(piece.finish_reason, "end_turn")
            if piece.stopped_by is not None:
                self._reason = "stop_sequence"
            elif self._parser.has_calls and piece.finish_reason == "stop":
                self._reason = "tool_use"
        return events

    def _written(self, event: Event) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        kind = {Text: "text", Reasoning: "thinking", CallBegin: "tool_use", Arguments: "tool_use"}
        is_new = self._open is None or self._open["type"] != kind[type(event)]
        if is_new or isinstance(event, CallBegin):
            made += self._end_block()
            self._open = self._block(event)
            index = self._num_blocks
            made.append(
                {"type": "content_block_start", "index": index, "content_block": self._open}
            )
        match event:
            case Text(text):
                delta = {"type": "text_delta", "text": text}
            case Reasoning(text):
                delta = {"type": "thinking_delta", "thinking": text}
            case Arguments(text):
                delta = {"type": "input_json_delta", "partial_json": text}
            case _:
                return made
        return [*made, self._delta(delta)]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _end_block(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        made = []
        if self._open["type"] == "thinking":
            made.append(self._delta({"type": "signature_delta", "signature": self._id}))
        made.append({"type": "content_block_stop", "index": self._num_blocks})
        self._num_blocks += 1
        self._open = None
        return made

    def _block(self, event: Event) -> dict[str, Any]:
        """One that begins with `event`."""
        match event:
            case Reasoning():
                return {"type": "thinking", "thinking": "", "signature": ""}
            case CallBegin(name, call_id):
                self._num_calls += 1
                call_id = call_id or self._new_call_id(f"{self._id}-{self._num_calls}")
                return {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        return {"type": "text", "text": ""}

    def _message(self, content: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": self._stopped_by,
        }

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
        }


def _object(text: str) -> dict[str, Any]:
    """The input of a call. One that was cut short is what there is of it, as a text."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {"partial_json": text}
    return value if isinstance(value, dict) else {"value": value}
