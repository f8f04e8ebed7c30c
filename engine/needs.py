"""What a request needs of the worker that computes it, beside the model: loaded there before its
first step, and part of the names of its KV. Routers, schedulers, batches and kernels know no more
of it than is here; what it is, its own module says (`engine.adapters`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrelay.engine.kv.scope import CacheScope

KEY_BYTES = 8


class NeedError(Exception):
    """What a request needs cannot be loaded; one line that says why, for clients too."""


@dataclass(frozen=True, slots=True)
class Need:
    """By what it holds, and where that can be read. A kind of need says who shares the KV."""

    kind: ClassVar[str] = ""  # what it is, in a word
    room: ClassVar[str] = ""  # the setting that says how much of them a worker holds
    unserved: ClassVar[str] = ""  # why nobody computes with it, where workers load none

    digest: bytes
    source: str

    @property
    def key(self) -> int:
        """Its number where workers and requests are matched; never 0."""
        return key_of(self.digest)

    def scoped(self, scope: CacheScope) -> CacheScope:
        """Who may share KV that is computed with it, out of those in `scope`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a worker has in memory, and how long it takes to load one, on average; 0: not known."""

    digests: tuple[bytes, ...] = ()
    load_s: float = 0.0


def key_of(digest: bytes) -> int:
    """Returns the key of what has this digest."""
    return int.from_bytes(digest[:KEY_BYTES]) or 1
