"""Each way in which a request can hold a model to calls or to a schema, and what the model says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvrelay.cluster.api.openai.tools import arguments_of
from tests.cluster.api.zoo.model import Model
from tests.cluster.api.zoo.texts import ANSWER, PERSON, SCHEMA, SHORT, THOUGHT, WEATHER

NAME = "get_weather"
_BY_NAME = {"type": "function", "function": {"name": NAME}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": SCHEMA}}
Message = dict[str, Any]


@dataclass(frozen=True)
class Mode:
    body: dict[str, Any]
    reasons: bool = False  # it is asked to, and the model does so first
    says: tuple[dict[str, Any], ...] = (WEATHER,)  # arguments of calls, or the object of an answer
    is_answer: bool = False  # what it says is text

    def request(self, model: Model) -> dict[str, Any]:
        if not model.thinks or model.has_channels:
            return self.body
        return {**self.body, "chat_template_kwargs": {"enable_thinking": self.reasons}}

    def message(self, model: Model) -> Message:
        """What the assistant says, as clients are told."""
        message: Message = {"content": ""}
        if self.is_answer:
            (said,) = self.says or (None,)
            message["content"] = json.dumps(said, ensure_ascii=False) if said else ANSWER
        else:
            message["tool_calls"] = [_call(i, said) for i, said in enumerate(self.says)]
        if self.reasons or begins_to_reason(model, self):
            message["reasoning_content"] = THOUGHT
        return message

    def output(self, model: Model) -> str:
        """The message as the model writes it, by its template."""
        message = self.message(model)
        if model.has_channels:
            return _in_channels(message)
        given = None
        if model.thinks:
            given = self.reasons
        return model.rendered(message, given, THOUGHT)


def _call(index: int, arguments: dict[str, Any]) -> dict[str, Any]:
    written = arguments_of(json.dumps(arguments, ensure_ascii=False))
    function = {"name": NAME, "arguments": written}
    return {"id": f"call0000{index}", "type": "function", "function": function}


def _in_channels(message: Message) -> str:
    """How gpt-oss writes a message: its template has another form for calls of the past."""
    parts = []
    if thought := message.get("reasoning_content"):
        parts.append(f"<|channel|>analysis<|message|>{thought}<|end|>")
    for call in message.get("tool_calls", ()):
        to = f"to=functions.{call['function']['name']} <|constrain|>json"
        raw = call["function"]["arguments"].raw
        parts.append(f"<|channel|>commentary {to}<|message|>{raw}<|call|>")
    if message["content"]:
        parts.append(f"<|channel|>final<|message|>{message['content']}<|return|>")
    return "<|start|>assistant".join(parts)


def begins_to_reason(model: Model, mode: Mode) -> bool:
    """Whether the template begins the reasoning, whatever is asked."""
    reading = model.plan(**mode.request(model)).reading
    return reading is not None and reading.begun


MODES: dict[str, Mode] = {
    "required": Mode({"tool_choice": "required"}),
    "by name": Mode({"tool_choice": _BY_NAME}),
    "strict": Mode({"tool_choice": "auto"}),
    "strict, text": Mode({"tool_choice": "auto"}, says=(), is_answer=True),
    "required after reasoning": Mode({"tool_choice": "required"}, reasons=True),
    "by name after reasoning": Mode({"tool_choice": _BY_NAME}, reasons=True),
    "strict after reasoning": Mode({"tool_choice": "auto"}, reasons=True),
    "schema": Mode({"tools": None, "response_format": _FORMAT}, says=(PERSON,), is_answer=True),
    "schema after reasoning": Mode(
        {"tools": None, "response_format": _FORMAT}, True, (PERSON,), is_answer=True
    ),
    "schema or call": Mode({"response_format": _FORMAT}),
    "two calls": Mode({"tool_choice": "required"}, says=(WEATHER, SHORT)),
}
