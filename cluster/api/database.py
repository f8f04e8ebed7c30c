"""SQLite files that the processes of a server share."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUSY_S = 5.0  # that others of a file's users may take


class Database:
    """A file, or memory. Owned by a store, which may be called from any thread; several processes
    may share the file. Calls raise sqlite3.Error."""

    def __init__(self, path: Path | None, version: int, *tables: str) -> None:
        """Opens the file at `path`, or makes it; None: memory. tables: statements that make what is
        not there. Raises sqlite3.Error, OSError."""
        self.lock = threading.Lock()  # held by who uses the connection
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self.connection = _opened(str(path or ":memory:"), version, *tables)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One step for all that share the file; what is raised inside changes nothing."""
        with self.lock, self.connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    def read(self, query: str, *values: Any) -> list[Any]:
        with self.lock:
            return self.connection.execute(query, values).fetchall()

    def close(self) -> None:
        with self.lock:
            self.connection.close()


def _opened(path: str, version: int, *tables: str) -> sqlite3.Connection:
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
