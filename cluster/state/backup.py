"""A copy of what a server has to find again on another machine, or after a loss.

A folder: `manifest.json`; `state/`, what the state directory has (secrets, sessions, stored
answers, certificates); `kv/`, the disk tier, where that is asked for. Databases are copied by
SQLite, so a server may run meanwhile. Of a disk store the index is copied first: what is written
after that does not fit the checksum that the index has, and is dropped by whoever reads it.

What belongs to a life of the server alone is left out: its running workers, locks, logs. So are
drafts, which are no files yet, and copies of what is in Redis. A file that has gone since it was
listed is no error, unless the copied database of batches names it; that is copied after the files.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from kvrelay.cluster.state.server_lock import LOCK as SERVER_LOCK
from kvrelay.cluster.state.server_lock import ServerLock, StateInUse
from kvrelay.kvtransfer.store.folder import BLOCKS, INDEX, LOCK

MANIFEST = "manifest.json"
VERSION = 1  # the layout of the folder
_DATABASES = (".db", ".sqlite")
_LEFT_OUT = ("running", "scaling", "logs", "shared-files")
_FILES, _BATCHES = "files", "batches.db"  # batches' own: the second names the first
_TRIES = 5  # to have both as they were at one moment
_CHUNK = 16 << 20

Tell = Callable[[str], None]


class BackupError(Exception):
    """One line: what, where, and what to do."""


class Manifest(msgspec.Struct, frozen=True):
    version: int
    kvrelay: str  # its version
    host: str
    created_at: float  # seconds since 1970
    files: dict[str, str]  # SHA-256 of what `state/` has
    has_kv: bool = False


def back_up(
    state: Path, folder: Path, *, kvrelay: str, now: float, kv: Path | None, tell: Tell
) -> Manifest:
    """Copy `state`, and the disk tier at `kv`, into `folder`, which must not be there. Raises
    BackupError; then `folder` is gone again."""
    names = sorted(_kept(state), key=lambda name: (not name.startswith(f"{_FILES}/"), name))
    if not names:
        raise BackupError(f"{state} has nothing to keep: is it the server's sessions.state_dir?")
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise BackupError(f"{folder} is there already: name a new folder") from None
    except OSError as error:
        raise BackupError(f"{folder}: {error.strerror}") from error
    try:
        files = {}
        for name in names:
            tell(name)
            if _copied(state, name, folder):
                files[name] = _digest(folder / "state" / name)
        for name in _copy_named(state, folder):
            files[name] = _digest(folder / "state" / name)
        for store in _stores(kv) if kv is not None else ():
            tell(f"kv/{store}")
            assert kv is not None
            for name in (INDEX, BLOCKS):  # in this order
                _copy(kv / store / name, folder / "kv" / store / name)
        manifest = Manifest(
            VERSION, kvrelay, socket.gethostname(), now, files, (folder / "kv").is_dir()
        )
        text = msgspec.json.format(msgspec.json.encode(manifest))
        (folder / MANIFEST).write_bytes(text + b"\n")
        return manifest
    except (OSError, sqlite3.Error, BackupError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise BackupError(f"{error}; {folder} is removed") from error


def restore(folder: Path, state: Path, *, kv: Path | None, overwrite: bool, tell: Tell) -> Manifest:
    """Copy what `back_up` has made into `state` and `kv`. All is checked before anything is
    written. Raises BackupError."""
    manifest = _read(folder)
    for name, digest in manifest.files.items():
        path = folder / "state" / name
        if not path.is_file() or _digest(path) != digest:
            raise BackupError(f"{path} is missing or was changed: take another backup")
    kept = kv if manifest.has_kv else None
    stores = _stores(folder / "kv") if kept is not None else []
    try:
        lock = ServerLock.take(state)
    except StateInUse as error:
        raise BackupError(str(error)) from error
    except OSError as error:
        raise BackupError(f"{state}: {error}") from error
    try:
        _put_back(folder, state, manifest, stores, kept, overwrite=overwrite, tell=tell)
    finally:
        lock.release()
    return manifest


def _put_back(
    folder: Path,
    state: Path,
    manifest: Manifest,
    stores: list[Path],
    kept: Path | None,
    *,
    overwrite: bool,
    tell: Tell,
) -> None:
    """Raises BackupError where a server uses `state`."""
    if holder := _in_use(state):
        raise BackupError(f"a server uses {state} (it holds {holder}): end it first")
    for store in stores:
        assert kept is not None
        if _is_locked(kept / store / LOCK):
            raise BackupError(f"a worker uses {kept / store}: end the server first")
    names = [name for name in manifest.files if Path(name).parts[0] not in _LEFT_OUT]
    there = [state / name for name in names if (state / name).exists()]
    there += [kept / store for store in stores if kept is not None and (kept / store).exists()]
    if there and not overwrite:
        more = f" and {len(there) - 1} more" if there[1:] else ""
        raise BackupError(f"{there[0]}{more} would be written over: --overwrite does that")
    try:
        for name in names:
            tell(name)
            for suffix in ("-wal", "-shm"):  # changes of what was there, not of this
                Path(f"{state / name}{suffix}").unlink(missing_ok=True)
            _copy(folder / "state" / name, state / name)
        for store in stores:
            assert kept is not None
            tell(f"kv/{store}")
            shutil.rmtree(kept / store, ignore_errors=True)
            for name in (INDEX, BLOCKS):
                _copy(folder / "kv" / store / name, kept / store / name)
    except (OSError, sqlite3.Error) as error:
        raise BackupError(f"{error}; what is there is not complete: restore again") from error


def _read(folder: Path) -> Manifest:
    try:
        found = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except OSError as error:
        raise BackupError(f"{folder} is no backup: {MANIFEST}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BackupError(f"{folder / MANIFEST} is no manifest of a backup: {error}") from error
    if found.version > VERSION:
        raise BackupError(
            f"{folder} is of layout {found.version} (KVRelay {found.kvrelay}), and this version "
            f"reads up to {VERSION}: restore with the newer one"
        )
    if bad := [
        name for name in found.files if Path(name).is_absolute() or ".." in Path(name).parts
    ]:
        raise BackupError(f"{folder / MANIFEST}: {bad[0]!r} leads out of the state directory")
    return found


def _kept(state: Path) -> Iterator[str]:
    for path in state.rglob("*"):
        name = path.relative_to(state)
        is_part = path.name.endswith((".lock", "-wal", "-shm", ".new")) or ".bad-" in path.name
        is_draft = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not (is_part or is_draft or name.parts[0] in _LEFT_OUT):
            yield str(name)


def _copied(state: Path, name: str, folder: Path) -> bool:
    """Whether it was still there."""
    try:
        _copy(state / name, folder / "state" / name)
    except FileNotFoundError:
        _draft_of(folder / "state" / name).unlink(missing_ok=True)
        return False
    return True


def _copy_named(state: Path, folder: Path) -> set[str]:
    """Copies what the copied database names and what came after its files were copied. Returns
    what is another now. Raises BackupError where it names what is gone, however often it is copied
    again."""
    copied = folder / "state"
    changed: set[str] = set()
    if not (copied / _BATCHES).is_file():
        return changed
    for _ in range(_TRIES):
        with closing(sqlite3.connect(copied / _BATCHES)) as connection:
            rows = connection.execute("SELECT id FROM files").fetchall()
        lacking = [name for (each,) in rows if not (copied / (name := f"{_FILES}/{each}")).exists()]
        gone = [name for name in lacking if not _copied(state, name, folder)]
        changed.update(set(lacking) - set(gone))
        if not gone:
            return changed
        _copy(state / _BATCHES, copied / _BATCHES)
        changed.add(_BATCHES)
    raise BackupError(f"files of batches go while they are copied ({gone[0]}): try again")


def _stores(kv: Path) -> list[Path]:
    """Below `kv`: the folders of disk stores, as <fingerprint>/<owner>."""
    return sorted(path.parent.relative_to(kv) for path in kv.glob(f"*/*/{INDEX}"))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = _draft_of(target)
    handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        if not source.name.endswith(_DATABASES):
            with source.open("rb") as data:
                _copy_sparse(data.fileno(), file.fileno())
    if source.name.endswith(_DATABASES):
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as old,
            closing(sqlite3.connect(draft)) as new,
        ):
            old.backup(new)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(target)


def _draft_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.new")


def _copy_sparse(source: int, target: int) -> None:
    """Holes stay holes: a disk store is as large as it may become, and holds what it holds."""
    size = os.fstat(source).st_size
    at = 0
    while at < size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # a hole up to the end
        at = os.lseek(source, start, os.SEEK_HOLE)
        for offset in range(start, at, _CHUNK):
            data = os.pread(source, min(_CHUNK, at - offset), offset)
            view = memoryview(data)
            while view:
                written = os.pwrite(target, view, offset + len(data) - len(view))
                view = view[written:]
    os.ftruncate(target, size)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _in_use(state: Path) -> str:
    """The lock in `state` that somebody holds; "": none."""
    locks = (path for path in state.glob("*.lock") if path.name != SERVER_LOCK)
    return next((str(path.name) for path in locks if _is_locked(path)), "")


def _is_locked(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
