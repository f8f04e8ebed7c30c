"""OpenAI's JSON of a response: a whole one, and the typed events of a stream.

Which log-probabilities belong to the text of a response: not those of its reasoning, not those
of its calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.openai.formats import BlockFormat, Format, joined
from kvrelay.cluster.api.openai.logprobs import Runs, chat_entry
from kvrelay.cluster.api.openai.parts import Piece, Plan, TokenText
from kvrelay.cluster.api.output.custom_input import CustomInput
from kvrelay.cluster.api.output.events import Arguments, CallBegin, Reasoning, Span, Text
from kvrelay.cluster.api.responses.schema import (
    ENCRYPTED,
    SUMMARY,
    ResponsesChat,
    ResponsesRequest,
    encoded,
)


class TextLogprobs:
    """Sorts tokens by what was read in them. Owned by a format.

    Life: `add` the tokens of a piece, then `take` those of each text that was read, in order. A
    token belongs to a text if the two share a character, and to the first of several. One that only
    begins a character belongs where the character does. So each is taken once at most, and it does
    not matter in how many parts a text comes.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, msgspec.Raw]] = (
            deque()
        )  # where its text begins, and its entry

    def add(self, tokens: Sequence[TokenText], entries: Runs) -> None:
        """entries: one of each token, as JSON."""
        places = (token.offset for token in tokens)
        self._waiting.extend(zip(places, entries, strict=True))

    def take(self, spans: Sequence[Span]) -> list[msgspec.Raw]:
        """Entries of the tokens of a text that was read at `spans`. All that begin before the end
        of it have been added: a piece's tokens come no later than its text."""
        waiting, entries = self._waiting, list[msgspec.Raw]()
        for begin, end in spans:
            while len(waiting) > 1 and waiting[0][0] < begin and waiting[1][0] <= begin:
                waiting.popleft()  # it ends where the next one begins
            while waiting and waiting[0][0] < end:
                entries.append(waiting.popleft()[1])
        return entries


Keep = Callable[[dict[str, Any]], Awaitable[bool]]
"""Keeps a response that is done, if that is asked for and possible; whether it did."""

_REPEATED = (
    *("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p"),
    *("tools", "tool_choice", "parallel_tool_calls", "metadata", "user"),
    *("prompt_cache_key", "background", "top_logprobs", "service_tier", "presence_penalty"),
    *("frequency_penalty", "max_tool_calls", "safety_identifier"),
)
_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "metadata": {},
    "background": False,
    "top_logprobs": 0,
    "service_tier": "default",
}


def begun(request: ResponsesRequest, model: str, response_id: str, status: str) -> dict[str, Any]:
    """Makes a response that has no output yet."""
    given = request.model_dump(exclude={"input"})
    repeated = {key: given.get(key) for key in _REPEATED}
    for key, default in _DEFAULTS.items():
        if repeated[key] is None:
            repeated[key] = default
    text, reasoning = given.get("text") or {}, given.get("reasoning") or {}
    repeated["tools"] = [_tool(tool) for tool in repeated["tools"] or ()]
    if request.conversation is not None:
        repeated["conversation"] = {"id": request.conversation}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        "truncation": "disabled",
        "store": request.is_kept,
        "text": {"format": {"type": "text"}} | {k: v for k, v in text.items() if v is not None},
        "reasoning": {"effort": None, "summary": None} | reasoning,
        **repeated,
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """With all fields that clients expect of one."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None} | tool


def usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    details, wanted = usage["prompt_tokens_details"], ("cached_tokens", "cache_write_tokens", "kv")
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {name: details[name] for name in wanted if name in details},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
        },
        "total_tokens": usage["total_tokens"],
    }


def error_event(error: ApiError) -> dict[str, Any]:
    """Makes an error in a stream, beside the response."""
    return {"type": "error", "status": error.status, **error.body}


class CompactFormat(Format):
    """`/v1/responses/compact`: what the user said, and the model's summary of all of it."""

    def __init__(self, plan: Plan, response_id: str, said: list[dict[str, Any]]) -> None:
        assert plan.reading is not None
        self._id, self._said = response_id, said
        self._parser = plan.reading.parser()

    async def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        events = self._parser.take(joined(pieces, 0))
        text = "".join(event.text for event in events if isinstance(event, Text)).strip()
        if not text:
            raise ApiError(500, "The model wrote no summary", type="server_error")
        summary = {
            "type": "compaction",
            "id": f"cmp_{self._id.removeprefix('resp_')}",
            "encrypted_content": encoded(SUMMARY + text),
        }
        return {
            "id": self._id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*self._said, summary],
            "usage": usage_of(usage),
        }


