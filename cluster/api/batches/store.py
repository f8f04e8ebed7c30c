"""Files and batches of tenants: one SQLite file, and a folder with the files' bytes.

Life of a row: it has no result, so it is to be sent; then it has one, and is never sent again. When
all have one, or the batch has ended otherwise, results become files and are deleted, in the
transaction that ends the batch. So whoever dies at any moment leaves each row in one of the two.
Several processes may share both: one holds the lease of a batch and runs it. All calls block.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvrelay.cluster.api.responses.store import open_database

FILE = "batches.db"
FOLDER = "files"
VERSION = 1
KEEP_S = 30 * 86_400.0  # files, and batches that have ended
DRAFT_KEEP_S = 86_400.0  # what a process that was killed was writing
MAX_FILES = 1000  # a tenant's
MAX_BATCHES = 1000  # a tenant's that have not ended
PAGE = 8  # results that are in memory at once
MIN_FREE_BYTES = 16 << 20  # free on the disk: answers leave it to what ends a batch
_RESERVED_BYTES = 4 << 20  # the database and its log have it before it is used again

_TABLES = (
    "CREATE TABLE IF NOT EXISTS files (tenant TEXT, id TEXT PRIMARY KEY, expires_at REAL,"
    " num_bytes INTEGER, record TEXT)",
    "CREATE TABLE IF NOT EXISTS batches (tenant TEXT, id TEXT PRIMARY KEY, is_over INTEGER,"
    " keep_until REAL, owner TEXT, lease_until REAL, record TEXT)",
    "CREATE TABLE IF NOT EXISTS results (batch TEXT, row INTEGER, is_error INTEGER, line BLOB,"
    " input INTEGER, cached INTEGER, output INTEGER, reasoning INTEGER, PRIMARY KEY (batch, row))",
)
SUMS = ("count", "failed", "input", "cached", "output", "reasoning")  # over a batch's results
Record = dict[str, Any]


class Full(Exception):
    """A tenant has all that it may have; the text says of what."""


class StoreAway(OSError):
    """What several servers share does not answer now."""


def is_full(error: Exception) -> bool:
    """Whether a disk, or Redis, takes no more."""
    if isinstance(error, sqlite3.OperationalError):
        return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Result:
    """The one of a row. line: as it stands in the file of outputs, or of errors."""

    row: int  # its line in the input, from 1
    is_error: bool
    line: bytes
    tokens: tuple[int, int, int, int] = (0, 0, 0, 0)  # input, cached of them, output, reasoning

    @property
    def is_unsent(self) -> bool:
        """Whether its batch ended before it could be sent."""
        error = json.loads(self.line)["error"] if self.is_error else None
        return bool(error and error["code"].startswith("batch_"))


@dataclass(frozen=True, slots=True)
class Backlog:
    """Batches that have not ended, of all tenants."""

    num_rows: int  # without a result, in those that are validated
    created_at: tuple[float, ...]
    ends_at: tuple[float, ...]  # their windows


class Folder:
    """Where files are written before they are kept, and read. Several processes may share it."""

    def __init__(self, folder: Path | None, name: str) -> None:
        """folder: the state directory; None: all is forgotten when the server stops."""
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="kvrelay-files-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._state_dir, self._folder = folder, folder / name
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, name: str) -> Path:
        return self._folder / name

    def draft(self, tenant: str = "") -> Path:
        """Where a file is written before it is one. tenant: whose upload it is."""
        return self._folder / f".{_mark(tenant)}{secrets.token_hex(16)}"

    def _check(self, tenant: str, count: int, size: int, max_bytes: int) -> None:
        """count, size: of the tenant's files. Raises Full."""
        if count >= MAX_FILES:
            raise Full(f"{count} files, which is the limit: delete some")
        uploads = 0
        for draft in self._folder.glob(f".{_mark(tenant)}*"):
            with suppress(FileNotFoundError):  # it has just been given up
                uploads += draft.stat().st_size
        if size + uploads > max_bytes:
            raise Full(
                f"files of {size} bytes and uploads of {uploads}, and may have {max_bytes}: "
                "delete some"
            )

    def _written(self, parts: Iterable[bytes]) -> Path | None:
        """A draft of them. None: there is none."""
        draft, has_any = self.draft(), False
        try:
            with open(draft, "xb", opener=private_file) as file:
                for part in parts:
                    has_any = True
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        if not has_any:
            draft.unlink()
            return None
        return draft

    def _sweep_drafts(self) -> None:
        for draft in self._folder.glob(".*"):
            if draft.stat().st_mtime < time.time() - DRAFT_KEEP_S:
                draft.unlink(missing_ok=True)


