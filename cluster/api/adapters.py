"""Adapters by the names that clients have for them: `[[adapters]]` of the settings, and those that
operators register while the server serves (`/v1/adapters`, and vLLM's two routes).

A name stands for bytes, and for the model that they were made for: an adapter that is registered
again with other bytes is another one, which shares no KV with the one before; requests that run go
on with the one that they began with. Where its model is not served, or is another one by now, an
adapter is not offered.

What is registered is in a file of the state directory, which all routers of a machine read again
when it changes, and which outlives the server.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath

import msgspec

from kvrelay.cluster.api.errors import invalid
from kvrelay.cluster.config import AdapterEntry, ConfigError
from kvrelay.engine.adapter_copies import register
from kvrelay.engine.adapters import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    Adapter,
    AdapterError,
    read_config,
)
from kvrelay.engine.files import read_json, write_json
from kvrelay.engine.needs import Need

FILE = "adapters.json"
MAX_ADAPTERS = 10_000
HUB_TIMEOUT_S = 10.0


class Registered(msgspec.Struct, frozen=True, omit_defaults=True):
    """An adapter by its name, as the file has it; no source: one of the settings that was
    removed."""

    source: str = ""
    digest: bytes = b""
    model: str = ""  # that it was made for
    base: bytes = b""  # that model's digest when it was registered
    tenants: tuple[str, ...] = ()  # who may use it; empty: whoever may use the model

    @property
    def adapter(self) -> Need:
        return Adapter(self.digest, self.source)


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """A model as its adapters need it."""

    checkpoint: str = ""  # as the settings name it
    digest: Callable[[], bytes] = lambda: b""  # reads files
    # Why its workers will not be able to load the adapter in a folder; "": they will. Takes
    # seconds.
    why_not: Callable[[Path], str] = lambda _: ""
    refuses: Callable[[], str] = lambda: ""  # why they compute no adapters at all; "": they do

    def read(self, source: str, model: str, tenants: tuple[str, ...] = ()) -> Registered:
        """Finds, reads and checks an adapter. `model`: what this one is called. Raises
        AdapterError."""
        if why := self.refuses():
            raise AdapterError(why)
        folder = find_folder(source)
        adapter = register(folder)
        if why := self.why_not(folder):
            raise AdapterError(why)
        return Registered(adapter.source, adapter.digest, model, self.digest(), tenants)


def read_kept(file: Path) -> dict[str, Registered]:
    """What operators have registered. Raises OSError."""
    return read_json(file, dict[str, Registered]) or {}


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


def model_of(source: str, named: str, models: Mapping[str, str]) -> str:
    """Which of `models` (names, and their checkpoints) the adapter at `source` is for: the one that
    is `named`, or else the only one, or that which its config names. Raises AdapterError."""
    there = ", ".join(models)
    if named:
        if named not in models:
            raise AdapterError(f"there is no model {named!r}; there are: {there}")
        return named
    if len(models) == 1:
        return next(iter(models))
    base = read_config(find_folder(source)).base
    fit = [name for name, path in models.items() if _last(path) == _last(base) or name == base]
    if len(fit) != 1:
        stated = (
            f"its base_model_name_or_path is {_last(base)!r}" if base else "it names none itself"
        )
        raise AdapterError(f"say which model it was made for ({there}): {stated}")
    return fit[0]


def _last(path: str) -> str:
    return PurePath(path).name.lower().removesuffix(".gguf")


class Adapters:
    """Those of all models. Owned by the API of one router. Invariant: `_kept` is what the file
    had when it was last looked at."""

    def __init__(
        self, fixed: Mapping[str, Registered] | None = None, file: Path | None = None
    ) -> None:
        """fixed: of the settings; file: None: what is registered is forgotten at the end."""
        self._fixed, self._file = dict(fixed or {}), file
        self._bases: dict[str, bytes] = {}  # digests of models, by their names
        self._kept: dict[str, Registered] = {}
        self._stamp: tuple[int, ...] | None = None

    @staticmethod
    def open(
        entries: Sequence[AdapterEntry], file: Path, models: Mapping[str, AdapterBase]
    ) -> Adapters:
        """Reads the adapters of the settings, which were checked. `models`: by name. Raises
        ConfigError."""
        fixed: dict[str, Registered] = {}
        checkpoints = {name: each.checkpoint for name, each in models.items()}
        for entry in entries:
            if entry.model and entry.model not in models:
                continue  # the model was removed while the server served
            try:
                model = model_of(entry.path, entry.model, checkpoints)
                own = register(find_folder(entry.path))
            except AdapterError as error:
                raise ConfigError(f"adapters: {entry.name}: {entry.path}: {error}") from None
            fixed[entry.name] = Registered(
                own.source, own.digest, model, models[model].digest(), entry.tenants
            )
        adapters = Adapters(fixed, file)
        for name in {each.model for each in adapters.every().values()}:
            if name in models:
                adapters.know_base(name, models[name].digest())
        return adapters

    def know_base(self, model: str, digest: bytes) -> None:
        """Adapters that were registered for this name, and for another digest, are not offered."""
        self._bases[model] = digest

    def every(self) -> dict[str, Registered]:
        """Returns those that there are now, by name, those of models that are not served too."""
        self._look()
        found = self._fixed | self._kept
        return {name: each for name, each in found.items() if each.source}

    def of_model(self, model: str) -> dict[str, Registered]:
        """Returns those that are offered with a model."""
        return {
            name: each
            for name, each in self.every().items()
            if each.model == model and self._fits(each)
        }

    def find(self, name: str) -> Registered | None:
        """The adapter of this name, with its model; None: there is none for what is served."""
        self._look()
        found = self._kept.get(name) or self._fixed.get(name)
        return found if found is not None and found.source and self._fits(found) else None

    def add(self, name: str, new: Registered) -> None:
        """In place of one of the same name and model. Raises OSError, and ApiError (400) where the
        name is another model's adapter's."""
        with self._changing():
            before = self.every().get(name)
            if before is not None and before.model != new.model:
                raise invalid(
                    f"'name': {name!r} is an adapter of {before.model!r} already: take"
                    " another name, or remove that one first",
                    "name",
                )
            if name not in self._kept and len(self._kept) >= MAX_ADAPTERS:
                raise invalid(f"{MAX_ADAPTERS} adapters are registered, the limit")
            self._kept[name] = new
            self._bases[new.model] = new.base

    def remove(self, name: str) -> bool:
        """Whether there was one. Raises OSError."""
        with self._changing():
            was_there = name in self.every()
            self._kept.pop(name, None)
            if name in self._fixed:
                self._kept[name] = Registered()
        return was_there

    def _fits(self, entry: Registered) -> bool:
        return not entry.base or self._bases.get(entry.model, entry.base) == entry.base

    def _look(self) -> None:
        """Reads the file again if it has changed. One that is damaged counts for nothing new."""
        if self._file is None:
            return
        try:
            stat = self._file.stat()
            stamp = stat.st_ino, stat.st_mtime_ns, stat.st_size
            if stamp != self._stamp:
                self._kept, self._stamp = read_kept(self._file), stamp
        except FileNotFoundError:
            self._kept, self._stamp = {}, None
        except OSError:
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
            write_json(self._file, self._kept)
