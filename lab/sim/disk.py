"""The disk of a simulated worker: blocks and an index that survive its death.

A block is written slot by slot at moments of its own, so a death in the middle leaves it half
written; the index changes at once or not at all, as a transaction does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvrelay.engine.kv.tier import DiskRecord
from kvrelay.kvtransfer.agent import StoreIndex
from kvrelay.lab.sim.executor import SimPool


@dataclass(slots=True)
class SimDisk:
    """Owned by the place of a worker. Invariant: one record a slot, one slot a name."""

    pool: SimPool
    index: dict[int, tuple[DiskRecord, float]] = field(default_factory=dict)  # with when it was put

    def update(self, now: float, change: StoreIndex, *, lossless: bool) -> str | None:
        """Apply `change`; returns what is wrong with it, if anything is. `lossless`: no change was
        lost before, so none may put what is there already."""
        wrong = None
        for slot in change.remove:
            self.index.pop(slot, None)
        slots = {record.block_hash: slot for slot, (record, _) in self.index.items()}
        for record in change.put:
            if not 0 <= record.slot < len(self.pool.blocks):
                return f"slot {record.slot} of {len(self.pool.blocks)}"
            there = self.index.get(record.slot)  # the same block: its retention is renewed
            if lossless and there is not None and there[0].block_hash != record.block_hash:
                wrong = f"slot {record.slot} is in the index"
            if lossless and slots.get(record.block_hash, record.slot) != record.slot:
                wrong = f"{record.block_hash.hex()} is in the index twice"
            self.index.pop(slots.get(record.block_hash, -1), None)
            self.index[record.slot] = (record, now)
            slots[record.block_hash] = record.slot
        return wrong

    def records(self, now: float) -> list[DiskRecord]:
        """What a worker that opens it finds."""
        found = []
        for record, put_at in self.index.values():
            keep_s = record.keep_s - (now - put_at)
            if keep_s > 0:
                found.append(replace(record, keep_s=keep_s))
        kept = {record.slot for record in found}
        self.index = {slot: entry for slot, entry in self.index.items() if slot in kept}
        return found
