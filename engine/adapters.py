"""LoRA adapters as PEFT saves them: found, read and named by what they hold.

An adapter is a folder with `adapter_config.json` and `adapter_model.safetensors`. Its digest is one
of every byte of both; it is in the name of each KV block that is computed with it
(`engine.kv.block_hash`), so KV of two adapters cannot meet, whatever they are called.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from kvrelay.engine.cache_dir import default_cache_dir

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
DIGEST_BYTES = 32
MAX_BYTES = 8 << 30
MAX_CONFIG_BYTES = 1 << 20
MAX_COPIES_BYTES = 16 << 30  # of adapters, that a machine keeps
CHUNK_BYTES = 4 << 20
LEFT_S = 86_400.0  # a copy that nobody has finished by then, nobody will

_OFF = {"bias": "none", "use_dora": False, "modules_to_save": [], "fan_in_fan_out": False}
"""Fields of the config that change what is computed, and what they have to be. So does every other
that is neither here nor in `_HARMLESS`, wherever it is set."""
_HARMLESS = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "peft_type", "task_type"),
    *("base_model_name_or_path", "auto_mapping", "revision", "peft_version", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("init_lora_weights", "lora_dropout", "megatron_config", "megatron_core", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
    *("qalora_group_size", "ensure_weight_tying", "unsloth_fixed"),
}
# ways to begin that change the base weights
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdapterError(Exception):
    """An adapter cannot be used; one line that says why, and not where it lies: clients read it
    too. Who speaks to an operator puts the path before it."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter by what it holds, and where that can be read."""

    digest: bytes
    source: str  # a folder


