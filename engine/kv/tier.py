"""Where KV blocks are kept: device memory, and the tiers below it.

A block has the same hash in every tier, so a prefix is found in any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """Fastest first. Values are metric labels and configuration keys."""

    DEVICE = "device"
    HOST = "host"
    LEFT = "orphaned"  # host memory of workers of this machine that have died
    PACKED = "packed"  # host memory for approximate KV, in four bits a number
    DISK = "disk"
    OBJECT = "object"  # shared by all workers with the same hashes


LOWER_TIERS = (Tier.HOST, Tier.DISK)
ANNOUNCED_TIERS = (Tier.DEVICE, *LOWER_TIERS)  # what routers know; others are announced as host


@dataclass(frozen=True, slots=True)
class TierHashes:
    """Blocks added to one tier of a worker, and blocks removed from it; none is in both."""

    tier: Tier
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the KV of a request is kept after its last use, and in which tiers."""

    keep_s: float  # after its last use; then it is evicted first
    to_disk: bool = True  # False: it is dropped from host memory, not demoted to disk
    is_approximate: bool = False  # below the device it may be kept in fewer bits; set by the worker
    is_low: bool = False  # the request is of a low class: others' KV is kept before it; likewise


DEFAULT_RETENTION = Retention(keep_s=3600.0)


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """One block of a disk store, as in its index."""

    slot: int
    block_hash: bytes
    checksum: int
    keep_s: float  # remaining retention when the record is read or written
    num_bytes: int = 0  # that it takes there, as read; 0: as many as any block may
