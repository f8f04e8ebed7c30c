"""Sessions in a file: what was written is there again, whatever became of the writer."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import kvrelay.cluster.state.session_store
from kvrelay.cluster.config import Config, SessionsSection, TiersSection
from kvrelay.cluster.state.opening import ModelStores, OpenedState, open_state
from kvrelay.cluster.state.session_store import (
    VERSION,
    SessionStore,
    SessionStoreError,
    open_sessions,
)
from kvrelay.engine.host import LoopThread, NodeHost
from kvrelay.engine.messages import TokenDeltas
from kvrelay.engine.request import FinishReason, SamplingParams, TokenDelta
from kvrelay.router.messages import Submit, WorkerUp
from kvrelay.router.models import ForModel
from kvrelay.router.router import Router
from kvrelay.router.sessions.session import DeleteSession, SaveSession, SessionRecord
from tests.cluster.state import stores
from tests.router.script import worker_info

MODEL = "model"
record = partial(stores.record, parked=True, version=0)  # as it is read from a file


def kept(path: Path, model: str = MODEL) -> dict[str, SessionRecord]:
    store = SessionStore(path, model)
    store.close()
    return {found.session: found for found in store.records}


def write(path: Path, *effects: Any, model: str = MODEL) -> None:
    store = SessionStore(path, model)
    for effect in effects:
        store.perform(effect)
    store.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "sessions.db"


def test_the_last_change_of_each_session_is_kept(path: Path) -> None:
    write(
        path,
        SaveSession(record("a")),
        SaveSession(record("b", worker=None, pinned=True)),
        SaveSession(record("c")),
        SaveSession(record("a", num_turns=4)),
        DeleteSession("tenant", "c"),
        DeleteSession("tenant", "never there"),
    )
    found = kept(path)
    assert set(found) == {"a", "b"}
    for name, wanted in (
        ("a", record("a", num_turns=4)),
        ("b", record("b", worker=None, pinned=True)),
    ):
        times = {"age_s": wanted.age_s, "idle_s": wanted.idle_s}
        assert replace(found[name], **times) == wanted
        assert 50.0 <= found[name].age_s < 150.0
        assert 20.0 <= found[name].idle_s < 120.0
    write(path, DeleteSession("tenant", "a"))
    assert set(kept(path)) == {"b"}


def test_time_goes_by_while_nobody_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, SaveSession(record("a")), SaveSession(record("b", pinned=True)))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1000.0)
    assert 1020.0 <= kept(path)["a"].idle_s < 1120.0
    monkeypatch.setattr(time, "time", lambda: now + 3700.0)
    assert set(kept(path)) == {"b"}  # the other's retention was over
    monkeypatch.setattr(time, "time", lambda: now - 500.0)  # somebody has put the clock back
    assert kept(path)["b"].idle_s == 0.0


def test_each_model_has_sessions_of_its_own(path: Path) -> None:
    write(path, SaveSession(record("a")))
    write(path, SaveSession(record("b")), model="another")
    assert set(kept(path)) == {"a"}
    assert set(kept(path, "another")) == {"b"}


def test_nobody_else_may_read_the_file(path: Path) -> None:
    write(path, SaveSession(record()))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_second_server_is_told_that_the_file_is_in_use(path: Path) -> None:
    store = SessionStore(path, MODEL)
    try:
        with pytest.raises(SessionStoreError, match=r"in use by another server.*state_dir"):
            SessionStore(path, MODEL)
    finally:
        store.close()
    assert kept(path) == {}


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SessionStoreError, match=r"cannot keep sessions in .*sessions.db"):
        SessionStore(tmp_path / "file" / "sessions.db", MODEL)


def garble(path: Path) -> None:
    path.write_bytes(b"this is not a database" * 500)


def garble_the_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096 : len(content) - 100] = os.urandom(len(content) - 4196)
    path.write_bytes(content)


def make_newer(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 7")
    connection.close()


def test_a_file_of_a_newer_version_is_left_as_it_is(path: Path) -> None:
    """It was set aside, so that who went back and forth again had lost all sessions."""
    write(path, SaveSession(record("s")))
    make_newer(path)
    with pytest.raises(SessionStoreError, match="of a newer KVRelay"):
        kept(path)
    assert not list(path.parent.glob("*.bad-*"))
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.close()
    assert len(kept(path)) == 1


def half_a_token(path: Path) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("UPDATE sessions SET tokens = x'0102'")
    connection.close()


@pytest.mark.parametrize("spoil", [garble, garble_the_middle, half_a_token])
def test_a_file_that_cannot_be_used_is_set_aside(
    path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    write(path, *(SaveSession(record(f"s{i}")) for i in range(200)))
    spoil(path)
    size = path.stat().st_size
    assert kept(path) == {}
    (aside,) = path.parent.glob("sessions.db.bad-*[0-9]")
    assert aside.stat().st_size == size
    assert "cannot be read" in caplog.text
    write(path, SaveSession(record("new")))
    assert set(kept(path)) == {"new"}


CHILD = """
import sys, time
from pathlib import Path
from kvrelay.cluster.state.session_store import SessionStore
from kvrelay.router.sessions.session import SaveSession
from tests.cluster.state.test_session_store import record
store = SessionStore(Path(sys.argv[1]), "model")
for number in range(1_000_000):
    store.perform(SaveSession(record("s%d" % (number % 50), num_turns=number)))
    while store._unwritten:
        time.sleep(0.001)
    if number >= 1:
        print(number - 1, flush=True)  # the one before this has been committed
