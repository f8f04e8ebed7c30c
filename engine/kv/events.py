"""What a worker publishes about its prefix cache, and how a router's index keeps up.

Events of one worker carry its epoch (a new one per start) and a sequence number without gaps. A
router that sees a gap asks for a snapshot; a snapshot at `seq` includes every event up to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.engine.kv.tier import TierHashes
from kvrelay.engine.node import NodeId
from kvrelay.engine.wire.codec import register


@dataclass(frozen=True, slots=True)
class KVEvents:
    """Net change of the sets of sealed blocks since event `seq - 1`; no hash is in both lists.

    `stored` and `removed` are of device memory, `tiers` of host memory and disk."""

    worker: NodeId
    epoch: int
    seq: int
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    tiers: tuple[TierHashes, ...] = ()


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """Every sealed block of the worker as of event `seq`."""

    worker: NodeId
    epoch: int
    seq: int
    hashes: tuple[bytes, ...]
    tiers: tuple[TierHashes, ...] = ()  # blocks in host memory and on disk; nothing is `removed`


@dataclass(frozen=True, slots=True)
class KVSnapshotRequest:
    """To a worker: send `router` a `KVSnapshot`."""

    router: NodeId


register(KVEvents, KVSnapshot, KVSnapshotRequest)
