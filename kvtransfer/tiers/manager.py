"""The tiers of a worker below its device memory: what is copied down, kept, brought up, forgotten.

Life of a block: sealed on the device -> copied to the first tier, host memory, at once -> written
to those behind it, the disk, when it was not used for a while -> evicted where another block is
worth more, and forgotten when its retention is over. Requests load it from the fastest tier that
has it. Orders of a router park, resume, pin and drop the blocks of an idle session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.block_hash import of_groups
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.runs import LONGEST
from kvrelay.engine.kv.tier import Retention, Tier, TierHashes
from kvrelay.engine.node import Effect, Note, Send
from kvrelay.kvtransfer.agent import (
    CopyDone,
    MoveId,
    StoreFailed,
    StoreFound,
    StoreGone,
    StoreListed,
    StoreRoom,
)
from kvrelay.kvtransfer.messages import CacheAction, CacheOrder, CacheOrderDone
from kvrelay.kvtransfer.tiers.blocks import Source, StoreRecords, TierBlocks
from kvrelay.kvtransfer.tiers.moves import FREE_SHARE, TierMoves
from kvrelay.kvtransfer.tiers.registry import TIERS

HOST_TIERS = (Tier.HOST, Tier.LEFT, Tier.PACKED)  # what routers know as host memory of this worker
MAX_ORDERS = 256  # live; one more is answered at once
ORDER_TIMEOUT_S = 30.0
ORDER_WINDOW = 64  # blocks of one order that are in progress at a time
RESUME_SHARE = 4  # one order evicts at most 1 / 4 of the device pool to bring blocks up
MAX_EXPIRED = 1024  # blocks of a tier that are forgotten in a tick because their time is over


@dataclass(slots=True, eq=False)
class LiveOrder:
    """An order that has not been answered. `left`: blocks that it is not yet carried out for;
    `asked`: moves that were asked for already, so that none is tried twice."""

    order: CacheOrder
    deadline: float
    left: deque[bytes]
    num_done: int = 0
    asked: set[tuple[Tier, bytes]] = field(default_factory=set)  # the tier that it should move to


class Tiers:
    """Owned by a worker node, beside its KVCacheManager. Without lower tiers it does nothing.

    Invariant: a block is found in a lower tier only with the bytes of its checksum in its slot, and
    a slot that is pinned, or being read or written, is given to no other block. Every order is
    answered exactly once. No move is waited for without a deadline, and no queue is unbounded."""

    def __init__(self, config: WorkerConfig, kv: KVCacheManager) -> None:
        self._config = config
        self._kv = kv
        self._blocks = TierBlocks(config, kv)
        self._moves = TierMoves(config, kv, self._blocks)
        self._pools = self._blocks.pools
        self._orders: list[LiveOrder] = []
        self._orders_due = False  # something has changed since they were looked at
        self.counters = self._blocks.counters
        kv.collect_sealed = bool(self._pools)
        kv.collect_decoded = self._blocks.has_memory

    def start(self, now: float, records: StoreRecords) -> None:
        """`records`: what each store held when it was opened."""
        self._blocks.start(now, records)

    def find(self, block_hashes: Sequence[bytes], *, one_tier: bool = False) -> list[Source]:
        """The longest run from the first that can be read now, each from its fastest tier;
        `one_tier`: as long as that is the same one."""
        sources: list[Source] = []
        for block_hash in block_hashes:
            for tier, pool in self._pools.items():
                entry = pool.get(block_hash)
                if entry is not None:
                    if one_tier and sources and sources[0].tier is not tier:
                        return sources
                    sources.append(Source(tier, entry.slot, block_hash, entry.checksum))
                    break
            else:
                break
        return sources

    def pin(self, sources: Iterable[Source]) -> None:
        """Just found: their slots stay as they are until `unpin`."""
        for source in sources:
            self._pools[source.tier].pin(source.slot)

    def on_loaded(self, sources: Iterable[Source]) -> None:
        """The device has these blocks now, too."""
        for source in sources:
            if source.tier is self._blocks.first.tier:
                self._blocks.on_duplicate(source.block_hash)

    def unpin(self, sources: Iterable[Source]) -> None:
        for source in sources:
            self._pools[source.tier].unpin(source.slot)

    def use(self, now: float, block_hashes: Sequence[bytes], retention: Retention) -> None:
        """A request that covers these blocks, in order, begins or ends. Blocks that were sealed for
        a request without retention, or missed their copy, are on the device only: they are copied
        down now, or the tiers would have what follows them without the beginning. Where layers
        attend to a window, the end of a request says which of their blocks those are."""
        if self._pools:
            self._take_sealed(now)
            self._blocks.use(now, block_hashes, retention)

    def discard(self, source: Source) -> None:
        """Its bytes are damaged or unreadable: forget this copy."""
        self._blocks.discard(source.tier, source.slot, source.block_hash, "bad")

    def promote(self, block_hashes: Sequence[bytes]) -> None:
        """Wanted in the first tier soon; `advance` starts the moves."""
        self._blocks.want_promotion(block_hashes)

    @property
    def memory_tier(self) -> Tier | None:
        """The first tier, if it is memory: blocks of storage can be promoted to it for peers."""
        return self._blocks.first.tier if self._blocks.has_memory else None

    def advance(self, now: float) -> list[Effect]:
        """After every message: start what is due."""
        if not self._pools:
            return []
        self._take_sealed(now)
        answers = self._step_orders(now) if self._orders_due else []
        return [*self._moves.advance(now), *answers]

    def on_copy_done(self, now: float, done: CopyDone) -> list[Effect] | None:
        """None if it is not a move between tiers. Any copy may have unpinned blocks of an order."""
        self._orders_due = bool(self._orders)
        return self._moves.finish(now, done) if isinstance(done.transfer_id, MoveId) else None

    def on_store_failed(self, now: float, failed: StoreFailed) -> list[Effect]:
        text = f"{self._config.node_id}: {failed.error}"
        if failed.lost:
            self._blocks.forget_store(failed.tier)
            return [Note("warning", f"{failed.tier}_store_lost", text)]
        return self._blocks.on_store_failed(now, failed.tier, text)

    def on_store_found(self, now: float, found: StoreFound) -> list[Effect]:
        self._blocks.on_found(now, found)
        self._blocks.count(f"tier_found_{found.tier}", len(found.records))
        return []

    def on_store_listed(self, now: float, listed: StoreListed) -> list[Effect]:
        keep_s, tier = self._config.retention.keep_s, listed.tier
        is_wanted = bool(listed.asked)  # else there are more names than can be remembered
        found = self._blocks.on_listed(now, tier, listed.names, keep_s, evict=is_wanted)
        self._blocks.count(f"tier_found_{tier}", found)
        return []

    def expect_stored(self, now: float, block_hashes: Sequence[bytes]) -> None:
        """A router says that storage that has keys holds these, in order: other workers have
        written them. Of as many as a run has at most, the last one says whether they are known."""
        known = self._pools.get(Tier.OBJECT)
        if known is None or self._kv.windows.any:
            return
        for first in range(0, len(block_hashes), LONGEST):
            names = block_hashes[first : first + LONGEST]
            if names[-1] not in known:
                keep_s = self._config.retention.keep_s
                self._blocks.on_listed(now, Tier.OBJECT, names, keep_s, evict=True)

    def on_store_room(self, room: StoreRoom) -> list[Effect]:
        pool = self._pools.get(room.tier)
        if pool is None:
            return []
        before = pool.num_usable
        pool.limit(room.num_slots)
        text = (
            f"{self._config.node_id}: the {room.tier} tier has memory for {room.num_slots} of"
            f" {pool.num_blocks} blocks: {room.why}"
        )
        if pool.num_usable < before:
            return [Note("warning", f"{room.tier}_memory_short", text)]
        return [] if pool.num_lacking else [Note("info", f"{room.tier}_memory_found", text)]

    def num_lacking(self, tier: Tier) -> int:
        """Slots that there is no memory for."""
        return self._pools[tier].num_lacking if tier in self._pools else 0

    def on_store_gone(self, gone: StoreGone) -> list[Effect]:
        self._blocks.on_gone(gone)
        return []

    def tick(self, now: float) -> list[Effect]:
        """About four times a second: what is due because time has passed."""
        self._blocks.expire(now, MAX_EXPIRED)
        self._blocks.want_leaving(now)
        for index in self._blocks.indexes.values():
            index.refresh(now)
        self._orders_due = bool(self._orders)
        return self.advance(now)

    def order(self, now: float, order: CacheOrder) -> list[Effect]:
        """Best effort; answered by `CacheOrderDone` now or within ORDER_TIMEOUT_S."""
        block_hashes = tuple(dict.fromkeys(order.block_hashes))
        self._blocks.count(f"cache_orders_{order.action}")
        left = self._read_again(order, block_hashes)
        num_all = len(block_hashes) * self._kv.windows.count
        live = LiveOrder(order, now + ORDER_TIMEOUT_S, deque(left), num_all - len(left))
        if not self._pools:
            return [self._answer(live)]
        if len(self._orders) >= MAX_ORDERS:
            self._blocks.count("cache_orders_refused")
            return [self._answer(live)]
        self._take_sealed(now)
        if order.action in (CacheAction.PARK, CacheAction.PIN):
            self._copy_all(now, live)
        elif order.action is CacheAction.RESUME:
            self._limit(live)
        self._orders.append(live)
        return self._step_orders(now)

    def _read_again(self, order: CacheOrder, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Those of a session's blocks, of all groups, that an order is carried out for: where
        layers attend to a window, its next turn reads no others; to park them is to let them go."""
        windows = self._kv.windows
        if not windows.any:
            return block_hashes
        num_tokens = len(block_hashes) * windows.block_size
        block_hashes = of_groups(block_hashes, windows.count)
        if order.action in (CacheAction.UNPIN, CacheAction.DROP):
            return block_hashes
        # The KV of the last token may not be computed: then the turn goes on one block earlier.
        before = max(0, num_tokens - windows.block_size)
        kept = {*windows.kept(num_tokens), *windows.kept(before)}
        if order.action is CacheAction.PARK and not order.lazy:
            self._kv.pool.evict(each for i, each in enumerate(block_hashes) if i not in kept)
        return [each for i, each in enumerate(block_hashes) if i in kept]

    def take_changes(self) -> tuple[TierHashes, ...]:
        """Net changes since the last call, of blocks that can be read."""
        changes = [pool.take_changes() for pool in self._pools.values()]
        found = {change.tier: change for change in changes if change is not None}
        if any(tier in self._pools for tier in HOST_TIERS[1:]):
            found = self._as_host(found)
        return tuple(found.values())

    def _as_host(self, changes: dict[Tier, TierHashes]) -> dict[Tier, TierHashes]:
        """Blocks of workers that have died, and those in four bits, are announced as if they were
        in this one's host memory: they cost as much. What comes to a second one of these is
        announced again, as `parts` may not have come to the first, and it may go."""
        parts = [changes.pop(tier) for tier in HOST_TIERS if tier in changes]
        stored = tuple(dict.fromkeys(each for part in parts for each in part.stored))
        went = dict.fromkeys(each for part in parts for each in part.removed)
        removed = tuple(name for name in went if not self.holds(Tier.HOST, name))
        if stored or removed:
            changes[Tier.HOST] = TierHashes(Tier.HOST, stored, removed)
        return changes

    def snapshot(self) -> tuple[TierHashes, ...]:
        """All blocks that can be read."""
        held: dict[Tier, dict[bytes, None]] = {}
        for tier, pool in self._pools.items():
            announced = Tier.HOST if tier in HOST_TIERS else tier
            held.setdefault(announced, {}).update(dict.fromkeys(pool.block_hashes()))
        return tuple(TierHashes(tier, tuple(names)) for tier, names in held.items())

    def parts(self, count: int) -> Iterator[TierHashes]:
        """All blocks that can be read, a few slots after the other: what comes to a slot while this
        goes on is among the changes, and a block does not change its slot."""
        for tier, pool in tuple(self._pools.items()):
            for first in range(0, pool.num_blocks, count):
                found = pool.hashes_in(first, first + count)
                yield TierHashes(Tier.HOST if tier in HOST_TIERS else tier, found)

    def holds(self, tier: Tier, block_hash: bytes) -> bool:
        """Whether it can be read from there."""
        tiers = HOST_TIERS if tier is Tier.HOST else (tier,)
        return any(t in self._pools and self._pools[t].get(block_hash) is not None for t in tiers)

    def written_bytes_per_s(self, tier: Tier) -> float:
        """How fast copies down to `tier` were, since the start; 0 before the first."""
        top = next(iter(TIERS))
        way = f"{Tier.DEVICE if tier is top else top}_{tier}"
        seconds = self.counters.get(f"moved_s_{way}", 0.0)
        return self.counters[f"moved_bytes_{way}"] / seconds if seconds else 0.0

    def num_blocks(self, tier: Tier) -> int:
        """Slots in use: of blocks that can be read, are written, or were forgotten and are read."""
        return self._pools[tier].num_used if tier in self._pools else 0

    def used_bytes(self, tier: Tier) -> int:
        """What blocks take there, and may take that are written; 0 where they are not of several
        sizes."""
        return self._pools[tier].used_bytes if tier in self._pools else 0

    def num_pinned(self, tier: Tier) -> int:
        """Slots that are being read or written."""
        return self._pools[tier].num_pinned if tier in self._pools else 0

    @property
    def num_moves(self) -> int:
        return len(self._moves.live)

    def check_integrity(self) -> None:
        """Assert the class invariants. Cost: O(number of blocks)."""
        self._blocks.check_integrity()

    def check_idle(self) -> list[str]:
        """Pins, moves and orders that are left when nothing should be; empty if all is well."""
        left = [
            f"{self.num_pinned(tier)} blocks of the {tier} tier are pinned"
            for tier in self._pools
            if self.num_pinned(tier)
        ]
        if self._moves.live:
            left.append(f"moves {sorted(move.number for move in self._moves.live)} are live")
        return left + [f"order {live.order.order_id} is live" for live in self._orders]

    def _take_sealed(self, now: float) -> None:
        if self._kv.newly_sealed:
            sealed, self._kv.newly_sealed = self._kv.newly_sealed, []
            for _, block_hash, retention in sealed:
                self._blocks.want_copy(now, block_hash, retention)
        if self._kv.newly_passed:
            passed, self._kv.newly_passed = self._kv.newly_passed, []
            for block_hash in passed:
                self._blocks.drop_unless_reused(block_hash)

    def _copy_all(self, now: float, live: LiveOrder) -> None:
        """Copy down what only the device has."""
        blocks = self._blocks
        for block_hash in live.left:
            there = blocks.is_below(block_hash) or blocks.is_coming(block_hash)
            if not there and self._kv.pool.is_cached(block_hash):
                blocks.want_copy(now, block_hash, self._config.retention)
            if live.order.action is CacheAction.PARK:
                blocks.park(block_hash)

    def _limit(self, live: LiveOrder) -> None:
        """Keep what is on the device already, and bring up only a share of the pool, or as much as
        there is room for beside what is left to requests: then nobody else's KV makes way."""
        pool = self._kv.pool
        num_blank = pool.num_free - pool.num_evictable
        most = max(pool.num_blocks // RESUME_SHARE, num_blank - pool.num_blocks // FREE_SHARE)
        left = [*live.left]
        hits = pool.lookup(left)
        pool.acquire(hits)
        pool.release(hits)
        del left[len(hits) + most :]
        live.left = deque(left)
        waiting = [each for each in left[len(hits) :] if not pool.is_cached(each)]
        first = self._blocks.first
        self._blocks.want_promotion(
            [block_hash for block_hash in waiting if first.get(block_hash) is None]
        )

    def _step_orders(self, now: float) -> list[Effect]:
        self._orders_due = False
        answers: list[Effect] = []
        for live in list(self._orders):
            self._step(now, live)
            if live.left and now < live.deadline:
                continue
            self._stop_loading(live.left)
            self._orders.remove(live)
            answers.append(self._answer(live))
        return answers

    def _step(self, now: float, live: LiveOrder) -> None:
        """Go on with the next blocks; those that have to be waited for stay in `left`."""
        waiting: list[bytes] = []
        while live.left and len(waiting) < ORDER_WINDOW:
            block_hash = live.left.popleft()
            done = self._try(live, block_hash)
            if done is None:
                waiting.append(block_hash)
            elif done:
                live.num_done += 1
            elif live.order.action is CacheAction.RESUME:
                self._stop_loading(live.left)  # without this one they are of no use
                live.left.clear()
        live.left.extendleft(reversed(waiting))

    def _try(self, live: LiveOrder, block_hash: bytes) -> bool | None:
        """Whether the order was carried out for this block; None: not yet."""
        match live.order.action:
            case CacheAction.PARK:
                return self._park(block_hash, lazy=live.order.lazy)
            case CacheAction.RESUME:
                return self._resume(live, block_hash)
            case CacheAction.PIN:
                if self._blocks.is_below(block_hash):
                    return self._blocks.retain(block_hash)
                return None if self._blocks.is_coming(block_hash) else False
            case CacheAction.UNPIN:
                return self._blocks.stop_retaining(block_hash)
            case CacheAction.DROP:
                return self._drop(block_hash)

    def _park(self, block_hash: bytes, *, lazy: bool) -> bool | None:
        if not self._blocks.is_below(block_hash):
            return None if self._blocks.is_coming(block_hash) else False
        if lazy:
            return True
        self._kv.pool.evict([block_hash])
        return not self._kv.pool.is_cached(block_hash)

    def _resume(self, live: LiveOrder, block_hash: bytes) -> bool | None:
        """From a tier behind to the first one, and from there to the device, each tried once."""
        blocks, first = self._blocks, self._blocks.first
        if self._kv.pool.is_cached(block_hash):
            return True
        if block_hash in self._moves.to_load or self._moves.is_moving(
            block_hash, first.tier, Tier.DEVICE
        ):
            return None
        if first.get(block_hash) is not None:
            if (Tier.DEVICE, block_hash) in live.asked:
                return False
            live.asked.add((Tier.DEVICE, block_hash))
            self._moves.to_load[block_hash] = None
            return None
        if blocks.is_promoting(block_hash) or first.is_coming(block_hash):
            return None
        if not blocks.is_below(block_hash) or (first.tier, block_hash) in live.asked:
            return False
        live.asked.add((first.tier, block_hash))
        blocks.want_promotion([block_hash])
        return None

    def _drop(self, block_hash: bytes) -> bool | None:
        """Sessions may share a block: one that is pinned by an order or in use stays there."""
        pool = self._kv.pool
        if block_hash not in self._blocks.usages and not pool.is_cached(block_hash):
            return False
        self._blocks.drop(block_hash)
        pool.evict([block_hash])
        if not pool.is_cached(block_hash):
            return block_hash not in self._blocks.usages
        being_copied = self._moves.is_moving(block_hash, Tier.DEVICE, self._blocks.first.tier)
        return None if being_copied else False

    def _stop_loading(self, block_hashes: Iterable[bytes]) -> None:
        for block_hash in block_hashes:
            self._moves.to_load.pop(block_hash, None)

    def _answer(self, live: LiveOrder) -> Send:
        num_done = live.num_done // self._kv.windows.count  # the router counts the first group's
        done = CacheOrderDone(self._config.node_id, live.order.order_id, num_done)
        return Send(live.order.router, done)
