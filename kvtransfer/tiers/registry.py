"""The tiers that a worker may have below its device memory, fastest first. To add one: a member of
`engine.kv.tier.Tier`, an entry here, and the module that opens it, by its mover and its store.

The first tier that a worker has takes copies of all sealed blocks. The tiers behind it, which need
that one to be memory, are written from it and promoted to it.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from msgspec import structs

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.tier import Tier


@dataclass(frozen=True, slots=True)
class TierSpec:
    """What is known of a tier without looking at what it holds.

    Memory is copied by the worker's peer agent, and peers read it. Anything else is storage: it
    has an index (`StoreIndex`) by which it outlives the process, and is copied to and from memory
    only, by a mover and a thread of its own.

    Storage that `has_keys` is shared with other workers, who find blocks there by their names. It
    evicts by itself; a slot is only a place to remember that a block is there."""

    field: str  # WorkerConfig's with its blocks, 0: a worker has no such tier; "": no limit
    bytes_per_s: float  # into device memory, until a load was measured
    opened_by: str = ""  # a module, whose `open_tier` takes TierSettings; "": it is memory
    can_be_written: bool = True
    has_keys: bool = False
    for_approximate: bool = False  # it takes approximate blocks, all of them, and no others
    # The most that a block takes, and room for all of them; 0, 0: the number of blocks says it.
    sizes: Callable[[WorkerConfig], tuple[int, int]] = lambda config: (0, 0)
    # Behind the first tier: a block that was not used for this long is written.
    write_after_s: Callable[[WorkerConfig], float] = lambda config: 0.0

    @property
    def is_storage(self) -> bool:
        return bool(self.opened_by)

    def num_blocks(self, config: WorkerConfig) -> int:
        return getattr(config, self.field) if self.field else 0


MOVERS = "kvrelay.kvtransfer.movers"
TIERS: dict[Tier, TierSpec] = {
    Tier.HOST: TierSpec("num_host_blocks", 2e9),
    # Its blocks are copied by the CPU, out of memory that nobody has registered.
    Tier.LEFT: TierSpec("", 2e9, f"{MOVERS}.left", can_be_written=False),
    Tier.PACKED: TierSpec("num_packed_blocks", 2e9, f"{MOVERS}.packed", for_approximate=True),
    Tier.DISK: TierSpec(
        "num_disk_blocks",
        0.5e9,
        f"{MOVERS}.disk_tier",
        sizes=lambda config: (config.disk_slot_bytes, config.disk_bytes),
        write_after_s=lambda config: config.disk_after_s,
    ),
    Tier.OBJECT: TierSpec(
        "num_object_blocks",
        0.1e9,
        f"{MOVERS}.object",
        has_keys=True,
        write_after_s=lambda config: config.object_after_s,
    ),
}


def without_missing(config: WorkerConfig, opened: Container[Tier]) -> WorkerConfig:
    """`config` of a worker that has of all storage only what was `opened`."""
    missing = {
        spec.field: 0
        for tier, spec in TIERS.items()
        if spec.is_storage and spec.field and tier not in opened
    }
    return structs.replace(config, **missing)


def is_storage(tier: Tier) -> bool:
    return tier in TIERS and TIERS[tier].is_storage


def has_keys(tier: Tier) -> bool:
    return tier in TIERS and TIERS[tier].has_keys


def memory_tiers() -> list[Tier]:
    """What an agent of memory reaches, and peers may read; fastest first."""
    return [Tier.DEVICE, *(tier for tier in TIERS if not TIERS[tier].is_storage)]
