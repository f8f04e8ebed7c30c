"""Tenants: who may call, what keeps their KV apart, and their shares of the service.

Read when the server starts, and again when they change (`cluster.processes.reload`). A caller is
known by its key alone; its salt is a keyed hash of the tenant's name under a secret of the server,
so nothing that a request says can reach another tenant's KV, and the same tenant finds its own
again after a restart.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from ipaddress import ip_address
from pathlib import Path

from msgspec.structs import replace

from kvrelay.cluster.api.keys.record import ApiKey
from kvrelay.cluster.config import (
    Config,
    ConfigError,
    TenantEntry,
    build_config,
    check_tenants,
    read_toml,
)
from kvrelay.engine.files import NotOwn, given_folder, open_own
from kvrelay.engine.kv.scope import KVKind
from kvrelay.engine.service_class import TIERS, ServiceClass
from kvrelay.engine.settings import OPERATIONS_KEY_FILE
from kvrelay.router.config import MAX_PRIORITY
from kvrelay.router.messages import SessionLimits, TenantShare

API_KEY_VARIABLE = "KVRELAY_API_KEY"
OPERATIONS_KEY_VARIABLE = "KVRELAY_OPERATIONS_KEY"
API_KEY_FILE = "api.key"
SALT_BYTES = 16
SECRET_FILE = "salt.secret"
DEFAULT_TENANT = "default"  # everybody with `api.key`
MAX_PUBLIC_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    salt: bytes
    share: TenantShare = field(default_factory=TenantShare)
    min_priority: int = 0  # the first that its requests may ask for
    requests_per_minute: int = 0  # 0: any number
    tokens_per_minute: int = 0
    kv: KVKind = "exact"  # where a request does not say
    service_class: ServiceClass = ServiceClass.DEFAULT  # likewise
    key: ApiKey | None = None  # by which a call came, if operators have made it


ANONYMOUS = Tenant("", b"", min_priority=-MAX_PRIORITY)
"""Everybody, where no tenants are configured."""


@dataclass(slots=True)
class Tenants:
    """Invariant: no two tenants have the same name, salt or key. Who holds it sees each change."""

    by_hash: dict[bytes, Tenant] = field(default_factory=dict, repr=False)  # of a key: SHA-256

    @classmethod
    def of(cls, entries: Iterable[TenantEntry], secret: bytes) -> Tenants:
        """Raises ConfigError, which names tenants but never shows a key."""
        by_hash: dict[bytes, Tenant] = {}
        names: set[str] = set()
        for entry in entries:
            if entry.name in names:
                raise ConfigError(
                    f"tenant {entry.name!r} is there twice: give it all its keys once"
                )
            names.add(entry.name)
            digest = blake2b(
                entry.name.encode(),
                key=sha256(secret).digest(),
                digest_size=SALT_BYTES,
                person=b"kvrelay-tenant",
            )
            kept = SessionLimits(
                entry.max_sessions, entry.max_session_tokens, entry.max_pinned_tokens
            )
            share = TenantShare(entry.weight, entry.max_concurrent, entry.max_queued, kept)
            tenant = Tenant(
                entry.name,
                digest.digest(),
                share,
                entry.min_priority,
                entry.requests_per_minute,
                entry.tokens_per_minute,
                entry.kv,
                TIERS[entry.service_tier],
            )
            for hashed in _hashes(entry):
                other = by_hash.setdefault(hashed, tenant)
                if other is not tenant:
                    raise ConfigError(
                        f"tenants {other.name!r} and {entry.name!r} have a key in common: "
                        "give each its own"
                    )
        return cls(by_hash)

    @property
    def key_required(self) -> bool:
        return bool(self.by_hash)

    @property
    def are_several(self) -> bool:
        return len({tenant.name for tenant in self.by_hash.values()}) > 1

    def names(self) -> list[str]:
        return sorted({tenant.name for tenant in self.by_hash.values()})

    def update(self, others: Tenants) -> None:
        """From now on these are the tenants. Requests that run are not touched. Raises ConfigError
        if there are none any more, which would open the server to all."""
        if self.key_required and not others.key_required:
            raise ConfigError("there is no [[tenant]] left: restart to serve without keys")
        self.by_hash = others.by_hash

    def named(self, name: str) -> Tenant | None:
        """Finds a tenant by its name. None: there is none, or no longer."""
        known = self.by_hash.values() if self.key_required else (ANONYMOUS,)
        return next((tenant for tenant in known if tenant.name == name), None)

    def find(self, key: str | None) -> Tenant | None:
        """Whose `key` it is; None: unknown. Takes as long whatever the key is."""
        if not self.key_required:
            return ANONYMOUS
        presented = sha256((key or "").encode("utf-8", "surrogatepass")).digest()
        found = None
        for hashed, tenant in self.by_hash.items():
            if hmac.compare_digest(hashed, presented):
                found = tenant
        return found


def _hashes(entry: TenantEntry) -> list[bytes]:
    found = []
    for key in entry.keys:
        if not re.fullmatch(r"[!-~]+", key):
            raise ConfigError(
                f"tenant {entry.name!r}: a key has to be printable ASCII without spaces"
            )
        found.append(sha256(key.encode()).digest())
    for text in entry.key_hashes:
        if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
            raise ConfigError(
                f"tenant {entry.name!r}: a key hash has to be a SHA-256 of 64 hex digits"
            )
        found.append(bytes.fromhex(text))
    return found


def with_keys(config: Config, on_made: Callable[[Path], None] = lambda path: None) -> Config:
    """With the keys that the environment has, so that no file has to hold them, and an API key
    where whoever reaches the address could use the server otherwise. Such a key is made once, and
    `on_made` gets its file then. Raises ConfigError, which shows no key."""
    api = config.api
    operations_key = api.operations_key or os.environ.get(OPERATIONS_KEY_VARIABLE, "")
    build_config({"api": {"operations_key": operations_key}}, OPERATIONS_KEY_VARIABLE)
    key = api.key or os.environ.get(API_KEY_VARIABLE, "")
    build_config({"api": {"key": key}}, API_KEY_VARIABLE)
    if config.tenant or config.tenants.file:
        key = ""
    elif not (key or api.insecure or is_loopback(api.host)):
        path = config.sessions.state_path / API_KEY_FILE
        is_new = not path.exists()
        key = _kept_secret(path, "it is the API's key", "set api.key, [[tenant]] or api.insecure")
        if is_new:
            on_made(path)
    return replace(config, api=replace(api, operations_key=operations_key, key=key))


def made_operations_key(config: Config) -> str:
    """Of operators, where none was given: made once, in the state directory. Raises ConfigError."""
    path = config.sessions.state_path / OPERATIONS_KEY_FILE
    return _kept_secret(path, "it is the operators' key", "set api.operations_key")


def is_loopback(host: str) -> bool:
    """`host`: an address or a name, as a listener has it; "" is every address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call, and what of their prompts is public."""

    tenants: Tenants
    public_prompts: tuple[str, ...]


def load_access(config: Config) -> Access:
    """Raises ConfigError."""
    tenants = load_tenants(config)
    check_tenants(config, tenants.names())
    return Access(tenants, load_public_prompts(config))


def load_tenants(config: Config) -> Tenants:
    """The tenants of the configuration and of its tenants' file. Raises ConfigError."""
    entries = list(config.tenant)
    if config.tenants.file:
        path = Path(config.tenants.file)
        tables = read_toml(path)
        unknown = ", ".join(sorted(tables.keys() - {"tenant"}))
        if unknown:
            raise ConfigError(f"{path}: {unknown}: only [[tenant]] may be in a tenants' file")
        entries += build_config(tables, str(path)).tenant
        if not entries:  # else a file that was emptied would open the server to all
            raise ConfigError(f"{path}: there is no [[tenant]] in it")
    if not entries and config.api.key:
        keys = tuple(config.api.key.split())
        entries.append(TenantEntry(DEFAULT_TENANT, keys, min_priority=-MAX_PRIORITY))
    if not entries:
        return Tenants()
    path = config.sessions.state_path / SECRET_FILE
    secret = config.tenants.salt_secret or _kept_secret(
        path, "it keeps tenants apart", "set tenants.salt_secret"
    )
    return Tenants.of(entries, secret.encode())


