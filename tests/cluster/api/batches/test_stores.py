"""What both stores of files and batches promise: one file, and what several servers share."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from kvrelay.cluster.api.batches.folder import Full
from kvrelay.cluster.api.batches.routes import LEAST_KEEP_S
from kvrelay.cluster.api.batches.runner import LEASE_S
from kvrelay.cluster.api.batches.shared import SharedBatchStore
from kvrelay.cluster.api.batches.store import (
    KEEP_S,
    MIN_FREE_BYTES,
    BatchStore,
    Result,
    StoreAway,
)
from kvrelay.cluster.api.batches.uploads import batch_record, cancel, file_record
from kvrelay.cluster.api.pages import PageQuery
from kvrelay.cluster.state.redis_client import Room, connect
from tests.cluster.api.batches.test_runner import (
    Endpoint,
    add_batch,
    make_runner,
    results,
    status,
    until,
)
from tests.cluster.state.conftest import running as running
from tests.cluster.state.stores import Server
from tests.cluster.state.stores import until as until_true
from tests.cluster.state.test_lease import LEASE_S as LEASE_OF_LEADER_S
from tests.cluster.state.test_lease import Member

Open = Callable[[], Any]
MIB = 1 << 20
ALL = PageQuery(True, None, 10_000)


@pytest.fixture
def shared(running: Server, tmp_path: Path) -> Iterator[Open]:
    """Each call opens the store on another machine."""
    opened: list[SharedBatchStore] = []

    def again(max_bytes: int = 64 * MIB) -> SharedBatchStore:
        folder = tmp_path / str(len(opened))
        opened.append(
            SharedBatchStore(folder, connect(running.url, 5.0), "test:", lambda: max_bytes)
        )
        return opened[-1]

    yield again
    left = Redis.from_url(running.url)
    left.flushall()
    left.close()
    for store in opened:
        store.close()


@pytest.fixture(params=["sqlite", "redis"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "sqlite":
        return lambda: BatchStore(tmp_path)
    opened: Open = request.getfixturevalue("shared")
    return opened


def lapse(store: Any) -> None:
    """Ends all leases."""
    if isinstance(store, BatchStore):
        store._database.connection.execute("UPDATE batches SET lease_until = 0")
        store._database.connection.commit()
    else:
        for key in store._redis.keys("test:lease:*"):
            store._redis.delete(key)


def keep(store: Any, tenant: str, data: bytes, most: int = MIB, keep_s: int = 100) -> str:
    draft = store.draft(tenant)
    draft.write_bytes(data)
    record = file_record("a", len(data), 1000, keep_s)
    try:
        store.add_file(tenant, record, draft, most)
    finally:
        draft.unlink(missing_ok=True)
    return str(record["id"])


def listed(call: Any, asked: PageQuery = ALL, **kw: Any) -> list[str]:
    """Names of a tenant's files or batches."""
    return [each["id"] for each in call("red", asked, **kw)[0]]


def begin(store: Any, tenant: str, file: str) -> Any:
    record = batch_record("batch", "/v1/completions", file, 1000)
    store.add_batch(tenant, record)
    return record


def test_files_are_a_tenants_and_whole_wherever_they_are_read(stores: Open) -> None:
    here, there = stores(), stores()
    texts = [b"", b"one\n", os.urandom(2 * MIB), b"x" * MIB]
    names = [keep(here, "red", text, 8 * MIB) for text in texts]
    assert listed(there.files) == names
    assert [there.fetched(name).read_bytes() for name in names] == texts
    assert (there.files("blue", ALL)[0], there.file("blue", names[1])) == ([], None)
    there.delete_file("blue", names[1])
    assert here.file("red", names[1])["bytes"] == 4
    with pytest.raises(Full, match=rf"files of {3 * MIB + 4} bytes and uploads of 5, and may have"):
        keep(there, "red", b"more\n", 3 * MIB + 8)
    there.check_room("blue", 0)
    for name in names:
        there.delete_file("red", name)
    assert (listed(here.files), here.file("red", names[1])) == ([], None)
    keep(there, "red", b"again", 5)
    with pytest.raises(FileNotFoundError):
        stores().fetched(names[1])


