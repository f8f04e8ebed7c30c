"""What stores of files and batches keep: how much, in which order it is listed, and no more."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.cluster.api.batches import batch_run, held
from kvrelay.cluster.api.batches import shared as shared_module
from kvrelay.cluster.api.batches import store as module
from kvrelay.cluster.api.batches.folder import MAX_RESERVE_BYTES
from kvrelay.cluster.api.batches.runner import LEASE_S
from kvrelay.cluster.api.batches.store import BatchStore, Result
from kvrelay.cluster.api.batches.uploads import batch_record, file_record
from kvrelay.cluster.api.pages import PageQuery
from kvrelay.cluster.config import ClusterSection, Config, SessionsSection, StateSection
from kvrelay.cluster.processes.router_api import _open_batches as open_batches
from kvrelay.cluster.state.redis_client import connect, is_one_server
from tests.cluster.api.batches.test_runner import Endpoint, add_batch, make_runner, status, until
from tests.cluster.api.batches.test_stores import ALL, MIB, Open, begin, keep, listed
from tests.cluster.api.batches.test_stores import running as running
from tests.cluster.api.batches.test_stores import shared as shared
from tests.cluster.api.batches.test_stores import stores as stores
from tests.cluster.state.conftest import own_server as own_server
from tests.cluster.state.stores import Server

MESSAGES = "msgbatch_"
ERROR = b'{"custom_id":"r1","error":{"code":"x"}}'


def end(store: Any, record: Any, tenant: str = "red") -> None:
    """Without files."""
    found = store.claim("me", 1000, LEASE_S, ())
    while found is not None and found[1]["id"] != record["id"]:
        found = store.claim("me", 1000, LEASE_S, ())
    assert store.finish("me", tenant, record, {}) is not None
    store.release("me")


@pytest.mark.parametrize("seed", range(3))
def test_pages_are_those_of_a_list(
    stores: Open, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against lists, oldest first, of files (purpose, name) and batches."""
    monkeypatch.setattr(shared_module, "_NAMES", 2)  # so that names are read in several parts
    draw, several = random.Random(seed), [stores(), stores()]
    files, batches = list[tuple[str, str]](), list[str]()
    for _ in range(120):
        store, what = draw.choice(several), draw.random()
        if what < 0.3:
            files.append(("batch", keep(store, "red", b"x", 1 << 30)))
        elif what < 0.5 and files:
            kind = draw.choice(["batch", MESSAGES[:-1]])
            record = batch_record(kind, "/v1/completions", files[-1][1], 1000)
            store.add_batch("red", record)
            batches.append(record["id"])
            if draw.random() < 0.7:
                output, draft = file_record("o", 1, 1000, 100), store._written([b"y"])
                output |= {"purpose": "batch_output"}
                assert store.claim("me", 1000, LEASE_S, ())[1]["id"] == record["id"]
                assert store.finish("me", "red", record, {draft: output})
                files.append(("batch_output", output["id"]))
            else:
                store.change_batch(record["id"], lambda each: each | {"expires_at": 1e12})
                assert store.claim("other", 1000, 1e6, ())[1]["id"] == record["id"]
        elif what < 0.6 and batches:
            name = draw.choice(batches)
            if its := store.delete_batch("red", name):
                batches.remove(name)
                left = listed(store.files)
                files = [each for each in files if each[1] in left]
            assert its == (store.batch("red", name) is None)
        is_asc, limit = draw.random() < 0.5, draw.randrange(1, 9)
        purpose, prefix = draw.choice(["", "batch", "batch_output"]), draw.choice(["", MESSAGES])
        of_files = [name for kind, name in files if purpose in ("", kind)]
        of_batches = [name for name in batches if name.startswith(prefix)]
        for call, model, kw in (
            (store.files, of_files, {"purpose": purpose}),
            (store.batches, of_batches, {"prefix": prefix}),
        ):
            ordered = model if is_asc else model[::-1]
            after = draw.choice([None, *ordered])
            left = ordered[ordered.index(after) + 1 :] if after else ordered
            page, has_more = call("red", PageQuery(is_asc, after, limit), **kw)
            assert [each["id"] for each in page] == left[:limit]
            assert has_more == (len(left) > limit)
            assert call("blue", ALL, **kw) == ([], False)
            for wrong, tenant in (("file-no", "red"), (after or "batch_no", "blue")):
                with pytest.raises(KeyError):
                    call(tenant, PageQuery(is_asc, wrong, limit), **kw)


