"""Messages as bytes: `[tag, fields]` in MessagePack, where `tag` names the message's class.

`msgspec` writes the fields from the dataclass and, on the way in, builds the dataclass and checks
every type on the way; nothing that a peer sends can name a class or run code. What cannot be
decoded raises `FrameError`, and nothing else.
"""

from __future__ import annotations

from typing import Any

import msgspec


class FrameError(Exception):
    """Bytes that are not a message of this version; the text says why."""


_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}


def register(*message_types: type) -> None:
    """Let messages of these classes cross process boundaries; called where they are defined. A
    process can decode what it has imported, which is all that it can take."""
    _decoders.update({each.__name__: msgspec.msgpack.Decoder(each) for each in message_types})


def encode(message: Any) -> bytes:
    """Bytes of a registered message. Raises FrameError if a field does not fit the format."""
    tag = type(message).__name__
    assert tag in _decoders, f"{tag} is not a message that crosses processes"
    try:
        return _encoder.encode((tag, message))
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise FrameError(f"{tag} cannot be encoded: {error}") from error


def decode_message(body: bytes | bytearray | memoryview) -> Any:
    """The message in `body`. Raises FrameError: unknown tag, wrong types, truncated, trailing."""
    try:
        tag, fields = _envelope.decode(body)
        decoder = _decoders.get(tag)
        if decoder is None:
            raise FrameError(f"unknown message {tag[:40]!r}")
        return decoder.decode(fields)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise FrameError(str(error)) from error
