"""Who may share KV: the salt in the root of its names (`engine.kv.block_hash`)."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

# A salt that begins so; others are digests, or in tests short.
APPROXIMATE = b"approximate KV\0\0"
_QUEST = b"by Quest"
MARK_BYTES = 16

KVKind = Literal["exact", "approximate", "quest"]
"""What KV may be: as it is computed; kept in fewer bits below the device; or, of outputs, computed
by queries that have read some pages of their context alone."""


def quest_mark(budget: float, dense_layers: int) -> bytes:
    """MARK_BYTES, of what such queries read: KV of other settings has other names."""
    return _QUEST + blake2b(f"{budget} {dense_layers}".encode(), digest_size=8).digest()


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
    def kv(self) -> KVKind:
        if self.is_approximate:
            return "approximate"
        return "quest" if self.salt.startswith(_QUEST) else "exact"

    @property
    def public_salt(self) -> bytes:
        return b"" if self.kv == "exact" else self.salt[:MARK_BYTES]


UNSALTED = CacheScope()
