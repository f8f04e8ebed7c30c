"""Who may share KV: the salt in the root of its names (`engine.kv.block_hash`)."""

from __future__ import annotations

from dataclasses import dataclass

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


UNSALTED = CacheScope()
