"""Configuration: one TOML file, then the command line, become frozen dataclasses.

Every key has a default, a type and a range. What is unknown or out of range is an error that
names the key, its value and what would be right; nothing is ignored.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

from router.config import MAX_PRIORITY, RouterConfig

S = TypeVar("S")


class ConfigError(Exception):
    """One line for the user: key, value, and what would be right."""


def setting(default: Any, **bounds: Any) -> Any:
    """A field with `at_least`, `at_most`, `one_of` or `matches` (told as `hint`). The value of one
    that is `secret` is not shown."""
    return field(default=default, metadata=bounds)


@dataclass(frozen=True, slots=True)
class ModelSection:
    name: str = setting("smollm2-135m")  # directory, hub id, GGUF file, or a built-in name
    served_name: str = setting("")  # what clients call it; "": derived from `name`
    dtype: str = setting("auto", one_of=("auto", "float32", "bfloat16"))
    quantization: str = setting("none", one_of=("none", "int8"))  # of weights
    device: str = setting("auto", one_of=("auto", "cpu", "cuda"))
    cache_dir: str = setting("")  # for converted and downloaded models; "": the user's cache


@dataclass(frozen=True, slots=True)
class EngineSection:
    block_size: int = setting(16, at_least=1, at_most=1024)  # tokens
    kv_cache_gib: float = setting(1.0, at_least=0.0, at_most=4096.0)  # per worker
    num_blocks: int = setting(0, at_least=0)  # per worker; 0: as many as kv_cache_gib holds
    cuda_graphs: bool = setting(True)  # on a GPU: decode steps are captured at the start
    tensor_parallel_size: int = setting(1, at_least=1, at_most=64)  # processes of a worker
    kv_dtype: str = setting("auto", one_of=("auto", "float8_e4m3"))  # auto: as model.dtype
    window: int = setting(0, at_least=0)  # positions that are attended to; 0: as the model says
    sinks: int = setting(0, at_least=0)  # first positions that are attended to besides
    guard: bool = setting(True)  # block tables are compared before each step; False: ranges only
    max_num_batched_tokens: int = setting(512, at_least=1, at_most=1 << 20)  # per step
    # Of decode workers: prompts beside decodes are fed as far as a step stays below it. 0: 100 ms
    # where prefill workers are there for the prompts, none in one pool.
    itl_target_ms: float = setting(0.0, at_least=0.0, at_most=60_000.0)
    max_num_seqs: int = setting(64, at_least=1, at_most=4096)  # per step
    # Speculative decoding: guesses at most that a sequence is fed along with its token, as far as
    # they pay; tokens are the same. 0: none.
    num_speculative_tokens: int = setting(7, at_least=0, at_most=64)
    max_model_len: int = setting(0, at_least=0)  # tokens; 0: the model's, as far as KV holds it
    max_waiting: int = setting(256, at_least=1)  # requests per worker
    threads: int = setting(0, at_least=0, at_most=1024)  # per worker; 0: share the cores
    lease_s: float = setting(30.0, at_least=0.1)
    handoff_timeout_s: float = setting(30.0, at_least=0.1)
    read_timeout_s: float = setting(20.0, at_least=0.1)


@dataclass(frozen=True, slots=True)
class TiersSection:
    """Where KV is kept below a worker's own pool. Sizes are per machine, shared by its decode
    workers (by its prefill workers where it has no others)."""

    host_gib: float = setting(0.0, at_least=0.0, at_most=65536.0)  # of memory; 0: no host tier
    disk_gib: float = setting(0.0, at_least=0.0, at_most=1048576.0)  # 0: no disk tier
    disk_path: str = setting("")  # a folder on each machine; "": kv in the user's cache
    retention_s: float = setting(3600.0, at_least=0.0)  # after its last use KV is kept this long
    disk_after_s: float = setting(2.0, at_least=0.0)  # what was idle this long is written to disk


@dataclass(frozen=True, slots=True)
class SessionsSection:
    park_after_s: float = setting(30.0, at_least=0.0)  # without a turn; 0: never by itself
    max_sessions: int = setting(10_000, at_least=1)
    max_per_tenant: int = setting(2_000, at_least=1)
    max_tokens: int = setting(64_000_000, at_least=1)  # of all together; each takes 4 bytes
    order_timeout_s: float = setting(10.0, at_least=0.1)  # workers have this long to park, resume
    durable: bool = setting(True)  # they outlive the server, in the state directory
    state_dir: str = setting("")  # "": kvrelay in the user's state directory

    @property
    def state_path(self) -> Path:
        """The directory for what has to be there again after a restart, and is not KV."""
        if self.state_dir:
            return Path(self.state_dir).expanduser()
        base = os.environ.get("XDG_STATE_HOME", "")
        return (Path(base) if base else Path.home() / ".local" / "state") / "kvrelay"


@dataclass(frozen=True, slots=True)
class TenantEntry:
    """A `[[tenant]]`: whoever presents one of its keys."""

    name: str = setting("", matches=r"\S(.{0,126}\S)?", hint="a name of 1 to 128 characters")
    keys: tuple[str, ...] = setting((), secret=True)
    key_hashes: tuple[str, ...] = setting((), secret=True)  # SHA-256 of keys, in hex
    weight: float = setting(1.0, at_least=0.01, at_most=1000.0)  # its part where tenants compete
    max_concurrent: int = setting(0, at_least=0)  # requests that are served at once; 0: any number
    max_queued: int = setting(0, at_least=0)  # requests that wait; 0: any number
    # The lowest number, which is served first, that its requests may ask for.
    min_priority: int = setting(0, at_least=-MAX_PRIORITY, at_most=MAX_PRIORITY)


@dataclass(frozen=True, slots=True)
class TenantsSection:
    file: str = setting("")  # a TOML file with more [[tenant]]s
    salt_secret: str = setting(
        "", matches=r"|.{16,}", hint="at least 16 characters", secret=True
    )  # "": one is made, and kept in the state directory
    public_prompts: tuple[str, ...] = setting(())  # system prompts whose KV all tenants may share
    public_prompt_files: tuple[str, ...] = setting(())  # files with one each


@dataclass(frozen=True, slots=True)
class ApiSection:
    host: str = setting("127.0.0.1")
    port: int = setting(8000, at_least=0, at_most=65535)  # 0: any that is free
    max_body_bytes: int = setting(8 << 20, at_least=1024)
    max_live_requests: int = setting(4096, at_least=1)  # beyond it 429
    request_timeout_s: float = setting(600.0, at_least=0.1)


@dataclass(frozen=True, slots=True)
class StateSection:
    """Where several routers share what they know, and where it outlives them."""

    url: str = setting(
        "",
        matches=r"|(redis|rediss)://[^\s/]+\S*|unix://\S+",
        hint="redis://HOST:PORT, rediss://HOST:PORT or unix://PATH",
        secret=True,
    )  # of Redis or Valkey; "": KVRELAY_REDIS_URL, or else memory, and a file for sessions
    key_prefix: str = setting("kvrelay", matches=r"[\w.-]{1,64}", hint="letters, digits, . _ or -")
    index_interval_s: float = setting(5.0, at_least=0.1, at_most=3600.0)
    timeout_s: float = setting(2.0, at_least=0.05, at_most=60.0)  # of each command


@dataclass(frozen=True, slots=True)
class ClusterSection:
    prefill: int = setting(1, at_least=0, at_most=10_000)  # workers; 0: one pool does both
    decode: int = setting(1, at_least=1, at_most=10_000)
    routers: int = setting(1, at_least=1, at_most=64)  # each with an API, at ports in a row
    address: str = setting(
        "", matches=r"|auto|.+:\d{1,5}", hint="auto or HOST:PORT"
    )  # of a running Ray cluster; "": start one
    start_timeout_s: float = setting(180.0, at_least=1.0)
    max_frame_mib: int = setting(64, at_least=1, at_most=1024)


@dataclass(frozen=True, slots=True)
class TracingSection:
    endpoint: str = setting(
        "", matches=r"|https?://[^\s/]+\S*", hint="http://HOST:PORT of an OTLP/HTTP collector"
    )  # "": no traces
    sample: float = setting(1.0, at_least=0.0, at_most=1.0)  # of calls without a traceparent


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelSection = field(default_factory=ModelSection)
    engine: EngineSection = field(default_factory=EngineSection)
    tiers: TiersSection = field(default_factory=TiersSection)
    sessions: SessionsSection = field(default_factory=SessionsSection)
    tenants: TenantsSection = field(default_factory=TenantsSection)
    tenant: tuple[TenantEntry, ...] = ()
    api: ApiSection = field(default_factory=ApiSection)
    state: StateSection = field(default_factory=StateSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    router: RouterConfig = field(default_factory=RouterConfig)
    tracing: TracingSection = field(default_factory=TracingSection)


def load_config(path: Path | None, overrides: Mapping[str, Any]) -> Config:
    """The file's settings (none without a file), then `overrides` ("section.key" -> value; None
    means not given). Raises ConfigError."""
    tables = {} if path is None else read_toml(path)
    config = build_section(Config(), tables, str(path or "configuration"), "")
    given = {key: value for key, value in overrides.items() if value is not None}
    for key, value in given.items():
        section, _, name = key.partition(".")
        changed = build_section(getattr(config, section), {name: value}, "command line", section)
        config = replace(config, **{section: changed})
    return config if path is None else _resolve_paths(config, path.parent)


def _resolve_paths(config: Config, folder: Path) -> Config:
    """What the file names beside itself is found from wherever the server is started."""
    tenants = config.tenants
    resolved = replace(
        tenants,
        file=str(folder / tenants.file) if tenants.file else "",
        public_prompt_files=tuple(str(folder / name) for name in tenants.public_prompt_files),
    )
    return replace(config, tenants=resolved)


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


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
        elif types[key] == tuple[TenantEntry, ...]:
            changes[key] = build_tenants(value, where)
        else:
            complaint = _complaint(types[key], known[key].metadata, value)
            if complaint:
                shown = "..." if known[key].metadata.get("secret") else repr(value)
                raise ConfigError(f"{where}: {name} = {shown}: {complaint}")
            changes[key] = (get_origin(types[key]) or types[key])(value)
    try:
        return replace(section, **changes)  # type: ignore[type-var]
    except ValueError as error:  # the section's own checks
        raise ConfigError(f"{where}: {error}") from error


def build_tenants(tables: Any, where: str) -> tuple[TenantEntry, ...]:
    """The `[[tenant]]`s of a file. Raises ConfigError."""
    if not isinstance(tables, list):
        raise ConfigError(f"{where}: tenant: expected tables, each beginning with [[tenant]]")
    entries = []
    for number, table in enumerate(tables, start=1):
        prefix = f"tenant {number}"
        entry = build_section(TenantEntry(), table, where, prefix)
        if not entry.name:
            raise ConfigError(f"{where}: {prefix}.name is missing")
        if not entry.keys and not entry.key_hashes:
            raise ConfigError(f"{where}: {prefix} ({entry.name}) has neither keys nor key_hashes")
        entries.append(entry)
    return tuple(entries)


_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _complaint(wanted: type, bounds: Mapping[str, Any], value: Any) -> str:
    """What is wrong with `value`, and what would be right; empty if nothing is."""
    if get_origin(wanted) is tuple:
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return "" if is_list else "expected a list of texts"
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
