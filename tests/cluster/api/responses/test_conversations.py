"""Responses that are kept: asked for again, continued, deleted, and seen by their tenant alone."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.responses.schema import _messages
from kvrelay.cluster.api.responses.store import ResponseStore
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import TenantEntry
from tests.cluster.api.conftest import ANSWER, MODEL, Served, serve
from tests.cluster.api.responses.asking import ASK, PATH, WEATHER, ask, post, refused, stream, user
from tests.cluster.api.tools.templates import CALL, SPOKEN, THOUGHT, prompt, says


def is_unknown(response: httpx.Response) -> bool:
    code = response.json()["error"]["code"] if response.status_code == 404 else None
    return bool(code == "response_not_found")


def is_lost(response: httpx.Response) -> bool:
    """Whether there is nothing to continue, in the words that clients look for."""
    error = response.json().get("error", {})
    found = (response.status_code, error.get("code"), error.get("param"))
    return found == (400, "previous_response_not_found", "previous_response_id")


def test_a_turn_begins_with_the_prompt_and_the_answer_before_it(served: Served) -> None:
    first = ask(served)
    second = ask(served, "And of Norway?", previous_response_id=first.id)
    third = ask(served, "And of Peru?", previous_response_id=second.id)
    assert third.previous_response_id == second.id
    encode = served.ctx.tokenizer.encode
    turns = [submit.tokens for submit in served.router.submits]
    for before, after, said in zip(turns, turns[1:], ("Norway", "Peru"), strict=False):
        new = f"<|im_end|>\n<|im_start|>user\nAnd of {said}?<|im_end|>\n<|im_start|>assistant\n"
        assert after == (*before, *encode(ANSWER), *encode(new))


def test_calls_and_reasoning_are_part_of_a_conversation(thinking: Served) -> None:
    words = f"<think>\n{THOUGHT}\n</think>\n\n{SPOKEN}\n{CALL}"
    says(thinking, words, "No.")
    first = ask(thinking, tools=[WEATHER])
    call = first.output[-1]
    assert call.type == "function_call"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    ask(thinking, [output], tools=[WEATHER], previous_response_id=first.id)
    one, two = (submit.tokens for submit in thinking.router.submits)
    new = "<|im_end|>\n<|im_start|>tool\ndry<|im_end|>\n<|im_start|>assistant\n"
    encode = thinking.ctx.tokenizer.encode
    assert two == (*one, *encode(words), *encode(new))


def test_a_stream_and_a_cut_answer_can_be_continued(served: Served) -> None:
    first = stream(served, max_output_tokens=3)[-1]["response"]
    assert first["status"] == "incomplete"
    ask(served, "Go on.", previous_response_id=first["id"])
    assert "assistant\n The capital of<|im_end|>\n<|im_start|>user\nGo on." in prompt(served)


def test_instructions_are_not_carried_over(served: Served) -> None:
    first = ask(served, instructions="Be brief.")
    ask(served, "Why?", previous_response_id=first.id)
    assert "Be brief." not in prompt(served)
    ask(served, "Why?", previous_response_id=first.id, instructions="Be kind.")
    assert prompt(served).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n")


def test_a_conversation_is_one_session(served: Served) -> None:
    first = ask(served)
    second = ask(served, "Why?", previous_response_id=first.id)
    ask(served, "Why?", previous_response_id=second.id)
    ask(served, "Why?", previous_response_id=second.id, prompt_cache_key="mine")
    ask(served, "Why?", previous_response_id=second.id, store=False)
    sessions = [submit.session for submit in served.router.submits]
    assert sessions == [first.id, first.id, first.id, "mine", None]


def test_one_answer_may_have_several_continuations(served: Served) -> None:
    first = ask(served)
    for said in ("And of Norway?", "And of Peru?"):
        ask(served, said, previous_response_id=first.id)
        assert prompt(served).count("<|im_start|>user") == 2
        assert said in prompt(served)


def test_a_response_can_be_asked_for_again(thinking: Served) -> None:
    says(thinking, f"<think>\n{THOUGHT}\n</think>\n\n{CALL}")
    client = thinking.openai()
    made = ask(thinking, tools=[WEATHER], metadata={"a": "b"})
    assert client.responses.retrieve(made.id) == made
    streamed = stream(thinking)[-1]["response"]
    assert thinking.http.get(f"{PATH}/{streamed['id']}").json() == streamed


def test_what_is_not_to_be_kept_is_not(served: Served) -> None:
    answers = [ask(served, store=False).to_dict(), stream(served, store=False)[-1]["response"]]
    for answer in answers:
        assert answer["store"] is False
        assert is_unknown(served.http.get(f"{PATH}/{answer['id']}"))
        assert is_lost(post(served, previous_response_id=answer["id"]))


def test_a_response_that_is_deleted_is_gone(served: Served) -> None:
    client = served.openai()
    first = ask(served)
    second = ask(served, "Why?", previous_response_id=first.id)
    deleted = served.http.delete(f"{PATH}/{first.id}")
    assert deleted.json() == {"id": first.id, "object": "response", "deleted": True}
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match=first.id):
            call(first.id)
    assert is_unknown(served.http.get(f"{PATH}/{first.id}/input_items"))
    assert is_lost(post(served, previous_response_id=second.id))


def test_input_items_are_those_of_the_request(served: Served) -> None:
    first = ask(served, "Hi")
    parts = [{"type": "input_text", "text": "Why?"}]
    items = [
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "id": "mine"},
        user("So?"),
        user("Why?") | {"content": parts},
    ]
    second = ask(served, items, previous_response_id=first.id)
    client = served.openai()
    (hi,) = client.responses.input_items.list(first.id)
    assert hi.to_dict() == {
        "id": f"item_{first.id.removeprefix('resp_')}_0",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "Hi"}],
    }
    listed = list(client.responses.input_items.list(second.id))
    name = f"item_{second.id.removeprefix('resp_')}"
    assert [item.id for item in listed] == [f"{name}_2", f"{name}_1", "mine"]
    page = served.http.get(f"{PATH}/{second.id}/input_items?order=asc").json()
    assert [item["id"] for item in page["data"]] == ["mine", f"{name}_1", f"{name}_2"]
    assert (page["object"], page["first_id"], page["last_id"]) == ("list", "mine", f"{name}_2")
    assert page["data"][2]["content"] == parts


def test_a_response_that_nobody_made_is_a_404(served: Served) -> None:
    for name in ("resp_0", "x" * 5000, "%20"):
        assert is_unknown(served.http.get(f"{PATH}/{name}"))
        assert is_unknown(served.http.delete(f"{PATH}/{name}"))
        assert is_unknown(served.http.post(f"{PATH}/{name}/cancel"))
        assert is_unknown(served.http.get(f"{PATH}/{name}/input_items"))
    assert is_lost(post(served, previous_response_id="resp_0"))
    assert refused(served, previous_response_id=5)["param"] == "previous_response_id"


def test_a_conversation_that_is_too_long_is_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.cluster.api.responses.call.MAX_TURNS", 2)
    made = ask(served)
    for _ in range(2):
        made = ask(served, "Why?", previous_response_id=made.id)
    error = refused(served, "Why?", previous_response_id=made.id)
    assert error["message"].startswith("A conversation has at most 2 turns")


class FullStore(ResponseStore):
    """Of a disk that is full."""

    def put(self, tenant: str, response_id: str, record: bytes) -> None:
        raise sqlite3.OperationalError("database or disk is full")


def test_an_answer_comes_even_if_it_cannot_be_kept(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.ctx, "responses", FullStore())
    answers = [ask(served).to_dict(), stream(served)[-1]["response"]]
    for answer in answers:
        assert (answer["status"], answer["store"]) == ("completed", False)
        (warning,) = answer["warnings"]
        assert warning["code"] == "not_stored"
        assert "database or disk is full" in warning["message"]
        assert answer["output"][0]["content"][0]["text"] == ANSWER
    monkeypatch.setattr(served.router, "delay_s", 0.2)  # it is not answered before it is cancelled
    response = post(served, background=True)
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert message.startswith("Responses cannot be stored now: ")
    assert "database or disk is full" in message
    served.wait_idle()
    assert [submit.request_id for submit in served.router.submits[2:]] == served.router.cancels


@pytest.fixture(scope="module")
def guarded(tokenizer: Tokenizer) -> Iterator[Served]:
    entries = (TenantEntry("red", keys=("red-key",)), TenantEntry("blue", keys=("blue-key",)))
    context = {"tenants": Tenants.of(entries, b"a secret")}
    with serve(tokenizer, ApiSettings(), context=context) as served:
        yield served


def call(served: Served, key: str, method: str, path: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return served.http.request(method, f"{PATH}{path}", json=body or None, headers=headers)


def test_a_response_is_its_tenants_alone(guarded: Served) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": ASK}
    made = call(guarded, "red-key", "POST", "", **body).json()["id"]
    ways = [
        ("GET", f"/{made}", {}),
        ("DELETE", f"/{made}", {}),
        ("POST", f"/{made}/cancel", {}),
        ("GET", f"/{made}/input_items", {}),
    ]
    on = body | {"previous_response_id": made}
    assert is_lost(call(guarded, "blue-key", "POST", "", **on))
    assert call(guarded, "red-key", "POST", "", **on).status_code == 200
    for method, path, sent in ways:
        assert is_unknown(call(guarded, "blue-key", method, path, **sent)), path
    for method, path, sent in (ways[0], ways[3], ways[1]):
        assert call(guarded, "red-key", method, path, **sent).status_code == 200, path


def test_without_a_key_every_call_is_a_401(guarded: Served) -> None:
    made = call(guarded, "red-key", "POST", "", model=MODEL, input=ASK).json()["id"]
    for key in ("", "green-key"):
        for method, path in (
            ("POST", ""),
            ("GET", f"/{made}"),
            ("DELETE", f"/{made}"),
            ("POST", f"/{made}/cancel"),
            ("GET", f"/{made}/input_items"),
        ):
            response = call(guarded, key, method, path)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"


def test_a_conversation_is_read_back_as_far_as_a_body_may_be_long(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ask(served, "First " * 50)
    for _ in range(3):
        made = ask(served, "Why? " * 20, previous_response_id=made.id)
    settings = structs.replace(served.ctx.settings, max_body_bytes=4000)
    monkeypatch.setattr(served.ctx, "settings", settings)
    error = refused(served, "So?", previous_response_id=made.id)
    assert error["param"] == "previous_response_id"
    assert "turns that are read back, and 4000 bytes" in error["message"]
    assert served.ctx.bodies.num_taken == 0


def test_what_is_read_back_counts_among_bodies(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ask(served)
    monkeypatch.setattr(served.ctx.bodies, "limit", 100)
    response = post(served, "Why?", previous_response_id=made.id)
    assert response.status_code == 429
    assert response.json()["error"]["message"] == "The bodies of other requests take all memory"


def test_items_become_messages_in_time_that_grows_with_them() -> None:
    said = {"type": "message", "role": "assistant", "content": "x" * 120}
    thought = {"type": "reasoning", "content": [{"text": "y" * 120}]}
    items = [*[said, thought] * 40_000]
    began = time.process_time()
    (message,) = _messages(items, 0)
    assert time.process_time() - began < 2.0  # a fifth of that; it was more than ten seconds
    assert message.content == "x" * 120 * 40_000
    assert (message.reasoning_content or "").startswith("y" * 120 + "\n" + "y" * 120 + "\n")