def test_a_page_has_the_counts_of_batches_that_run(stores: Open) -> None:
    store = stores()
    first, second = (begin(store, "red", keep(store, "red", b"x"))["id"] for _ in range(2))
    store.put_results(second, [Result(1, False, b"{}"), Result(2, True, ERROR)])
    found, _ = store.batches("red", ALL)
    counts = [each["request_counts"] for each in found]
    none = {"total": 0, "completed": 0, "failed": 0}
    assert ([each["id"] for each in found], counts[0]) == ([first, second], none)
    assert counts[1] == {"total": 0, "completed": 1, "failed": 1}


def test_a_page_reads_no_other_records(tmp_path: Path) -> None:
    """Nor does SQLite sort any, and a sum over results reads no answers."""
    store = BatchStore(tmp_path)
    for query in (
        "SELECT record FROM files WHERE tenant = 'a' AND rowid < 9 ORDER BY rowid DESC LIMIT 2",
        "SELECT record, is_over FROM batches WHERE tenant = 'a' AND substr(id, 1, 1) = 'm'"
        " AND rowid > 9 ORDER BY rowid ASC LIMIT 2",
    ):
        plan = [row[3] for row in store._read(f"EXPLAIN QUERY PLAN {query}")]
        assert plan[0].endswith("(tenant=? AND rowid<?)") or "rowid>?" in plan[0]
        assert len(plan) == 1
    sums = "SELECT SUM(is_error), SUM(input), SUM(reasoning) FROM results WHERE batch = 'a'"
    lines = "SELECT row, line FROM results WHERE batch = 'a' AND is_error = 1 AND row > 3"
    for query, wanted in (
        (sums, "USING COVERING INDEX results_by_kind (batch=?)"),
        (f"{lines} ORDER BY row LIMIT 8", "INDEX results_by_kind (batch=? AND is_error=? AND row>"),
    ):
        (plan,) = store._read(f"EXPLAIN QUERY PLAN {query}")
        assert wanted in plan[3]


