"""What an answer has to be: calls that are demanded, and JSON of a schema."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.api.conftest import Served
from tests.cluster.api.responses.asking import PATCH, WEATHER, ask, post, refused
from tests.cluster.api.tools.templates import CALL, OSLO, allows, call_text, prompt, says

TOOLS = [WEATHER, PATCH]
FIXED = '{"input": "a"}'
FIX = call_text("patch", FIXED)
SEARCH = {"type": "web_search"}


def grammar(served: Served) -> str:
    return served.router.submits[-1].sampling.grammar


@pytest.mark.parametrize(
    ("choice", "right", "wrong"),
    [
        ({"type": "function", "name": "weather"}, CALL, FIX),
        ({"type": "custom", "name": "patch"}, FIX, CALL),
    ],
)
def test_a_tool_that_is_named_is_called(
    thinking: Served, choice: Any, right: str, wrong: str
) -> None:
    says(thinking, right)
    answer = ask(thinking, tools=TOOLS, tool_choice=choice)
    assert allows(thinking, right)
    assert not allows(thinking, wrong)
    assert answer.tool_choice.to_dict() == choice  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "choice",
    ["some", 5, {"type": "web_search"}, {"type": "function", "name": "clock"}, {"name": 5}, []],
)
def test_a_choice_that_there_is_not(served: Served, choice: Any) -> None:
    error = refused(served, tools=TOOLS, tool_choice=choice)
    assert error["message"].startswith("'tool_choice': ")


def test_a_call_cannot_be_demanded_without_tools(served: Served) -> None:
    for tools in ([], [SEARCH]):
        error = refused(served, tools=tools, tool_choice="required")
        assert error["message"] == "'tool_choice' is only allowed where there are 'tools'"
    for choice in ("auto", "none", None):
        assert post(served, tools=[SEARCH], tool_choice=choice).status_code == 200


def test_tools_that_openai_runs_are_not_offered(thinking: Served) -> None:
    ask(thinking, tools=[SEARCH, {"type": "image_generation"}, WEATHER])
    assert "web_search" not in prompt(thinking)
    assert prompt(thinking).count('"parameters"') == 1


def test_a_text_format_is_a_grammar(served: Served) -> None:
    says(served, OSLO)
    schema = WEATHER["parameters"]
    ask(served, text={"format": {"type": "json_schema", "name": "place", "schema": schema}})
    assert allows(served, OSLO)
    assert not allows(served, '{"town": "Oslo"}')
    ask(served, text={"format": {"type": "json_object"}})
    assert allows(served, '{"town": "Oslo"}')
    assert not allows(served, "[1]")
    for text in ({"format": {"type": "text"}}, {"verbosity": "low"}):
        answer = ask(served, text=text)
        assert grammar(served) == ""
        assert answer.text is not None
        assert answer.text.format.to_dict() == {"type": "text"}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "xml"},
        {},
        {"type": "json_schema", "name": "x", "schema": {"not": {}}},
        {"type": "json_schema", "name": "x", "schema": 5},
    ],
)
def test_a_text_format_that_there_is_not(served: Served, form: Any) -> None:
    error = refused(served, text={"format": form})
    assert error["param"] == "text.format"
    assert error["message"].startswith("'text.format': ")


SPACE = {"type": "namespace", "name": "sky", "tools": [WEATHER, PATCH]}


def test_tools_of_a_namespace(thinking: Served) -> None:
    says(thinking, f"{call_text('sky.weather', OSLO)}\n{call_text('sky.patch', FIXED)}")
    first, second = ask(thinking, tools=[PATCH, SPACE]).output
    assert first.type == "function_call"
    assert (first.namespace, first.name, first.arguments) == ("sky", "weather", OSLO)
    assert second.type == "custom_tool_call"
    assert (second.to_dict()["namespace"], second.name, second.input) == ("sky", "patch", "a")
    given = [first.to_dict(), second.to_dict()]
    ask(thinking, [{"role": "user", "content": "Hi"}, *given], tools=[SPACE])
    assert call_text("sky.weather", OSLO) in prompt(thinking)
    assert call_text("sky.patch", FIXED) in prompt(thinking)


def test_a_tool_of_a_namespace_is_named(thinking: Served) -> None:
    says(thinking, CALL)
    choice = {"type": "function", "name": "weather", "namespace": "sky"}
    assert post(thinking, tools=[WEATHER, SPACE], tool_choice=choice).status_code == 200
    assert allows(thinking, call_text("sky.weather", OSLO))
    assert not allows(thinking, CALL)


def test_places_of_tools_are_those_of_the_request(served: Served) -> None:
    tools = [SPACE, {"type": "namespace", "name": "sea", "tools": [WEATHER, {"type": "shell"}]}]
    message = refused(served, tools=tools)["message"]
    assert message == "'tools[1].tools[1]': tools of type 'shell' are not run here"
    message = refused(served, tools=[SEARCH, SPACE, {"type": "shell"}])["message"]
    assert message.startswith("'tools[2]': tools of type 'shell'")


def allowed_tools(mode: str, *tools: tuple[str, str]) -> dict[str, Any]:
    listed = [{"type": kind, "name": name} for kind, name in tools]
    return {"type": "allowed_tools", "mode": mode, "tools": listed}


def test_tools_that_are_allowed_are_called_and_no_others(thinking: Served) -> None:
    says(thinking, FIX)
    prompts = []
    for mode in ("auto", "required"):
        choice = allowed_tools(mode, ("custom", "patch"))
        answer = ask(thinking, tools=TOOLS, tool_choice=choice)
        assert answer.tool_choice.to_dict() == choice  # type: ignore[union-attr]
        assert allows(thinking, FIX)
        assert not allows(thinking, CALL)
        assert allows(thinking, "It rains.") == (mode == "auto")
        prompts.append(prompt(thinking))
    ask(thinking, tools=TOOLS)
    assert prompts == [prompt(thinking)] * 2


def test_allowed_tools_are_named_within_their_namespace(thinking: Served) -> None:
    tools = [{"type": "function", "name": "weather", "namespace": "sky"}, SEARCH]
    choice = {"type": "allowed_tools", "mode": "required", "tools": tools}
    assert post(thinking, tools=[SPACE, SEARCH], tool_choice=choice).status_code == 200
    assert allows(thinking, call_text("sky.weather", OSLO))
    assert not allows(thinking, call_text("sky.patch", FIXED))
    error = refused(thinking, tools=TOOLS, tool_choice=allowed_tools("auto", ("function", "clock")))
    assert error["message"] == "'tool_choice': there is no tool 'clock'"


def test_a_custom_tools_input_matches_its_grammar(thinking: Served) -> None:
    says(thinking, FIX)
    form = {"type": "grammar", "syntax": "lark", "definition": "start: A+\nA: /a/"}
    answer = ask(thinking, tools=[{**PATCH, "format": form}, WEATHER])
    assert answer.output[0].to_dict()["input"] == "a"
    for text in (FIX, CALL, "It rains."):
        assert allows(thinking, text)
    assert not allows(thinking, call_text("patch", '{"input": "b"}'))
    form = {**form, "definition": "start: A+\nA: /a(/"}
    message = refused(thinking, tools=[{**PATCH, "format": form}])["message"]
    assert message == "'tools': tool 'patch': line 2, column 7: a group is not closed"