def test_a_file_is_kept_for_the_batch_that_reads_it(stores: Open) -> None:
    store, other = stores(), stores()
    first, second = (keep(store, "red", b"row\n", keep_s=each) for each in (10, LEAST_KEEP_S))
    record = begin(store, "red", first)
    with pytest.raises(Full, match=record["id"]):
        other.delete_file("red", first)
    assert not other.delete_batch("red", record["id"])
    other.sweep(1011)
    assert listed(other.files) == [first, second]
    assert store.claim("me", 1000, LEASE_S, ()) is not None
    assert store.finish("me", "red", record, {}) == record
    other.sweep(1011)
    assert listed(store.files) == [second]
    assert other.batch("red", record["id"]) == record
    assert other.delete_batch("red", record["id"])
    last = begin(store, "red", second)
    assert listed(other.batches) == [last["id"]]
    assert store.change_batch(last["id"], lambda record: record | {"status": "x"})["status"] == "x"
    assert store.claim("me", 1000, LEASE_S, ()) is not None
    store.finish("me", "red", last, {})
    assert store.change_batch(last["id"], lambda record: {}) is None
    other.sweep(1000 + 86_400 + KEEP_S + 1)
    assert (listed(store.batches), listed(store.files)) == ([], [])


def test_the_first_result_of_a_row_counts_and_none_after_the_end(stores: Open) -> None:
    store, other = stores(), stores()
    name = begin(store, "", keep(store, "", b"rows"))["id"]
    store.put_results(name, [Result(10, False, b"ten", (4, 3, 2, 1)), Result(2, False, b"two")])
    gone = b'{"error":{"code":"batch_expired"}}'
    other.put_results(name, [Result(2, True, b'{"error":null}'), Result(3, True, gone)])
    assert (other.rows_done(name), other.num_unsent(name)) == ({2, 3, 10}, 1)
    draft = other.write_results(name, False)
    assert draft is not None
    assert draft.read_bytes() == b"two\nten\n"
    record = other.batch("", name)
    assert record["request_counts"] == {"total": 0, "completed": 2, "failed": 1}
    assert [record["usage"][f"{kind}_tokens"] for kind in ("input", "output", "total")] == [4, 2, 6]
    output = file_record("output", 8, 1000, 100)
    assert other.finish("another", "", record, {other._written([b"x"]): output}) is None
    assert store.file("", output["id"]) is None
    assert other.claim("me", 1.0, 2.0, ()) is not None
    assert other.finish("me", "", record, {draft: output}) == record
    store.put_results(name, [Result(4, False, b"late")])
    assert store.rows_done(name) == set()
    assert store.batch("", name) == record
    assert store.fetched(output["id"]).read_bytes() == b"two\nten\n"


