"""Configuration: one TOML file, then the command line, become frozen dataclasses.

Every key has a default, a type and a range. What is unknown or out of range is an error that
names the key, its value and what would be right; nothing is ignored.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from router.config import RouterConfig

S = TypeVar("S")


class ConfigError(Exception):
    """One line for the user: key, value, and what would be right."""


def setting(default: Any, **bounds: Any) -> Any:
    """A field with `at_least`, `at_most`, `one_of` or `matches` (told as `hint`)."""
    return field(default=default, metadata=bounds)


@dataclass(frozen=True, slots=True)
class ModelSection:
    name: str = setting("smollm2-135m")  # directory, hub id, GGUF file, or a built-in name
    served_name: str = setting("")  # what clients call it; "": derived from `name`
    dtype: str = setting("auto", one_of=("auto", "float32", "bfloat16"))
    device: str = setting("auto", one_of=("auto", "cpu", "cuda"))
    cache_dir: str = setting("")  # for converted and downloaded models; "": the user's cache


@dataclass(frozen=True, slots=True)
class EngineSection:
    block_size: int = setting(16, at_least=1, at_most=1024)  # tokens
    kv_cache_gib: float = setting(1.0, at_least=0.0, at_most=4096.0)  # per worker
    num_blocks: int = setting(0, at_least=0)  # per worker; 0: as many as kv_cache_gib holds
    max_num_batched_tokens: int = setting(512, at_least=1, at_most=1 << 20)  # per step
    # Of decode workers: prompts beside decodes are fed as far as a step stays below it. 0: 100 ms
    # where prefill workers are there for the prompts, none in one pool.
    itl_target_ms: float = setting(0.0, at_least=0.0, at_most=60_000.0)
    max_num_seqs: int = setting(64, at_least=1, at_most=4096)  # per step
    max_model_len: int = setting(0, at_least=0)  # tokens; 0: the model's, as far as KV holds it
    max_waiting: int = setting(256, at_least=1)  # requests per worker
    threads: int = setting(0, at_least=0, at_most=1024)  # per worker; 0: share the cores
    lease_s: float = setting(30.0, at_least=0.1)
    handoff_timeout_s: float = setting(30.0, at_least=0.1)
    read_timeout_s: float = setting(20.0, at_least=0.1)


@dataclass(frozen=True, slots=True)
class ApiSection:
    host: str = setting("127.0.0.1")
    port: int = setting(8000, at_least=0, at_most=65535)  # 0: any that is free
    max_body_bytes: int = setting(8 << 20, at_least=1024)
    max_live_requests: int = setting(512, at_least=1)  # beyond it 429
    request_timeout_s: float = setting(600.0, at_least=0.1)


@dataclass(frozen=True, slots=True)
class ClusterSection:
    prefill: int = setting(1, at_least=0, at_most=10_000)  # workers; 0: one pool does both
    decode: int = setting(1, at_least=1, at_most=10_000)
    address: str = setting(
        "", matches=r"|auto|.+:\d{1,5}", hint="auto or HOST:PORT"
    )  # of a running Ray cluster; "": start one
    start_timeout_s: float = setting(180.0, at_least=1.0)
    max_frame_mib: int = setting(64, at_least=1, at_most=1024)


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelSection = field(default_factory=ModelSection)
    engine: EngineSection = field(default_factory=EngineSection)
    api: ApiSection = field(default_factory=ApiSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    router: RouterConfig = field(default_factory=RouterConfig)


def load_config(path: Path | None, overrides: Mapping[str, Any]) -> Config:
    """The file's settings (none without a file), then `overrides` ("section.key" -> value; None
    means not given). Raises ConfigError."""
    tables: dict[str, Any] = {}
    if path is not None:
        try:
            tables = tomllib.loads(path.read_bytes().decode())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: not TOML: {error}") from error
    config = build_section(Config(), tables, str(path or "configuration"), "")
    given = {key: value for key, value in overrides.items() if value is not None}
    for key, value in given.items():
        section, _, name = key.partition(".")
        changed = build_section(getattr(config, section), {name: value}, "command line", section)
        config = replace(config, **{section: changed})
    return config


def build_section(section: S, table: Any, where: str, prefix: str) -> S:
    """`section` with the values of `table`, recursively. Raises ConfigError."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: {prefix} = {table!r}: expected a table, [{prefix}]")
    types = get_type_hints(type(section))
    known = {f.name: f for f in fields(section)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}.{key}" if prefix else key
        if key not in known:
            raise ConfigError(f"{where}: {name} is not a setting{_suggestion(key, known)}")
        current = getattr(section, key)
        if hasattr(current, "__dataclass_fields__"):
            changes[key] = build_section(current, value, where, name)
        else:
            complaint = _complaint(types[key], known[key].metadata, value)
            if complaint:
                raise ConfigError(f"{where}: {name} = {value!r}: {complaint}")
            changes[key] = types[key](value)
    try:
        return replace(section, **changes)  # type: ignore[type-var]
    except ValueError as error:  # the section's own checks
        raise ConfigError(f"{where}: {error}") from error


_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _complaint(wanted: type, bounds: Mapping[str, Any], value: Any) -> str:
    """What is wrong with `value`, and what would be right; empty if nothing is."""
    accepted: tuple[type, ...] = (int, float) if wanted is float else (wanted,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
        return f"expected {_TYPE_NAMES[wanted]}"
    if isinstance(value, float) and not math.isfinite(value):
        return "expected a finite number"
    if "one_of" in bounds and value not in bounds["one_of"]:
        return f"expected one of {', '.join(bounds['one_of'])}"
    if "matches" in bounds and not re.fullmatch(bounds["matches"], str(value)):
        return f"expected {bounds['hint']}"
    if "at_least" in bounds and not value >= bounds["at_least"]:
        return f"expected at least {bounds['at_least']}"
    if "at_most" in bounds and not value <= bounds["at_most"]:
        return f"expected at most {bounds['at_most']}"
    return ""


def _suggestion(key: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(known))}"