@dataclass(frozen=True, slots=True)
class AdaptersHeld:
    """What a worker has in memory, and how long it takes to load one, on average; 0: not known."""

    digests: tuple[bytes, ...] = ()
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the config says of each module: its rank, and what the product of its two matrices is
    multiplied by."""

    rank: int
    alpha: float
    by_rank_root: bool  # rsLoRA
    ranks: tuple[tuple[str, int], ...] = ()  # by patterns of module names, as the next
    alphas: tuple[tuple[str, float], ...] = ()
    base: str = ""  # what it was made for: a path or a name on the hub

    def rank_of(self, module: str) -> int:
        """module: its full name in the model, as model.layers.0.self_attn.q_proj."""
        return int(_found(self.ranks, module, self.rank))

    def of(self, module: str, rank: int) -> float:
        """The factor of a module that has this rank."""
        alpha = _found(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.by_rank_root else rank)


def _found(patterns: tuple[tuple[str, float], ...], module: str, otherwise: float) -> float:
    """PEFT looks for the first pattern that the end of the name matches."""
    return next((v for key, v in patterns if re.match(rf"(.*\.)?({key})$", module)), otherwise)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """What was read of an adapter, all at once: the bytes that were hashed are those in use."""

    digest: bytes
    scaling: Scaling
    config: bytes
    weights: bytes


def read_config(folder: Path) -> Scaling:
    """Reads and checks the config alone. Raises AdapterError."""
    return _scaling(_read(folder, CONFIG_NAME, MAX_CONFIG_BYTES))


def read_adapter(folder: Path, most: int = MAX_BYTES) -> AdapterFiles:
    """Reads both files, the second of at most `most` bytes, and checks the first. Raises
    AdapterError."""
    config = _read(folder, CONFIG_NAME, MAX_CONFIG_BYTES)
    scaling = _scaling(config)
    weights = _read(folder, WEIGHTS_NAME, most)
    digest = _digest_of(config)
    digest.update(weights)
    return AdapterFiles(digest.digest(), scaling, config, weights)


def read_registered(adapter: Adapter, most: int = MAX_BYTES) -> AdapterFiles:
    """The bytes that were registered: the copy of them that this machine has, or else those in the
    folder, of which it gets a copy. Raises AdapterError."""
    kept = copies_dir() / adapter.digest.hex()
    with contextlib.suppress(AdapterError):
        files = read_adapter(kept, most)
        if files.digest == adapter.digest:
            with contextlib.suppress(OSError):
                os.utime(kept)
            return files
    files = read_adapter(Path(adapter.source), most)
    if files.digest != adapter.digest:
        raise AdapterError("its files have changed since it was registered; register it again")
    copy = _Copy(files.config, len(files.weights))
    copy.write(files.weights)
    copy.keep(files.digest)
    return files


def register(folder: Path) -> Adapter:
    """Names an adapter by its bytes, of which this machine keeps a copy: what runs with them ends
    with them, whatever becomes of the folder. Memory holds little of them. Raises AdapterError."""
    config = _read(folder, CONFIG_NAME, MAX_CONFIG_BYTES)
    _scaling(config)
    digest, path = _digest_of(config), folder / WEIGHTS_NAME
    with _open(path, MAX_BYTES) as source:
        copy = _Copy(config, path.stat().st_size)
        try:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
        except OSError as error:
            copy.drop()
            raise AdapterError(f"{WEIGHTS_NAME} cannot be read: {error.strerror}") from None
    copy.keep(digest.digest())
    return Adapter(digest.digest(), str(folder))


def copies_dir() -> Path:
    """Where this machine keeps the bytes of adapters, a folder for each, named by its digest."""
    return default_cache_dir() / "adapters"


class _Copy:
    """One that is being made. Where there is no room for it, or no folder, there is none, and
    nobody is the worse for it until the adapter's own folder changes."""

    def __init__(self, config: bytes, size: int) -> None:
        self._fresh: Path | None = None
        self._file: IO[bytes] | None = None
        with contextlib.suppress(OSError):
            copies = copies_dir()
            copies.mkdir(parents=True, exist_ok=True, mode=0o700)
            if size <= MAX_COPIES_BYTES and 2 * size < shutil.disk_usage(copies).free:
                self._fresh = Path(tempfile.mkdtemp(dir=copies, prefix=".fresh-"))
                (self._fresh / CONFIG_NAME).write_bytes(config)
                self._file = (self._fresh / WEIGHTS_NAME).open("wb")

    def write(self, part: bytes) -> None:
        try:
            if self._file is not None:
                self._file.write(part)
        except OSError:
            self.drop()

    def keep(self, digest: bytes) -> None:
        """Puts it in its place, whole, and drops those that were not used for the longest."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
                assert self._fresh is not None
                kept = self._fresh.with_name(digest.hex())
                if not kept.exists():
                    self._fresh.rename(kept)
                os.utime(kept)
                _drop_old(kept)
        self.drop()

    def drop(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        if self._fresh is not None:
            shutil.rmtree(self._fresh, ignore_errors=True)
        self._fresh = self._file = None


def _drop_old(newest: Path) -> None:
    """Copies beyond MAX_COPIES_BYTES, and what a process that died has left of one. Raises
    OSError."""
    found = sorted(newest.parent.iterdir(), key=lambda each: -each.stat().st_mtime_ns)
    total = 0
    for each in found:
        total += sum(file.stat().st_size for file in each.iterdir())
        is_left = each.name.startswith(".") and time.time() - each.stat().st_mtime > LEFT_S
        if each != newest and (is_left or total > MAX_COPIES_BYTES):
            shutil.rmtree(each, ignore_errors=True)


def _digest_of(config: bytes) -> Any:
    """Of both files, to which the weights are still to be given."""
    digest = blake2b(len(config).to_bytes(8, "little"), digest_size=DIGEST_BYTES)
    digest.update(config)
    return digest


def _read(folder: Path, name: str, most: int) -> bytes:
    with _open(folder / name, most) as file:
        return file.read()


def _open(path: Path, most: int) -> IO[bytes]:
    """Raises AdapterError where the file has more than `most` bytes, or cannot be read."""
    name = path.name
    try:
        size = path.stat().st_size
        if size > most:
            raise AdapterError(f"{name} has {size} bytes, at most {most} are read")
        return path.open("rb")
    except OSError as error:
        hint = ""
        if name == WEIGHTS_NAME and path.with_name("adapter_model.bin").exists():
            hint = "; adapter_model.bin is not read, save the adapter as safetensors"
        why = error.strerror or type(error).__name__
        raise AdapterError(f"{name} cannot be read: {why}{hint}") from None


def _scaling(text: bytes) -> Scaling:
    """Raises AdapterError for what is no LoRA, or of a kind that is not handled."""
    path = CONFIG_NAME
    try:
        config = json.loads(text)
    except ValueError as error:
        raise AdapterError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{path} has no object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type is {config.get('peft_type')!r}, LORA is needed")
    for name, value in config.items():
        wanted = _OFF.get(name)
        if name not in _HARMLESS and value and value != wanted:
            other = f", {wanted!r} is" if name in _OFF else "; leave it out"
            raise AdapterError(f"{path}: {name} = {value!r} is not handled{other}")
    began = config.get("init_lora_weights")
    if isinstance(began, str) and began.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            f"{path}: init_lora_weights = {began!r} changes the model's own weights; convert the"
            " adapter to plain LoRA first (path_initial_model_for_weight_conversion of PEFT)"
        )
    alpha, rank = config.get("lora_alpha"), config.get("r")
    for name, value in {"lora_alpha": alpha, "r": rank}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise AdapterError(f"{path}: {name} = {value!r}, a positive number is needed")
    assert isinstance(alpha, int | float)
    assert isinstance(rank, int | float)
    alphas, ranks = _patterns(config, "alpha_pattern"), _patterns(config, "rank_pattern")
    base = config.get("base_model_name_or_path")
    return Scaling(
        int(rank),
        float(alpha),
        bool(config.get("use_rslora")),
        tuple((key, int(value)) for key, value in ranks),
        alphas,
        base if isinstance(base, str) else "",
    )


def _patterns(config: dict[str, Any], name: str) -> tuple[tuple[str, float], ...]:
    """Raises AdapterError where it has no names and numbers."""
    given = config.get(name)
    try:
        return tuple((re.compile(key).pattern, float(a)) for key, a in (given or {}).items())
    except (re.error, TypeError, ValueError, AttributeError):
        raise AdapterError(f"{CONFIG_NAME}: {name} = {given!r} has no names and numbers") from None
