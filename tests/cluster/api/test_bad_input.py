"""Whatever is wrong with a request: OpenAI's error, the right status, and nothing submitted."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import msgspec
import pytest

from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.openai.schema import MAX_BRACKETS, CompletionRequest, parse
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.request import Refusal
from kvrelay.router.messages import Failed
from tests.cluster.api.conftest import MAX_MODEL_LEN, MODEL, Served

ASK = [{"role": "user", "content": "Hi"}]
HUGE = 10**400


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in response.text
    return error


WRONG_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
    ),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": HUGE}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"min_tokens": 10**9}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": HUGE}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"one": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"jason": {}}}, "structured_outputs"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"guided_regex": "a("}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": {"not": {}}}, "guided_json"),
    ({"model": 5}, "model"),
]


def test_wrong_chat_fields_are_named(served: Served) -> None:
    for change, param in WRONG_CHAT:
        response = served.post({"model": MODEL, "messages": ASK} | change)
        error = error_of(response, 400)
        assert (error["type"], error["param"]) == ("invalid_request_error", param), change
    assert served.router.submits == []


def test_a_wrong_value_is_shown_beside_what_would_be_right(served: Served) -> None:
    error = error_of(served.post({"model": MODEL, "messages": ASK, "temperature": 3.5}), 400)
    assert error["message"] == "'temperature': Input should be less than or equal to 2, got 3.5"


WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": [HUGE]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 2}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": 6}, "logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"max_tokens": -1}, "max_tokens"),
]


def test_wrong_completion_fields_are_named(served: Served) -> None:
    for change, param in WRONG_COMPLETIONS:
        body = {"model": MODEL, "prompt": "Hi"} | change
        error = error_of(served.post(body, "/v1/completions"), 400)
        assert error["param"] == param, change
    assert served.router.submits == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"model": "m",}',
        b"\xff\xfe\x00",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"[" * 50_000,
        b'{"messages": [{"role": "user", "content": "\xc3\x28"}]}',
        b'{"temperature": NaN, "model": "m", "messages": []}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bodies_that_are_no_request_are_a_400(served: Served, path: str, body: bytes) -> None:
    assert error_of(served.post(body, path), 400)["type"] == "invalid_request_error"


def test_a_body_of_nothing_but_brackets_is_refused_before_it_is_parsed() -> None:
    body = json.dumps({"model": MODEL, "prompt": [[5]] * (MAX_BRACKETS + 1)}).encode()
    with pytest.raises(ApiError, match="brackets") as caught:
        parse(CompletionRequest, body)
    assert caught.value.status == 400


def test_unknown_models_paths_and_methods(served: Served) -> None:
    error = error_of(served.post({"model": "gpt-9", "messages": ASK}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-9'" in error["message"]
    assert MODEL in error["message"]
    error_of(served.http.get("/v1/models/gpt-9"), 404)
    error_of(served.http.get("/v1/nothing"), 404)
    response = served.http.get("/v1/completions")
    assert "GET" in error_of(response, 405)["message"]
    assert response.headers["allow"] == "POST"
    assert response.headers["x-request-id"]
    error_of(served.http.post("/health"), 405)


def test_a_prompt_longer_than_the_context_names_both_numbers(
    served: Served, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode("word " * 2000)[:MAX_MODEL_LEN]
    error = error_of(served.post({"model": MODEL, "prompt": prompt}, "/v1/completions"), 400)
    assert error["code"] == "context_length_exceeded"
    assert f"is {MAX_MODEL_LEN} tokens, and the prompt has {MAX_MODEL_LEN}" in error["message"]
    long = [{"role": "user", "content": "word " * 2000}]
    assert error_of(served.post({"model": MODEL, "messages": long}), 400)["param"] == "messages"
    body = {"model": MODEL, "prompt": prompt[:-1], "max_tokens": 50}
    answer = served.post(body, "/v1/completions").json()
    assert answer["usage"]["completion_tokens"] == 1  # room for one


def test_messages_that_the_template_refuses(served: Served) -> None:
    served.ctx.tokenizer.chat_template, kept = None, served.ctx.tokenizer.chat_template
    try:
        error = error_of(served.post({"model": MODEL, "messages": ASK}), 400)
    finally:
        served.ctx.tokenizer.chat_template = kept
    assert "no chat template" in error["message"]


def test_a_body_above_the_limit_is_a_413(served: Served) -> None:
    limit = served.ctx.settings.max_body_bytes
    body = {"model": MODEL, "prompt": "x" * limit}
    error = error_of(served.post(body, "/v1/completions"), 413)
    assert str(limit) in error["message"]

    def chunks() -> Any:  # without a content-length
        for _ in range(20):
            yield b"x" * (limit // 16)

    response = served.http.post("/v1/completions", content=chunks())
    assert "content-length" not in response.request.headers
    error_of(response, 413)


def raw(served: Served, request: bytes) -> bytes:
    """Send bytes, return all that comes until the server closes."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
        sock.sendall(request)
        received = b""
        while part := sock.recv(65536):
            received += part
        return received


