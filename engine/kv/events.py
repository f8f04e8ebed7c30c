"""What a worker publishes about its prefix cache, and how a router's index keeps up.

Events of one worker carry its epoch (a new one per start) and a sequence number without gaps. A
router that sees a gap asks for a snapshot; a snapshot at `seq` includes every event up to it.

A snapshot of a large cache would not fit into a frame, nor into the queue to a router, and to make
it would hold up whatever else the worker does. So it holds some blocks only; the others follow as
events, some after every SLICE_S, as far as they are still held then. Other routers get these too,
and know them already; one that misses an event asks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.tier import Retention, Tier, TierHashes
from kvrelay.engine.node import Effect, NodeId, Send, Wake
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


SLICE = "slice of a snapshot"  # a wake-up for the next one
SLICE_S = 0.01
MAX_EMPTY = 16  # parts of lower tiers that are passed at a time, if they hold nothing


class SealedBlocks(Protocol):
    """The blocks in device memory that are published."""

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]: ...
    def is_cached(self, block_hash: bytes) -> bool: ...
    def block_hashes(self) -> tuple[bytes, ...]: ...


class LowerTiers(Protocol):
    """The tiers below device memory, as far as their contents are published."""

    def take_changes(self) -> tuple[TierHashes, ...]: ...
    def parts(self, count: int) -> Iterator[TierHashes]: ...
    def holds(self, tier: Tier, block_hash: bytes) -> bool: ...
    def num_blocks(self, tier: Tier) -> int: ...
    def num_lacking(self, tier: Tier) -> int: ...
    def used_bytes(self, tier: Tier) -> int: ...
    def use(self, now: float, block_hashes: Sequence[bytes], retention: Retention) -> None: ...


class KVPublisher:
    """Owned by a worker's core. Invariant: `_rest` will bring what is held and a router that asked
    for a snapshot may not know of: what has come since is in events, so it brings what was there
    when it began, or less."""

    def __init__(self, config: WorkerConfig, pool: SealedBlocks) -> None:
        self._config = config
        self._pool = pool
        self.lower: LowerTiers | None = None
        self.routers: list[NodeId] = []
        self.event_seq = 0  # last one that was sent
        self._rest: Iterator[TierHashes] | None = None
        self._is_waking = False  # a wake-up for more of it will come
        self._is_due = False

    def subscribe(self, router: NodeId) -> list[Effect]:
        """`router` gets all events from now on, after a snapshot."""
        if router not in self.routers:
            self.routers.append(router)
        return self.snapshot(router)

    def unsubscribe(self, router: NodeId) -> None:
        if router in self.routers:
            self.routers.remove(router)

    def on_woken(self) -> None:
        """More of the last snapshot is due: `publish` brings it."""
        self._is_due, self._is_waking = self._rest is not None, False

    def publish(self) -> list[Effect]:
        """What has changed since the last call, and then what is due, to all routers."""
        stored, removed = self._pool.take_changes()
        tiers = self.lower.take_changes() if self.lower is not None else ()
        effects = self._event(stored, removed, tiers) if stored or removed or tiers else []
        if not self._is_due:  # as after most messages
            return effects
        # Only now: what was not held at a moment between two events may be held at the next one.
        self._is_due = False
        for _ in range(MAX_EMPTY):
            if (part := self._next_part()) is None or part.stored:
                break
        if part is not None and part.stored:
            is_device = part.tier is Tier.DEVICE
            effects += self._event(*((part.stored, (), ()) if is_device else ((), (), (part,))))
        return effects + self._wake()

    def _next_part(self) -> TierHashes | None:
        part = next(self._rest, None) if self._rest is not None else None
        if part is None:
            self._rest = None
        return part

    def _wake(self) -> list[Effect]:
        if self._rest is None or self._is_waking:
            return []
        self._is_waking = True
        return [Wake(SLICE_S, SLICE)]

    def _parts(self) -> Iterator[TierHashes]:
        """All that is held, as far as it is still when it is asked for, in parts of one tier. What
        is found now, the names in device memory, takes some 25 ns each."""
        most, names = self._config.max_snapshot_blocks, self._pool.block_hashes()
        device = (
            TierHashes(Tier.DEVICE, names[at : at + most]) for at in range(0, len(names), most)
        )
        return chain(self._held(device), self.lower.parts(most) if self.lower is not None else ())

    def _held(self, parts: Iterable[TierHashes]) -> Iterator[TierHashes]:
        for part in parts:
            held = tuple(each for each in part.stored if self._holds(part.tier, each))
            yield TierHashes(part.tier, held)

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
        has_rest, self._rest = self._rest is not None, self._parts()
        found: dict[Tier, tuple[bytes, ...]] = {}
        room, left = self._config.max_snapshot_blocks, []
        for _ in range(MAX_EMPTY):
            if (part := self._next_part()) is None:
                break
            if len(part.stored) > room:
                left.append(part)
                break
            room -= len(part.stored)
            found[part.tier] = found.get(part.tier, ()) + part.stored
        # A router that has all events so far, but not yet the rest of the last snapshot, has no use
        # for this one: what that rest would have announced to it comes again.
        if has_rest:
            left += [TierHashes(tier, names) for tier, names in found.items()]
        if left:
            self._rest = chain(self._rest or (), self._held(left))
        hashes = found.pop(Tier.DEVICE, ())
        tiers, objects = _apart(TierHashes(tier, names) for tier, names in found.items())
        about = self._config.node_id, self._config.epoch, self.event_seq
        held = KVSnapshot(*about, hashes, tiers, objects.stored)
        return [Send(router, held), *self._wake()]


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
