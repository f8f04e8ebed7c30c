"""Connections to Redis: dropped after a failover, and silent about what was sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis, RedisError
from redis.exceptions import WatchError

from kvrelay.cluster.api.batches.shared import SharedBatchStore
from kvrelay.cluster.api.batches.store import StoreAway
from kvrelay.cluster.control.lease import LeaseKey
from kvrelay.cluster.control.messages import Checkpoint
from kvrelay.cluster.state.lease import KeptInRedis
from kvrelay.cluster.state.redis_client import connect
from tests.cluster.state.stores import Server

NUM_CALLS = 8
SECRET = "what a user has said"


class Failover:
    """A name that leads to the primary, as those of Sentinel and of managed services do."""

    def __init__(self, folder: Path) -> None:
        self._name, (first, second) = folder / "primary", [folder / "a", folder / "b"]
        self.url = f"unix://{self._name}"
        self._servers = []
        for each in (first, second):
            each.mkdir()
            server = Server(each)
            server.start()
            self._servers.append(server)
        self._leader = 0
        self._lead()

    def _lead(self) -> None:
        self._name.unlink(missing_ok=True)
        self._name.symlink_to(self._servers[self._leader].url.removeprefix("unix://"))
        for each, server in enumerate(self._servers):
            with Redis.from_url(server.url) as redis:
                redis.replicaof(*(("NO", "ONE") if each == self._leader else ("127.0.0.1", "1")))

    def happen(self) -> None:
        """The old primary keeps its connections."""
        self._leader = 1 - self._leader
        self._lead()

    def close(self) -> None:
        for server in self._servers:
            server.kill()


@pytest.fixture(scope="module")
def failover(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failover]:
    made = Failover(tmp_path_factory.mktemp("redis"))
    yield made
    made.close()


def watched(redis: Any) -> None:
    with redis.pipeline() as pipe:
        pipe.watch("key")
        pipe.get("key")
        pipe.multi()
        pipe.set("key", "1")
        pipe.execute()


def written_while_watching(redis: Any) -> None:
    with redis.pipeline() as pipe:
        pipe.watch("key")
        pipe.set("key", "1")


def in_a_pipeline(redis: Any) -> None:
    redis.pipeline(transaction=False).set("key", "1").execute()


def by_a_script(redis: Any) -> None:
    redis.register_script("redis.call('SET', KEYS[1], '1')")(["key"])


WAYS: list[Callable[[Any], Any]] = [
    lambda redis: redis.set("key", "1"),
    watched,
    written_while_watching,
    in_a_pipeline,
    by_a_script,
]


@pytest.mark.parametrize("call", WAYS)
def test_one_call_fails_after_a_failover_and_no_other(
    failover: Failover, call: Callable[[Any], Any]
) -> None:
    redis, met = connect(failover.url, 5.0), threading.Barrier(NUM_CALLS)

    def use_a_connection() -> None:
        with redis.pipeline() as pipe:
            pipe.watch("other")
            met.wait(10)

    threads = [threading.Thread(target=use_a_connection) for _ in range(NUM_CALLS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failover.happen()
    with pytest.raises(RedisError, match="read only replica"):
        call(redis)
    for _ in range(NUM_CALLS):
        call(redis)
    redis.close()


def test_batches_and_checkpoints_go_to_the_new_primary(failover: Failover) -> None:
    batches = SharedBatchStore(None, connect(failover.url, 5.0), "test:", lambda: 1 << 20)
    kept = KeptInRedis(LeaseKey(failover.url, "test:cluster:k", 5.0), 1)
    uses: list[tuple[Callable[[], Any], type[Exception]]] = [
        (lambda: batches.claim("me", 0, 1.0, ()), StoreAway),
        (lambda: kept.write(Checkpoint()), RedisError),
    ]
    with Redis.from_url(failover.url) as redis:
        redis.zadd("test:live", {"batch": 1})
        redis.hset("test:batch:batch", mapping={"tenant": "red", "record": "{}"})
    for use, _ in uses:
        use()
    failover.happen()
    with Redis.from_url(failover.url) as redis:
        redis.zadd("test:live", {"batch": 1})
        redis.hset("test:batch:batch", mapping={"tenant": "red", "record": "{}"})
    for use, error in uses:
        with pytest.raises(error):
            use()
        for _ in range(NUM_CALLS):
            use()
    batches.close()


def test_errors_of_a_command_keep_the_connection(server: Server) -> None:
    redis: Any = connect(server.url, 5.0)
    own = redis.client_id()
    by_a_script(redis)  # NOSCRIPT, then the script
    with redis.pipeline() as pipe:
        pipe.watch("key")
        connect(server.url, 5.0).set("key", "2")
        pipe.multi()
        pipe.set("key", "3")
        with pytest.raises(WatchError):
            pipe.execute()
    assert redis.client_id() == own
    redis.close()


def test_no_error_quotes_what_was_sent(server: Server) -> None:
    redis: Any = connect(server.url, 5.0)
    redis.lpush("list", 1)
    calls: list[Callable[[], Any]] = [
        lambda: redis.execute_command("NOSUCH", SECRET, SECRET),
        lambda: redis.pipeline().set("a", 1).hset("list", SECRET, SECRET).execute(),
        lambda: redis.pipeline(transaction=False).hset("list", SECRET, SECRET).execute(),
    ]
    for call in calls:
        with pytest.raises(RedisError) as raised:
            call()
        assert SECRET not in repr(raised.value)
        assert str(raised.value).startswith(("unknown command 'NOSUCH'", "WRONGTYPE Operation"))
    redis.close()
