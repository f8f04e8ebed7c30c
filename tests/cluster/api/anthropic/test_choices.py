"""What an answer has to be: calls that are demanded, and JSON of a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from tests.cluster.api.anthropic.claude import ASK, THINK, WEATHER, ask, client, post
from tests.cluster.api.conftest import MODEL, Served
from tests.cluster.api.tools.templates import CALL, OSLO, allows, call_text, says

CLOCK: dict[str, Any] = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
TOOLS = [WEATHER, CLOCK]
TIME = call_text("clock", "{}")


@pytest.mark.slow
def test_any_is_a_call_of_any_tool(thinking: Served) -> None:
    says(thinking, CALL)
    ask(thinking, tools=TOOLS, tool_choice={"type": "any"})
    assert allows(thinking, CALL)
    assert allows(thinking, TIME)
    assert allows(thinking, f"{TIME}\n{CALL}")
    assert not allows(thinking, "It rains.")


def test_tool_is_a_call_of_that_tool_alone(thinking: Served) -> None:
    says(thinking, CALL)
    ask(thinking, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"})
    assert allows(thinking, CALL)
    assert not allows(thinking, TIME)
    assert not allows(thinking, f"{CALL}\n{CALL}")


def test_without_parallel_calls_there_is_one(thinking: Served) -> None:
    says(thinking, CALL)
    choice = {"type": "any", "disable_parallel_tool_use": True}
    ask(thinking, tools=TOOLS, tool_choice=choice)
    assert allows(thinking, TIME)
    assert not allows(thinking, f"{TIME}\n{CALL}")


def test_auto_leaves_the_model_free(thinking: Served) -> None:
    says(thinking, CALL)
    for choice in ({}, {"tool_choice": {"type": "auto"}}):
        answer = ask(thinking, tools=TOOLS, **choice)
        assert thinking.router.submits[-1].sampling.grammar == ""
        assert answer.stop_reason == "tool_use"


def test_a_strict_tool_holds_its_schema_whenever_it_is_called(thinking: Served) -> None:
    says(thinking, CALL)
    ask(thinking, tools=[{**WEATHER, "strict": True}])
    assert allows(thinking, "It rains.")
    assert allows(thinking, f"I look.\n{CALL}")
    assert not allows(thinking, call_text("weather", '{"city": 5}'))


def test_none_leaves_text_that_looks_like_a_call_alone(thinking: Served) -> None:
    says(thinking, CALL)
    answer = ask(thinking, tools=TOOLS, tool_choice={"type": "none"})
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": CALL}]
    assert answer.stop_reason == "end_turn"
    assert thinking.router.submits[0].sampling.grammar == ""


def test_reasoning_may_come_before_a_call_that_is_demanded(thinking: Served) -> None:
    says(thinking, f"Hm.\n</think>\n\n{CALL}")
    answer = ask(thinking, tools=TOOLS, tool_choice={"type": "any"}, thinking=THINK)
    assert [block.type for block in answer.content] == ["thinking", "tool_use"]
    assert allows(thinking, f"Hm.\n</think>\n\n{CALL}")


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"type": "some"}, "'tool_choice': expected type auto, any, tool (with 'name') or none"),
        ({"type": ["any"]}, "'tool_choice': expected type"),
        ({"type": {}}, "'tool_choice': expected type"),
        ({}, "'tool_choice': expected type"),
        ({"type": "tool"}, "'tool_choice': expected type"),
        ({"type": "tool", "name": 5}, "'tool_choice': expected type"),
        ({"type": "tool", "name": "alarm"}, "'tool_choice': there is no tool 'alarm'"),
        ("any", "'tool_choice'"),
    ],
)
def test_a_choice_that_there_is_not(served: Served, choice: Any, said: str) -> None:
    response = post(served, tools=TOOLS, tool_choice=choice)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(said)


def test_a_call_cannot_be_demanded_without_tools(served: Served) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        response = post(served, tool_choice=choice)
        assert response.status_code == 400, choice
        assert "only allowed where there are 'tools'" in response.json()["error"]["message"]
    for kind in ("auto", "none"):
        assert post(served, tool_choice={"type": kind}).status_code == 200


@pytest.mark.parametrize("field", ["output_format", "output_config"])
def test_an_output_format_is_a_grammar(served: Served, field: str) -> None:
    says(served, OSLO)
    form = {"type": "json_schema", "schema": {**WEATHER["input_schema"]}}
    asked = form if field == "output_format" else {"format": form}
    answer = ask(served, extra_body={field: asked})
    assert answer.content[0].text == OSLO
    assert allows(served, OSLO)
    assert not allows(served, '{"town": "Oslo"}')


class Place(BaseModel):
    city: str


def test_the_client_parses_what_it_asked_for(served: Served) -> None:
    says(served, OSLO)
    parsed = client(served).messages.parse(
        model=MODEL, max_tokens=100, messages=ASK, output_format=Place
    )
    assert parsed.parsed_output == Place(city="Oslo")
    assert allows(served, json.dumps({"city": "Bergen"}))


@pytest.mark.parametrize(
    "form",
    [
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "schema": None},
        {"type": "json_schema", "schema": "{}"},
        {"type": "json_schema", "schema": {"not": {}}},
    ],
)
def test_an_output_format_that_there_is_not(served: Served, form: Any) -> None:
    for changes in ({"output_format": form}, {"output_config": {"format": form}}):
        response = post(served, **changes)
        assert response.status_code == 400, changes
        assert response.json()["error"]["message"].startswith("'output_format': ")
