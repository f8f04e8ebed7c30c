"""What a client can make a connection wait for or keep, before it says who it is."""

from __future__ import annotations

import contextlib
import inspect
import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.http.connection import BoundedProtocol, ConnectionLimits
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from tests.cluster.api.conftest import MODEL, Served, serve, wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD += b"Content-Length: %d\r\n\r\n"
GET = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
SHORT = ConnectionLimits(
    max_connections=3,
    max_head_bytes=16 * 1024,
    head_timeout_s=0.4,
    body_timeout_s=0.4,
    idle_timeout_s=0.4,
    write_timeout_s=0.4,
)


@pytest.fixture
def short(tokenizer: Tokenizer) -> Iterator[Served]:
    with serve(tokenizer, ApiSettings(body_timeout_s=0.3), connections=SHORT) as running:
        yield running
        running.wait_idle()


@contextlib.contextmanager
def connected(served: Served, host: str = "127.0.0.1") -> Iterator[socket.socket]:
    """A connection that comes from that address."""
    at, source = ("127.0.0.1", served.port), (host, 0)
    with socket.create_connection(at, timeout=5, source_address=source) as sock:
        yield sock


def answer_of(sock: socket.socket) -> tuple[int, bytes]:
    """Status and body of one answer with a content-length."""
    received = b""
    while b"\r\n\r\n" not in received:
        part = sock.recv(65536)
        assert part, f"closed after {received!r}"
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < size:
        body += sock.recv(65536)
    return int(head.split()[1]), body


def closed(sock: socket.socket) -> bool:
    """Whether the server ends the connection, within the socket's timeout."""
    try:
        return sock.recv(65536) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def code_of(body: bytes) -> str:
    code: str = json.loads(body)["error"]["code"]
    return code


@pytest.mark.parametrize("one", [True, False], ids=["one", "many"])
def test_headers_have_a_limit(short: Served, one: bool) -> None:
    line = b"x: " + b"a" * 20_000 if one else b"\r\n".join(b"x%d: y" % i for i in range(3000))
    with connected(short) as sock:
        sock.sendall(b"GET /ping HTTP/1.1\r\n" + line + b"\r\n\r\n")
        status, body = answer_of(sock)
        assert (status, code_of(body)) == (431, "headers_too_large")
        assert "16384 bytes" in json.loads(body)["error"]["message"]
        assert closed(sock)


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /ping HTTP/1.1\r\nx: ",
        b"POST /ping HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nt: ",
    ],
    ids=["headers", "trailers"],
)
def test_headers_that_never_end_are_cut_off_at_once(short: Served, begin: bytes) -> None:
    num_sent = 0
    with connected(short) as sock:
        sock.sendall(begin)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while num_sent < 64 << 20:
                num_sent += sock.send(b"a" * 65536)
    assert num_sent < 16 << 20  # what sockets have buffered


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_a_head_has_a_timer_in_every_request_of_a_connection(
    short: Served, num_before: int
) -> None:
    with connected(short) as sock:
        for _ in range(num_before):
            sock.sendall(GET)
            assert answer_of(sock)[0] == 200
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(GET[:-2] + b"x: ")
            for _ in range(100):  # a byte now and then
                sock.sendall(b"a")
                time.sleep(0.05)
        assert time.monotonic() - began < 3


def test_a_late_head_is_told_why(short: Served) -> None:
    with connected(short) as sock:
        sock.sendall(GET[:10])
        status, body = answer_of(sock)
        assert (status, code_of(body)) == (408, "request_timeout")


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere"])
def test_a_body_has_a_timer_in_every_request_of_a_connection(
    short: Served, num_before: int, path: bytes
) -> None:
    with connected(short) as sock:
        for _ in range(num_before):
            sock.sendall(GET)
            assert answer_of(sock)[0] == 200
        sock.sendall(HEAD.replace(b"/v1/completions", path) % 900)
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(100):
                sock.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 3


