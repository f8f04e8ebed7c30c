"""Frames of a connection whose ends have proved themselves: each carries a MAC.

    length of the body (4 bytes, big endian) | kind (1) | body | MAC (16)

The MAC is a keyed BLAKE2b over the frame's number, length, kind and body. Each direction of each
connection has a key of its own (see `handshake.session_keys`) and counts its frames from 0, so a
frame that was changed, repeated, left out, moved, or taken from another connection does not fit.
Pure bytes: no sockets here.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from enum import IntEnum
from hashlib import blake2b

HEADER_BYTES = 5
MAC_BYTES = 16
KEY_BYTES = 32


class ProtocolError(Exception):
    """The other end does not keep to the protocol. `counter` names what was wrong."""

    def __init__(self, counter: str, detail: str = "") -> None:
        super().__init__(detail or counter)
        self.counter = counter


class Kind(IntEnum):
    """What a body is. Messages go to the responder, the others to the initiator."""

    MESSAGE = 0  # see `codec`
    RESUME = 1  # the first of the responder: see `handshake.Resume`
    ACK = 2  # how many messages of the stream have arrived


class _Mac:
    """Authenticates one direction. Invariant: `_number` frames have been sealed or accepted."""

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES
        self._keyed = blake2b(key=key, digest_size=MAC_BYTES)
        self._number = 0

    def next(self, header: bytes, body: bytes) -> bytes:
        state = self._keyed.copy()  # much cheaper than to key it again
        state.update(self._number.to_bytes(8, "big") + header)
        state.update(body)
        self._number += 1
        return state.digest()


class FrameWriter:
    """Frames on their way out of one connection."""

    def __init__(self, key: bytes) -> None:
        self._mac = _Mac(key)

    def seal(self, kind: Kind, body: bytes) -> bytes:
        header = len(body).to_bytes(4, "big") + bytes([kind])
        return b"".join((header, body, self._mac.next(header, body)))


class FrameReader:
    """Frames that arrive on one connection. Once it has raised, nothing more is to be read."""

    def __init__(self, key: bytes, max_body_bytes: int) -> None:
        self._mac = _Mac(key)
        self._max_body_bytes = max_body_bytes
        self._known_kinds = frozenset(int(kind) for kind in Kind)

    def read(self, buffer: bytearray) -> Iterator[tuple[Kind, bytes]]:
        """Takes each whole frame at the start of `buffer` out of it, once its MAC was checked.
        Raises ProtocolError: oversized, bad_mac, bad_kind."""
        start = 0
        try:
            while len(buffer) - start >= HEADER_BYTES:
                header = bytes(buffer[start : start + HEADER_BYTES])
                length = int.from_bytes(header[:4], "big")
                if length > self._max_body_bytes:
                    raise ProtocolError("oversized")
                body_at = start + HEADER_BYTES
                end = body_at + length + MAC_BYTES
                if len(buffer) < end:
                    return
                with memoryview(buffer) as view:  # copied once
                    body = bytes(view[body_at : body_at + length])
                    mac = bytes(view[body_at + length : end])
                if not hmac.compare_digest(mac, self._mac.next(header, body)):
                    raise ProtocolError("bad_mac")
                if header[4] not in self._known_kinds:
                    raise ProtocolError("bad_kind")
                start = end
                yield Kind(header[4]), body
        finally:
            del buffer[:start]
