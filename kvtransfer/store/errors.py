"""The one error of the disk store, and what an operator can do about its causes."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

from kvrelay.engine.files import NotOwn


class StoreError(Exception):
    """The disk store cannot be used, or not now. One line: path, reason, what to do."""


class StoreInUse(StoreError):
    """Another process has it open."""


_NO_SPACE = "free space there, or make the store smaller"
_NO_RIGHT = "make it writable for this user, or choose another folder"
_NO_FILE = "choose a folder that can be made there"
_TOO_LARGE = "make the store smaller: no file may be that large there, or for this process"
_FAILING = "look for errors of the device in the kernel's log"
_BUSY = "another program has the index open: end it"
_ADVICE = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EROFS: _NO_RIGHT,
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.ENOENT: _NO_FILE,
    errno.ENOTDIR: _NO_FILE,
    errno.EISDIR: _NO_FILE,
    errno.EEXIST: _NO_FILE,
    errno.ENAMETOOLONG: _NO_FILE,
    errno.EFBIG: _TOO_LARGE,
    errno.EIO: _FAILING,
}
_SQLITE_ADVICE = {
    sqlite3.SQLITE_FULL: _NO_SPACE,
    sqlite3.SQLITE_READONLY: _NO_RIGHT,
    sqlite3.SQLITE_PERM: _NO_RIGHT,
    sqlite3.SQLITE_CANTOPEN: _NO_FILE,
    sqlite3.SQLITE_IOERR: _FAILING,
    sqlite3.SQLITE_BUSY: _BUSY,
    sqlite3.SQLITE_LOCKED: _BUSY,
}


def store_error(path: Path, error: OSError | sqlite3.Error, what: str = "disk store") -> StoreError:
    """What happened at `path`, as a StoreError."""
    if isinstance(error, NotOwn):
        return StoreError(f"{what} {error}")
    if isinstance(error, OSError):
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = _ADVICE.get(error.errno or 0)
    else:
        reason, advice = str(error), _SQLITE_ADVICE.get(sqlite_code(error))
    return StoreError(f"{what} {path}: {reason}; {advice or 'choose another folder'}")


def sqlite_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 where the error is Python's own."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
