"""The folder for what is made once and kept: converted models, compiled C code, KV on disk,
digests of checkpoints.

An entry appears whole or not at all: it is made beside its place and renamed into it, so several
processes may make the same entry at once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from kvrelay.engine.files import given_folder

DIGEST_BYTES = 32
CHUNK_BYTES = 4 << 20  # that one thread hashes at a time
MAX_THREADS = min(16, os.cpu_count() or 1)
LEAST_KEPT_BYTES = 1 << 20  # smaller files are read again each time
MAX_KEPT = 1024  # digests
SETTLED_NS = 2_000_000_000  # since the last change: more than the timestamps of file systems jump
LOCK_TIMEOUT_S = 600.0  # another process reads the file meanwhile; then this one reads it too


def default_cache_dir() -> Path:
    """Returns `$KVRELAY_CACHE`, else `$XDG_CACHE_HOME`/kvrelay, else ~/.cache/kvrelay."""
    chosen = os.environ.get("KVRELAY_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay"


def publish_dir(final: Path, make: Callable[[Path], None]) -> Path:
    """Have `make` fill a fresh directory, then rename it to `final`; the first maker wins."""
    if final.is_dir():
        return final
    given_folder(final.parent)
    fresh = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        make(fresh)
        fresh.chmod(0o755)
        try:
            fresh.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return final


def file_digest(path: Path, cache_dir: Path | None = None) -> bytes:
    """32 bytes, a hash of every byte of a file. It depends on nothing else, so machines agree.
    It finds edits, not forgeries: XXH3-128 reads as fast as memory.

    The digest of a large file is kept in `cache_dir`/digests by device, inode, size, mtime and
    ctime, so a later start reads no more than that. Noticed is every write, truncation, rename or
    copy over the file, an in-place edit with size and mtime set back included: a user cannot set
    ctime. A file that changed within SETTLED_NS before it was read is not kept, because a further
    write might not move its timestamps. Not noticed is what moves no ctime: writes to the block
    device, a clock that was set back between two writes, other clients of a network file system
    until this one asks its server for the attributes.
    """
    stat = path.stat()
    if stat.st_size < LEAST_KEPT_BYTES:
        return _digest_of(path, stat.st_size)
    key = blake2b(repr(version_of(stat)).encode(), digest_size=16).hexdigest()
    kept = (cache_dir or default_cache_dir()) / "digests" / key
    try:
        given_folder(kept.parent)
    except OSError:  # no place to keep it, or another user's
        return _digest_of(path, stat.st_size)
    found = _kept_digest(kept)
    if found is not None:
        return found
    from filelock import FileLock, Timeout  # 45 ms to import, and seldom needed

    try:
        # Processes that start together let one of them read the file.
        with FileLock(kept.parent.parent / "digests.lock", timeout=LOCK_TIMEOUT_S):
            return _kept_digest(kept) or _keep_digest(path, stat, kept)
    except (OSError, Timeout, NotImplementedError):  # no place to keep it, or no locks
        return _digest_of(path, stat.st_size)


def version_of(stat: os.stat_result) -> tuple[int, ...]:
    """What changes with a file's bytes; see `file_digest`."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _kept_digest(kept: Path) -> bytes | None:
    try:
        found = kept.read_bytes()
    except OSError:
        return None
    return found if len(found) == DIGEST_BYTES else None


def _keep_digest(path: Path, stat: os.stat_result, kept: Path) -> bytes:
    """Read the file, and keep its digest if it cannot have changed meanwhile unnoticed."""
    handle, name = tempfile.mkstemp(dir=kept.parent)
    fresh = Path(name)
    try:
        began_ns = os.fstat(handle).st_mtime_ns  # a file system's clock, not the process's
        digest = _digest_of(path, stat.st_size)
        settled = began_ns - max(stat.st_mtime_ns, stat.st_ctime_ns) > SETTLED_NS
        if settled and version_of(path.stat()) == version_of(stat):
            os.write(handle, digest)
            fresh.rename(kept)
            entries = sorted(kept.parent.iterdir(), key=lambda entry: entry.stat().st_mtime_ns)
            for old in entries[:-MAX_KEPT]:
                old.unlink(missing_ok=True)
    finally:
        os.close(handle)
        fresh.unlink(missing_ok=True)
    return digest


def _digest_of(path: Path, size: int) -> bytes:
    """A hash over the hashes of its chunks, which threads read."""
    from xxhash import xxh3_128_digest  # an environment for another engine may not have it

    if size <= CHUNK_BYTES:
        whole = f"{size}".encode() + xxh3_128_digest(path.read_bytes())
        return blake2b(whole, digest_size=DIGEST_BYTES).digest()
    with path.open("rb", buffering=0) as source, ThreadPoolExecutor(MAX_THREADS) as threads:

        def hash_chunk(start: int) -> bytes:
            return xxh3_128_digest(os.pread(source.fileno(), CHUNK_BYTES, start))

        digest = blake2b(f"{size}".encode(), digest_size=DIGEST_BYTES)
        for chunk in threads.map(hash_chunk, range(0, size, CHUNK_BYTES)):
            digest.update(chunk)
    return digest.digest()
