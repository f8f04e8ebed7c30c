"""Sessions on disk: one SQLite file, which the router's effects keep up to date.

Life: opened under a lock (one server for each file), read once, then written by a thread of its
own, so that the router never waits for a disk. What a killed process had committed is there at the
next start. A file that cannot be read is set aside, never written over.

Times are the wall clock's here and the router's there: between them go records whose times count
back from now.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
import time
from pathlib import Path

from kvrelay.cluster.config import Config
from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.kv.tier import Retention
from kvrelay.engine.node import Effect
from kvrelay.router.sessions.session import (
    TOKEN_BYTES,
    DeleteSession,
    SaveSession,
    SessionConfig,
    SessionRecord,
)

log = logging.getLogger("kvrelay.sessions")

FILE = "sessions.db"
VERSION = 1  # the table's, in the file's header
RETRY_S = 5.0  # after a write has failed
CLOSE_TIMEOUT_S = 10.0
MAX_UNWRITTEN = 20_000  # sessions; beyond it a change is dropped

_TABLE = """
CREATE TABLE IF NOT EXISTS sessions (
    model TEXT, tenant TEXT, session TEXT, tokens BLOB, salt BLOB, num_public_tokens INTEGER,
    keep_s REAL, to_disk INTEGER, num_turns INTEGER, worker TEXT, pinned INTEGER,
    created_at REAL, used_at REAL, PRIMARY KEY (model, tenant, session))
"""
_COLUMNS = (
    "tenant, session, tokens, salt, num_public_tokens, keep_s, to_disk, num_turns, worker, pinned,"
    " created_at, used_at"
)
_SELECT = f"SELECT {_COLUMNS} FROM sessions WHERE model = ?"
_SAVE = f"INSERT OR REPLACE INTO sessions (model, {_COLUMNS}) VALUES (?{', ?' * 12})"
_DELETE = "DELETE FROM sessions WHERE model = ? AND tenant = ? AND session = ?"
_EXPIRE = "DELETE FROM sessions WHERE NOT pinned AND used_at + keep_s < ?"

_Row = tuple[object, ...]


class SessionStoreError(Exception):
    """Sessions cannot be kept here; one line: what, where, and what to do."""


class SessionStore:
    """The executor of a router: performs `SaveSession` and `DeleteSession`. Owns the file, its lock
    and the thread.

    Invariant: `_unwritten` has the last change of each session that is not in the file yet; only
    the thread writes to the file, one transaction at a time."""

    def __init__(self, path: Path, model: str) -> None:
        """Open or make the file, for the sessions of `model`. Raises SessionStoreError."""
        self.path = path
        self._model = model
        self._changed = threading.Condition()
        self._unwritten: dict[tuple[str, str], _Row | None] = {}  # None: to be deleted
        self._closing = False
        self.num_dropped = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SessionStoreError(f"cannot keep sessions in {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise SessionStoreError(
                f"{path} is in use by another server; give each its own sessions.state_dir"
            ) from error
        try:
            self._connection, self.records = self._open_or_set_aside()
        except SessionStoreError:
            os.close(self._lock)
            raise
        except (OSError, sqlite3.Error) as error:
            os.close(self._lock)
            raise SessionStoreError(f"cannot keep sessions in {path}: {error}") from error
        self._thread = threading.Thread(target=self._write, name="session-store", daemon=True)
        self._thread.start()

    def perform(self, effect: Effect) -> None:
        """Takes the change; the thread writes it."""
        if isinstance(effect, SaveSession):
            record = effect.record
            key, row = (record.tenant, record.session), self._row(record)
        else:
            assert isinstance(effect, DeleteSession), effect
            key, row = (effect.tenant, effect.session), None
        with self._changed:
            if key not in self._unwritten and len(self._unwritten) >= MAX_UNWRITTEN:
                self.num_dropped += 1
                return
            self._unwritten[key] = row
            self._changed.notify()

    def close(self) -> None:
        """Write what is left, and let go of the file; for a bounded time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("%s: the last changes of sessions are not written", self.path)
            return
        self._connection.close()
        os.close(self._lock)

    def _open_or_set_aside(self) -> tuple[sqlite3.Connection, list[SessionRecord]]:
        try:
            return self._open()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise  # the disk, not the file
            aside = Path(f"{self.path}.bad-{time.time_ns()}")
            log.warning("%s cannot be read (%s): it is now %s", self.path, error, aside.name)
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{self.path}{suffix}").rename(f"{aside}{suffix}")
            return self._open()

    def _open(self) -> tuple[sqlite3.Connection, list[SessionRecord]]:
        # Made here rather than by SQLite, so that no other user may ever read it.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self.path, timeout=5.0, check_same_thread=False)
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > VERSION:  # nothing is wrong with it
                raise SessionStoreError(
                    f"{self.path} is of version {version}, of a newer KVRelay, and this one reads "
                    f"up to {VERSION}: it is left as it is; go back to that, or move it away"
                )
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(found)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            now = time.time()
            with connection:
                connection.execute(_TABLE)
                connection.execute(f"PRAGMA user_version = {VERSION}")
                connection.execute(_EXPIRE, (now,))
            rows = connection.execute(_SELECT, (self._model,)).fetchall()
            return connection, [_record(now, *row) for row in rows]
        except BaseException:
            connection.close()
            raise

    def _row(self, record: SessionRecord) -> _Row:
        now = time.time()
        scope, retention = record.scope, record.retention
        return (
            self._model,
            record.tenant,
            record.session,
            record.tokens,
            scope.salt,
            scope.num_public_tokens,
            retention.keep_s,
            retention.to_disk,
            record.num_turns,
            record.worker,
            record.pinned,
            now - record.age_s,
            now - record.idle_s,
        )

    def _write(self) -> None:
        """What the writing thread runs."""
        is_failing = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unwritten or self._closing)
                changes, self._unwritten = self._unwritten, {}
                is_last = self._closing
            try:
                self._commit(changes)
                is_failing = False
            except sqlite3.Error as error:
                if not is_failing:
                    log.warning("sessions cannot be written to %s: %s", self.path, error)
                is_failing = True
                with self._changed:
                    self._unwritten = changes | self._unwritten
                    if not is_last:
                        self._changed.wait_for(lambda: self._closing, RETRY_S)
            if is_last:
                return

    def _commit(self, changes: dict[tuple[str, str], _Row | None]) -> None:
        deleted = [(self._model, *key) for key, row in changes.items() if row is None]
        saved = [row for row in changes.values() if row is not None]
        with self._connection as connection:
            connection.executemany(_DELETE, deleted)
            connection.executemany(_SAVE, saved)


