"""How chats, responses and messages each write what all of them have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.cluster.api.calls import APIS, Answer, Api, answer_of
from tests.cluster.api.conftest import MODEL, Served
from tests.cluster.api.tools.templates import WEATHER_SCHEMA

Body = dict[str, Any]
ASK: list[Body] = [{"role": "user", "content": "Will it rain in Oslo?"}]
SCHEMAS: Body = {"weather": WEATHER_SCHEMA, "clock": {"type": "object", "properties": {}}}


@dataclass(frozen=True)
class Format:
    """Functions and bodies give fields of a request, or what is in an answer."""

    api: Api
    asks: str  # the field of the conversation
    limit: str  # the field that limits the answer's tokens
    ended: tuple[str, str, str]  # at its end, at the limit, by a call
    tool: Callable[[Body], Body]  # from a function's name, parameters and strictness
    choice: Callable[[str], Any]  # any, auto, none, or a tool's name
    one: Body  # with which any call is one
    schema: Callable[[Body], Body]
    turns: Callable[[Body], list[Body]]  # an answer given back, and the result of its last call
    efforts: list[tuple[Body, Body]]  # with what the template gets
    kind: Callable[[str, int], Body]  # an error's body, by its reason and status
    usual: Body = field(default_factory=dict)
    # With this the answer has the reasoning, which the model begins with `begins`.
    thinks: Body = field(default_factory=dict)
    begins: str = "<think>\n"

    def tools(self, *names: str, **more: Any) -> Body:
        functions = ({"name": name, "parameters": SCHEMAS[name], **more} for name in names)
        return {"tools": [self.tool(function) for function in functions]}

    def post(self, served: Served, **asked: Any) -> httpx.Response:
        body = {"model": MODEL, self.asks: ASK, **self.usual}
        return served.post(body | asked, self.api.path)

    def ask(self, served: Served, *, stream: bool = False, **asked: Any) -> Answer:
        return answer_of(self.api, self.post(served, stream=stream, **asked), stream=stream)


def _chat_turns(body: Body) -> list[Body]:
    said = body["choices"][0]["message"]
    call_id = said["tool_calls"][0]["id"]
    return [said, {"role": "tool", "tool_call_id": call_id, "content": "no"}]


def _response_turns(body: Body) -> list[Body]:
    result = {"type": "function_call_output", "call_id": body["output"][-1]["call_id"]}
    return [*body["output"], result | {"output": "no"}]


def _message_turns(body: Body) -> list[Body]:
    result = {"type": "tool_result", "tool_use_id": body["content"][-1]["id"], "content": "no"}
    said = {"role": "assistant", "content": body["content"]}
    return [said, {"role": "user", "content": [result]}]


API = {api.endpoint: api for api in APIS}
DEMANDED = {"any": "required", "auto": "auto", "none": "none"}
KINDS = {
    400: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
FORMATS = [
    Format(
        *(API["chat"], "messages", "max_tokens", ("stop", "length", "tool_calls")),
        tool=lambda f: {"type": "function", "function": f},
        choice=lambda kind: DEMANDED.get(kind, {"type": "function", "function": {"name": kind}}),
        one={"parallel_tool_calls": False},
        schema=lambda schema: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            }
        },
        turns=_chat_turns,
        efforts=[({"reasoning_effort": "low"}, {"reasoning_effort": "low"})],
        kind=lambda reason, _: {"code": reason},
    ),
    Format(
        *(API["responses"], "input", "max_output_tokens", ("completed", "incomplete", "completed")),
        tool=lambda f: {"type": "function"} | f,
        choice=lambda kind: DEMANDED.get(kind, {"type": "function", "name": kind}),
        one={"parallel_tool_calls": False},
        schema=lambda schema: {
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        },
        turns=_response_turns,
        efforts=[
            ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
            (
                {"reasoning": {"effort": "none"}},
                {"reasoning_effort": "none", "enable_thinking": False},
            ),
        ],
        kind=lambda reason, _: {"code": reason},
        usual={"store": False},
    ),
    Format(
        *(API["messages"], "messages", "max_tokens", ("end_turn", "max_tokens", "tool_use")),
        tool=lambda f: {"input_schema" if k == "parameters" else k: v for k, v in f.items()},
        choice=lambda kind: {"type": kind} if kind in DEMANDED else {"type": "tool", "name": kind},
        one={"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        schema=lambda schema: {
            "output_config": {"format": {"type": "json_schema", "schema": schema}}
        },
        turns=_message_turns,
        efforts=[
            (
                {"output_config": {"effort": effort}},
                {"reasoning_effort": given, "enable_thinking": False},
            )
            for effort, given in (("low", "low"), ("max", "high"))
        ],
        kind=lambda _, status: {"type": KINDS[status]},
        usual={"max_tokens": 300},
        thinks={"thinking": {"type": "enabled", "budget_tokens": 1024}},
        begins="",
    ),
]
