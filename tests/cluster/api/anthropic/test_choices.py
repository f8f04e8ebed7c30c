"""What an answer has to be: calls that are demanded, and JSON of a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from tests.cluster.api.anthropic.claude import ASK, WEATHER, ask, client, post
from tests.cluster.api.conftest import MODEL, Served
from tests.cluster.api.tools.templates import OSLO, allows, call_text, says

CLOCK: dict[str, Any] = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
TOOLS = [WEATHER, CLOCK]
TIME = call_text("clock", "{}")


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
