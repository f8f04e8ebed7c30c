"""Where responses are kept: a file that outlives the server, or memory."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvrelay.cluster.api import database
from kvrelay.cluster.api.responses import store as module
from kvrelay.cluster.api.responses.items import ConversationItems, Most
from kvrelay.cluster.api.responses.store import ResponseStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "responses.db"


def test_what_is_put_is_found_by_its_tenant(path: Path) -> None:
    for store in (ResponseStore(path), ResponseStore()):
        store.put("red", "a", b"one")
        store.put("red", "b", b"two")
        store.put("blue", "a", b"three")
        assert [store.get(t, i) for t in ("red", "blue") for i in "ab"] == [
            *(b"one", b"two", b"three", None),
        ]
        store.put("red", "a", b"four")
        assert store.get("red", "a") == b"four"
        assert store.delete("red", "a")
        assert not store.delete("red", "a")
        assert (store.get("red", "a"), store.get("blue", "a")) == (None, b"three")
        store.close()


def test_a_file_survives_the_server(path: Path) -> None:
    first = ResponseStore(path)
    assert first.is_durable
    first.put("", "a", b"one" * 10_000)
    first.close()
    second = ResponseStore(path)
    assert second.get("", "a") == b"one" * 10_000
    second.close()


def test_what_was_put_survives_a_server_that_is_killed(path: Path) -> None:
    code = (
        "import os, sys, pathlib\n"
        "from kvrelay.cluster.api.responses.store import ResponseStore\n"
        "ResponseStore(pathlib.Path(sys.argv[1])).put('', 'a', b'one')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=False)
    assert done.returncode == -9
    store = ResponseStore(path)
    assert store.get("", "a") == b"one"
    store.close()


def test_only_the_server_may_read_the_file(path: Path) -> None:
    store = ResponseStore(path)
    store.put("", "a", b"one")
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert modes[path.name] == 0o600
    assert set(modes.values()) == {0o600}  # also of SQLite's own files beside it
    assert path.parent.stat().st_mode & 0o777 == 0o700
    store.close()


def no_database(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is no database, and that is clear from its first bytes" * 100)


def no_folder(path: Path) -> None:
    path.parent.write_text("a file")


def no_file(path: Path) -> None:
    path.mkdir(parents=True)


def newer(path: Path) -> None:
    ResponseStore(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 7")
    connection.close()


@pytest.mark.parametrize("spoil", [no_database, no_folder, no_file, newer])
def test_without_a_file_that_can_be_used_responses_are_in_memory(
    path: Path, spoil: object, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(path)  # type: ignore[operator]
    store = ResponseStore(path)
    assert not store.is_durable
    (record,) = caplog.records
    assert "responses will be forgotten when the server stops" in record.getMessage()
    assert str(path) in record.getMessage()
    store.put("", "a", b"one")
    assert store.get("", "a") == b"one"
    store.close()


def test_reads_do_not_wait_for_a_write(path: Path) -> None:
    store = ResponseStore(path)
    store.put("", "a", b"one")
    with store.writing() as connection:
        store.put_by(connection, "", "a", b"two")
        assert store.get("", "a") == b"one"
    assert store.get("", "a") == b"two"
    assert not store.replace("", "a", b"one", b"three")
    assert store.replace("", "a", b"two", b"three")
    assert store.get("", "a") == b"three"
    store.close()


def test_items_count_and_go_with_their_conversation(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PRUNE_EVERY", 1)
    monkeypatch.setattr(module, "MAX_BYTES", 3500)
    store = ResponseStore(path)
    items = ConversationItems(store)
    for name in ("conv_a", "conv_b"):
        items.begin("", name, b"{}", [("", b"x" * 1400)], Most(9, 9999))
    items.append("", "conv_b", [("mine", b"x" * 600)], Most(9, 9999))
    assert store.get("", "conv_a") is not None
    items.append("", "conv_b", [("mine", b"x" * 600)], Most(9, 9999))
    store.put("", "a", b"x")
    assert store.get("", "conv_a") is None
    assert items.all("", "conv_a") == []
    assert [name for name, _ in items.all("", "conv_b")] == ["item_b_0", "mine", "item_b_2"]
    store.delete("", "conv_b")
    assert items.all("", "conv_b") == []
    store.close()


def test_memory_is_not_shared() -> None:
    first, second = ResponseStore(), ResponseStore()
    first.put("", "a", b"one")
    assert second.get("", "a") is None
    assert not first.is_durable


def names(store: ResponseStore) -> str:
    return "".join(name for name in "abcdefgh" if store.get("", name) is not None)


def test_the_oldest_are_forgotten_when_there_are_too_many(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RESPONSES", 3)
    monkeypatch.setattr(module, "PRUNE_EVERY", 1)
    for store in (ResponseStore(path), ResponseStore()):
        for name in "abcde":
            store.put("", name, b"x")
        assert names(store) == "cde"
        store.put("", "c", b"y")  # it is the youngest now
        store.put("", "f", b"x")
        assert names(store) == "cef"
        store.close()


def test_the_youngest_stay_where_the_clock_was_set_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.time()]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    monkeypatch.setattr(module, "MAX_RESPONSES", 3)
    monkeypatch.setattr(module, "PRUNE_EVERY", 1)
    store = ResponseStore(path)
    for name in "abcde":
        store.put("", name, name.encode())
        now[0] -= 3600
    assert names(store) == "cde"
    store.close()


def test_old_ones_are_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.time()]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    monkeypatch.setattr(module, "PRUNE_EVERY", 1)
    store = ResponseStore(path)
    store.put("", "a", b"x")
    now[0] += module.KEEP_S - 1
    store.put("", "b", b"x")
    assert names(store) == "ab"
    now[0] += 2
    store.put("", "c", b"x")
    assert names(store) == "bc"
    store.close()


def test_forgetting_is_not_a_part_of_every_call(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RESPONSES", 1)
    monkeypatch.setattr(module, "PRUNE_EVERY", 4)
    store = ResponseStore(path)
    found = []
    for name in "abcdef":
        store.put("", name, b"x")
        found.append(names(store))
    assert found == ["a", "ab", "abc", "abcd", "e", "ef"]
    store.close()


def put_many(store: ResponseStore, tenant: str, wrong: list[BaseException]) -> None:
    try:
        for i in range(50):
            store.put(tenant, str(i), f"{tenant} {i}".encode())
            assert store.get(tenant, str(i)) == f"{tenant} {i}".encode()
    except BaseException as error:
        wrong.append(error)


def test_threads_may_share_a_store_and_servers_a_file(path: Path) -> None:
    """Two stores on one file are what two processes have."""
    stores = [ResponseStore(path), ResponseStore(path)]
    wrong: list[BaseException] = []
    threads = [
        threading.Thread(target=put_many, args=(store, f"{i} {thread}", wrong))
        for i, store in enumerate(stores)
        for thread in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    for store in stores:
        for i in range(len(stores)):
            assert store.get(f"{i} 2", "49") == f"{i} 2 49".encode()
    for store in stores:
        store.close()


def test_a_server_that_starts_waits_for_another_that_writes(path: Path) -> None:
    path.parent.mkdir()
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE responses_of_another (id TEXT)")
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.2, other.commit)
    timer.start()
    store = ResponseStore(path)
    timer.join()
    assert store.is_durable
    store.put("", "a", b"one")
    store.close()
    other.close()


def test_a_file_that_stays_locked_is_not_waited_for_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.1)
    path.parent.mkdir()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    store = ResponseStore(path)
    assert not store.is_durable
    store.close()
    other.close()


def test_the_oldest_go_where_all_are_too_large(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 3500)
    monkeypatch.setattr(module, "PRUNE_EVERY", 1)
    store = ResponseStore(path)
    for name in "abcde":
        store.put("", name, b"x" * 1000)
    assert [name for name in "abcde" if store.get("", name)] == ["c", "d", "e"]
    store.close()


def test_one_tenants_do_not_push_out_anothers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRUNE_EVERY", 1)
    monkeypatch.setattr(module, "MAX_BYTES", 6000)
    monkeypatch.setattr(module, "MAX_MEMORY_BYTES", 6000)
    for store in (ResponseStore(path), ResponseStore()):
        for name in "ab":
            store.put("other", name, b"x" * 1000)
        for name in "cdefghijkl":
            store.put("", name, b"x" * 1000)
        assert all(store.get("other", name) for name in "ab")
        assert [name for name in "cdefghijkl" if store.get("", name)] == [*"ijkl"]
        store.close()


def test_the_number_is_shared_among_tenants_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRUNE_EVERY", 1)
    monkeypatch.setattr(module, "MAX_RESPONSES", 4)
    store = ResponseStore()
    store.put("other", "a", b"x")
    for name in "bcdefg":
        store.put("", name, b"x")
    assert store.get("other", "a")
    assert [name for name in "bcdefg" if store.get("", name)] == ["f", "g"]
    store.close()


def test_memory_holds_less_than_a_file_and_is_pruned_by_bytes() -> None:
    store = ResponseStore()
    assert store.max_bytes == module.MAX_MEMORY_BYTES < module.MAX_BYTES
    record = bytes(module.MAX_MEMORY_BYTES // 8)
    for name in "abcdefghijkl":
        store.put("", name, record)
    assert [name for name in "abcdefghijkl" if store.get("", name)] == [*"efghijkl"]
    store.close()
