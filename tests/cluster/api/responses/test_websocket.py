"""`/v1/responses` as a WebSocket, beyond what the specification's own cases ask."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import time
from socket import SHUT_RDWR
from struct import Struct
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.streams import StreamReader
from websockets.sync.client import ClientConnection, connect

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.http.connection import ConnectionLimits
from kvrelay.cluster.api.http.socket import BoundedSocket
from kvrelay.cluster.api.incoming import SMALL_BODY_BYTES
from kvrelay.cluster.api.responses.format import ResponseFormat
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import TenantEntry
from tests.cluster.api.conftest import MODEL, Served, serve, wait_until
from tests.cluster.api.responses.asking import PATH
from tests.cluster.api.tools.templates import prompt

FrameHead = Struct(">BBQI")  # text, masked, its length in 8 bytes, the mask


def opened(served: Served, path: str = PATH, **options: Any) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{served.port}{path}", close_timeout=5, **options)


def send(socket: ClientConnection, **fields: Any) -> None:
    socket.send(json.dumps({"type": "response.create", "model": MODEL} | fields))


def event(socket: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(socket.recv(timeout=20))
    return found


def last(socket: ClientConnection) -> dict[str, Any]:
    while (found := event(socket))["type"] not in ("response.completed", "error"):
        pass
    return found


def test_the_sdk_speaks_it(served: Served) -> None:
    with served.openai().responses.connect() as connection:
        connection.response.create(model=MODEL, input="Hi", store=False)
        kinds = []
        for told in connection:
            kinds.append(told.type)
            if told.type == "response.completed":
                break
    assert kinds[0] == "response.created"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "The message is not valid JSON"),
        ("[]", "'type': expected 'response.create', got None"),
        ("[" * 200_000, "The body has 200000 brackets, more than 100000"),
        ("[" * 90_000, "The message has brackets within brackets, too deep to be read"),
        ('{"type": "session.update"}', "'type': expected 'response.create', got 'session.update'"),
        ('{"type": "response.create", "input": 5}', "'input': expected a string or a list"),
        ('{"type": "response.create", "input": "Hi", "background": true}', "'background': "),
        ('{"type": "response.create", "input": "Hi", "model": "gpt-9"}', "The model 'gpt-9' does"),
    ],
)
def test_what_is_wrong_is_an_event_and_the_connection_goes_on(
    served: Served, text: str, message: str
) -> None:
    with opened(served) as socket:
        socket.send(text)
        error = event(socket)
        assert error["type"] == "error"
        assert error["status"] in (400, 404)
        assert error["error"]["message"].startswith(message)
        send(socket, input="Hi")
        assert last(socket)["type"] == "response.completed"


def test_what_is_said_beforehand_is_part_of_the_next(served: Served) -> None:
    with opened(served) as socket:
        send(socket, input="The word is slate.", store=False, generate=False)
        warmed = last(socket)["response"]
        assert (warmed["output"], served.router.submits) == ([], [])
        send(socket, input="Which word?", store=False, previous_response_id=warmed["id"])
        assert last(socket)["type"] == "response.completed"
    assert "The word is slate." in prompt(served)


@pytest.mark.slow
def test_messages_wait_for_their_turn_and_no_more_than_a_few(served: Served) -> None:
    served.router.delay_s = 0.03
    with opened(served) as socket:
        for i in range(12):
            send(socket, input=f"Number {i}", store=False)
        ends = [last(socket) for _ in range(12)]
    kinds = [end["type"] for end in ends]
    assert 8 <= kinds.count("response.completed") <= 9
    full = next(end for end in ends if end["type"] == "error")
    assert (full["status"], full["error"]["type"]) == (429, "rate_limit_error")
    assert len(served.router.submits) == kinds.count("response.completed")


def test_a_client_that_goes_away_is_served_no_more(served: Served) -> None:
    served.router.delay_s = 0.2
    with opened(served) as socket:
        send(socket, input="Hi")
        event(socket)
    wait_until(lambda: len(served.router.cancels) == 1)


def test_a_failed_answer_is_an_event(served: Served) -> None:
    served.router.fail_after = 2
    with opened(served) as socket:
        send(socket, input="Hi")
        while (found := event(socket))["type"] != "response.failed":
            pass
    assert found["response"]["error"]["code"] == "attempts_exhausted"


def test_a_message_that_is_too_large_ends_the_connection(tokenizer: Tokenizer) -> None:
    small = serve(tokenizer, ApiSettings(), max_message_bytes=10_000)
    with small as served, opened(served) as socket:
        send(socket, input="x" * 20_000)
        with pytest.raises(ConnectionClosed) as closed:
            event(socket)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


def test_silent_connections_are_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.cluster.api.responses.websocket.IDLE_S", 0.2)
    with opened(served) as socket:
        began = time.monotonic()
        with pytest.raises(ConnectionClosed, match="no message for"):
            event(socket)
        assert time.monotonic() - began < 5


def test_keys_and_origins_are_asked_for(tokenizer: Tokenizer) -> None:
    entries = (TenantEntry("red", keys=("red-key",)),)
    context = {"tenants": Tenants.of(entries, b"a secret")}
    settings = ApiSettings(cors_origins="https://a.example")
    with serve(tokenizer, settings, context=context) as served:
        key = {"authorization": "Bearer red-key"}
        own = f"http://127.0.0.1:{served.port}"
        tried: list[tuple[dict[str, str], str | None, int]] = [
            ({}, None, 401),
            (key, "https://b.example", 403),
            (key, "https://a.example", 101),
            (key, own, 101),
        ]
        for headers, origin, status in tried:
            options: Any = {"additional_headers": headers, "origin": origin}
            if status == 101:
                with opened(served, **options) as socket:
                    send(socket, input="Hi")
                    assert last(socket)["type"] == "response.completed"
                continue
            with pytest.raises(InvalidStatus) as refused:
                opened(served, **options)
            assert refused.value.response.status_code == status
            assert json.loads(refused.value.response.body)["error"]["message"]


def test_connections_and_bugs_on_them_are_counted(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(*labels: str) -> float:
        lines = served.http.get("/metrics").text.splitlines()
        found = (line.rsplit(" ", 1) for line in lines if all(each in line for each in labels))
        return sum(float(count) for name, count in found if "requests_total{" in name)

    sockets = 'method="WEBSOCKET",route="/v1/responses"'
    bug = ('endpoint="responses"', 'outcome="internal_error"')
    before = counted(sockets, 'status="101"'), counted(sockets, 'status="500"'), counted(*bug)
    with opened(served) as socket:
        send(socket, input="Hi")
        assert last(socket)["type"] == "response.completed"

    def broken(*_: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(ResponseFormat, "chunks", broken)
    with opened(served) as socket:
        send(socket, input="Hi")
        with pytest.raises(ConnectionClosed):
            last(socket)
    wait_until(lambda: counted(sockets, 'status="500"') == before[1] + 1)
    assert counted(sockets, 'status="101"') == before[0] + 1
    assert counted(*bug) == before[2] + 1, "once, though it has passed two that count"


def test_one_that_asks_for_nothing_makes_room_for_another(tokenizer: Tokenizer) -> None:
    """The first has been answered; the others have never asked. An answer keeps its connection."""
    few = serve(tokenizer, ApiSettings(), connections=ConnectionLimits(max_connections=5))
    with few as served, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(opened(served)) for _ in range(4)]
        served.router.delay_s = 0.2
        send(sockets[1], input="Hi")
        assert event(sockets[1])["type"] == "response.created"
        for number in (0, 2, 3):
            assert httpx.get(f"{served.url}/ping", timeout=5).status_code == 200
            stack.enter_context(opened(served))
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            with pytest.raises(ConnectionClosed, match="5 connections are open") as closed:
                event(sockets[number])
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1013
            break
        assert last(sockets[1])["type"] == "response.completed"


@pytest.mark.slow
def test_one_address_does_not_have_all_connections_at_work(tokenizer: Tokenizer) -> None:
    """Two of three, WebSockets and others alike."""
    few = serve(tokenizer, ApiSettings(), connections=ConnectionLimits(max_connections=3))
    with few as served, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(opened(served)) for _ in range(3)]
        served.router.delay_s = 0.3
        for each in sockets[:2]:
            send(each, input="Hi")
            assert event(each)["type"] == "response.created"
        send(sockets[2], input="Hi")
        with pytest.raises(ConnectionClosed, match="this address has its share") as closed:
            event(sockets[2])
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1013
        with pytest.raises(InvalidStatus) as refused:
            stack.enter_context(opened(served))
        assert refused.value.response.status_code == 503
        assert {last(each)["type"] for each in sockets[:2]} == {"response.completed"}
        with opened(served) as other:
            send(other, input="Hi")
            assert last(other)["type"] == "response.completed"


@pytest.mark.slow
def test_messages_share_the_memory_for_bodies(tokenizer: Tokenizer) -> None:
    """The budget is that of eight bodies. A sender over its share gets an error, or is disconnected
    in mid-message; another caller finds room."""
    size, refused, cut = 128 * 1024, set[str](), 0
    text = json.dumps({"type": "response.create", "model": MODEL, "input": "Hi", "store": False})
    with serve(tokenizer, ApiSettings(max_body_bytes=size)) as served:
        bodies = served.ctx.bodies
        served.router.delay_s = 0.05
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(opened(served)) for _ in range(6)]
            for each in sockets:
                with contextlib.suppress(ConnectionClosed):
                    for _ in range(6):
                        each.send(text + " " * (size - len(text)))
                assert bodies.num_taken <= bodies.limit
                assert bodies.has_room(("another",), size)
            for each in sockets:
                try:
                    ends = [last(each) for _ in range(6)]
                    refused |= {end["error"]["message"] for end in ends if "error" in end}
                except ConnectionClosed:
                    cut += 1
        assert refused <= {"The bodies of other requests take all memory"}
        assert cut or refused
        wait_until(lambda: bodies.num_taken == 0)
        wait_until(lambda: served.ctx.remembered.num_taken == 0)


@pytest.mark.slow
def test_small_messages_that_wait_count_together(tokenizer: Tokenizer) -> None:
    size = SMALL_BODY_BYTES
    text = json.dumps({"type": "response.create", "model": MODEL, "input": "Hi", "store": False})
    with serve(tokenizer, ApiSettings(max_body_bytes=size)) as served:
        served.router.delay_s = 0.05
        with opened(served) as socket:
            for _ in range(6):
                socket.send(text + " " * (size - len(text)))
            wait_until(lambda: served.ctx.bodies.num_taken >= 4 * size)
            assert {last(socket)["type"] for _ in range(6)} == {"response.completed"}
        wait_until(lambda: served.ctx.bodies.num_taken == 0)


def test_what_a_connection_had_read_goes_with_it(tokenizer: Tokenizer) -> None:
    """Without the garbage collector, which comes rarely where few objects have many bytes."""

    def kept() -> int:
        found = (
            each for each in gc.get_objects() if isinstance(each, BoundedSocket | StreamReader)
        )
        return sum(isinstance(each, BoundedSocket) or len(each.buffer) > 1000 for each in found)

    text = json.dumps({"type": "response.create", "model": MODEL, "input": "x" * 200_000})
    with serve(tokenizer, ApiSettings()) as served:
        gc.collect()
        gc.disable()
        try:
            with opened(served) as socket:
                socket.socket.sendall(FrameHead.pack(0x81, 0xFF, 400_000, 0) + text.encode())
                wait_until(lambda: served.ctx.bodies.num_taken >= 100_000)
                socket.socket.shutdown(SHUT_RDWR)
            wait_until(lambda: not kept())
        finally:
            gc.enable()


def test_what_is_said_beforehand_counts_as_a_request(tokenizer: Tokenizer) -> None:
    entries = (TenantEntry("red", keys=("red-key",), requests_per_minute=2),)
    context = {"tenants": Tenants.of(entries, b"a secret")}
    with serve(tokenizer, ApiSettings(), context=context) as served:
        options: Any = {"additional_headers": {"authorization": "Bearer red-key"}}
        with opened(served, **options) as socket:
            for _ in range(3):
                send(socket, input="Hi", store=False, generate=False)
            ends = [last(socket) for _ in range(3)]
    assert [end["type"] for end in ends] == ["response.completed"] * 2 + ["error"]
    assert ends[2]["status"] == 429


def test_other_paths_are_no_websockets(served: Served) -> None:
    with pytest.raises(InvalidStatus):
        opened(served, "/v1/models")
