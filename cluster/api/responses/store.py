"""Responses that can be asked for again and continued: one SQLite file, or memory.

Each row is one response with the items that it was asked with, one chat completion, or the head of
a conversation, whose items are rows of their own (`items.py`). All calls block, for a disk: they
are made from threads (`threads.py`). Writes follow one another; reads of a file wait for none.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from kvrelay.cluster.api.database import BUSY_S, Database

log = logging.getLogger("kvrelay.responses")

FILE = "responses.db"
VERSION = 1  # of the table, in the file's header
KEEP_S = 30 * 86_400.0
# Beyond these, each tenant keeps its share of them, the youngest.
MAX_RESPONSES = 100_000
MAX_BYTES = 4 * 2**30  # all records together
MAX_MEMORY_BYTES = 64 * 2**20  # likewise, where there is no file
PRUNE_EVERY = 256  # records, or a 64th of their bytes
MAX_READERS = 8  # connections that are kept open

_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    tenant TEXT, id TEXT, created_at REAL, record BLOB, PRIMARY KEY (tenant, id))
"""
_INDEX = "CREATE INDEX IF NOT EXISTS responses_by_age ON responses (created_at)"
# How many items a conversation has, of how many bytes, and the position of the next.
_CONVERSATIONS = """
CREATE TABLE IF NOT EXISTS conversations (
    tenant TEXT, id TEXT, num_items INTEGER, num_bytes INTEGER, next_position INTEGER,
    PRIMARY KEY (tenant, id))
"""
_ITEMS = """
CREATE TABLE IF NOT EXISTS conversation_items (
    tenant TEXT, conversation TEXT, position INTEGER, id TEXT, num_bytes INTEGER, item BLOB,
    PRIMARY KEY (tenant, conversation, position))
"""
_ITEM_INDEX = """
CREATE UNIQUE INDEX IF NOT EXISTS conversation_items_by_id
    ON conversation_items (tenant, conversation, id)
"""
_TABLES = _TABLE, _INDEX, _CONVERSATIONS, _ITEMS, _ITEM_INDEX
_GET = "SELECT record FROM responses WHERE tenant = ? AND id = ?"
_PUT = """
INSERT OR REPLACE INTO responses (tenant, id, created_at, record) VALUES (?, ?, ?, ?)
"""
# Whatever is put has the highest rowid, and is the youngest, even where the clock was set back.
_SIZES = """
SELECT r.rowid AS place, r.tenant AS tenant, LENGTH(r.record) + COALESCE(c.num_bytes, 0) AS size
    FROM responses r LEFT JOIN conversations c ON c.tenant = r.tenant AND c.id = r.id
"""
_PRUNE = f"""
DELETE FROM responses WHERE created_at < ? OR rowid IN
    (SELECT place FROM (SELECT place,
        ROW_NUMBER() OVER (PARTITION BY tenant ORDER BY place DESC) AS number,
        SUM(size) OVER (PARTITION BY tenant ORDER BY place DESC) AS total
        FROM ({_SIZES})) WHERE number > ? OR total > ?)
"""
_TOTALS = f"SELECT COUNT(*), COALESCE(SUM(size), 0), COUNT(DISTINCT tenant) FROM ({_SIZES})"
# Items whose conversation has gone: it was pruned, or the version before has deleted it.
_HEADLESS = """
SELECT c.tenant, c.id FROM conversations c LEFT JOIN responses r
    ON r.tenant = c.tenant AND r.id = c.id WHERE r.id IS NULL
"""


