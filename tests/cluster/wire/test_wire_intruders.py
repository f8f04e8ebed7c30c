"""The wire's closed door: what is not a proper frame of an authenticated peer has no effect."""

from __future__ import annotations

import asyncio

import msgpack
import pytest

from cluster.wire.codec import encode
from cluster.wire.handshake import NONCE_BYTES, PREAMBLE, REPLY_BYTES, make_hello, make_proof
from engine.messages import Abort
from tests.cluster.wire.wire_peers import TOKEN, Peer, run, until


def frame(body: bytes, length: int | None = None, preamble: bytes = PREAMBLE) -> bytes:
    return preamble + (len(body) if length is None else length).to_bytes(4, "big") + body


async def authenticate(b: Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*b.address)
    hello = make_hello("a", "b", bytes(NONCE_BYTES))
    writer.write(hello)
    reply = await reader.readexactly(REPLY_BYTES)
    nonce = reply[len(PREAMBLE) : len(PREAMBLE) + NONCE_BYTES]
    writer.write(make_proof(TOKEN, b"initiator", hello, nonce))
    return reader, writer


async def assert_closed(reader: asyncio.StreamReader) -> None:
    try:
        async with asyncio.timeout(10):
            while await reader.read(1 << 16):
                pass
    except ConnectionResetError:
        pass


def test_the_wrong_token_is_refused_on_both_sides() -> None:
    async def scenario(a: Peer, b: Peer) -> None:
        stranger = Peer("a", token=b"another token")
        stranger.knows(b)
        stranger.wire.send("b", Abort("r", 1))
        await until(lambda: stranger.wire.counters["auth_failed"] > 0, "the refusal")
        await until(lambda: bool(stranger.lost), "giving up")
        await stranger.wire.close()
        assert b.messages == []

        reader, writer = await asyncio.open_connection(*b.address)
        writer.write(make_hello("a", "b", bytes(NONCE_BYTES)))
        await reader.readexactly(REPLY_BYTES)
        writer.write(bytes(32) + frame(encode(Abort("r", 1))))
        await assert_closed(reader)
        assert b.wire.counters["auth_failed"] == 1
        assert b.messages == []
        assert b.wire.counters["accepted"] == 0

    run(scenario)


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    async def scenario(a: Peer, b: Peer) -> None:
        hello = make_hello("a", "b", bytes(NONCE_BYTES))
        reader, writer = await asyncio.open_connection(*b.address)
        writer.write(hello)
        reply = await reader.readexactly(REPLY_BYTES)
        nonce = reply[len(PREAMBLE) : len(PREAMBLE) + NONCE_BYTES]
        recorded = make_proof(TOKEN, b"initiator", hello, nonce) + frame(encode(Abort("r", 1)))
        writer.write(recorded)
        await until(lambda: b.messages == [Abort("r", 1)], "the original")

        reader, writer = await asyncio.open_connection(*b.address)
        writer.write(hello + recorded)
        await assert_closed(reader)
        assert b.wire.counters["auth_failed"] == 1
        assert len(b.messages) == 1

    run(scenario)


def test_the_responders_own_proof_cannot_be_reflected_to_it() -> None:
    async def scenario(a: Peer, b: Peer) -> None:
        reader, writer = await asyncio.open_connection(*b.address)
        writer.write(make_hello("a", "b", bytes(NONCE_BYTES)))
        reply = await reader.readexactly(REPLY_BYTES)
        writer.write(reply[-32:] + frame(encode(Abort("r", 1))))
        await assert_closed(reader)
        assert b.wire.counters["auth_failed"] == 1
        assert b.messages == []

    run(scenario)