def load_public_prompts(config: Config) -> tuple[str, ...]:
    """Texts whose KV all tenants may share. Raises ConfigError."""
    texts = list(config.tenants.public_prompts)
    for name in config.tenants.public_prompt_files:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{name}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name}: not UTF-8: {error}") from error
        texts.append(text.removesuffix("\n"))
    if not all(texts):
        raise ConfigError("tenants: a public prompt is empty: write its text, or leave it out")
    if len(texts) > MAX_PUBLIC_PROMPTS:
        raise ConfigError(
            f"tenants: there are {len(texts)} public prompts: expected at most {MAX_PUBLIC_PROMPTS}"
        )
    return tuple(texts)


def _kept_secret(path: Path, purpose: str, instead: str) -> str:
    """A secret of this installation: made once, and then the same for ever. Raises ConfigError."""
    try:
        given_folder(path.parent)
        if not path.exists():
            _make_secret(path)
        with open(open_own(path, os.O_RDONLY, private=True), encoding="ascii") as file:
            text = file.read().strip()
    except NotOwn as error:
        raise ConfigError(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}; {purpose}: make it readable, or {instead}") from error
    if len(text) < 32:
        raise ConfigError(
            f"{path}: it has {len(text)} characters, at least 32 are expected; {purpose}: restore "
            "it, or delete it to have a new one made"
        )
    return text


def _make_secret(path: Path) -> None:
    """All of it or nothing, and only one, whoever else starts at the same moment."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
