"""The channel between a process and whoever started it, on this machine or by ssh on another.

Each direction is a stream of bytes:

    preamble (8 bytes) | frame with a Hello | frame | frame ...
    frame: length of the body (4 bytes, big endian) | body: [name, fields] in MessagePack

Fields go by name, so that two versions understand each other: a field that the reader does not know
is left out, and one that is missing has its default. Hence a new field has a default, and a change
that old readers would get wrong raises PROTOCOL. The two ends compare that first; where it differs,
or a message is not known, each says why, in words, and the channel ends. The ends trust each other:
a socket that is inherited, or ssh, has shown who is there. Messages of the cluster's network
are `codec`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

PREAMBLE = b"KVRelay\0"
PROTOCOL = 1
VERSION_VARIABLE = "KVRELAY_VERSION"  # for processes in which the package is not installed
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 16 << 20
MAX_NOISE_BYTES = 64 << 10  # before the preamble: what a login shell prints
MAX_QUEUED_BYTES = 1 << 20  # not read by the other end; what comes then is dropped
READ_BYTES = 1 << 16
BEAT_S = 1.0
DETACH_S = 5.0


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of each end. Its fields stay, whatever PROTOCOL is."""

    protocol: int
    package: str  # version of kvrelay
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Beat:
    """Sent every BEAT_S by a process whose starter wants to know that its loop turns."""


@dataclass(frozen=True, slots=True)
class NotUnderstood:
    """The sender ends the channel: `reason` says what it could not read."""

    reason: str


class ChannelError(Exception):
    """What the other end says is not understood; one line that says why."""


_types: dict[str, type] = {}


def register(*message_types: type) -> None:
    """Let messages of these classes cross channels; called where they are defined. A process can
    read what it has imported, which is all that it can take."""
    for each in message_types:
        known = _types.setdefault(each.__name__, each)
        assert known is each, f"two messages are called {each.__name__}"


def _to_wire(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} does not cross a channel")


def _from_wire(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} does not cross a channel")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_decoder = msgspec.msgpack.Decoder(tuple[str, Any])


def frame(message: Any) -> bytes:
    """Raises ChannelError if `message` is larger than a frame may be."""
    name = type(message).__name__
    assert _types.get(name) is type(message), f"{name} is not a message of a channel"
    body = _encoder.encode((name, message))
    if len(body) > MAX_FRAME_BYTES:
        raise ChannelError(f"{name} has {len(body)} bytes: expected at most {MAX_FRAME_BYTES}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def greeting() -> bytes:
    """What each end sends first."""
    return PREAMBLE + frame(Hello(PROTOCOL, own_version(), os.getpid()))


@functools.cache
def own_version() -> str:
    """Version of the package that this process runs."""
    try:
        return version("kvrelay")
    except PackageNotFoundError:  # who started it in another environment, from this source, knows
        return os.environ.get(VERSION_VARIABLE, "not installed")


def _message(body: bytes) -> Any:
    name = "a message"
    try:
        name, given = _decoder.decode(body)
        kind = _types.get(name)
        if kind is None:
            raise ChannelError(f"unknown message {name[:40]!r}")
        return msgspec.convert(_known_part(given, _schema(kind)), kind, dec_hook=_from_wire)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ChannelError(f"{name[:40]}: {error}") from error


@functools.cache
def _schema(kind: type) -> msgspec.inspect.Type:
    return msgspec.inspect.type_info(kind)


def _known_part(value: Any, schema: msgspec.inspect.Type) -> Any:
    """Without fields that the schema does not have: sections of settings, which refuse a user's
    misspelt key, come by here too, from a version that may have more of them."""
    match schema, value:
        case (
            (
                msgspec.inspect.StructType(fields=fields)
                | msgspec.inspect.DataclassType(fields=fields)
            ),
            dict(),
        ):
            schemas = {each.encode_name: each.type for each in fields}
            return {k: _known_part(v, schemas[k]) for k, v in value.items() if k in schemas}
        case msgspec.inspect.UnionType(types=types), _:
            for each in types:
                value = _known_part(value, each)
            return value
        case msgspec.inspect.CollectionType(item_type=item), list():
            return [_known_part(each, item) for each in value]
        case msgspec.inspect.DictType(value_type=item), dict():
            return {key: _known_part(each, item) for key, each in value.items()}
    return value


class Incoming:
    """Messages out of the bytes of one direction, however these are cut."""

    def __init__(self, hello: Hello | None = None, unread: bytes = b"") -> None:
        """`hello`: of a stream that goes on, of which `unread` has come and was not handed out."""
        self._buffer = bytearray(unread)
        self._has_begun = hello is not None
        self.hello = hello

    @property
    def unread(self) -> bytes:
        """The beginning of a message whose rest is still to come."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete now. Raises ChannelError."""
        self._buffer += data
        found = []
        if self._has_begun or self._begins():
            while (body := self._next_body()) is not None:
                message = _message(body)
                if self.hello is None:
                    self.hello = _checked(message)
                elif isinstance(message, NotUnderstood):
                    raise ChannelError(f"the other end did not understand: {message.reason}")
                else:
                    found.append(message)
        return found

    def _begins(self) -> bool:
        at = self._buffer.find(PREAMBLE)
        if at < 0 and len(self._buffer) > MAX_NOISE_BYTES:
            raise ChannelError("the other end is not KVRelay")
        if at >= 0:
            del self._buffer[: at + len(PREAMBLE)]
            self._has_begun = True
        return self._has_begun

    def _next_body(self) -> bytes | None:
        if len(self._buffer) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        if length > MAX_FRAME_BYTES:
            raise ChannelError(f"a frame of {length} bytes: expected at most {MAX_FRAME_BYTES}")
        end = LENGTH_BYTES + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH_BYTES:end])
        del self._buffer[:end]
        return body


