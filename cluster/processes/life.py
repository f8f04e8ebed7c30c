"""What outlives `kvrelay serve` itself, so that the next one finds the workers that still run.

A directory for each port that was served at, for its owner only, since it holds the token of the
cluster. It is removed by a server that ends properly, and so is found only where one has died.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvrelay.cluster.config import Config
from kvrelay.worker.processes import kill_workers

log = logging.getLogger("kvrelay")

TOKEN_BYTES = 32
WRITE_S = 1.0  # for a write of some hundred bytes; after that the disk hangs
RETRY_S = 5.0  # before a write that has failed is tried again

T = TypeVar("T")


class LifeRecord(msgspec.Struct):
    cluster: str
    token: bytes
    settings: str  # a digest of the workers' own: `workers_of`
    controller_epoch: int = 0


class Keeper:
    """Writes the last record to a file, on a thread of its own, and tries again until it is there.

    What the next controller or server has to know is written before this one goes on, if the disk
    lets it. A disk that is full or does not answer ends nobody and holds nobody up: `keep` waits
    for it no longer than `WRITE_S`, and not at all while it is late."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._changed = threading.Condition()
        self._latest: bytes | None = None  # to be written; None: it is
        self._is_late = False
        self._late_since = 0.0
        self.failed_writes = 0
        threading.Thread(target=self._run, name="keeper", daemon=True).start()

    def keep(self, record: Any) -> None:
        data, deadline = msgspec.msgpack.encode(record), time.monotonic() + WRITE_S
        with self._changed:
            if self._latest is None:
                self._late_since = time.monotonic()
            self._latest = data
            self._changed.notify_all()
            while self._latest is not None and not self._is_late:
                if not self._changed.wait(deadline - time.monotonic()):
                    self._is_late = True
                    self.failed_writes += 1
                    log.error("%s is not written within %g s: the disk hangs", self._file, WRITE_S)

    @property
    def late_s(self) -> float:
        """For how long the last record has not been written."""
        with self._changed:
            return 0.0 if self._latest is None else time.monotonic() - self._late_since

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._latest is None:
                    self._changed.wait()
                data = self._latest
            has_failed = not self._write(data)
            with self._changed:
                self._is_late = has_failed
                if self._latest is data and not has_failed:
                    self._latest = None
                self._changed.notify_all()
                if has_failed:
                    self._changed.wait(RETRY_S)

    def _write(self, data: bytes) -> bool:
        try:
            write_private(self._file, data)
        except OSError as error:
            self.failed_writes += 1
            log.error(
                "%s cannot be written, and what starts next will not know of all workers: %s; make "
                "room, or make the folder writable",
                self._file,
                error,
            )
            return False
        return True


@dataclass(slots=True)
class Life:
    """One life of a cluster. Owned by the supervisor."""

    path: Path
    record: LifeRecord
    _keeper: Keeper = field(init=False)

    def __post_init__(self) -> None:
        self._keeper = Keeper(self.path / "life")

    @property
    def kept_file(self) -> Path:
        """Where a controller keeps what the next one has to know."""
        return self.path / "controller"

    def next_controller(self) -> int:
        """Begin another epoch, which counts also where it cannot be kept."""
        self.record.controller_epoch += 1
        self._keeper.keep(self.record)
        return self.record.controller_epoch

    def end(self) -> None:
        """Nothing of it runs any more."""
        shutil.rmtree(self.path, ignore_errors=True)


def open_life(config: Config, port: int) -> Life:
    """The life that the last server at `port` has left behind, if its workers are such as `config`
    asks for; else a new one. Workers of another kind are ended. Raises OSError."""
    base = config.sessions.state_path / "running"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings = workers_of(config)
    path = base / f"{socket.gethostname()}-{port}"
    found = read_record(path / "life", LifeRecord)
    if found is not None and found.settings == settings:
        log.warning("the last server at port %d did not end properly; its workers go on", port)
        return Life(path, found)
    if found is not None:
        log.warning("the last server at port %d did not end properly; its workers end", port)
        kill_workers(found.cluster)
    shutil.rmtree(path, ignore_errors=True)
    if config.api.port == 0:  # no later server would look there
        path = Path(tempfile.mkdtemp(dir=base))
    path.mkdir(mode=0o700, exist_ok=True)
    record = LifeRecord(
        f"kvrelay-{secrets.token_hex(4)}", secrets.token_bytes(TOKEN_BYTES), settings
    )
    return Life(path, record)


def workers_of(config: Config) -> str:
    """A digest of all settings that workers, and what they say to others, depend on."""
    parts = (
        config.model,
        config.engine,
        config.tiers,
        config.tls,
        config.cluster,
        config.state,
        config.scaling,
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def read_record(file: Path, kind: type[T]) -> T | None:
    """What `write_private` has left; None: nothing, as after a proper end, or nothing of use."""
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s is of no use, and workers that run are not found: %s", file, error)
        return None


def write_private(file: Path, data: bytes) -> None:
    """Whole or not at all, for the owner's eyes. Raises OSError."""
    new = file.with_suffix(f".{secrets.token_hex(4)}")
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
