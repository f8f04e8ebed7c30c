"""Pages in a browser at a server without keys: by which names they may call, and which may."""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from tests.cluster.api.conftest import JSON, MODEL, Served, serve
from tests.cluster.api.http.test_operators import server as with_tenants

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
FRIEND = "https://friend.example"
CROSS = {"sec-fetch-site": "cross-site"}
ROUTES = (
    ("GET", "/v1/models"),
    ("GET", "/health"),
    ("GET", "/console"),
    ("GET", "/v1/responses/resp_1/input_items"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/files"),
    ("DELETE", "/v1/responses/resp_1"),
    ("OPTIONS", "/v1/responses"),
    ("GET", "/no/such/path"),
)


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[Served]:
    settings = ApiSettings(names="llm.example GPU-box", cors_origins=FRIEND)
    with serve(tokenizer, settings) as running:
        yield running


def code_of(served: Served, method: str, path: str, **headers: str) -> int:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    body = CHAT if method == "POST" else None
    with httpx.Client(base_url=served.url) as page:
        return page.request(method, path, json=body, headers=names).status_code


def upgrade(served: Served, **headers: str) -> int:
    """The status that a WebSocket's first request is answered with; 101: it is open."""
    names = {"host": f"127.0.0.1:{served.port}", "upgrade": "websocket", "connection": "Upgrade"}
    names |= {"sec-websocket-version": "13"}
    names |= {"sec-websocket-key": base64.b64encode(os.urandom(16)).decode(), **headers}
    head = "GET /v1/responses HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in names.items())
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as sock:
        sock.sendall(head.encode() + b"\r\n")
        return int(sock.recv(4096).split()[1])


def test_a_name_that_was_bound_to_the_address_is_refused_everywhere(served: Served) -> None:
    """The browser takes such a page for one of the server's own."""
    for host in ("evil.example", f"evil.example:{served.port}", "127.0.0.1.evil.example", "a b"):
        rebound = {"host": host, "sec-fetch-site": "same-origin", "origin": f"http://{host}"}
        assert {code_of(served, *route, **rebound) for route in ROUTES} == {403}, host
        assert upgrade(served, **rebound) == 403
    said = served.http.get("/v1/models", headers={"host": "evil.example"}).json()
    assert "api.names" in said["error"]["message"]


def test_own_names_and_addresses_are_let_in(served: Served) -> None:
    here = socket.gethostname().lower()
    for name in ("localhost", "127.0.0.1", "[::1]", "LLM.example", "gpu-box", here, "192.0.2.7"):
        for host in (name, f"{name}:8000"):
            assert code_of(served, "GET", "/v1/models", host=host) == 200, host
            assert upgrade(served, host=host) == 101


@pytest.mark.slow
def test_a_page_of_another_site_posts_nothing(served: Served) -> None:
    for route in ROUTES:
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
            assert code_of(served, *route, origin=origin) == 403, (route, origin)
        for site in ("cross-site", "same-site"):
            assert code_of(served, *route, sec_fetch_site=site, sec_fetch_mode="no-cors") == 403
    assert upgrade(served, origin="http://evil.example") == 403
    assert served.router.submits == []


def test_own_pages_links_and_friends_are_let_in(served: Served) -> None:
    own = {"origin": f"http://127.0.0.1:{served.port}", "sec_fetch_site": "same-origin"}
    assert code_of(served, "POST", "/v1/chat/completions", **own) == 200
    friend = {"origin": FRIEND, "sec_fetch_site": "cross-site", "sec_fetch_mode": "cors"}
    assert code_of(served, "POST", "/v1/chat/completions", **friend) == 200
    assert upgrade(served, origin=FRIEND) == 101
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert code_of(served, "GET", "/console", **link) == 200
    assert code_of(served, "POST", "/v1/chat/completions", **link) == 403  # a form


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_a_body_without_a_type_is_refused_in_words(served: Served, path: str) -> None:
    """A browser sends such without asking, and old ones do not say for whom."""
    with httpx.Client(base_url=served.url) as page:
        answer = page.post(path, content=b"{}")
        assert (answer.status_code, JSON in answer.text) == (415, True)
        assert page.post(path, content=iter([b"{}"])).status_code == 415


def test_with_keys_the_key_is_what_counts(tokenizer: Tokenizer) -> None:
    """No browser adds one by itself, since none is a cookie."""
    with with_tenants(tokenizer) as served:
        key: dict[str, Any] = {"authorization": "Bearer red-key"}
        for strange in ({"host": "llm.example"}, CROSS, {"origin": "https://a.example"}):
            assert served.http.get("/v1/models", headers=key | strange).status_code == 200
            assert served.http.get("/v1/models", headers=strange).status_code == 401
        assert "set-cookie" not in served.http.get("/console").headers
