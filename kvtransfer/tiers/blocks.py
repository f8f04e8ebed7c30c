"""Blocks in the lower tiers of a worker: their usage, and which of them should be moved.

Life of a block here: sealed on the device -> waiting to be copied -> in the first tier -> in those
behind it too, once it was not used for a while -> in none, when all of them have forgotten it.

Life of its record in the index of a storage tier: put when the block is written -> put again when
its retention has become much longer -> removed when the block is forgotten, and that before its
slot is written again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.tier import DiskRecord, Retention, Tier
from kvrelay.engine.node import Effect, Note
from kvrelay.kvtransfer.agent import UNKNOWN, StoreFound, StoreGone, StoreIndex
from kvrelay.kvtransfer.tiers.pool import Entry, LeastFirst, TierPool, Usage
from kvrelay.kvtransfer.tiers.registry import TIERS, has_keys, is_storage

WRITE_AHEAD_SHARE = 0.25  # where less of the first tier is blank, its oldest are written early

RETRY = Backoff(10.0, 300.0)  # before a store that failed is written again
REFRESH_SHARE = 0.5  # a record that lacks so much of its block's retention is put again
MAX_REFRESHED = 64  # records that are put again at a time
WHAT_IT_NEEDS = {
    False: "folder exists, is writable, and has room for the full size",
    True: "server answers, and the bucket may be written",
}

StoreRecords = Mapping[Tier, Sequence[DiskRecord]]
"""What the store of each tier held when it was opened."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where this worker can load a block from."""

    tier: Tier  # below the device
    slot: int
    block_hash: bytes
    checksum: int


