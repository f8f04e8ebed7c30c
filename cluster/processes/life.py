"""What outlives `kvrelay serve` itself, so that the next one finds the workers that still run.

A directory for each port that was served at, for its owner only, since it holds the token of the
cluster. It is removed by a server that ends its workers, and so is found where one has died, or
has kept them (`cluster.on_stop`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvrelay.cluster.config import Config

log = logging.getLogger("kvrelay")

TOKEN_BYTES = 32
NOT_OF_WORKERS = (
    "prefill",
    "decode",
    "routers",
    "ray_dashboard_port",
    "insecure_ray",
    "start_timeout_s",
    "silent_grace_s",
    "drain_s",
    "on_stop",
)

T = TypeVar("T")


class LifeRecord(msgspec.Struct):
    cluster: str
    token: bytes
    controller_epoch: int = 0


@dataclass(slots=True)
class Life:
    """One life of a cluster. Owned by the supervisor."""

    path: Path
    record: LifeRecord

    @property
    def kept_file(self) -> Path:
        """Where a controller keeps what the next one has to know."""
        return self.path / "controller"

    def next_controller(self) -> int:
        """Begin another epoch, which counts also where it cannot be kept."""
        self.record.controller_epoch += 1
        keep(self.path / "life", self.record)
        return self.record.controller_epoch

    def end(self) -> None:
        """Nothing of it runs any more."""
        shutil.rmtree(self.path, ignore_errors=True)


def open_life(config: Config, port: int) -> Life:
    """The life that the last server at `port` has left behind, or a new one. Which of its workers
    are such as `config` asks for, the controller sees. Raises OSError."""
    base = config.sessions.state_path / "running"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = base / f"{socket.gethostname()}-{port}"
    found = read_record(path / "life", LifeRecord)
    if found is not None:
        log.warning("the last server at port %d has left workers, which go on", port)
        return Life(path, found)
    shutil.rmtree(path, ignore_errors=True)
    if config.api.port == 0:  # no later server would look there
        path = Path(tempfile.mkdtemp(dir=base))
    path.mkdir(mode=0o700, exist_ok=True)
    record = LifeRecord(f"kvrelay-{secrets.token_hex(4)}", secrets.token_bytes(TOKEN_BYTES))
    return Life(path, record)


def workers_of(config: Config) -> str:
    """A digest of all settings that a worker, and what it says to others, depends on: not of how
    many there are, nor of what their controller alone does."""
    cluster = msgspec.to_builtins(config.cluster)
    for name in NOT_OF_WORKERS:
        del cluster[name]
    scaling = config.scaling.enabled
    parts = (config.model, config.engine, config.tiers, config.tls, cluster, config.state, scaling)
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


def keep(file: Path, record: Any) -> bool:
    """Write what the next controller or server has to know, and say whether that went well. This
    one goes on in any case: a full disk must not end it."""
    try:
        write_private(file, msgspec.msgpack.encode(record))
    except OSError as error:
        log.error(
            "%s cannot be written, and what starts next will not know of all workers: %s; make "
            "room, or make the folder writable",
            file,
            error,
        )
        return False
    return True


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
