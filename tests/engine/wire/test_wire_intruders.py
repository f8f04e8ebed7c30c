"""The wire's closed door: what is not a proper frame of an authenticated peer has no effect."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvrelay.engine.messages import Abort
from kvrelay.engine.wire.codec import encode
from kvrelay.engine.wire.context import TlsIdentity, WireLimits
from kvrelay.engine.wire.frames import FrameWriter, Kind
from kvrelay.engine.wire.handshake import (
    NONCE_BYTES,
    PREAMBLE,
    REPLY_BYTES,
    StreamId,
    make_hello,
    make_proof,
    session_keys,
)
from kvrelay.engine.wire.pending import PendingConnections
from tests.engine.wire.test_wire_tls import identity_in
from tests.engine.wire.wire_peers import TOKEN, Peer, until

pytestmark = pytest.mark.anyio


def hello_to(to: str, stream: StreamId = StreamId(1, bytes(16), 1)) -> bytes:
    return make_hello("a", to, stream, bytes(NONCE_BYTES))


class Intruder:
    """An initiator with the token, whose bytes the test writes itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.hello = hello_to("b")
        self.proof = b""
        self.frames = FrameWriter(bytes(32))

    async def authenticate(self) -> Intruder:
        self.writer.write(self.hello)
        reply = await self.reader.readexactly(REPLY_BYTES)
        nonce = reply[len(PREAMBLE) : len(PREAMBLE) + NONCE_BYTES]
        self.proof = make_proof(TOKEN, b"initiator", self.hello, nonce)
        self.writer.write(self.proof)
        self.frames = FrameWriter(session_keys(TOKEN, self.hello, nonce).initiator)
        return self

    def frame(self, message: Any) -> bytes:
        body = message if isinstance(message, bytes) else encode(message)
        return self.frames.seal(Kind.MESSAGE, body)


async def authenticate(b: Peer) -> Intruder:
    return await Intruder(*await asyncio.open_connection(*b.address)).authenticate()


async def assert_closed(reader: asyncio.StreamReader) -> None:
    try:
        async with asyncio.timeout(10):
            while await reader.read(1 << 16):
                pass
    except ConnectionResetError:
        pass


async def test_the_wrong_token_is_refused_on_both_sides(a: Peer, b: Peer) -> None:
    stranger = Peer("a", token=b"another token")
    stranger.knows(b)
    stranger.wire.send("b", Abort("r", 1))
    await until(lambda: stranger.wire.counters["auth_failed"] > 0, "the refusal")
    await until(lambda: bool(stranger.lost), "giving up")
    await stranger.wire.close()
    assert b.messages == []

    reader, writer = await asyncio.open_connection(*b.address)
    writer.write(hello_to("b"))
    await reader.readexactly(REPLY_BYTES)
    writer.write(bytes(32) + b"whatever follows")
    await assert_closed(reader)
    assert b.wire.counters["auth_failed"] == 1
    assert b.messages == []
    assert b.wire.counters["accepted"] == 0


async def test_a_recorded_connection_cannot_be_replayed(b: Peer) -> None:
    intruder = await authenticate(b)
    frame = intruder.frame(Abort("r", 1))
    intruder.writer.write(frame)
    await until(lambda: b.messages == [Abort("r", 1)], "the original")

    reader, writer = await asyncio.open_connection(*b.address)
    writer.write(intruder.hello + intruder.proof + frame)
    await assert_closed(reader)
    assert b.wire.counters["auth_failed"] == 1

    another = await authenticate(b)  # same names and nonce of ours, another connection
    another.writer.write(frame)
    await assert_closed(another.reader)
    assert b.wire.counters["bad_mac"] == 1
    assert len(b.messages) == 1


async def test_the_responders_own_proof_cannot_be_reflected_to_it(b: Peer) -> None:
    reader, writer = await asyncio.open_connection(*b.address)
    writer.write(hello_to("b"))
    reply = await reader.readexactly(REPLY_BYTES)
    writer.write(reply[-32:] + b"whatever follows")
    await assert_closed(reader)
    assert b.wire.counters["auth_failed"] == 1
    assert b.messages == []


async def test_a_proof_for_one_stream_does_not_open_another(b: Peer) -> None:
    reader, writer = await asyncio.open_connection(*b.address)
    hello = hello_to("b")
    writer.write(hello)
    reply = await reader.readexactly(REPLY_BYTES)
    nonce = reply[len(PREAMBLE) : len(PREAMBLE) + NONCE_BYTES]
    other = hello_to("b", StreamId(1, bytes(16), 2))
    writer.write(make_proof(TOKEN, b"initiator", other, nonce))
    await assert_closed(reader)
    assert b.wire.counters["auth_failed"] == 1