class IndexUpdates:
    """How the index of a storage tier has to change, and when the store may be written.

    Owned by `TierBlocks`. Invariant: a record is removed before its slot is given to a move,
    because `take` goes first and nothing is moved to the store while it waits."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._removed: list[int] = []  # slots
        self._put: list[Entry] = []
        self._stale: dict[Entry, None] = {}  # listed, with too little retention
        self._failures = 0  # each soon after the one before
        self._retry_at = float("-inf")

    def may_write(self, now: float) -> bool:
        return now >= self._retry_at

    def put(self, entry: Entry) -> None:
        """It can be read from now on."""
        if not has_keys(self._tier):
            self._put.append(entry)

    def remove(self, entry: Entry) -> None:
        if entry.indexed_until is not None:
            self._removed.append(entry.slot)

    def on_use(self, now: float, entry: Entry) -> None:
        """Its retention may have grown."""
        until, expires_at = entry.indexed_until, entry.usage.expires_at
        if until is not None and until < expires_at - REFRESH_SHARE * (expires_at - now):
            self._stale[entry] = None

    def refresh(self, now: float) -> None:
        """Put some of those again whose records end too early."""
        if not self.may_write(now):
            return
        for entry in list(self._stale)[:MAX_REFRESHED]:
            del self._stale[entry]
            self._put.append(entry)

    def take(self, now: float) -> list[Effect]:
        """What to change in the index; nothing while the store must not be written."""
        if not self.may_write(now) or not (self._removed or self._put):
            return []
        records = []
        for entry in self._put:
            if not entry.gone:
                until = entry.indexed_until = entry.usage.expires_at
                record = DiskRecord(
                    entry.slot, entry.block_hash, entry.checksum, keep_s=max(0.0, until - now)
                )
                records.append(record)
        removed = tuple(self._removed)
        self._removed.clear()
        self._put.clear()
        return [StoreIndex(removed, tuple(records), self._tier)] if removed or records else []

    def on_failed(self, now: float, error: str) -> list[Effect]:
        """The store could not be written."""
        if not self.may_write(now):
            return []  # posted before the failure that was noted
        if now >= self._retry_at + RETRY.pause_s(self._failures + 1):  # it was well
            self._failures = 0
        self._failures += 1
        retry_s = RETRY.pause_s(self._failures)
        self._retry_at = now + retry_s
        text = (
            f"{error}. Nothing is written to the {self._tier} store for {retry_s:g} s, what it"
            f" holds is still read; see that its {WHAT_IT_NEEDS[has_keys(self._tier)]}"
        )
        return [Note("warning", f"{self._tier}_store_failed", text)]


class BackingTier:
    """A tier behind the first one: what of that is to be written to it, and promoted from it. Owned
    by `TierBlocks`. Each queue is bounded by the size of a tier, and may name what has gone."""

    def __init__(self, first: TierPool, pool: TierPool, write_after_s: float) -> None:
        self.pool = pool
        self.to_promote: OrderedDict[bytes, None] = OrderedDict()  # to the first tier
        self._first = first
        self._to_park: OrderedDict[bytes, None] = OrderedDict()  # to be written at once
        self._to_write = LeastFirst[Entry](
            self._last_used, first.num_entries
        )  # once they were not used for a while
        self._write_after_s = write_after_s

    def park(self, block_hash: bytes) -> None:
        """Write it as soon as possible, if the first tier has it."""
        is_there = self._first.get(block_hash) is not None
        if is_there and len(self._to_park) < self._first.num_blocks:
            self._to_park[block_hash] = None

    def consider_writing(self, entry: Entry) -> None:
        """An entry of the first tier, if it should be here: once it was not used for a while, or at
        once if parked."""
        if self.lacks(entry):
            self._to_write.add(entry)
            if entry.usage.parked:
                self.park(entry.block_hash)

    def next_to_write(self, now: float) -> Entry | None:
        """An entry of the first tier that is due to be written; it is queued no more."""
        while self._to_park:
            block_hash, _ = self._to_park.popitem(last=False)
            entry = self._first.get(block_hash)
            if entry is not None and entry.usage.parked and self.lacks(entry):
                return entry
        while self._is_due(entry := self._to_write.first(), now):
            assert entry is not None
            self._to_write.pop()
            if self.lacks(entry):
                return entry
        return None

    def lacks(self, entry: Entry) -> bool:
        return self._takes(entry) and entry.block_hash not in self.pool

    def _takes(self, entry: Entry) -> bool:
        spec = TIERS[self.pool.tier]
        if spec.for_approximate:
            return entry.usage.is_approximate
        return spec.can_be_written and (entry.usage.to_disk or not spec.is_storage)

    def _is_due(self, entry: Entry | None, now: float) -> bool:
        """Not used for a while; or about to be evicted, while there is still room here."""
        if entry is None:
            return False
        crowded = self._first.num_blank < WRITE_AHEAD_SHARE * self._first.num_usable
        if crowded and self.pool.num_blank > 0:
            return True
        return entry.usage.last_used + self._write_after_s <= now

    def _last_used(self, entry: Entry) -> float | None:
        wanted = entry.readable and not entry.gone and self._takes(entry)
        return entry.usage.last_used if wanted else None


class TierBlocks:
    """Owned by `Tiers`. Owns the pools of the lower tiers.

    Invariant: `usages` holds exactly the blocks that are in a lower tier, on their way to one, or
    in `to_copy`; no two have the same recency."""

    def __init__(self, config: WorkerConfig) -> None:
        sizes = {tier: spec.num_blocks(config) for tier, spec in TIERS.items()}
        self.pools = {
            tier: TierPool(tier, size, *TIERS[tier].sizes(config))
            for tier, size in sizes.items()
            if size
        }
        nothing = TierPool(next(iter(TIERS)), 0)  # what a worker without lower tiers has
        self.first = next(iter(self.pools.values()), nothing)
        self._write_after_s = {tier: spec.write_after_s(config) for tier, spec in TIERS.items()}
        self.backing: list[BackingTier] = []
        for pool in self.pools.values():
            self._back(pool)
        indexed = {tier for tier, spec in TIERS.items() if spec.is_storage and spec.can_be_written}
        indexed |= {Tier.HOST} if config.host_outlives else set()
        self.indexes = {tier: IndexUpdates(tier) for tier in TIERS if tier in indexed}
        self.usages: dict[bytes, Usage] = {}
        self.counters: dict[str, float] = {}
        self.to_copy: OrderedDict[bytes, None] = OrderedDict()  # from the device, in order
        self._max_to_copy = config.num_blocks
        self._recency = 0

    def start(self, now: float, records: StoreRecords) -> None:
        for tier, listed in records.items():
            if tier not in self.pools:
                continue
            found = []
            for record in listed:
                usage = self._usage_of(now, record)
                usage.is_approximate |= TIERS[tier].for_approximate
                found.append((record.slot, record.checksum, record.num_bytes, usage))
            self.pools[tier].fill(found)

    def _back(self, pool: TierPool) -> None:
        """`pool` stands behind the first tier, if that is memory."""
        if pool is not self.first and self.has_memory:
            self.backing.append(BackingTier(self.first, pool, self._write_after_s[pool.tier]))

    @property
    def has_memory(self) -> bool:
        """Whether the first tier takes copies, and is memory."""
        return self.first.num_blocks > 0 and not is_storage(self.first.tier)

    def on_found(self, now: float, found: StoreFound) -> None:
        pool = self.pools.get(found.tier)
        if pool is None:
            pool = self.pools[found.tier] = TierPool(found.tier, 0)
            for tier in [tier for tier in TIERS if tier in self.pools]:  # the fastest first
                self.pools[tier] = self.pools.pop(tier)
            self._back(pool)
        pool.grow(found.first_slot + found.num_slots)
        new = [record for record in found.records if record.block_hash not in pool]
        usages = [self._usage_of(now, record) for record in reversed(new)]
        pool.fill((r.slot, r.checksum, 0, u) for r, u in zip(reversed(new), usages, strict=True))

    def on_listed(
        self, now: float, tier: Tier, names: Sequence[bytes], keep_s: float, *, evict: bool
    ) -> int:
        """Storage that has keys holds blocks of these names: they can be read from now on, as far
        as there is room to remember them. Returns how many were new."""
        pool = self.pools.get(tier)
        new = [] if pool is None else [name for name in dict.fromkeys(names) if name not in pool]
        for number, name in enumerate(new):
            assert pool is not None
            if not (evict or pool.num_blank):
                return number
            usage = self.usages.get(name) or self._add_usage(now, name, Retention(keep_s))
            entry = pool.allocate(now, usage)
            if entry is None:
                self.forget_usage(name)
                return number
            pool.commit(entry, UNKNOWN)
        return len(new)

    def on_gone(self, gone: StoreGone) -> None:
        """Also of what was never found."""
        slots = range(gone.first_slot, gone.first_slot + gone.num_slots)
        if gone.tier in self.pools:
            self.pools[gone.tier].forget_slots(slots, "lost")

    def may_write(self, now: float, tier: Tier) -> bool:
        """Whether `tier` may be written; storage that has failed is left alone for a while."""
        return tier not in self.indexes or self.indexes[tier].may_write(now)

    def is_below(self, block_hash: bytes) -> bool:
        return any(pool.get(block_hash) is not None for pool in self.pools.values())

    def is_coming(self, block_hash: bytes) -> bool:
        """Whether it is on its way from the device."""
        return block_hash in self.to_copy or self.first.is_coming(block_hash)

    def use(self, now: float, block_hash: bytes, retention: Retention) -> None:
        """A request that covers this block, which is in `usages`, begins or ends."""
        usage = self.usages[block_hash]
        usage.parked = False
        self._touch(now, usage, retention)
        usage.num_uses += 1
        if usage.num_uses == 2:
            for pool in self.pools.values():
                pool.on_reuse(block_hash)

    def want_copy(self, now: float, block_hash: bytes, retention: Retention) -> None:
        """A block that was sealed on the device: copy it down, if its retention asks for it."""
        usage = self.usages.get(block_hash)
        if usage is not None:
            self._touch(now, usage, retention)
        elif not self.first.num_blocks:
            return
        elif retention.keep_s > 0 and (retention.to_disk or not is_storage(self.first.tier)):
            usage = self._add_usage(now, block_hash, retention)
        if usage is None:
            return
        self.to_copy[block_hash] = None
        if len(self.to_copy) > self._max_to_copy:
            oldest, _ = self.to_copy.popitem(last=False)
            self.count("tier_missed")
            self.forget_usage(oldest)

    def want_promotion(self, block_hashes: Sequence[bytes]) -> None:
        """Wanted in the first tier soon, unless it has them, and there the last to be evicted."""
        if not self.backing:
            return
        for block_hash in reversed(block_hashes):
            if (usage := self.usages.get(block_hash)) is not None:
                self._recency += 1
                usage.recency = self._recency
        for block_hash in block_hashes:
            if block_hash in self.first:
                continue
            for backing in self.backing:
                if backing.pool.get(block_hash) is not None:
                    if len(backing.to_promote) < self.first.num_blocks:
                        backing.to_promote[block_hash] = None
                    break

    def is_promoting(self, block_hash: bytes) -> bool:
        """Whether it is queued to come to the first tier."""
        return any(block_hash in backing.to_promote for backing in self.backing)

    def park(self, block_hash: bytes) -> None:
        """Write it to the tiers behind the first as soon as it is in that."""
        usage = self.usages.get(block_hash)
        if not self.backing or usage is None:
            return
        usage.parked = True
        for backing in self.backing:
            backing.park(block_hash)

    def consider_writing(self, block_hash: bytes) -> None:
        entry = self.first.get(block_hash)
        if entry is not None:
            for backing in self.backing:
                backing.consider_writing(entry)

    def leave_first(self, block_hash: bytes) -> None:
        """An approximate block goes from the first tier when those behind it have it in fewer bits,
        and all that take it have it."""
        entry = self.first.get(block_hash)
        if entry is None or not entry.usage.is_approximate:
            return
        packed = self.pools.get(Tier.PACKED)
        is_packed = packed is not None and packed.get(block_hash) is not None
        if is_packed and not any(backing.lacks(entry) for backing in self.backing):
            self.first.forget(entry, "packed")

    def drop(self, block_hash: bytes) -> None:
        """Forget it in each lower tier, unless an order keeps it there; copy it no more."""
        for pool in self.pools.values():
            pool.drop(block_hash)
        self.to_copy.pop(block_hash, None)
        self.take_forgotten()
        self.forget_usage(block_hash)

    def drop_unless_reused(self, block_hash: bytes) -> None:
        """Drop it, unless others than the request that made it use it."""
        usage = self.usages.get(block_hash)
        if usage is not None and not usage.is_reused and not usage.parked:
            self.drop(block_hash)

    def discard(self, tier: Tier, slot: int, block_hash: bytes, why: str) -> None:
        """This copy is of no use, even if an order keeps it."""
        entry = self.pools[tier].get(block_hash)
        if entry is not None and entry.slot == slot:
            self.pools[tier].forget(entry, why)

    def retain(self, block_hash: bytes) -> bool:
        """Pin it in every tier that has it, within the quotas; False if in none."""
        kept = [pool.retain(block_hash) for pool in self.pools.values()]
        return any(kept)

    def stop_retaining(self, block_hash: bytes) -> bool:
        stopped = [pool.stop_retaining(block_hash) for pool in self.pools.values()]
        return any(stopped)

    def expire(self, now: float, at_most: int) -> None:
        for pool in self.pools.values():
            pool.expire(now, at_most)

    def take_forgotten(self) -> None:
        """Count what the pools have forgotten, and remove it from the index."""
        for tier, pool in self.pools.items():
            for entry in pool.take_forgotten():
                self.count(f"tier_{entry.gone}_{tier}")
                if tier in self.indexes:
                    self.indexes[tier].remove(entry)
                if self.forget_usage(entry.block_hash) and entry.gone == "evicted":
                    self.count("tier_lost")

    def forget_usage(self, block_hash: bytes) -> bool:
        """True if there is nothing of it below the device any more."""
        if block_hash in self.to_copy or any(block_hash in pool for pool in self.pools.values()):
            return False
        return self.usages.pop(block_hash, None) is not None

    def on_store_failed(self, now: float, tier: Tier, error: str) -> list[Effect]:
        self.count(f"{tier}_store_failed")
        return self.indexes[tier].on_failed(now, error)

    def forget_store(self, tier: Tier) -> None:
        """The store has begun again, empty. What is being written will fail by itself."""
        pool = self.pools.get(tier)
        if pool is None:
            return
        for block_hash in pool.block_hashes():
            entry = pool.get(block_hash)
            assert entry is not None
            entry.indexed_until = None  # there is no record to remove
            pool.forget(entry, "lost")

    def count(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def check_integrity(self) -> None:
        """Assert the class invariant. Cost: O(number of blocks)."""
        self.take_forgotten()
        for pool in self.pools.values():
            pool.check_integrity()
        held = {block_hash for pool in self.pools.values() for block_hash in pool}
        assert set(self.usages) == held | set(self.to_copy)
        assert len({usage.recency for usage in self.usages.values()}) == len(self.usages)

    def _touch(self, now: float, usage: Usage, retention: Retention) -> None:
        self._recency += 1
        usage.recency = self._recency
        usage.last_used = max(usage.last_used, now)
        usage.expires_at = max(usage.expires_at, now + retention.keep_s)
        usage.to_disk |= retention.to_disk
        usage.is_approximate |= retention.is_approximate
        usage.is_low &= retention.is_low
        self.consider_writing(usage.block_hash)
        for tier, pool in self.pools.items():
            if tier in self.indexes and (entry := pool.get(usage.block_hash)) is not None:
                self.indexes[tier].on_use(now, entry)

    def _usage_of(self, now: float, record: DiskRecord) -> Usage:
        """What a store knew of a block; another one may have held it too, for longer."""
        usage = self.usages.get(record.block_hash)
        if usage is None:
            return self._add_usage(now, record.block_hash, Retention(record.keep_s))
        usage.expires_at = max(usage.expires_at, now + record.keep_s)
        return usage

    def _add_usage(self, now: float, block_hash: bytes, retention: Retention) -> Usage:
        assert block_hash not in self.usages
        self._recency += 1
        usage = Usage(
            *(block_hash, self._recency, now, now + retention.keep_s),
            retention.to_disk,
            is_approximate=retention.is_approximate,
            is_low=retention.is_low,
        )
        self.usages[block_hash] = usage
        return usage
