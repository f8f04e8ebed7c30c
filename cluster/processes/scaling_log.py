"""The autoscaler's log: all that it saw and decided, one line of JSON each."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import BinaryIO

from kvrelay.cluster.config import Config
from kvrelay.cluster.scaling.decisions import Line, encode_line

log = logging.getLogger("kvrelay.control")

MIB = 1 << 20


def log_path(config: Config, name: str) -> Path:
    """Of the server called `name`. When it is full, it goes on anew beside what it had."""
    return config.sessions.state_path / "scaling" / f"{name}.jsonl"


class ScalingLog:
    """Appends. What cannot be written is told once; scaling goes on without."""

    def __init__(self, path: Path | None, max_bytes: int) -> None:
        """`path`: None writes nothing."""
        self._path = path
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None

    @classmethod
    def of(cls, config: Config, name: str) -> ScalingLog:
        max_bytes = int(config.scaling.log_mib * MIB)
        return cls(log_path(config, name) if max_bytes else None, max_bytes)

    def write(self, line: Line) -> None:
        if self._path is None:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            self._file.write(encode_line(line) + b"\n")
            if self._file.tell() >= self._max_bytes:
                self._file.close()
                self._file = None
                self._path.replace(self._path.with_suffix(".old.jsonl"))
        except OSError as error:
            log.warning("decisions of the autoscaler are not logged: %s: %s", self._path, error)
            self._path = None
