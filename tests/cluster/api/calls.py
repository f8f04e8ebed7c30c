"""Calls of all four APIs, plain, with tools and with a schema, and how their answers are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema

MODEL = "smollm2-135m"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAME = "get_weather"
ASKED = [{"role": "user", "content": "What is the weather in Paris for two days?"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}


@dataclass
class Answer:
    """What an API says, whole or streamed."""

    text: str = ""
    names: list[str] = field(default_factory=list)
    arguments: str = ""
    thought: str = ""
    ended: str = ""  # why, in the API's own word

    def seen(self) -> tuple[str, list[str], Any]:
        """Comparable, however a call's arguments are written."""
        return self.text, self.names, json.loads(self.arguments) if self.arguments else None


def of_chat(body: dict[str, Any], answer: Answer) -> None:
    """A whole answer or a chunk of a stream, as those below."""
    for choice in body["choices"]:
        said = choice.get("message") or choice["delta"]
        answer.text += said.get("content") or ""
        answer.thought += said.get("reasoning_content") or ""
        answer.ended = choice.get("finish_reason") or answer.ended
        for call in said.get("tool_calls") or ():
            if call["function"].get("name"):
                answer.names.append(call["function"]["name"])
            answer.arguments += call["function"]["arguments"]


def of_completion(body: dict[str, Any], answer: Answer) -> None:
    for choice in body["choices"]:
        answer.text += choice["text"]


def of_response(body: dict[str, Any], answer: Answer) -> None:
    for item in body.get("output", ()):
        if item["type"] == "function_call":
            answer.names.append(item["name"])
            answer.arguments += item["arguments"]
        elif item["type"] == "reasoning":
            answer.thought += "".join(part["text"] for part in item["content"])
        else:
            answer.text += "".join(part["text"] for part in item["content"])
    kind = body.get("type")
    answer.ended = (body if kind is None else body.get("response", {})).get("status", answer.ended)
    if kind == "response.output_text.delta":
        answer.text += body["delta"]
    elif kind == "response.reasoning_text.delta":
        answer.thought += body["delta"]
    elif kind == "response.function_call_arguments.delta":
        answer.arguments += body["delta"]
    elif kind == "response.output_item.added" and body["item"]["type"] == "function_call":
        answer.names.append(body["item"]["name"])


def of_message(body: dict[str, Any], answer: Answer) -> None:
    kind = body["type"]
    blocks = body["content"] if kind == "message" else ()
    for block in (*blocks, *([body["content_block"]] if kind == "content_block_start" else ())):
        answer.text += block.get("text", "")
        answer.thought += block.get("thinking", "")
        if block["type"] == "tool_use":
            answer.names.append(block["name"])
            answer.arguments += json.dumps(block["input"]) if block["input"] else ""
    ending = body["delta"] if kind == "message_delta" else body
    answer.ended = ending.get("stop_reason") or answer.ended
    if kind == "content_block_delta":
        answer.text += body["delta"].get("text", "")
        answer.thought += body["delta"].get("thinking", "")
        answer.arguments += body["delta"].get("partial_json", "")


@dataclass(frozen=True)
class Api:
    endpoint: str  # as the metrics call it
    path: str
    read: Callable[[dict[str, Any], Answer], None]
    plain: dict[str, Any]
    schema: dict[str, Any]
    tools: dict[str, Any] | None  # to add to `plain`


TOOL = {"name": NAME, "parameters": SCHEMA}
APIS = [
    Api(
        "chat",
        "/v1/chat/completions",
        of_chat,
        {"messages": ASKED, "max_tokens": 24},
        {"messages": ASKED, "max_tokens": 80, "response_format": FORMAT},
        {
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
    Api(
        "completions",
        "/v1/completions",
        of_completion,
        {"prompt": "The capital of France is", "max_tokens": 24},
        {"prompt": "A trip as JSON:", "max_tokens": 80, "response_format": FORMAT},
        None,
    ),
    Api(
        "responses",
        "/v1/responses",
        of_response,
        {"input": ASKED, "max_output_tokens": 24},
        {
            "input": ASKED,
            "max_output_tokens": 80,
            "text": {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA}},
        },
        {
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
    Api(
        "messages",
        "/v1/messages",
        of_message,
        {"messages": ASKED, "max_tokens": 24},
        {
            "messages": ASKED,
            "max_tokens": 80,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
        {
            "tools": [{"name": NAME, "input_schema": SCHEMA}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    ),
]


def calls() -> Iterator[tuple[str, Api, dict[str, Any]]]:
    """Of all APIs: the kind, the API, the body."""
    for api in APIS:
        yield "plain", api, api.plain
        yield "schema", api, api.schema
        if api.tools is not None:
            more = {name: 80 for name in api.plain if name.startswith("max_")}
            yield "tools", api, api.plain | more | api.tools


def asked(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, **body}


def ask(http: httpx.Client, url: str, api: Api, body: dict[str, Any], *, stream: bool) -> Answer:
    response = http.post(url + api.path, json=asked(body) | ({"stream": True} if stream else {}))
    return answer_of(api, response, stream=stream)


def answer_of(api: Api, response: httpx.Response, *, stream: bool) -> Answer:
    assert response.status_code == 200, response.text
    answer = Answer()
    if not stream:
        api.read(response.json(), answer)
        return answer
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            api.read(json.loads(line[6:]), answer)
    return answer


def answers_of(http: httpx.Client, url: str) -> dict[tuple[str, str], Any]:
    """What each API says to each kind of call: the same streamed as whole, and valid. `NUM_CALLS`
    says how many each is asked."""
    found = {}
    for kind, api, body in calls():
        whole = ask(http, url, api, body, stream=False).seen()
        assert ask(http, url, api, body, stream=True).seen() == whole, (api.endpoint, kind)
        text, names, arguments = whole
        if kind == "tools":
            assert names == [NAME]
            jsonschema.validate(arguments, SCHEMA)
        else:
            assert names == []
        if kind == "schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        found[api.endpoint, kind] = whole
    return found


NUM_CALLS = {api.endpoint: 2 * sum(each is api for _, each, _ in calls()) for api in APIS}
