"""Who follows what a router's index comes to know, beside the router: what others are to learn of
the caches (`cluster.events`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.engine.request import RequestSpec


class CacheWatcher(Protocol):
    """Called by the router, at once and in order: each call has to be short. Hashes are packed."""

    def changed(self, worker: NodeId, tier: Tier, stored: bytes, removed: bytes) -> None:
        """What the worker has said it holds in a tier of its own has changed."""

    def forgotten(self, worker: NodeId) -> None:
        """Nothing that the worker has said counts any more: it is gone, has started again, or says
        next all that it holds."""

    def named(
        self, spec: RequestSpec, tokens: Sequence[int], block_hashes: bytes, block_size: int
    ) -> None:
        """The blocks of `tokens`, from the first one on, have these names where a request like
        `spec` is computed. Of `tokens` only so many blocks may be read: more may come later."""