def test_an_idle_connection_is_closed_also_after_a_body_that_came_late(short: Served) -> None:
    with connected(short) as sock:
        sock.sendall(GET)
        assert answer_of(sock)[0] == 200
        assert closed(sock)
    with connected(short) as sock:
        sock.sendall(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nx")
        assert answer_of(sock)[0] == 404
        sock.sendall(b"x")  # stops the timer of the idle connection
        assert closed(sock)


def test_a_client_that_keeps_connections_closes_them_before_the_server_does() -> None:
    """Else a request that it sends just then is lost, and the client sees a read error."""
    of_clients = inspect.signature(httpx.Limits).parameters["keepalive_expiry"].default
    assert ConnectionLimits().idle_timeout_s > max(60.0, 2 * of_clients)


def test_a_new_connection_takes_the_place_of_one_that_asks_for_nothing(short: Served) -> None:
    short.http.close()
    unread = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    for said, status in ((b"", 0), (GET, 200), (unread, 404), (b"GET /pi", 0)):
        with contextlib.ExitStack() as stack:
            idle = []
            for _ in range(3):
                idle.append(sock := stack.enter_context(connected(short)))
                sock.sendall(said)
                assert not status or answer_of(sock)[0] == status
            if not status:
                time.sleep(0.1)
            more = stack.enter_context(connected(short))
            more.sendall(GET)
            assert answer_of(more)[0] == 200
            if said is not unread:
                status, body = answer_of(idle[0])
                assert (status, code_of(body)) == (503, "too_many_connections")
            assert closed(idle[0])


@pytest.mark.slow
def test_one_address_does_not_have_all_connections_with_a_request(
    short: Served, tokenizer: Tokenizer
) -> None:
    """Two of three, and the third is told so; another address is served."""
    short.http.close()
    short.router.answer = lambda submit: tokenizer.encode("word " * 40)
    short.router.delay_s = 0.05
    body = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 40}).encode()
    with contextlib.ExitStack() as stack:
        asking = [stack.enter_context(connected(short)) for _ in range(2)]
        for sock in asking:
            sock.sendall(HEAD % len(body) + body)
        time.sleep(0.2)
        more = stack.enter_context(connected(short))
        more.sendall(HEAD % len(body) + body)
        status, said = answer_of(more)
        assert (status, code_of(said)) == (503, "too_many_connections")
        assert "this address has its share of 3 connections" in said.decode()
        assert closed(more)
        other = stack.enter_context(connected(short, "127.0.0.2"))
        other.sendall(HEAD % len(body) + body)
        time.sleep(0.1)
        none = stack.enter_context(connected(short, "127.0.0.3"))
        status, said = answer_of(none)
        assert (status, code_of(said)) == (503, "too_many_connections")
        assert closed(none)
        assert [answer_of(sock)[0] for sock in (*asking, other)] == [200] * 3

    def is_served() -> bool:
        with connected(short) as sock:
            sock.sendall(GET)
            return answer_of(sock)[0] == 200

    wait_until(is_served)


def test_bodies_that_do_not_come_keep_nobody_out(tokenizer: Tokenizer) -> None:
    """One address has four of five connections with half of a body, and a fifth. Whoever comes gets
    the fifth, then the one whose body has stood still for the longest."""
    few = serve(tokenizer, ApiSettings(), connections=ConnectionLimits(max_connections=5))
    body = json.dumps({"model": MODEL, "prompt": "Hi" * 40_000}).encode()
    with few as served, contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(served, "127.0.0.2")) for _ in range(5)]
        for sock in held:
            sock.sendall(HEAD % len(body) + body[:10])
        assert answer_of(held[4])[0] == 503
        assert closed(held[4])
        held[4] = stack.enter_context(connected(served, "127.0.0.2"))
        time.sleep(0.1)
        held[0].sendall(body[10:40_000])  # gets on
        held[1].sendall(body[10:11])
        time.sleep(0.1)
        others = []
        for host, dropped in ((3, 4), (4, 1), (5, 2)):
            others.append(sock := stack.enter_context(connected(served, f"127.0.0.{host}")))
            sock.sendall(GET[:-2])
            status, said = answer_of(held[dropped])
            assert (status, code_of(said)) == (503, "too_many_connections")
            assert "this one made room for another" in said.decode()
            assert closed(held[dropped])
        for sock in others:
            sock.sendall(b"\r\n")
            assert answer_of(sock)[0] == 200
        held[0].sendall(body[40_000:])
        assert answer_of(held[0])[0] in (200, 400)
        served.wait_idle()


