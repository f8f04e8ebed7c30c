"""What a worker holds below the device, how it is used, and what should be moved because of that.

Life of a block here: sealed on the device -> waiting to be copied -> in host memory -> on disk too,
once it was not used for a while -> in neither, when both tiers have forgotten it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.config import WorkerConfig
from engine.kv.tier import DiskRecord, Retention, Tier
from engine.node import Effect
from kvtransfer.tiers.disk_index import DiskIndex
from kvtransfer.tiers.pool import Entry, LeastFirst, TierPool, Usage

WRITE_AHEAD_SHARE = 0.25  # of host memory: with fewer blank blocks, the oldest are written early


class TierBlocks:
    """Owned by `Tiers`. Owns the pools of the lower tiers.

    Invariant: `usages` holds exactly the blocks that are in a lower tier, on their way to one, or
    in `to_copy`; no two have the same recency. Each queue is bounded by the size of a tier, and may
    name what has gone meanwhile."""

    def __init__(self, config: WorkerConfig) -> None:
        sizes = {Tier.HOST: config.num_host_blocks, Tier.DISK: config.num_disk_blocks}
        self.pools = {tier: TierPool(tier, size) for tier, size in sizes.items() if size}
        self.host = self.pools.get(Tier.HOST)
        self.disk = self.pools.get(Tier.DISK)
        self.first_tier = Tier.HOST if self.host is not None else Tier.DISK
        self.index = DiskIndex()
        self.usages: dict[bytes, Usage] = {}
        self.counters: dict[str, float] = {}
        self.to_copy: OrderedDict[bytes, None] = OrderedDict()  # from the device, in order
        self.to_promote: OrderedDict[bytes, None] = OrderedDict()  # from disk to host
        self._to_park: OrderedDict[bytes, None] = OrderedDict()  # from host to disk, at once
        self._to_write = LeastFirst[Entry](_last_used)  # the same, of what was not used for a while
        self._max_to_copy = config.num_blocks
        self._disk_after_s = config.disk_after_s
        self._recency = 0

    def start(self, now: float, records: Iterable[DiskRecord]) -> None:
        """`records`: what the disk store held when it was opened."""
        if self.disk is None:
            return
        found = []
        for record in records:
            usage = self._add_usage(now, record.block_hash, Retention(record.keep_s))
            found.append((record.slot, record.checksum, usage))
        self.disk.fill(found)

    def is_below(self, block_hash: bytes) -> bool:
        return any(pool.get(block_hash) is not None for pool in self.pools.values())

    def is_coming(self, block_hash: bytes) -> bool:
        """Whether it is on its way from the device."""
        return block_hash in self.to_copy or self.pools[self.first_tier].is_coming(block_hash)

    def use(self, now: float, block_hash: bytes, retention: Retention) -> None:
        """A request that covers this block begins or ends."""
        usage = self.usages.get(block_hash)
        if usage is None:
            return
        usage.parked = False
        self._touch(now, usage, retention)
        usage.num_uses += 1
        if usage.num_uses == 2:
            for pool in self.pools.values():
                pool.on_reuse(block_hash)

    def want_copy(self, now: float, block_hash: bytes, retention: Retention) -> None:
        """A block that is sealed on the device: copy it down, if it is worth it."""
        usage = self.usages.get(block_hash)
        if usage is not None:
            self._touch(now, usage, retention)
        elif retention.keep_s > 0 and (self.host is not None or retention.to_disk):
            usage = self._add_usage(now, block_hash, retention)
        if usage is None:
            return
        self.to_copy[block_hash] = None
        if len(self.to_copy) > self._max_to_copy:
            oldest, _ = self.to_copy.popitem(last=False)
            self.count("tier_missed")
            self.forget_usage(oldest)

    def want_promotion(self, block_hashes: Sequence[bytes]) -> None:
        """Hashes that are on disk: wanted in host memory soon, and there the last to be evicted."""
        if self.host is None or self.disk is None:
            return
        for block_hash in reversed(block_hashes):
            if (usage := self.usages.get(block_hash)) is not None:
                self._recency += 1
                usage.recency = self._recency
        for block_hash in block_hashes:
            there = self.disk.get(block_hash) is not None and block_hash not in self.host
            if there and len(self.to_promote) < self.host.num_blocks:
                self.to_promote[block_hash] = None

    def park(self, block_hash: bytes) -> None:
        """Write it to disk as soon as it is in host memory."""
        usage = self.usages.get(block_hash)
        if self.host is None or self.disk is None or usage is None:
            return
        usage.parked = True
        if self.host.get(block_hash) is not None and len(self._to_park) < self.host.num_blocks:
            self._to_park[block_hash] = None

    def next_to_write(self, now: float) -> Entry | None:
        """A host entry that is due to be written to disk; it is queued no more."""
        assert self.host is not None
        while self._to_park:
            block_hash, _ = self._to_park.popitem(last=False)
            entry = self.host.get(block_hash)
            if entry is not None and entry.usage.parked and self._disk_lacks(entry):
                return entry
        while self._is_due(entry := self._to_write.first(), now):
            assert entry is not None
            self._to_write.pop()
            if self._disk_lacks(entry):
                return entry
        return None

    def consider_writing(self, block_hash: bytes) -> None:
        """If the disk should have it: once it was not used for a while, or at once if parked."""
        entry = self.host.get(block_hash) if self.host is not None else None
        if entry is not None and self._disk_lacks(entry):
            self._to_write.add(entry)
            if entry.usage.parked:
                self.park(block_hash)

    def drop(self, block_hash: bytes) -> None:
        """Forget it in each lower tier, unless an order keeps it there; copy it no more."""
        for pool in self.pools.values():
            pool.drop(block_hash)
        self.to_copy.pop(block_hash, None)
        self.take_forgotten()
        self.forget_usage(block_hash)

    def discard(self, tier: Tier, slot: int, block_hash: bytes, why: str) -> None:
        """This copy is of no use, even if an order keeps it."""
        entry = self.pools[tier].get(block_hash)
        if entry is not None and entry.slot == slot:
            self.pools[tier].forget(entry, why)

    def keep(self, block_hash: bytes) -> bool:
        """In every tier where it is, as far as the quotas go; False if in none."""
        kept = [pool.keep(block_hash) for pool in self.pools.values()]
        return any(kept)

    def stop_keeping(self, block_hash: bytes) -> bool:
        stopped = [pool.stop_keeping(block_hash) for pool in self.pools.values()]
        return any(stopped)

    def expire(self, now: float, at_most: int) -> None:
        for pool in self.pools.values():
            pool.expire(now, at_most)

    def take_forgotten(self) -> None:
        """Count what the pools have forgotten, and remove it from the index."""
        for tier, pool in self.pools.items():
            for entry in pool.take_forgotten():
                self.count(f"tier_{entry.gone}_{tier}")
                if tier is Tier.DISK:
                    self.index.remove(entry)
                if self.forget_usage(entry.block_hash) and entry.gone == "evicted":
                    self.count("tier_lost")

    def forget_usage(self, block_hash: bytes) -> bool:
        """True if there is nothing of it below the device any more."""
        if block_hash in self.to_copy or any(block_hash in pool for pool in self.pools.values()):
            return False
        return self.usages.pop(block_hash, None) is not None

    def store_failed(self, now: float, error: str) -> list[Effect]:
        self.count("disk_store_failed")
        return self.index.failed(now, error)

    def forget_disk(self) -> None:
        """The disk store has begun again, empty. What is being written will fail by itself."""
        disk = self.disk
        for block_hash in disk.block_hashes() if disk is not None else ():
            entry = disk.get(block_hash) if disk is not None else None
            if disk is not None and entry is not None:
                entry.indexed_until = None  # there is no record to remove
                disk.forget(entry, "lost")

    def has_work(self, now: float) -> bool:
        """Whether a move could start, or the index be told something; not while the disk fails."""
        may_write = self.index.may_write(now)
        if self.to_promote or (self.to_copy and (may_write or self.host is not None)):
            return True
        due = bool(self._to_park) or self._is_due(self._to_write.first(), now)
        return self.index.has_work(now) or (may_write and due)

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
        self.consider_writing(usage.block_hash)
        if self.disk is not None and (entry := self.disk.get(usage.block_hash)) is not None:
            self.index.used(now, entry)

    def _add_usage(self, now: float, block_hash: bytes, retention: Retention) -> Usage:
        assert block_hash not in self.usages
        self._recency += 1
        usage = Usage(block_hash, self._recency, now, now + retention.keep_s, retention.to_disk)
        self.usages[block_hash] = usage
        return usage

    def _disk_lacks(self, entry: Entry) -> bool:
        return self.disk is not None and entry.usage.to_disk and entry.block_hash not in self.disk

    def _is_due(self, entry: Entry | None, now: float) -> bool:
        """Not used for a while; or about to be evicted, while the disk still has room."""
        if entry is None:
            return False
        assert self.host is not None
        assert self.disk is not None
        crowded = self.host.num_blank < WRITE_AHEAD_SHARE * self.host.num_blocks
        if crowded and self.disk.num_blank > 0:
            return True
        return entry.usage.last_used + self._disk_after_s <= now


def _last_used(entry: Entry) -> float | None:
    wanted = entry.readable and not entry.gone and entry.usage.to_disk
    return entry.usage.last_used if wanted else None
