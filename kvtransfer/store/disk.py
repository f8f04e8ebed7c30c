"""Blocks of KV in a file, and which slot of it holds which block.

The folder: `blocks.kv`, a sparse file of `max_blocks` slots of whole pages; `index.sqlite` (see
`index`); `lock`. A slot has room for a whole block. Where blocks are coded they take the first
pages of it, and the file system has room for others; how many there may be is the caller's to see
to, by bytes. The mover of the disk reads and writes slots through `fd` at `offset(slot)`; the index
is changed by `update`, in an order that the caller keeps: a slot leaves the index before it is
written again, and enters it after it was written. So a process can be killed at any moment: what
the next one finds listed is right, or was cut short and does not fit its checksum, which the reader
compares. Nothing here is synced; the same comparison covers a loss of power.
"""

from __future__ import annotations

import ctypes
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from kvrelay.engine.files import check_owner, given_folder, open_own, own_folder
from kvrelay.engine.kv.block_hash import HASH_BYTES
from kvrelay.engine.kv.tier import DiskRecord
from kvrelay.kvtransfer.agent import StoreIndex
from kvrelay.kvtransfer.store.errors import StoreError, sqlite_code, store_error
from kvrelay.kvtransfer.store.folder import BLOCKS, INDEX, LOCK, FolderLock, is_at, slot_bytes
from kvrelay.kvtransfer.store.index import CODEC_KEY, NO_CODEC, Index, Row, remove_files

LOCK_TIMEOUT_S = 5.0  # a predecessor that was killed may take this long to end
MAX_WARNINGS = 100
PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE
GIB = float(1 << 30)
FORGOTTEN = "blocks written so far are forgotten when the worker ends"
COUNTERS = (
    "loaded",  # records found at opening
    "expired",  # records not loaded because their time was over
    "damaged",  # because the row was altered
    "outside",  # because it is beyond the end of the file, max_blocks or the room
    "duplicate",  # because an earlier slot has the same hash
    "emptied",  # times that the index was made anew in place of another
    "recreated",  # times that the store was made anew because it had vanished
    "updates",
    "updates_failed",
)


