"""What a conversation of Anthropic's form becomes: the prompt that the model reads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.api.anthropic.claude import ASK, THINK, WEATHER, ask, client, post
from tests.cluster.api.conftest import MODEL, Served
from tests.cluster.api.tools.templates import (
    CALL,
    call_text,
    prompt,
    says,
)

BILLING = "x-anthropic-billing-header: cc_version=2.0.1; cch=00ff1;"


def turn(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": [text(c) if isinstance(c, str) else c for c in content]}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def use(call_id: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "weather", "input": given}


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


def read(served: Served, messages: list[Any], **changes: Any) -> str:
    """The prompt of these messages."""
    response = post(served, messages=messages, **changes)
    assert response.status_code == 200, response.text
    return prompt(served)


def chat(*turns: tuple[str, str]) -> str:
    """As the template of the small model writes it."""
    said = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"{said}<|im_start|>assistant\n"


def test_a_system_prompt_is_a_string_or_blocks(served: Served) -> None:
    expected = chat(("system", "Be brief."), ("user", "Hi"))
    for system in ("Be brief.", [text("Be brief.")]):
        assert read(served, [turn("user", "Hi")], system=system) == expected
    two = read(served, [turn("user", "Hi")], system=[text("Be brief."), text("Be kind.")])
    assert two == chat(("system", "Be brief.\n\nBe kind."), ("user", "Hi"))


def test_the_billing_header_is_no_part_of_the_prompt(served: Served) -> None:
    rest = [text("You are an agent."), text("Be brief.")]
    prompts = [
        read(served, ASK, system=system)
        for system in (
            [text(BILLING), *rest],
            [text(BILLING.replace("00ff1", "abcde")), *rest],
            rest,
        )
    ]
    assert len(set(prompts)) == 1
    assert "billing" not in prompts[0]


def test_content_is_a_string_or_blocks(served: Served) -> None:
    plain = read(served, [{"role": "user", "content": "One.\nTwo."}])
    assert read(served, [turn("user", "One.", "Two.")]) == plain
    assert "<|im_start|>user\nOne.\nTwo.<|im_end|>" in plain


def test_system_messages_keep_their_place(served: Served) -> None:
    messages = [turn("user", "Hi"), turn("system", "The time is up."), turn("assistant", "Bye")]
    assert read(served, [*messages, turn("user", "Why?")], system="Be brief.") == chat(
        ("system", "Be brief."),
        ("user", "Hi"),
        ("system", "The time is up."),
        ("assistant", "Bye"),
        ("user", "Why?"),
    )


def test_calls_and_results_for_a_model_that_knows_tools(thinking: Served) -> None:
    messages = [
        turn("user", "Rain in Oslo or Bergen?"),
        turn("assistant", "I look.", use("a", city="Oslo"), use("b", city="Bergen")),
        turn("user", result("a", "no"), result("b", [text("yes,"), text("a lot")]), "So?"),
    ]
    read_back = read(thinking, messages, tools=[WEATHER])
    calls = "\n".join(call_text("weather", f'{{"city": "{c}"}}') for c in ("Oslo", "Bergen"))
    assert f"<|im_start|>assistant\nI look.\n{calls}<|im_end|>\n" in read_back
    assert (
        "<|im_start|>tool\nno<|im_end|>\n<|im_start|>tool\nyes,\na lot<|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n"
    ) in read_back
    assert '{"name": "weather", "description": "Says how the weather is.", "param' in read_back


def test_calls_and_results_for_a_model_that_knows_no_tools(served: Served) -> None:
    messages = [
        turn("user", "Rain?"),
        turn("assistant", use("a", city="Oslo")),
        turn("user", result("a", None)),
    ]
    read_back = read(served, messages, tools=[WEATHER])
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>" in read_back
    assert "<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>" in read_back
    assert '<tools>\n{"name": "weather", ' in read_back.split("<|im_end|>")[0]


def test_text_and_results_keep_their_order(thinking: Served) -> None:
    said = turn("user", "One.", "Two.", result("a", "no"), "Three.")
    read_back = read(thinking, [*ASK, turn("assistant", use("a")), said])
    assert read_back.rpartition("</tool_call>")[2].startswith(
        "<|im_end|>\n<|im_start|>user\nOne.\nTwo.<|im_end|>\n<|im_start|>tool\nno<|im_end|>\n"
        "<|im_start|>user\nThree.<|im_end|>\n"
    )


def test_a_tool_that_the_client_has_found_is_named(thinking: Served) -> None:
    found = result("a", [{"type": "tool_reference", "tool_name": "weather"}])
    messages = [turn("user", "Rain?"), turn("assistant", use("a")), turn("user", found)]
    assert "<|im_start|>tool\nweather<|im_end|>" in read(thinking, messages)


def test_several_thoughts_of_one_turn_are_all_there(thinking: Served) -> None:
    thoughts = [{"type": "thinking", "thinking": t, "signature": "s"} for t in ("One.", "Two.")]
    hidden = {"type": "redacted_thinking", "data": "x"}
    said = turn("assistant", thoughts[0], hidden, thoughts[1], "Hi.")
    read_back = read(thinking, [turn("user", "Hi"), said, turn("user", "Bye")])
    assert "<think>\nOne.\nTwo.\n</think>\n\nHi.<|im_end|>" in read_back


@pytest.mark.parametrize(
    ("thinking_asked", "end"),
    [
        (None, "<think>\n\n</think>\n\n"),
        ({"type": "disabled"}, "<think>\n\n</think>\n\n"),
        (THINK, "<think>\n"),
        ({"type": "adaptive"}, "<think>\n"),
    ],
)
def test_thinking_reaches_the_template(thinking: Served, thinking_asked: Any, end: str) -> None:
    changes = {} if thinking_asked is None else {"thinking": thinking_asked}
    says(thinking, "Hi.")
    answer = ask(thinking, **changes)
    assert prompt(thinking).endswith(f"<|im_start|>assistant\n{end}")
    kind = "thinking" if end == "<think>\n" else "text"
    assert [block.type for block in answer.content] == [kind]


@pytest.mark.slow
def test_counting_counts_the_tokens_of_the_prompt(thinking: Served, served: Served) -> None:
    bodies: list[dict[str, Any]] = [
        {},
        {"system": [text(BILLING), text("Be brief.")]},
        {"tools": [WEATHER], "thinking": THINK},
        {"messages": [*ASK, turn("assistant", "No."), turn("user", "Why?")]},
    ]
    for server in (thinking, served):
        for changes in bodies:
            counted = client(server).messages.count_tokens(
                **{"model": MODEL, "messages": ASK, **changes}
            )
            used = ask(server, **changes).usage
            assert counted.input_tokens == used.input_tokens
            assert counted.input_tokens == len(server.router.submits[-1].tokens)


def test_the_model_sees_that_a_tool_has_failed(served: Served) -> None:
    """With no content it would see an empty success."""
    for content, shown in (
        ("no such file", "Error: no such file"),
        (None, "Error:"),
        ("error: no such file", "error: no such file"),
        ([text("no"), text("such")], "Error: no\nsuch"),
    ):
        failed = result("a", content) | {"is_error": True}
        told = read(served, [turn("user", "Hi"), turn("assistant", use("a")), turn("user", failed)])
        assert f"<tool_response>\n{shown}\n</tool_response>" in told
    fine = result("a", "ok") | {"is_error": False}
    told = read(served, [turn("user", "Hi"), turn("assistant", use("a")), turn("user", fine)])
    assert "Error" not in told


def test_an_image_that_a_tool_returned_is_a_text_that_says_so(served: Served) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": ""}
    shown = result("a", [{"type": "image", "source": source}, text("x.png")])
    turns = [turn("user", "Hi"), turn("assistant", use("a")), turn("user", shown)]
    assert "[image: not shown, this model reads text only]\nx.png" in read(served, turns)
