"""`/console` over HTTP: the page, who may listen, and how a stream of events ends."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from kvrelay.cluster.api.console import routes
from kvrelay.cluster.api.console.routes import page_files
from kvrelay.cluster.api.console.sessions import SESSION_S
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli import operate
from kvrelay.cluster.config import TenantEntry
from tests.cluster.api.conftest import (
    MODEL,
    OPERATORS_KEY,
    SCALING,
    STATUS,
    Served,
    cluster_status,
    serve,
    wait_until,
)
from tests.cluster.api.console.demo import Fleet

KEY = "operators-key"


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


@contextlib.contextmanager
def listening(served: Served, **headers: str) -> Iterator[httpx.Response]:
    with served.http.stream("GET", "/console/events", headers=headers) as response:
        yield response


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> list[routes.Console]:
    """The consoles that are made while the test runs."""
    made: list[routes.Console] = []
    init = routes.Console.__init__

    def remember(self: routes.Console, ctx: Any) -> None:
        init(self, ctx)
        made.append(self)

    monkeypatch.setattr(routes.Console, "__init__", remember)
    return made


def test_the_page_is_there_with_and_without_a_slash(served: Served) -> None:
    for path, base in (("/console", "console/"), ("/console/", "")):
        response = served.http.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert "{{" not in response.text
        for name in re.findall(r'(?:src|href)="([^"#]+)"', response.text):
            assert name.startswith(base), name
            file = served.http.get(f"/console/{name.removeprefix(base)}")
            assert file.status_code == 200, name


def test_every_file_has_a_strict_policy_and_its_type(served: Served) -> None:
    for name in page_files():
        response = served.http.get(f"/console/{name}")
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert not re.search(r"https?:|\*", policy)
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        end = name.rpartition(".")[2]
        wanted = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
        assert response.headers["content-type"].startswith(wanted.get(end, "text/html"))


def test_the_files_ask_nothing_of_other_hosts_and_keep_to_the_policy() -> None:
    for name, file in page_files().items():
        text = file.body.decode()
        hosts = set(re.findall(r"https?://[^\s\"'`]+", text))
        assert hosts <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"\bstyle=|\bon[a-z]+=\"|innerHTML|\beval\(", text), name
        assert text.count("\n") <= 350, f"{name} is long"
        if name.endswith(".js"):
            assert max(map(len, text.splitlines())) <= 110, name


def test_modules_import_files_that_are_there() -> None:
    files = page_files()
    for name, file in files.items():
        for found in re.findall(r'from "\./([^"]+)"', file.body.decode()):
            assert found in files, f"{name} imports {found}"


def test_who_has_a_file_already_gets_no_body(served: Served) -> None:
    first = served.http.get("/console/app.js")
    again = served.http.get("/console/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = served.http.get("/console/app.js", headers={"if-none-match": '"other"'})
    assert other.content == first.content


@pytest.mark.parametrize(
    "path",
    ["routes.py", "__init__.py", "..%2froutes.py", "static%2fapp.js", "%00", "a/b", "app.js%00"],
)
def test_nothing_else_is_served(served: Served, path: str) -> None:
    response = served.http.get(f"/console/{path}")
    assert response.status_code == 404
    assert "error" in response.json()


def test_only_get_is_allowed(served: Served) -> None:
    for path in ("/console", "/console/events", "/console/app.js"):
        assert served.http.post(path).status_code == 405
    assert served.http.head("/console").status_code == 200
    assert served.http.head("/console/events").status_code == 200


def test_events_have_all_at_first_and_then_a_point_each_second(served: Served) -> None:
    began = time.monotonic()
    with listening(served) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        stream = events(response)
        first = next(stream)
        assert first["full"]
        assert first["parts"]["model"] == MODEL
        assert first["parts"]["totals"]["requests"] == STATUS["totals"]["requests"]
        assert first["parts"]["scaling"] is None
        assert first["parts"]["server"]["models"] == [MODEL]
        row = dict(zip(first["worker_fields"], first["workers"]["decode-0"], strict=True))
        assert (row["num_used_blocks"], row["num_disk_blocks"]) == (40, 900)
        for _ in range(2):
            news = next(stream)
            assert (news["full"], news["workers"], news["parts"]) == (False, {}, {})
            assert len(news["points"]) == 1
    assert 1.0 < time.monotonic() - began < 6.0


def test_a_snapshot_is_all_there_is_with_one_point(served: Served) -> None:
    found = served.http.get("/console/snapshot").json()
    assert found["full"]
    assert set(found["workers"]) == {"decode-0"}
    assert len(found["points"]) == 1
    assert len(found["points"][0]) == len(found["point_fields"])


def test_scaling_is_passed_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        served.ctx.operations, "status", lambda: cluster_status(STATUS | {"scaling": SCALING})
    )
    time.sleep(0.6)  # a status is read again after half a second
    assert served.http.get("/console/snapshot").json()["parts"]["scaling"] == SCALING


def test_data_is_for_operators_and_the_page_is_not(tokenizer: Tokenizer) -> None:
    tenants = [TenantEntry(name="team", keys=("tenant-key",))]
    context = {"tenants": Tenants.of(tenants, b"secret")}
    with serve(tokenizer, ApiSettings(operations_key=KEY), context=context) as served:
        assert served.http.get("/console").status_code == 200
        for path in ("/console/events", "/console/snapshot"):
            for headers in ({}, {"authorization": "Bearer tenant-key"}):
                response = served.http.get(path, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
        key = {"authorization": f"Bearer {KEY}"}
        found = served.http.get("/console/snapshot", headers=key).json()
        assert found["parts"]["server"]["key_required"]
        assert "team" not in json.dumps(found)  # who the tenants are is not the page's business
        with listening(served, **key) as response:
            assert next(events(response))["full"]


def test_callers_elsewhere_and_other_sites_pages_are_refused(served: Served) -> None:
    for headers in (
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ):
        response = served.http.get("/console/events", headers=headers)
        assert response.status_code == 403, headers
    ok = served.http.get("/console/snapshot", headers={"sec-fetch-site": "same-origin"})
    assert ok.status_code == 200


def test_a_ticket_opens_the_console_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = CliRunner().invoke(operate.console, ["--url", served.url])
    address, _, ticket = printed.output.strip().partition("#ticket=")
    assert address == f"{served.url}/console"
    with httpx.Client(base_url=served.url) as page:
        assert page.post("/console/ticket").status_code == 401
        session = page.post("/console/session", json={"ticket": ticket}).json()["session"]
        again = page.post("/console/session", json={"ticket": ticket})
        assert (again.status_code, "kvrelay console" in again.text) == (401, True)
        headers = {"authorization": f"Bearer {session}"}
        assert page.get("/console/snapshot", headers=headers).status_code == 200
        assert page.get("/requests", headers=headers).status_code == 200
        for wrong in (session[:-1], f"{session}0", session.replace(".", ".9", 1)):
            headers = {"authorization": f"Bearer {wrong}"}
            assert page.get("/status", headers=headers).status_code == 401
        later = time.time() + SESSION_S + 1
        monkeypatch.setattr(time, "time", lambda: later)
        headers = {"authorization": f"Bearer {session}"}
        assert page.get("/status", headers=headers).status_code == 401


def test_listeners_are_bounded_and_their_places_come_back(
    tokenizer: Tokenizer, console: list[routes.Console], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_LISTENERS", 3)
    with serve(tokenizer, ApiSettings()) as served:
        listeners = console[-1].listeners
        with listening(served) as one, listening(served) as two:
            streams = [events(one), events(two)]  # a generator that is dropped ends its response
            assert all(next(stream)["full"] for stream in streams)
            refused = served.http.get("/console/events")
            assert refused.status_code == 429
            assert "2 consoles listen for this caller, its share of 3" in refused.text
            assert int(refused.headers["retry-after"]) >= 1
            assert served.http.get("/console/snapshot").status_code == 200
        wait_until(lambda: listeners.num_taken == 0, 3.0)
        with listening(served) as response:
            assert next(events(response))["full"]


@pytest.mark.long
def test_a_listener_that_does_not_read_loses_its_place(
    tokenizer: Tokenizer, console: list[routes.Console], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "WRITE_TIMEOUT_S", 0.3)
    fleet = Fleet(4000)
    with serve(tokenizer, ApiSettings()) as served:
        served.ctx.operations.status = fleet.status
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", served.port))
            host = f"host: 127.0.0.1:{served.port}\r\nauthorization: Bearer {OPERATORS_KEY}"
            client.sendall(f"GET /console/events HTTP/1.1\r\n{host}\r\n\r\n".encode())
            listeners = console[-1].listeners
            wait_until(lambda: listeners.num_taken == 1)
            wait_until(lambda: listeners.num_taken == 0, 30.0)
            calls = fleet.num_calls
            time.sleep(1.5)
            assert fleet.num_calls == calls  # without listeners no status is read
            # It reads at last: the answer ends properly, and can be asked for again.
            client.settimeout(20)
            read = b""
            while not read.endswith(b"0\r\n\r\n"):
                part = client.recv(1 << 20)
                assert part, "the connection was cut"
                read = (read + part)[-64:]


def test_streams_end_when_the_server_stops(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[float] = []
    with caplog.at_level(logging.ERROR), contextlib.ExitStack() as stack:
        served = stack.enter_context(serve(tokenizer, ApiSettings()))
        is_there = threading.Event()

        def listen() -> None:
            with listening(served) as response:
                for _ in events(response):
                    is_there.set()
            ended.append(time.monotonic())

        thread = threading.Thread(target=listen)
        thread.start()
        assert is_there.wait(10)
        began = time.monotonic()
        stack.close()
        thread.join(10)
    assert ended[0] - began < 1.9  # by itself, not cut off after the 2 s of `serve`
    assert not caplog.records


def test_a_broken_status_shows_no_traceback_and_listeners_go_on(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Any:
        raise RuntimeError("secret detail")

    with listening(served) as response, caplog.at_level(logging.ERROR, "kvrelay.api"):
        stream = events(response)
        assert next(stream)["full"]
        with monkeypatch.context() as patch:
            patch.setattr(served.ctx.operations, "status", broken)
            time.sleep(0.6)
            refused = served.http.get("/console/snapshot")
            assert refused.status_code == 500
            assert "secret detail" not in refused.text
            assert not next(stream)["full"]
            assert not next(stream)["full"]
        assert len(caplog.records) <= 2  # not one each second
        wait_until(lambda: served.http.get("/console/snapshot").status_code == 200)
