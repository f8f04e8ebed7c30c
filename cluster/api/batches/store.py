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
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.cluster.api.batches.folder import Folder, Full
from kvrelay.cluster.api.database import Database
from kvrelay.cluster.api.pages import PageQuery

FILE = "batches.db"
FOLDER = "files"
VERSION = 1
KEEP_S = 30 * 86_400.0  # files, and batches that have ended
MAX_BATCHES = 1000  # a tenant's that have not ended
MAX_ENDED = 1000  # a tenant's that have: beyond it those go that ended first
PAGE = 8  # results that are in memory at once
MIN_FREE_BYTES = 16 << 20  # free on the disk: answers leave it to what ends a batch
_RESERVED_BYTES = 4 << 20  # the database and its log have it before it is used again

# is_over: 0, or a number that is higher the later a tenant's batch has ended.
_TABLES = (
    "CREATE TABLE IF NOT EXISTS files (tenant TEXT, id TEXT PRIMARY KEY, expires_at REAL,"
    " num_bytes INTEGER, record TEXT)",
    "CREATE TABLE IF NOT EXISTS batches (tenant TEXT, id TEXT PRIMARY KEY, is_over INTEGER,"
    " keep_until REAL, owner TEXT, lease_until REAL, record TEXT)",
    "CREATE TABLE IF NOT EXISTS results (batch TEXT, row INTEGER, is_error INTEGER, line BLOB,"
    " input INTEGER, cached INTEGER, output INTEGER, reasoning INTEGER, PRIMARY KEY (batch, row))",
    "CREATE INDEX IF NOT EXISTS files_of_tenant ON files (tenant)",
    "CREATE INDEX IF NOT EXISTS files_by_size ON files (num_bytes)",  # what all have, per MiB sent
    "CREATE INDEX IF NOT EXISTS batches_of_tenant ON batches (tenant)",
    "CREATE INDEX IF NOT EXISTS batches_by_end ON batches (is_over, tenant)",
    # What sums and files of results need is here: a sum reads no answers.
    "CREATE INDEX IF NOT EXISTS results_by_kind ON results"
    " (batch, is_error, row, input, cached, output, reasoning)",
)
SUMS = ("count", "failed", "input", "cached", "output", "reasoning")  # over a batch's results
Record = dict[str, Any]
Page = tuple[list[Record], bool]  # and whether there are more


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


