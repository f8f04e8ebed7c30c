"""Peers on the wire, for the tests of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.wire.context import TlsIdentity, WireLimits
from kvrelay.engine.wire.wire import Wire

LOOPS = ("asyncio", ("asyncio", {"use_uvloop": True}))
TOKEN = b"a token of this cluster"
LIMITS = WireLimits(
    max_frame_bytes=1 << 16,
    max_queued_frames=4,
    max_unauthenticated=3,
    handshake_s=0.5,
    give_up_s=0.3,
    reconnect=Backoff(0.01, 0.02),
)


class Peer:
    """A wire that keeps what it receives."""

    def __init__(
        self,
        node_id: str,
        token: bytes = TOKEN,
        limits: WireLimits = LIMITS,
        epoch: int = 1,
        tls: TlsIdentity | None = None,
    ) -> None:
        self.messages: list[Any] = []
        self.lost: list[tuple[str, int]] = []
        self.wire = Wire(
            node_id,
            token,
            lambda _to, message: self.messages.append(message),
            lambda peer, epoch: self.lost.append((peer, epoch)),
            limits,
            epoch,
            tls,
        )
        self.address: tuple[str, int] = ("", 0)

    async def listen(self, port: int = 0) -> Peer:
        self.address = await self.wire.listen("127.0.0.1", port)
        return self

    def knows(self, other: Peer, epoch: int = 1) -> None:
        self.wire.set_address(other.wire.node_id, *other.address, epoch)


async def until(condition: Callable[[], object], what: str = "what was waited for") -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"did not happen: {what}")