def test_a_huge_declared_length_is_refused_without_reading_it(served: Served) -> None:
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 99999999999\r\n\r\n"
    )
    head, body = raw(served, request).split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 413")
    assert json.loads(body)["error"]["code"] == "request_too_large"


def test_what_is_not_http_gets_a_400_and_a_closed_connection(served: Served) -> None:
    assert raw(served, b"\x00\x01 this is not HTTP\r\n\r\n").startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("reason", [Refusal.ATTEMPTS, Refusal.WORKER_FAILED, Refusal.UNKNOWN])
def test_what_failed_inside_is_logged_and_not_shown(
    served: Served, reason: Refusal, caplog: pytest.LogCaptureFixture
) -> None:
    served.router.refuse = Failed("", reason, "decode-3: OverflowError: int too big")
    response = served.post({"model": MODEL, "messages": ASK})
    assert error_of(response, 503)["code"] == reason.value
    assert "decode-3" not in response.text
    assert "OverflowError" not in response.text
    assert "decode-3: OverflowError: int too big" in caplog.text


@pytest.mark.parametrize("token", [-1, 49_152, 2**63, 2**64, 10**30])
def test_what_is_no_token_id_is_named_and_goes_nowhere(served: Served, token: int) -> None:
    assert served.ctx.tokenizer.vocab_size == 49_152
    for path, body, param in (
        ("/v1/completions", {"model": MODEL, "prompt": [5, token]}, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": "Hi"}, "stop_token_ids"),
        ("/v1/chat/completions", {"model": MODEL, "messages": ASK}, "stop_token_ids"),
        ("/detokenize", {"tokens": [5, token]}, "tokens"),
    ):
        change = {"stop_token_ids": [5, token]} if param == "stop_token_ids" else {}
        error = error_of(served.post(body | change, path), 400)
        assert error["param"] == param
        assert (
            f"{token} is not a token id, they are 0 to 49151: out of vocabulary" in error["message"]
        )
    biased = {"model": MODEL, "messages": ASK, "logit_bias": {str(token): 1}}
    error = error_of(served.post(biased), 400)
    assert (error["param"], str(token) in error["message"]) == ("logit_bias", True)
    assert served.router.submits == []


def test_no_number_of_a_request_is_too_large_for_the_wire(served: Served) -> None:
    for huge in (2**63, 2**64, 10**400):
        for name in ("max_tokens", "min_tokens", "seed", "top_k", "priority", "n"):
            body = {"model": MODEL, "prompt": "Hi", name: huge}
            response = served.post(body, "/v1/completions")
            assert response.status_code in (200, 400), (name, response.text)
    for submit in served.router.submits:
        msgspec.msgpack.encode(submit.sampling)


def test_every_reason_of_the_router_has_a_status(served: Served) -> None:
    for reason in Refusal:
        served.router.refuse = Failed("", reason, "")
        response = served.post({"model": MODEL, "messages": ASK})
        assert response.status_code in (400, 409, 429, 500, 503, 504)
        assert error_of(response, response.status_code)["code"] == reason.value
