"""LoRA adapters as PEFT saves them: found, read and named by what they hold.

An adapter is a folder with `adapter_config.json` and `adapter_model.safetensors`. Its digest is one
of every byte of both; it is in the name of each KV block that is computed with it
(`engine.kv.block_hash`), so KV of two adapters cannot meet, whatever they are called.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from kvrelay.engine.needs import Need, NeedError

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
DIGEST_BYTES = 32
MAX_BYTES = 8 << 30
MAX_CONFIG_BYTES = 1 << 20

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


class AdapterError(NeedError):
    """An adapter cannot be used; one line that says why, and not where it lies: clients read it
    too. Who speaks to an operator puts the path before it."""


Adapter = partial(Need, kind="adapter")
"""An adapter by its digest, and the folder where it can be read."""


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
    return parse_config(read_file(folder, CONFIG_NAME, MAX_CONFIG_BYTES))


def read_adapter(folder: Path, most: int = MAX_BYTES) -> AdapterFiles:
    """Reads both files, the second of at most `most` bytes, and checks the first. Raises
    AdapterError."""
    config = read_file(folder, CONFIG_NAME, MAX_CONFIG_BYTES)
    scaling = parse_config(config)
    weights = read_file(folder, WEIGHTS_NAME, most)
    digest = begin_digest(config)
    digest.update(weights)
    return AdapterFiles(digest.digest(), scaling, config, weights)


def begin_digest(config: bytes) -> Any:
    """Returns the digest of both files, to which the weights are still to be given."""
    digest = blake2b(len(config).to_bytes(8, "little"), digest_size=DIGEST_BYTES)
    digest.update(config)
    return digest


def read_file(folder: Path, name: str, most: int) -> bytes:
    """Raises AdapterError as `open_file` does."""
    with open_file(folder / name, most) as file:
        return file.read()


def open_file(path: Path, most: int) -> IO[bytes]:
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


def parse_config(text: bytes) -> Scaling:
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
