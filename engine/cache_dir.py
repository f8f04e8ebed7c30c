"""The folder for what is made once and kept: converted models, compiled C code, KV on disk.

An entry appears whole or not at all: it is made beside its place and renamed into it, so several
processes may make the same entry at once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 64, 4096  # of a large file, for its identity


def default_cache_dir() -> Path:
    """`$KVRELAY_CACHE`, else `$XDG_CACHE_HOME`/kvrelay, else ~/.cache/kvrelay."""
    chosen = os.environ.get("KVRELAY_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay"


def publish_dir(final: Path, make: Callable[[Path], None]) -> Path:
    """Have `make` fill a fresh directory, then rename it to `final`; the first maker wins."""
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
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


def file_identity(path: Path) -> bytes:
    """Hash of a large file's size and of samples spread over it, first and last bytes included."""
    size = path.stat().st_size
    digest = blake2b(f"{size}".encode(), digest_size=16)
    with path.open("rb") as source:
        for sample in range(SAMPLES):
            source.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(source.read(SAMPLE_BYTES))
    return digest.digest()
