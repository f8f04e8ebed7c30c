"""Files that a process leaves for the next one, where no other user decides what is in them.

On a machine with several users, somebody else may have made a folder or a file under our name
before us. What is opened by these functions is this user's own, or it is refused in words.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

RETRY_S = 0.05

T = TypeVar("T")


class NotOwn(PermissionError):
    """One line: what is there, whose it is, and what to do."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EPERM, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


def write_private(file: Path, data: bytes) -> None:
    """Whole or not at all, for the owner's eyes. Raises OSError."""
    new = file.with_suffix(f".{os.urandom(4).hex()}")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(handle)
        new.replace(file)
    except OSError:
        new.unlink(missing_ok=True)
        raise


class NotRead(OSError):
    """One line: which file, and why it is not read."""

    def __init__(self, path: Path, why: object) -> None:
        super().__init__(errno.EIO, f"it is not read: {why}")
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"{self.path} is not read: {self.why}"


def read_json(file: Path, kind: type[T]) -> T | None:
    """What `write_json` has left, also by another version: fields come and go. None: there is no
    file. Raises NotRead."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise NotRead(file, error) from error


def write_json(file: Path, value: object) -> None:
    """As `write_private`, in a folder that is made where it is missing. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(file, msgspec.json.encode(value))


def given_folder(path: Path) -> Path:
    """A folder that an operator has named, made where it is missing: this user's, or root's, as the
    places are that a container or a machine's owner gives. Raises OSError, `NotOwn` for one of
    another user: who owns a folder takes any file out of it, and puts others in."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = path.stat().st_uid
    if owner not in (0, os.getuid()):
        raise NotOwn(path, _of_another(owner, "name a folder of your own"))
    return path


def own_folder(path: Path, *, private: bool = False) -> Path:
    """A folder that this user alone can change, made where it is missing; its parent may be for
    all, as /tmp is. `private`: nobody else may read it either. Raises OSError, `NotOwn` where
    somebody else has made it, or could write into it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotOwn(path, "it has to be a folder, and no link to one: remove it")
    _check(path, status, private=private)
    return path


def runtime_folder() -> Path:
    """Where this user has locks on this machine: one place for all its processes, whatever their
    environments say. Raises as `own_folder`."""
    of_session = Path(f"/run/user/{os.getuid()}")
    if of_session.is_dir() and of_session.stat().st_uid == os.getuid():
        return own_folder(of_session / "kvrelay", private=True)
    return own_folder(Path(f"/tmp/kvrelay-{os.getuid()}"), private=True)


def open_own(path: Path, flags: int, *, private: bool = False) -> int:
    """A file of this user, by number; made by `os.O_CREAT` for its eyes only. `private`: nobody
    else may read it. Raises OSError, `NotOwn` for a link, and for what somebody else has made or
    could write into."""
    try:
        number = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOwn(path, "it has to be a file, and no link to one: remove it") from None
        raise
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise NotOwn(path, "it has to be a file: remove what is there")
        _check(path, status, private=private)
        os.set_blocking(number, True)
    except BaseException:
        os.close(number)
        raise
    return number


def check_owner(path: Path) -> None:
    """For what is opened by its name, as libraries do. Raises OSError, `NotOwn` for what another
    user has put there, also a link."""
    owner = path.lstat().st_uid
    if owner not in (0, os.getuid()):
        raise NotOwn(path, _of_another(owner, "remove it, or use another place"))


@contextmanager
def held_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Among processes of this user. Raises OSError; TimeoutError where one does not let go."""
    number = open_own(path, os.O_RDWR | os.O_CREAT, private=True)
    try:
        if not lock_within(number, timeout_s):
            raise TimeoutError(f"{path}: another process has held it for {timeout_s:g} s")
        yield
    finally:
        os.close(number)


def lock_within(number: int, timeout_s: float) -> bool:
    """Take the lock of an open file for this process alone; whether it was free in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(RETRY_S)


def _check(path: Path, status: os.stat_result, *, private: bool) -> None:
    if status.st_uid != os.getuid():
        raise NotOwn(path, _of_another(status.st_uid, "remove it, or use another place"))
    mode = stat.S_IMODE(status.st_mode)
    is_shared = mode & 0o020 and status.st_gid not in (os.getegid(), *os.getgroups())
    if mode & (0o077 if private else 0o002) or is_shared:
        what, right = "read" if private else "change", 700 if stat.S_ISDIR(status.st_mode) else 600
        raise NotOwn(path, f"others may {what} it (mode {mode:o}): chmod {right} it")


def _of_another(owner: int, instead: str) -> str:
    return f"it belongs to user {owner}, and this process is user {os.getuid()}: {instead}"
