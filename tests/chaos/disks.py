"""Small file systems of their own, which can be made to hang and to be slow. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Self

from tests.chaos.network import run

TOOLS = ("mkfs.ext4", "fsfreeze", "mount", "umount")


def what_is_missing() -> str:
    """Says what disks need and lack; empty: nothing."""
    if os.geteuid() != 0:
        return "root, to mount disks"
    missing = [name for name in TOOLS if shutil.which(name) is None]
    return f"the commands {' and '.join(missing)} (e2fsprogs, util-linux)" if missing else ""


class Disk:
    """An ext4 in a file of `size_mib`, mounted at `path` from `with` to its end."""

    def __init__(self, path: Path, size_mib: int) -> None:
        self.path, self._size_mib = path, size_mib

    def __enter__(self) -> Self:
        image = self.path.with_suffix(".image")
        with image.open("wb") as file:
            file.truncate(self._size_mib << 20)
        self.path.mkdir()
        run("mkfs.ext4", "-q", "-m", "0", str(image))
        run("mount", "-o", "loop", str(image), str(self.path))
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self.hang(False)  # who waits for a frozen disk cannot be killed
        with contextlib.suppress(subprocess.CalledProcessError):
            run("umount", "-l", str(self.path))

    def hang(self, hangs: bool) -> None:
        """Whoever writes waits, and cannot be killed meanwhile; what is in memory can be read."""
        run("fsfreeze", "--freeze" if hangs else "--unfreeze", str(self.path))
