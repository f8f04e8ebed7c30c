"""`tool_choice` and strict tools: when an output has to match a grammar, and which."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.cluster.api.constraints.calls import MAX_CALLS
from tests.cluster.api.conftest import MODEL, Served
from tests.cluster.api.tools.templates import ASK, CALL, OSLO, WEATHER, allows, call_text, says

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


def test_the_model_is_free_unless_something_is_demanded(served: Served) -> None:
    for changes in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tool_choice": None}):
        assert submitted(served, **changes) == ""
    assert submitted(served, tools=[STRICT], tool_choice="none") == ""


def test_required_is_a_call_of_any_tool(served: Served) -> None:
    submitted(served, tool_choice="required")
    for text in (CALL, TIME, f"{CALL}\n{TIME}\n{CALL}"):
        assert allows(served, text)
    for text in ("", "It rains.", f"I look.\n{CALL}", call_text("alarm", "{}"), CALL[:-1]):
        assert not allows(served, text)


def test_calls_that_are_demanded_come_to_an_end(served: Served) -> None:
    submitted(served, tool_choice="required")
    assert allows(served, "\n".join([TIME] * MAX_CALLS))
    assert not allows(served, "\n".join([TIME] * (MAX_CALLS + 1)))


def test_a_tool_that_is_named_is_called_once(served: Served) -> None:
    submitted(served, tool_choice=NAMED)
    assert allows(served, CALL)
    for text in (TIME, f"{CALL}\n{CALL}", "It rains."):
        assert not allows(served, text)


def test_without_parallel_calls_there_is_one(served: Served) -> None:
    submitted(served, tool_choice="required", parallel_tool_calls=False)
    assert allows(served, TIME)
    assert not allows(served, f"{TIME}\n{CALL}")


def test_a_call_that_is_demanded_matches_its_schema(served: Served) -> None:
    submitted(served, tool_choice="required")
    for arguments in ('{"city": 5}', "{}", '{"town": "Oslo"}', "[]"):
        assert not allows(served, call_text("weather", arguments))


def test_a_strict_tool_holds_its_schema_whenever_it_is_called(served: Served) -> None:
    submitted(served, tools=[STRICT, CLOCK])
    for text in ("It rains.", CALL, f"I look.\n{CALL}", f"{CALL}\n{TIME}"):
        assert allows(served, text)
    for arguments in ('{"city": 5}', '{"town": "Oslo"}'):
        assert not allows(served, call_text("weather", arguments))


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
