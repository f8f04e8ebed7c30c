"""The tiers that a worker may have below its device memory, fastest first. To add one: a member of
`engine.kv.tier.Tier`, an entry here, and what opens it in `worker`.

The first tier that a worker has takes copies of all sealed blocks. The tiers behind it, which need
that one to be memory, are written from it and promoted to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.tier import Tier


@dataclass(frozen=True, slots=True)
class TierSpec:
    """What is known of a tier without looking at what it holds.

    Memory is copied by the worker's memory agent, and peers read it. Anything else is storage: it
    has an index (`StoreIndex`) by which it outlives the process, and is copied to and from memory
    only, by an agent and a thread of its own.

    Storage that `has_keys` is shared with other workers, who find blocks there by their names. It
    evicts by itself; a slot is only a place to remember that a block is there."""

    num_blocks: Callable[[WorkerConfig], int]  # 0: the worker has no such tier
    bytes_per_s: float  # into device memory, until a load was measured
    is_storage: bool
    can_be_written: bool = True
    has_keys: bool = False
    for_approximate: bool = False  # it takes approximate blocks, all of them, and no others
    # The most that a block takes, and room for all of them; 0, 0: the number of blocks says it.
    sizes: Callable[[WorkerConfig], tuple[int, int]] = lambda config: (0, 0)
    # Behind the first tier: a block that was not used for this long is written.
    write_after_s: Callable[[WorkerConfig], float] = lambda config: 0.0


TIERS: dict[Tier, TierSpec] = {
    Tier.HOST: TierSpec(lambda config: config.num_host_blocks, 2e9, is_storage=False),
    # Its blocks are copied by the CPU, out of memory that nobody has registered.
    Tier.ORPHANED: TierSpec(lambda config: 0, 2e9, is_storage=True, can_be_written=False),
    Tier.PACKED: TierSpec(
        lambda config: config.num_packed_blocks, 2e9, is_storage=True, for_approximate=True
    ),
    Tier.DISK: TierSpec(
        lambda config: config.num_disk_blocks,
        0.5e9,
        is_storage=True,
        sizes=lambda config: (config.disk_slot_bytes, config.disk_bytes),
        write_after_s=lambda config: config.disk_after_s,
    ),
    Tier.OBJECT: TierSpec(
        lambda config: config.num_object_blocks,
        0.1e9,
        is_storage=True,
        has_keys=True,
        write_after_s=lambda config: config.object_after_s,
    ),
}


def is_storage(tier: Tier) -> bool:
    return tier in TIERS and TIERS[tier].is_storage


def has_keys(tier: Tier) -> bool:
    return tier in TIERS and TIERS[tier].has_keys


def memory_tiers() -> list[Tier]:
    """What an agent of memory reaches, and peers may read; fastest first."""
    return [Tier.DEVICE, *(tier for tier in TIERS if not TIERS[tier].is_storage)]
