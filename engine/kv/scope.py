"""Who may share KV: the salt in the root of its names (`engine.kv.block_hash`)."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.engine.adapters import Adapter

APPROXIMATE = b"approximate KV\0\0"  # a salt that begins so; others are digests, or in tests short


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Who may share the KV of a prompt: a salt for each tenant, none for a region that the operator
    has declared public. Set by the server; what a request says can only divide a tenant's."""

    salt: bytes = b""
    num_public_tokens: int = 0  # from the start of the prompt; blocks within are unsalted

    @property
    def is_approximate(self) -> bool:
        """Its KV may be kept in fewer bits. The mark is part of the salt: so processes and records
        of versions that know nothing of it keep its blocks apart as well."""
        return self.salt.startswith(APPROXIMATE)

    @property
    def public_salt(self) -> bytes:
        return APPROXIMATE if self.is_approximate else b""

    def with_adapter(self, adapter: Adapter | None) -> CacheScope:
        """What is computed with an adapter is shared with nothing that is not: a digest of all its
        bytes is part of the salt. No region of it is public."""
        if adapter is None:
            return self
        salt = blake2b(self.salt, digest_size=32, key=adapter.digest, person=b"kvrelay-adapter")
        return CacheScope(self.public_salt + salt.digest())


UNSALTED = CacheScope()
