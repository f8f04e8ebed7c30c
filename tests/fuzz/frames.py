"""`python -m tests.fuzz.frames`: malformed frames and handshakes, in process and over sockets.

In process, each round is a frame of one of four kinds: mutated after it was sealed (the MAC must
not fit), sealed around a mutated message (it must decode to a message, or raise FrameError), a
mutated handshake, or bytes cut and joined at random. Over sockets the same bytes go to a process
that listens, which must answer a peer before, between and after. Memory must stay flat.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import psutil

from kvrelay.engine.kv.events import KVSnapshotRequest
from kvrelay.engine.messages import Abort, Probe
from kvrelay.engine.stats import RouterUp
from kvrelay.engine.wire.codec import FrameError, decode_message, encode
from kvrelay.engine.wire.frames import KEY_BYTES, FrameReader, FrameWriter, Kind, ProtocolError
from kvrelay.engine.wire.handshake import (
    NONCE_BYTES,
    PREAMBLE,
    REPLY_BYTES,
    StreamId,
    check_reply,
    make_hello,
    make_proof,
    make_reply,
    parse_ack,
    parse_hello,
    parse_resume,
    session_keys,
)
from tests.engine.wire.wire_peers import TOKEN, Peer, until

MAX_BODY_BYTES = 1 << 16
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
HELLO = make_hello("a", "b", StreamId(1, bytes(16), 1), bytes(NONCE_BYTES))
ANSWER_S = 10.0


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


@dataclass
class Result:
    """What became of the rounds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # what was accepted, or raised something else
    elapsed_s: float = 0.0
    grown_mib: float = 0.0  # resident memory, after a tenth of the rounds


def fuzz_in_process(count: int, seed: int) -> Result:
    """Feed `count` malformed inputs to the parsers."""
    rng, result, process = Random(seed), Result(), psutil.Process()
    rounds = (_forged_frame, _sealed_garbage, _handshake, _stream)
    began, start_bytes = time.monotonic(), 0
    for number in range(count):
        if number == count // 10:  # what is imported or allocated once is there by now
            start_bytes = process.memory_info().rss
        play = rounds[number % len(rounds)]
        try:
            outcome = play(rng)
        except Exception as error:
            result.wrong.append(f"{play.__name__[1:]}, round {number}: {error!r}")
            outcome = "crashed"
        if outcome.startswith("wrong"):
            result.wrong.append(f"{play.__name__[1:]}, round {number}: {outcome}")
        result.outcomes[f"{play.__name__[1:]}: {outcome}"] += 1
    result.elapsed_s = time.monotonic() - began
    result.grown_mib = (process.memory_info().rss - start_bytes) / (1 << 20)
    return result


def _read(reader: FrameReader, data: bytes) -> list[bytes]:
    return [body for _, body in reader.read(bytearray(data))]


def _forged_frame(rng: Random) -> str:
    """A frame of a peer, changed on the way, with whatever its length then takes for its own."""
    key = rng.randbytes(KEY_BYTES)
    sealed = FrameWriter(key).seal(Kind.MESSAGE, rng.choice(BODIES))
    changed = mutate(sealed, rng)
    try:
        bodies = _read(FrameReader(key, MAX_BODY_BYTES), changed)
    except ProtocolError as error:
        return error.counter
    if bodies and not changed.startswith(sealed):
        return "wrong: accepted"
    return "followed by what is no frame" if bodies else "waits for more"


def _sealed_garbage(rng: Random) -> str:
    """A peer with the token that sends what is no message: what decodes, encodes again."""
    try:
        message = decode_message(mutate(rng.choice(BODIES), rng))
    except FrameError:
        return "bad_frame"
    assert encode(decode_message(encode(message))) == encode(message)
    return "another message"


def _handshake(rng: Random) -> str:
    """A stranger's bytes to each parser of the handshake, on either side."""
    nonce = rng.randbytes(NONCE_BYTES)
    match rng.randrange(3):
        case 0:
            try:
                hello = parse_hello(mutate(HELLO, rng))
            except ProtocolError as error:
                return error.counter
            return "waits for more" if hello is None else "a hello without a proof"
        case 1:
            good = make_reply(TOKEN, HELLO, nonce)
            reply = mutate(good, rng)[:REPLY_BYTES].ljust(REPLY_BYTES, b"\0")
            try:
                check_reply(TOKEN, HELLO, reply)
            except ProtocolError as error:
                return error.counter
            return "changed behind its end" if reply == good else "wrong: accepted"
        case _:
            for parse in (parse_resume, parse_ack):
                try:
                    parse(rng.randbytes(rng.randrange(40)))
                except ProtocolError:
                    continue
            return "control bodies"