class DiskStore:
    """A store that this process alone has open. Owned by the worker's host, which closes it after
    the agent that uses `fd`. `update` and `check` may be called from any thread.

    Invariant: `fd` is the same number from `open` to `close` and always one of a blocks file of
    this store, so that a transfer in flight never writes elsewhere, even when `check` has put a
    new file under it. `records` are as of the opening.
    """

    def __init__(
        self,
        folder: Path,
        identity: dict[str, str],
        bytes_per_block: int,
        max_blocks: int,
        room_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        """`open` makes one, and calls this."""
        self.folder = folder
        self.bytes_per_block = bytes_per_block
        self.slot_bytes = slot_bytes(bytes_per_block)
        self.max_blocks = max_blocks
        self.num_bytes = max_blocks * self.slot_bytes  # that the blocks file has, holes included
        # What each block takes, in whole pages; 0: not known. Set by whoever writes it.
        import numpy as np  # slow, and who plans a worker's memory imports this module too

        self.sizes = np.zeros(max_blocks, np.int64)
        self._room_bytes = room_bytes or self.num_bytes
        self.fd = -1
        self.records: list[DiskRecord] = []
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.warnings: list[str] = []  # for the operator, one line each; the last ones
        self._identity = identity
        self._clock = clock
        self._mutex = threading.Lock()  # guards everything below
        self._lock: FolderLock | None = None  # None: not held, or closed
        self._index: Index | None = None  # None: `_trouble` says why, or closed
        self._device = 0
        self._owed: set[int] = set()  # slots that an update could not remove
        self._trouble: str | None = None  # what `check` said last and could not mend

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        fingerprint: bytes,
        compatibility: Iterable[tuple[str, str]] = (),
        bytes_per_block: int,
        max_blocks: int,
        codec: str = NO_CODEC,
        room_bytes: int = 0,
        clock: Callable[[], float] = time.time,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> DiskStore:
        """Opens or makes the store. What cannot be kept is dropped, with a line in `warnings`.
        Raises StoreError where there can be no store, or another process has it, or a newer
        version wrote it. `codec`: the name of what blocks are written with; `room_bytes`: that
        they may take together, if less than all slots; `clock`: seconds since 1970."""
        assert bytes_per_block > 0, bytes_per_block
        assert max_blocks > 0, max_blocks
        identity = {
            "fingerprint": fingerprint.hex(),
            "bytes_per_block": str(bytes_per_block),
            "slot_bytes": str(slot_bytes(bytes_per_block)),
            CODEC_KEY: codec,
            **{f"compatibility.{name}": value for name, value in compatibility},
        }
        store = cls(folder.absolute(), identity, bytes_per_block, max_blocks, room_bytes, clock)
        try:
            store._begin(lock_timeout_s)
        except BaseException as error:
            store.close()
            if isinstance(error, OSError | sqlite3.Error):
                raise store_error(folder, error) from error
            raise
        return store

    def offset(self, slot: int) -> int:
        """Where the slot begins in `fd`; the block is the next `bytes_per_block` bytes."""
        assert 0 <= slot < self.max_blocks, (slot, self.max_blocks)
        return slot * self.slot_bytes

    def resize(self, slot: int, num_bytes: int) -> None:
        """The block that is about to be written to the slot takes the first `num_bytes`, whole
        pages. What another one had behind them is given back, if the file system knows how."""
        rest = self.slot_bytes - num_bytes
        if rest and not 0 < self.sizes[slot] <= num_bytes:
            _punch_hole(self.fd, self.offset(slot) + num_bytes, rest)
        self.sizes[slot] = num_bytes

    def update(self, change: StoreIndex) -> None:
        """Change the index, in one transaction; it is kept from when this returns, whatever
        happens to the process. Raises StoreError, and then nothing is changed; the store stays
        usable, and the next update makes up for this one's `remove`."""
        for record in change.put:
            assert 0 <= record.slot < self.max_blocks, record
            assert len(record.block_hash) == HASH_BYTES, record
            assert 0 <= record.checksum < 1 << 64, record
            assert not math.isnan(record.keep_s), record
        now = self._clock()
        put = [
            Row(r.slot, r.block_hash, r.checksum, now + r.keep_s, int(self.sizes[r.slot]))
            for r in change.put
        ]
        with self._mutex:
            remove = self._owed.union(change.remove)
            try:
                self._write(remove, put)
            except (StoreError, OSError, sqlite3.Error) as error:
                self._owed = remove
                self.counters["updates_failed"] += 1
                raise self._as_store_error(error) from error
            self._owed = set()
            self.counters["updates"] += 1

    def check(self) -> str | None:
        """Look after the files; cheap, to be called about once a second. Mends what can be mended:
        where the folder or the file has vanished or was replaced, the store starts again, empty.
        Returns what is new, in one line for the operator, which is also in `warnings`."""
        with self._mutex:
            if self.fd < 0:
                return None
            before, self._trouble = self._trouble, None
            try:
                mended = self._mend()
                if not mended and not os.access(self.folder, os.W_OK, effective_ids=True):
                    self._trouble = self._line(
                        "the folder is read-only; what it holds can be read, nothing new is kept"
                    )
            except (StoreError, OSError, sqlite3.Error) as error:
                mended, self._trouble = None, str(self._as_store_error(error))
            if self._trouble:
                report = self._trouble if self._trouble != before else None
            else:
                report = mended or (self._line("in order again") if before else None)
            if report:
                self._note(report)
            return report

    def close(self) -> None:
        """Ends the use of `fd`, and lets another open the folder. More than once is allowed."""
        with self._mutex:
            self._close_index()
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    @property
    def in_trouble(self) -> bool:
        """Whether the last `check` found what it could not mend."""
        return self._trouble is not None

    @property
    def _blocks(self) -> Path:
        return self.folder / BLOCKS

    def _begin(self, lock_timeout_s: float) -> None:
        self._make_folder()
        self._device = self.folder.stat().st_dev
        self._lock = FolderLock.take(self.folder / LOCK, lock_timeout_s)
        self._index = index = Index.open(self.folder / INDEX, self._identity)
        self.fd = open_own(self._blocks, os.O_RDWR | os.O_CREAT)
        found_bytes = os.fstat(self.fd).st_size
        if index.is_new:
            os.ftruncate(self.fd, 0)  # give the space back
            if found_bytes or index.why_new:
                self._note(self._new_index_line(index, "it was missing", "the store starts empty"))
        else:
            self._load(index, found_bytes)
        os.ftruncate(self.fd, self.num_bytes)
        self._warn_if_space_is_short()

    def _make_folder(self) -> None:
        """Above the root there may be a place for all, and below it nothing is another's: the root,
        the folder of its fingerprint, its own, and what is in that. Raises OSError."""
        for parent in (self.folder.parents[1], self.folder.parent):
            given_folder(parent)
        if self.folder.is_symlink():
            check_owner(self.folder)
        own_folder(self.folder.resolve())
        for each in self.folder.iterdir():
            check_owner(each)

    def _load(self, index: Index, found_bytes: int) -> None:
        """Fill `records`; what is not worth listing leaves the index."""
        rows, damaged = index.rows, index.altered
        index.rows = []
        now = self._clock()
        counters = self.counters
        drop = list(damaged)
        cut = taken = 0
        seen: set[bytes] = set()
        for slot, block_hash, checksum, expires_at, num_bytes in rows:
            size = num_bytes or self.slot_bytes
            if not 0 <= slot < self.max_blocks:
                counters["outside"] += 1
            elif slot * self.slot_bytes + self.bytes_per_block > found_bytes:
                counters["outside"] += 1
                cut += 1
            elif taken + size > self._room_bytes:
                counters["outside"] += 1
            elif expires_at <= now:
                counters["expired"] += 1
            elif block_hash in seen:
                counters["duplicate"] += 1
            else:
                seen.add(block_hash)
                self.sizes[slot] = size
                taken += size
                record = DiskRecord(slot, block_hash, checksum, expires_at - now, size)
                self.records.append(record)
                continue
            drop.append(slot)
        counters["loaded"] = len(self.records)
        counters["damaged"] = len(damaged)
        if damaged:
            self._warn(
                f"{len(damaged)} of {len(rows) + len(damaged)} records of the index were"
                " altered and are dropped; look for errors of the device"
            )
        if cut:
            self._warn(
                f"{BLOCKS} is missing or was cut to {found_bytes} bytes;"
                f" {cut} blocks are lost and will be computed again"
            )
        if drop:
            try:
                index.update(drop, ())
            except sqlite3.Error as error:  # a full disk: the rest can be read all the same
                self._owed.update(drop)
                self._note(str(store_error(self.folder, error)))

    def _write(self, remove: set[int], put: list[Row]) -> None:
        if self.fd < 0:
            raise StoreError(self._line("it is closed"))
        if self._index is None and (mended := self._mend()):
            self._note(mended)
        assert self._index is not None
        try:
            self._index.update(remove, put)
        except sqlite3.Error as error:
            if sqlite_code(error) not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise
            self._close_index()
            remove_files(self.folder / INDEX)
            self._index = Index.open(self.folder / INDEX, self._identity)
            self._note(self._new_index_line(self._index, f"it is damaged ({error})", FORGOTTEN))
            self._index.update(remove, put)

    def _mend(self) -> str | None:
        """Bring the files back into order; what was done. Raises StoreError, OSError and
        sqlite3.Error where it cannot be done (now)."""
        assert self._lock is not None
        if not is_at(self._blocks, self.fd):
            self._start_anew()
            self.counters["recreated"] += 1
            return self._line(
                f"the folder or {BLOCKS} vanished or was replaced; the store starts empty"
            )
        self._retake_lock()
        if self._index is None or not self._index.is_in_place:
            self._close_index()
            self._index = Index.open(self.folder / INDEX, self._identity)
            if self._index.is_new:
                return self._new_index_line(self._index, "it vanished or was replaced", FORGOTTEN)
        found_bytes = os.fstat(self.fd).st_size
        if found_bytes < self.num_bytes:
            os.ftruncate(self.fd, self.num_bytes)
            return self._line(
                f"{BLOCKS} was cut to {found_bytes} bytes; it has its size again,"
                " the blocks behind are lost and will be computed again"
            )
        return None

    def _start_anew(self) -> None:
        """An empty store at the folder's path, and its file under the old `fd`."""
        self._close_index()
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        if there.stat().st_dev != self._device:
            raise StoreError(
                self._line("its file system is gone; mount it again and restart the worker")
            )
        self._make_folder()
        self._retake_lock()
        remove_files(self.folder / INDEX)
        self._blocks.unlink(missing_ok=True)
        fd = os.open(self._blocks, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, self.num_bytes)
            self._index = Index.open(self.folder / INDEX, self._identity)
            os.dup2(fd, self.fd, inheritable=False)
        finally:
            os.close(fd)
        self._owed = set()
        self.records = []
        self.sizes[:] = 0

    def _retake_lock(self) -> None:
        """The lock of the file that is there now, unless it is the one held. Does not wait."""
        assert self._lock is not None
        if not self._lock.is_in_place:
            held, self._lock = self._lock, FolderLock.take(self.folder / LOCK, 0.0)
            held.release()

    def _close_index(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None

    def _as_store_error(self, error: StoreError | OSError | sqlite3.Error) -> StoreError:
        return error if isinstance(error, StoreError) else store_error(self.folder, error)

    def _new_index_line(self, index: Index, why: str, consequence: str) -> str:
        self.counters["emptied"] += 1
        return self._line(f"{INDEX} is new and empty: {index.why_new or why}; {consequence}")

    def _warn_if_space_is_short(self) -> None:
        system = os.statvfs(self.folder)
        free = system.f_bavail * system.f_frsize
        missing = self._room_bytes - os.fstat(self.fd).st_blocks * 512
        if missing > free:
            self._warn(
                f"it may grow by {missing / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free"
                " there; free space, or make the store smaller"
            )

    def _line(self, text: str) -> str:
        return f"disk store {self.folder}: {text}"

    def _warn(self, text: str) -> None:
        self._note(self._line(text))

    def _note(self, line: str) -> None:
        self.warnings.append(line)
        del self.warnings[:-MAX_WARNINGS]


def _punch_hole(fd: int, start: int, num_bytes: int) -> None:
    """Where that cannot be, the bytes stay taken."""
    _libc().fallocate(fd, PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(num_bytes))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
