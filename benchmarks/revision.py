"""Which commit a measurement was made with. Needs nothing but git."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    """With "+" it has changes that are not committed; "" where nobody knows."""

    def git(*args: str) -> str:
        folder = Path(__file__).parent
        run = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, timeout=10)
        return run.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--short") else "")
    except (OSError, subprocess.TimeoutExpired):
        return ""