def test_of_batches_that_have_ended_those_go_that_ended_first(
    stores: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (module, shared_module):
        monkeypatch.setattr(each, "MAX_ENDED", 3)
    store, other = stores(), stores()
    file = keep(store, "red", b"row\n")
    oldest = begin(store, "red", file)
    for number in range(5):
        end(other, begin(store, "red", file))
        assert len(listed(store.batches)) == min(number + 1, 3) + 1
    end(store, begin(store, "blue", keep(store, "blue", b"")), "blue")
    end(store, oldest)
    kept = listed(store.batches)
    assert (len(kept), kept[0]) == (3, oldest["id"]), "it was the first, and ended last"
    bare = begin(store, "red", file)
    while (found := other.claim("me", 1000, LEASE_S, ())) and found[1]["id"] != bare["id"]:
        pass
    other.end("me", "red", bare)
    assert listed(store.batches) == [oldest["id"], *kept[2:], bare["id"]]
    assert other.delete_batch("red", bare["id"])
    assert len(store.batches("blue", ALL)[0]) == 1
    if not isinstance(store, BatchStore):
        names = {each.decode().rpartition(":")[2] for each in store._redis.keys("test:batch:*")}
        assert len(names) == 3
        assert store._redis.zcard("test:kept") == 3
        assert store._redis.zcard("test:ended:red") == 2


def refused(*args: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_could_not_be_recorded_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an upload, nor the first of two files of results."""
    store = BatchStore(tmp_path)
    record = begin(store, "red", keep(store, "red", b"row\n"))
    before, sync = files_of(tmp_path / "files"), store._sync
    monkeypatch.setattr(store, "_sync", refused)
    with pytest.raises(OSError, match="No space"):
        keep(store, "red", b"more")
    assert files_of(tmp_path / "files") == before
    monkeypatch.setattr(store, "_sync", sync)
    store.put_results(record["id"], [Result(1, False, b"{}"), Result(2, True, ERROR)])
    assert store.claim("me", 1000, LEASE_S, ())
    drafts = [store.write_results(record["id"], is_error) for is_error in (False, True)]
    outputs = [file_record(each, 3, 1000, 100) for each in ("output", "error")]
    replace, names = os.replace, iter(range(9))
    second = lambda *args: replace(*args) if next(names) % 2 == 0 else refused()  # noqa: E731
    monkeypatch.setattr(os, "replace", second)
    files = dict(zip(drafts, outputs, strict=True))
    with pytest.raises(OSError, match="No space"):
        store.finish("me", "red", record, files)
    assert files_of(tmp_path / "files") == sorted([drafts[1].name, *before])
    assert store.rows_done(record["id"]) == {1, 2}
    monkeypatch.setattr(os, "replace", replace)
    drafts[0] = store.write_results(record["id"], False)
    assert store.finish("me", "red", record, dict(zip(drafts, outputs, strict=True)))
    assert files_of(tmp_path / "files") == sorted([*before, *(each["id"] for each in outputs)])


DIES = """
import os, sys
from pathlib import Path
from kvrelay.cluster.api.batches.store import BatchStore
from tests.cluster.api.batches.test_stores import keep
BatchStore._sync = lambda self: os._exit(9)
keep(BatchStore(Path(sys.argv[1])), "red", b"a prompt")
"""


@pytest.mark.slow
def test_a_file_without_a_record_is_swept(tmp_path: Path) -> None:
    """Whoever was killed between its name and its record has left it."""
    store = BatchStore(tmp_path)
    name = keep(store, "red", b"row\n")
    assert subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False).returncode == 9
    store.draft().write_bytes(b"an upload")
    there = set(files_of(tmp_path / "files"))
    assert len(there) == 3
    store.sweep(1001)
    left = set(files_of(tmp_path / "files"))
    (gone,) = there - left
    assert gone.startswith("file-")
    assert name in left
    assert listed(store.files) == [name]


@pytest.mark.parametrize("kind", ["second", "finish", "append"])
def test_an_end_that_fails_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """However often it is tried: where the second file, or its name, or what is added to it finds
    no room."""
    monkeypatch.setattr(held, "DISK_RETRY_S", 0.01)
    store, num_tries, write = BatchStore(tmp_path), 0, BatchStore.write_results

    def full(*args: Any, **kw: Any) -> Any:
        nonlocal num_tries
        num_tries += 1
        return refused()

    def opened(path: Path, *args: Any, **kw: Any) -> Any:
        path.write_bytes(b"half a li")
        return full()

    def written(self: BatchStore, name: str, is_error: bool) -> Any:
        return full() if is_error else write(self, name, is_error)

    async def run() -> None:
        runner = make_runner(store, Endpoint())
        if kind == "append":
            await until(lambda: status(store) == "cancelled", runner.tick)
        else:
            await until(lambda: num_tries >= 3, runner.tick)
        await runner.close()

    add_batch(store, 2, time.time())
    begun = {"status": "in_progress", "request_counts": {"total": 2, "completed": 0, "failed": 0}}
    store.change_batch("batch_a", lambda record: record | begun)
    if kind == "append":
        store.change_batch("batch_a", lambda record: record | {"status": "cancelling"})
        monkeypatch.setattr(BatchStore, "put_results", refused)
        monkeypatch.setattr(batch_run, "open", opened, raising=False)
    else:
        store.put_results("batch_a", [Result(1, False, b"{}"), Result(2, True, ERROR)])
        if kind == "second":
            monkeypatch.setattr(BatchStore, "write_results", written)
        else:
            monkeypatch.setattr(store, "_sync", full)
    asyncio.run(run())
    assert files_of(tmp_path / "files") == ["file-batch_a"]
    assert num_tries >= (1 if kind == "append" else 3)


@pytest.mark.parametrize(
    ("total", "free", "said"),
    [
        (8 * MIB, 7 * MIB, "may have 4194304, which is one in 2 of the disk's"),
        (64 * MIB, 4 * MIB - 1, "and uploads leave 4194304"),
        (1 << 40, MAX_RESERVE_BYTES - 1, "and uploads leave 1073741824"),
    ],
)
def test_all_tenants_files_leave_some_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, said: str
) -> None:
    store, disk = BatchStore(tmp_path), SimpleNamespace(total=total, free=total)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    for tenant in ("red", "blue"):
        keep(store, tenant, b"x" * MIB, 8 * MIB)
    store.draft("green").write_bytes(b"x" * MIB)
    store.check_room("red", 8 * MIB)
    disk.free = free
    with pytest.raises(OSError, match=said) as full:
        keep(store, "red", b"x" * (MIB + 1), 8 * MIB)
    assert full.value.errno == errno.ENOSPC
    assert len(store.files("red", ALL)[0]) == 1


def test_batches_may_have_a_redis_of_their_own(
    running: Server, own_server: Server, tmp_path: Path
) -> None:
    """None of their bytes is in that of the lease; of theirs they have half."""
    state = StateSection(url=running.url, batches_url=own_server.url)
    both = {"cluster": ClusterSection(name="chat"), "state": state}
    both |= {"sessions": SessionsSection(state_dir=str(tmp_path / "state"))}
    lease, own = (connect(each.url, 5.0) for each in (running, own_server))
    own.config_set("maxmemory", 64 * MIB)
    store = open_batches(Config(**both))
    keep(store, "red", os.urandom(MIB), 8 * MIB)
    assert own.keys("kvrelay:cluster:chat:file:*")
    assert lease.keys("*") == []
    assert store._most() == 32 * MIB
    store.close()
    one = StateSection(url=own_server.url, batches_url=f"{own_server.url}?db=2")
    store = open_batches(Config(**both | {"state": one}))
    keep(store, "red", b"x")
    assert store._most() == 16 * MIB
    store.close()
    for each in (lease, own):
        each.close()


def test_databases_of_one_redis_are_told_from_two() -> None:
    one = [("redis://a/1", "redis://:b@a:6379/2"), ("unix:///a?db=1", "unix://:b@/a")]
    two = [("redis://a", "redis://a:6380"), ("unix:///a", "unix:///b"), ("redis://a", "unix:///a")]
    assert [is_one_server(*each) for each in (*one, *two)] == [True, True, False, False, False]


LIVES = """
import sys, time
from kvrelay.cluster.api.batches.store import BatchStore
store = BatchStore()
store.draft().write_bytes(b"a prompt")
print(store.draft().parent.parent, flush=True)
time.sleep(600)
"""


def test_folders_of_processes_that_were_killed_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of processes that live, nor what somebody else may have put there."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    lives = [
        subprocess.Popen([sys.executable, "-c", LIVES], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        killed, live = (Path(each.stdout.readline().strip()) for each in lives)  # type: ignore
        lives[0].kill()
        lives[0].wait()
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs" / "lock").write_bytes(b"")
        (tmp_path / "kvrelay-files-link").symlink_to(tmp_path / "theirs")
        (tmp_path / "kvrelay-files-new").mkdir()
        assert {live.exists(), killed.exists()} == {True}
        store = BatchStore()
        own = store.draft().parent.parent
        left = {live, own, *(tmp_path / f"kvrelay-files-{each}" for each in ("link", "new"))}
        assert set(tmp_path.glob("kvrelay-files-*")) == left
        assert (tmp_path / "theirs" / "lock").exists()
        assert own.stat().st_mode & 0o777 == 0o700
        modes = {path.stat().st_mode & 0o77 for path in own.rglob("*")}
        with open(own / "lock", "rb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert modes == {0}
        store.close()
        del store
        assert not own.exists()
    finally:
        for each in lives:
            each.kill()
            each.wait()


def test_a_database_of_the_version_before_gets_its_indexes(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    record = begin(store, "red", keep(store, "red", b"x"))
    end(store, record)
    store.close()
    with sqlite3.connect(tmp_path / "batches.db") as before:
        query = "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
        for (name,) in before.execute(query).fetchall():
            before.execute(f"DROP INDEX {name}")
        before.execute("UPDATE batches SET is_over = 1")
    before.close()
    store = BatchStore(tmp_path)
    later = begin(store, "red", record["input_file_id"])
    end(store, later)
    assert listed(store.batches) == [record["id"], later["id"]]
    assert store._read("SELECT is_over FROM batches ORDER BY rowid") == [(1,), (2,)]
