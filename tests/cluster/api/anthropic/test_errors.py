"""What is wrong with a message, or goes wrong: Anthropic's errors."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import TenantEntry
from tests.cluster.api.anthropic.claude import ASK, WEATHER, ask, client, post, shape
from tests.cluster.api.conftest import MAX_MODEL_LEN, MODEL, Served, serve, wait_until
from tests.cluster.api.tools.templates import events_of

PATHS = ["/v1/messages", "/v1/messages/count_tokens"]


def error_of(response: httpx.Response, status: int) -> tuple[str, str]:
    """Type and message of an error of Anthropic's form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert (set(body), body["type"]) == ({"type", "error"}, "error")
    assert set(body["error"]) == {"type", "message"}
    return body["error"]["type"], body["error"]["message"]


def blocks(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [*ASK, {"role": role, "content": list(content)}]}


IMAGE = {"type": "image", "source": {"type": "base64", "data": "", "media_type": "image/png"}}
HELLO = {"type": "text", "text": "Hello"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "'messages': "),
    ({"messages": [5]}, "'messages[0]': "),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "'messages[0].role': "),
    ({"messages": [{"role": "user"}]}, "'messages[0].content' is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "'messages[0].content': "),
    (blocks(HELLO, {"text": "Hi"}), "'messages[1].content[1].type' is missing"),
    (blocks({"type": "text", "text": 5}), "'messages[1].content[0].text': "),
    (blocks({"type": "text"}), "'messages[1].content[0]': this model reads text"),
    (blocks(HELLO, IMAGE), "'messages': this model reads text, no part of type 'image'"),
    (blocks(HELLO, {"type": "image"}), "'messages[1]': part 1: an image has a 'source' of type"),
    (blocks(HELLO, IMAGE, role="assistant"), "'messages[1].content[1]': this model reads text"),
    (blocks({"type": "tool_result"}), "'messages[1].content[0]': a tool_result has"),
    (
        blocks({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "audio"}]}),
        "'messages[1].content[0]': this model reads text, no content of type 'audio'",
    ),
    (
        blocks({"type": "tool_result", "tool_use_id": "a", "content": 5}),
        "'messages[1].content[0]': the content of a tool_result is",
    ),
    (
        blocks(HELLO, {"type": "tool_use", "name": "weather", "input": {}}, role="assistant"),
        "'messages[1].content[1]': a tool_use has",
    ),
    (
        blocks({"type": "tool_use", "id": "a", "name": "b", "input": "{}"}, role="assistant"),
        "'messages[1].content[0].input': ",
    ),
    ({"system": [HELLO, IMAGE]}, "'system[1]': this model reads text"),
    ({"system": 5}, "'system': "),
    ({"max_tokens": 0}, "'max_tokens': "),
    ({"temperature": 1.5}, "'temperature': "),
    ({"stop_sequences": [""]}, "'stop_sequences[0]': "),
    ({"stop_sequences": ["a"] * 65}, "'stop_sequences': "),
    (
        {"tools": [{**WEATHER, "type": "bash_20250124"}]},
        "'tools[0]': tool 'weather': tools of type",
    ),
    ({"tools": [WEATHER, WEATHER]}, "'tools': two tools are called 'weather'"),
    ({"tools": [{"input_schema": {}}]}, "'tools[0].name' is missing"),
    ({"tools": [WEATHER, {"name": "a b"}]}, "'tools[1].name': "),
    ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "'thinking.budget_tokens': "),
]


def test_what_is_wrong_is_named_with_its_place(served: Served) -> None:
    for changes, said in WRONG:
        kind, message = error_of(post(served, **changes), 400)
        assert kind == "invalid_request_error"
        assert message.startswith(said), (changes, message)
    assert served.router.submits == []


def test_counting_names_what_is_wrong_too(served: Served) -> None:
    for changes, said in WRONG:
        if "max_tokens" not in changes:
            _, message = error_of(post(served, PATHS[1], **changes), 400)
            assert message.startswith(said), (changes, message)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"model": "\\ud800"}'])
def test_bodies_that_are_no_request(served: Served, path: str, body: bytes) -> None:
    assert error_of(served.post(body, path), 400)[0] == "invalid_request_error"


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_model_is_a_404(served: Served, path: str) -> None:
    kind, message = error_of(post(served, path, model="claude-9"), 404)
    assert kind == "not_found_error"
    assert "'claude-9' does not exist" in message
    with pytest.raises(anthropic.NotFoundError, match="claude-9"):
        ask(served, model="claude-9")


def test_a_prompt_that_is_too_long_names_both_numbers(served: Served) -> None:
    long = [{"role": "user", "content": "word " * 2000}]
    kind, message = error_of(post(served, messages=long), 400)
    assert kind == "invalid_request_error"
    assert f"is {MAX_MODEL_LEN} tokens" in message
    counted = post(served, PATHS[1], messages=long).json()["input_tokens"]
    assert f"the prompt has {counted}" in message