def _checked(hello: Any) -> Hello:
    if not isinstance(hello, Hello):
        raise ChannelError(f"the first message is {type(hello).__name__}: expected Hello")
    if hello.protocol != PROTOCOL:
        raise ChannelError(
            f"the other end speaks protocol {hello.protocol} (kvrelay {hello.package}), and this "
            f"one {PROTOCOL} (kvrelay {own_version()}): install versions that go together"
        )
    return hello


def pack(message: Any) -> bytes:
    """A whole stream that has one message."""
    return greeting() + frame(message)


def unpack(data: bytes) -> Any:
    """The message of a whole stream. Raises ChannelError, and EOFError where there is none."""
    messages = Incoming().feed(data)
    if not messages:
        raise EOFError
    return messages[0]


def command(module: str, *args: str, end: socket.socket) -> list[str]:
    """Runs `module` with a channel: `end` goes to the new process, by number, as the last word."""
    return [sys.executable, "-m", module, *args, str(end.fileno())]


def inherited(fd: str | int) -> socket.socket:
    """The end that this process was started with; its own children do not get it."""
    end = socket.socket(fileno=int(fd))
    end.set_inheritable(False)
    return end


class BlockingChannel:
    """One end, for threads: one reads, and one writes. Owns its socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._incoming = Incoming()
        self._messages: deque[Any] = deque()
        self._write(greeting())

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the other end may be gone, which `receive` says
            self._end.sendall(data)

    def send(self, message: Any) -> None:
        """Raises ChannelError if `message` is too large."""
        self._write(frame(message))

    def hello(self) -> Hello:
        """Blocks until the other end has said who it is. Raises EOFError and ChannelError."""
        while self._incoming.hello is None:
            self._read()
        return self._incoming.hello

    def receive(self) -> Any:
        """Blocks. Raises EOFError when the other end is gone, and ChannelError."""
        while not self._messages:
            self._read()
        return self._messages.popleft()

    def _read(self) -> None:
        try:
            data = self._end.recv(READ_BYTES)
        except ConnectionError:
            data = b""
        self._messages += _understood(self._incoming, data, self.send)

    def close(self) -> None:
        self._end.close()


class Channel:
    """One end, on an event loop. Owns its socket."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        unread: bytes | None = None,
    ) -> None:
        """`unread`: of a channel that goes on (`detach`); None: this one begins."""
        self._reader, self._writer = reader, writer
        self._messages: deque[Any] = deque()
        if unread is None:
            self._incoming = Incoming()
            writer.write(greeting())
        else:
            self._incoming = Incoming(Hello(PROTOCOL, own_version()), unread)

    @classmethod
    async def over(cls, end: socket.socket, unread: bytes | None = None) -> Channel:
        return cls(*await asyncio.open_connection(sock=end), unread)

    async def detach(self) -> tuple[int, list[Any], bytes]:
        """Leave the channel to whoever takes it over, in this process or in what it becomes: a
        copy of its socket, the messages that have come, and what was not read of the next. Nobody
        reads it any more. Raises TimeoutError where the other end takes nothing."""
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        transport.set_write_buffer_limits(0)
        async with asyncio.timeout(DETACH_S):
            await self._writer.drain()
        self._reader.feed_eof()  # so that what has come is read, without waiting for more
        messages = [*self._messages, *self._incoming.feed(await self._reader.read())]
        copy = os.dup(self._writer.get_extra_info("socket").fileno())
        return copy, messages, self._incoming.unread

    @property
    def is_open(self) -> bool:
        return not self._writer.is_closing()

    def send(self, message: Any) -> None:
        """Without waiting. An other end that does not read for minutes misses some."""
        if self.is_open and self._writer.transport.get_write_buffer_size() < MAX_QUEUED_BYTES:
            self._writer.write(frame(message))

    async def receive(self) -> Any:
        """Raises EOFError when the other end is gone, and ChannelError."""
        while not self._messages:
            try:
                data = await self._reader.read(READ_BYTES)
            except ConnectionError:
                data = b""
            self._messages += _understood(self._incoming, data, self.send)
        return self._messages.popleft()

    def close(self) -> None:
        self._writer.close()


def _understood(incoming: Incoming, data: bytes, send: Callable[[Any], None]) -> list[Any]:
    """The messages that `data` completes; who sent what is none hears why."""
    if not data:
        raise EOFError
    try:
        return incoming.feed(data)
    except ChannelError as error:
        send(NotUnderstood(str(error)))
        raise


register(Hello, Beat, NotUnderstood)
