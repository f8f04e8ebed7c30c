"""A second process with a transfer agent of its own, for the time of a measurement."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def second_process(module: str, *arguments: str, deadline_s: float) -> Iterator[bytes]:
    """Runs `module`, which writes its agent's metadata as a line of hex and ends with its stdin.
    Yields the metadata. One that does not end in `deadline_s` is killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield bytes.fromhex(process.stdout.readline())
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(deadline_s)
