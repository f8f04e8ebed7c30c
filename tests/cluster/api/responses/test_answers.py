"""Responses with OpenAI's own client: whole answers, and streams with exactly its events."""

from __future__ import annotations

import base64
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.cluster.api.conftest import ANSWER, MODEL, Served
from tests.cluster.api.responses.asking import (
    ASK,
    PATCH,
    WEATHER,
    ask,
    deltas,
    post,
    shape,
    stream,
)
from tests.cluster.api.tools.templates import (
    CALL,
    OSLO,
    SPOKEN,
    THOUGHT,
    allows,
    call_text,
    prompt,
    says,
)

REASONED = f"<think>\n{THOUGHT}\n</think>\n\n{SPOKEN}\n{CALL}"
TEXT_EVENTS = [
    *("output_item.added 0", "content_part.added 0", "output_text.delta 0"),
    *("output_text.done 0", "content_part.done 0", "output_item.done 0"),
]


def test_a_whole_text(served: Served) -> None:
    served.router.num_cached_tokens = 16
    answer = ask(served, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status, answer.model) == ("response", "completed", MODEL)
    (message,) = answer.output
    assert message.type == "message"
    assert (message.role, message.status) == ("assistant", "completed")
    assert answer.output_text == ANSWER
    submit = served.router.submits[0]
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(submit.tokens)
    details = answer.usage.input_tokens_details
    assert details.cached_tokens == 16
    assert details.cache_write_tokens == answer.usage.input_tokens - 16
    assert answer.usage.output_tokens == len(served.router.answer(submit))
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"a": "b"})
    assert (answer.temperature, submit.sampling.temperature) == (0.5, 0.5)
    assert (answer.error, answer.incomplete_details, answer.tools) == (None, None, [])
    assert prompt(served) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_streamed_text_has_openais_events_in_order(served: Served) -> None:
    events = stream(served)
    assert shape(events) == ["created", "in_progress", *TEXT_EVENTS, "completed"]
    for event in events[:2]:
        begun = event["response"]
        assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    added, part = events[2]["item"], events[3]["part"]
    assert (added["status"], added["content"]) == ("in_progress", [])
    assert part == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert "".join(deltas(events, "output_text")) == ANSWER
    assert len(deltas(events, "output_text")) > 3
    text_done, part_done, item_done, completed = events[-4:]
    assert text_done["text"] == ANSWER
    assert part_done["part"] == part | {"text": ANSWER}
    assert item_done["item"] == added | {"status": "completed", "content": [part_done["part"]]}
    assert completed["response"]["output"] == [item_done["item"]]
    assert completed["response"]["usage"]["output_tokens"] == len(served.router.answer(None))  # type: ignore[arg-type]
    of_item = [event for event in events if "item_id" in event]
    assert {(e["item_id"], e["content_index"]) for e in of_item} == {(added["id"], 0)}
    assert len({e["response"]["id"] for e in events if "response" in e}) == 1


def test_the_client_assembles_a_stream(thinking: Served) -> None:
    says(thinking, REASONED)
    with thinking.openai().responses.stream(model=MODEL, input=ASK, tools=[WEATHER]) as opened:
        kinds = [event.type for event in opened]
        streamed = opened.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    whole = ask(thinking, tools=[WEATHER])

    def told(response: Any) -> list[dict[str, Any]]:
        left_out = ("id", "call_id", "parsed", "parsed_arguments")
        items = [item.to_dict() for item in response.output]
        return [{k: v for k, v in item.items() if k not in left_out} for item in items]

    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert streamed.output_text == whole.output_text == SPOKEN
    assert told(streamed)[0] == told(whole)[0]
    assert told(streamed)[2] == told(whole)[2]


