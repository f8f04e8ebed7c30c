"""What HTTP asks of a server beside JSON: HTTP/1.0, HEAD, Host, slashes, compressed bodies."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.api.conftest import MODEL, Served

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
PATH = "/v1/chat/completions"


def exchanged(served: Served, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as sock:
        sock.sendall(request)
        received = b""
        while part := sock.recv(65536):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return head.lower(), body


def old(method: str, path: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_its_connection(served: Served) -> None:
    head, body = exchanged(served, old("POST", PATH, json.dumps(BODY | {"stream": True}).encode()))
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    lines = [line for line in body.decode().split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_a_whole_answer_over_http_1_0_has_its_length(served: Served) -> None:
    head, body = exchanged(served, old("POST", PATH, json.dumps(BODY).encode()))
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["object"] == "chat.completion"


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}", "/health", "/ping"])
def test_what_can_be_got_has_a_head(served: Served, path: str) -> None:
    head = served.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    length = head.headers["content-length"]
    assert length == served.http.get(path).headers["content-length"]


@pytest.mark.parametrize("hosts", ["", "Host: a\r\nHost: b\r\n"])
def test_a_request_has_one_host(served: Served, hosts: str) -> None:
    head, body = exchanged(served, f"GET /v1/models HTTP/1.1\r\n{hosts}\r\n".encode())
    assert head.startswith(b"http/1.1 400")
    assert "one Host header" in json.loads(body)["error"]["message"]


def test_a_slash_at_the_end_means_nothing(served: Served) -> None:
    assert served.http.get("/v1/models/").json() == served.http.get("/v1/models").json()
    assert served.post(BODY, f"{PATH}/").status_code == 200


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def packed(served: Served, body: bytes, encoding: str, path: str = PATH) -> Any:
    return served.http.post(path, content=body, headers={"content-encoding": encoding})


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
        ("identity", bytes),
    ],
)
def test_a_compressed_body_is_inflated(
    served: Served, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    text = json.dumps(BODY).encode()
    asked = {"model": MODEL, "input": "Hi"}
    messages = json.dumps(BODY | {"max_tokens": 5}).encode()
    assert packed(served, pack(text), encoding).status_code == 200
    responses = packed(served, pack(json.dumps(asked).encode()), encoding, "/v1/responses")
    assert responses.status_code == 200
    assert packed(served, pack(messages), encoding, "/v1/messages").status_code == 200


@pytest.mark.parametrize("encoding", ["zstd", "br", "gzip, gzip"])
def test_what_cannot_be_inflated_is_a_415_that_says_what_can(served: Served, encoding: str) -> None:
    response = packed(served, b"x", encoding)
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "gzip, deflate"
    assert encoding in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [PATH, "/v1/responses", "/v1/messages", "/tokenize"])
def test_a_body_that_says_to_be_no_json_is_a_415(served: Served, path: str) -> None:
    for wrong in ("application/x-www-form-urlencoded", "text/plain;charset=UTF-8"):
        response = served.http.post(path, json=BODY, headers={"content-type": wrong})
        assert response.status_code == 415
        assert wrong.split(";")[0] in response.json()["error"]["message"]
        assert "accept-encoding" not in response.headers
    assert served.router.submits == []


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "Application/JSON", "application/ld+json"]
)
def test_json_goes_by_several_names(served: Served, kind: str) -> None:
    assert served.http.post(PATH, json=BODY, headers={"content-type": kind}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"no gzip", gzip.compress(b"{}")[:-4], gzip.compress(b"{}") + b"x"],
    ids=["no gzip", "cut off", "more behind it"],
)
def test_a_body_that_is_not_what_it_says_is_a_400(served: Served, body: bytes) -> None:
    response = packed(served, body, "gzip")
    assert response.status_code == 400
    assert "gzip" in response.json()["error"]["message"]


def test_the_limit_of_a_body_is_that_of_what_it_becomes(served: Served) -> None:
    limit = served.ctx.settings.max_body_bytes
    bomb = gzip.compress(b" " * (50 * limit))
    assert len(bomb) < limit
    response = packed(served, bomb, "gzip")
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
