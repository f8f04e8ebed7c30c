"""Redis servers of one's own, and stores that use them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from tests.cluster.state.stores import Server, Teller


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    yield running
    Redis.from_url(running.url).flushall()


@pytest.fixture
def tellers() -> Iterator[list[Teller]]:
    open_ones: list[Teller] = []
    yield open_ones
    for teller in open_ones:
        teller.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """To be killed and started again."""
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()
