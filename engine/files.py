"""Files that a process leaves for the next one."""

from __future__ import annotations

import os
from pathlib import Path


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
