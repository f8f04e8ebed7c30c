"""Tools, calls and their results in the prompt, for templates that know them and others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.cluster.api.openai.tools import arguments_of
from kvrelay.cluster.api.text.chat_template import ChatTemplate
from tests.cluster.api.conftest import MODEL, Served
from tests.cluster.api.tools.templates import (
    ASK,
    CALL,
    OSLO,
    SPOKEN,
    WEATHER,
    WEATHER_SCHEMA,
    call_text,
    prompt,
    says,
)

# Ways to write an object that another writer would change.
WRITTEN = [
    OSLO,
    '{"city":"Oslo"}',
    '{ "city" : "\\u00d8", "n": 1.0, "big": 1e3 }',
    '{"a": 1, "a": 2}',
    "{}",
]


def called(arguments: str, call_id: str = "call_1", content: str | None = None) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result(content: Any, call_id: str = "call_1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def read(served: Served, *more: dict[str, Any], **changes: Any) -> str:
    """The prompt of a chat."""
    body = {"model": MODEL, "messages": [*ASK, *more], "tools": [WEATHER]}
    response = served.post(body | changes)
    assert response.status_code == 200, response.text
    return prompt(served)


def test_a_template_that_knows_tools_is_given_them(thinking: Served) -> None:
    other = {"type": "function", "function": {"name": "clock", "strict": True, "x": 1}}
    read_back = read(thinking, tools=[WEATHER, other])
    shown = [json.loads(line) for line in read_back.split("<|im_end|>")[0].splitlines()[1:]]
    assert shown[0] == WEATHER["function"]
    assert shown[1] == {"name": "clock", "parameters": {"type": "object", "properties": {}}}


def test_a_template_that_knows_none_has_them_in_the_system_message(served: Served) -> None:
    system = {"role": "system", "content": "Be brief."}
    first = read(served, messages=[system, *ASK]).split("<|im_end|>")[0]
    assert first.startswith("<|im_start|>system\nBe brief.\n\nYou can call tools.")
    line = next(line for line in first.splitlines() if line.startswith('{"name": "weather"'))
    assert json.loads(line) == WEATHER["function"]
    without = read(served).split("<|im_end|>")[0]
    assert without.startswith("<|im_start|>system\nYou can call tools.")


def test_calls_and_results_for_a_model_that_knows_tools(thinking: Served) -> None:
    read_back = read(thinking, called(OSLO, content=SPOKEN), result("no"))
    assert f"assistant\n{SPOKEN}\n{CALL}<|im_end|>\n<|im_start|>tool\nno<|im_end|>" in read_back


def test_calls_and_results_for_a_model_that_knows_none(served: Served) -> None:
    parts = [{"type": "text", "text": "no,"}, {"type": "text", "text": "dry"}]
    read_back = read(served, called(OSLO, content=SPOKEN), result(parts))
    assert f"<|im_start|>assistant\n{SPOKEN}\n{CALL}<|im_end|>" in read_back
    told = "<|im_start|>user\n<tool_response>\nno,\ndry\n</tool_response><|im_end|>"
    assert told in read_back
    alone = read(served, called(OSLO), result("no"), tools=None)
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>" in alone
    assert "You can call tools" not in alone


def test_what_tools_are_given_does_not_depend_on_the_choice(served: Served) -> None:
    prompts = {
        read(served, tool_choice=choice)
        for choice in (
            None,
            "auto",
            "none",
            "required",
            {"type": "function", "function": {"name": "weather"}},
        )
    }
    assert len(prompts) == 1


@pytest.mark.parametrize("arguments", WRITTEN)
def test_arguments_stand_in_the_prompt_as_they_were_written(
    served: Served, thinking: Served, arguments: str
) -> None:
    for server in (served, thinking):
        read_back = read(server, called(arguments), result("no"))
        assert call_text("weather", arguments) in read_back


@pytest.mark.parametrize("server", ["served", "thinking"])
@pytest.mark.parametrize("arguments", WRITTEN)
def test_the_next_turn_begins_with_all_that_was_computed(
    request: pytest.FixtureRequest, server: str, arguments: str
) -> None:
    running: Served = request.getfixturevalue(server)
    said = call_text("weather", arguments)
    says(running, said)
    body = {"model": MODEL, "messages": ASK, "tools": [WEATHER]}
    message = running.post(body).json()["choices"][0]["message"]
    call_id = message["tool_calls"][0]["id"]
    running.post(body | {"messages": [*ASK, message, result("no", call_id)]})
    one, two = (submit.tokens for submit in running.router.submits)
    known = (*one, *running.ctx.tokenizer.encode(said))
    assert two[: len(known)] == known


def test_a_template_may_look_into_arguments() -> None:
    arguments = arguments_of('{"city":"Oslo", "days": [1]}')
    template = ChatTemplate(
        "{% for key, value in messages[0].items() %}{{ key }}={{ value | tojson }};{% endfor %}"
        "{{ messages[0].city }} {{ messages[0] is mapping }} {{ messages[0] | tojson }}",
        {},
    )
    expected = 'city="Oslo";days=[1];Oslo True {"city":"Oslo", "days": [1]}'
    assert template.render([arguments]) == expected


@pytest.mark.parametrize("text", ["", "[1]", '"Oslo"', "{", "null", "5"])
def test_arguments_that_are_no_object_are_a_text(text: str) -> None:
    assert arguments_of(text) == text
    assert type(arguments_of(text)) is str


def test_arguments_that_are_no_object_reach_the_prompt(served: Served, thinking: Served) -> None:
    for server in (served, thinking):
        assert '"arguments": "{\\"ci"}' in read(server, called('{"ci'), result("no"))
        assert '"arguments": {}}' in read(server, called(""), result("no"))


def test_the_schema_is_shown_as_it_was_given(thinking: Served) -> None:
    schema = {**WEATHER_SCHEMA, "title": "Ort", "$comment": "Grüße"}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    line = read(thinking, tools=[tool]).splitlines()[1]
    assert line == json.dumps({"name": "weather", "parameters": schema}, ensure_ascii=False)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "tool_call_id": "a"}, "messages[1]"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[1].tool_calls[0].function"),
        (called(OSLO) | {"tool_calls": 5}, "messages[1].tool_calls"),
        (called(5), "messages[1].tool_calls[0].function.arguments"),  # type: ignore[arg-type]
        (result("no", 5), "messages[1].tool_call_id"),  # type: ignore[arg-type]
    ],
)
def test_calls_that_are_wrong_are_named(
    served: Served, message: dict[str, Any], param: str
) -> None:
    response = served.post({"model": MODEL, "messages": [*ASK, message], "tools": [WEATHER]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_an_answer_may_go_on_where_the_last_message_ends(thinking: Served, served: Served) -> None:
    """A chat by setting, Anthropic's messages always."""
    begun = [*ASK, {"role": "assistant", "content": "In Oslo it will "}]
    for server in (thinking, served):
        says(server, "rain.")
        asked = {"model": MODEL, "messages": begun}
        assert server.post({**asked, "continue_final_message": True}).status_code == 200
        assert prompt(server).endswith("In Oslo it will ")
        answer = server.post({**asked, "max_tokens": 9}, "/v1/messages")
        assert answer.json()["content"][0]["text"] == "rain."
        assert prompt(server).endswith("In Oslo it will ")
        assert server.post(asked).status_code == 200
        assert not prompt(server).endswith("In Oslo it will ")
    wrong = served.post({"model": MODEL, "messages": ASK, "continue_final_message": True})
    assert wrong.json()["error"]["param"] == "continue_final_message"
    both = {"model": MODEL, "messages": begun, "continue_final_message": True}
    assert served.post({**both, "add_generation_prompt": None}).status_code == 200
    assert served.post({**both, "add_generation_prompt": False}).status_code == 200
    wrong = served.post({**both, "add_generation_prompt": True})
    assert wrong.json()["error"]["param"] == "add_generation_prompt"
