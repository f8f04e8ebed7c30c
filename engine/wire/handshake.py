"""How two processes of one cluster prove to each other that they hold the cluster's token.

    initiator -> responder   hello  = magic, version, nonce, stream, "from", "to"
    responder -> initiator   reply  = magic, version, nonce, HMAC(token, "responder" + transcript)
    initiator -> responder   proof  = HMAC(token, "initiator" + transcript)
    responder -> initiator   resume = a frame: which process it is, and what it has of the stream

Whatever the version, both ends begin with the magic and the version. A responder of another one
answers with these alone.

The transcript is the hello and the responder's nonce, so both proofs are bound to both nonces
(no replay), to the names of both ends (no misdirection) and to the role that made them (no
reflection). From the token and the transcript both ends derive the keys of the frames that follow,
one for each direction. What a stranger may learn is that this is a KVRelay: only who has proved
itself changes the state of a stream, or hears of it. Pure bytes: no sockets here.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

from kvrelay.engine.node import NodeId
from kvrelay.engine.wire.context import INCARNATION_BYTES
from kvrelay.engine.wire.frames import KEY_BYTES, ProtocolError

MAGIC = b"KVR"
VERSION = 2
PREAMBLE = MAGIC + bytes([VERSION])

NONCE_BYTES = 32
PROOF_BYTES = 32
REPLY_BYTES = len(PREAMBLE) + NONCE_BYTES + PROOF_BYTES
_STREAM = struct.Struct(f">Q{INCARNATION_BYTES}sQ")
_RESUME = struct.Struct(f">{INCARNATION_BYTES}sQ")
_ACK = struct.Struct(">Q")
_FIXED_HELLO_BYTES = len(PREAMBLE) + NONCE_BYTES + _STREAM.size + 2
MAX_CONTROL_BYTES = _RESUME.size
REJECTED = (1 << 64) - 1
"""Of a stream with a message that is none: more than were ever sent."""


@dataclass(frozen=True, slots=True)
class StreamId:
    """One numbered sequence of messages to one peer. A process begins a new one, with a higher
    number, when it has given up the last."""

    epoch: int  # the sender's
    incarnation: bytes  # names its process
    number: int


@dataclass(frozen=True, slots=True)
class Resume:
    """`count`: messages of the stream that have arrived, or REJECTED."""

    incarnation: bytes  # names the responder's process
    count: int


@dataclass(frozen=True, slots=True)
class Hello:
    stream: StreamId
    sender: NodeId
    to: NodeId
    raw: bytes


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """For the frames of one connection, by who sends them."""

    initiator: bytes
    responder: bytes


def check_preamble(data: bytes | bytearray) -> None:
    """Raises ProtocolError as soon as `data`, possibly incomplete, cannot be ours."""
    have = bytes(data[: len(PREAMBLE)])
    if have[: len(MAGIC)] != MAGIC[: len(have)]:
        raise ProtocolError("bad_magic")
    if len(have) == len(PREAMBLE) and have != PREAMBLE:
        raise ProtocolError("bad_version", f"version {have[-1]} of the handshake")


def make_hello(sender: NodeId, to: NodeId, stream: StreamId, nonce: bytes) -> bytes:
    names = [sender.encode(), to.encode()]
    assert len(nonce) == NONCE_BYTES
    assert all(0 < len(name) < 256 for name in names), "node names are 1 to 255 bytes"
    fixed = _STREAM.pack(stream.epoch, stream.incarnation, stream.number)
    return PREAMBLE + nonce + fixed + bytes(len(name) for name in names) + b"".join(names)


def parse_hello(data: bytes | bytearray) -> Hello | None:
    """The hello at the start of `data`; None while it is incomplete. Raises ProtocolError."""
    check_preamble(data)
    if len(data) < _FIXED_HELLO_BYTES:
        return None
    sender_end = _FIXED_HELLO_BYTES + data[_FIXED_HELLO_BYTES - 2]
    end = sender_end + data[_FIXED_HELLO_BYTES - 1]
    if len(data) < end:
        return None
    try:
        sender = bytes(data[_FIXED_HELLO_BYTES:sender_end]).decode()
        to = bytes(data[sender_end:end]).decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("bad_hello") from error
    stream = StreamId(*_STREAM.unpack_from(data, len(PREAMBLE) + NONCE_BYTES))
    return Hello(stream, sender, to, bytes(data[:end]))


def make_proof(token: bytes, role: bytes, hello: bytes, responder_nonce: bytes) -> bytes:
    assert role in (b"initiator", b"responder")
    return hmac.digest(token, b"kvrelay " + role + b"\0" + hello + responder_nonce, "sha256")


def session_keys(token: bytes, hello: bytes, responder_nonce: bytes) -> SessionKeys:
    """HKDF (RFC 5869, SHA-256): new for each connection, since the transcript is."""
    transcript = hello + responder_nonce
    secret = hmac.digest(b"kvrelay session", token, "sha256")  # extract
    first, second = (
        hmac.digest(secret, b"kvrelay frames " + role + b"\0" + transcript + b"\x01", "sha256")
        for role in (b"initiator", b"responder")
    )
    assert len(first) == len(second) == KEY_BYTES
    return SessionKeys(first, second)


def make_reply(token: bytes, hello: bytes, nonce: bytes) -> bytes:
    assert len(nonce) == NONCE_BYTES
    return PREAMBLE + nonce + make_proof(token, b"responder", hello, nonce)


def check_reply(token: bytes, hello: bytes, reply: bytes) -> bytes:
    """The responder's nonce, if `reply` shows that it has the token. Raises ProtocolError."""
    check_preamble(reply)
    nonce = reply[len(PREAMBLE) : len(PREAMBLE) + NONCE_BYTES]
    expected = make_proof(token, b"responder", hello, nonce)
    if not hmac.compare_digest(reply[len(PREAMBLE) + NONCE_BYTES :], expected):
        raise ProtocolError("auth_failed")
    return nonce


def check_proof(token: bytes, hello: bytes, nonce: bytes, proof: bytes) -> None:
    """Raises ProtocolError unless `proof` shows that the initiator has the token."""
    if not hmac.compare_digest(proof, make_proof(token, b"initiator", hello, nonce)):
        raise ProtocolError("auth_failed")


def make_resume(incarnation: bytes, count: int) -> bytes:
    return _RESUME.pack(incarnation, count)


def parse_resume(body: bytes) -> Resume:
    """Reads what `Resume` is sent as. Raises ProtocolError."""
    if len(body) != _RESUME.size:
        raise ProtocolError("bad_resume")
    return Resume(*_RESUME.unpack(body))


def make_ack(count: int) -> bytes:
    return _ACK.pack(count)


def parse_ack(body: bytes) -> int:
    """Returns the number of an acknowledged frame. Raises ProtocolError."""
    if len(body) != _ACK.size:
        raise ProtocolError("bad_ack")
    count: int = _ACK.unpack(body)[0]
    return count
