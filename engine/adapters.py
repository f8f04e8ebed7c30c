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
from hashlib import blake2b
from pathlib import Path
from typing import Any

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
DIGEST_BYTES = 32
MAX_BYTES = 8 << 30
MAX_CONFIG_BYTES = 1 << 20

_OFF: dict[str, tuple[Any, ...]] = {  # fields of the config, and what they may be
    "bias": ("none",),
    "use_dora": (False,),
    "modules_to_save": ([],),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "trainable_token_indices": ([], {}),
    "alora_invocation_tokens": ([],),
    "target_parameters": ([],),
    "layer_replication": ([],),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "arrow_config": ({},),
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")  # ways to begin that change the base weights


class AdapterError(Exception):
    """An adapter cannot be used; one line that says why."""


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
    """What the product of an adapter's two matrices is multiplied by."""

    alpha: float
    by_rank_root: bool  # rsLoRA
    alphas: tuple[tuple[str, float], ...] = ()  # by patterns of module names

    def of(self, module: str, rank: int) -> float:
        """PEFT looks for the first pattern that the end of the name matches."""
        found = (a for key, a in self.alphas if re.match(rf"(.*\.)?({key})$", module))
        alpha = next(found, self.alpha)
        return alpha / (math.sqrt(rank) if self.by_rank_root else rank)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """What was read of an adapter, all at once: the bytes that were hashed are those in use."""

    digest: bytes
    scaling: Scaling
    weights: bytes


def read_adapter(folder: Path) -> AdapterFiles:
    """Reads both files and checks the first. Raises AdapterError."""
    config = _read(folder, CONFIG_NAME, MAX_CONFIG_BYTES)
    scaling = _scaling(folder, config)
    weights = _read(folder, WEIGHTS_NAME, MAX_BYTES)
    digest = blake2b(len(config).to_bytes(8, "little"), digest_size=DIGEST_BYTES)
    digest.update(config)
    digest.update(weights)
    return AdapterFiles(digest.digest(), scaling, weights)


def _read(folder: Path, name: str, most: int) -> bytes:
    path = folder / name
    try:
        size = path.stat().st_size
        if size > most:
            raise AdapterError(f"{path} has {size} bytes, at most {most} are read")
        return path.read_bytes()
    except OSError as error:
        hint = ""
        if name == WEIGHTS_NAME and (folder / "adapter_model.bin").exists():
            hint = "; adapter_model.bin is not read, save the adapter as safetensors"
        why = error.strerror or type(error).__name__
        raise AdapterError(f"{path} cannot be read: {why}{hint}") from None


def _scaling(folder: Path, text: bytes) -> Scaling:
    """Raises AdapterError for what is no LoRA, or of a kind that is not handled."""
    path = folder / CONFIG_NAME
    try:
        config = json.loads(text)
    except ValueError as error:
        raise AdapterError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{path} has no object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type is {config.get('peft_type')!r}, LORA is needed")
    for name, allowed in _OFF.items():
        value = config.get(name)
        if value is not None and value not in allowed:
            raise AdapterError(f"{path}: {name} = {value!r} is not handled, {allowed[0]!r} is")
    began = config.get("init_lora_weights")
    if isinstance(began, str) and began.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            f"{path}: init_lora_weights = {began!r} changes the model's own weights; convert the"
            " adapter to plain LoRA first (path_initial_model_for_weight_conversion of PEFT)"
        )
    alpha: Any
    alpha, rank, patterns = config.get("lora_alpha"), config.get("r"), config.get("alpha_pattern")
    for name, value in {"lora_alpha": alpha, "r": rank}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise AdapterError(f"{path}: {name} = {value!r}, a positive number is needed")
    try:
        alphas = tuple((re.compile(key).pattern, float(a)) for key, a in (patterns or {}).items())
    except (re.error, TypeError, ValueError, AttributeError):
        raise AdapterError(
            f"{path}: alpha_pattern = {patterns!r} has no names and numbers"
        ) from None
    return Scaling(float(alpha), bool(config.get("use_rslora")), alphas)