def test_a_stream_of_reasoning_text_and_a_call(thinking: Served) -> None:
    says(thinking, REASONED)
    events = stream(thinking, tools=[WEATHER])
    assert shape(events)[2:-1] == [
        *("output_item.added 0", "content_part.added 0", "reasoning_text.delta 0"),
        *("reasoning_text.done 0", "content_part.done 0", "output_item.done 0"),
        *(name.replace(" 0", " 1") for name in TEXT_EVENTS),
        *("output_item.added 2", "function_call_arguments.delta 2"),
        *("function_call_arguments.done 2", "output_item.done 2"),
    ]
    assert "".join(deltas(events, "reasoning_text")) == THOUGHT
    assert "".join(deltas(events, "function_call_arguments")) == OSLO
    assert len(deltas(events, "function_call_arguments")) > 3
    done = {e["type"].removeprefix("response."): e for e in events}
    assert done["reasoning_text.done"]["text"] == THOUGHT
    assert done["function_call_arguments.done"]["arguments"] == OSLO
    begun = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    ended = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert [item["id"] for item in begun] == [item["id"] for item in ended]
    assert (begun[2]["arguments"], begun[2]["status"]) == ("", "in_progress")
    assert ended == events[-1]["response"]["output"]


def test_a_stream_that_comes_all_at_once_has_the_same_events(thinking: Served) -> None:
    says(thinking, REASONED)
    events = stream(thinking, tools=[WEATHER])
    thinking.router.per_output = 1000
    at_once = stream(thinking, tools=[WEATHER])
    assert shape(at_once) == shape(events)
    assert len(at_once) < len(events) / 2
    begun = [e["item"] for e in at_once if e["type"] == "response.output_item.added"]
    assert [item.get("status") for item in begun] == [None, "in_progress", "in_progress"]
    assert (begun[0]["content"], begun[1]["content"], begun[2]["arguments"]) == ([], [], "")
    assert at_once[0]["response"]["output"] == []


@pytest.mark.parametrize("as_stream", [False, True])
def test_the_input_of_a_custom_tool_is_told_as_a_text(thinking: Served, as_stream: bool) -> None:
    says(thinking, call_text("patch", '{"input": "a\\n\\"b\\" é"}'))
    text = 'a\n"b" é'
    if as_stream:
        events = stream(thinking, tools=[PATCH])
        assert shape(events)[2:-1] == [
            *("output_item.added 0", "custom_tool_call_input.delta 0"),
            *("custom_tool_call_input.done 0", "output_item.done 0"),
        ]
        assert events[2]["item"]["input"] == ""
        assert "".join(deltas(events, "custom_tool_call_input")) == text
        done = next(event for event in events if "input_index" not in event and "input" in event)
        assert done["input"] == text
        item = events[-1]["response"]["output"][0]
    else:
        item = ask(thinking, tools=[PATCH]).output[0].to_dict()
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", text)
    assert item["status"] == "completed"


@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"input": "a\\ud800b"}', "a\ufffdb"),  # half a character: no answer has it
        ('{"input": "\\ud83d\\ude00\\u00e9"}', "\U0001f600\u00e9"),
        ('{"input": "a\nb\\q"}', "a\nb\\q"),  # neither is JSON
        ('{"other": 1}', '{"other": 1}'),
        ('{"input": 5}', '{"input": 5}'),
        ("[]", "[]"),
    ],
)
def test_input_that_is_not_as_it_should_be(
    thinking: Served, as_stream: bool, written: str, text: str
) -> None:
    """A model that is not held to JSON: what can be read is told, else its words are."""
    says(thinking, call_text("patch", written))
    if as_stream:
        events = stream(thinking, tools=[PATCH])
        assert "".join(deltas(events, "custom_tool_call_input")) == text
        item = events[-1]["response"]["output"][0]
    else:
        item = ask(thinking, tools=[PATCH]).output[0].to_dict()
    assert item["input"] == text


