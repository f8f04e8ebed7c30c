"""Messages with Anthropic's own client: whole answers, and streams with exactly its events."""

from __future__ import annotations

import json
import time

import anthropic
import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from tests.cluster.api.anthropic.claude import ASK, THINK, WEATHER, ask, client, shape, stream
from tests.cluster.api.conftest import ANSWER, MODEL, Served, serve
from tests.cluster.api.tools.templates import CALL, OSLO, SPOKEN, THOUGHT, call_text, prompt, says

REASONED = f"{THOUGHT}\n</think>\n\n{SPOKEN}\n{CALL}"


def test_a_whole_text(served: Served) -> None:
    answer = ask(served)
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": ANSWER}]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    submit = served.router.submits[0]
    assert answer.usage.input_tokens == len(submit.tokens)
    assert answer.usage.output_tokens == len(served.router.answer(submit))
    assert prompt(served).endswith(
        "<|im_start|>user\nWill it rain in Oslo?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_streamed_text_has_anthropics_events_in_order(served: Served) -> None:
    events = stream(served)
    assert shape(events) == [
        *("message_start", "ping", "start 0", "text_delta 0", "stop 0"),
        *("message_delta", "message_stop"),
    ]
    begun = events[0]["message"]
    assert (begun["content"], begun["stop_reason"], begun["stop_sequence"]) == ([], None, None)
    assert (begun["type"], begun["role"], begun["model"]) == ("message", "assistant", MODEL)
    assert begun["usage"]["input_tokens"] == len(served.router.submits[0].tokens)
    assert events[2]["content_block"] == {"type": "text", "text": ""}
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == ANSWER
    assert len(texts) > 3
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(texts) + 1
    assert events[-1] == {"type": "message_stop"}


def test_the_client_assembles_a_stream(served: Served) -> None:
    with client(served).messages.stream(model=MODEL, max_tokens=100, messages=ASK) as opened:
        assert "".join(opened.text_stream) == ANSWER
        message = opened.get_final_message()
    assert message.stop_reason == "end_turn"
    assert message.usage.input_tokens == len(served.router.submits[0].tokens)


def test_a_stream_of_reasoning_text_and_calls(thinking: Served) -> None:
    says(thinking, f"{REASONED}\n{call_text('weather', '{}')}")
    events = stream(thinking, tools=[WEATHER], thinking=THINK)
    assert shape(events) == [
        *("message_start", "ping"),
        *("start 0", "thinking_delta 0", "signature_delta 0", "stop 0"),
        *("start 1", "text_delta 1", "stop 1"),
        *("start 2", "input_json_delta 2", "stop 2"),
        *("start 3", "input_json_delta 3", "stop 3"),
        *("message_delta", "message_stop"),
    ]
    begun = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert begun[0] == {"type": "thinking", "thinking": "", "signature": ""}
    first, second = begun[2:]
    assert first["id"] != second["id"]
    assert first | {"id": ""} == {"type": "tool_use", "id": "", "name": "weather", "input": {}}
    parts = [e["delta"]["partial_json"] for e in events if e.get("index") == 2 and "delta" in e]
    assert "".join(parts) == OSLO
    assert len(parts) > 3
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_stream_that_comes_all_at_once_has_the_same_events(thinking: Served) -> None:
    says(thinking, REASONED)
    events = stream(thinking, tools=[WEATHER], thinking=THINK)
    thinking.router.per_output = 1000
    at_once = stream(thinking, tools=[WEATHER], thinking=THINK)
    assert at_once[0]["message"]["content"] == []
    assert shape(at_once) == shape(events)
    assert len(at_once) < len(events) / 2
    begun = [e["content_block"] for e in at_once if e["type"] == "content_block_start"]
    assert begun[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert (begun[1]["text"], begun[2]["input"]) == ("", {})


def test_what_the_client_assembles_is_the_whole_answer(thinking: Served) -> None:
    says(thinking, REASONED)
    with client(thinking).messages.stream(
        model=MODEL, max_tokens=300, messages=ASK, tools=[WEATHER], thinking=THINK
    ) as opened:
        streamed = opened.get_final_message()
    whole = ask(thinking, tools=[WEATHER], thinking=THINK)

    def told(message: object) -> list[dict[str, object]]:
        blocks = [block.to_dict() for block in message.content]  # type: ignore[attr-defined]
        return [{k: v for k, v in b.items() if k not in ("id", "signature")} for b in blocks]

    assert told(streamed) == told(whole)
    assert streamed.content[0].signature == streamed.id
    assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)


@pytest.mark.parametrize("as_stream", [False, True])
def test_a_stop_sequence_is_named(served: Served, as_stream: bool) -> None:
    stops = ["never", " is Paris"]
    if as_stream:
        events = stream(served, stop_sequences=stops)
        assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stops[1]}
        texts = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
        assert "".join(texts) == " The capital of France"
    else:
        answer = ask(served, stop_sequences=stops)
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " is Paris")
        assert answer.content[0].text == " The capital of France"
    assert len(served.router.cancels) == 1


