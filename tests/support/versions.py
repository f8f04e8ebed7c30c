"""Trees of other commits, to be served beside this one: `current` is a link to the one in use."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.structure import ROOT

PACKAGES = (
    *("engine", "kvtransfer", "worker", "prefill_worker", "decode_worker", "router", "cluster"),
    "lab",
)


class Versions:
    """Owns a folder: a tree for each version, and the link. Whoever is started with `env` imports
    what the link leads to, then and there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current = folder / "current"

    @property
    def env(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self._current)}

    def use(self, version: str) -> None:
        """A commit, or "" for the tree that is tested. Skips the test if git does not have it."""
        tree = self._folder / (version or "here")
        if not tree.exists():
            self._make(tree, version)
        link = self._folder / "next"
        link.symlink_to(tree.name)
        os.replace(link, self._current)

    def _make(self, tree: Path, version: str) -> None:
        source = ROOT
        if version:
            source = self._folder / f"{version}-source"
            source.mkdir()
            command = ["git", "-C", str(ROOT), "archive", version, *PACKAGES]
            found = subprocess.run(command, capture_output=True, check=False, timeout=60)
            if found.returncode:
                why = found.stderr.decode().strip()
                pytest.skip(f"git has no commit {version} here (a shallow clone?): {why}")
            unpack = ["tar", "-x", "-C", str(source)]
            subprocess.run(unpack, input=found.stdout, check=True, timeout=60)
        (tree / "kvrelay").mkdir(parents=True)
        for name in PACKAGES:
            (tree / "kvrelay" / name).symlink_to(source / name)