class ResponseStore:
    """Owned by the API. May be called from any thread; several processes may share a file."""

    def __init__(self, path: Path | None = None) -> None:
        """path: of the file; None, or a file that cannot be used: memory."""
        self._path = path
        self._readers: deque[sqlite3.Connection] = deque()  # connections that nobody reads by
        self._is_closed = False
        self._num_puts = self._num_put_bytes = 0
        self.is_durable = False
        if path is not None:
            try:
                self._database = Database(path, VERSION, *_TABLES)
                self.is_durable = True
                return
            except (OSError, sqlite3.Error) as error:
                log.warning(
                    "responses will be forgotten when the server stops: %s: %s", path, error
                )
        self._database = Database(None, VERSION, *_TABLES)

    @property
    def max_bytes(self) -> int:
        return MAX_BYTES if self.is_durable else MAX_MEMORY_BYTES

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that shows what has been written, also while another writes."""
        if not self.is_durable:
            with self._database.lock:
                yield self._database.connection
            return
        try:
            connection = self._readers.pop()
        except IndexError:
            connection = sqlite3.connect(str(self._path), BUSY_S, check_same_thread=False)
            connection.execute("PRAGMA query_only = 1")
        try:
            yield connection
        finally:
            if self._is_closed or len(self._readers) >= MAX_READERS:
                connection.close()
            else:
                self._readers.append(connection)

    def writing(self) -> AbstractContextManager[sqlite3.Connection]:
        """One step for all that share the file; what is raised inside changes nothing."""
        return self._database.writing()

    def put(self, tenant: str, response_id: str, record: bytes) -> None:
        with self.writing() as connection:
            self.put_by(connection, tenant, response_id, record)
            self.check_kept(connection, tenant, response_id)

    def put_by(
        self, connection: sqlite3.Connection, tenant: str, response_id: str, record: bytes
    ) -> None:
        connection.execute(_PUT, (tenant, response_id, time.time(), record))
        self.count(connection, len(record))

    def count(self, connection: sqlite3.Connection, num_bytes: int) -> None:
        """So many bytes were written, and once in a while the oldest have to go."""
        self._num_put_bytes += num_bytes
        if self._num_puts % PRUNE_EVERY == 0 or self._num_put_bytes > self.max_bytes // 64:
            self._prune(connection)
            self._num_put_bytes = 0
        self._num_puts += 1

    def check_kept(self, connection: sqlite3.Connection, tenant: str, name: str) -> None:
        """What has just been put has not had to go, for its size. Raises sqlite3.Error."""
        if connection.execute(_GET, (tenant, name)).fetchone() is None:
            raise sqlite3.DataError("it is larger than its tenant's share of what is stored")

    def _prune(self, connection: sqlite3.Connection) -> None:
        """What one tenant keeps takes nothing from the share of another."""
        count, size, num_tenants = connection.execute(_TOTALS).fetchone()
        is_full = count > MAX_RESPONSES or size > self.max_bytes
        num_shares = max(1, num_tenants) if is_full else 1
        shares = MAX_RESPONSES // num_shares, self.max_bytes // num_shares
        connection.execute(_PRUNE, (time.time() - KEEP_S, *shares))
        for key in connection.execute(_HEADLESS).fetchall():
            delete_items(connection, *key)

    def replace(self, tenant: str, name: str, old: bytes, new: bytes) -> bool:
        """Makes `new` of a record that still is `old`; returns whether it was."""
        with self.writing() as connection:
            found = connection.execute(_GET, (tenant, name)).fetchone()
            is_old = found is not None and bool(found[0] == old)
            if is_old:
                self.put_by(connection, tenant, name, new)
        return is_old

    def get(self, tenant: str, response_id: str) -> bytes | None:
        with self.reading() as connection:
            row = connection.execute(_GET, (tenant, response_id)).fetchone()
        return None if row is None else row[0]

    def delete(self, tenant: str, response_id: str) -> bool:
        """Returns whether it was there."""
        query = "DELETE FROM responses WHERE tenant = ? AND id = ?"
        with self.writing() as connection:
            delete_items(connection, tenant, response_id)
            return connection.execute(query, (tenant, response_id)).rowcount > 0

    def close(self) -> None:
        self._is_closed = True
        self._database.close()
        while self._readers:
            self._readers.pop().close()


def delete_items(connection: sqlite3.Connection, tenant: str, conversation: str) -> None:
    """Take all items from a conversation, which is to go."""
    for query in (
        "DELETE FROM conversation_items WHERE tenant = ? AND conversation = ?",
        "DELETE FROM conversations WHERE tenant = ? AND id = ?",
    ):
        connection.execute(query, (tenant, conversation))
