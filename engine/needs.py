"""What a request needs of the worker that computes it, beside the model: loaded there before its
first step, and part of the names of its KV. Routers, schedulers, batches and kernels know no more
of it than is here; what it is, its own module says (`engine.adapters`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.engine.kv.scope import CacheScope

KEY_BYTES = 8


class NeedError(Exception):
    """What a request needs cannot be loaded; one line that says why, for clients too."""


@dataclass(frozen=True, slots=True)
class Need:
    """By what it holds, and where that can be read."""

    digest: bytes
    source: str  # a folder
    kind: str  # what it is, in a word: engine.KIND_bytes is how much a worker holds

    def scoped(self, scope: CacheScope) -> CacheScope:
        """What is computed with it is shared with nothing that is not: a digest of all its bytes is
        part of the salt. No region of it is public."""
        salt = blake2b(scope.salt, digest_size=32, key=self.digest, person=b"kvrelay-need")
        return replace(scope, salt=scope.public_salt + salt.digest(), num_public_tokens=0)


def key_of(digest: bytes) -> int:
    """The number by which workers and requests are matched; never 0."""
    return int.from_bytes(digest[:KEY_BYTES]) or 1


def unserved(kind: str) -> str:
    """Why nobody computes with a kind of needs, where workers load none."""
    return f"the model's workers compute no {kind}s: docs/matrix.md says which ones do"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a worker has in memory, and how long it takes to load one, on average; 0: not known."""

    digests: tuple[bytes, ...] = ()
    load_s: float = 0.0