def test_a_proof_for_one_node_does_not_open_another() -> None:
    async def scenario(a: Peer, b: Peer) -> None:
        b.wire.serves.add("c")
        reader, writer = await asyncio.open_connection(*b.address)
        hello = make_hello("a", "c", bytes(NONCE_BYTES))
        writer.write(hello)
        reply = await reader.readexactly(REPLY_BYTES)
        nonce = reply[len(PREAMBLE) : len(PREAMBLE) + NONCE_BYTES]
        other = make_hello("a", "b", bytes(NONCE_BYTES))
        writer.write(make_proof(TOKEN, b"initiator", other, nonce))
        await assert_closed(reader)
        assert b.wire.counters["auth_failed"] == 1

    run(scenario)


@pytest.mark.parametrize(
    ("data", "counter"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "bad_magic"),
        (b"KVR\x02" + bytes(100), "bad_version"),
        (make_hello("a", "somebody else", bytes(NONCE_BYTES)), "unknown_destination"),
        (make_hello("a", "b", bytes(NONCE_BYTES))[:-1] + b"\xff", "bad_hello"),
        (PREAMBLE, "handshake_timeout"),
        (b"", "handshake_timeout"),
        (make_hello("a", "b", bytes(NONCE_BYTES)), "handshake_timeout"),
    ],
)
def test_a_stranger_is_closed_and_counted(data: bytes, counter: str) -> None:
    async def scenario(a: Peer, b: Peer) -> None:
        reader, writer = await asyncio.open_connection(*b.address)
        writer.write(data)
        await assert_closed(reader)
        assert +b.wire.counters == {counter: 1}
        assert not b.wire.strangers

    run(scenario)


def test_strangers_are_limited_and_do_not_keep_peers_out() -> None:
    async def scenario(a: Peer, b: Peer) -> None:
        strangers = [await asyncio.open_connection(*b.address) for _ in range(6)]
        await until(lambda: b.wire.counters["too_many_strangers"] == 3, "the limit")
        for reader, _writer in strangers:
            await assert_closed(reader)
        a.knows(b)
        a.wire.send("b", Abort("r", 1))
        await until(lambda: bool(b.messages), "the peer's message")

    run(scenario)


@pytest.mark.parametrize(
    ("data", "counter"),
    [
        (frame(b"", preamble=b"KVR\x02"), "bad_version"),
        (frame(b"", preamble=b"HTTP"), "bad_magic"),
        (frame(b"", length=(1 << 16) + 1), "oversized"),
        (frame(b"", length=(1 << 32) - 1), "oversized"),
        (frame(b""), "bad_frame"),
        (frame(b"\x80\x04\x95garbage"), "bad_frame"),
        (frame(msgpack.packb(["Abort", {"request_id": "r", "attempt": "x"}])), "bad_frame"),
        (frame(msgpack.packb(["exec", {"code": "1"}])), "bad_frame"),
    ],
)
def test_a_bad_frame_of_a_peer_closes_the_connection(data: bytes, counter: str) -> None:
    async def scenario(a: Peer, b: Peer) -> None:
        reader, writer = await authenticate(b)
        good = frame(encode(Abort("good", 1)))
        writer.write(good + data + good)
        await assert_closed(reader)
        assert b.messages == [Abort("good", 1)]
        assert b.wire.counters[counter] == 1
        assert not b.wire.inbound

    run(scenario)


def test_a_truncated_frame_is_counted_and_not_delivered() -> None:
    async def scenario(a: Peer, b: Peer) -> None:
        _reader, writer = await authenticate(b)
        writer.write(frame(encode(Abort("r", 1)))[:-1])
        writer.close()
        await until(lambda: b.wire.counters["truncated"] == 1, "the count")
        assert b.messages == []
        assert not b.wire.inbound

    run(scenario)


def test_a_frame_may_come_byte_by_byte() -> None:
    async def scenario(a: Peer, b: Peer) -> None:
        _reader, writer = await authenticate(b)
        for byte in frame(encode(Abort("slow", 1))):
            writer.write(bytes([byte]))
            await asyncio.sleep(0.001)
        await until(lambda: b.messages == [Abort("slow", 1)], "the message")

    run(scenario)
