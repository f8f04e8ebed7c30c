"""Host memory for KV blocks that outlives its worker: two files of shared memory, and a lock.

The folder: `blocks.kv`, the blocks one after the other; `index.kv`, a page that says what blocks
these are, then a record for each slot; `lock`, held by the worker that writes here. Processes map
both files. A slot leaves the index before it is written again, and enters it after it was written,
so a worker can be killed at any moment: what the next one finds listed is right, or does not fit
its checksum, which the reader compares.

When a worker has died, the others of its machine read its blocks at once, each with a shared lock.
The next worker that takes the folder asks them to leave it by a lock on the file `wanted`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.files import lock_within, own_folder
from kvrelay.engine.kv.tier import DiskRecord
from kvrelay.kvtransfer.agent import AgentError, StoreIndex
from kvrelay.kvtransfer.store.errors import StoreError, store_error
from kvrelay.kvtransfer.store.folder import (
    BLOCKS,
    LOCK,
    FolderLock,
    first_free,
    is_held,
    owner_of,
    places,
)

SHARED_MEMORY = Path("/dev/shm")
INDEX = "index.kv"
WANTED = "wanted"  # locked by who waits for the folder
LOCK_TIMEOUT_S = 5.0  # a predecessor that was killed may take this long to end
PLAN_S = 1.0  # the most that one waits for another to have been sized
REMOVE_S = 3.0  # workers that were killed take a moment to end
VERSION = 1
HEADER_BYTES = mmap.PAGESIZE
RESERVE_BYTES = 16 << 20  # memory is taken in such pieces, in a few milliseconds each
KEY_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no half of a name is lost
RETRY_S = 10.0  # before memory that was lacking is asked for again
RECORD = np.dtype(
    [
        ("name", "V16"),
        ("checksum", "<u8"),
        ("expires_at", "<f8"),  # seconds since 1970
        ("number", "<u8"),  # grows with each record that is written
        ("check", "<u8"),  # over the fields before it; 0: the slot has no block
    ]
)
_FIELDS = struct.Struct("<16sQdQ")  # those of a record before its check
_CHECK = struct.Struct("<Q")

Clock = Callable[[], float]


def arena_root(machine: Path = SHARED_MEMORY) -> Path:
    """Where arenas of this user lie. Raises StoreError where others could read or change them."""
    root = machine / f"kvrelay-{os.getuid()}"
    try:
        return own_folder(root, private=True)
    except OSError as error:
        raise store_error(root, error, "host memory") from error


class ArenaIndex:
    """The records of an arena's slots, in memory that processes share."""

    def __init__(self, fd: int, num_slots: int, *, writable: bool) -> None:
        how = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        size = HEADER_BYTES + num_slots * RECORD.itemsize
        self._map = mmap.mmap(fd, size, prot=how)
        self._rows = np.frombuffer(self._map, RECORD, num_slots, HEADER_BYTES)
        self._number = 0

    def read(self, now: float) -> Listed:
        """Copies what is listed now, to be looked at later."""
        listed = Listed(self._rows.copy(), now)
        self._number = max(self._number, listed.number)
        return listed

    def update(self, change: StoreIndex, now: float) -> None:
        for slot in change.remove:
            _CHECK.pack_into(self._map, _place(slot) + _FIELDS.size, 0)
        for record in change.put:
            self._number += 1
            until = now + record.keep_s
            fields = _FIELDS.pack(record.block_hash, record.checksum, until, self._number)
            at = _place(record.slot)
            _CHECK.pack_into(self._map, at + _FIELDS.size, 0)
            self._map[at : at + _FIELDS.size] = fields
            _CHECK.pack_into(self._map, at + _FIELDS.size, _check(fields))

    def close(self) -> None:
        del self._rows
        self._map.close()