def _record(
    now: float,
    tenant: str,
    session: str,
    tokens: bytes,
    salt: bytes,
    num_public_tokens: int,
    keep_s: float,
    to_disk: int,
    num_turns: int,
    worker: str | None,
    pinned: int,
    created_at: float,
    used_at: float,
) -> SessionRecord:
    """A row as what it was made from. The wall clock may have been put back since."""
    if len(tokens) % TOKEN_BYTES:
        raise sqlite3.DatabaseError(f"{len(tokens)} bytes of session {session!r} are no tokens")
    return SessionRecord(
        tenant=tenant,
        session=session,
        tokens=tokens,
        scope=CacheScope(salt, num_public_tokens),
        retention=Retention(keep_s, bool(to_disk)),
        num_turns=num_turns,
        worker=worker,
        pinned=bool(pinned),
        age_s=max(0.0, now - created_at),
        idle_s=max(0.0, now - used_at),
    )


def open_sessions(
    config: Config, model: str, name: str = ""
) -> tuple[SessionStore | None, SessionConfig, list[SessionRecord]]:
    """The store of a server's sessions, if they are to outlive it, and what its router needs. A
    store that cannot be opened is no reason not to serve."""
    section = config.sessions
    store = None
    if section.durable:
        try:
            path = section.state_path / (f"{name}.{FILE}" if name else FILE)
            store = SessionStore(path, model)
        except SessionStoreError as error:
            log.warning("sessions will be forgotten when the server stops: %s", error)
    limits = session_config(config, durable=store is not None)
    return store, limits, store.records if store is not None else []


def session_config(config: Config, durable: bool = False, shared: bool = False) -> SessionConfig:
    section, tiers = config.sessions, config.tiers
    has_tiers = tiers.host_gib != 0 or tiers.disk_gib > 0
    return SessionConfig(
        max_sessions=section.max_sessions,
        max_per_tenant=section.max_per_tenant,
        max_tokens=section.max_tokens,
        park_after_s=section.park_after_s if has_tiers else 0.0,
        order_timeout_s=section.order_timeout_s,
        retention=Retention(tiers.retention_s),
        durable=durable,
        shared=shared,
    )
