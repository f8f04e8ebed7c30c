"""Malformed bytes for the parsers of frames, messages and handshakes, drawn from a seed."""

from __future__ import annotations

from random import Random

from kvrelay.engine.kv.events import KVSnapshotRequest
from kvrelay.engine.messages import Abort, Probe
from kvrelay.engine.stats import RouterUp
from kvrelay.engine.wire.codec import encode

LONGEST_COPY = 1 << 16
INTERESTING = (0, 1, 4, 16, 0x7F, 0x80, 0xC0, 0xC1, 0xDD, 0xDF, 0xFE, 0xFF)

# Bodies of real messages, which mutations begin with.
BODIES = (
    encode(Abort("r", 1)),
    encode(Abort("a longer id of a request " * 8, 2**63)),
    encode(Probe("request", 7, "router-0", 3)),
    encode(RouterUp("router-0")),
    encode(KVSnapshotRequest("router-1")),
)


def mutate(data: bytes, rng: Random) -> bytes:
    """`data` with one to four changes: never `data` itself."""
    changed = data
    for _ in range(rng.randrange(1, 5)):
        changed = _change(changed, rng)[:LONGEST_COPY]
    return changed if changed != data else data + b"\0"


def _change(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    size = rng.choice((1, 1, 2, 4, 8, 64))
    match rng.randrange(7):
        case 0 if at < len(data):
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at] + bytes([rng.choice(INTERESTING)]) * size + data[at + size :]
        case 2:
            return data[:at] + data[at + size :]
        case 3:
            return data[:at] + rng.randbytes(size) + data[at:]
        case 4:
            return data[:at] + data[max(0, at - size) : at] * rng.choice((2, 40)) + data[at:]
        case 5:
            return data[:at]
        case _:
            return rng.randbytes(rng.randrange(64))
