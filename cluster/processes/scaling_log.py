"""The log of what the autoscaler decided and why, which `kvrelay replay` reads."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from queue import Full, Queue
from typing import BinaryIO

from kvrelay.cluster.config import Config
from kvrelay.cluster.scaling.decisions import Line, encode_line

log = logging.getLogger("kvrelay.control")

MIB = 1 << 20
MAX_LINES = 1000  # that wait to be written


class ScalingLog:
    """Appends, on a thread of its own. A file that is full stays beside the one that goes on. That
    something cannot be written is said once; scaling goes on without, also where the disk hangs."""

    def __init__(self, path: Path | None, max_bytes: int) -> None:
        """`path`: None writes nothing."""
        self._path = path
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None
        self._is_failing = False
        self._lines: Queue[Line] = Queue(MAX_LINES)
        if path is not None:
            threading.Thread(target=self._run, name="scaling-log", daemon=True).start()

    @classmethod
    def of(cls, config: Config, name: str) -> ScalingLog:
        """The log of the server called `name`, if it is to have one."""
        max_bytes = int(config.scaling.log_mib * MIB)
        path = config.sessions.state_path / "scaling" / f"{name}.jsonl"
        return cls(path if max_bytes else None, max_bytes)

    def write(self, line: Line) -> None:
        if self._path is not None:
            with contextlib.suppress(Full):
                self._lines.put_nowait(line)

    def _run(self) -> None:
        assert self._path is not None
        while True:
            self._append(self._path, self._lines.get())
            self._lines.task_done()

    def _append(self, path: Path, line: Line) -> None:
        try:
            if self._file is None:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file = path.open("ab", buffering=0)
            self._file.write(encode_line(line) + b"\n")
            if self._file.tell() >= self._max_bytes:
                self._file.close()
                self._file = None
                path.replace(path.with_suffix(".old.jsonl"))
            self._is_failing = False
        except OSError as error:
            self._file = None
            if not self._is_failing:
                log.warning("decisions of the autoscaler are not logged: %s: %s", path, error)
            self._is_failing = True
