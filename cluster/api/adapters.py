"""Adapters by the names that clients have for them: `[[adapters]]` of the settings, and those that
operators register while the server serves (`/v1/adapters`, and vLLM's two routes).

A name stands for bytes: an adapter that is registered again with other bytes is another one, which
shares no KV with the one before; requests that run go on with the one that they began with.

What is registered is in a file of the state directory, which all routers of a machine read again
when it changes, and which outlives the server.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvrelay.cluster.api.errors import invalid
from kvrelay.cluster.config import AdapterEntry, ConfigError
from kvrelay.engine.adapters import CONFIG_NAME, WEIGHTS_NAME, Adapter, AdapterError, read_adapter
from kvrelay.engine.files import write_private

FILE = "adapters.json"
MAX_ADAPTERS = 10_000
HUB_TIMEOUT_S = 10.0


class _Kept(msgspec.Struct, frozen=True):
    """An adapter as the file has it; no source: one of the settings that was removed."""

    source: str = ""
    digest: bytes = b""


_decode = msgspec.json.Decoder(dict[str, _Kept]).decode


def find_folder(source: str) -> Path:
    """The folder that `source` is, or what the hub has by this name. Raises AdapterError."""
    path = Path(source).expanduser()
    if path.is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        return path.absolute()
    from huggingface_hub import snapshot_download

    try:
        wanted = [CONFIG_NAME, WEIGHTS_NAME]
        found = snapshot_download(source, allow_patterns=wanted, etag_timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the hub's own, of many kinds
        why = str(error).splitlines()[0]
        raise AdapterError(f"{source} is no folder, and not had from the hub: {why}") from error
    return Path(found)


def read_named(source: str) -> Adapter:
    """Finds and reads an adapter. Raises AdapterError."""
    folder = find_folder(source)
    return Adapter(read_adapter(folder).digest, str(folder))


class Adapters:
    """Owned by the API of one router. Invariant: `_kept` is what the file had when it was last
    looked at."""

    def __init__(
        self, fixed: Mapping[str, Adapter] | None = None, file: Path | None = None
    ) -> None:
        """fixed: of the settings; file: None: what is registered is forgotten at the end."""
        self._fixed, self._file = dict(fixed or {}), file
        self._kept: dict[str, _Kept] = {}
        self._stamp: tuple[int, ...] | None = None

    @staticmethod
    def open(entries: Sequence[AdapterEntry], file: Path) -> Adapters:
        """Reads the adapters of the settings. Raises ConfigError."""
        fixed: dict[str, Adapter] = {}
        for entry in entries:
            try:
                fixed[entry.name] = read_named(entry.path)
            except AdapterError as error:
                raise ConfigError(f"adapters: {entry.name}: {error}") from None
        return Adapters(fixed, file)

    def all(self) -> dict[str, Adapter]:
        """Returns those that are there now, by name."""
        self._look()
        found = dict(self._fixed)
        for name, kept in self._kept.items():
            found.pop(name, None)
            if kept.source:
                found[name] = Adapter(kept.digest, kept.source)
        return found

    def find(self, name: str) -> Adapter | None:
        self._look()
        kept = self._kept.get(name)
        if kept is None:
            return self._fixed.get(name)
        return Adapter(kept.digest, kept.source) if kept.source else None

    def add(self, name: str, adapter: Adapter) -> None:
        """In place of one of the same name. Raises OSError."""
        with self._changing():
            if name not in self._kept and len(self._kept) >= MAX_ADAPTERS:
                raise invalid(f"{MAX_ADAPTERS} adapters are registered, the limit")
            self._kept[name] = _Kept(adapter.source, adapter.digest)

    def remove(self, name: str) -> bool:
        """Whether there was one. Raises OSError."""
        with self._changing():
            was_there = self.find(name) is not None
            self._kept.pop(name, None)
            if name in self._fixed:
                self._kept[name] = _Kept()
        return was_there

    def _look(self) -> None:
        """Reads the file again if it has changed. One that is damaged counts for nothing new."""
        if self._file is None:
            return
        try:
            stat = self._file.stat()
            stamp = stat.st_ino, stat.st_mtime_ns, stat.st_size
            if stamp != self._stamp:
                self._kept, self._stamp = _decode(self._file.read_bytes()), stamp
        except FileNotFoundError:
            self._kept, self._stamp = {}, None
        except (OSError, msgspec.DecodeError):
            return

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """One process at a time; the file is replaced whole."""
        if self._file is None:
            yield
            return
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(f"{self._file}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._look()
            yield
            write_private(self._file, msgspec.json.encode(self._kept))