class Listed:
    """What an index has listed at one time. Records are checked as they are taken: there may be a
    hundred thousand."""

    def __init__(self, rows: NDArray[Any], now: float) -> None:
        self._rows = rows
        self._now = now
        slots = np.flatnonzero((rows["check"] != 0) & (rows["expires_at"] > now))
        self._slots = slots[np.argsort(rows["number"][slots])[::-1]]
        self.number = int(rows["number"][self._slots[0]]) if len(slots) else 0
        self._by_key: tuple[NDArray[np.uint64], NDArray[Any]] | None = None

    def records(self) -> Iterator[DiskRecord]:
        """Yields all, the last written first, each block once."""
        seen = set[bytes]()
        for slot in self._slots.tolist():
            record = self._record(slot)
            if record is not None and record.block_hash not in seen:
                seen.add(record.block_hash)
                yield record

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Slots of those of these names that are there, in this order."""
        if not len(self._slots) or not names:
            return []
        if self._by_key is None:  # the last written of a name is the last
            slots = self._slots[::-1]
            keys = _keys(np.ascontiguousarray(self._rows["name"][slots]))
            order = np.argsort(keys, kind="stable")
            self._by_key = keys[order], slots[order]
        keys, slots = self._by_key
        wanted = np.frombuffer(b"".join(names), "V16")
        places = np.searchsorted(keys, _keys(wanted), side="right") - 1
        found = slots[np.maximum(places, 0)]
        is_there = (places >= 0) & (self._rows["name"][found] == wanted)
        listed: list[int] = found[is_there].tolist()
        return listed

    def records_of(self, slots: Sequence[int]) -> list[DiskRecord]:
        """What these hold, as far as it is as it was written."""
        found = map(self._record, slots)
        return [record for record in found if record is not None]

    def _record(self, slot: int) -> DiskRecord | None:
        """None if it is not as it was written."""
        fields = self._rows[slot].tobytes()
        name, checksum, until, _ = _FIELDS.unpack_from(fields)
        (check,) = _CHECK.unpack_from(fields, _FIELDS.size)
        if _check(fields[: _FIELDS.size]) != check:
            return None
        return DiskRecord(slot, name, checksum, until - self._now)


def _keys(names: NDArray[Any]) -> NDArray[np.uint64]:
    """64 bits of each name, by which it is looked up."""
    halves = names.view(np.uint64).reshape(-1, 2)
    keys: NDArray[np.uint64] = halves[:, 0] ^ (halves[:, 1] * KEY_FACTOR)
    return keys


def _place(slot: int) -> int:
    return HEADER_BYTES + slot * RECORD.itemsize


def _check(fields: bytes) -> int:
    return xxh3_64_intdigest(fields, seed=VERSION) or 1


class HostArena:
    """Memory that this process alone writes. Owned by the worker's thread that copies in memory.

    Invariant: `memory` stays mapped as long as this object is there, even after `close`; what the
    index lists was written, and has memory of its own."""

    def __init__(
        self,
        folder: Path,
        lock: FolderLock,
        memory: NDArray[np.uint8],
        fd: int,
        clock: Clock,
        monotonic: Clock = time.monotonic,
    ) -> None:
        """`lock`: held, and owned from now on; `fd`: that of the blocks, too."""
        self.folder = folder
        self.memory = memory  # [num_slots, bytes_per_block]
        self.records: list[DiskRecord] = []  # what was there when it was opened
        self.has_heir = False  # another worker will take it when this one has ended
        self._lock: FolderLock | None = lock
        self._fd = fd
        self._index: ArenaIndex | None = None
        self._clock = clock
        self._reserved_bytes = 0
        self._monotonic = monotonic
        self._retry_at: float | None = None  # memory was lacking, and is asked for again then
        self._room_to_say = False  # it has changed
        self._why = ""

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        identity: Mapping[str, str],
        bytes_per_block: int,
        num_slots: int,
        lock_timeout_s: float,
        clock: Clock = time.time,
        among: Path | None = None,
    ) -> HostArena:
        """Takes the folder, or makes it; blocks of another identity are forgotten. `among`: the
        folder of all arenas that have the machine's shared memory together. Raises StoreError,
        StoreInUse."""
        try:
            lock = _lock(folder, lock_timeout_s)
            try:
                what = identity, bytes_per_block, num_slots, clock
                return cls._open(folder, among or folder, lock, *what)
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            raise store_error(folder, error, "host memory") from error

    @classmethod
    def _open(
        cls,
        folder: Path,
        among: Path,
        lock: FolderLock,
        identity: Mapping[str, str],
        bytes_per_block: int,
        num_slots: int,
        clock: Clock,
    ) -> HostArena:
        header = _header(identity, bytes_per_block)
        size = num_slots * bytes_per_block
        blocks = os.open(folder / BLOCKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        index = os.open(folder / INDEX, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            is_known = os.pread(index, HEADER_BYTES, 0) == header
            if not is_known:  # also gives the memory back
                os.ftruncate(blocks, 0)
                os.ftruncate(index, 0)
                os.pwrite(index, header, 0)
            with _planning(among):
                promised = size - _taken(os.fstat(blocks))
                _check_room(folder, promised, _promised_bytes(among, besides=folder))
                os.ftruncate(blocks, size)
            os.ftruncate(index, HEADER_BYTES + num_slots * RECORD.itemsize)
            mapped = mmap.mmap(blocks, size)
            with contextlib.suppress(OSError):  # a kernel that has none for shared memory
                mapped.madvise(mmap.MADV_HUGEPAGE)
            memory = np.frombuffer(mapped, np.uint8).reshape(num_slots, bytes_per_block)
            arena = cls(folder, lock, memory, blocks, clock)
            arena._index = ArenaIndex(index, num_slots, writable=True)
            arena.records = [*arena._index.read(clock()).records()]
        except BaseException:
            os.close(blocks)
            raise
        finally:
            os.close(index)
        return arena

    def reserve(self, slots: Sequence[int]) -> None:
        """Take the memory of these slots, which are written next. To write where there is none
        would end the process. Raises AgentError."""
        end = (max(slots) + 1) * self.memory.shape[1]
        if end <= self._reserved_bytes:
            return
        error = self._extend(end)
        if error is not None:
            self._retry_at = self._monotonic() + RETRY_S
            self._room_to_say = True
            self._why = (
                f"{os.strerror(error.errno or 0)} in {self.folder}; make room there, or lower"
                " tiers.host_gib"
            )
            raise AgentError(f"{end / 2**30:.2f} GiB of host memory for KV: {self._why}")

    def find_room(self) -> tuple[int, str] | None:
        """(slots that have memory, why no more), where that has changed since the last call: after
        a `reserve` for which there was none, and as more is found, which is asked for now and
        then."""
        if self._retry_at is not None and self._monotonic() >= self._retry_at:
            before, size = self._reserved_bytes, self.memory.nbytes
            if self._extend(min(size, before + RESERVE_BYTES)) is not None:
                self._retry_at = self._monotonic() + RETRY_S  # else on with the next piece
            elif self._reserved_bytes == size:
                self._retry_at, self._why = None, "others have given some back"
            self._room_to_say |= self._reserved_bytes > before
        if not self._room_to_say:
            return None
        self._room_to_say = False
        return self._reserved_bytes // self.memory.shape[1], self._why

    def _extend(self, end: int) -> OSError | None:
        """Take memory up to `end` bytes and a little more; or, with the error, as much as there
        is."""
        size, block = self.memory.nbytes, self.memory.shape[1]
        until = -(-end // RESERVE_BYTES) * RESERVE_BYTES
        while (first := self._reserved_bytes) < end:
            until = min(until, size)
            try:
                os.posix_fallocate(self._fd, first, until - first)
                self._reserved_bytes, until = until, 2 * until - first
            except OSError as error:
                one_more = (first // block + 1) * block
                if until <= one_more:
                    return error
                until = max((first + until) // 2 // block * block, one_more)
        return None

    def update(self, change: StoreIndex) -> None:
        """Change the index; it is kept from when this returns, whatever happens to the process."""
        if self._index is not None:
            self._index.update(change, self._clock())

    def close(self, *, remove: bool = False) -> None:
        """Another may take it from now on; `remove`: there is nothing to take. `memory` stays."""
        if self._lock is None:
            return
        if remove:
            _remove(self.folder)
        if self._index is not None:
            self._index.close()
            self._index = None
        os.close(self._fd)
        self._lock.release()
        self._lock = None


def open_arena(root: Path, config: WorkerConfig, num_slots: int) -> HostArena:
    """In the first place under `root` that no other process has, for blocks of `config`, of a rank.
    Raises StoreError."""
    open_at = partial(
        HostArena.open,
        identity={f"compatibility.{name}": value for name, value in config.compatibility},
        bytes_per_block=config.bytes_per_block,
        num_slots=num_slots,
        lock_timeout_s=LOCK_TIMEOUT_S,
        among=arena_root(),
    )
    return first_free(places(root, config.fingerprint, config.node_id), open_at)


def _lock(folder: Path, timeout_s: float) -> FolderLock:
    """Also of a folder that is being removed: then of the next one there."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            wanted = FolderLock.take(folder / WANTED, timeout_s, "host memory")
            try:
                lock = FolderLock.take(folder / LOCK, timeout_s, "host memory")
            finally:
                wanted.release()
            if lock.is_in_place:
                return lock
            lock.release()


