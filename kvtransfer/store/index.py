"""The index of a disk store: which block each slot holds, in one SQLite file.

Life of an index: opened and read, or made anew where it is damaged or describes other blocks (what
the version before has written is taken over); changed by transactions; closed. WAL makes a
transaction survive the death of the process without a sync; what a power failure takes back is
caught by checksums, as everything here is.

Tables. `meta`: `format_version` and one row per field of the identity; the table, the version row
and the check stay the same in all versions, so that any version can tell a newer store from a
damaged one. `records`: one row per slot that holds a block. Every row has a check sum of its own
(XXH3), because SQLite does not notice a flipped bit in a row.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from kvrelay.engine.kv.block_hash import HASH_BYTES
from kvrelay.kvtransfer.store.errors import StoreError, sqlite_code

FORMAT_VERSION = 2
VERSION_BEFORE = "1"  # its blocks are as they were, so there is no column for their bytes
VERSION_KEY = "format_version"
CODEC_KEY, NO_CODEC = "codec", "none"
BUSY_TIMEOUT_S = 1.0
MAX_CHECKSUM = (1 << 64) - 1
WAL_LIMIT_BYTES = 4 << 20  # the log is cut to this after a large transaction

# Reasons to leave the file alone: it may be in order. Any other error means damage.
_ENVIRONMENT = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_NOLFS,
}
_META = "CREATE TABLE meta (name TEXT, value TEXT, check_sum INTEGER)"
_RECORDS = (
    "CREATE TABLE records (slot INTEGER PRIMARY KEY, name BLOB, checksum INTEGER,"
    " expires_at REAL, check_sum INTEGER, num_bytes INTEGER)"
)
_ROW = struct.Struct(f"<q{HASH_BYTES}sqdq")
_RECORDS_BEFORE = _RECORDS.replace(", num_bytes INTEGER", "")
_ROW_BEFORE = struct.Struct(f"<q{HASH_BYTES}sqd")


class Row(NamedTuple):
    slot: int
    block_hash: bytes
    checksum: int  # unsigned, 64 bits
    expires_at: float  # seconds since 1970
    num_bytes: int = 0  # that the block takes; 0: all of the slot


class Unusable(Exception):
    """What is at the path cannot be kept; why."""


class Index:
    """Owned by its DiskStore, which calls from one thread at a time and catches `sqlite3.Error`.

    Invariant: every row of `records` was committed by an `update`, as a whole."""

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        """Raises Unusable for what cannot be kept, StoreError for a newer format, sqlite3.Error and
        OSError where the file cannot be read or written now; the file is as it was."""
        self._path = path
        self._seed = _seed_of(identity)
        self.rows: list[Row] = []  # as found at opening, by slot
        self.altered: list[int] = []  # slots whose rows were not as they had been written
        self.is_new = False
        self.why_new: str | None = None  # None: because there was no index
        _check_rights(path)
        self._db = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare(identity)
        except BaseException as error:
            self._db.close()
            if _is_damage(error):
                raise Unusable(f"it is damaged ({error})") from error
            raise
        self._file = os.stat(path)

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, str]) -> Index:
        """The index at `path`, or a new one in place of what cannot be kept: see `why_new`.
        Raises StoreError, sqlite3.Error, OSError."""
        try:
            return cls(path, identity)
        except Unusable as unusable:
            remove_files(path)
            try:
                index = cls(path, identity)
            except Unusable as again:
                raise StoreError(
                    f"disk store {path.parent}: a new index cannot be used: {again};"
                    " choose another folder"
                ) from again
            index.why_new = str(unusable)
            return index

    @property
    def is_in_place(self) -> bool:
        """False: the file is not at its path any more; what is written to it is lost."""
        try:
            return os.path.samestat(os.stat(self._path), self._file)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def update(self, remove: Iterable[int], put: Iterable[Row]) -> None:
        """Commits one transaction, `remove` first; all of it or, with an error, nothing."""
        if self._db.in_transaction:  # the last roll-back failed
            self._db.execute("ROLLBACK")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany("DELETE FROM records WHERE slot = ?", ((slot,) for slot in remove))
            self._db.executemany(
                "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?)", map(self._sealed, put)
            )
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()

    def _sealed(self, row: Row) -> tuple[Any, ...]:
        fields = row.slot, row.block_hash, _signed(row.checksum), row.expires_at
        packed = _ROW.pack(*fields, row.num_bytes)
        return *fields, _signed(xxh3_64_intdigest(packed, self._seed)), row.num_bytes

    def _prepare(self, identity: Mapping[str, str]) -> None:
        # Ours alone, so the log's index is in memory: no -shm file, which could be cut under us.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        tables = dict(self._db.execute("SELECT name, sql FROM sqlite_master"))
        self.is_new = not tables
        if tables == {"meta": _META, "records": _RECORDS_BEFORE}:
            self._take_over(identity)
            tables["records"] = _RECORDS
        if tables:  # look before the first write: it may be a newer version's
            self._examine(tables, identity)
            self.rows, self.altered = self._read(_RECORDS, _ROW, self._seed)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
        if self.is_new:
            self._db.execute("BEGIN IMMEDIATE")
            self._make_tables(identity)
            self._db.execute("COMMIT")

    def _make_tables(self, identity: Mapping[str, str]) -> None:
        meta = {VERSION_KEY: str(FORMAT_VERSION), **identity}
        self._db.execute(_META)
        self._db.execute(_RECORDS)
        self._db.executemany(
            "INSERT INTO meta VALUES (?, ?, ?)",
            [(name, value, _meta_check(name, value)) for name, value in meta.items()],
        )

    def _take_over(self, identity: Mapping[str, str]) -> None:
        """Rewrite what the version before has left, if it is of the same blocks: as they were
        then, any codec lets them be."""
        before = {name: value for name, value in identity.items() if name != CODEC_KEY}
        if self._meta() != {VERSION_KEY: VERSION_BEFORE, **before}:
            raise Unusable(f"it is for other blocks: {_differences(self._meta(), before)}")
        rows, _ = self._read(_RECORDS_BEFORE, _ROW_BEFORE, _seed_of(before))
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute("DROP TABLE meta")
        self._db.execute("DROP TABLE records")
        self._make_tables(identity)
        self._db.executemany(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)", map(self._sealed, rows)
        )
        self._db.execute("COMMIT")

    def _meta(self) -> dict[str, str]:
        """What the table says. Raises Unusable where it is damaged."""
        meta = {}
        for name, value, check_sum in self._db.execute("SELECT name, value, check_sum FROM meta"):
            if _meta_check(name, value) != check_sum:
                raise Unusable(f"it is damaged (meta row {name!r})")
            meta[name] = value
        return meta

    def _examine(self, tables: Mapping[str, str], identity: Mapping[str, str]) -> None:
        """Raises unless this is an undamaged index of `identity` and of this version."""
        if tables.get("meta") != _META:
            raise Unusable("it is damaged (table meta)")
        meta = self._meta()
        version = meta.pop(VERSION_KEY, "")
        if version.isdecimal() and int(version) > FORMAT_VERSION:
            raise StoreError(
                f"disk store {self._path.parent}: format version {version}, this program knows up"
                f" to {FORMAT_VERSION}; use the newer program, or remove the folder"
            )
        wanted = dict(identity)
        if version != str(FORMAT_VERSION):
            meta[VERSION_KEY], wanted[VERSION_KEY] = version, str(FORMAT_VERSION)
        if meta != wanted:
            raise Unusable(f"it is for other blocks: {_differences(meta, wanted)}")
        if tables != {"meta": _META, "records": _RECORDS}:
            raise Unusable("it is damaged (table records)")
        (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise Unusable(f"it is damaged ({' '.join(str(verdict).split())})")

    def _read(self, table: str, row: struct.Struct, seed: int) -> tuple[list[Row], list[int]]:
        """What the table of this form has, by slot; and slots whose rows were altered."""
        rows, altered = [], []
        columns = "slot, name, checksum, expires_at"
        columns += ", num_bytes" if "num_bytes" in table else ""
        for *fields, check_sum in self._db.execute(
            f"SELECT {columns}, check_sum FROM records ORDER BY slot"
        ):
            slot, block_hash, checksum, *more = fields
            try:
                packed = row.pack(*fields)
            except struct.error:  # not even the types are right
                altered.append(slot)
                continue
            if _signed(xxh3_64_intdigest(packed, seed)) == check_sum and (
                len(block_hash) == HASH_BYTES
            ):
                rows.append(Row(slot, block_hash, checksum & MAX_CHECKSUM, *more))
            else:
                altered.append(slot)
        return rows, altered


def _is_damage(error: BaseException) -> bool:
    """Whether the file is at fault, not its surroundings."""
    if not isinstance(error, sqlite3.Error):  # SQLite's message may quote what is no text
        return isinstance(error, UnicodeError)
    return sqlite_code(error) not in _ENVIRONMENT


def _check_rights(path: Path) -> None:
    """SQLite would call it an I/O error, or a header that forbids to write."""
    for place in (path.parent, path):
        if place.exists() and not os.access(place, os.W_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))


def remove_files(path: Path) -> None:
    """The index and its log; the log first, which is nothing without the index."""
    for file in (f"{path}-wal", f"{path}-shm", f"{path}-journal", path):
        Path(file).unlink(missing_ok=True)


def _differences(has: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    names = [name for name in (*wanted, *has) if has.get(name) != wanted.get(name)]
    return ", ".join(
        f"{name} is {has.get(name, 'missing')}, wanted {wanted.get(name, 'none')}"
        for name in dict.fromkeys(names)
    )


def _meta_check(name: object, value: object) -> int:
    return _signed(xxh3_64_intdigest(f"{name!r}={value!r}".encode()))


def _seed_of(identity: Mapping[str, str]) -> int:
    return xxh3_64_intdigest(repr(sorted(identity.items())).encode())


def _signed(number: int) -> int:
    """64 bits as SQLite keeps them."""
    return number - (1 << 64) if number >= 1 << 63 else number
