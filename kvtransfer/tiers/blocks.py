"""Blocks in the lower tiers of a worker: their usage, and which of them should be moved.

Life of a block here: sealed on the device -> waiting to be copied -> in the first tier -> in those
behind it too, once it was not used for a while -> in none, when all of them have forgotten it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from typing import NamedTuple

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.tier import DiskRecord, Retention, Tier
from kvrelay.engine.node import Effect
from kvrelay.kvtransfer.agent import UNKNOWN, StoreFound, StoreGone
from kvrelay.kvtransfer.tiers.duplicates import Duplicates
from kvrelay.kvtransfer.tiers.pool import DUPLICATE, Entry, LeastFirst, TierPool
from kvrelay.kvtransfer.tiers.records import IndexUpdates, lacks_time
from kvrelay.kvtransfer.tiers.registry import TIERS, is_storage
from kvrelay.kvtransfer.tiers.uses import Run, Runs, Usage

WRITE_AHEAD_SHARE = 0.25  # where less of the first tier is blank, its oldest are written early

StoreRecords = Mapping[Tier, Sequence[DiskRecord]]
"""What the store of each tier held when it was opened."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where this worker can load a block from."""

    tier: Tier  # below the device
    slot: int
    block_hash: bytes
    checksum: int


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


class _Use(NamedTuple):
    """A request that begins or ends."""

    now: float
    top: int  # recency of the first block of its prefix
    retention: Retention
    looked_at: list[tuple[int, Usage]]  # one by one: entries, blocks


_Wanted = tuple[int, bytes, Run]  # a block that is on the device only: its entry, its name