class BatchStore(Folder):
    """Owned by the API. May be called from any thread."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: None if nothing is to be kept."""
        super().__init__(folder, FOLDER)
        self._lock = threading.Lock()
        path = self._state_dir / FILE
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._connection = open_database(str(path), VERSION, *_TABLES)
        if folder is not None:
            self._reserve()

    def _reserve(self) -> None:
        """Makes database and log as large as they have to be for leases, a cancel and the end of a
        batch, which then need no room on a disk that is full."""
        with suppress(sqlite3.Error), self._change() as connection:
            values = "'', -1, 0, zeroblob(?), 0, 0, 0, 0"
            query = f"INSERT OR REPLACE INTO results VALUES ({values})"
            connection.execute(query, (_RESERVED_BYTES,))
        with suppress(sqlite3.Error), self._change() as connection:
            connection.execute("DELETE FROM results WHERE batch = ''")
        with suppress(sqlite3.Error):
            self._read("PRAGMA wal_checkpoint(RESTART)")

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """One step for all that share the file; what is raised within changes nothing."""
        with self._lock, self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    def _read(self, query: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    # Files.

    def check_room(self, tenant: str, max_bytes: int) -> None:
        """max_bytes: of all files of the tenant and its uploads. Raises Full."""
        with self._lock:
            self._check_room(self._connection, tenant, max_bytes)

    def _check_room(self, connection: sqlite3.Connection, tenant: str, max_bytes: int) -> None:
        query = "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM files WHERE tenant = ?"
        count, size = connection.execute(query, (tenant,)).fetchone()
        self._check(tenant, count, size, max_bytes)

    def add_file(self, tenant: str, record: Record, draft: Path, max_bytes: int) -> None:
        """Keeps an upload, which is the draft. Raises Full as `check_room`."""
        with self._change() as connection:
            self._check_room(connection, tenant, max_bytes)
            self._put_file(connection, tenant, record, draft)

    def _put_file(
        self, connection: sqlite3.Connection, tenant: str, record: Record, draft: Path
    ) -> None:
        os.replace(draft, self.path(record["id"]))
        values = tenant, record["id"], record["expires_at"], record["bytes"], json.dumps(record)
        connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", values)

    def fetched(self, name: str) -> Path:
        """Where its bytes are. Raises FileNotFoundError."""
        path = self.path(name)
        path.stat()
        return path

    def files(self, tenant: str) -> list[Record]:
        """Returns the tenant's, the oldest first."""
        query = "SELECT record FROM files WHERE tenant = ? ORDER BY rowid"
        return [json.loads(record) for (record,) in self._read(query, tenant)]

    def file(self, tenant: str, name: str) -> Record | None:
        query = "SELECT record FROM files WHERE tenant = ? AND id = ?"
        found = self._read(query, tenant, name)
        return json.loads(found[0][0]) if found else None

    def delete_file(self, tenant: str, name: str) -> None:
        """Raises Full where a batch that has not ended reads it."""
        with self._change() as connection:
            query = "SELECT record FROM batches WHERE tenant = ? AND NOT is_over"
            for (record,) in connection.execute(query, (tenant,)):
                if json.loads(record)["input_file_id"] == name:
                    raise Full(json.loads(record)["id"])
            query = "DELETE FROM files WHERE tenant = ? AND id = ?"
            if connection.execute(query, (tenant, name)).rowcount:
                self.path(name).unlink(missing_ok=True)

    # Batches.

    def add_batch(self, tenant: str, record: Record) -> None:
        """Keeps a new one. Raises Full where there are too many."""
        with self._change() as connection:
            query = "SELECT COUNT(*) FROM batches WHERE tenant = ? AND NOT is_over"
            (count,) = connection.execute(query, (tenant,)).fetchone()
            if count >= MAX_BATCHES:
                raise Full(f"{count} batches that have not ended, which is the limit")
            keep_until = record["expires_at"] + KEEP_S
            values = tenant, record["id"], 0, keep_until, "", 0.0, json.dumps(record)
            connection.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def batches(self, tenant: str) -> list[Record]:
        """Returns the tenant's, the oldest first."""
        query = "SELECT record FROM batches WHERE tenant = ? ORDER BY rowid"
        return [self._counted(json.loads(record)) for (record,) in self._read(query, tenant)]

    def batch(self, tenant: str, name: str) -> Record | None:
        query = "SELECT record FROM batches WHERE tenant = ? AND id = ?"
        found = self._read(query, tenant, name)
        return self._counted(json.loads(found[0][0])) if found else None

    def backlog(self) -> Backlog:
        query = (
            "SELECT record ->> '$.request_counts.total', record ->> '$.created_at',"
            " record ->> '$.expires_at' FROM batches WHERE NOT is_over"
        )
        found = self._read(query)
        ((num_done,),) = self._read("SELECT COUNT(*) FROM results")
        totals, created_at, ends_at = zip(*found, strict=True) if found else ((), (), ())
        return Backlog(max(0, sum(totals) - num_done), created_at, ends_at)

    def change_batch(self, name: str, change: Callable[[Record], Record]) -> Record | None:
        """What `change` makes of a batch that has not ended. None: it has, or is not there."""
        with self._change() as connection:
            query = "SELECT record FROM batches WHERE id = ? AND NOT is_over"
            found = connection.execute(query, (name,)).fetchone()
            if found is None:
                return None
            record = change(json.loads(found[0]))
            query = "UPDATE batches SET record = ? WHERE id = ?"
            connection.execute(query, (json.dumps(record), name))
        return record

    def delete_batch(self, tenant: str, name: str) -> bool:
        """With its files. False: it has not ended."""
        with self._change() as connection:
            query = "SELECT record FROM batches WHERE tenant = ? AND id = ? AND is_over"
            found = connection.execute(query, (tenant, name)).fetchone()
            if found is None:
                return False
            connection.execute("DELETE FROM batches WHERE id = ?", (name,))
            record = json.loads(found[0])
            for kind in ("input", "output", "error"):
                if file := record[f"{kind}_file_id"]:
                    connection.execute("DELETE FROM files WHERE id = ?", (file,))
                    self.path(file).unlink(missing_ok=True)
        return True

    def claim(
        self,
        owner: str,
        now: float,
        lease_s: float,
        busy: Collection[str],
        full: Collection[str] = (),
    ) -> tuple[str, Record] | None:
        """The oldest batch that nobody runs, and whose it is: now it is `owner`'s. busy: tenants
        whose batches wait. full: those whose rows wait, not what is to be checked or to end."""
        query = (
            "SELECT tenant, id, record FROM batches WHERE NOT is_over AND lease_until < ?"
            f" AND tenant NOT IN ({_marks(busy)}) AND (tenant NOT IN ({_marks(full)})"
            " OR record ->> '$.status' <> 'in_progress' OR record ->> '$.expires_at' <= ?)"
            " ORDER BY rowid LIMIT 1"
        )
        with self._change() as connection:
            found = connection.execute(query, (now, *busy, *full, now)).fetchone()
            if found is None:
                return None
            query = "UPDATE batches SET owner = ?, lease_until = ? WHERE id = ?"
            connection.execute(query, (owner, now + lease_s, found[1]))
        return found[0], json.loads(found[2])

    def renew(
        self, owner: str, now: float, lease_s: float, names: Collection[str]
    ) -> dict[str, Record]:
        """names: of batches that run. Returns all that are still the owner's."""
        with self._change() as connection:
            query = "UPDATE batches SET lease_until = ? WHERE owner = ? AND id = ? AND NOT is_over"
            connection.executemany(query, [(now + lease_s, owner, name) for name in names])
            query = "SELECT id, record FROM batches WHERE owner = ? AND NOT is_over"
            found = connection.execute(query, (owner,)).fetchall()
        return {name: json.loads(record) for name, record in found}

    def release(self, owner: str, name: str = "") -> None:
        """Anybody may run its batches now, or the one of that name."""
        with self._change() as connection:
            query = "UPDATE batches SET owner = '', lease_until = 0 WHERE owner = ?"
            connection.execute(f"{query} AND ? IN ('', id)", (owner, name))

    def free_results(self, owner: str, name: str) -> None:
        """Deletes those of its batch, whose room something else is to have."""
        query = (
            "DELETE FROM results WHERE rowid IN (SELECT rowid FROM results WHERE batch = ?"
            " AND EXISTS (SELECT 1 FROM batches WHERE id = ? AND owner = ?) LIMIT 64)"
        )
        is_left = True
        while is_left:  # in parts: what changes at once needs room itself
            with self._change() as connection:
                is_left = connection.execute(query, (name, name, owner)).rowcount > 0

    def end(self, owner: str, tenant: str, record: Record) -> None:
        """Ends a batch without its results, for which there is no room."""
        self.free_results(owner, record["id"])
        self.finish(owner, tenant, record, {})

    # Results.

    def put_results(self, batch: str, results: Collection[Result]) -> None:
        """The first one of a row counts; after the batch's end none."""
        has_answers = any(not result.is_error for result in results)
        if has_answers and shutil.disk_usage(self._folder).free < MIN_FREE_BYTES:
            message = f"less than {MIN_FREE_BYTES} bytes of the disk are free"
            raise OSError(errno.ENOSPC, message)
        query = (
            "INSERT OR IGNORE INTO results SELECT ?, ?, ?, ?, ?, ?, ?, ? WHERE EXISTS"
            " (SELECT 1 FROM batches WHERE id = ? AND NOT is_over)"
        )
        rows = [(batch, r.row, r.is_error, r.line, *r.tokens, batch) for r in results]
        with self._change() as connection:
            connection.executemany(query, rows)

    def rows_done(self, batch: str) -> set[int]:
        return {row for (row,) in self._read("SELECT row FROM results WHERE batch = ?", batch)}

    def num_unsent(self, batch: str) -> int:
        """Rows whose result says that the batch ended before."""
        query = (
            "SELECT COUNT(*) FROM results WHERE batch = ? AND is_error"
            " AND CAST(line AS TEXT) ->> '$.error.code' LIKE 'batch\\_%' ESCAPE '\\'"
        )
        ((count,),) = self._read(query, batch)
        return int(count)

    def write_results(self, batch: str, is_error: bool) -> Path | None:
        """A draft with a line for each, in the order of the input. None: there is none."""
        query = (
            "SELECT row, line FROM results WHERE batch = ? AND is_error = ? AND row > ?"
            f" ORDER BY row LIMIT {PAGE}"
        )

        def lines() -> Iterator[bytes]:
            row = 0
            while page := self._read(query, batch, is_error, row):
                yield from (line + b"\n" for _, line in page)
                row = page[-1][0]

        return self._written(lines())

    def finish(
        self, owner: str, tenant: str, record: Record, files: Mapping[Path, Record]
    ) -> Record | None:
        """Ends a batch with the files of its results. None: it is not the owner's any more."""
        with self._change() as connection:
            query = "SELECT 1 FROM batches WHERE id = ? AND owner = ? AND NOT is_over"
            if connection.execute(query, (record["id"], owner)).fetchone() is None:
                return None
            record = self._with_counts(connection, record)
            for draft, file in files.items():
                self._put_file(connection, tenant, file, draft)
            query = "UPDATE batches SET is_over = 1, owner = '', record = ? WHERE id = ?"
            connection.execute(query, (json.dumps(record), record["id"]))
            connection.execute("DELETE FROM results WHERE batch = ?", (record["id"],))
        return record

    def _counted(self, record: Record) -> Record:
        with self._lock:
            return self._with_counts(self._connection, record)

    def _with_counts(self, connection: sqlite3.Connection, record: Record) -> Record:
        """With what the results say, while they are there."""
        query = (
            "SELECT COUNT(*), SUM(is_error), SUM(input), SUM(cached), SUM(output), SUM(reasoning)"
            " FROM results WHERE batch = ?"
        )
        return with_counts(record, *connection.execute(query, (record["id"],)).fetchone())

    def sweep(self, now: float) -> None:
        """Deletes what has been kept long enough; no file that a batch is to read."""
        query = (
            "SELECT id FROM files WHERE expires_at < ? AND NOT EXISTS (SELECT 1 FROM batches"
            " WHERE NOT is_over AND json_extract(record, '$.input_file_id') = files.id)"
        )
        with self._change() as connection:
            gone = [name for (name,) in connection.execute(query, (now,))]
            connection.executemany("DELETE FROM files WHERE id = ?", [(name,) for name in gone])
            connection.execute("DELETE FROM batches WHERE is_over AND keep_until < ?", (now,))
        for name in gone:
            self.path(name).unlink(missing_ok=True)
        self._sweep_drafts()

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def with_counts(
    record: Record, count: int, failed: int, asked: int, cached: int, made: int, reasoning: int
) -> Record:
    """With the sums of its results, while they are there."""
    if not count:
        return record
    counts = record["request_counts"] | {"completed": count - failed, "failed": failed}
    usage = {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": asked + made,
    }
    return record | {"request_counts": counts, "usage": usage}


def private_file(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _marks(values: Collection[str]) -> str:
    """Places for these in a query."""
    return ", ".join("?" * len(values))


def _mark(tenant: str) -> str:
    return blake2b(tenant.encode(), digest_size=8).hexdigest()
