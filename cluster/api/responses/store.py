"""Responses that can be asked for again and continued: one SQLite file, or memory.

Each row is one response with the items that it was asked with; a conversation is the chain of its
predecessors. All calls block, for a disk: they are made from a thread.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("kvrelay.responses")

FILE = "responses.db"
VERSION = 1  # of the table, in the file's header
KEEP_S = 30 * 86_400.0
# Beyond these, each tenant keeps its share of them, the youngest.
MAX_RESPONSES = 100_000
MAX_BYTES = 4 * 2**30  # all records together
MAX_MEMORY_BYTES = 64 * 2**20  # likewise, where there is no file
PRUNE_EVERY = 256  # records, or a 64th of their bytes
BUSY_S = 5.0  # that others of the file's users may take

_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    tenant TEXT, id TEXT, created_at REAL, record BLOB, PRIMARY KEY (tenant, id))
"""
_INDEX = "CREATE INDEX IF NOT EXISTS responses_by_age ON responses (created_at)"
_GET = "SELECT record FROM responses WHERE tenant = ? AND id = ?"
_PUT = """
INSERT OR REPLACE INTO responses (tenant, id, created_at, record) VALUES (?, ?, ?, ?)
"""
# Whatever is put has the highest rowid, and is the youngest, even where the clock was set back.
_PRUNE = """
DELETE FROM responses WHERE created_at < ? OR rowid IN
    (SELECT rowid FROM (SELECT rowid,
        ROW_NUMBER() OVER (PARTITION BY tenant ORDER BY rowid DESC) AS number,
        SUM(LENGTH(record)) OVER (PARTITION BY tenant ORDER BY rowid DESC) AS total
        FROM responses) WHERE number > ? OR total > ?)
"""
_TOTALS = "SELECT COUNT(*), COALESCE(SUM(LENGTH(record)), 0), COUNT(DISTINCT tenant) FROM responses"


class ResponseStore:
    """Owned by the API. May be called from any thread; several processes may share a file."""

    def __init__(self, path: Path | None = None) -> None:
        """path: of the file; None, or a file that cannot be used: memory."""
        self._lock = threading.Lock()
        self._num_puts = self._num_put_bytes = 0
        self.is_durable = False
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                self._connection = open_database(str(path), VERSION, _TABLE, _INDEX)
                self.is_durable = True
                return
            except (OSError, sqlite3.Error) as error:
                log.warning(
                    "responses will be forgotten when the server stops: %s: %s", path, error
                )
        self._connection = open_database(":memory:", VERSION, _TABLE, _INDEX)

    @property
    def max_bytes(self) -> int:
        return MAX_BYTES if self.is_durable else MAX_MEMORY_BYTES

    def put(self, tenant: str, response_id: str, record: bytes) -> None:
        with self._lock, self._connection as connection:
            self._put(connection, tenant, response_id, record=record)

    def _put(self, connection: sqlite3.Connection, *key: str, record: bytes) -> None:
        connection.execute(_PUT, (*key, time.time(), record))
        self._num_put_bytes += len(record)
        if self._num_puts % PRUNE_EVERY == 0 or self._num_put_bytes > self.max_bytes // 64:
            self._prune(connection)
            self._num_put_bytes = 0
        self._num_puts += 1

    def _prune(self, connection: sqlite3.Connection) -> None:
        """What one tenant keeps takes nothing from the share of another."""
        count, size, num_tenants = connection.execute(_TOTALS).fetchone()
        is_full = count > MAX_RESPONSES or size > self.max_bytes
        num_shares = max(1, num_tenants) if is_full else 1
        shares = MAX_RESPONSES // num_shares, self.max_bytes // num_shares
        connection.execute(_PRUNE, (time.time() - KEEP_S, *shares))

    def update(
        self, tenant: str, name: str, change: Callable[[bytes | None], bytes | None]
    ) -> bytes | None:
        """What `change` makes of a record becomes the record, as one step for all that share the
        file; what it raises changes nothing. None: there is none. Returns the new one."""
        with self._lock, self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            row = connection.execute(_GET, (tenant, name)).fetchone()
            record = change(None if row is None else row[0])
            if record is not None:
                self._put(connection, tenant, name, record=record)
        return record

    def get(self, tenant: str, response_id: str) -> bytes | None:
        with self._lock:
            row = self._connection.execute(_GET, (tenant, response_id)).fetchone()
        return None if row is None else row[0]

    def latest(self, tenant: str, prefix: str, limit: int, max_bytes: int) -> list[bytes]:
        """Records whose names begin with `prefix`, the youngest first: `limit` at most, and the
        next only while they have fewer than `max_bytes` together."""
        query = (
            "SELECT record FROM responses WHERE tenant = ? AND id >= ? AND id < ?"
            " ORDER BY rowid DESC LIMIT ?"
        )
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        with self._lock:
            found, size = [], 0
            for (record,) in self._connection.execute(query, (tenant, prefix, end, limit)):
                found.append(record)
                size += len(record)
                if size >= max_bytes:
                    break
        return found

    def delete(self, tenant: str, response_id: str) -> bool:
        """Returns whether it was there."""
        query = "DELETE FROM responses WHERE tenant = ? AND id = ?"
        with self._lock, self._connection as connection:
            return connection.execute(query, (tenant, response_id)).rowcount > 0

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def open_database(path: str, version: int, *tables: str) -> sqlite3.Connection:
    """Opens or makes one. tables: statements that make what is not there. Raises sqlite3.Error."""
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if found > version:
            raise sqlite3.DatabaseError(
                f"version {found}, of a newer KVRelay; this one reads up to {version}"
            )
        with connection:
            for table in tables:
                connection.execute(table)
            connection.execute(f"PRAGMA user_version = {version}")
    except BaseException:
        connection.close()
        raise
    return connection


def _write_ahead(connection: sqlite3.Connection) -> None:
    """SQLite does not wait if another process does the same at this moment."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