def _header(identity: Mapping[str, str], bytes_per_block: int) -> bytes:
    facts = {"version": str(VERSION), "bytes_per_block": str(bytes_per_block), **identity}
    header = json.dumps(facts, sort_keys=True).encode()
    assert len(header) <= HEADER_BYTES, header
    return header.ljust(HEADER_BYTES, b"\0")


@contextlib.contextmanager
def _planning(root: Path) -> Iterator[None]:
    """Arenas below `root` are sized one after the other; one that has stopped is not waited for."""
    fd = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock_within(fd, PLAN_S)
        yield
    finally:
        os.close(fd)


def _promised_bytes(root: Path, besides: Path) -> int:
    """What processes that have others below `root` have not taken yet of their size."""
    found = 0
    for path in root.rglob(BLOCKS):
        if path.parent == besides:
            continue
        if (lock := FolderLock.try_take(path.parent / LOCK)) is not None:
            lock.release()
            continue  # nobody writes there
        with contextlib.suppress(OSError):
            status = path.stat()
            found += status.st_size - _taken(status)
    return found


def _taken(status: os.stat_result) -> int:
    return min(status.st_size, status.st_blocks * 512)


def _check_room(folder: Path, missing_bytes: int, promised_bytes: int) -> None:
    """Raises StoreError where the file system could not hold the blocks, beside what it has
    promised to others."""
    found = os.statvfs(folder)
    free_bytes = found.f_bavail * found.f_frsize
    if missing_bytes + promised_bytes > free_bytes:
        others = f", {promised_bytes / 2**30:.1f} of them for others" if promised_bytes else ""
        raise StoreError(
            f"host memory {folder}: {missing_bytes / 2**30:.1f} GiB are needed,"
            f" {free_bytes / 2**30:.1f} GiB are free in that file system{others}; give more"
            " shared memory (--shm-size of a container), or lower tiers.host_gib"
        )


