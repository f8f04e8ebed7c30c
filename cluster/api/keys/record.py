"""A key that operators have made: what it is good for, and until when."""

from __future__ import annotations

import secrets
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple

import msgspec

PREFIX = "sk-kvrelay-"
MAX_KEYS = 10_000  # in one store, revoked and expired ones included
KEEP_S = 30 * 86_400.0  # that a key is still listed after its end
DAY_S = 86_400


class Scope(StrEnum):
    """What a key may be used for."""

    GENERATE = "generate"  # as a tenant's key
    METRICS = "metrics"  # read /metrics and /status
    OPERATE = "operate"  # what operators may, but keys


class ApiKey(msgspec.Struct, frozen=True):
    """Invariant: `hashed` is the SHA-256 of a random key of 256 bits. Times are seconds since 1970;
    limits 0: none."""

    id: str
    name: str
    hashed: str  # hex
    ending: str  # the key's last characters, by which people know it
    scopes: tuple[Scope, ...]
    tenant: str  # whose calls its calls are
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    tokens_per_day: int = 0  # a day begins at midnight UTC

    @property
    def is_limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.tokens_per_day)

    def ended_at(self, now: float) -> float | None:
        """When it was revoked, or has expired. None: it is good."""
        if self.revoked_at is not None:
            return self.revoked_at
        return self.expires_at if self.expires_at is not None and self.expires_at <= now else None

    def state(self, now: float) -> str:
        if self.revoked_at is not None:
            return "revoked"
        return "active" if self.ended_at(now) is None else "expired"


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(secret: str) -> str:
    return sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class Use(NamedTuple):
    """What tokens are counted by. day: since 1970, in UTC. key: "": of the settings, or none."""

    day: int
    tenant: str
    key: str
    model: str


class Counts(NamedTuple):
    """Requests, and tokens of their prompts and outputs."""

    requests: int = 0
    input: int = 0
    cached: int = 0  # included in `input`
    output: int = 0

    def plus(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


class Taken(NamedTuple):
    """What a limited key has of one day."""

    requests: int = 0
    tokens: int = 0

    def plus(self, other: Taken) -> Taken:
        return Taken(self.requests + other.requests, self.tokens + other.tokens)

    def less(self, other: Taken) -> Taken:
        return Taken(self.requests - other.requests, self.tokens - other.tokens)


class Batch(NamedTuple):
    """What a router has to tell the others: since the last one that arrived. number: of the batch,
    by which a store knows one that it has already."""

    number: int
    day: int
    used: dict[Use, Counts]
    taken: dict[str, Taken]  # by key, of that day
    seen_at: dict[str, float]  # when a key was last used
    asked: tuple[str, ...]  # keys of which it wants to know what all have taken that day


class Known(NamedTuple):
    """What the store says to that. version: changes with the keys. keys: None: as before."""

    version: str
    keys: tuple[ApiKey, ...] | None
    taken: dict[str, Taken]