def test_a_body_makes_room_only_for_who_has_fewer(tokenizer: Tokenizer) -> None:
    """Two bodies, one, and an idle connection: this one goes first for who has a body."""
    few = serve(tokenizer, ApiSettings(), connections=ConnectionLimits(max_connections=4))
    body = json.dumps({"model": MODEL, "prompt": "Hi"}).encode()
    with few as served, contextlib.ExitStack() as stack:
        held = []
        for host in (2, 2, 3):
            held.append(sock := stack.enter_context(connected(served, f"127.0.0.{host}")))
            sock.sendall(HEAD % len(body) + body[:10])
        idle = stack.enter_context(connected(served, "127.0.0.4"))
        time.sleep(0.1)
        more = stack.enter_context(connected(served, "127.0.0.3"))
        assert answer_of(idle)[0] == 503
        more.sendall(GET)
        assert answer_of(more)[0] == 503, "it has its share"
        with connected(served, "127.0.0.4") as other:
            other.sendall(GET)
            assert answer_of(other)[0] == 200
        for sock in held:
            sock.sendall(body[10:])
            assert answer_of(sock)[0] == 200
        served.wait_idle()


def test_a_request_that_is_under_way_when_the_server_stops_is_answered(
    tokenizer: Tokenizer,
) -> None:
    """On a connection that was kept: it was closed at once, and the request was lost."""
    with serve(tokenizer, ApiSettings()) as served, connected(served) as kept:
        kept.sendall(GET)
        assert answer_of(kept)[0] == 200
        with connected(served) as half:
            half.sendall(GET[:10])
            time.sleep(0.1)
            served.stop()
            time.sleep(0.3)
            kept.sendall(GET)
            half.sendall(GET[10:])
            for sock in (kept, half):
                received = b"".join(iter(lambda sock=sock: sock.recv(65536), b"")).lower()
                assert b" 200 ok" in received
                assert b"connection: close" in received


def test_a_request_that_follows_an_answer_while_the_server_stops_is_answered(
    tokenizer: Tokenizer,
) -> None:
    """Its client has kept the connection: nothing of the answer said that it would end."""
    asked = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 20}).encode()
    head = HEAD
    with serve(tokenizer, ApiSettings()) as served, connected(served) as sock:
        served.router.answer = lambda submit: tokenizer.encode("word " * 20)
        served.router.delay_s = 0.03
        sock.sendall(head % len(asked) + asked)
        time.sleep(0.2)
        served.stop()
        assert answer_of(sock)[0] == 200
        sock.sendall(GET)
        received = b"".join(iter(lambda: sock.recv(65536), b"")).lower()
        assert b" 200 ok" in received
        assert b"connection: close" in received


def test_a_request_that_came_while_a_stopping_server_was_busy_is_answered(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its last look at the sockets and the close it may wait for a processor: 2 of 596
    streams ended with a reset in an upgrade of a loaded machine."""
    close_idle, closes = BoundedProtocol._close_idle, threading.Event()

    def close_late(connection: BoundedProtocol) -> None:
        if not closes.is_set():
            closes.set()
            time.sleep(0.3)
        close_idle(connection)

    monkeypatch.setattr(BoundedProtocol, "_close_idle", close_late)
    with serve(tokenizer, ApiSettings()) as served, connected(served) as kept:
        kept.sendall(GET)
        assert answer_of(kept)[0] == 200
        served.stop()
        assert closes.wait(10)
        kept.sendall(GET)
        received = b"".join(iter(lambda: kept.recv(65536), b"")).lower()
        assert b" 200 ok" in received
        assert b"connection: close" in received


@pytest.mark.slow
def test_a_stream_outlasts_all_timers(short: Served, tokenizer: Tokenizer) -> None:
    short.router.answer = lambda submit: tokenizer.encode("word " * 40)
    short.router.delay_s = 0.05
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 40, "stream": True}
    began = time.monotonic()
    with short.http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert time.monotonic() - began > 4 * SHORT.head_timeout_s
    assert lines[-1] == "data: [DONE]"


def test_a_request_in_line_behind_a_stream_is_answered(short: Served, tokenizer: Tokenizer) -> None:
    short.router.answer = lambda submit: tokenizer.encode("word " * 20)
    short.router.delay_s = 0.05
    asked = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 20}).encode()
    with connected(short) as sock:
        head = HEAD
        sock.sendall(head % len(asked) + asked + GET)
        received = b""
        while received.count(b"200 OK") < 2:
            part = sock.recv(65536)
            assert part, received
            received += part
