"""Chats with tools, with OpenAI's client: what the model wrote as calls, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.cluster.api.conftest import MODEL, Served
from tests.cluster.api.tools.templates import (
    ASK,
    CALL,
    OSLO,
    SPOKEN,
    WEATHER,
    call_text,
    says,
)

Messages = list[dict[str, Any]]


def ask(served: Served, **changes: Any) -> ChatCompletion:
    arguments: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": [WEATHER]}
    answer: ChatCompletion = served.openai().chat.completions.create(**arguments | changes)
    return answer


def stream(served: Served, **changes: Any) -> list[ChatCompletionChunk]:
    arguments: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": [WEATHER]}
    return list(served.openai().chat.completions.create(**arguments | changes, stream=True))


def test_a_call_is_a_part_of_the_message(served: Served) -> None:
    says(served, CALL)
    answer = ask(served)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", OSLO)
    assert call.id.startswith("call_")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(served.ctx.tokenizer.encode(CALL)) + 1


def test_the_client_assembles_a_stream(served: Served) -> None:
    says(served, f"{SPOKEN}\n{CALL}\n{CALL}")
    with served.openai().chat.completions.stream(
        model=MODEL,
        messages=ASK,
        tools=[WEATHER],
    ) as opened:
        kinds = [event.type for event in opened]
        (choice,) = opened.get_final_completion().choices
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert kinds.count("tool_calls.function.arguments.delta") > 6
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", SPOKEN)
    assert choice.message.tool_calls is not None
    found = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert found == [("weather", OSLO)] * 2
    whole = ask(served).choices[0].message
    assert whole.tool_calls is not None
    assert [c.type for c in whole.tool_calls] == [c.type for c in choice.message.tool_calls]


def test_deltas_of_calls_are_openais(served: Served) -> None:
    says(served, f"{CALL}\n{CALL}")
    chunks = stream(served)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in calls] == sorted(call.index for call in calls)
    first, *rest = (call for call in calls if call.index == 1)
    assert first.function is not None
    assert (first.type, first.function.name, first.function.arguments) == (
        "function",
        "weather",
        "",
    )
    assert first.id
    assert all(call.id is None and call.type is None for call in rest)
    arguments = [call.function.arguments or "" for call in rest if call.function]
    assert "".join(arguments) == OSLO
    assert all(call.function.name is None for call in rest if call.function)
    assert len(arguments) > 3
    last = chunks[-1].choices[0]
    assert (last.finish_reason, last.delta.tool_calls) == ("tool_calls", None)
    assert not any(delta.content for delta in deltas)


@pytest.mark.parametrize("as_stream", [False, True])
def test_each_choice_has_calls_of_its_own(served: Served, as_stream: bool) -> None:
    tokenizer = served.ctx.tokenizer

    def answer(submit: Any) -> list[int]:
        arguments = f'{{"city": "{submit.sampling.seed % 97}"}}'
        return [*tokenizer.encode(call_text("weather", arguments)), tokenizer.eos_token_ids[0]]

    served.router.answer = answer
    arguments, ids = ["", ""], ["", ""]
    if as_stream:
        for chunk in stream(served, n=2, seed=5):
            (choice,) = chunk.choices
            for call in choice.delta.tool_calls or ():
                assert call.index == 0
                assert call.function is not None
                arguments[choice.index] += call.function.arguments or ""
                ids[choice.index] += call.id or ""
    else:
        for whole in ask(served, n=2, seed=5).choices:
            assert whole.message.tool_calls is not None
            (made,) = whole.message.tool_calls
            assert made.type == "function"
            assert whole.finish_reason == "tool_calls"
            arguments[whole.index], ids[whole.index] = made.function.arguments, made.id
    seeds = [submit.sampling.seed for submit in served.router.submits]
    assert [json.loads(text) for text in arguments] == [{"city": str(s % 97)} for s in seeds]
    assert ids[0] != ids[1]


def test_log_probabilities_cover_calls_too(served: Served) -> None:
    said = f"{SPOKEN}\n{CALL}"
    says(served, said)
    (choice,) = ask(served, logprobs=True).choices
    assert choice.logprobs is not None
    tokens = [entry.token for entry in choice.logprobs.content or ()]
    assert "".join(tokens) == said
    streamed: list[str] = []
    arguments = ""
    for chunk in stream(served, logprobs=True):
        part = chunk.choices[0]
        if part.logprobs is not None:
            streamed += [entry.token for entry in part.logprobs.content or ()]
        for call in part.delta.tool_calls or ():
            arguments += (call.function.arguments if call.function else "") or ""
    assert (streamed, arguments) == (tokens, OSLO)