@pytest.mark.parametrize(
    ("data", "counter"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "bad_magic"),
        (b"KVR\x01" + bytes(100), "bad_version"),
        (hello_to("somebody else"), "unknown_destination"),
        (hello_to("b")[:-1] + b"\xff", "bad_hello"),
        (PREAMBLE, "handshake_timeout"),
        (b"", "handshake_timeout"),
        (hello_to("b"), "handshake_timeout"),
    ],
)
async def test_a_stranger_is_closed_and_counted(data: bytes, counter: str, b: Peer) -> None:
    reader, writer = await asyncio.open_connection(*b.address)
    writer.write(data)
    await assert_closed(reader)
    assert +b.wire.counters == {counter: 1}
    assert not b.wire.unauthenticated


async def test_strangers_are_limited_and_do_not_keep_peers_out(a: Peer, b: Peer) -> None:
    strangers = [await asyncio.open_connection(*b.address) for _ in range(6)]
    await until(lambda: b.wire.counters["too_many_unauthenticated"] == 3, "the limit")
    for reader, _writer in strangers:
        await assert_closed(reader)
    a.knows(b)
    a.wire.send("b", Abort("r", 1))
    await until(lambda: bool(b.messages), "the peer's message")


async def test_a_peer_gets_in_while_all_places_are_taken(a: Peer, b: Peer) -> None:
    """Sooner than the others run out of time, which it would not wait for."""
    others = [await asyncio.open_connection(*b.address) for _ in range(3)]
    await until(lambda: len(b.wire.unauthenticated) == 3, "all places")
    a.knows(b)
    a.wire.send("b", Abort("r", 1))
    await until(lambda: bool(b.messages) or bool(a.lost), "the peer's message")
    assert (b.messages, a.lost) == ([Abort("r", 1)], [])
    await assert_closed(others[0][0])  # the oldest made room
    for _, writer in others:
        writer.close()


def test_who_opens_many_connections_pushes_out_their_own() -> None:
    pending: PendingConnections[int] = PendingConnections(6, 4)
    assert [pending.add(number, "10.0.0.1") for number in range(4)] == [None] * 4
    assert pending.add(4, "10.0.0.1") == 0  # its share is full
    assert pending.add(5, "10.0.0.2") is None
    assert pending.add(6, "10.0.0.3") is None
    assert pending.add(7, "10.0.0.2") == 1  # all are taken: of the address that has the most
    pending.remove(2)
    pending.remove(2)
    assert pending.add(8, "10.0.0.3") is None
    assert pending.all() == [3, 4, 5, 6, 7, 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_strangers", "for_s", "with_tls"),
    [
        (512, 3.0, False),
        (256, 3.0, True),
        pytest.param(512, 60.0, False, marks=pytest.mark.long),
    ],
)
async def test_a_peer_joins_within_a_second_whoever_else_connects(
    num_strangers: int, for_s: float, with_tls: bool, tmp_path: Path
) -> None:
    tls: TlsIdentity | None = identity_in(tmp_path) if with_tls else None
    b = await Peer("b", limits=WireLimits(), tls=tls).listen()
    old = Peer("old", limits=WireLimits(), tls=tls)
    old.knows(b)
    command = [sys.executable, "-m", "tests.engine.wire.knock", *map(str, b.address)]
    others = await asyncio.create_subprocess_exec(*command, str(num_strangers), str(for_s))
    await until(lambda: len(b.wire.unauthenticated) > 60, "many")
    end = time.monotonic() + for_s - 1.0
    times_s: list[float] = []
    while time.monotonic() < end:
        began = time.monotonic()
        joined = len(times_s)
        peer = Peer(f"peer-{joined}", limits=WireLimits(), tls=tls)
        peer.knows(b)
        peer.wire.send("b", Abort("joined", joined))
        old.wire.send("b", Abort("still here", joined))
        for message in (Abort("joined", joined), Abort("still here", joined)):
            await until(lambda message=message: message in b.messages, str(message))  # type: ignore[misc]
        times_s.append(time.monotonic() - began)
        await peer.wire.close()
        b.messages.clear()
        await asyncio.sleep(0.1)
    dropped = b.wire.counters["too_many_unauthenticated"]
    print(f"{len(times_s)} peers joined, the slowest in {max(times_s):.3f} s; {dropped} dropped")
    await others.wait()
    assert max(times_s) < 5.0  # on a machine that is busy with other tests too
    assert for_s < 60.0 or statistics.median(times_s) < 1.0
    assert dropped > 0
    assert old.wire.counters["broken"] == 0
    assert not old.lost
    for each in (old, b):
        await each.wire.close()


