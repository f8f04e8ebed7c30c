"""A worker's tiers with a device pool, whose memory and disk are dicts from slot to content.

The effects are performed by hand, so that a test can stop between any two of them. Every move and
every change of the index is checked against the rules that keep content intact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.tier import DiskRecord, Retention, Tier
from kvrelay.engine.node import Effect, Note, Send
from kvrelay.engine.stats import Role
from kvrelay.kvtransfer.agent import CopyBlocks, CopyDone, MoveId, StoreFailed, StoreIndex
from kvrelay.kvtransfer.messages import CacheAction, CacheOrder, CacheOrderDone
from kvrelay.kvtransfer.tiers.blocks import Source
from kvrelay.kvtransfer.tiers.manager import Tiers
from tests.engine.configs import worker_config
from tests.kvtransfer.tiers.quiet import is_quiet

KEEP = Retention(1000.0)
MEMORY_ONLY = Retention(1000.0, to_disk=False)


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def content(name: bytes) -> int:
    return 1000 + name[0]


def stored(name: bytes) -> int:
    """What it takes on a disk whose blocks take up to 10."""
    return 4 + name[0] % 7


def disk_records(*numbers: int) -> list[DiskRecord]:
    """Block i is in slot i."""
    return [DiskRecord(n, bytes([n]), content(bytes([n])), keep_s=500.0) for n in numbers]


class TierWorld:
    def __init__(
        self,
        device: int = 64,
        host: int = 0,
        disk: int = 0,
        records: Sequence[DiskRecord] = (),
        **config: Any,
    ) -> None:
        self.config = worker_config(
            node_id="w",
            role=Role.DECODE,
            epoch=7,
            num_blocks=device,
            block_size=4,
            bytes_per_block=10,
            max_model_len=64,
            fingerprint=b"f",
            num_host_blocks=host,
            num_disk_blocks=disk,
            **config,
        )
        self.now = 0.0
        self.kv = KVCacheManager(device, 4)
        self.tiers = Tiers(self.config, self.kv)
        self.memory: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
        self.memory[Tier.DISK] = {record.slot: record.checksum for record in records}
        self.index = {record.slot: record for record in records}
        self.reads: list[CopyBlocks] = []  # not done
        self.pinned: list[Source] = []  # by the test
        self.notes: list[Note] = []
        self.answers: list[CacheOrderDone] = []
        self.posted: list[CopyBlocks] = []
        self.known: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}  # by a listener
        self.tiers.start(0.0, {Tier.DISK: records})
        self.listen()

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case CopyBlocks():
                    self._check_post(effect)
                    self.reads.append(effect)
                    self.posted.append(effect)
                case StoreIndex(remove, put):
                    for slot in remove:
                        del self.index[slot]
                    for record in put:
                        assert self.memory[Tier.DISK][record.slot] == record.checksum
                        assert record.keep_s >= 0
                        self.index[record.slot] = record
                case Send("router", CacheOrderDone() as done):
                    self.answers.append(done)
                case Note():
                    self.notes.append(effect)
                case _:
                    raise AssertionError(effect)

    def _check_post(self, read: CopyBlocks) -> None:
        """No other move reads or writes its destination, and the index does not list it."""
        assert (read.peer, read.epoch) == ("w", 7)
        assert isinstance(read.transfer_id, MoveId)
        assert read.timeout_s == self.config.read_timeout_s
        ways = [(other.src_tier, other.dst_tier) for other in self.reads]
        assert (read.src_tier, read.dst_tier) not in ways
        assert 0 < len(read.src) == len(read.dst) == len(set(read.dst))

        def held(other: CopyBlocks) -> list[int]:
            """Sources that stay as they are meanwhile."""
            move = self.tiers._moves.live[other.transfer_id]
            return [block.src for block in move.blocks if block.held]

        for slot in read.dst:
            assert slot not in [s for r in self.reads if r.dst_tier is read.dst_tier for s in r.dst]
            assert slot not in [
                s for r in self.reads if r.src_tier is read.dst_tier for s in held(r)
            ]
            assert slot not in [s.slot for s in self.pinned if s.tier is read.dst_tier]
            if read.dst_tier is Tier.DISK:
                assert slot not in self.index
            if read.dst_tier is not Tier.DEVICE:
                assert slot not in [s.slot for s in self.readable(read.dst_tier).values()]

    def readable(self, tier: Tier) -> dict[bytes, Source]:
        """What can be loaded from there. Host memory hides the disk, so ask the pools."""
        pool = self.tiers._pools.get(tier)
        found = {name: pool.get(name) for name in pool.block_hashes()} if pool is not None else {}
        return {
            name: Source(tier, entry.slot, name, entry.checksum)
            for name, entry in found.items()
            if entry is not None
        }

    def held(self, tier: Tier) -> list[int]:
        """The numbers of the names that can be read there."""
        if tier is Tier.DEVICE:
            return sorted(name[0] for name in self.kv.pool.block_hashes())
        return sorted(name[0] for name in self.readable(tier))

    def listen(self) -> None:
        """Take the changes, and check that they add up to what is there."""
        for change in self.tiers.take_changes():
            known = self.known[change.tier]
            assert not set(change.stored) & known
            assert set(change.removed) <= known
            known |= set(change.stored)
            known -= set(change.removed)
        for tier in (Tier.HOST, Tier.DISK):
            assert self.known[tier] == set(self.readable(tier))
        for snapshot in self.tiers.snapshot():
            assert set(snapshot.stored) == self.known[snapshot.tier]
        for tier in (Tier.HOST, Tier.DISK):
            for name, source in self.readable(tier).items():
                assert self.memory[tier][source.slot] == source.checksum == content(name)

    def advance(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.perform(self.tiers.advance(self.now))

    def tick(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.perform(self.tiers.tick(self.now))

    def seal(self, labels: Sequence[bytes], retention: Retention = KEEP) -> list[int]:
        """Blocks of a request that has just computed them, and uses them on."""
        blocks = self.kv.allocate(len(labels))
        assert blocks is not None
        for block, name in zip(blocks, labels, strict=True):
            self.memory[Tier.DEVICE][block] = self.kv.checksums[block] = content(name)
            if self.kv.pool.seal(block, name) and self.kv.collect_sealed:
                self.kv.newly_sealed.append((block, name, retention))
        return blocks

    def serve(self, *numbers: int, retention: Retention = KEEP) -> None:
        """A whole request over these blocks, whose moves are done; it takes no time."""
        labels = names(*numbers)
        self.tiers.use(self.now, labels, retention)
        hits = self.kv.pool.lookup(labels)
        self.kv.pool.acquire(hits)
        blocks = hits + self.seal(labels[len(hits) :], retention)
        self.tiers.use(self.now, labels, retention)
        self.kv.pool.release(blocks)
        self.settle()

    def finish(self, read: CopyBlocks, error: str | None = None, *, damage: int = 0) -> None:
        """`damage`: how many blocks arrive with other bytes."""
        self.reads.remove(read)
        source, target = self.memory[read.src_tier], self.memory[read.dst_tier]
        checksums = []
        for index, (src, dst) in enumerate(zip(read.src, read.dst, strict=True)):
            target[dst] = source[src] ^ (index < damage) if error is None else -1
            checksums.append(target[dst])
        done = CopyDone(read.transfer_id, None, tuple(checksums), 0.1, 10 * len(checksums))
        if self.config.disk_bytes and read.dst_tier is Tier.DISK:
            sizes = tuple(stored(bytes([source[src] - 1000])) for src in read.src)
            done = replace(done, stored_bytes=sizes)
        if error is not None:
            done = CopyDone(read.transfer_id, error, elapsed_s=0.0 if "refused" in error else 0.1)
        effects = self.tiers.on_copy_done(self.now, done)
        assert effects is not None
        self.perform(effects)

    def settle(self) -> None:
        """Let everything that is due now happen."""
        self.advance()
        while self.reads:
            self.finish(self.reads[0])
            self.advance()
        self.listen()
        self.tiers.check_integrity()
        self.kv.pool.check_integrity()

    def rest(self, after_s: float = 2.0) -> None:
        """Time passes in which nothing is used; what is due then happens."""
        self.tick(after_s)
        self.settle()

    def clear_device(self) -> None:
        """Everything that no request uses leaves the device."""
        self.kv.pool.evict(self.kv.pool.block_hashes())

    def order(
        self, action: CacheAction, *numbers: int, order_id: str = "o", lazy: bool = False
    ) -> None:
        order = CacheOrder(order_id, "router", action, tuple(names(*numbers)), lazy)
        self.perform(self.tiers.order(self.now, order))

    def answer(self) -> int:
        """How many blocks the only order came true for."""
        (done,) = self.answers
        self.answers.clear()
        assert done.worker == "w"
        return done.num_blocks

    def store_failed(self, error: str = "no space left") -> None:
        self.perform(self.tiers.on_store_failed(self.now, StoreFailed(error)))

    def assert_idle(self) -> None:
        self.settle()
        assert self.tiers.check_idle() == []
        assert is_quiet(self.tiers, self.now)
        assert self.kv.pool.is_idle()
        listed = {record.block_hash: record.slot for record in self.index.values()}
        assert listed == {name: s.slot for name, s in self.readable(Tier.DISK).items()}


def parked_world(host: int = 16, disk: int = 32, device: int = 64) -> TierWorld:
    """Blocks 0 to 7 are in host memory and on disk, and not on the device."""
    world = TierWorld(device=device, host=host, disk=disk)
    world.serve(*range(8))
    world.rest()
    world.clear_device()
    return world
