"""The folder that files of batches are in: drafts, which are written, and files, which are kept.

What there is no room for is refused here: `Full` where a tenant has what it may have, and ENOSPC
where the disk would have too little left for what else a server keeps in its state directory.
Without a state directory each process has a folder of its own below /tmp, and the next one that
starts deletes those of processes that were killed.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from kvrelay.engine.files import lock_within, open_own

DRAFT_KEEP_S = 86_400.0  # what a process that was killed was writing
MAX_FILES = 1000  # a tenant's
FILES_PART = 2  # all files may have one in so many of the disk's bytes
RESERVE_PART = 16  # and uploads leave one in so many free,
MAX_RESERVE_BYTES = 1 << 30  # or this
_TEMPORARY = "kvrelay-files-"
_LOCK = "lock"  # its process holds it, in a folder below /tmp


class Full(Exception):
    """A tenant has all that it may have; the text says of what."""


class Folder:
    """Where files are written before they are kept, and read. Several processes may share it."""

    def __init__(self, folder: Path | None, name: str) -> None:
        """folder: the state directory; None: all is forgotten when the server stops."""
        _sweep_temporary()
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
            weakref.finalize(self, _remove, folder, _held(folder))
        self._state_dir, self._folder = folder, folder / name
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, name: str) -> Path:
        return self._folder / name

    def draft(self, tenant: str = "") -> Path:
        """Where a file is written before it is one. tenant: whose upload it is."""
        return self._folder / f".{_mark(tenant)}{secrets.token_hex(16)}"

    def _check(self, tenant: str, count: int, size: int, max_bytes: int, total: int = 0) -> None:
        """count, size: of the tenant's files. total: bytes of all that are here for good. Raises
        Full, and OSError for the disk."""
        if count >= MAX_FILES:
            raise Full(f"{count} files, which is the limit: delete some")
        own = uploads = 0
        for draft in self._folder.glob(".*"):
            with suppress(FileNotFoundError):  # it has just been given up
                num_bytes = draft.stat().st_size
                uploads += num_bytes
                own += num_bytes * draft.name.startswith(f".{_mark(tenant)}")
        if size + own > max_bytes:
            raise Full(
                f"files of {size} bytes and uploads of {own}, and may have {max_bytes}: delete some"
            )
        disk = shutil.disk_usage(self._folder)
        if (most := disk.total // FILES_PART) < total + uploads:
            text = f"files and uploads have {total + uploads} bytes, and may have {most}, which is"
            raise OSError(errno.ENOSPC, f"{text} one in {FILES_PART} of the disk's")
        if (reserve := min(disk.total // RESERVE_PART, MAX_RESERVE_BYTES)) > disk.free:
            text = f"{disk.free} bytes of the disk are free, and uploads leave {reserve}"
            raise OSError(errno.ENOSPC, text)

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

    def _sync(self) -> None:
        """Names that files were given outlive the machine, as their bytes do."""
        number = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def _sweep_drafts(self) -> None:
        for draft in self._folder.glob(".*"):
            with suppress(FileNotFoundError):
                if draft.stat().st_mtime < time.time() - DRAFT_KEEP_S:
                    draft.unlink()


def private_file(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _mark(tenant: str) -> str:
    return blake2b(tenant.encode(), digest_size=8).hexdigest()


def _held(folder: Path) -> int:
    """Its lock, which is held before anybody can find it: so who gets it is its only user."""
    new = folder / f".{_LOCK}"
    number = open_own(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, private=True)
    lock_within(number, 0.0)
    new.rename(folder / _LOCK)
    return number


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _sweep_temporary() -> None:
    """Deletes this user's folders whose processes are gone. A link, or what another user has put
    there, stays."""
    for path in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        with suppress(OSError):
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            number = open_own(path / _LOCK, os.O_RDWR, private=True)
            if lock_within(number, 0.0):
                _remove(path, number)
            else:
                os.close(number)
