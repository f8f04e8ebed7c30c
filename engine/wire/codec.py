"""Messages as bytes: `[tag, fields]` in MessagePack, where `tag` names the message's class.

`msgspec` writes the fields from the dataclass and, on the way in, builds the dataclass and checks
every type on the way; nothing that a peer sends can name a class or run code. What cannot be
decoded raises `FrameError`, and nothing else.

Versions. Fields go by name: one that the reader does not know is left out, and one that is missing
has its default. So a new field has a default, whose meaning is what was before. A new message, or
one that means something else, or another value of an enum, is for peers alone that understand it:
it raises PROTOCOL and is registered with `since`, and the wire sends it to no older peer.

    1   a message that is not known ends the stream
    2   it is dropped, and counted
    3   weights that change while a worker serves
"""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL = 3
MAX_TAG = 40  # characters of one that is shown


class FrameError(Exception):
    """Bytes that are not a message of this version; the text says why."""

    def __init__(self, text: str, tag: str = "") -> None:
        """`tag`: of a message whose fields do not fit, or that is not known."""
        super().__init__(text)
        self.tag = tag


_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}
_since: dict[type, int] = {}


def register(*message_types: type, since: int = 1) -> None:
    """Let messages of these classes cross process boundaries; called where they are defined. A
    process can decode what it has imported, which is all that it can take. `since`: the first
    protocol that has them."""
    assert since <= PROTOCOL, f"protocol {since} is not there yet: raise PROTOCOL"
    _decoders.update({each.__name__: msgspec.msgpack.Decoder(each) for each in message_types})
    _since.update(dict.fromkeys(message_types, since))


def since(message_type: type) -> int:
    """The first protocol that has these messages."""
    return _since.get(message_type, 1)


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
    tag = ""
    try:
        tag, fields = _envelope.decode(body)
        decoder = _decoders.get(tag)
        if decoder is None:
            raise FrameError("unknown message", tag[:MAX_TAG])
        return decoder.decode(fields)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise FrameError(str(error), tag[:MAX_TAG]) from error