class BatchStore(Folder):
    """Owned by the API. May be called from any thread."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: None if nothing is to be kept."""
        super().__init__(folder, FOLDER)
        self._database = Database(self._state_dir / FILE, VERSION, *_TABLES)
        self._change, self._read = self._database.writing, self._database.read
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

    # Files.

    def check_room(self, tenant: str, max_bytes: int) -> None:
        """max_bytes: of all files of the tenant and its uploads. Raises Full, and OSError for the
        disk."""
        with self._database.lock:
            self._check_room(self._database.connection, tenant, max_bytes)

    def _check_room(self, connection: sqlite3.Connection, tenant: str, max_bytes: int) -> None:
        query = "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM files"
        count, size = connection.execute(f"{query} WHERE tenant = ?", (tenant,)).fetchone()
        _, total = connection.execute(query).fetchone()
        self._check(tenant, count, size, max_bytes, total)

    def add_file(self, tenant: str, record: Record, draft: Path, max_bytes: int) -> None:
        """Keeps an upload, which is the draft. Raises Full as `check_room`."""
        with self._putting(record["id"]) as connection:
            self._check_room(connection, tenant, max_bytes)
            self._put_file(connection, tenant, record, draft)

    @contextmanager
    def _putting(self, *names: str) -> Iterator[sqlite3.Connection]:
        """A change that makes files of drafts; what is raised within leaves none."""
        try:
            with self._change() as connection:
                yield connection
                if names:
                    self._sync()
        except BaseException:
            with suppress(OSError, sqlite3.Error):
                self._delete_unrecorded(names)
            raise

    def _delete_unrecorded(self, names: Iterable[str]) -> None:
        """Files get their names in the change that records them: within another one, whoever made
        a file without a record is gone, or has failed."""
        with self._change() as connection:
            for name in names:
                query = "SELECT 1 FROM files WHERE id = ?"
                if connection.execute(query, (name,)).fetchone() is None:
                    self.path(name).unlink(missing_ok=True)

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

    def files(self, tenant: str, asked: PageQuery, purpose: str = "") -> Page:
        """The tenant's, or those of a purpose. Raises KeyError where `after` is none of them."""
        where = "" if not purpose else "AND record ->> '$.purpose' = ?"
        values = (purpose,) if purpose else ()
        found, has_more = self._page("record FROM files", tenant, asked, where, *values)
        return [json.loads(record) for (record,) in found], has_more

    def _page(
        self, columns: str, tenant: str, asked: PageQuery, where: str, *values: Any
    ) -> tuple[list[Any], bool]:
        """columns: and the table, of which only what is asked for is read."""
        sign, order, place = (">", "ASC", 0) if asked.is_asc else ("<", "DESC", 1 << 62)
        which, table = f"WHERE tenant = ? {where}", columns[columns.index("FROM") :]
        if asked.after is not None:
            query = f"SELECT rowid {table} {which} AND id = ?"
            found = self._read(query, tenant, *values, asked.after)
            if not found:
                raise KeyError(asked.after)
            ((place,),) = found
        query = f"SELECT {columns} {which} AND rowid {sign} ? ORDER BY rowid {order} LIMIT ?"
        found = self._read(query, tenant, *values, place, asked.limit + 1)
        return found[: asked.limit], len(found) > asked.limit

    def file(self, tenant: str, name: str) -> Record | None:
        query = "SELECT record FROM files WHERE tenant = ? AND id = ?"
        found = self._read(query, tenant, name)
        return json.loads(found[0][0]) if found else None

    def delete_file(self, tenant: str, name: str) -> None:
        """Raises Full where a batch that has not ended reads it."""
        with self._change() as connection:
            query = "SELECT record FROM batches WHERE tenant = ? AND is_over = 0"
            for (record,) in connection.execute(query, (tenant,)):
                if json.loads(record)["input_file_id"] == name:
                    raise Full(json.loads(record)["id"])
            query = "DELETE FROM files WHERE tenant = ? AND id = ?"
            is_gone = connection.execute(query, (tenant, name)).rowcount > 0
        if is_gone:
            self.path(name).unlink(missing_ok=True)

    # Batches.

    def add_batch(self, tenant: str, record: Record) -> None:
        """Keeps a new one. Raises Full where there are too many."""
        with self._change() as connection:
            query = "SELECT COUNT(*) FROM batches WHERE tenant = ? AND is_over = 0"
            (count,) = connection.execute(query, (tenant,)).fetchone()
            if count >= MAX_BATCHES:
                raise Full(f"{count} batches that have not ended, which is the limit")
            keep_until = record["expires_at"] + KEEP_S
            values = tenant, record["id"], 0, keep_until, "", 0.0, json.dumps(record)
            connection.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def batches(self, tenant: str, asked: PageQuery, prefix: str = "") -> Page:
        """The tenant's whose names begin so. Raises KeyError where `after` is none of them."""
        where, values = "AND substr(id, 1, ?) = ?", (len(prefix), prefix)
        columns = "record, is_over FROM batches"
        found, has_more = self._page(columns, tenant, asked, where, *values)
        records = [(json.loads(record), is_over) for record, is_over in found]
        return [each if is_over else self._counted(each) for each, is_over in records], has_more

    def batch(self, tenant: str, name: str) -> Record | None:
        query = "SELECT record FROM batches WHERE tenant = ? AND id = ?"
        found = self._read(query, tenant, name)
        return self._counted(json.loads(found[0][0])) if found else None

    def backlog(self) -> Backlog:
        query = (
            "SELECT record ->> '$.request_counts.total', record ->> '$.created_at',"
            " record ->> '$.expires_at' FROM batches WHERE is_over = 0"
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
            files = [record[f"{kind}_file_id"] for kind in ("input", "output", "error")]
            gone = [file for file in files if file]
            connection.executemany("DELETE FROM files WHERE id = ?", [(file,) for file in gone])
        for file in gone:
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
            "SELECT tenant, id, record FROM batches WHERE is_over = 0 AND lease_until < ?"
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
        with self._putting(*(file["id"] for file in files.values())) as connection:
            query = "SELECT 1 FROM batches WHERE id = ? AND owner = ? AND NOT is_over"
            if connection.execute(query, (record["id"], owner)).fetchone() is None:
                return None
            record = self._with_counts(connection, record)
            for draft, file in files.items():
                self._put_file(connection, tenant, file, draft)
            query = (
                "UPDATE batches SET owner = '', record = ?, is_over = 1 +"
                " (SELECT MAX(is_over) FROM batches WHERE tenant = ?) WHERE id = ?"
            )
            connection.execute(query, (json.dumps(record), tenant, record["id"]))
            connection.execute("DELETE FROM results WHERE batch = ?", (record["id"],))
            query = (
                "DELETE FROM batches WHERE rowid IN (SELECT rowid FROM batches WHERE tenant = ?"
                " AND is_over > 0 ORDER BY is_over DESC, rowid DESC LIMIT -1 OFFSET ?)"
            )
            connection.execute(query, (tenant, MAX_ENDED))
        return record

    def _counted(self, record: Record) -> Record:
        with self._database.lock:
            return self._with_counts(self._database.connection, record)

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
        known = {name for (name,) in self._read("SELECT id FROM files")}
        there = [path.name for path in self._folder.glob("[!.]*")]
        self._delete_unrecorded(name for name in there if name not in known)
        self._sweep_drafts()

    def close(self) -> None:
        self._database.close()


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


def _marks(values: Collection[str]) -> str:
    """Places for these in a query."""
    return ", ".join("?" * len(values))
