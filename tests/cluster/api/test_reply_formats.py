"""What chats, responses and messages all do, by one table of cases: calls, schemas, ends, turns."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvrelay.engine.request import Refusal
from kvrelay.router.messages import Failed
from tests.cluster.api.conftest import Served
from tests.cluster.api.reply_formats import ASK, FORMATS, Body, Format
from tests.cluster.api.tools.conftest import mistral, mistral_server, thinking, thinking_server
from tests.cluster.api.tools.templates import (
    CALL,
    OSLO,
    SPOKEN,
    THOUGHT,
    WEATHER_SCHEMA,
    allows,
    call_text,
    prompt,
    says,
)

__all__ = ["mistral", "mistral_server", "thinking", "thinking_server"]
TIME = call_text("clock", "{}")
WRONG = [call_text("weather", text) for text in ('{"city": 5}', "{}", '{"town": "Oslo"}', "[]")]
pytestmark = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.api.endpoint)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        pytest.param(
            "any",
            [CALL, TIME, f"{CALL}\n{TIME}\n{CALL}"],
            ["", "It rains.", f"I look.\n{CALL}", call_text("alarm", "{}"), CALL[:-1], *WRONG],
            marks=pytest.mark.slow,
        ),
        ("weather", [CALL], [TIME, f"{CALL}\n{CALL}", "It rains."]),
        ("any once", [TIME], [f"{TIME}\n{CALL}"]),
    ],
)
def test_calls_that_are_demanded(
    thinking: Served, form: Format, kind: str, right: list[str], wrong: list[str]
) -> None:
    says(thinking, right[0])
    asked = form.tools("weather", "clock") | {"tool_choice": form.choice(kind.split()[0])}
    form.ask(thinking, **asked | (form.one if kind == "any once" else {}))
    assert all(allows(thinking, text) for text in right)
    assert [text for text in wrong if allows(thinking, text)] == []


def test_reasoning_may_come_before_a_call_that_is_demanded(thinking: Served, form: Format) -> None:
    said = f"{form.begins}Hm.\n</think>\n\n"
    says(thinking, said + CALL)
    answer = form.ask(
        thinking, **form.tools("weather"), tool_choice=form.choice("any"), **form.thinks
    )
    assert (answer.thought, answer.text, answer.names) == ("Hm.", "", ["weather"])
    assert allows(thinking, said + CALL)
    assert not allows(thinking, f"{said}It rains.")


def test_a_strict_tool_holds_its_schema_whenever_it_is_called(
    thinking: Served, form: Format
) -> None:
    form.ask(thinking, **form.tools("weather", "clock", strict=True))
    for text in ("It rains.", CALL, f"I look.\n{CALL}", f"{CALL}\n{TIME}"):
        assert allows(thinking, text)
    assert [text for text in WRONG if allows(thinking, text)] == []


def test_the_model_is_free_unless_something_is_demanded(thinking: Served, form: Format) -> None:
    for choice in ({}, {"tool_choice": form.choice("auto")}, {"tool_choice": form.choice("none")}):
        form.ask(thinking, **form.tools("weather", "clock"), **choice)
        assert thinking.router.submits[-1].sampling.grammar == ""


def test_a_call_of_what_is_not_there_cannot_be_demanded(served: Served, form: Format) -> None:
    for kind in ("any", "weather"):
        response = form.post(served, tool_choice=form.choice(kind))
        assert response.status_code == 400
        expected = "'tool_choice' is only allowed where there are 'tools'"
        assert response.json()["error"]["message"] == expected
    response = form.post(served, **form.tools("weather", "clock"), tool_choice=form.choice("alarm"))
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "'tool_choice': there is no tool 'alarm'"
    for kind in ("auto", "none"):
        assert form.post(served, tool_choice=form.choice(kind)).status_code == 200


def test_a_schema_is_a_grammar(served: Served, form: Format) -> None:
    says(served, OSLO)
    answer = form.ask(served, **form.schema(WEATHER_SCHEMA))
    assert (answer.text, answer.ended) == (OSLO, form.ended[0])
    assert allows(served, OSLO)
    assert not allows(served, '{"town": "Oslo"}')
    assert not allows(served, "It rains.")


# What the model says; the thought, text, names and arguments of calls; and why the answer ends.
SAID: dict[str, tuple[str, str, str, list[str], str, int]] = {
    "text": (SPOKEN, "", SPOKEN, [], "", 0),
    "nothing": ("", "", "", [], "", 0),
    "a call": (CALL, "", "", ["weather"], OSLO, 2),
    "text and a call": (f"{SPOKEN}\n\n{CALL}\n", "", SPOKEN, ["weather"], OSLO, 2),
    "all": (
        f"THOUGHT{SPOKEN}\n{CALL}\n{TIME}",
        *(THOUGHT, SPOKEN, ["weather", "clock"], OSLO, 2),
    ),
}


@pytest.mark.parametrize("per_output", [1, 1000])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", SAID)
def test_what_the_model_says_is_told_apart(
    thinking: Served, form: Format, said: str, stream: bool, per_output: int
) -> None:
    words, thought, text, names, arguments, ended = SAID[said]
    thinks = form.thinks if thought else {}
    says(thinking, words.replace("THOUGHT", f"{form.begins}{THOUGHT}\n</think>\n\n"))
    thinking.router.per_output = per_output
    answer = form.ask(thinking, stream=stream, **form.tools("weather", "clock"), **thinks)
    assert (answer.thought, answer.text, answer.names) == (thought, text, names)
    assert answer.arguments.removesuffix("{}") == arguments
    assert answer.ended == form.ended[ended]


@pytest.mark.parametrize("stream", [False, True])
def test_without_tools_what_looks_like_a_call_is_text(
    thinking: Served, form: Format, stream: bool
) -> None:
    says(thinking, CALL)
    for asked in ({}, form.tools("weather") | {"tool_choice": form.choice("none")}):
        answer = form.ask(thinking, stream=stream, **asked)
        assert (answer.text, answer.names, answer.ended) == (CALL, [], form.ended[0])


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_says_so(thinking: Served, form: Format, stream: bool) -> None:
    says(thinking, SPOKEN)
    answer = form.ask(thinking, stream=stream, **{form.limit: 3})
    assert (answer.text, answer.ended) == ("I look it", form.ended[1])
    assert thinking.router.submits[-1].sampling.max_tokens == 3
    says(thinking, CALL)
    limit = len(thinking.ctx.tokenizer.encode(CALL)) - 12
    answer = form.ask(thinking, stream=stream, **form.tools("weather"), **{form.limit: limit})
    assert (answer.names, answer.ended) == (["weather"], form.ended[1])
    assert OSLO.startswith(answer.arguments)


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_router_refuses_keeps_its_reason(
    served: Served, form: Format, stream: bool
) -> None:
    for reason, status in (
        (Refusal.QUEUE_FULL, 429),
        (Refusal.OVERLOADED, 429),
        (Refusal.CONTEXT_LENGTH, 400),
        (Refusal.NEVER_FITS, 400),
        (Refusal.NO_WORKERS, 503),
        (Refusal.DEADLINE, 504),
    ):
        served.router.refuse = Failed("", reason, f"because of {reason}", 2.5)
        response = form.post(served, stream=stream)
        assert response.status_code == status
        error = response.json()["error"]
        assert error == error | form.kind(reason.value, status)
        assert error["message"] == f"because of {reason}"
        assert response.headers["retry-after"] == "3"


def test_sampling_reaches_the_router(served: Served, form: Format) -> None:
    form.ask(served, temperature=0.4, top_p=0.9, top_k=7)
    sampling = served.router.submits[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.4, 0.9, 7)


def test_the_next_turn_begins_with_all_that_was_computed(thinking: Served, form: Format) -> None:
    said = f"{form.begins}{THOUGHT}\n</think>\n\n{SPOKEN}\n{CALL}"
    says(thinking, said)
    asked: Body = {**form.tools("weather"), **form.thinks}
    first = form.post(thinking, **asked).json()
    form.ask(thinking, **asked, **{form.asks: [*ASK, *form.turns(first)]})
    one, two = (submit.tokens for submit in thinking.router.submits)
    known = (*one, *thinking.ctx.tokenizer.encode(said))
    assert two[: len(known)] == known


def test_ids_of_calls_are_those_that_the_models_template_takes(
    mistral: Served, form: Format
) -> None:
    says(mistral, '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]')
    first = form.post(mistral, **form.tools("weather"))
    form.ask(mistral, **form.tools("weather"), **{form.asks: [*ASK, *form.turns(first.json())]})
    found = re.search(r'{"content": "no", "call_id": "(\w{9})"}', prompt(mistral))
    assert found is not None
    assert f'"{found[1]}"' in first.text


def test_the_effort_reaches_the_template(
    thinking: Served, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = thinking.ctx.tokenizer.chat_template
    assert template is not None
    render, found = template.prompt, []

    def watched(messages: Any, options: Any) -> Any:
        found.append(options.chat_template_kwargs)
        return render(messages, options)

    monkeypatch.setattr(template, "prompt", watched)
    for asked, _ in form.efforts:
        form.ask(thinking, **asked)
    assert found == [given for _, given in form.efforts]
