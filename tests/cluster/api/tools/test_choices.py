"""`tool_choice` and strict tools: when an output has to match a grammar, and which."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.cluster.api.constraints.calls import MAX_CALLS
from tests.cluster.api.conftest import MODEL, Served
from tests.cluster.api.tools.templates import (
    ASK,
    CALL,
    OSLO,
    WEATHER,
    allows,
    call_text,
    prompt,
    says,
)

CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
TIME = call_text("clock", "{}")
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "weather"}}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}


def submitted(served: Served, **changes: Any) -> str:
    """The grammar of such a chat."""
    body = {"model": MODEL, "messages": ASK, "tools": [WEATHER, CLOCK]}
    response = served.post(body | changes)
    assert response.status_code == 200, response.text
    return served.router.submits[-1].sampling.grammar


def test_calls_that_are_demanded_come_to_an_end(served: Served) -> None:
    submitted(served, tool_choice="required")
    assert allows(served, "\n".join([TIME] * MAX_CALLS))
    assert not allows(served, "\n".join([TIME] * (MAX_CALLS + 1)))


def test_an_answer_of_a_schema_or_a_call(served: Served) -> None:
    submitted(served, response_format=JSON)
    for text in ("[1, 2]", CALL):
        assert allows(served, text)
    for text in ("It rains.", "{}"):
        assert not allows(served, text)
    submitted(served, response_format=JSON, tool_choice="required")
    assert not allows(served, "[1, 2]")
    submitted(served, response_format=JSON, tool_choice="none")
    assert not allows(served, CALL)


@pytest.mark.slow
def test_reasoning_may_come_before_a_call_that_is_demanded(thinking: Served) -> None:
    says(thinking, f"<think>\nHm.\n</think>\n\n{CALL}")
    submitted(thinking, tool_choice="required")
    for text in (CALL, f"<think>\nHm.\n</think>\n\n{CALL}"):
        assert allows(thinking, text)
    assert not allows(thinking, "<think>\nHm.\n</think>\n\nIt rains.")
    submitted(thinking, tool_choice="required", chat_template_kwargs={"enable_thinking": True})
    assert allows(thinking, f"Hm.\n</think>\n\n{CALL}")
    submitted(thinking, tool_choice="required", chat_template_kwargs={"enable_thinking": False})
    assert allows(thinking, CALL)
    assert not allows(thinking, f"Hm.\n</think>\n\n{CALL}")


def test_a_grammar_of_another_format(mistral: Served) -> None:
    submitted(mistral, tool_choice=NAMED)
    assert allows(mistral, f'[TOOL_CALLS][{{"name": "weather", "arguments": {OSLO}}}]')
    assert not allows(mistral, CALL)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": []}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "alarm"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [WEATHER] * 2}, "tools"),
        ({"tools": [CLOCK] * 513}, "tools"),
    ],
)
def test_choices_that_there_are_not(served: Served, changes: Any, param: str) -> None:
    body = {"model": MODEL, "messages": ASK, "tools": [WEATHER, CLOCK]}
    response = served.post(body | changes)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_schema_that_cannot_be_kept_is_named_with_its_tool(served: Served) -> None:
    bad = {"name": "bad", "strict": True, "parameters": {"type": "object", "not": {}}}
    tools = [WEATHER, {"type": "function", "function": bad}]
    response = served.post({"model": MODEL, "messages": ASK, "tools": tools})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tools"
    assert error["message"].startswith("'tools': tool 'bad': ")


GRAMMAR = {"type": "grammar", "grammar": {"syntax": "regex", "definition": '[ab\\n"]+'}}
CUSTOM: dict[str, Any] = {"type": "custom", "custom": {"name": "spell", "format": GRAMMAR}}
SPELL = call_text("spell", '{"input": "a\\n\\"b"}')
WRONG = call_text("spell", '{"input": "c"}')


def test_a_custom_tools_input_matches_its_grammar_whenever_it_is_called(served: Served) -> None:
    submitted(served, tools=[CUSTOM, CLOCK])
    for text in ("It rains.", SPELL, f"I look.\n{SPELL}", f"{TIME}\n{SPELL}"):
        assert allows(served, text)
    for text in (WRONG, call_text("spell", "{}"), call_text("spell", '"a"')):
        assert not allows(served, text)
    named = {"type": "custom", "custom": {"name": "spell"}}
    submitted(served, tools=[CUSTOM, CLOCK], tool_choice=named)
    assert allows(served, SPELL)
    for text in (WRONG, TIME, "It rains."):
        assert not allows(served, text)


@pytest.mark.parametrize("as_stream", [False, True])
def test_a_call_of_a_custom_tool_has_a_text(thinking: Served, as_stream: bool) -> None:
    says(thinking, f"{SPELL}\n{TIME}")
    body = {"model": MODEL, "messages": ASK, "tools": [CUSTOM, CLOCK], "stream": as_stream}
    response = thinking.post(body)
    if as_stream:
        calls: list[dict[str, Any]] = []
        lines = response.text.split("\n\n")
        for line in lines[: lines.index("data: [DONE]")]:
            chunk = json.loads(line.removeprefix("data: "))
            for delta in chunk["choices"][0]["delta"].get("tool_calls", ()):
                kind = "custom" if "custom" in delta else "function"
                if "id" in delta:
                    calls.append({"type": delta["type"], kind: dict(delta[kind])})
                    continue
                name = "input" if kind == "custom" else "arguments"
                calls[delta["index"]][kind][name] += delta[kind][name]
    else:
        calls = response.json()["choices"][0]["message"]["tool_calls"]
        assert [call.pop("id").startswith("call_") for call in calls] == [True, True]
    assert calls == [
        {"type": "custom", "custom": {"name": "spell", "input": 'a\n"b'}},
        {"type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ]


def test_a_call_of_a_custom_tool_is_read_back(thinking: Served) -> None:
    call = {"id": "a", "type": "custom", "custom": {"name": "spell", "input": 'a\n"b'}}
    said = [{"role": "assistant", "tool_calls": [call]}]
    said.append({"role": "tool", "tool_call_id": "a", "content": "done"})
    body = {"model": MODEL, "messages": [*ASK, *said], "tools": [CUSTOM]}
    assert thinking.post(body).status_code == 200
    assert SPELL in prompt(thinking)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "grammar", "grammar": {"syntax": "ebnf", "definition": "x"}}, "'syntax' is"),
        ({"type": "grammar", "syntax": "lark"}, "'definition' is a string, got None"),
        ({"type": "json"}, "type 'json' is not known, use 'text' or 'grammar'"),
        (
            {"type": "grammar", "syntax": "lark", "definition": 'start: "a"\n  | b'},
            "tool 'spell': line 2, column 5: there is no 'b'",
        ),
        (
            {"type": "grammar", "syntax": "regex", "definition": "a(b"},
            "tool 'spell': line 1, column 4: a group is not closed",
        ),
        ({"type": "grammar", "syntax": "regex", "definition": "[^\\s\\S]"}, "no text matches it"),
    ],
)
def test_a_bad_grammar_is_refused_in_one_line(served: Served, form: Any, message: str) -> None:
    custom = {"type": "custom", "custom": {"name": "spell", "format": form}}
    body = {"model": MODEL, "messages": ASK, "tools": [custom], "tool_choice": "required"}
    response = served.post(body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"].startswith("tools")
    assert message in error["message"]
    assert "\n" not in error["message"]


def allowed(mode: str, *names: str, kind: str = "function") -> dict[str, Any]:
    tools = [{"type": kind, kind: {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_tools_that_are_allowed_are_called_and_no_others(served: Served) -> None:
    tools = [WEATHER, CLOCK, CUSTOM]
    submitted(served, tools=tools, tool_choice=allowed("auto", "weather"))
    for text in ("It rains.", CALL, f"I look.\n{CALL}\n{CALL}"):
        assert allows(served, text)
    for text in (TIME, SPELL, f"{CALL}\n{TIME}"):
        assert not allows(served, text)
    submitted(served, tools=tools, tool_choice=allowed("required", "weather", "clock"))
    for text in (CALL, f"{TIME}\n{CALL}"):
        assert allows(served, text)
    for text in (SPELL, "It rains.", f"I look.\n{CALL}"):
        assert not allows(served, text)
    submitted(served, tools=tools, tool_choice=allowed("required", "spell", kind="custom"))
    assert allows(served, SPELL)
    assert not allows(served, CALL)


def test_a_choice_of_tools_leaves_the_prompt_as_it_is(served: Served) -> None:
    """So that it is found in the cache."""
    prompts = []
    for choice in ("auto", allowed("auto", "weather"), allowed("required", "clock")):
        submitted(served, tool_choice=choice)
        prompts.append(served.router.submits[-1].tokens)
    assert prompts[0] == prompts[1] == prompts[2]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (allowed("auto", "alarm"), "'tool_choice': there is no tool 'alarm'"),
        (allowed("none", "clock"), "'mode' is 'auto' or 'required', got 'none'"),
        (allowed("auto"), "'tools' is a list of 1 to 512 tools"),
        (allowed("auto", "clock", kind="mcp"), "a tool is named by its type"),
        ({"type": "allowed_tools"}, "'mode' is"),
        ({"type": "allowed_tools", "allowed_tools": 5}, "'mode' is"),
    ],
)
def test_a_choice_of_tools_that_there_is_not(served: Served, choice: Any, message: str) -> None:
    body = {"model": MODEL, "messages": ASK, "tools": [WEATHER, CLOCK], "tool_choice": choice}
    response = served.post(body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
