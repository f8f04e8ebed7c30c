"""What the items of a request become: the prompt that the model reads, or an error that names the
item."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from cluster.api.responses.schema import CUSTOM_INPUT
from tests.cluster.api.conftest import MAX_MODEL_LEN, Served
from tests.cluster.api.responses.asking import ASK, PATCH, WEATHER, ask, post, refused, user
from tests.cluster.api.tools.templates import CALL, OSLO, THOUGHT, call_text, prompt, says


def read(served: Served, items: Any, **changes: Any) -> str:
    """The prompt of these items."""
    response = post(served, items, **changes)
    assert response.status_code == 200, response.text
    return prompt(served)


def chat(*turns: tuple[str, str]) -> str:
    """As the template of the small model writes it."""
    said = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"{said}<|im_start|>assistant\n"


def called(arguments: str = OSLO, call_id: str = "a") -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": "weather",
        "arguments": arguments,
    }


def output(text: Any, call_id: str = "a") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def said(*texts: str) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "role": "assistant", "id": "msg_1", "content": parts}


def test_messages_in_every_form(served: Served) -> None:
    parts = [{"type": "input_text", "text": "Hi"}]
    forms = [
        "Hi",
        [user("Hi")],
        [{"type": "message", **user("Hi")}],
        [user("Hi") | {"content": parts}],
    ]
    expected = chat(("system", "Be brief."), ("user", "Hi"))
    for form in forms:
        assert read(served, form, instructions="Be brief.") == expected
    developer = {"role": "developer", "content": "Be brief."}
    assert read(served, [developer, user("Hi")]) == expected
    two = [{"type": "input_text", "text": "One."}, {"type": "input_text", "text": "Two."}]
    assert "user\nOne.\nTwo.<|im_end|>" in read(served, [{"role": "user", "content": two}])


def test_an_answer_may_be_given_back_as_text_or_as_it_came(served: Served) -> None:
    expected = read(served, [user("Hi"), {"role": "assistant", "content": "Hello."}, user("Bye")])
    assert read(served, [user("Hi"), said("Hello."), user("Bye")]) == expected
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "Hello."}]}
    assert read(served, [user("Hi"), refusal, user("Bye")]) == expected
    assert "assistant\nHello.<|im_end|>\n<|im_start|>user\nBye" in expected


def test_what_the_assistant_said_in_a_row_is_one_turn(thinking: Served) -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text"}]}
    reasoning["content"][0]["text"] = THOUGHT  # type: ignore[index]
    items = [
        *(user(ASK), reasoning, said("I look."), called(), called('{"city": "Bergen"}', "b")),
        *(output("no"), output([{"type": "input_text", "text": "yes"}], "b"), user("So?")),
    ]
    read_back = read(thinking, items, tools=[WEATHER])
    bergen = call_text("weather", '{"city": "Bergen"}')
    assert read_back.partition("<|im_end|>\n<|im_start|>user")[2] == (
        f"\n{ASK}<|im_end|>\n<|im_start|>assistant\n<think>\n{THOUGHT}\n</think>\n\n"
        f"I look.\n{CALL}\n{bergen}<|im_end|>\n<|im_start|>tool\nno<|im_end|>\n"
        "<|im_start|>tool\nyes<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_arguments_are_written_as_they_came(thinking: Served) -> None:
    for arguments in ('{"city":"Oslo"}', '{ "city" : "\\u00d8" }', '{"a": 1.0, "a": 1e3}'):
        items = [user(ASK), called(arguments), output("no")]
        assert call_text("weather", arguments) in read(thinking, items, tools=[WEATHER])


def test_a_custom_tool_and_its_output(thinking: Served) -> None:
    items = [
        user("Fix it."),
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": 'say "é"'},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
    ]
    read_back = read(thinking, items, tools=[PATCH])
    assert call_text("patch", f'{{"{CUSTOM_INPUT}": "say \\"é\\""}}') in read_back
    assert "<|im_start|>tool\ndone<|im_end|>" in read_back


def test_reasoning_is_given_back_in_every_form(thinking: Served) -> None:
    encrypted = base64.b64encode("Ünsure.".encode()).decode()
    forms: list[dict[str, Any]] = [
        {"summary": [], "content": [{"type": "reasoning_text", "text": "Ünsure."}]},
        {"summary": [{"type": "summary_text", "text": "Ünsure."}]},
        {"summary": [], "encrypted_content": encrypted},
        {"summary": [], "content": None, "encrypted_content": encrypted},
    ]
    for form in forms:
        items = [user("Hi"), {"type": "reasoning", "id": "rs_1", **form}, said("Hm."), user("So?")]
        assert "assistant\n<think>\nÜnsure.\n</think>\n\nHm.<|im_end|>" in read(thinking, items)


@pytest.mark.parametrize("content", ["gAAAA", "é", "!", "/////w==", 5, [], {}, [1], None])
def test_reasoning_that_another_server_encrypted_is_left_out(
    thinking: Served, content: Any
) -> None:
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": content}
    items = [user("Hi"), reasoning, said("Hm."), user("So?")]
    assert "assistant\nHm.<|im_end|>" in read(thinking, items)


def test_several_thoughts_of_one_turn_are_all_there(thinking: Served) -> None:
    thoughts = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}
        for text in ("One.", "Two.")
    ]
    items = [user("Hi"), thoughts[0], called(), thoughts[1], said("Hm."), user("So?")]
    assert "<think>\nOne.\nTwo.\n</think>" in read(thinking, items)


def test_the_next_turn_begins_with_all_that_was_computed(thinking: Served) -> None:
    words = f"<think>\n{THOUGHT}\n</think>\n\n{CALL}"
    says(thinking, words)
    first = ask(thinking, tools=[WEATHER], store=False)
    call = first.output[-1]
    assert call.type == "function_call"
    items = [user(ASK), *(item.to_dict() for item in first.output), output("no", call.call_id)]
    ask(thinking, items, tools=[WEATHER], store=False)
    one, two = (submit.tokens for submit in thinking.router.submits)
    known = (*one, *thinking.ctx.tokenizer.encode(words))
    assert two[: len(known)] == known


def test_ids_of_calls_are_those_that_the_models_template_takes(mistral: Served) -> None:
    says(mistral, '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]')
    first = ask(mistral, tools=[WEATHER])
    (call,) = first.output
    assert call.type == "function_call"
    ask(
        mistral,
        [output("no", call.call_id)],
        tools=[WEATHER],
        previous_response_id=first.id,
    )
    assert f'{{"content": "no", "call_id": "{call.call_id}"}}' in prompt(mistral)


IMAGE = {"type": "input_image", "image_url": "data:,"}
WRONG: list[tuple[Any, str]] = [
    (5, "'input': expected a string or a list of items"),
    (["Hi"], "'input': expected a string or a list of items"),
    ([], "'input': there is nothing to answer"),
    ([user("Hi"), {"role": "wizard", "content": "Hi"}], "'input[1]': 'role' is one of user, "),
    ([user("Hi"), {"content": "Hi"}], "'input[1]': 'role' is one of user, "),
    ([user("Hi"), {"role": ["user"], "content": "Hi"}], "'input[1]': 'role' is one of user, "),
    ([{"role": "user", "content": 5}], "'input[0]': content is a string or a list of parts"),
    ([user("Hi"), {"role": "user", "content": [IMAGE]}], "'input[1]': this model reads text, no"),
    ([{"role": "user", "content": [{"type": "input_text"}]}], "'input[0]': a part of type"),
    ([{"role": "user", "content": ["Hi"]}], "'input[0]': this model reads text"),
    ([user("Hi"), {"type": "computer_call"}], "'input[1]': items of type 'computer_call' are not"),
    ([user("Hi"), {"type": None}], "'input[1]': items of type None are not supported"),
    ([user("Hi"), called() | {"name": None}], "'input[1]': 'name' is a string, got None"),
    ([user("Hi"), called() | {"call_id": 5}], "'input[1]': 'call_id' is a string, got 5"),
    ([user("Hi"), called({})], "'input[1]': 'arguments' is a string, got {}"),  # type: ignore[arg-type]
    ([user("Hi"), called(), output(5)], "'input[2]': content is a string or a list"),
    ([user("Hi"), called(), output("no") | {"call_id": None}], "'input[2]': 'call_id' is a str"),
    (
        [user("Hi"), {"type": "custom_tool_call", "call_id": "a", "name": "patch"}],
        "'input[1]': 'input' is a string, got None",
    ),
    ("word " * 2000, f"This model's maximum context length is {MAX_MODEL_LEN} tokens"),
]


def test_items_that_are_wrong_are_named_with_their_place(served: Served) -> None:
    for items, message in WRONG:
        error = refused(served, items)
        assert error["message"].startswith(message), error
        assert (error["type"], error["param"]) == ("invalid_request_error", "input")
    assert served.router.submits == []


def test_places_are_those_of_the_request_whatever_came_before_it(served: Served) -> None:
    first = ask(served, [user("Hi"), said("Hello."), user("So?")])
    error = refused(served, [user("Hi"), {"type": "x"}], previous_response_id=first.id)
    assert error["message"].startswith("'input[1]': items of type 'x'")


WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 3}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"priority": 1000}, "priority"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [WEATHER, {"type": "computer"}]}, "tools"),
    ({"tools": [{"type": "namespace", "name": "x"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"model": None}, "model"),
]


def test_fields_that_are_wrong_are_named(served: Served) -> None:
    for changes, param in WRONG_FIELDS:
        error = refused(served, **changes)
        assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert served.router.submits == []


def test_an_unknown_model_is_a_404(served: Served) -> None:
    response = post(served, model="gpt-9")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