def flip(frame: bytes, at: int, bit: int = 0) -> bytes:
    changed = bytearray(frame)
    changed[at] ^= 1 << bit
    return bytes(changed)


@pytest.mark.parametrize(
    ("forge", "counter"),
    [
        (lambda i: ((1 << 16) + 1).to_bytes(4, "big") + b"\0", "oversized"),
        (lambda i: b"\xff" * 40, "oversized"),
        (lambda i: bytes(40), "bad_mac"),
        (lambda i: flip(i.frame(Abort("r", 2)), 4), "bad_mac"),
        (lambda i: flip(i.frame(Abort("r", 2)), 8), "bad_mac"),
        (lambda i: flip(i.frame(Abort("r", 2)), -1), "bad_mac"),
        (lambda i: i.frame(b""), "bad_frame"),
        (lambda i: i.frame(b"\x80\x04\x95garbage"), "bad_frame"),
        (lambda i: i.frame(msgpack.packb([7, {}])), "bad_frame"),
    ],
)
async def test_a_bad_frame_of_a_peer_closes_the_connection(
    forge: Callable[[Intruder], bytes], counter: str, b: Peer
) -> None:
    intruder = await authenticate(b)
    good = intruder.frame(Abort("good", 1))
    intruder.writer.write(good + forge(intruder) + intruder.frame(Abort("after", 1)))
    await assert_closed(intruder.reader)
    assert b.messages == [Abort("good", 1)]
    assert b.wire.counters[counter] == 1
    assert not b.wire.inbound


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (["Abort", {"request_id": "r", "attempt": "x"}], "Abort from a is dropped: Expected `int`"),
        (["exec", {"code": "1"}], "exec from a is dropped: unknown message"),
    ],
)
async def test_a_message_that_another_version_understands_is_dropped_alone(
    body: list[Any], reason: str, b: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    intruder = await authenticate(b)
    new = [intruder.frame(msgpack.packb(body)) for _ in range(3)]
    intruder.writer.write(b"".join([*new, intruder.frame(Abort("after", 1))]))
    await until(lambda: bool(b.messages), "the next message")
    assert b.messages == [Abort("after", 1)]
    assert b.wire.counters["not_understood"] == 3
    assert b.wire.inbound, "the connection stays"
    (line,) = caplog.messages
    assert line.startswith(reason)


async def test_another_version_of_the_handshake_is_answered_with_ours(b: Peer) -> None:
    reader, writer = await asyncio.open_connection(*b.address)
    writer.write(b"KVR\x03" + bytes(100))
    assert await reader.read() == PREAMBLE
    assert b.wire.counters["bad_version"] == 1


@pytest.mark.parametrize("order", [(0, 0, 1), (0, 2), (1, 0), (0, 2, 1)], ids=str)
async def test_frames_that_are_repeated_left_out_or_moved_close_the_connection(
    order: tuple[int, ...], b: Peer
) -> None:
    intruder = await authenticate(b)
    frames = [intruder.frame(Abort("r", number)) for number in range(3)]
    intruder.writer.write(b"".join(frames[number] for number in order))
    await assert_closed(intruder.reader)
    assert b.wire.counters["bad_mac"] == 1
    assert b.messages == [Abort("r", 0)][: 1 - order[0]]


async def test_a_truncated_frame_is_counted_and_not_delivered(b: Peer) -> None:
    intruder = await authenticate(b)
    intruder.writer.write(intruder.frame(Abort("r", 1))[:-1])
    intruder.writer.close()
    await until(lambda: b.wire.counters["truncated"] == 1, "the count")
    assert b.messages == []
    assert not b.wire.inbound


async def test_a_frame_may_come_byte_by_byte(b: Peer) -> None:
    intruder = await authenticate(b)
    for byte in intruder.frame(Abort("slow", 1)):
        intruder.writer.write(bytes([byte]))
        await asyncio.sleep(0.001)
    await until(lambda: b.messages == [Abort("slow", 1)], "the message")
