"""Paths of disk stores, the lock on one, and stores that are not needed any more.

`<root>/<fingerprint, hex>/<owner>`: blocks of another model, dtype or layout are never in the same
folder. The lock file in it is held by flock for as long as the store is open, and goes free with
the process, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote, unquote

from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.files import open_own
from kvrelay.kvtransfer.layout import FINGERPRINT_BYTES
from kvrelay.kvtransfer.store.errors import StoreInUse

BLOCKS, INDEX, LOCK = "blocks.kv", "index.sqlite", "lock"
PAGE_BYTES = 4096
RETRY_S = 0.05
MAX_SAME_NAME = 64  # workers of one name that use one folder, of different servers
T = TypeVar("T")
_FINGERPRINT = re.compile(rf"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}")


def store_folder(root: Path, fingerprint: bytes, owner: str) -> Path:
    """The folder of `owner` (a worker's name) for blocks of `fingerprint`."""
    name = quote(owner, safe="")
    assert name.strip("."), f"owner {owner!r}: not a name"
    return root / fingerprint.hex() / name


def owner_of(folder: Path) -> str:
    """The worker whose folder it is, or was."""
    return unquote(folder.name.partition("~")[0])


def places(root: Path, fingerprint: bytes, owner: str) -> Iterator[Path]:
    """Where `owner` may keep blocks of `fingerprint`, best first: where it kept them before; in
    what others have left, the last used first, so that KV of workers that are gone is found again
    and stores do not become more with every name; in a new folder."""
    own = store_folder(root, fingerprint, owner)
    if was_there := own.is_dir():
        yield own
    left = (_survey(each) for each in _subfolders(own.parent) if each != own and not is_held(each))
    for store in sorted((s for s in left if s), key=lambda s: s.last_use, reverse=True):
        yield store.path
    if not was_there:
        yield own
    for number in range(2, MAX_SAME_NAME + 1):
        yield own.with_name(f"{own.name}~{number}")


def first_free(folders: Iterable[Path], open_at: Callable[[Path], T]) -> T:
    """What `open_at` makes of the first folder that no other process has. Raises StoreInUse where
    there is none, and what `open_at` raises."""
    in_use: StoreInUse | None = None
    for folder in folders:
        try:
            return open_at(folder)
        except StoreInUse as error:
            in_use = error
    assert in_use is not None
    raise in_use


def default_folder() -> Path:
    return default_cache_dir() / "kv"


def slot_bytes(bytes_per_block: int) -> int:
    """A slot begins and ends on a page, so that direct I/O is possible."""
    return -(-bytes_per_block // PAGE_BYTES) * PAGE_BYTES


class FolderLock:
    """Held from `take` to `release`. The file stays: removing it would let two hold it."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def take(cls, path: Path, timeout_s: float, what: str = "disk store") -> FolderLock:
        """Waits up to `timeout_s`, for a predecessor that is ending. Raises StoreInUse that names
        `what` and the holder, or OSError."""
        deadline = time.monotonic() + timeout_s
        while True:
            fd = open_own(path, os.O_RDWR | os.O_CREAT)
            try:
                if _locked(fd, fcntl.LOCK_EX):
                    _write_pid(fd)
                    return cls(path, fd)
                holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if time.monotonic() >= deadline:
                raise StoreInUse(
                    f"{what} {path.parent}: process {holder} has it open;"
                    " end that process, or give this worker another name or folder"
                )
            time.sleep(RETRY_S)

    @classmethod
    def look_at(cls, path: Path) -> FolderLock | None:
        """Not taken yet; None where there is none."""
        try:
            return cls(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            return None

    @classmethod
    def try_take(cls, path: Path) -> FolderLock | None:
        """At once; None if that cannot be."""
        lock = cls.look_at(path)
        if lock is None or lock.retry():
            return lock
        lock.release()
        return None

    def retry(self, how: int = fcntl.LOCK_EX) -> bool:
        """Whether it is held from now on, if `how` is LOCK_SH together with others that read."""
        return _locked(self._fd, how) and self.is_in_place

    @property
    def is_in_place(self) -> bool:
        """False: the file is not at its path any more, so that another can take that one."""
        return is_at(self._path, self._fd)

    def release(self) -> None:
        os.close(self._fd)


class StaleStore(NamedTuple):
    path: Path
    num_bytes: int  # that it takes on the disk
    last_use: float  # seconds since 1970


def stale_stores(root: Path, keep: bytes) -> list[StaleStore]:
    """Stores under `root` of other fingerprints than `keep` that no process has open, the one
    unused for the longest time first. Nothing is touched."""
    found = []
    for folder in _subfolders(root):
        if _FINGERPRINT.fullmatch(folder.name) and folder.name != keep.hex():
            found += [_survey(store) for store in _subfolders(folder) if not is_held(store)]
    return sorted((store for store in found if store), key=lambda store: store.last_use)


def is_at(path: Path, fd: int) -> bool:
    """Whether the open file `fd` is the one at `path`. Raises OSError, but not where none is."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_pid(fd: int) -> None:
    """For people and for the message above; the lock is held without it, on a full disk too."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        pass


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:  # it is not there, or went away
        return []


def is_held(store: Path) -> bool:
    try:
        fd = os.open(store / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _locked(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _survey(store: Path) -> StaleStore | None:
    """None where it is not a store, or went away."""
    try:
        stats = {path.name: path.stat() for path in store.iterdir() if path.is_file()}
    except OSError:
        return None
    if not stats.keys() & {BLOCKS, INDEX}:
        return None
    num_bytes = sum(stat.st_blocks * 512 for stat in stats.values())
    return StaleStore(store, num_bytes, max(stat.st_mtime for stat in stats.values()))