class LeftArena:
    """The blocks of a worker that has died, to be read. Others may read them, too."""

    def __init__(self, folder: Path, lock: FolderLock, clock: Clock = time.time) -> None:
        """`lock`: held, and owned from now on. Raises OSError, ValueError, KeyError."""
        self.folder = folder
        self._lock = lock
        with open(folder / INDEX, "rb") as index, open(folder / BLOCKS, "rb") as blocks:
            facts = json.loads(index.read(HEADER_BYTES).rstrip(b"\0"))
            self.bytes_per_block = int(facts["bytes_per_block"])
            num_bytes = os.fstat(blocks.fileno()).st_size
            num_records = (os.fstat(index.fileno()).st_size - HEADER_BYTES) // RECORD.itemsize
            self.num_slots = min(num_bytes // self.bytes_per_block, num_records)
            self._map = mmap.mmap(blocks.fileno(), num_bytes, prot=mmap.PROT_READ)
            rows = ArenaIndex(index.fileno(), self.num_slots, writable=False)
            self.listed = rows.read(clock())
            self.records = self.listed.records()  # those that nobody has taken yet
            rows.close()
        size = self.num_slots * self.bytes_per_block
        memory = np.frombuffer(self._map, np.uint8, size)
        self.memory = memory.reshape(self.num_slots, self.bytes_per_block)

    @property
    def is_wanted(self) -> bool:
        """Whether a worker waits for it, or it is not there any more."""
        return is_wanted(self.folder) or not self._lock.is_in_place

    def detach(self) -> None:
        del self.memory
        with contextlib.suppress(BufferError):
            self._map.close()
        self._lock.release()


def is_wanted(folder: Path) -> bool:
    wanted = FolderLock.look_at(folder / WANTED)
    if wanted is None:
        return False
    is_free = wanted.retry(fcntl.LOCK_SH)
    wanted.release()
    return not is_free


def arenas(folder: Path) -> list[Path]:
    """Folders of arenas in `folder`, whoever has them."""
    try:
        return [each for each in folder.iterdir() if (each / INDEX).exists()]
    except OSError:
        return []


def abandoned_arenas(root: Path) -> Iterable[tuple[Path, int]]:
    """Those under `root` that no process has, with the bytes of memory that each takes."""
    for index in sorted(root.rglob(INDEX)):
        lock = FolderLock.try_take(index.parent / LOCK)
        if lock is not None:
            lock.release()
            yield index.parent, (index.parent / BLOCKS).stat().st_blocks * 512


def remove_arena(folder: Path) -> bool:
    """Gives its memory back, unless a process has it."""
    lock = FolderLock.try_take(folder / LOCK)
    if lock is None:
        return False
    _remove(folder)
    lock.release()
    return True


def arena_form(folder: Path) -> tuple[str, str]:
    """What blocks an arena has: the fingerprint, and among how many ranks they are divided."""
    part = next((p for p in reversed(folder.parts[:-2]) if p.startswith("rank-")), "")
    return folder.parent.name, part.rpartition("-of-")[2]


def superseded_arenas(root: Path, owner: str) -> list[Path]:
    """Those under `root`, of one cluster, in forms that no worker has and that one had which has
    another form now: `owner`, which starts, or one that holds memory. What else is free is of
    workers that died, perhaps of another model, and come back."""
    by_form: dict[tuple[str, str], list[Path]] = {}
    for index in root.rglob(INDEX):
        by_form.setdefault(arena_form(index.parent), []).append(index.parent)
    held = {form: {f for f in folders if is_held(f)} for form, folders in by_form.items()}
    others = {owner, *(owner_of(folder) for folders in held.values() for folder in folders)}
    left = (folders for form, folders in by_form.items() if not held[form])
    gone = (folders for folders in left if any(owner_of(folder) in others for folder in folders))
    return [folder for folders in gone for folder in folders]


def remove_arenas(cluster: str) -> None:
    """All of `cluster` on this machine, whose workers were ended: they may take a moment."""
    deadline = time.monotonic() + REMOVE_S
    with contextlib.suppress(StoreError):
        root = arena_root() / cluster
        while root.exists() and time.monotonic() < deadline:
            for folder, _ in abandoned_arenas(root):
                remove_arena(folder)
            # Those that were killed as they began have left folders.
            for each, _, _ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(each)
            if root.exists():
                time.sleep(0.02)


def _remove(folder: Path) -> None:
    """With the folders that it was the last one in."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        for parent in folder.parents:
            parent.rmdir()
