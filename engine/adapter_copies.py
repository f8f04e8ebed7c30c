"""The bytes of adapters, by digest: a machine keeps a copy of those that it has read, so that what
runs with them ends with them, whatever becomes of the folder.

A copy appears whole or not at all. It is never needed: without one, the folder itself is read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from kvrelay.engine.adapters import (
    CONFIG_NAME,
    MAX_BYTES,
    MAX_CONFIG_BYTES,
    WEIGHTS_NAME,
    Adapter,
    AdapterError,
    AdapterFiles,
    begin_digest,
    open_file,
    parse_config,
    read_adapter,
    read_file,
)
from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.needs import Need

MAX_COPIES_BYTES = 16 << 30  # that a machine keeps, all adapters together
CHUNK_BYTES = 4 << 20
LEFT_S = 86_400.0  # a copy that nobody has finished by then, nobody will


def read_registered(adapter: Need, most: int = MAX_BYTES) -> AdapterFiles:
    """The bytes that were registered: the copy of them that this machine has, or else those in the
    folder, of which it gets a copy. Raises AdapterError."""
    kept = copies_dir() / adapter.digest.hex()
    with contextlib.suppress(AdapterError):
        files = read_adapter(kept, most)
        if files.digest == adapter.digest:
            with contextlib.suppress(OSError):
                os.utime(kept)
            return files
    files = read_adapter(Path(adapter.source), most)
    if files.digest != adapter.digest:
        raise AdapterError("its files have changed since it was registered; register it again")
    copy = _Copy(files.config, len(files.weights))
    copy.write(files.weights)
    copy.keep(files.digest)
    return files


def kept_folder(adapter: Need) -> Path:
    """Where the bytes of `read_registered` lie, for who reads files by itself."""
    kept = copies_dir() / adapter.digest.hex()
    return kept if kept.is_dir() else Path(adapter.source)


def register(folder: Path) -> Need:
    """Names an adapter by its bytes, of which this machine keeps a copy: what runs with them ends
    with them, whatever becomes of the folder. Memory holds little of them. Raises AdapterError."""
    config = read_file(folder, CONFIG_NAME, MAX_CONFIG_BYTES)
    parse_config(config)
    digest, path = begin_digest(config), folder / WEIGHTS_NAME
    with open_file(path, MAX_BYTES) as source:
        copy = _Copy(config, path.stat().st_size)
        try:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
        except OSError as error:
            copy.drop()
            raise AdapterError(f"{WEIGHTS_NAME} cannot be read: {error.strerror}") from None
    copy.keep(digest.digest())
    return Adapter(digest.digest(), str(folder))


def copies_dir() -> Path:
    """Where this machine keeps the bytes of adapters, a folder for each, named by its digest."""
    return default_cache_dir() / "adapters"


class _Copy:
    """One that is being made. Where there is no room for it, or no folder, there is none, and
    nobody is the worse for it until the adapter's own folder changes."""

    def __init__(self, config: bytes, size: int) -> None:
        self._fresh: Path | None = None
        self._file: IO[bytes] | None = None
        with contextlib.suppress(OSError):
            copies = copies_dir()
            copies.mkdir(parents=True, exist_ok=True, mode=0o700)
            if size <= MAX_COPIES_BYTES and 2 * size < shutil.disk_usage(copies).free:
                self._fresh = Path(tempfile.mkdtemp(dir=copies, prefix=".fresh-"))
                (self._fresh / CONFIG_NAME).write_bytes(config)
                self._file = (self._fresh / WEIGHTS_NAME).open("wb")

    def write(self, part: bytes) -> None:
        try:
            if self._file is not None:
                self._file.write(part)
        except OSError:
            self.drop()

    def keep(self, digest: bytes) -> None:
        """Puts it in its place, whole, and drops those that were not used for the longest."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
                assert self._fresh is not None
                kept = self._fresh.with_name(digest.hex())
                if not kept.exists():
                    self._fresh.rename(kept)
                os.utime(kept)
                _drop_old(kept)
        self.drop()

    def drop(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        if self._fresh is not None:
            shutil.rmtree(self._fresh, ignore_errors=True)
        self._fresh = self._file = None


def _drop_old(newest: Path) -> None:
    """Copies beyond MAX_COPIES_BYTES, and what a process that died has left of one. Raises
    OSError."""
    found = sorted(newest.parent.iterdir(), key=lambda each: -each.stat().st_mtime_ns)
    total, now = 0, newest.stat().st_mtime
    for each in found:
        total += sum(file.stat().st_size for file in each.iterdir())
        is_left = each.name.startswith(".") and now - each.stat().st_mtime > LEFT_S
        if each != newest and (is_left or total > MAX_COPIES_BYTES):
            shutil.rmtree(each, ignore_errors=True)
