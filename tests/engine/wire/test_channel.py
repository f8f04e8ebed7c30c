"""Channels: what two versions say to each other is understood, or refused in words."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvrelay.engine.settings import Section
from kvrelay.engine.wire import channel
from kvrelay.engine.wire.channel import (
    MAX_FRAME_BYTES,
    MAX_NOISE_BYTES,
    PREAMBLE,
    PROTOCOL,
    BlockingChannel,
    Channel,
    ChannelError,
    Incoming,
    frame,
    greeting,
    pack,
    register,
    unpack,
)


class Limits(Section, frozen=True):
    num_blocks: int = 7


@dataclass(frozen=True)
class Sample:
    name: str
    limits: tuple[Limits, ...] = ()
    folder: Path | None = None
    keys: dict[bytes, Limits] | None = None


register(Sample)
SAMPLE = Sample("a", (Limits(1), Limits(2)), Path("/x"), {b"\0\xff": Limits(3)})


def said(name: str, fields: dict[str, Any]) -> bytes:
    """The stream that another version sends, which has one message."""
    body = msgpack.packb([name, fields])
    return greeting() + len(body).to_bytes(4, "big") + body


def greeting_of(protocol: int, **more: object) -> bytes:
    body = msgpack.packb(["Hello", {"protocol": protocol, "package": "7.1", **more}])
    return PREAMBLE + len(body).to_bytes(4, "big") + body


def test_messages_come_whole_however_the_stream_is_cut() -> None:
    stream = b"Last login: today\n" + pack(SAMPLE) + frame(Sample("b"))
    for size in (1, 3, 50, len(stream)):
        incoming, found = Incoming(), []
        for start in range(0, len(stream), size):
            found += incoming.feed(stream[start : start + size])
        assert found == [SAMPLE, Sample("b")]
    assert incoming.hello is not None
    assert incoming.hello.pid > 0


def test_a_field_more_and_a_field_less_are_understood_in_any_order() -> None:
    later = {"colour": "red", "limits": [{"speed": 3.5, "num_blocks": 2}, {}], "name": "a"}
    assert unpack(said("Sample", later)) == Sample("a", (Limits(2), Limits(7)))
    keyed = {"name": "a", "keys": {b"k": {"speed": 1}}}
    assert unpack(said("Sample", keyed)) == Sample("a", keys={b"k": Limits()})
    assert unpack(said("Sample", {"name": "a"})) == Sample("a")
    assert Incoming().feed(greeting_of(PROTOCOL, colour="red") + frame(Sample("a")))


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (greeting_of(PROTOCOL + 1), rf"protocol {PROTOCOL + 1} \(kvrelay 7\.1\), and this one"),
        (said("Sample", {}), "Sample: Object missing required field `name`"),
        (said("Sample", {"name": 3}), r"Sample: Expected `str`, got `int` - at `\$.name`"),
        (said("Example", {}), "unknown message 'Example'"),
        (said("NotUnderstood", {"reason": "too new"}), "did not understand: too new"),
        (greeting() + b"\0\0\0\1\xc1", "a message: "),
        (greeting() + b"\xff\0\0\0", f"4278190080 bytes: expected at most {MAX_FRAME_BYTES}"),
        (PREAMBLE + frame(Sample("a")), "the first message is Sample: expected Hello"),
        (b"x" * (MAX_NOISE_BYTES + 1), "the other end is not KVRelay"),
    ],
    ids=[
        "protocol",
        "missing",
        "type",
        "unknown",
        "refused",
        "malformed",
        "long",
        "first",
        "noise",
    ],
)
def test_what_is_not_understood_is_refused_in_words(stream: bytes, why: str) -> None:
    with pytest.raises(ChannelError, match=why):
        Incoming().feed(stream)


def test_a_stream_without_a_message_is_at_its_end() -> None:
    with pytest.raises(EOFError):
        unpack(b"command not found\n")


def test_a_message_that_no_reader_would_take_is_not_sent() -> None:
    with pytest.raises(
        ChannelError, match=f"Sample has .* bytes: expected at most {MAX_FRAME_BYTES}"
    ):
        frame(Sample("a" * MAX_FRAME_BYTES))
    with pytest.raises(AssertionError, match="two messages are called Sample"):
        register(type("Sample", (), {}))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_the_last_words_are_read_and_then_the_end(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = BlockingChannel(ends[0]), BlockingChannel(ends[1])
    ours.send(SAMPLE)  # nobody reads it
    theirs.send(Sample("last"))
    theirs.close()
    assert ours.hello().protocol == PROTOCOL
    assert ours.receive() == Sample("last")
    with pytest.raises(EOFError):
        ours.receive()
    ours.send(SAMPLE)  # is lost


def test_who_does_not_understand_tells_the_other_end(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PROTOCOL", PROTOCOL + 1)
    later = BlockingChannel(ends[0])
    monkeypatch.undo()
    ours = BlockingChannel(ends[1])
    with pytest.raises(ChannelError, match=f"speaks protocol {PROTOCOL + 1}"):
        ours.receive()
    monkeypatch.setattr(channel, "PROTOCOL", PROTOCOL + 1)
    with pytest.raises(ChannelError, match=f"speaks protocol {PROTOCOL} "):
        later.receive()


def on_loop(other: socket.socket, talk: Callable[[BlockingChannel], None], ours: Any) -> None:
    """`talk` on a thread at one end, `ours` on an event loop at the other."""
    thread = threading.Thread(target=lambda: talk(BlockingChannel(other)))
    thread.start()
    try:
        asyncio.run(asyncio.wait_for(ours(), 20))
    finally:
        thread.join(20)


def test_an_end_on_a_loop_talks_and_hears_the_end(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    num_messages = 20_000  # more than the buffers between the two hold
    has_sent_all = threading.Event()

    def echo(theirs: BlockingChannel) -> None:
        message = theirs.receive()
        for _ in range(num_messages):
            theirs.send(message)
        has_sent_all.set()
        theirs.close()

    async def ours() -> None:
        end = await Channel.over(ends[0])
        end.send(SAMPLE)
        await asyncio.sleep(0.2)
        assert not has_sent_all.is_set(), "who is not read has to wait"
        for _ in range(num_messages):
            assert await end.receive() == SAMPLE
        with pytest.raises(EOFError):
            await end.receive()
        end.send(SAMPLE)  # is lost
        end.close()
        assert not end.is_open

    on_loop(ends[1], echo, ours)


def test_an_end_on_a_loop_refuses_in_words(ends: tuple[socket.socket, socket.socket]) -> None:
    answers: list[str] = []

    def speak(theirs: BlockingChannel) -> None:
        theirs._write(said("Example", {})[len(greeting()) :])
        try:
            theirs.receive()
        except ChannelError as error:
            answers.append(str(error))

    async def ours() -> None:
        end = await Channel.over(ends[0])
        with pytest.raises(ChannelError, match="unknown message 'Example'"):
            await end.receive()
        end.close()

    on_loop(ends[1], speak, ours)
    assert answers == ["the other end did not understand: unknown message 'Example'"]