def test_more_stop_sequences_than_openai_has(served: Served) -> None:
    says(served, "one <13> two")
    answer = ask(served, stop_sequences=[f"<{i}>" for i in range(20)])
    assert (answer.content[0].text, answer.stop_sequence) == ("one ", "<13>")


def test_a_call_that_is_cut_has_the_arguments_that_are_whole(thinking: Served) -> None:
    whole = call_text("weather", '{"city": "Oslo", "days": [1, 2, 3, 4, 5, 6, 7, 8]}')
    says(thinking, whole)
    tokenizer = thinking.ctx.tokenizer
    num = len(tokenizer.encode(whole[: whole.index(', "days"') + 5]))
    answer = ask(thinking, tools=[WEATHER], max_tokens=num)
    assert answer.stop_reason == "max_tokens"
    (call,) = answer.content
    assert (call.type, call.input) == ("tool_use", {"city": "Oslo"})
    events = stream(thinking, tools=[WEATHER], max_tokens=num)
    streamed = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(streamed).startswith('{"city": "Oslo", ')
    assert shape(events)[-3:] == ["stop 0", "message_delta", "message_stop"]
    says(thinking, CALL)
    num = len(tokenizer.encode(CALL)) - 12
    assert ask(thinking, tools=[WEATHER], max_tokens=num).content[0].input == {}


def test_an_answer_without_a_word_has_no_blocks(served: Served) -> None:
    says(served, "")
    assert shape(stream(served)) == ["message_start", "ping", "message_delta", "message_stop"]
    answer = ask(served)
    assert (answer.content, answer.stop_reason) == ([], "end_turn")


def test_events_are_lines_that_end_with_an_empty_one(served: Served) -> None:
    response = served.post(
        {"model": MODEL, "max_tokens": 9, "messages": ASK, "stream": True}, "/v1/messages"
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.startswith('event: message_start\ndata: {"type":"message_start",')
    assert response.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    for block in response.text.split("\n\n")[:-1]:
        json.loads(block.partition("\ndata: ")[2])


def test_models_are_listed_in_the_form_of_who_asks(tokenizer: Tokenizer) -> None:
    names = (MODEL, "claude-small", "claude-large")
    context = {"aliases": names[1:]}
    with serve(tokenizer, ApiSettings(), context=context) as served:
        sdk = client(served)
        page = sdk.models.list(limit=2)
        assert [each.id for each in page.data] == [MODEL, "claude-small"]
        assert (page.has_more, page.first_id, page.last_id) == (True, MODEL, "claude-small")
        assert [each.id for each in page] == [*names], "the SDK pages on by after_id"
        first = sdk.models.retrieve(MODEL)
        assert first == page.data[0]
        assert (first.type, first.display_name, first.lifecycle) == ("model", MODEL, "active")
        assert abs(first.created_at.timestamp() - time.time()) < 600
        last = sdk.models.list(before_id="claude-large", limit=1)
        assert [each.id for each in last.data] == ["claude-small"]
        with pytest.raises(anthropic.NotFoundError) as error:
            sdk.models.retrieve("unknown")
        assert error.value.request_id
        assert error.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        plain = served.http.get("/v1/models")
        assert [each["object"] for each in plain.json()["data"]] == ["model"] * 3
        assert "request-id" not in plain.headers
        message = sdk.messages.create(model=MODEL, max_tokens=4, messages=ASK)
        assert message._request_id