class ResponseFormat(BlockFormat):
    """`/v1/responses`."""

    def __init__(
        self, ctx: ApiContext, plan: Plan, request: ResponsesChat, response_id: str, keep: Keep
    ) -> None:
        super().__init__(plan)
        self._id, self._keep = response_id, keep
        self._custom = plan.reading.custom if plan.reading else set()
        self._spaces = request.spaces
        self._encrypts = ENCRYPTED in (request.asked.include or ())
        self._response = begun(
            request.asked, ctx.shown_model(request.asked.model), response_id, "in_progress"
        )
        sampling = plan.choices[0].sampling
        for name in ("temperature", "top_p"):  # as the model's makers recommend it, if not given
            if getattr(request.asked, name) is None:
                self._response[name] = getattr(sampling, name)
        self._response["service_tier"] = plan.service_class.tier
        self._output: list[dict[str, Any]] = self._response["output"]
        self._item: dict[str, Any] = {}  # that is being written
        self._text = ""  # its content, or its arguments
        self._input: CustomInput  # likewise, of a custom tool
        self._names = ctx.token_names
        self._logprobs = TextLogprobs()
        self._entries: list[msgspec.Raw] = []  # log-probabilities of its text
        self._num_events = 0

    def opening(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            self._event(f"response.{name}", response=self._response | {"output": []})
            for name in ("created", "in_progress")
        ]

    def condensed(self, piece: Piece) -> Piece:
        if not piece.tokens:
            return piece
        entries = tuple(msgspec.Raw(chat_entry(self._names, token)) for token in piece.tokens)
        places = tuple(TokenText(token.token, None, token.offset) for token in piece.tokens)
        return replace(piece, tokens=places, logprobs=(entries,))

    def _read(self, piece: Piece) -> list[dict[str, Any]]:
        if piece.logprobs:
            self._logprobs.add(piece.tokens, piece.logprobs[0])
        return super()._read(piece)

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        failure = {"code": error.code or "server_error", "message": error.message}
        response = self._response | {"status": "failed", "error": failure}
        return [self._event("response.failed", response=response)]

    def refused(self, error: ApiError, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [*self.opening(usage), *self.failed(error)]  # clients wait for `response.created`

    async def settled(self) -> None:
        self._response["store"] = await self._keep(self._response)

    def _end(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        response = self._answer(usage)
        return [self._event(f"response.{response['status']}", response=response)]

    def _answer(self, usage: dict[str, Any]) -> dict[str, Any]:
        response = self._response
        response["status"], response["completed_at"] = "completed", int(time.time())
        if self._is_cut():
            response["status"] = "incomplete"
            response["completed_at"] = None
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = usage_of(usage)
        return response

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _is_cut(self) -> bool:
        return self._last is not None and self._last.finish_reason == "length"

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        place = {"output_index": len(self._output), "item_id": self._item["id"]}
        if self._item["type"] in _PARTS:
            place["content_index"] = 0
        return self._event(kind, **place, **fields)

    def _write(self, event: Text | Reasoning | Arguments) -> list[dict[str, Any]]:
        self._text += event.text
        match event:
            case Text(text, spans):
                entries = self._logprobs.take(spans)
                self._entries += entries
                kind = "response.output_text.delta"
                return [self._item_event(kind, delta=text, logprobs=entries)]
            case Reasoning(text):
                return [self._item_event("response.reasoning_text.delta", delta=text)]
            case Arguments(text) if self._item["type"] == "function_call":
                kind = "response.function_call_arguments.delta"
                return [self._item_event(kind, delta=text)]
        return self._write_input(self._input.push(event.text))

    def _write_input(self, text: str) -> list[dict[str, Any]]:
        self._item["input"] += text
        kind = "response.custom_tool_call_input.delta"
        return [self._item_event(kind, delta=text)] if text else []

    def _begun(self, event: Text | Reasoning | CallBegin) -> dict[str, Any]:
        if isinstance(event, CallBegin):
            return self._call(event)
        if isinstance(event, Reasoning):
            return {"type": "reasoning", "id": self._item_id("rs"), "summary": [], "content": []}
        item = {"type": "message", "id": self._item_id("msg"), "role": "assistant"}
        return item | {"status": "in_progress", "content": []}

    def _call(self, event: CallBegin) -> dict[str, Any]:
        is_custom = event.name in self._custom
        call_id = event.call_id or self._new_call_id(self._item_id("call"))
        space, name = self._spaces.get(event.name, ("", event.name))
        return {
            "type": "custom_tool_call" if is_custom else "function_call",
            "id": self._item_id("ctc" if is_custom else "fc"),
            "call_id": call_id,
            "name": name,
            **({"namespace": space} if space else {}),
            "input" if is_custom else "arguments": "",
            "status": "in_progress",
        }

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._id.removeprefix('resp_')}_{len(self._output)}"

    def _open_block(self, event: Text | Reasoning | CallBegin) -> list[dict[str, Any]]:
        self._item = item = self._begun(event)
        self._text, self._entries, self._input = "", [], CustomInput()
        index = len(self._output)
        made = [self._event("response.output_item.added", output_index=index, item=dict(item))]
        if item["type"] in _PARTS:
            part = _part(item["type"], "", {"logprobs": []})
            made.append(self._item_event("response.content_part.added", part=part))
        return made

    def _close_block(self, *, is_last: bool) -> list[dict[str, Any]]:
        item, text = self._item, self._text
        made: list[dict[str, Any]] = []
        logprobs: dict[str, Any] = {}
        match item["type"]:
            case "message":
                logprobs = {"logprobs": self._entries}
                made.append(self._item_event("response.output_text.done", text=text, **logprobs))
            case "reasoning":
                if self._encrypts:
                    item["encrypted_content"] = encoded(text)
                made.append(self._item_event("response.reasoning_text.done", text=text))
            case "function_call":
                item["arguments"] = text
                kind = "response.function_call_arguments.done"
                made.append(self._item_event(kind, arguments=text, name=item["name"]))
            case _:
                made += self._write_input(self._input.finish())
                kind = "response.custom_tool_call_input.done"
                made.append(self._item_event(kind, input=item["input"]))
        if item["type"] in _PARTS:
            part = _part(item["type"], text, logprobs)
            item["content"] = [part]
            made.append(self._item_event("response.content_part.done", part=part))
        if "status" in item:
            item["status"] = "incomplete" if is_last and self._is_cut() else "completed"
        index = len(self._output)
        made.append(self._event("response.output_item.done", output_index=index, item=item))
        self._output.append(item)
        return made


# An item's type -> the type of its one part.
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


def _part(item: str, text: str, logprobs: dict[str, Any]) -> dict[str, Any]:
    extra = {"annotations": [], **logprobs} if item == "message" else {}
    return {"type": _PARTS[item], "text": text, **extra}
