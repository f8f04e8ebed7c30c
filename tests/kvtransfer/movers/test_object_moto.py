"""The object store of the tests is a stand-in: moto's, which many test against, does the same."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.kvtransfer.agent import DAMAGED, MISSING
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.store.bucket import Bucket
from tests.kvtransfer.movers.test_object_agent import PREFIX, World

moto = pytest.importorskip("moto.server", reason="needs moto: pip install 'moto[server]'")


class Moto:
    bucket = "kv-blocks"

    def __init__(self, url: str) -> None:
        self.url = url

    def call(self, method: str, key: str = "", body: bytes | None = None) -> None:
        url = f"{self.url}/{self.bucket}{key}"
        headers = {"x-amz-acl": "public-read-write"}
        asked = urllib.request.Request(url, body, headers, method=method)
        urllib.request.urlopen(asked).close()


@pytest.fixture
def server() -> Iterator[Moto]:
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    found = Moto(f"http://{host}:{port}")
    found.call("PUT")
    yield found
    server.stop()


def test_blocks_are_written_read_and_listed(server: Moto, tmp_path: Path) -> None:
    stand_in: Any = server
    world = World(stand_in, tmp_path)
    blocks = [*range(20)]
    world.write(blocks, blocks)
    assert world.read(blocks, blocks) == tuple(checksum_blocks(world.host, blocks))
    bucket = Bucket(server.bucket, server.url, credentials_file=str(world.file))
    assert bucket.list(PREFIX, limit=15) == (sorted(map(world.key, blocks))[:15], True)
    server.call("PUT", f"/{world.key(1)}", b"short")
    server.call("DELETE", f"/{world.key(2)}")
    first, second, third = world.read([1, 2, 3], [1, 2, 3])
    assert (first, second) == (DAMAGED, MISSING)
    assert third == checksum_blocks(world.host, [3])[0]
    world.agent.close()
