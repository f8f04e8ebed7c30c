"""What a worker publishes about its prefix cache, and how a router's index keeps up.

Events of one worker carry its epoch (a new one per start) and a sequence number without gaps. A
router that sees a gap asks for a snapshot; a snapshot at `seq` includes every event up to it.

A snapshot of a large cache would not fit into a frame, nor into the queue to a router. So it holds
some blocks only; the others follow as events, a few at every tick, as far as they are still held.
Other routers get these too, and know them already; one that misses an event asks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.tier import Retention, Tier, TierHashes
from kvrelay.engine.node import Effect, NodeId, Send
from kvrelay.engine.wire.codec import register


@dataclass(frozen=True, slots=True)
class KVEvents:
    """Net change of the sets of sealed blocks since event `seq - 1`; no hash is in both lists.

    `stored` and `removed` are of device memory, `tiers` of host memory and disk. What is in the
    object store stands apart: not every version knows that tier."""

    worker: NodeId
    epoch: int
    seq: int
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    tiers: tuple[TierHashes, ...] = ()
    stored_objects: tuple[bytes, ...] = ()
    removed_objects: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """Every sealed block of the worker as of event `seq`."""

    worker: NodeId
    epoch: int
    seq: int
    hashes: tuple[bytes, ...]
    tiers: tuple[TierHashes, ...] = ()  # blocks in host memory and on disk; nothing is `removed`
    stored_objects: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class KVSnapshotRequest:
    """To a worker: send `router` a `KVSnapshot`."""

    router: NodeId


register(KVEvents, KVSnapshot, KVSnapshotRequest)


EVENTS_PER_TICK = 4  # that bring the rest of a snapshot


class SealedBlocks(Protocol):
    """The blocks in device memory that are published."""

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]: ...
    def is_cached(self, block_hash: bytes) -> bool: ...
    def block_hashes(self) -> tuple[bytes, ...]: ...


class LowerTiers(Protocol):
    """The tiers below device memory, as far as their contents are published."""

    def take_changes(self) -> tuple[TierHashes, ...]: ...
    def snapshot(self) -> tuple[TierHashes, ...]: ...
    def holds(self, tier: Tier, block_hash: bytes) -> bool: ...
    def num_blocks(self, tier: Tier) -> int: ...
    def num_lacking(self, tier: Tier) -> int: ...
    def used_bytes(self, tier: Tier) -> int: ...
    def use(self, now: float, block_hashes: Sequence[bytes], retention: Retention) -> None: ...


class KVPublisher:
    """Owned by a worker's core. Invariant: `_rest` has the blocks that were held at the last
    snapshot and that a router which asked for it, or for one before, may not know of."""

    def __init__(self, config: WorkerConfig, pool: SealedBlocks) -> None:
        self._config = config
        self._pool = pool
        self.lower: LowerTiers | None = None
        self.routers: list[NodeId] = []
        self.event_seq = 0  # last one that was sent
        self._rest: deque[tuple[Tier, bytes]] = deque()
        self._num_due = 0  # events that bring more of it

    def subscribe(self, router: NodeId) -> list[Effect]:
        """`router` gets all events from now on, after a snapshot."""
        if router not in self.routers:
            self.routers.append(router)
        return self.snapshot(router)

    def unsubscribe(self, router: NodeId) -> None:
        if router in self.routers:
            self.routers.remove(router)

    def tick(self) -> None:
        """More of the last snapshot is due."""
        self._num_due = EVENTS_PER_TICK

    def publish(self) -> list[Effect]:
        """What has changed since the last call, and then what is due, to all routers."""
        stored, removed = self._pool.take_changes()
        tiers = self.lower.take_changes() if self.lower is not None else ()
        effects = self._event(stored, removed, tiers) if stored or removed or tiers else []
        # Only now: what was not held at a moment between two events may be held at the next one.
        num_due, self._num_due = self._num_due, 0
        for _ in range(num_due):
            if not self._rest:
                break
            count = min(self._config.max_snapshot_blocks, len(self._rest))
            part = [self._rest.popleft() for _ in range(count)]
            held = _by_tier(each for each in part if self._holds(*each))
            stored = held.pop(Tier.DEVICE, ())
            tiers = tuple(TierHashes(tier, hashes) for tier, hashes in held.items())
            effects += self._event(stored, (), tiers)
        return effects

    def _holds(self, tier: Tier, block_hash: bytes) -> bool:
        if tier is Tier.DEVICE:
            return self._pool.is_cached(block_hash)
        return self.lower is not None and self.lower.holds(tier, block_hash)

    def _event(
        self,
        stored: tuple[bytes, ...],
        removed: tuple[bytes, ...],
        tiers: tuple[TierHashes, ...],
    ) -> list[Effect]:
        config = self._config
        self.event_seq += 1
        about = config.node_id, config.epoch, self.event_seq
        tiers, objects = _apart(tiers)
        event = KVEvents(*about, stored, removed, tiers, objects.stored, objects.removed)
        return [Send(router, event) for router in self.routers]

    def snapshot(self, router: NodeId) -> list[Effect]:
        """What is held now, as far as it fits; the rest follows as events."""
        config, tiers = self._config, self.lower.snapshot() if self.lower is not None else ()
        parts = (TierHashes(Tier.DEVICE, self._pool.block_hashes()), *tiers)
        blocks = ((part.tier, block_hash) for part in parts for block_hash in part.stored)
        first = list(islice(blocks, config.max_snapshot_blocks))
        # A router that has all events so far, but not yet the rest of the last snapshot, has no use
        # for this one: what that rest would have announced to it comes again.
        self._rest = deque([*blocks, *(first if self._rest else ())])
        announced = _by_tier(first)
        hashes = announced.pop(Tier.DEVICE, ())
        tiers = tuple(TierHashes(part.tier, announced.get(part.tier, ())) for part in tiers)
        tiers, objects = _apart(tiers)
        about = config.node_id, config.epoch, self.event_seq
        held = KVSnapshot(*about, hashes, tiers, objects.stored)
        return [Send(router, held)]


def _apart(tiers: Iterable[TierHashes]) -> tuple[tuple[TierHashes, ...], TierHashes]:
    """Those of the worker's own tiers, and what is in the object store."""
    objects = TierHashes(Tier.OBJECT, ())
    own = []
    for part in tiers:
        if part.tier is Tier.OBJECT:
            objects = part
        else:
            own.append(part)
    return tuple(own), objects


def _by_tier(blocks: Iterable[tuple[Tier, bytes]]) -> dict[Tier, tuple[bytes, ...]]:
    found: dict[Tier, list[bytes]] = {}
    for tier, block_hash in blocks:
        found.setdefault(tier, []).append(block_hash)
    return {tier: tuple(hashes) for tier, hashes in found.items()}
