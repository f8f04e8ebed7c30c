"""Requests that take their time to come: what they may hold meanwhile, and when they end."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from tests.cluster.api.conftest import MODEL, Served, serve, wait_until

BODY = {"model": MODEL, "prompt": "Hi"}
PATH = "/v1/completions"


@contextlib.contextmanager
def begun(served: Served, declared: int, sent: bytes) -> Iterator[socket.socket]:
    """A call of which only `sent` has come yet."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {declared}\r\n\r\n"
        sock.sendall(head.encode() + sent)
        yield sock


def test_a_slow_body_holds_no_place_of_those_that_are_served(tokenizer: Tokenizer) -> None:
    with serve(tokenizer, ApiSettings(max_live_requests=1)) as served:
        with begun(served, 100, b"{") as sock:
            time.sleep(0.1)
            assert served.post(BODY, PATH).status_code == 200
            sock.sendall(json.dumps(BODY).encode().rjust(99))
            assert b"400 Bad Request" in sock.recv(4096)  # two brackets, but it was read
        served.wait_idle()


def test_bodies_that_arrive_together_have_a_bound(tokenizer: Tokenizer) -> None:
    with serve(tokenizer, ApiSettings(max_body_bytes=1 << 20)) as served:
        served.ctx.bodies.limit = 1_900_000  # a caller has seven eighths
        large = json.dumps(BODY | {"user": "x" * 900_000}).encode()
        with begun(served, len(large), large[:-1]) as sock:
            wait_until(lambda: served.ctx.bodies.num_taken > 700_000)
            response = served.post(large, PATH)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
            assert served.post(BODY, PATH).status_code == 200  # a small one is always read
            sock.sendall(large[-1:])
            assert b"200 OK" in sock.recv(4096)
        wait_until(lambda: served.ctx.bodies.num_taken == 0)
        assert served.post(large, PATH).status_code == 200


def test_the_time_of_a_request_begins_when_it_arrives(tokenizer: Tokenizer) -> None:
    whole = json.dumps(BODY).encode()
    with serve(tokenizer, ApiSettings(request_timeout_s=5.0)) as served:
        with begun(served, len(whole), whole[:-1]) as sock:
            time.sleep(1.0)
            sock.sendall(whole[-1:])
            assert b"200 OK" in sock.recv(4096)
        assert 2.0 < served.router.submits[0].timeout_s < 4.1


def test_tokenising_is_within_the_time_of_a_request(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(tokenizer, ApiSettings(request_timeout_s=0.3)) as served:
        monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: time.sleep(1.5))
        response = served.post(BODY, PATH)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert served.router.submits == []
