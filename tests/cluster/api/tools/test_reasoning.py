"""`reasoning_content` of models that think in tags."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from kvrelay.engine.request import ReasoningBudget
from tests.cluster.api.conftest import MAX_MODEL_LEN, MODEL, Served
from tests.cluster.api.tools.templates import (
    ASK,
    CALL,
    OSLO,
    SPOKEN,
    THINKING,
    THOUGHT,
    WEATHER,
    prompt,
    says,
    serve_template,
)

LOOKED_UP = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": OSLO},
}
REASONED = f"<think>\n{THOUGHT}\n</think>\n\n{SPOKEN}"


def message(served: Served, **changes: Any) -> dict[str, Any]:
    """Of a whole answer."""
    response = served.post({"model": MODEL, "messages": ASK} | changes)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]["message"]
    return found


def streamed(served: Served, **changes: Any) -> dict[str, str]:
    """Text of each kind of a stream's deltas, in the order in which they begin."""
    texts: dict[str, str] = {}
    for chunk in served.openai().chat.completions.create(
        model=MODEL, messages=ASK, stream=True, **changes
    ):
        for key, value in chunk.choices[0].delta.to_dict().items():
            if isinstance(value, str) and value and key != "role":
                texts[key] = texts.get(key, "") + value
    return texts


def test_reasoning_is_told_apart_from_the_answer(thinking: Served) -> None:
    says(thinking, REASONED)
    found = message(thinking)
    assert (found["reasoning_content"], found["content"]) == (THOUGHT, SPOKEN)
    assert found["reasoning"] == THOUGHT
    texts = streamed(thinking)
    assert texts == {"reasoning_content": THOUGHT, "reasoning": THOUGHT, "content": SPOKEN}
    assert list(texts)[-1] == "content"


def test_reasoning_that_is_not_wanted_is_not_told(thinking: Served) -> None:
    says(thinking, REASONED)
    found = message(thinking, include_reasoning=False)
    assert found == {"role": "assistant", "content": SPOKEN, "refusal": None}
    assert streamed(thinking, extra_body={"include_reasoning": False}) == {"content": SPOKEN}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_history_has_reasoning_under_either_name(thinking: Served, name: str) -> None:
    said = {"role": "assistant", "content": "", name: THOUGHT, "tool_calls": [LOOKED_UP]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Rain."}
    says(thinking, SPOKEN)
    message(thinking, messages=[*ASK, said, result])
    assert THOUGHT in prompt(thinking)


def test_the_openai_client_sees_it_too(thinking: Served) -> None:
    says(thinking, REASONED)
    answer = thinking.openai().chat.completions.create(model=MODEL, messages=ASK)
    found = answer.choices[0].message
    assert (found.content, getattr(found, "reasoning_content", None)) == (SPOKEN, THOUGHT)


def test_reasoning_that_the_prompt_begins(thinking: Served) -> None:
    says(thinking, REASONED.removeprefix("<think>\n"))
    found = message(thinking, chat_template_kwargs={"enable_thinking": True})
    assert prompt(thinking).endswith("<|im_start|>assistant\n<think>\n")
    assert (found["reasoning_content"], found["content"]) == (THOUGHT, SPOKEN)


def test_reasoning_that_the_prompt_has_ended(thinking: Served) -> None:
    says(thinking, f"{SPOKEN} <think>")
    for changes in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ):
        found = message(thinking, **changes)
        assert prompt(thinking).endswith("<think>\n\n</think>\n\n")
        assert found["content"] == f"{SPOKEN} <think>"
        assert "reasoning_content" not in found


def test_only_what_the_template_adds_begins_or_ends_reasoning(marked: Served) -> None:
    says(marked, REASONED)
    earlier = {"role": "assistant", "content": "No.", "reasoning_content": THOUGHT}
    asked = {"role": "user", "content": "What does </think> do?"}
    for messages in ([*ASK, earlier, {"role": "user", "content": "So?"}], [asked]):
        found = message(marked, messages=messages)
        assert (found["reasoning_content"], found["content"]) == (THOUGHT, SPOKEN)
    says(marked, SPOKEN)
    found = message(marked, messages=[{"role": "user", "content": "What does <think> do?"}])
    assert found["content"] == SPOKEN
    assert "reasoning_content" not in found


def test_an_answer_without_reasoning_is_text(thinking: Served) -> None:
    says(thinking, f"{SPOKEN} <think>no</think>")
    found = message(thinking)
    assert found["content"] == f"{SPOKEN} <think>no</think>"
    assert "reasoning_content" not in found


def test_a_call_within_reasoning_is_a_thought(thinking: Served) -> None:
    says(thinking, f"<think>\n{CALL}\n</think>\n\n{SPOKEN}")
    found = message(thinking, tools=[WEATHER])
    assert (found["reasoning_content"], found["content"]) == (CALL, SPOKEN)
    assert "tool_calls" not in found