def test_each_batch_has_one_owner_whoever_asks_at_once(stores: Open) -> None:
    several = [stores() for _ in range(3)]
    for i in range(20):
        add_batch(several[0], 1, time.time(), f"batch_{i}")
    found: list[str] = []

    def claim(store: Any, owner: str) -> None:
        while len(found) < 30 and (claimed := store.claim(owner, 1.0, 100.0, ())) is not None:
            found.append(claimed[1]["id"])

    threads = [
        threading.Thread(target=claim, args=(store, str(i))) for i, store in enumerate(several)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == sorted(f"batch_{i}" for i in range(20))


def test_a_lease_is_renewed_until_another_has_it(stores: Open) -> None:
    store, other = stores(), stores()
    for number, tenant in enumerate(("red", "red", "blue")):
        add_batch(store, 1, time.time(), f"batch_{number}", tenant)
    assert store.backlog().num_rows == 0
    store.change_batch("batch_0", lambda each: each | {"request_counts": {"total": 7}})
    store.put_results("batch_0", [Result(1, False, b"")])
    assert (other.backlog().num_rows, len(other.backlog().ends_at)) == (6, 3)
    assert store.claim("a", 1.0, 100.0, ())[1]["id"] == "batch_0"
    assert other.claim("b", 1.0, 100.0, ("red",))[0] == "blue"
    assert list(store.renew("a", 2.0, 100.0, ["batch_0"])) == ["batch_0"]
    lapse(store)
    assert list(store.renew("a", 3.0, 100.0, ["batch_0"])) == ["batch_0"]
    lapse(store)
    assert other.claim("b", 3.0, 100.0, ())[1]["id"] == "batch_0"
    assert store.renew("a", 3.0, 100.0, ["batch_0"]) == {}
    other.release("b")
    assert store.claim("a", 3.0, 100.0, ())[1]["id"] == "batch_0"


def test_only_rows_wait_for_the_turn_of_their_tenant(stores: Open) -> None:
    """What is to be checked, to be cancelled or to expire is claimed whatever runs."""
    store, now = stores(), time.time()
    for number in range(2):
        add_batch(store, 1, now, f"batch_{number}", "red")

    def claimed(now: float, full: tuple[str, ...] = ("red", "blue")) -> str | None:
        found = store.claim("me", now, 100.0, ("green",), full)
        return found[1]["id"] if found else None

    assert claimed(now) == "batch_0"
    store.change_batch("batch_1", lambda each: each | {"status": "in_progress"})
    assert claimed(now) is None
    store.release("me", "batch_0")
    assert claimed(now) == "batch_0"
    assert claimed(now, ()) == "batch_1"
    store.release("me", "batch_1")
    store.change_batch("batch_1", lambda each: each | {"status": "cancelling"})
    assert claimed(now) == "batch_1"
    store.change_batch("batch_1", lambda each: each | {"status": "in_progress"})
    store.change_batch("batch_0", lambda each: each | {"status": "in_progress"})
    store.release("me")
    assert claimed(now) is None
    assert [claimed(now + 86_401) for _ in range(2)] == ["batch_0", "batch_1"]


def test_another_server_takes_a_batch_over_when_its_lease_ends(stores: Open) -> None:
    async def run() -> None:
        here, there = stores(), stores()
        add_batch(here, 10, time.time())
        first, second = make_runner(here, Endpoint(3)), make_runner(there, Endpoint())
        await until(lambda: len(here.rows_done("batch_a")) == 3, first.tick)
        await second.tick()
        assert not second._runs
        lapse(here)
        await until(lambda: status(there) == "completed", second.tick)
        await first.tick()  # it sees that the batch is not its own, and ends its rows
        await until(lambda: all(task.done() for _, task in first._runs.values()))
        answers = results(here, "output")
        assert [each["custom_id"] for each in answers] == [f"r{i}" for i in range(10)]
        await first.close()
        await second.close()

    asyncio.run(run())


def test_where_the_shared_store_is_full_rows_wait_and_a_batch_can_end(shared: Open) -> None:
    store = shared(2 * MIB)
    first = keep(store, "", os.urandom(MIB), 8 * MIB)
    record = begin(store, "", first)
    with pytest.raises(OSError, match="have") as full:
        keep(store, "", os.urandom(MIB), 8 * MIB)
    assert full.value.errno == errno.ENOSPC
    large = Result(1, False, os.urandom(MIB))
    with pytest.raises(OSError, match="have") as full:
        store.put_results(record["id"], [large])
    assert full.value.errno == errno.ENOSPC
    assert store.rows_done(record["id"]) == set()
    gone = Result(1, True, b'{"error":{"code":"batch_expired"}}')
    store.put_results(record["id"], [gone])
    draft = store.write_results(record["id"], True)
    assert store.claim("me", 1.0, LEASE_S, ()) is not None
    errors = file_record("errors", draft.stat().st_size, 1000, 100)
    assert store.finish("me", "", record, {draft: errors}) is not None
    for name in (first, errors["id"]):
        store.delete_file("", name)
    assert store._redis.get("test:stored") == b"0"
    keep(store, "", os.urandom(MIB), 8 * MIB)


def test_what_is_being_uploaded_counts_and_is_gone_however_it_ends(shared: Open) -> None:
    here, there = shared(3 * MIB), shared(3 * MIB)
    count, num_parts = here._count, 0

    def counted(*args: Any) -> Any:
        nonlocal num_parts
        num_parts += 1
        if num_parts == 2:  # 2 MiB are there, of which 1 counts
            with pytest.raises(OSError, match="uploads and results have"):
                keep(there, "blue", os.urandom(2 * MIB), 8 * MIB)
        if num_parts == 3:
            raise RedisConnectionError("it is away")
        return count(*args)

    here._count = counted
    with pytest.raises(StoreAway, match="it is away"):
        keep(here, "red", os.urandom(2 * MIB + 9), 8 * MIB)
    assert not here._redis.keys("test:parts:*")
    assert not here._redis.exists("test:uploads")
    keep(there, "blue", os.urandom(2 * MIB), 8 * MIB)
    assert not here._redis.exists("test:uploads")


def test_batches_have_a_quarter_of_what_redis_may_have(running: Server) -> None:
    redis, now = connect(running.url, 5.0), 0.0
    room = Room(redis, 64 * MIB, clock=lambda: now)
    assert room() == 64 * MIB, "its machine has far more"
    redis.config_set("maxmemory", 16 * MIB)
    try:
        assert room() == 64 * MIB
        now = 60.0
        assert room() == 4 * MIB
    finally:
        redis.config_set("maxmemory", 0)


@pytest.mark.slow
def test_a_redis_that_others_need_survives_uploads(running: Server, tmp_path: Path) -> None:
    """It has 64 MB, of which Ray's GCS takes some, and who leads is renewed all the while."""
    redis = connect(running.url, 5.0)
    redis.config_set("maxmemory", 64 * MIB)
    redis.config_set("maxmemory-policy", "noeviction")
    store = SharedBatchStore(tmp_path, redis, "test:", Room(redis, 1 << 30))
    leader = Member(running.url, "a")
    until_true(lambda: leader.may_order)
    num_kept = 0
    try:
        for number in range(40):
            redis.hset("RAY@gcs:TABLE", f"actor-{number}", os.urandom(MIB // 4))
            assert leader.may_order
            with suppress(OSError):
                keep(store, f"tenant-{number}", os.urandom(MIB), 8 * MIB)
                num_kept += 1
        assert 12 <= num_kept <= 16
        assert redis.info("memory")["used_memory"] < 48 * MIB
        time.sleep(1.5 * LEASE_OF_LEADER_S)
        assert leader.may_order
        assert leader.last.term == 1
    finally:
        leader.keeper.close()
        redis.config_set("maxmemory", 0)
        redis.flushall()
        store.close()


def test_answers_leave_some_of_the_disk_to_what_ends_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(tmp_path)
    reserved = (tmp_path / "batches.db-wal").stat().st_size
    add_batch(store, 3, time.time())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=MIN_FREE_BYTES - 1))
    with pytest.raises(OSError, match="bytes of the disk are free") as full:
        store.put_results("batch_a", [Result(1, False, b"{}")])
    assert full.value.errno == errno.ENOSPC
    store.put_results("batch_a", [Result(1, True, b'{"error":{"code":"batch_expired"}}')])
    assert store.claim("me", 1.0, LEASE_S, ()) is not None
    for now in range(1000):
        store.renew("me", now, LEASE_S, ["batch_a"])
    store.end("me", "", store.batch("", "batch_a"))
    assert store.backlog().ends_at == ()
    assert (tmp_path / "batches.db-wal").stat().st_size == reserved > 4 * MIB
    store.close()


@pytest.mark.slow
def test_a_batch_is_cancelled_and_ends_where_redis_takes_nothing_more(shared: Open) -> None:
    """Its answers are written once their room in Redis is free; without any, its end says so."""

    async def end(store: Any, name: str, limit: int) -> None:
        store._redis.config_set("maxmemory", limit)
        with pytest.raises(OSError, match="takes no more"):
            store.put_results(name, [Result(6001, False, answer)])
        cancel(store, name, 5)
        runner = make_runner(store, Endpoint())
        await until(lambda: status(store, name) == "cancelled", runner.tick)
        await runner.close()
        store._redis.config_set("maxmemory", 0)
        assert store.batch("", name)["cancelling_at"] == 5
        assert store.backlog().ends_at == ()
        assert store._redis.keys("test:output:*") == []

    def begin(store: Any, name: str) -> None:
        add_batch(store, 6002, time.time(), name)
        counts = {"total": 6002, "completed": 0, "failed": 0}
        begun = {"status": "in_progress", "request_counts": counts}
        store.change_batch(name, lambda record: record | begun)
        store.put_results(name, [Result(row, False, answer) for row in range(1, 6001)])

    answer = b'{"custom_id": "r0", "x": "' + os.urandom(400).hex().encode() + b'"}'
    store = shared(64 * MIB)
    store._redis.config_set("maxmemory-policy", "noeviction")
    begin(store, "batch_a")
    asyncio.run(end(store, "batch_a", store._redis.info("memory")["used_memory"] - 100_000))
    assert [each["custom_id"] for each in results(store, "output")] == ["r0"] * 6000
    assert [each["custom_id"] for each in results(store, "error")] == ["r6000", "r6001"]
    counts = {"total": 6002, "completed": 6000, "failed": 2}
    assert store.batch("", "batch_a")["request_counts"] == counts
    begin(store, "batch_b")
    asyncio.run(end(store, "batch_b", 1))
    (error,) = store.batch("", "batch_b")["errors"]["data"]
    assert error["code"] == "insufficient_storage"


def test_what_a_restart_of_the_shared_store_lost_is_no_file(
    shared: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, begin = shared(), SharedBatchStore._begin

    def emptied(self: SharedBatchStore, pipe: Any, *parts: str) -> None:
        self._redis.flushall()
        begin(self, pipe, *parts)

    monkeypatch.setattr(SharedBatchStore, "_begin", emptied)
    with pytest.raises(StoreAway, match="lost what was just written"):
        keep(store, "", b"rows")
    assert store.files("", ALL) == ([], False)
    store._redis.close()
    away = SharedBatchStore(None, connect("unix:///no/such.sock", 0.1), "test:", lambda: MIB)
    with pytest.raises(StoreAway, match="Redis has not done it"):
        away.batches("", ALL)