def test_events_are_ascii_and_whole_answers_utf_8(thinking: Served) -> None:
    """Some clients take U+2028 for the end of a line."""
    says(thinking, "caf\u00e9 \u2028 \U0001f600")
    events = post(thinking, stream=True)
    assert events.content.isascii()
    assert r"caf\u00e9 \u2028 \ud83d\ude00" in events.text
    assert "caf\u00e9 \u2028 \U0001f600" in post(thinking).text


def test_a_custom_tools_grammar_is_described(thinking: Served) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    ask(thinking, tools=[{**PATCH, "format": form}])
    assert r"Changes a file.\n\nIts grammar:\nstart: /a+/" in prompt(thinking)
    for other in (None, {"type": "text"}, "text"):
        assert post(thinking, tools=[{**PATCH, "format": other}]).status_code == 200
        assert "grammar" not in prompt(thinking)


def test_reasoning_is_encrypted_only_where_that_is_asked_for(thinking: Served) -> None:
    says(thinking, REASONED)
    answer = ask(thinking, include=["reasoning.encrypted_content"], store=False)
    item = answer.output[0]
    assert item.type == "reasoning"
    assert base64.b64decode(item.encrypted_content or "").decode() == THOUGHT
    events = stream(thinking, include=["reasoning.encrypted_content"])
    streamed = events[-1]["response"]["output"][0]
    assert streamed["encrypted_content"] == item.encrypted_content


@pytest.mark.parametrize("as_stream", [False, True])
def test_an_answer_that_is_cut_is_incomplete(served: Served, as_stream: bool) -> None:
    if as_stream:
        events = stream(served, max_output_tokens=3)
        assert shape(events)[-1] == "incomplete"
        answer = events[-1]["response"]
    else:
        answer = ask(served, max_output_tokens=3).to_dict()
    assert (answer["status"], answer["max_output_tokens"]) == ("incomplete", 3)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["output"][0]["content"][0]["text"] == " The capital of"


@pytest.mark.parametrize("as_stream", [False, True])
def test_only_the_item_that_is_cut_is_incomplete(thinking: Served, as_stream: bool) -> None:
    said = f"{SPOKEN}\n{CALL}"
    says(thinking, said)
    num = len(thinking.ctx.tokenizer.encode(said)) - 12
    changes: dict[str, Any] = {"tools": [WEATHER], "max_output_tokens": num}
    if as_stream:
        output = stream(thinking, **changes)[-1]["response"]["output"]
    else:
        output = post(thinking, **changes).json()["output"]
    assert [item["status"] for item in output] == ["completed", "incomplete"]
    assert OSLO.startswith(output[1]["arguments"])


def test_an_answer_without_a_word_has_no_items(served: Served) -> None:
    says(served, "")
    assert shape(stream(served)) == ["created", "in_progress", "completed"]
    assert ask(served).output == []


def test_a_failure_in_mid_stream_is_a_response_that_failed(served: Served) -> None:
    served.router.fail_after = 3
    events = stream(served)
    expected = [*TEXT_EVENTS[:3], "failed"]
    assert shape(events) == ["created", "in_progress", *expected]
    failed = events[-1]["response"]
    all_failed = "All attempts at this request have failed; the server's log says why"
    error = {"code": "attempts_exhausted", "message": all_failed}
    assert (failed["status"], failed["error"]) == ("failed", error)
    with served.openai().responses.stream(model=MODEL, input=ASK) as opened:
        assert [event.type for event in opened][-1] == "response.failed"
    with pytest.raises(openai.InternalServerError, match="have failed"):
        ask(served)


class Place(BaseModel):
    city: str


def test_the_client_parses_what_it_asked_for(served: Served) -> None:
    says(served, OSLO)
    parsed = served.openai().responses.parse(model=MODEL, input=ASK, text_format=Place)
    assert parsed.output_parsed == Place(city="Oslo")
    assert allows(served, OSLO)
    assert not allows(served, '{"town": "Oslo"}')
    with served.openai().responses.stream(model=MODEL, input=ASK, text_format=Place) as opened:
        assert opened.get_final_response().output_parsed == Place(city="Oslo")
