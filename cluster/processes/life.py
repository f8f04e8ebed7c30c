"""What outlives `kvrelay serve` itself, so that the next one finds the workers that still run.

A directory for each port that was served at, for its owner only, since it holds the token of the
cluster. It is removed by a server that ends properly, and so is found only where one has died.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import shutil
import socket
import struct
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvrelay.cluster.config import Config
from kvrelay.cluster.control.lease import epoch_of
from kvrelay.worker.processes import kill_workers

log = logging.getLogger("kvrelay")

TOKEN_BYTES = 32
VERSION = 1  # all files here have it: raised where an older reader would get one wrong

T = TypeVar("T")


class LifeRecord(msgspec.Struct):
    cluster: str
    token: bytes
    settings: str  # a digest of the workers' own: `workers_of`
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
    is_newer = found is None and _version(path / "life") > VERSION
    if not is_newer:
        shutil.rmtree(path, ignore_errors=True)
    if config.api.port == 0 or is_newer:  # no later server would look there
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
        version = _version(file)
        if version > VERSION:
            aside = file.with_name(f"{file.name}.version-{version}")
            write_private(aside, file.read_bytes())
            log.error(
                "%s is of version %d, of a newer KVRelay, and this one reads up to %d: workers that"
                " run are not found, and end by themselves; what it has is kept as %s",
                *(file, version, VERSION, aside.name),
            )
            return None
        return msgspec.msgpack.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s is of no use, and workers that run are not found: %s", file, error)
        return None


class _Versioned(msgspec.Struct):
    version: int = 1


def _version(file: Path) -> int:
    """Reads the version of a file of this kind; 0: there is none. Raises OSError."""
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=_Versioned).version
    except (FileNotFoundError, msgspec.DecodeError):
        return 0


def keep(file: Path, record: Any) -> bool:
    """Write what the next controller or server has to know, and say whether that went well. This
    one goes on in any case: a full disk must not end it."""
    try:
        fields = msgspec.to_builtins(record, builtin_types=(bytes,))
        write_private(file, msgspec.msgpack.encode({"version": VERSION} | fields))
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


def now_s() -> float:
    """A clock that never jumps, goes on while the machine sleeps, and is one for all processes of a
    machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Deadline:
    """Until when, by `now_s`, the controller may give orders: written by the supervisor's thread
    that holds the lease, and read by the controller's process, which shares the memory."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("lease") if fd is None else fd
        if fd is None:
            self.write(0.0)

    def write(self, until: float) -> None:
        os.pwrite(self.fd, struct.pack("d", until), 0)

    def is_over(self) -> bool:
        (until,) = struct.unpack("d", os.pread(self.fd, 8, 0))
        return now_s() >= float(until)


@dataclass(slots=True)
class SharedLife(Life):
    """That of a cluster with several servers (`cluster.name`): what the next leader has to know is
    in Redis, and nothing here outlives this server."""

    server: str = ""  # names this one; no other process ever has that name
    term: int = 0  # in which it leads
    starts: int = 0  # so many controllers began in this term
    deadline: Deadline = field(default_factory=Deadline)

    def lead(self, term: int) -> None:
        self.term, self.starts = term, 0

    def next_controller(self) -> int:
        self.starts += 1
        self.record.controller_epoch = epoch_of(self.term, self.starts)
        return self.record.controller_epoch


def shared_life(config: Config, port: int) -> SharedLife:
    """The cluster's name and its processes' token are the same wherever the secret is."""
    name, secret = config.cluster.name, config.cluster.token.encode()
    token = hmac.digest(secret, f"kvrelay cluster {name}".encode(), "sha256")
    cluster = f"kvrelay-{hmac.digest(token, b'name', 'sha256').hex()[:8]}"
    server = f"{socket.gethostname()}-{port}-{secrets.token_hex(2)}"
    path = config.sessions.state_path / "running" / cluster  # names its log; nothing is written
    public = Config(model=config.model, engine=config.engine, tiers=config.tiers)
    return SharedLife(path, LifeRecord(cluster, token, workers_of(public)), server)
