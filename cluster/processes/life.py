"""What outlives `kvrelay serve` itself, so that the next one finds the workers that still run.

A directory for each port that was served at, for its owner only, since it holds the token of the
cluster. It is removed by a server that ends its workers, and so is found where one has died, or
has kept them (`cluster.on_stop`).
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
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvrelay.cluster.config import Config
from kvrelay.cluster.control.lease import epoch_of
from kvrelay.cluster.control.messages import differing
from kvrelay.engine.files import write_private
from kvrelay.worker.processes import kill_workers

log = logging.getLogger("kvrelay")

TOKEN_BYTES = 32
VERSION = 1  # all files here have it: raised where an older reader would get one wrong
WRITE_S = 1.0  # for a write of some hundred bytes; after that the disk hangs
RETRY_S = 5.0  # before a write that has failed is tried again
# Fixed settings of the server, with which workers have nothing to do.
NOT_FIXED = (
    "api.host",
    "api.port",
    "cluster.routers",
    "sessions.state_dir",
    "state.url",
    "state.batches_url",
)
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
    "fork_server",
)

T = TypeVar("T")


class LifeRecord(msgspec.Struct):
    cluster: str
    token: bytes
    settings: str = ""  # a digest of the workers' own: `workers_of`
    controller_epoch: int = 0
    fixed: dict[str, str] = {}  # what no worker that runs can follow: `fixed_settings`
    checkpoints: dict[str, str] = {}  # `PreparedModels.checkpoints`; {}: a version before wrote it


class Installed(msgspec.Struct, frozen=True):
    """What served well, or serves now: for `kvrelay rollback`."""

    version: str
    command: tuple[str, ...]  # with links followed
    python_path: str
    settings: str | None  # text of the settings' file; None: there is none


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
        fields = msgspec.to_builtins(record, builtin_types=(bytes,))
        data = msgspec.msgpack.encode({"version": VERSION} | fields)
        deadline = time.monotonic() + WRITE_S
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
    _keepers: dict[str, Keeper] = field(default_factory=dict, init=False)  # by file

    def _keep(self, name: str, record: Any) -> None:
        if name not in self._keepers:
            self._keepers[name] = Keeper(self.path / name)
        self._keepers[name].keep(record)

    @property
    def kept_file(self) -> Path:
        """Where a controller keeps what the next one has to know."""
        return self.path / "controller"

    def next_controller(self) -> int:
        """Begin another epoch, which counts also where it cannot be kept."""
        self.record.controller_epoch += 1
        self._keep("life", self.record)
        return self.record.controller_epoch

    def use_checkpoints(self, checkpoints: dict[str, str]) -> None:
        """The model is known now."""
        if checkpoints != self.record.checkpoints:
            self.record.checkpoints = checkpoints
            self._keep("life", self.record)

    def use_models(self, config: Config, checkpoints: dict[str, str]) -> None:
        """Others than those of the start."""
        self.record.settings, self.record.fixed = workers_of(config), fixed_settings(config)
        self.use_checkpoints(checkpoints)

    def earlier(self, running: Installed) -> Installed | None:
        """What to go back to: the last that all processes were up with, if that is not what runs;
        else what was so before that."""
        good = read_record(self.path / "good", Installed)
        if good is not None and good != running:
            return good
        return read_record(self.path / "previous", Installed)

    def is_good(self, running: Installed) -> None:
        """All processes are up with it."""
        good = read_record(self.path / "good", Installed)
        if good != running:
            if good is not None:
                self._keep("previous", good)
            self._keep("good", running)

    def end(self) -> None:
        """Nothing of it runs any more."""
        shutil.rmtree(self.path, ignore_errors=True)


def open_life(config: Config, port: int, path: Path | None = None) -> Life:
    """The life that the last server at `port` has left behind, or a new one. Which of its workers
    can go on under `config`, the controller sees. `path`: of the life that goes on where a server
    replaces itself. Raises OSError."""
    base = config.sessions.state_path / "running"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings, fixed = workers_of(config), fixed_settings(config)
    is_same_server = path is not None
    path = path or base / f"{socket.gethostname()}-{port}"
    found = read_record(path / "life", LifeRecord)
    if found is not None and not found.fixed and found.settings != settings:
        # A version whose workers did not say what they cannot follow.
        kill_workers(found.cluster)
        found = None
    if found is not None:
        changed = [name for name in changed_settings(found, config) if name not in NOT_FIXED]
        if not is_same_server:
            end = f"end: {', '.join(changed)} changed" if changed else "go on with this model"
            log.warning("the last server at port %d has left workers, which %s", port, end)
        found.settings, found.fixed = settings, fixed
        return Life(path, found)
    is_newer = _version(path / "life") > VERSION
    if not is_newer:
        shutil.rmtree(path, ignore_errors=True)
    if config.api.port == 0 or is_newer:  # no later server would look there
        path = Path(tempfile.mkdtemp(dir=base))
    path.mkdir(mode=0o700, exist_ok=True)
    record = LifeRecord(
        f"kvrelay-{secrets.token_hex(4)}", secrets.token_bytes(TOKEN_BYTES), settings, fixed=fixed
    )
    return Life(path, record)


def fixed_settings(config: Config) -> dict[str, str]:
    """Settings that neither workers nor routers that run can follow, each as a digest: where the
    server listens, how its processes reach each other, and what is computed, since a stream that
    moves must go on as it began. Which model that is, its checkpoint's identity says; how it, Ray
    or certificates are named by this server says nothing. Compared by name: one that a version
    does not know is no difference (`differing`)."""
    cluster = config.cluster
    values = {
        "api.host": config.api.host,
        "api.port": config.api.port,
        "cluster.routers": cluster.routers,
        "state.url": config.state.url,
        "state.batches_url": config.state.batches_url,
        "sessions.state_dir": str(config.sessions.state_path),
        "cluster.address (set or not)": bool(cluster.address),
        "tls.frames (on or off)": config.tls.frames,
    }
    for name, own in config.by_model().items():
        prefix = f"models.{name}." if name else ""
        values |= {f"{prefix}{each}": value for each, value in _fixed_of_model(own).items()}
    digests = {name: hashlib.sha256(msgspec.json.encode(value)) for name, value in values.items()}
    return {name: digest.hexdigest()[:16] for name, digest in digests.items()}


def _fixed_of_model(config: Config) -> dict[str, Any]:
    return {
        "model.dtype": config.model.dtype,
        "model.quantization": config.model.quantization,
        "model.device": config.model.device,
        "engine.kv_dtype": config.engine.kv_dtype,
        "engine.window": config.engine.window,
        "engine.sinks": config.engine.sinks,
    }


def changed_settings(record: LifeRecord, config: Config) -> list[str]:
    """Names the fixed settings that are others now."""
    return differing(record.fixed, fixed_settings(config))


def fixed_of_workers(config: Config, checkpoint: str) -> dict[str, str]:
    """What a worker that runs cannot follow: what it computes, and how it is reached.
    `checkpoint`: the identity of what is served."""
    fixed = {name: each for name, each in fixed_settings(config).items() if name not in NOT_FIXED}
    return {**fixed, "the model (its files or engine.arguments)": checkpoint}


def workers_of(config: Config) -> str:
    """A digest of all settings that a worker, and what it says to others, depends on: not of how
    many there are, nor of what their controller alone does."""
    cluster = msgspec.to_builtins(config.cluster)
    for name in NOT_OF_WORKERS:
        del cluster[name]
    scaling = config.scaling.enabled
    parts: list[Any] = [config.model, config.engine, config.tiers, config.tls, cluster]
    parts += [config.state, scaling, *([config.models] if config.models else [])]
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

    def _keep(self, name: str, record: Any) -> None:
        """Nothing: the next server of the cluster may be on another machine."""

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
    public = Config(
        model=config.model, engine=config.engine, tiers=config.tiers, models=config.models
    )
    return SharedLife(path, LifeRecord(cluster, token, workers_of(public)), server)
