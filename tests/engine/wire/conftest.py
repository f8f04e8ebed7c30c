"""Two listening peers; `b` knows nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvrelay.engine.wire.context import WireLimits
from tests.engine.wire.network import Network
from tests.engine.wire.wire_peers import LIMITS, Peer


@pytest.fixture
def limits() -> WireLimits:
    return LIMITS


@pytest.fixture
async def a(limits: WireLimits) -> AsyncIterator[Peer]:
    peer = await Peer("a", limits=limits).listen()
    yield peer
    await peer.wire.close()


@pytest.fixture
async def b(limits: WireLimits) -> AsyncIterator[Peer]:
    peer = await Peer("b", limits=limits).listen()
    yield peer
    await peer.wire.close()


@pytest.fixture
async def network(a: Peer, b: Peer) -> AsyncIterator[Network]:
    """`a` reaches `b` through it."""
    network = await Network(b).open()
    network.between(a)
    yield network
    network.close()