def test_a_failure_in_mid_stream_is_an_event_that_ends_it(served: Served) -> None:
    served.router.fail_after = 3
    response = post(served, stream=True)
    assert response.status_code == 200
    events = events_of(response.text)
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    types = shape([data for _, data in events])
    assert types == ["message_start", "ping", "start 0", "text_delta 0", "error"]
    all_failed = "All attempts at this request have failed; the server's log says why"
    error = {"type": "overloaded_error", "message": all_failed}
    assert events[-1] == ("error", {"type": "error", "error": error})
    opened = client(served).messages.stream(model=MODEL, max_tokens=50, messages=ASK)
    with pytest.raises(anthropic.APIStatusError, match="have failed"), opened as stream:
        stream.until_done()
    assert error_of(post(served), 503)[0] == "overloaded_error"


@pytest.fixture(scope="module")
def guarded(tokenizer: Tokenizer) -> Iterator[Served]:
    entries = (TenantEntry("red", keys=("red-key",)), TenantEntry("blue", keys=("blue-key",)))
    context = {"tenants": Tenants.of(entries, b"a secret")}
    limits = ApiSettings(max_live_requests=1, body_timeout_s=0.2)
    with serve(tokenizer, limits, context=context) as served:
        yield served


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", [{}, {"x-api-key": ""}, {"x-api-key": "green-key"}])
def test_without_a_key_of_this_server_it_is_a_401(
    guarded: Served, path: str, headers: dict[str, str]
) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": ASK}
    response = guarded.http.post(path, json=body, headers=headers)
    assert error_of(response, 401)[0] == "authentication_error"
    assert "green" not in response.text
    with pytest.raises(anthropic.AuthenticationError):
        client(guarded, "green-key").messages.create(**body)


def test_the_api_key_says_whose_request_it_is(guarded: Served) -> None:
    body: Any = {"model": MODEL, "max_tokens": 9, "messages": ASK}
    for key in ("red", "blue"):
        client(guarded, f"{key}-key").messages.create(**body)
        assert guarded.router.submits[-1].tenant == key
    bearer = anthropic.Anthropic(base_url=guarded.url, auth_token="blue-key", max_retries=0)
    assert bearer.messages.count_tokens(model=MODEL, messages=ASK).input_tokens > 0


def raw(served: Served, path: str) -> socket.socket:
    """A call whose body does not come."""
    sock = socket.create_connection(("127.0.0.1", served.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: red-key\r\n"
    head += "Content-Length: 99\r\n\r\n"
    sock.sendall(head.encode() + b"{")
    return sock


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_does_not_come_is_a_408(guarded: Served, path: str) -> None:
    with raw(guarded, path) as sock:
        received = b"".join(iter(lambda: sock.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 408")
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_goes_away_while_it_sends_is_no_failure(
    served: Served, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        raw(served, path).close()
        for _ in range(20):  # later than what the call does in the server's loop
            assert served.http.get("/health").status_code == 200
    assert caplog.records == []


def test_more_requests_than_the_limit_are_a_429(guarded: Served) -> None:
    kept, guarded.router.delay_s = guarded.router.delay_s, 60
    num_before = len(guarded.router.submits)
    body = json.dumps({"model": MODEL, "max_tokens": 9, "messages": ASK}).encode()
    head = f"POST {PATHS[0]} HTTP/1.1\r\nHost: localhost\r\nx-api-key: red-key\r\n"
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=20) as waiting:
        waiting.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: len(guarded.router.submits) == num_before + 1)
        response = guarded.http.post(PATHS[0], content=body, headers={"x-api-key": "red-key"})
        assert error_of(response, 429)[0] == "rate_limit_error"
        assert int(response.headers["retry-after"]) >= 1
    guarded.wait_idle()
    guarded.router.delay_s = kept


@pytest.mark.parametrize("path", PATHS)
def test_errors_of_the_server_have_anthropics_form_too(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error_of(served.http.get(path), 405)[0] == "invalid_request_error"
    assert error_of(served.http.post(f"{path}/nowhere"), 404)[0] == "not_found_error"
    too_much = b"x" * (served.ctx.settings.max_body_bytes + 1)
    assert error_of(served.post(too_much, path), 413)[0] == "request_too_large"

    def fail(*_: Any) -> None:
        raise RuntimeError("what is inside")

    monkeypatch.setattr(served.ctx.tokenizer, "chat_prompt", fail)
    body = {"model": MODEL, "max_tokens": 9, "messages": ASK}
    response = served.http.post(path, json=body)
    assert error_of(response, 500)[0] == "api_error"
    assert "what is inside" not in response.text