def _stream(rng: Random) -> str:
    """Whole frames, one after the other, in pieces: all arrive until the first that is changed."""
    key = rng.randbytes(KEY_BYTES)
    writer, reader, buffer = FrameWriter(key), FrameReader(key, MAX_BODY_BYTES), bytearray()
    bodies = [rng.choice(BODIES) for _ in range(rng.randrange(1, 6))]
    frames = [writer.seal(Kind.MESSAGE, body) for body in bodies]
    broken = rng.randrange(len(frames))
    frames[broken] = frames[broken][:-1] + bytes([frames[broken][-1] ^ 1])
    data, read = b"".join(frames), list[bytes]()
    try:
        while data:
            piece = rng.randrange(1, 200)
            buffer += data[:piece]
            data = data[piece:]
            for _, body in reader.read(buffer):  # those before the one that raises count
                read.append(body)
    except ProtocolError as error:
        return error.counter if read == bodies[:broken] else "wrong: not what was sent"
    return "wrong: accepted"


async def fuzz_over_sockets(count: int, seed: int) -> Result:
    """Send malformed bytes over `count` connections to a listener, before and after the proof."""
    rng, result, process = Random(seed), Result(), psutil.Process()
    a, b = await Peer("a").listen(), await Peer("b").listen()
    a.knows(b)
    began, start_bytes = time.monotonic(), 0
    try:
        for number in range(count):
            if number == count // 10:
                start_bytes = process.memory_info().rss
            await _intrude(b, rng)
            if number % 50 == 0 or number == count - 1:
                await _ask(a, b, number)
        await until(lambda: not b.wire.unauthenticated, "the end of every handshake")
    except (AssertionError, TimeoutError) as error:
        result.wrong.append(f"connection {number}: {error!r}")
    result.elapsed_s = time.monotonic() - began
    result.grown_mib = (process.memory_info().rss - start_bytes) / (1 << 20)
    result.outcomes += b.wire.counters
    result.wrong += [f"accepted: {m}" for m in b.messages if not _is_ours(m)]
    await a.wire.close()
    await b.wire.close()
    return result


def _is_ours(message: object) -> bool:
    return isinstance(message, Abort) and message.request_id == "are you there?"


async def _ask(a: Peer, b: Peer, number: int) -> None:
    """A peer gets through, whatever strangers do."""
    message = Abort("are you there?", number)
    async with asyncio.timeout(ANSWER_S):
        a.wire.send("b", message)
        await until(lambda: message in b.messages, f"an answer after {number} connections")


async def _intrude(b: Peer, rng: Random) -> None:
    """One connection: a malformed handshake, or a good one and then malformed frames."""
    reader, writer = await asyncio.open_connection(*b.address)
    stream = StreamId(1, rng.randbytes(16), 1)
    hello = make_hello("intruder", "b", stream, rng.randbytes(NONCE_BYTES))
    try:
        if rng.random() < 0.5:
            writer.write(mutate(hello, rng) + rng.randbytes(rng.randrange(100)))
        else:
            writer.write(hello)
            reply = await reader.readexactly(REPLY_BYTES)
            nonce = reply[len(PREAMBLE) : len(PREAMBLE) + NONCE_BYTES]
            writer.write(make_proof(TOKEN, b"initiator", hello, nonce))
            frames = FrameWriter(session_keys(TOKEN, hello, nonce).initiator)
            sealed = frames.seal(Kind.MESSAGE, rng.choice(BODIES))
            changed = mutate(sealed, rng)
            writer.write(b"\xff" + changed if changed.startswith(sealed) else changed)
        writer.write_eof()
        async with asyncio.timeout(ANSWER_S):
            while await reader.read(1 << 16):
                pass
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.transport.abort()


def report(name: str, count: int, result: Result) -> str:
    rows = [f"  {number:>9}  {outcome}" for outcome, number in sorted(result.outcomes.items())]
    rate = count / max(result.elapsed_s, 1e-9)
    head = f"{name}: {count} in {result.elapsed_s:.1f} s ({rate:.0f}/s)"
    return "\n".join([f"{head}, memory {result.grown_mib:+.1f} MiB", *rows, *result.wrong[:20]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="inputs in process")
    parser.add_argument("--connections", type=int, default=500, help="to a listening process")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    frames = fuzz_in_process(args.count, args.seed)
    print(report("in process", args.count, frames))
    sockets = asyncio.run(fuzz_over_sockets(args.connections, args.seed))
    print(report("over sockets", args.connections, sockets))
    sys.exit(bool(frames.wrong or sockets.wrong))


if __name__ == "__main__":
    main()
