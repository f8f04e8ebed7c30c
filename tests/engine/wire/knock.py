"""Many without the token, at one port: `python -m tests.engine.wire.knock HOST PORT COUNT SECONDS`.

From three addresses; each says something or nothing, waits until it is thrown out, and comes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

from kvrelay.engine.wire.handshake import NONCE_BYTES, PREAMBLE, StreamId, make_hello

HELLO = make_hello("a", "b", StreamId(1, bytes(16), 1), bytes(NONCE_BYTES))
SAID = (b"", b"", PREAMBLE, HELLO, b"", PREAMBLE, HELLO, b"GET / HTTP/1.1\r\n\r\n")
PAUSE_S = 0.2


async def knock(host: str, port: int, number: int, until_s: float) -> None:
    local = (f"127.0.0.{2 + number % 3}", 0)
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port, local_addr=local)
            writer.write(SAID[number % len(SAID)])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                    await reader.read()
            writer.close()
        await asyncio.sleep(PAUSE_S)


async def main() -> None:
    host, port, count, seconds = sys.argv[1:]
    until_s = time.monotonic() + float(seconds)
    await asyncio.gather(*(knock(host, int(port), n, until_s) for n in range(int(count))))


if __name__ == "__main__":
    asyncio.run(main())
