"""Where keys and counts are kept: the same of a file and of Redis, whatever is away or lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.keys.keys import Keys
from kvrelay.cluster.api.keys.record import DAY_S, ApiKey, Batch, Counts, Scope, Taken, Use
from kvrelay.cluster.api.keys.shared import SharedKeyStore
from kvrelay.cluster.api.keys.store import FILE, KeyStore
from kvrelay.cluster.api.tenants import Tenant
from kvrelay.cluster.state.redis_client import connect
from tests.cluster.state.stores import Server

pytestmark = pytest.mark.anyio
USAGE = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens": 3}
NEW = ApiKey("", "a key", "", "", (Scope.GENERATE,), "red", 0.0, tokens_per_day=100)
Open = Callable[[], KeyStore | SharedKeyStore]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


def shared(redis: Server) -> SharedKeyStore:
    return SharedKeyStore(connect(redis.url, 1.0), "test:cluster:c:")


@pytest.fixture(params=["file", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    if request.param == "file":
        yield lambda: KeyStore(tmp_path / FILE)
        return
    server = request.getfixturevalue("redis")
    yield lambda: shared(server)
    Redis.from_url(server.url).flushall()


def batch(number: int, **counted: Any) -> Batch:
    empty: dict[str, Any] = {"used": {}, "taken": {}, "seen_at": {}, "asked": ()}
    return Batch(number, 20_000, **(empty | counted))


def test_what_several_routers_count_is_added(opened: Open) -> None:
    use = Use(20_000, "red", "key_1", 'a "model"')
    stores = [opened(), opened()]
    for number in (1, 2):
        for each in stores:
            counted = {"used": {use: Counts(1, 10, 4, 3)}, "taken": {"key_1": Taken(1, 13)}}
            each.exchange(batch(number, **counted), "")
    for each in stores:
        assert each.used(20_000, 20_000) == {use: Counts(4, 40, 16, 12)}
        assert each.used(19_000, 19_999) == {}
        known = each.exchange(batch(3, asked=("key_1", "key_2")), "")
        assert known.taken == {"key_1": Taken(4, 52), "key_2": Taken()}
    for each in stores:
        each.close()


def test_many_at_once_lose_and_double_nothing(opened: Open) -> None:
    use, stores = Use(20_000, "red", "", "m"), [opened() for _ in range(4)]

    def count(store: Any) -> None:
        for number in range(25):
            store.exchange(batch(number, used={use: Counts(1, 1, 0, 1)}), "")

    threads = [threading.Thread(target=count, args=(each,)) for each in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert stores[0].used(19_990, 20_010) == {use: Counts(100, 100, 0, 100)}
    for each in stores:
        each.close()


def test_a_batch_of_which_only_the_answer_was_lost_counts_once(redis: Server) -> None:
    store, use = shared(redis), Use(20_000, "red", "", "m")
    for number in (1, 1, 2, 2):
        store.exchange(batch(number, used={use: Counts(1, 1, 0, 1)}), "")
    assert store.used(20_000, 20_000) == {use: Counts(2, 2, 0, 2)}
    Redis.from_url(redis.url).flushall()


async def tick(*all_keys: Keys) -> None:
    for each in all_keys:
        await each._exchange()


async def test_what_redis_has_lost_is_put_back_and_what_was_revoked_stays_so(
    redis: Server,
) -> None:
    first, second = Keys(shared(redis)), Keys(shared(redis))
    kept, secret = await first.create(NEW)
    gone, gone_secret = await first.create(NEW)
    await tick(second)
    await first.revoke(gone.id)  # the second does not know
    Redis.from_url(redis.url).flushall()
    await tick(second, first, second)
    third = Keys(shared(redis))
    for each in (first, second, third):
        assert each.by_id[kept.id] == kept
        assert each.find(secret) == kept
        with pytest.raises(ApiError, match="was revoked"):
            each.find(gone_secret)
    Redis.from_url(redis.url).flushall()


async def test_while_redis_is_away_keys_go_on_and_nothing_is_lost(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    keys = Keys(shared(server))
    made, secret = await keys.create(NEW)
    server.kill()
    tenant = Tenant("red", b"", key=made)
    keys.used(tenant, "m", USAGE)
    keys.take(made, 1, 8)
    for _ in range(2):  # the second one waits behind the first, which may have arrived
        with pytest.raises(ApiError, match="does not answer now"):
            await keys._exchange()
        keys.used(tenant, "m", USAGE)
    assert keys.find(secret) == made
    with pytest.raises(ApiError) as refused:
        await keys.revoke(made.id)
    assert refused.value.status == 503
    assert keys.find(secret) == made  # what was not done is not said to be
    late = Keys(shared(server))
    with pytest.raises(ApiError, match="has not answered yet"):
        late.find(secret)
    server.start()  # empty
    await tick(keys, keys, late)
    assert late.find(secret) == made
    today = int(time.time()) // DAY_S
    (counts,) = (await late.all_used(today - 1, today)).values()
    assert counts == Counts(3, 15, 6, 9)
    assert (await keys.revoke(made.id)) is not None
    server.kill()


async def test_a_day_has_its_own_budget(opened: Open) -> None:
    now = [20_000 * 86_400 + 86_000.0]
    first, second = (Keys(opened(), clock=lambda: now[0]) for _ in range(2))
    key, _ = await first.create(NEW)
    first.take(key, 1, 60)
    assert first.budget_wait_s(key) == second.budget_wait_s(key) == 0.0
    second.take(key, 1, 50)
    await tick(first, second, first)
    assert first.budget_wait_s(key) == second.budget_wait_s(key) == 400.0
    now[0] += 400.0
    assert first.budget_wait_s(key) == second.budget_wait_s(key) == 0.0


async def test_buckets_lose_only_what_others_take_while_they_are_followed(opened: Open) -> None:
    now = [20_000 * 86_400.0]
    first, second = (Keys(opened(), clock=lambda: now[0]) for _ in range(2))
    taken_now: list[Taken] = []
    second.on_taken = lambda key, taken: taken_now.append(taken)
    key, _ = await first.create(NEW)
    first.take(key, 5, 50)
    await tick(first)
    second.take(key, 1, 1)  # what was before its first call is no news
    await tick(second, second)
    assert taken_now == []
    first.take(key, 1, 7)
    second.take(key, 1, 1)
    await tick(first, second, second)
    assert taken_now == [Taken(1, 7)]
    now[0] += 300.0
    await tick(second)
    first.take(key, 4, 40)
    await tick(first)
    second.take(key, 1, 1)
    await tick(second)
    assert taken_now == [Taken(1, 7)]


async def test_of_a_clock_that_asks_at_once_all_are_answered(opened: Open) -> None:
    keys = Keys(opened())
    made = await asyncio.gather(*(keys.create(NEW) for _ in range(5)))
    assert len(keys.by_id) == len({key.id for key, _ in made}) == 5
    assert all(keys.find(secret) == key for key, secret in made)
