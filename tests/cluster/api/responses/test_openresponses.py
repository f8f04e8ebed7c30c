"""The 17 cases by which the open specification of the responses API tests a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from jsonschema import ValidationError, validate
from websockets.sync.client import connect

from tests.cluster.api.conftest import MODEL, Served
from tests.cluster.api.responses.asking import PATH, stream
from tests.cluster.api.responses.openresponses import (
    COMPACTED,
    ERROR_EVENT,
    EVENT,
    RESPONSE,
    check,
)
from tests.cluster.api.tools.templates import says

Json = dict[str, Any]
PIXEL = "data:image/png;base64,iVBORw0KGgo="
TOOL: Json = {
    "type": "function",
    "name": "get_weather",
    "description": "Says how the weather is.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string"}},
        "required": ["location"],
    },
}
ENDS = ("response.completed", "response.failed", "response.incomplete", "error")


def message(role: str, content: Any, **fields: Any) -> Json:
    return {"type": "message", "role": role, "content": content, **fields}


def completed(response: Json) -> Json:
    check(RESPONSE, response)
    assert response["status"] == "completed"
    assert isinstance(response["completed_at"], int)
    assert response["output"]
    return response


def created(served: Served, given: Any, **fields: Any) -> Json:
    """A response over HTTP."""
    answer = served.post({"model": MODEL, "input": given} | fields, PATH)
    assert answer.status_code == 200, answer.text
    return completed(answer.json())


def turns(served: Served, *asked: Json | Callable[[list[list[Json]]], Json]) -> list[list[Json]]:
    """The events of responses on one WebSocket. asked: bodies, or what makes one of the turns
    before."""
    made: list[list[Json]] = []
    with connect(f"ws://127.0.0.1:{served.port}{PATH}", close_timeout=5) as socket:
        for each in asked:
            body = each if isinstance(each, dict) else each(made)
            socket.send(json.dumps({"type": "response.create", "model": MODEL} | body))
            made.append([])
            while not (made[-1] and made[-1][-1]["type"] in ENDS):
                made[-1].append(json.loads(socket.recv(timeout=20)))
                check(ERROR_EVENT if made[-1][-1]["type"] == "error" else EVENT, made[-1][-1])
    return made


def ended(events: list[Json]) -> Json:
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(events)))
    return completed(events[-1]["response"])


def code(events: list[Json]) -> str:
    assert events[-1]["status"] == 400
    found: str = events[-1]["error"]["code"]
    return found


def first_id(made: list[list[Json]]) -> str:
    found: str = made[0][-1]["response"]["id"]
    return found


def test_basic_response(served: Served) -> None:
    created(served, [message("user", "Say hello in exactly 3 words.")])


def test_assistant_phase(served: Served) -> None:
    history = [
        message("assistant", "I should look it up.", phase="commentary"),
        message("assistant", "It is four.", phase="final_answer"),
        message("user", "Only the number."),
    ]
    created(served, history)


def test_response_output_phase_schema(served: Served) -> None:
    """An answer with a phase would be in order, one with a wrong phase not."""
    response = created(served, "Hi")
    (said,) = response["output"]
    check(RESPONSE, response | {"output": [said | {"phase": "final_answer"}]})
    with pytest.raises(ValidationError):
        validate(response | {"output": [said | {"phase": "x"}]}, RESPONSE)


def test_streaming_response(served: Served) -> None:
    events = stream(served, [message("user", "Count from 1 to 5.")])
    for event in events:
        check(EVENT, event)
    completed(events[-1]["response"])


def test_websocket_response(served: Served) -> None:
    (events,) = turns(served, {"input": [message("user", "Count from 1 to 3.")]})
    response = ended(events)
    kept = served.http.get(f"{PATH}/{response['id']}")
    assert kept.json() == response


def test_websocket_sequential_responses(served: Served) -> None:
    asked = [{"store": False, "input": text} for text in ("first", "second")]
    first, second = (ended(events) for events in turns(served, *asked))
    assert first["id"] != second["id"]


def test_websocket_continuation(served: Served) -> None:
    def on(made: list[list[Json]]) -> Json:
        return {"store": False, "previous_response_id": first_id(made), "input": "Which word?"}

    first, second = turns(served, {"store": False, "input": "The word is cobalt."}, on)
    assert ended(second)["previous_response_id"] == ended(first)["id"]
    prompt = served.ctx.tokenizer.decode(served.router.submits[-1].tokens)
    assert "cobalt" in prompt
    assert "Paris" in prompt
    assert served.http.get(f"{PATH}/{first[-1]['response']['id']}").status_code == 404


def test_websocket_reconnect_store_false_recovery(served: Served) -> None:
    (first,) = turns(served, {"store": False, "input": "The word is copper."})
    previous = ended(first)["id"]
    lost, recovered = turns(
        served,
        {"store": False, "previous_response_id": previous, "input": "Go on."},
        {"store": False, "input": [message("user", "Begin again.")]},
    )
    assert code(lost) == "previous_response_not_found"
    ended(recovered)


def test_websocket_previous_response_not_found(served: Served) -> None:
    (events,) = turns(served, {"store": False, "previous_response_id": "resp_x", "input": "Hi"})
    assert code(events) == "previous_response_not_found"
    assert events[-1]["error"]["param"] == "previous_response_id"


def test_websocket_failed_continuation_evicts_cache(served: Served) -> None:
    dangling = {"type": "function_call_output", "call_id": "call_missing", "output": "?"}

    def on(given: Any) -> Callable[[list[list[Json]]], Json]:
        def body(made: list[list[Json]]) -> Json:
            return {"store": False, "previous_response_id": first_id(made), "input": given}

        return body

    first, failed, stale = turns(
        served, {"store": False, "input": "The word is ember."}, on([dangling]), on("Go on.")
    )
    ended(first)
    assert "call_missing" in failed[-1]["error"]["message"]
    assert code(stale) == "previous_response_not_found"


def compacted(served: Served, given: list[Json], **fields: Any) -> httpx.Response:
    return served.post({"model": MODEL, "input": given} | fields, f"{PATH}/compact")


def test_websocket_compact_new_chain(served: Served) -> None:
    history = [
        message("user", [{"type": "input_text", "text": "The word is slate."}]),
        message("assistant", [{"type": "output_text", "text": "OK."}]),
        message("user", [{"type": "input_text", "text": "Compress this."}]),
    ]
    output = compacted(served, history).json()["output"]
    given = [*output, message("user", "Go on.")]
    (events,) = turns(served, {"store": False, "input": given, "tools": []})
    ended(events)
    prompt = served.ctx.tokenizer.decode(served.router.submits[-1].tokens)
    assert "The word is slate." in prompt
    assert "Summary of the conversation so far:\n\nThe capital of France is Paris." in prompt


def test_system_prompt(served: Served) -> None:
    created(served, [message("system", "You are a pirate."), message("user", "Say hello.")])


def test_tool_calling(served: Served) -> None:
    says(
        served,
        '<tool_call>\n{"name": "get_weather", "arguments": {"location": "SF"}}\n</tool_call>',
    )
    response = created(served, [message("user", "How is the weather?")], tools=[TOOL])
    assert [item["type"] for item in response["output"]] == ["function_call"]


def test_image_input(served: Served) -> None:
    image = {"type": "input_image", "image_url": PIXEL}
    created(served, [message("user", [{"type": "input_text", "text": "What is it?"}, image])])
    prompt = served.ctx.tokenizer.decode(served.router.submits[-1].tokens)
    assert "[input_image: not shown, this model reads text only]" in prompt


def test_multi_turn(served: Served) -> None:
    history = [
        message("user", "My name is Alice."),
        message("assistant", "Hello Alice!"),
        message("user", "What is my name?"),
    ]
    created(served, history)


def test_compact_response(served: Served) -> None:
    history = [message("user", "We launch on Tuesday."), message("assistant", "Understood.")]
    answer = compacted(served, history, prompt_cache_key="a-key")
    assert answer.status_code == 200, answer.text
    check(COMPACTED, answer.json())
    assert [item["type"] for item in answer.json()["output"]] == ["message", "compaction"]


def test_a_compaction_is_made_as_it_is_asked_for(served: Served) -> None:
    name = served.post({"items": [message("user", "We launch soon.")]}, "/v1/conversations").json()
    how = {"cache_salt": "red", "seed": 5, "max_output_tokens": 30, "conversation": name["id"]}
    answer = compacted(served, [], **how)
    assert answer.status_code == 200, answer.text
    salted = served.router.submits[-1]
    assert compacted(served, []).status_code == 200
    assert "We launch soon." in served.ctx.tokenizer.decode(salted.tokens)
    assert (salted.sampling.seed, salted.sampling.max_tokens) == (5, 30)
    assert salted.scope != served.router.submits[-1].scope
    listed = served.http.get(f"/v1/conversations/{name['id']}/items").json()["data"]
    assert len(listed) == 1  # a summary is not a part of it


def test_compact_missing_model(served: Served) -> None:
    answer = served.post({"input": [message("user", "Compact this.")]}, f"{PATH}/compact")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"