"""


@pytest.mark.slow
def test_what_was_committed_is_there_after_a_kill(path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, path], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        told = -1
        while told < 120:
            told = int(child.stdout.readline())
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(30)
    told = max([told, *(int(line) for line in child.stdout.read().splitlines()[:-1])])
    found = kept(path)
    for number in range(told - 49, told + 1):  # or a later turn of the same session
        assert found[f"s{number % 50}"].num_turns >= number


def test_a_write_that_failed_is_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kvrelay.cluster.state.session_store, "RETRY_S", 0.01)
    store = SessionStore(path, MODEL)
    commit, failures = store._commit, [1, 2, 3]

    def fail_at_first(changes: Any) -> None:
        if failures:
            failures.pop()
            store.perform(SaveSession(record("a", num_turns=2)))  # while the older one is written
            raise sqlite3.OperationalError("database or disk is full")
        commit(changes)

    monkeypatch.setattr(store, "_commit", fail_at_first)
    store.perform(SaveSession(record("a", num_turns=1)))
    store.perform(SaveSession(record("b")))
    stores.until(lambda: not failures)
    store.close()
    assert {name: found.num_turns for name, found in kept(path).items()} == {"a": 2, "b": 3}
    assert caplog.text.count("database or disk is full") == 1


def test_what_waits_to_be_written_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvrelay.cluster.state.session_store, "MAX_UNWRITTEN", 2)
    monkeypatch.setattr(kvrelay.cluster.state.session_store, "RETRY_S", 30.0)
    store = SessionStore(path, MODEL)
    commit = store._commit

    def fail(changes: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store, "_commit", fail)
    store.perform(SaveSession(record("first")))
    stores.until(lambda: store._unwritten and store._changed._waiters)  # type: ignore[attr-defined]
    for name in ("a", "b", "c", "a"):
        store.perform(SaveSession(record(name)))
    assert store.num_dropped == 2
    monkeypatch.setattr(store, "_commit", commit)
    store.close()
    assert set(kept(path)) == {"first", "a"}


def serve_a_turn(config: Config) -> Router:
    """A server's life: one turn of session "s" of two tokens more than the last one."""
    store, limits, records = open_sessions(config, MODEL)
    thread = LoopThread("test")
    host = NodeHost(thread.loop, send_remote=lambda to, message: None)
    router = Router("router-0", None, limits, records)
    try:
        thread.call(lambda: host.add(router, store))
        done = TokenDelta("r", 1, 10, (50, 51), finish=FinishReason.STOP)
        for message in (
            WorkerUp(worker_info("decode-0")),
            Submit("r", SamplingParams(max_tokens=8), "api", tuple(range(10)), 60.0, session="s"),
            TokenDeltas("decode-0", 1, (done,)),
        ):
            thread.call(lambda message=message: host.deliver("router-0", message))  # type: ignore[misc]
        assert host.failed == {}
    finally:
        host.close()
        thread.close()
    return router


def test_a_server_finds_the_sessions_of_the_one_before_it(tmp_path: Path) -> None:
    config = Config(sessions=SessionsSection(state_dir=str(tmp_path)))
    for number in (1, 2, 3):
        session = serve_a_turn(config).sessions.table.find("", "s")
        assert session is not None
        assert (session.num_turns, session.num_tokens) == (number, 12)
    off = structs.replace(config, sessions=structs.replace(config.sessions, durable=False))
    session = serve_a_turn(off).sessions.table.find("", "s")
    assert session is not None
    assert session.num_turns == 1


def test_without_a_place_for_them_sessions_live_as_long_as_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    config = Config(sessions=SessionsSection(state_dir=str(tmp_path / "file")))
    session = serve_a_turn(config).sessions.table.find("", "s")
    assert session is not None
    assert "sessions will be forgotten when the server stops" in caplog.text


def test_nothing_is_parked_by_itself_where_there_is_no_tier_to_park_in(tmp_path: Path) -> None:
    sessions = SessionsSection(state_dir=str(tmp_path), park_after_s=7.0, durable=False)
    for tiers, park_after_s in (
        (TiersSection(host_gib=0.0), 0.0),
        (TiersSection(), 7.0),
        (TiersSection(host_gib=1.0), 7.0),
        (TiersSection(disk_gib=1.0, retention_s=99.0), 7.0),
    ):
        _, limits, _ = open_sessions(Config(sessions=sessions, tiers=tiers), MODEL)
        assert limits.park_after_s == park_after_s
        assert limits.retention.keep_s == tiers.retention_s


def test_sessions_of_several_models_are_kept_apart(tmp_path: Path) -> None:
    """Two may have one name; each router finds its own again."""
    config = Config(sessions=SessionsSection(state_dir=str(tmp_path)))

    def opened() -> dict[str, OpenedState]:
        names = ("large", "small")
        return {n: open_state(config, n, "run", "router-0", ("router-0",), n) for n in names}

    first = opened()
    store = ModelStores({name: each.executor for name, each in first.items()})
    store.perform(ForModel("large", SaveSession(record("a", num_turns=7))))
    store.perform(ForModel("small", SaveSession(record("a", num_turns=2))))
    store.perform(ForModel("small", SaveSession(record("b"))))
    store.close()
    again = opened()
    found = {name: {r.session: r.num_turns for r in each.records} for name, each in again.items()}
    ModelStores({name: each.executor for name, each in again.items()}).close()
    assert found == {"large": {"a": 7}, "small": {"a": 2, "b": record("b").num_turns}}
