"""Blocks on their way between the tiers of one worker.

Life of a move: a batch is taken from the queue of its direction -> posted, its blocks pinned at the
source and unreadable at the destination -> done: each block whose bytes have the right checksum can
be read, the others are forgotten, and so is a source that turns out to be bad.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import Effect, Note
from kvrelay.kvtransfer.agent import (
    MISSING,
    NOT_STORED,
    UNKNOWN,
    CopyBlocks,
    CopyDone,
    MoveId,
    TransferId,
)
from kvrelay.kvtransfer.tiers.blocks import BackingTier, TierBlocks
from kvrelay.kvtransfer.tiers.pool import Entry, TierPool
from kvrelay.kvtransfer.tiers.registry import TIERS, has_keys, is_storage

MAX_MOVE_BLOCKS = 32  # in one move; there is one at a time in each direction
MOVE_SHARE = 8  # and it has at most 1 / 8 of the blocks of either tier
FREE_SHARE = 8  # 1 / 8 of the device pool is left to requests when blocks are loaded ahead of them
RETRY_S = 1.0  # before a direction is tried again in which a move has failed


@dataclass(frozen=True, slots=True)
class Moving:
    """One block of a move. `entry`: at the destination, unless that is the device. `held`: it stays
    on the device meanwhile. What the device evicts next would lose its place in that order if it
    was held: it is read first, and whether it was there throughout is looked at afterwards."""

    block_hash: bytes
    src: int
    dst: int
    checksum: int
    entry: Entry | None = None
    held: bool = True


@dataclass(frozen=True, slots=True)
class Move:
    src: Tier
    dst: Tier
    blocks: list[Moving]

    @property
    def way(self) -> tuple[Tier, Tier]:
        return self.src, self.dst


class TierMoves:
    """Owned by `Tiers`.

    Invariant: at most one move each way; exactly the blocks of `live` are pinned by it, in the
    tiers and, if they are `held`, on the device. What the index of a store has to forget goes
    before the next move to that store."""

    def __init__(self, config: WorkerConfig, kv: KVCacheManager, blocks: TierBlocks) -> None:
        self.live: dict[TransferId, Move] = {}
        self.to_load: OrderedDict[bytes, None] = OrderedDict()  # from the first tier to the device
        self._config = config
        self._kv = kv
        self._blocks = blocks
        self._not_before: dict[tuple[Tier, Tier], float] = {}
        self._move_ids = map(MoveId, count())

    def is_moving(self, block_hash: bytes, src: Tier, dst: Tier) -> bool:
        moves = (move for move in self.live.values() if move.way == (src, dst))
        return any(block.block_hash == block_hash for move in moves for block in move.blocks)

    def advance(self, now: float) -> list[Effect]:
        """Start the moves that are due."""
        moves = [
            *self._copy_down(now),
            *self._each(self._write, now),
            *self._each(self._promote, now),
            *self._load(now),
        ]
        self._blocks.take_forgotten()
        changes = [effect for each in self._blocks.indexes.values() for effect in each.take(now)]
        return [*changes, *moves]

    def finish(self, now: float, done: CopyDone) -> list[Effect]:
        """Take note that a move has settled."""
        move = self.live.pop(done.transfer_id)
        way, add = f"{move.src}_{move.dst}", self._blocks.count
        if move.src is Tier.DEVICE:
            self._kv.pool.release([block.src for block in move.blocks if block.held])
        else:
            for block in move.blocks:
                self._blocks.pools[move.src].unpin(block.src)
        if done.error is None:
            assert len(done.checksums) == len(move.blocks)
            arrived = _arrived(move, done)
            add(f"moved_blocks_{way}", sum(arrived))
            add(f"moved_bytes_{way}", done.num_bytes)
            add(f"moved_s_{way}", done.elapsed_s)
            if done.stored_bytes:
                most, _ = TIERS[move.dst].sizes(self._config)
                add(f"stored_bytes_{way}", sum(done.stored_bytes))
                add(f"stored_whole_{way}", done.stored_bytes.count(most))
            gone = [not self._is_there(block) for block in move.blocks]
            sound = [a or g for a, g in zip(arrived, gone, strict=True)]
            effects = self._check_arrived(move, sound, done)
            arrived = [a and not g for a, g in zip(arrived, gone, strict=True)]
        else:
            arrived = [False] * len(move.blocks)
            add(f"moves_failed_{way}")
            effects = self._fail(now, move, done)
        sizes = done.stored_bytes or (None,) * len(move.blocks)
        read_as = done.stored_checksums or [block.checksum for block in move.blocks]
        for block, good, num_bytes, read in zip(move.blocks, arrived, sizes, read_as, strict=True):
            if read == NOT_STORED and block.entry is not None:
                block.entry.usage.is_approximate = good = False  # not again before it is used
            self._settle(move.dst, replace(block, checksum=read), good, num_bytes)
        if move.dst is Tier.DEVICE:
            self._kv.pool.release([block.dst for block in move.blocks])
        return effects

    def _is_there(self, block: Moving) -> bool:
        """Whether it still has its name where it was read."""
        return block.held or self._kv.pool.has_hash(block.src, block.block_hash)

    def _copy_down(self, now: float) -> list[Effect]:
        blocks, pool = self._blocks, self._blocks.first
        moving: list[Moving] = []
        room = self._room(now, Tier.DEVICE, pool.tier)
        while blocks.to_copy and len(moving) < room:
            block_hash, must = blocks.to_copy.popitem(last=False)
            found = self._kv.pool.lookup([block_hash])
            entry = None
            if not found:
                blocks.count("tier_missed")
            elif block_hash in pool:
                blocks.on_duplicate(block_hash)
            else:
                entry = self._allocate(now, pool, block_hash, is_duplicate=not must)
                if entry is None and not must:
                    blocks.leave_above(block_hash)
            if entry is None:
                blocks.forget_usage(block_hash)
                continue
            (block,) = found
            checksum = self._kv.checksums[block]
            held = checksum == UNKNOWN or not blocks.is_leaving(block_hash)
            moving.append(Moving(block_hash, block, entry.slot, checksum, entry, held))
        return self._post(Tier.DEVICE, pool.tier, moving)

    def _each(
        self, start: Callable[[float, BackingTier], list[Effect]], now: float
    ) -> list[Effect]:
        return [effect for backing in self._blocks.backing for effect in start(now, backing)]

    def _write(self, now: float, backing: BackingTier) -> list[Effect]:
        """Copies blocks from the first tier to one behind it."""
        first, target = self._blocks.first, backing.pool
        moving: list[Moving] = []
        room = self._room(now, first.tier, target.tier)
        while len(moving) < room and (source := backing.next_to_write(now)) is not None:
            entry = self._allocate(now, target, source.block_hash)
            if entry is None:
                backing.consider_writing(source)
                break
            moving.append(
                Moving(source.block_hash, source.slot, entry.slot, source.checksum, entry)
            )
        return self._post(first.tier, target.tier, moving)

    def _promote(self, now: float, backing: BackingTier) -> list[Effect]:
        """Copies blocks from there to the first tier."""
        first, pool = self._blocks.first, backing.pool
        moving: list[Moving] = []
        room = self._room(now, pool.tier, first.tier)
        while backing.to_promote and len(moving) < room:
            block_hash, _ = backing.to_promote.popitem(last=False)
            source = pool.get(block_hash)
            if source is None or block_hash in first:
                continue
            entry = self._allocate(now, first, block_hash)
            if entry is not None:
                moving.append(Moving(block_hash, source.slot, entry.slot, source.checksum, entry))
        return self._post(pool.tier, first.tier, moving)

    def _load(self, now: float) -> list[Effect]:
        device, pool = self._kv.pool, self._blocks.first
        sources: list[Entry] = []
        room = self._room(now, pool.tier, Tier.DEVICE)
        room = min(room, device.num_free - device.num_blocks // FREE_SHARE)
        while self.to_load and len(sources) < room:
            block_hash, _ = self.to_load.popitem(last=False)
            source = pool.get(block_hash)
            if source is not None and not device.is_cached(block_hash):
                sources.append(source)
        targets = self._kv.allocate(len(sources)) or []
        moving = [
            Moving(source.block_hash, source.slot, block, source.checksum)
            for source, block in zip(sources, targets, strict=True)
        ]
        return self._post(pool.tier, Tier.DEVICE, moving)

    def _room(self, now: float, src: Tier, dst: Tier) -> int:
        """How many blocks may be moved that way now."""
        if any(move.way == (src, dst) for move in self.live.values()):
            return 0
        if now < self._not_before.get((src, dst), now):
            return 0
        if not self._blocks.may_write(now, dst):
            return 0
        share = min(self._size(src), self._size(dst)) // MOVE_SHARE
        return max(1, min(MAX_MOVE_BLOCKS, share))

    def _size(self, tier: Tier) -> int:
        pool = self._blocks.pools.get(tier)
        return self._config.num_blocks if pool is None else pool.num_usable

    def _allocate(
        self, now: float, pool: TierPool, block_hash: bytes, *, is_duplicate: bool = False
    ) -> Entry | None:
        usage = self._blocks.usages[block_hash].settled()
        entry = pool.allocate(now, usage, is_duplicate=is_duplicate)
        if entry is None and not is_duplicate:
            self._blocks.count(f"tier_no_room_{pool.tier}")
        return entry

    def _post(self, src: Tier, dst: Tier, moving: list[Moving]) -> list[Effect]:
        if not moving:
            return []
        sources = tuple(block.src for block in moving)
        if src is Tier.DEVICE:
            self._kv.pool.acquire([block.src for block in moving if block.held])
        else:
            for slot in sources:
                self._blocks.pools[src].pin(slot)
        transfer_id = next(self._move_ids)
        self.live[transfer_id] = Move(src, dst, moving)
        config = self._config
        is_keyed = has_keys(src) or has_keys(dst)
        return [
            CopyBlocks(
                transfer_id=transfer_id,
                peer=config.node_id,
                epoch=config.epoch,
                src=sources,
                dst=tuple(block.dst for block in moving),
                timeout_s=config.read_timeout_s,
                src_tier=src,
                dst_tier=dst,
                names=tuple(block.block_hash for block in moving) if is_keyed else (),
                checksums=tuple(block.checksum for block in moving) if has_keys(dst) else (),
                approximate=self._approximate(dst, moving),
            )
        ]

    def _approximate(self, dst: Tier, moving: list[Moving]) -> tuple[int, ...]:
        """Slots of `dst` whose blocks may be stored in fewer bits."""
        is_coded = dst is Tier.DISK and self._config.disk_codec != "none"
        if not (is_coded and self._config.quantizes):
            return ()
        usages = self._blocks.usages
        return tuple(b.dst for b in moving if usages[b.block_hash].settled().is_approximate)

    def _settle(self, dst: Tier, block: Moving, good: bool, num_bytes: int | None) -> None:
        """Nothing writes to the destination any more, where the block takes so many bytes; None:
        as many as any."""
        entry, blocks = block.entry, self._blocks
        if entry is None:
            if good and self._kv.pool.seal(block.dst, block.block_hash):
                self._kv.checksums[block.dst] = block.checksum
                blocks.on_duplicate(block.block_hash)
            blocks.leave_first(block.block_hash)
            return
        pool = blocks.pools[dst]
        if not good:
            pool.abandon(entry, "failed")
        elif pool.commit(entry, block.checksum, num_bytes):
            if any(other.is_retained(block.block_hash) for other in blocks.pools.values()):
                pool.retain(block.block_hash)
            if dst in blocks.indexes:
                blocks.indexes[dst].put(entry)
        blocks.consider_writing(block.block_hash)
        if dst is not blocks.first.tier:
            blocks.leave_first(block.block_hash)

    def _check_arrived(self, move: Move, arrived: list[bool], done: CopyDone) -> list[Effect]:
        """Forget the sources of blocks that do not fit their checksum; not the device's, whose
        blocks were computed there."""
        bad = [block for block, good in zip(move.blocks, arrived, strict=True) if not good]
        if not bad:
            return []
        self._blocks.count(f"moved_bad_{move.src}_{move.dst}", len(bad))
        if move.src is not Tier.DEVICE:
            for block in bad:
                self._blocks.discard(move.src, block.src, block.block_hash, "bad")
        if set(done.checksums) & {MISSING} and len(bad) == done.checksums.count(MISSING):
            return []  # others may evict there
        text = (
            f"{self._config.node_id}: {len(bad)} blocks moved from {move.src} to {move.dst} do not"
            " have the bytes that were computed; these copies are not used"
        )
        return [Note("error", "tier_checksum_mismatch", text)]

    def _fail(self, now: float, move: Move, done: CopyDone) -> list[Effect]:
        self._not_before[move.way] = now + RETRY_S
        # A refused move took no time: the source was not read.
        if is_storage(move.src) and not has_keys(move.src) and done.elapsed_s > 0:
            for block in move.blocks:
                self._blocks.discard(move.src, block.src, block.block_hash, "unreadable")
        text = (
            f"{self._config.node_id}: {len(move.blocks)} blocks were not moved from {move.src} to"
            f" {move.dst}: {done.error}"
        )
        if is_storage(move.dst):
            return self._blocks.on_store_failed(now, move.dst, text)
        return [Note("warning", "tier_move_failed", text)]


def _arrived(move: Move, done: CopyDone) -> list[bool]:
    """Whether each block has the bytes that it should have. Those whose checksum was not known have
    it from now on."""
    for index, (block, checksum) in enumerate(zip(move.blocks, done.checksums, strict=True)):
        if block.checksum == UNKNOWN and checksum >= 0:
            move.blocks[index] = replace(block, checksum=checksum)
    return [b.checksum == c for b, c in zip(move.blocks, done.checksums, strict=True)]
