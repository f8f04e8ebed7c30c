"""Clients that go away, that do not read, and answers that break off."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.http.connection import ConnectionLimits
from kvrelay.cluster.api.limiter import ConcurrencyLimiter
from kvrelay.cluster.api.listening import bind_socket
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from tests.cluster.api.conftest import MAX_MODEL_LEN, MODEL, Served, serve, wait_until

ASK: list[Any] = [{"role": "user", "content": "Hi"}]


def body(**changes: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": ASK} | changes).encode()


def raw_post(served: Served, content: bytes, **options: Any) -> socket.socket:
    """A request of which nobody has read the answer yet."""
    sock = socket.socket()
    for option, value in options.items():
        sock.setsockopt(socket.SOL_SOCKET, getattr(socket, option), value)
    sock.connect(("127.0.0.1", served.port))
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    sock.sendall(head.encode() + content)
    return sock


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_all_its_choices(
    served: Served, tokenizer: Tokenizer, stream: bool
) -> None:
    served.router.answer = lambda submit: tokenizer.encode("word " * 400)
    served.router.delay_s = 0.05
    sock = raw_post(served, body(n=2, stream=stream))
    wait_until(lambda: len(served.router.submits) == 2)
    if stream:
        assert b"200 OK" in sock.recv(4096)
    sock.close()
    wait_until(lambda: len(served.router.cancels) == 2)
    assert set(served.router.cancels) == {s.request_id for s in served.router.submits}
    served.wait_idle()


def test_a_client_that_goes_away_before_the_first_token_cancels(served: Served) -> None:
    served.router.delay_s = 30
    sock = raw_post(served, body(stream=True))
    wait_until(lambda: len(served.router.submits) == 1)
    sock.close()
    wait_until(lambda: len(served.router.cancels) == 1)


def test_the_openai_client_closes_its_stream_and_the_request_is_cancelled(
    served: Served, tokenizer: Tokenizer
) -> None:
    served.router.answer = lambda submit: tokenizer.encode("word " * 400)
    served.router.delay_s = 0.02
    stream = served.openai().chat.completions.create(model=MODEL, messages=ASK, stream=True)
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    stream.close()
    wait_until(lambda: len(served.router.cancels) == 1)


def test_a_failure_in_mid_stream_is_an_event_and_ends_the_stream(served: Served) -> None:
    served.router.fail_after = 3
    response = served.post({"model": MODEL, "messages": ASK, "stream": True})
    assert response.status_code == 200
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert "[DONE]" not in events
    assert json.loads(events[-1])["error"]["code"] == "attempts_exhausted"
    assert len(events) > 3
    with pytest.raises(openai.APIError, match="have failed"):
        list(served.openai().chat.completions.create(model=MODEL, messages=ASK, stream=True))


def test_one_failed_choice_cancels_the_others(served: Served, tokenizer: Tokenizer) -> None:
    served.router.answer = lambda submit: tokenizer.encode("word " * 10)
    served.router.fail_after = 3
    served.router.delay_s = 0.01
    response = served.post({"model": MODEL, "messages": ASK, "n": 3})
    assert response.status_code == 503
    served.wait_idle()
    assert len(served.router.submits) == 3


@pytest.fixture
def impatient(tokenizer: Tokenizer) -> Iterator[Served]:
    """Short limits, and small socket buffers."""
    limits = ApiSettings(max_live_requests=3, body_timeout_s=0.3)
    sock = bind_socket("127.0.0.1", 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    with serve(
        tokenizer, limits, sock, connections=ConnectionLimits(write_timeout_s=0.3)
    ) as running:
        yield running
        running.wait_idle()


def test_a_client_that_reads_nothing_is_cut_off(impatient: Served, tokenizer: Tokenizer) -> None:
    impatient.router.answer = lambda submit: tokenizer.encode("word " * 600)
    impatient.router.per_output = 16
    content = body(stream=True, logprobs=True, top_logprobs=20, max_tokens=MAX_MODEL_LEN)
    sock = raw_post(impatient, content, SO_RCVBUF=4096)
    wait_until(lambda: len(impatient.router.submits) == 1)
    impatient.wait_idle()  # a bounded wait, and nothing is left of it
    received = 0
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            received += len(part)
    assert 0 < received < 500_000  # the answer has more than a million bytes


def test_a_slow_reader_stalls_no_one_else(served: Served, tokenizer: Tokenizer) -> None:
    served.router.answer = lambda submit: tokenizer.encode("word " * 400)
    slow = raw_post(served, body(stream=True, logprobs=True, top_logprobs=20), SO_RCVBUF=4096)
    wait_until(lambda: len(served.router.submits) == 1)
    for _ in range(3):
        assert served.post({"model": MODEL, "messages": ASK, "max_tokens": 5}).status_code == 200
    received = b""
    while b"data: [DONE]" not in received:
        received += slow.recv(65536)
    slow.close()
    assert received.count(b"chat.completion.chunk") > 3


@pytest.mark.slow
def test_a_request_that_nobody_answers_ends_at_its_deadline(tokenizer: Tokenizer) -> None:
    with serve(tokenizer, ApiSettings(request_timeout_s=0.2)) as served:
        served.router.delay_s = 60
        response = served.post({"model": MODEL, "messages": ASK})
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert served.router.cancels == [served.router.submits[0].request_id]
        assert 0.0 < served.router.submits[0].timeout_s < 0.2
        served.wait_idle()


def test_a_body_that_does_not_come_is_a_408(impatient: Served) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=20) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        received = b"".join(iter(lambda: sock.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in received


def test_more_requests_than_the_limit_are_a_429(impatient: Served) -> None:
    impatient.router.delay_s = 60
    clock = [100.0]
    impatient.ctx.live = ConcurrencyLimiter(3, lambda: clock[0])
    waiting = [raw_post(impatient, body()) for _ in range(2)]
    wait_until(lambda: len(impatient.router.submits) == 2)
    told = []
    for clock[0] in (100.0, 134.0, 134.0):
        response = impatient.post({"model": MODEL, "messages": ASK})
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_full"
        told.append(response.headers["retry-after"])
    assert told == ["1", "12", "23"]  # two of three, that have been there for 34 s
    for sock in waiting:
        sock.close()


def test_tokenising_a_long_prompt_does_not_hold_up_others(tokenizer: Tokenizer) -> None:
    """While a prompt of megabytes is tokenised, health is answered: the loop is free."""
    long = json.dumps({"model": MODEL, "prompt": "Some words of a prompt. " * 80_000}).encode()
    answered_during = 0
    with serve(tokenizer, ApiSettings()) as served:
        served.ctx.max_model_len = 200_000  # of which it fills two: it is counted to its end
        done = threading.Event()

        def post() -> None:
            response = served.post(long, "/v1/completions")
            assert response.json()["error"]["code"] == "context_length_exceeded"
            done.set()

        thread = threading.Thread(target=post)
        thread.start()
        with httpx.Client(base_url=served.url, timeout=20) as other:
            wait_until(lambda: served.ctx.live.num_taken == 1 or done.is_set())
            while not done.is_set():
                other.get("/health")
                answered_during += not done.is_set()
                time.sleep(0.001)
        thread.join()
    assert answered_during >= 10


APIS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
]


@pytest.fixture(scope="module")
def lively(tokenizer: Tokenizer) -> Iterator[Served]:
    """No stream of it is silent for 0.2 s."""
    with serve(tokenizer, ApiSettings(keepalive_s=0.2)) as served:
        yield served


def timed(served: Served, path: str, body: dict[str, Any]) -> tuple[float, str, float]:
    """When the headers came, what came, and the longest silence."""
    began = last = time.monotonic()
    longest, text = 0.0, ""
    body = {"model": MODEL, "stream": True} | body
    with served.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        headers_s = time.monotonic() - began
        for part in response.iter_text():
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            text += part
    return headers_s, text, longest


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), APIS)
def test_a_stream_shows_life_before_its_first_token_and_between_others(
    lively: Served, path: str, body: dict[str, Any]
) -> None:
    lively.router.delay_s, lively.router.per_output = 0.7, 5
    headers_s, text, longest = timed(lively, path, body)
    assert headers_s < 0.5
    assert longest < 0.5
    before, found, after = text.partition("data: ")
    assert before.startswith(": alive\n\n")
    assert found
    assert ('{"type":"ping"}' if path == "/v1/messages" else ": alive\n\n") in after
    assert "Paris" in after


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), APIS)
def test_a_late_refusal_is_an_event(lively: Served, path: str, body: dict[str, Any]) -> None:
    limits = lively.ctx.settings
    lively.ctx.settings = ApiSettings(keepalive_s=0.2, request_timeout_s=0.4)
    lively.router.delay_s = 60
    try:
        _, text, _ = timed(lively, path, body)
    finally:
        lively.ctx.settings = limits
    *_, last = [line for line in text.splitlines() if line.startswith("data: ")]
    error = json.loads(last.removeprefix("data: "))
    error = error.get("response", error)["error"]
    assert "not done in" in error["message"]
    if path == "/v1/responses":
        assert "event: response.created" in text


@pytest.mark.slow
def test_sdks_read_streams_with_signs_of_life(lively: Served) -> None:
    lively.router.delay_s, lively.router.per_output = 0.5, 5
    messages: Any = [{"role": "user", "content": "Hi"}]
    claude = anthropic.Anthropic(base_url=lively.url, api_key="x", timeout=20)
    with claude.messages.stream(model=MODEL, max_tokens=9, messages=messages) as told:
        assert "Paris" in told.get_final_text()
    with lively.openai().responses.stream(model=MODEL, input="Hi") as events:
        events.until_done()
        assert "Paris" in events.get_final_response().output_text
    chunks = lively.openai().chat.completions.create(model=MODEL, messages=messages, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "Paris" in text


def test_streams_may_be_told_to_be_silent(tokenizer: Tokenizer) -> None:
    with serve(tokenizer, ApiSettings(keepalive_s=0)) as served:
        served.router.delay_s, served.router.per_output = 0.3, 5
        _, text, _ = timed(served, *APIS[0])
    assert "alive" not in text