def test_reasoning_that_is_cut_is_no_answer(thinking: Served) -> None:
    says(thinking, REASONED)
    found = message(thinking, max_tokens=6)
    assert THOUGHT.startswith(found["reasoning_content"])
    assert found["content"] == ""


def test_a_stop_string_within_reasoning_ends_all(thinking: Served) -> None:
    says(thinking, REASONED)
    found = message(thinking, stop=" Oslo")
    assert (found["reasoning_content"], found["content"]) == ("They ask about", "")


def test_reasoning_that_is_given_back_is_the_beginning_of_the_next_prompt(
    thinking: Served,
) -> None:
    says(thinking, REASONED)
    first = message(thinking)
    message(thinking, messages=[*ASK, first, {"role": "user", "content": "So?"}])
    one, two = (submit.tokens for submit in thinking.router.submits)
    known = (*one, *thinking.ctx.tokenizer.encode(REASONED))
    assert two[: len(known)] == known


def test_a_model_whose_template_does_not_think(served: Served) -> None:
    says(served, REASONED)
    found = message(served)
    assert found["content"] == REASONED
    assert "reasoning_content" not in found


@pytest.fixture(scope="module")
def silent(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("silent")
    parsers = {"reasoning_parser": "none", "tool_parser": "none"}
    with serve_template(smollm2_dir, folder, THINKING, **parsers) as running:
        yield running


def test_parsers_can_be_switched_off(silent: Served) -> None:
    says(silent, f"{REASONED}\n{CALL}")
    found = message(silent, tools=[WEATHER])
    assert found["content"] == f"{REASONED}\n{CALL}"
    assert set(found) == {"role", "content", "refusal"}


@pytest.fixture(scope="module")
def marked(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Of a model for which the marks are tokens."""
    folder = tmp_path_factory.mktemp("marked")
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>"])
    with serve_template(smollm2_dir, folder, THINKING, tokenizer=tokenizer) as served:
        yield served


def test_a_budget_names_the_tokens_of_the_model(marked: Served) -> None:
    says(marked, REASONED)
    start, end = map(marked.ctx.tokenizer.token_id, ("<think>", "</think>"))
    assert start is not None
    assert end is not None
    for name in ("thinking_budget", "thinking_token_budget"):
        message(marked, **{name: 7})
        assert marked.router.submits[-1].sampling.reasoning == ReasoningBudget(7, end, start)
        message(marked, **{name: 2**70})
        most = ReasoningBudget(MAX_MODEL_LEN, end, start)
        assert marked.router.submits[-1].sampling.reasoning == most
    message(marked, thinking_token_budget=-1)
    assert marked.router.submits[-1].sampling.reasoning is None
    message(marked, thinking_budget=7, chat_template_kwargs={"enable_thinking": True})
    assert marked.router.submits[-1].sampling.reasoning == ReasoningBudget(7, end)
    message(marked, thinking_budget=7, chat_template_kwargs={"enable_thinking": False})
    assert marked.router.submits[-1].sampling.reasoning is None
    body = {"model": MODEL, "messages": ASK, "max_tokens": 99}
    thinking = {"type": "enabled", "budget_tokens": 40}
    answer = marked.post({**body, "thinking": thinking}, "/v1/messages")
    assert answer.status_code == 200
    assert marked.router.submits[-1].sampling.reasoning == ReasoningBudget(40, end)


def test_tokens_of_reasoning_are_counted(marked: Served) -> None:
    says(marked, REASONED)
    usage = marked.post({"model": MODEL, "messages": ASK}).json()["usage"]
    thought = marked.ctx.tokenizer.encode(f"<think>\n{THOUGHT}\n")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(thought)}


def test_where_the_marks_are_no_tokens_a_budget_is_refused(thinking: Served) -> None:
    response = thinking.post({"model": MODEL, "messages": ASK, "thinking_budget": 5})
    assert response.status_code == 400
    assert "'thinking_budget'" in response.json()["error"]["message"]
    says(thinking, REASONED)
    body = {"model": MODEL, "messages": ASK, "max_tokens": 99}
    body["thinking"] = {"type": "enabled", "budget_tokens": 40}
    assert thinking.post(body, "/v1/messages").status_code == 200  # agents always ask for one


def test_a_prediction_is_sent_along_as_tokens(thinking: Served) -> None:
    says(thinking, SPOKEN)
    text = "def f():\n    return 1\n"
    expected = tuple(thinking.ctx.tokenizer.encode(text))
    for content in (text, [{"type": "text", "text": text}]):
        message(thinking, prediction={"type": "content", "content": content})
        assert thinking.router.submits[-1].sampling.prediction == expected
    response = thinking.post({"model": MODEL, "messages": ASK, "prediction": "x"})
    assert response.json()["error"]["param"] == "prediction"
