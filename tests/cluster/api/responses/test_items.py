"""What the items of a request become: the prompt that the model reads, or an error that names the
item."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from kvrelay.cluster.api.output.custom_input import INPUT
from kvrelay.cluster.api.responses.schema import UNREADABLE
from tests.cluster.api.conftest import MAX_MODEL_LEN, MODEL, Served
from tests.cluster.api.responses.asking import ASK, PATCH, PATH, WEATHER, ask, post, refused, user
from tests.cluster.api.tools.templates import CALL, OSLO, THOUGHT, call_text, prompt


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
    assert call_text("patch", f'{{"{INPUT}": "say \\"é\\""}}') in read_back
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


WRONG: list[tuple[Any, str]] = [
    (5, "'input': expected a string or a list of items"),
    ([user("Hi"), {"type": None}], "'input[1]': 'role' is one of user, "),
    ([user("Hi"), {"type": "x"}], "'input[1]': items of type 'x' are not supported"),
    ([user("Hi"), user("So?") | {"content": [{"type": "input_audio"}]}], "'input[1]': this model"),
    (["Hi"], "'input': expected a string or a list of items"),
    ([], "'input': there is nothing to answer"),
    ([user("Hi"), {"role": "wizard", "content": "Hi"}], "'input[1]': 'role' is one of user, "),
    ([user("Hi"), {"content": "Hi"}], "'input[1]': 'role' is one of user, "),
    ([user("Hi"), {"role": ["user"], "content": "Hi"}], "'input[1]': 'role' is one of user, "),
    ([{"role": "user", "content": 5}], "'input[0]': content is a string or a list of parts"),
    ([{"role": "user", "content": [{"type": "input_text"}]}], "'input[0]': a part of type"),
    ([{"role": "user", "content": ["Hi"]}], "'input[0]': this model reads text"),
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
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
    (
        {"tools": [{**WEATHER, "parameters": []}, {**WEATHER, "parameters": 5}]},
        "tools[1].parameters",
    ),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
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


def test_a_missing_model_is_the_one_that_is_served(served: Served) -> None:
    messages = [user("Hi")]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": messages}),
    ]
    for path, body in calls:
        for given in ({}, {"model": None}):
            answer = served.post(body | given, path)
            assert answer.status_code == 200, answer.text
            assert answer.json().get("model", MODEL) == MODEL


def test_histories_with_items_that_others_run_are_read(served: Served) -> None:
    """Each of them made every turn after it a 400."""
    shell = {"type": "local_shell_call", "call_id": "a", "action": {"command": ["ls"]}}
    items = [
        user("Hi") | {"type": None},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {"type": "mcp_list_tools", "id": "mcpl_1", "tools": []},
        shell,
        {"type": "local_shell_call_output", "id": "a", "output": "one.txt"},
        {"type": "shell_call", "call_id": "b", "action": {"commands": ["pwd"]}},
        {"type": "shell_call_output", "call_id": "b", "output": [{"stdout": "/home"}]},
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAAAABpM0Yj-of-another"},
        user("So?"),
    ]
    ask(served, items)
    text = prompt(served)
    assert '{"name": "local_shell", "arguments": {"command": ["ls"]}}' in text
    assert "one.txt" in text
    assert '[{"stdout": "/home"}]' in text
    assert UNREADABLE in text
    assert "web_search" not in text


def test_an_image_that_a_tool_returned_is_a_text_that_says_so(served: Served) -> None:
    image = [
        {"type": "input_image", "image_url": "data:,"},
        {"type": "input_text", "text": "x.png"},
    ]
    ask(served, [user("Hi"), called(), output("no") | {"output": image}, user("So?")])
    assert "[input_image: not shown, this model reads text only]\nx.png" in prompt(served)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    shown = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    messages = [
        user("Hi"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": shown},
    ]
    assert served.post({"model": MODEL, "messages": messages}).status_code == 200
    assert "[image_url: not shown, this model reads text only]" in prompt(served)


def test_a_stored_item_can_be_named(served: Served) -> None:
    first = ask(served, [user("The word is slate.")])
    said = first.output[0].id
    asked = served.http.get(f"{PATH}/{first.id}/input_items").json()["data"][0]["id"]
    named = [{"type": "item_reference", "id": asked}, {"id": said}, user("So?")]
    second = ask(served, named)
    text = prompt(served)
    assert "The word is slate." in text
    assert "assistant\n The capital of France is Paris.<|im_end|>" in text
    served.openai().responses.delete(first.id)
    ask(served, "Why?", previous_response_id=second.id)  # it has kept what was named
    assert "The word is slate." in prompt(served)


@pytest.mark.parametrize("item_id", ["msg_" + "0" * 32 + "_0", "item_0", "rs_x", 5])
def test_an_item_that_is_not_stored_is_a_404(served: Served, item_id: Any) -> None:
    response = post(served, [{"type": "item_reference", "id": item_id}])
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("item_not_found", "input")
    assert str(item_id) in error["message"]


def test_an_output_without_its_call_does_not_continue_anything(served: Served) -> None:
    first = ask(served)
    error = refused(served, [output("no", "call_x")], previous_response_id=first.id)
    assert error["message"] == "'input[0]': there is no call with id 'call_x' before its output"


def test_the_tokens_of_an_input_can_be_counted(served: Served) -> None:
    first = ask(served)
    for changes in ({}, {"previous_response_id": first.id}, {"instructions": "Be brief."}):
        made = ask(served, **changes)
        body = {"model": MODEL, "input": ASK} | changes
        counted = served.post(body, f"{PATH}/input_tokens").json()
        assert made.usage is not None
        assert counted == {
            "object": "response.input_tokens",
            "input_tokens": made.usage.input_tokens,
        }
