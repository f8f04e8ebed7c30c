"""Where KV blocks are kept: device memory, and the tiers below it.

A block has the same hash in every tier, so a sequence can be continued from wherever its prefix is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """Fastest first. Values are metric labels and configuration keys."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


LOWER_TIERS = (Tier.HOST, Tier.DISK)


@dataclass(frozen=True, slots=True)
class TierHashes:
    """Blocks that came into one tier of a worker, and blocks that left it; none is in both."""

    tier: Tier
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the KV of a request is worth keeping after its last use, and how far down."""

    keep_s: float  # after its last use; then it is the first to go
    to_disk: bool = True  # False: it may leave memory only by being dropped


DEFAULT_RETENTION = Retention(keep_s=3600.0)


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """One block of a disk store: what its index says of it."""

    slot: int
    block_hash: bytes
    checksum: int
    keep_s: float  # retention that is left, from the moment the record is read or written