class TierBlocks:
    """Owned by `Tiers`. Owns the pools of the lower tiers.

    Invariant: `usages` holds exactly the blocks that are in a lower tier, on their way to one, or
    in `to_copy`; no two have the same recency."""

    def __init__(self, config: WorkerConfig, kv: KVCacheManager) -> None:
        self._device, self._groups = kv.pool, kv.windows.groups
        self._offered = [group for group, window in enumerate(self._groups) if not window.size]
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
        self.runs = Runs(len(self._groups), self._offered)
        self.counters: dict[str, float] = {}
        # From the device, in order; False: it is a duplicate, which may wait.
        self.to_copy: OrderedDict[bytes, bool] = OrderedDict()
        self.duplicates: Duplicates | None = None
        if self.has_memory and not kv.windows.any:  # the device keeps few blocks of windows
            self.duplicates = Duplicates(kv.pool, self._is_stored)
            self.first.is_duplicate = self.duplicates.has
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
            entry = pool.allocate(now, usage.settled())
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

    def use(self, now: float, names: Sequence[bytes], retention: Retention) -> None:
        """A request that covers these blocks, of all groups, in order, begins or ends. Where layers
        attend to windows, their blocks come to rows of a run at any time (`Run.late`)."""
        num_rows = len(names) // len(self._groups)
        self._recency += len(names)  # the beginning has the most, and is forgotten last
        use = _Use(now, self._recency, retention, [])
        wanted: list[_Wanted] = []
        new: list[Run] = []
        row, run = 0, None
        self.runs.place_late()
        while row < num_rows:
            known = self.runs.find(names, row, num_rows)
            if known is None:
                run = self._use_row(use, names, row, run, wanted)
                new += [run] if run is not None and len(run.names) == 1 else []
                row += 1
                continue
            run, end = None, row + len(known.names)
            self._use_run(use, known, row, wanted)
            for name, index in known.late.items():
                if (usage := self.usages.get(name)) is not None and usage.run is None:
                    self._use_one(use, usage, index)
                    known.add(usage, index)
            known.late.clear()
            row = end
        for _, usage in sorted(use.looked_at, key=itemgetter(0), reverse=True):
            until = self._look(now, usage)
            if usage.run is not None:
                usage.run.indexed_until = min(usage.run.indexed_until, until)
        for run in new:
            self.runs.keep(run)
        for index, name, run in sorted(wanted, key=itemgetter(0), reverse=True):
            self.want_copy(now, name, retention)
            if (usage := self.usages.get(name)) is None:
                run.missing[name] = index
            else:
                usage.recency = use.top - index
                run.add(usage, index)
                self.runs.keep(run)

    def _use_row(
        self,
        use: _Use,
        names: Sequence[bytes],
        row: int,
        run: Run | None,
        wanted: list[_Wanted],
    ) -> Run | None:
        """A row that is in no run goes to the one that has been begun before it, if any of its
        blocks is there; returns that one, or another that it begins."""
        start, used, cached = row * len(self._groups), [], []
        for index, name in enumerate(names[start : start + len(self._groups)], start):
            if (usage := self.usages.get(name)) is not None:
                used.append((index, usage))
            elif index - start in self._offered and self._device.is_cached(name):
                cached.append((index, name))
        if not used and not cached:
            return None
        if run is None:
            run = Run([], row)
            run.use(use.now, use.top, use.retention)
        run.names.append(names[start])
        if len(used) + len(cached) < len(self._groups):
            run.missing.update((names[start + group], start + group) for group in self._offered)
        for index, usage in used:
            self._use_one(use, usage, index)
            if usage.run is None:
                run.add(usage, index)
        wanted += [(index, name, run) for index, name in cached]
        return run

    def _use_run(self, use: _Use, run: Run, row: int, wanted: list[_Wanted]) -> None:
        """What it has is used as one; its blocks are looked at where that says something new of
        each, and those of them that are missing."""
        now, retention = use.now, use.retention
        to_disk = retention.to_disk and not run.to_disk
        widens = to_disk or (retention.is_approximate and not run.is_approximate)
        run.use(now, use.top + (run.first - row) * len(self._groups), retention)
        for name, index in list(run.missing.items()):
            usage = self.usages.get(name)
            if usage is not None:
                self._use_one(use, usage, index)
                if usage.run is None:
                    run.add(usage, index)
            elif self._device.is_cached(name):
                wanted.append((index, name, run))
        looked_at = run.again
        if widens or (self.indexes and lacks_time(now, run.indexed_until, run.expires_at)):
            run.indexed_until, looked_at = inf, dict.fromkeys(run.members.values())
        use.looked_at.extend((usage.index, usage.settled()) for usage in looked_at)
        run.again.clear()
        for usage in [usage for usage in run.fresh if usage.settled().is_reused]:
            del run.fresh[usage]
            for pool in self.pools.values():
                pool.on_reuse(usage.block_hash)

    def _use_one(self, use: _Use, usage: Usage, index: int) -> None:
        """A block that is in no run, or not at its place there."""
        was_reused = usage.settled().is_reused
        usage.parked = False
        self._touch(use.now, usage, use.retention, use.top - index)
        use.looked_at.append((index, usage))
        usage.num_uses += 1
        if usage.is_reused and not was_reused:
            if usage.run is not None:
                usage.run.fresh.pop(usage, None)
            for pool in self.pools.values():
                pool.on_reuse(usage.block_hash)

    def want_copy(self, now: float, block_hash: bytes, retention: Retention) -> None:
        """A block that was sealed on the device: copy it down, if its retention asks for it."""
        usage = self.usages.get(block_hash)
        if usage is not None:
            self._recency += 1
            self._touch(now, usage, retention, self._recency)
            self._look(now, usage)
        elif not self.first.num_blocks:
            return
        elif retention.keep_s > 0 and (retention.to_disk or not is_storage(self.first.tier)):
            usage = self._add_usage(now, block_hash, retention)
        if usage is None or (self.duplicates is not None and self.duplicates.is_left(block_hash)):
            return
        # Without storage it would be lost if the device evicted it before the next tick.
        must = self.duplicates is None or not self._is_stored(block_hash)
        self.to_copy[block_hash] = must or self.to_copy.get(block_hash, False)
        if len(self.to_copy) > self._max_to_copy:
            oldest, _ = self.to_copy.popitem(last=False)
            self.count("tier_missed")
            self.forget_usage(oldest)

    def is_leaving(self, block_hash: bytes) -> bool:
        """Whether the device evicts it next."""
        return self.duplicates is not None and self.duplicates.is_leaving(block_hash)

    def _is_stored(self, block_hash: bytes) -> bool:
        """Whether storage behind the first tier has it."""
        stores = (o.pool for o in self.backing if TIERS[o.pool.tier].can_be_written)
        return any(pool.get(block_hash) is not None for pool in stores)

    def on_duplicate(self, block_hash: bytes) -> None:
        """Now the device and the first tier have it."""
        self.first.on_duplicate(block_hash)

    def leave_above(self, block_hash: bytes) -> None:
        """It stays on the device alone until that is about to evict it; storage has it."""
        if self.duplicates is not None:
            self.duplicates.leave(self.usages[block_hash].settled())

    def want_leaving(self, now: float) -> None:
        """Copy down what the device evicts next."""
        for usage in self.duplicates.take_leaving() if self.duplicates else ():
            if usage.expires_at <= now:
                continue
            known = self.usages.setdefault(usage.block_hash, usage)
            self._recency += 1
            known.settled().recency = self._recency
            if known is usage:
                self.runs.come(usage)
            self.to_copy[usage.block_hash] = True

    def want_promotion(self, block_hashes: Sequence[bytes]) -> None:
        """Wanted in the first tier soon, unless it has them, and there the last to be evicted."""
        if not self.backing:
            return
        for block_hash in reversed(block_hashes):
            if (usage := self.usages.get(block_hash)) is not None:
                self._recency += 1
                usage.settled().recency = self._recency
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
        usage.settled().parked = True
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
        if self.duplicates is not None:
            self.duplicates.forget(block_hash)

    def drop_unless_reused(self, block_hash: bytes) -> None:
        """Drop it, unless others than the request that made it use it."""
        usage = self.usages.get(block_hash)
        if usage is None:
            return
        usage = usage.settled()
        if not usage.is_reused and not usage.parked:
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
                if entry.gone == DUPLICATE and self.duplicates is not None:
                    self.duplicates.leave(entry.usage)
                if tier in self.indexes:
                    self.indexes[tier].remove(entry)
                if self.forget_usage(entry.block_hash):
                    if entry.gone == "evicted":
                        self.count("tier_lost")
                elif (run := entry.usage.run) is not None:
                    run.again[entry.usage] = None

    def forget_usage(self, block_hash: bytes) -> bool:
        """True if there is nothing of it below the device any more."""
        if block_hash in self.to_copy or any(block_hash in pool for pool in self.pools.values()):
            return False
        usage = self.usages.pop(block_hash, None)
        if usage is not None:
            self.runs.lose(usage)
        return usage is not None

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
        usages = self.usages.values()
        assert len({usage.settled().recency for usage in usages}) == len(usages)
        self.runs.check_integrity(self.usages)

    def _touch(self, now: float, usage: Usage, retention: Retention, recency: int) -> None:
        usage.settled().recency = recency
        usage.last_used = max(usage.last_used, now)
        usage.expires_at = max(usage.expires_at, now + retention.keep_s)
        usage.to_disk |= retention.to_disk
        usage.is_approximate |= retention.is_approximate
        usage.is_low &= retention.is_low

    def _look(self, now: float, usage: Usage) -> float:
        """It was used: it may have to be written, or put into an index again. Returns the earliest
        end of its other records."""
        self.consider_writing(usage.block_hash)
        until = inf
        for tier, pool in self.pools.items():
            if tier in self.indexes and (entry := pool.get(usage.block_hash)) is not None:
                until = min(until, self.indexes[tier].on_use(now, entry))
        return until

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
        self.runs.come(usage)
        return usage
