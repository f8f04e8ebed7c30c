"""Which worker holds which sealed block in which tier, as far as one router knows.

Life of a view of one worker: added with an epoch and empty; a snapshot fills it; events keep it up
to date; a gap in their sequence freezes it until the next snapshot; a new epoch empties it; removal
forgets it. Between the routing of a prompt and the worker's own events, expected entries stand in
for the blocks that are about to come into its device memory.

A lookup asks four things of each worker: how far its device holds the prefix, how far its memory,
how far any of its tiers, and how far it has said so itself. The blocks are in a native table
(`router/native/prefix_index.c`), and a lookup asks it about some of them only: the first 16 one by
one, then one at every stride (32 blocks; in a prompt of more than 2,048 its 64th part, at most 128)
and the last, and between two of these only where fewer workers hold the second. That is right
wherever a prefix is held without holes, as eviction from its end leaves it. Among the first blocks
every hole is seen; one behind them may be overlooked, and then the worker finds out for itself what
it has to compute. What is claimed always ends before any block that was asked about and was not
there.

Work that grows with what one worker holds is put off: when a worker goes or restarts, or a snapshot
replaces many blocks, they count no more, and are taken out some at a time by later calls.

In the native table a worker is a slot, a small number; what is known of a block at a slot are
facts, one bit each. Hashes are packed, 16 bytes each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from ctypes import c_uint8, c_uint16, c_uint32
from dataclasses import dataclass
from typing import NamedTuple
from weakref import finalize

from kvrelay.engine.kv.block_hash import HASH_BYTES, unpack
from kvrelay.engine.kv.events import KVEvents, KVSnapshot
from kvrelay.engine.kv.tier import Tier, TierHashes
from kvrelay.engine.node import NodeId
from kvrelay.router.index.watcher import CacheWatcher
from kvrelay.router.native.bindings import address_of, bindings, constants, ffi

Hashes = bytes | bytearray | memoryview  # packed

FACT = {Tier.DEVICE: constants.DEVICE, Tier.HOST: constants.HOST, Tier.DISK: constants.DISK}
EXPECTED: int = constants.EXPECTED
SAID: int = constants.SAID  # all that a worker has said itself, in whatever tier
STORE_GROUP = 2  # slots of object stores are in none of workers
MAX_REPLACED = 1 << 14  # blocks of a worker that a snapshot takes out at once
MAX_STORED = 1 << 22  # blocks of one object store; workers find others by asking for them
NUM_RUNS: int = constants.NUM_RUNS  # in device memory, any memory, any tier, said by the worker


def count_hashes(hashes: Hashes) -> int:
    count, rest = divmod(len(hashes), HASH_BYTES)
    if rest:
        raise ValueError(f"packed hashes of {len(hashes)} bytes: expected {HASH_BYTES} each")
    return count


def _address(hashes: Hashes) -> bytes | int:
    """`hashes` as an argument, without a copy; its size must not change meanwhile."""
    if isinstance(hashes, bytes):
        return hashes
    return address_of(ffi.from_buffer(hashes))


class Held(NamedTuple):
    """How much of a prefix a worker holds, as three runs one after the other, in blocks (or, after
    `times`, in tokens). A block that is in several tiers counts for the fastest.

    `said` is how much of it, from the first block on, the worker itself has said it holds, in
    any tier: the rest is only expected there, and cannot be fetched from it."""

    device: int = 0
    host: int = 0  # each of them in device or host memory
    disk: int = 0  # each in any tier
    said: int = 0
    object: int = 0  # beyond those, in the object store that the worker can read

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk + self.object

    def times(self, factor: int) -> Held:
        """Counts in a unit that is `factor` times smaller."""
        return Held(*(count * factor for count in self))


NOTHING = Held()


class IndexTable:
    """Owned by a `PrefixIndex`; used by one thread. Invariant: a slot that was opened is used until
    it is closed, and is not named again before it is opened again."""

    def __init__(self, stride: int, max_expected: int) -> None:
        self._lib = bindings()
        self.address: int = self._lib.kvr_index_new(stride, max_expected)
        finalize(self, self._lib.kvr_index_free, self.address)
        self._num_slots = 0  # more than the highest that was ever opened

    def open(self, group: int) -> int:
        """A slot without blocks. `group` tells kinds of workers apart in `best`."""
        slot: int = self._lib.kvr_index_open(self.address, group)
        if slot < 0:
            raise ValueError("a prefix index can follow 65,535 workers, and has as many")
        self._num_slots = max(self._num_slots, slot + 1)
        return slot

    def close(self, slot: int) -> None:
        """Its blocks are taken out bit by bit, by later calls."""
        self._lib.kvr_index_close(self.address, slot)

    def regroup(self, slot: int, group: int) -> None:
        self._lib.kvr_index_regroup(self.address, slot, group)

    def change(self, slot: int, hashes: Hashes, add: int = 0, drop: int = 0) -> None:
        """Facts `add` come to be true of the blocks, or facts `drop` are true no more."""
        count = count_hashes(hashes)
        if count:
            self._lib.kvr_index_change(self.address, slot, _address(hashes), count, add, drop)

    def drop_all(self, slot: int, facts: int) -> None:
        self._lib.kvr_index_drop_all(self.address, slot, facts)

    def expect(self, slot: int, hashes: Hashes, now: float, until: float) -> None:
        """The blocks count as in device memory until `until`, where they are not yet."""
        count = count_hashes(hashes)
        if count:
            self._lib.kvr_index_expect(self.address, slot, _address(hashes), count, now, until)

    def tidy(self, now: float, budget: int) -> None:
        """Take out what is over, at most `budget` blocks of each kind."""
        self._lib.kvr_index_tidy(self.address, now, budget)

    def lookup(self, now: float, hashes: Hashes, limit: int | None) -> ctypes.Array[c_uint32]:
        """NUM_RUNS lengths for each slot, of the first `limit` blocks."""
        ends = (c_uint32 * (NUM_RUNS * self._num_slots))()
        count = count_hashes(hashes)
        if limit is not None and limit < count:
            count = max(0, limit)
        if count and self._num_slots:
            self._lib.kvr_index_lookup(self.address, now, _address(hashes), count, ends)
        return ends

    def best(self, ends: ctypes.Array[c_uint32], group: int, limit: int) -> list[int]:
        """Slots of `group` by how much they hold in any tier, of equals the one first that was
        returned longest ago."""
        found = (c_uint16 * limit)()
        num_slots = len(ends) // NUM_RUNS
        count = self._lib.kvr_index_best(self.address, ends, num_slots, group, limit, found)
        return found[:count]

    def count(self, hashes: Hashes) -> dict[int, dict[Tier, int]]:
        """How many of the blocks each slot has in each tier; no zeros."""
        counts = (c_uint32 * (len(FACT) * self._num_slots))()
        count = count_hashes(hashes)
        if count:
            self._lib.kvr_index_count(self.address, _address(hashes), count, counts)
        found: dict[int, dict[Tier, int]] = {}
        for at, number in enumerate(counts):
            if number:
                slot, tier = divmod(at, len(FACT))
                found.setdefault(slot, {})[tuple(FACT)[tier]] = number
        return found

    def export(self, slot: int) -> dict[Tier, bytes]:
        """All that is said of the slot, by tier, in no order."""
        sizes = [self.held(slot, fact) * HASH_BYTES for fact in FACT.values()]
        buffers = [(c_uint8 * size)() for size in sizes]
        self._lib.kvr_index_export(self.address, slot, *buffers)
        return {tier: bytes(hashes) for tier, hashes in zip(FACT, buffers, strict=True)}

    def held(self, slot: int, facts: int) -> int:
        """Number of blocks of which one of `facts`, that exclude each other, is true."""
        number: int = self._lib.kvr_index_held(self.address, slot, facts)
        return number

    @property
    def num_blocks(self) -> int:
        number: int = self._lib.kvr_index_num_blocks(self.address)
        return number

    @property
    def num_bytes(self) -> int:
        number: int = self._lib.kvr_index_num_bytes(self.address)
        return number

    def check_integrity(self) -> None:
        wrong: bytes | None = self._lib.kvr_index_check(self.address)
        assert wrong is None, (wrong or b"").decode()


STRIDE = 32  # blocks; the least distance between those that a lookup asks about
TIDY_BUDGET = 8192  # blocks taken out at a tick, when nothing else happens


class Export(NamedTuple):
    """All that a worker has said it holds, as of its event `seq`; hashes packed, in no order."""

    epoch: int
    seq: int
    tiers: dict[Tier, bytes]


@dataclass(slots=True, eq=False)
class _View:
    """What is known of one worker. In step with it exactly when `seq == seen`."""

    worker: NodeId
    slot: int  # its blocks in the table
    group: int
    epoch: int
    kind: bytes  # equal for workers that share an object store, if they have one
    seq: int | None = None  # last event (or snapshot) applied; None: nothing yet
    seen: int = -1  # highest event known of, applied or not
    asked_at: float | None = None

    @property
    def in_step(self) -> bool:
        return self.seq is not None and self.seq >= self.seen


class Matches:
    """What a lookup found. Ask it before the index changes: a worker that has restarted since
    has no answer here."""

    __slots__ = ("_best", "_index", "ends")

    def __init__(self, index: PrefixIndex, ends: ctypes.Array[ctypes.c_uint32]) -> None:
        self._index = index
        self.ends = ends  # NUM_RUNS lengths for each slot
        self._best: dict[tuple[int, int], list[NodeId]] = {}

    def held(self, worker: NodeId) -> Held:
        """How much of the prefix `worker` holds."""
        view = self._index.views.get(worker)
        if view is None:
            return NOTHING
        at, ends, stored = NUM_RUNS * view.slot, self.ends, self.stored(view.kind)
        if at >= len(ends) or not (ends[at + 2] or stored):
            return NOTHING
        device, memory, anywhere, said = ends[at : at + NUM_RUNS]
        beyond = max(0, stored - anywhere)
        return Held(device, memory - device, anywhere - memory, said, beyond)

    def stored(self, kind: bytes) -> int:
        """How much of the prefix the object store of these workers has, from the first block on."""
        at = NUM_RUNS * self._index.stores.get(kind, -1) + 2
        return self.ends[at] if 0 <= at < len(self.ends) else 0

    def best(self, group: int, limit: int = 8) -> list[NodeId]:
        """The workers of `group` that hold most of the prefix in any tier, most first; none that
        holds nothing. Among equals the one first that was returned longest ago, so that the holders
        of a prefix that all of them have take turns, lookup by lookup. Not to be changed."""
        found = self._best.get((group, limit))
        if found is None:
            slots = self._index.slots
            best = self._index.table.best(self.ends, group, limit)
            found = self._best[group, limit] = [slots[slot].worker for slot in best]
        return found

    @property
    def longest(self) -> int:
        """Blocks of the prefix that the worker with most of it holds, in any tier."""
        return max(self.ends[2::NUM_RUNS], default=0)

    def workers(self) -> list[NodeId]:
        """All workers that hold some of it, in no order."""
        slots = self._index.slots
        found = enumerate(self.ends[2::NUM_RUNS])
        return [slots[slot].worker for slot, length in found if length and slot in slots]


class PrefixIndex:
    """Owned by a router. Invariant: the view in `slots[s]` has slot s of the table, and every open
    slot of it has a view; `_lagging` are the views with a gap."""

    def __init__(
        self,
        snapshot_retry_s: float = 1.0,
        expected_s: float = 10.0,
        max_expected: int = 200_000,
        stride: int = STRIDE,
    ) -> None:
        if not 1 <= stride <= 1 << 16:
            raise ValueError(f"stride {stride}: expected 1 to 65536 blocks")
        self._snapshot_retry_s = snapshot_retry_s
        self.expected_s = expected_s
        self.table = IndexTable(stride, max_expected)
        self.views: dict[NodeId, _View] = {}
        self.slots: dict[int, _View] = {}
        self.stores: dict[bytes, int] = {}  # slots of object stores, by the kind of their workers
        self._lagging: dict[NodeId, _View] = {}
        self.on_slot: Callable[[NodeId, int | None], None] = lambda worker, slot: None
        """Told which slot of the table a worker has from now on; None: none any more."""
        self.on_store: Callable[[bytes, int], None] = lambda kind, slot: None
        """Told which slot of the table the object store of workers of a kind has."""
        self.watcher: CacheWatcher | None = None

    def add(self, worker: NodeId, epoch: int, group: int = 0, kind: bytes = b"") -> None:
        """Begin to follow `worker`, if it is not followed: it is due to be asked for a snapshot.
        `group` is the kind of workers that it is to be found among from now on; what one of `kind`
        has in an object store, all of that kind have."""
        view = self.views.get(worker)
        if view is None:
            slot = self.table.open(group)
            view = self.views[worker] = self.slots[slot] = _View(worker, slot, group, epoch, kind)
            self.on_slot(worker, slot)
        elif epoch > view.epoch:
            self._restart(view, epoch)
        if view.group != group:
            view.group = group
            self.table.regroup(view.slot, group)
        self._check_gap(view)

    def remove(self, worker: NodeId) -> None:
        view = self.views.pop(worker, None)
        if view is not None:
            self.on_slot(worker, None)
            del self.slots[view.slot]
            self.table.close(view.slot)
            self._forget(worker)
            self._lagging.pop(worker, None)
            if view.kind in self.stores and all(v.kind != view.kind for v in self.views.values()):
                self.table.close(self.stores.pop(view.kind))

    def apply(self, now: float, events: KVEvents | KVSnapshot) -> bool:
        """True: the worker has to be asked for a snapshot now.

        Events of an unknown worker or a past epoch, and those that are older than what is known,
        change nothing. A later epoch than the known one empties the view.
        """
        if isinstance(events, KVSnapshot):
            objects = TierHashes(Tier.OBJECT, events.stored_objects)
            parts = (TierHashes(Tier.DEVICE, events.hashes), *events.tiers, objects)
            tiers = {part.tier: b"".join(part.stored) for part in parts}
            return self.restore(now, events.worker, events.epoch, events.seq, tiers)
        view = self._current_view(events.worker, events.epoch, events.seq)
        if view is None:
            return False
        if view.seq is not None and events.seq == view.seq + 1:
            objects = TierHashes(Tier.OBJECT, events.stored_objects, events.removed_objects)
            device = TierHashes(Tier.DEVICE, events.stored, events.removed)
            for change in (device, *events.tiers, objects):
                if not (change.stored or change.removed):
                    continue
                self._store(view, change.tier, b"".join(change.stored))
                slot, fact = self._place_of(view, change.tier)
                removed = b"".join(change.removed)
                self.table.change(slot, removed, drop=fact)
                if self.watcher is not None and change.tier is not Tier.OBJECT:
                    self.watcher.changed(view.worker, change.tier, b"", removed)
            view.seq = events.seq
        self._check_gap(view)
        return self._ask(now, view)

    def restore(
        self, now: float, worker: NodeId, epoch: int, seq: int, tiers: dict[Tier, bytes]
    ) -> bool:
        """What `apply` does with a snapshot, its hashes packed. They are all that `worker` held at
        its event `seq`."""
        view = self._current_view(worker, epoch, seq)
        if view is None:
            return False
        if view.seq is None or seq > view.seq:
            num_said = self.table.held(view.slot, SAID)
            if num_said > MAX_REPLACED:
                self._take_new_slot(view)
            elif num_said:
                self.table.drop_all(view.slot, SAID)
                self._forget(worker)
            for tier, block_hashes in tiers.items():
                if block_hashes:
                    self._store(view, tier, block_hashes)
            view.seq = seq
        self._check_gap(view)
        return self._ask(now, view)

    def export(self, worker: NodeId) -> Export | None:
        """What `restore` takes; None: nothing is known of `worker`."""
        view = self.views.get(worker)
        if view is None or view.seq is None:
            return None
        return Export(view.epoch, view.seq, self.table.export(view.slot))

    def on_event_seq(self, now: float, worker: NodeId, epoch: int, event_seq: int) -> bool:
        """The last event of `worker` was `event_seq`, received or not. True: ask it now."""
        view = self.views.get(worker)
        if view is None or epoch != view.epoch:
            return False
        view.seen = max(view.seen, event_seq)
        self._check_gap(view)
        return self._ask(now, view)

    def due(self, now: float) -> list[NodeId]:
        """Workers that have to be asked (again) for a snapshot now."""
        self.table.tidy(now, TIDY_BUDGET)
        return [view.worker for view in self._lagging.values() if self._ask(now, view)]

    @property
    def in_step(self) -> bool:
        """True when no view has a gap."""
        return not self._lagging

    def expect(self, now: float, worker: NodeId, block_hashes: Hashes) -> None:
        """Count the blocks as in device memory of `worker` until it says so itself, or the time is
        over; those that count already do so no longer. O(blocks): leave out those that it is known
        to hold."""
        view = self.views.get(worker)
        if view is not None:
            self.table.expect(view.slot, block_hashes, now, now + self.expected_s)

    def lookup(self, now: float, block_hashes: Hashes, limit: int | None = None) -> Matches:
        """How much each worker holds of the prompt whose blocks have these hashes; with `limit`, of
        its first blocks. It asks about some 80 blocks, and log(stride) more for each place where
        fewer workers go on; see the module's docstring."""
        return Matches(self, self.table.lookup(now, block_hashes, limit))

    def block_hashes(self, worker: NodeId, tier: Tier = Tier.DEVICE) -> frozenset[bytes]:
        """The blocks that `worker` has said it holds in `tier`."""
        view = self.views.get(worker)
        return (
            frozenset() if view is None else frozenset(unpack(self.table.export(view.slot)[tier]))
        )

    def holdings(self, hashes: Iterable[bytes]) -> dict[NodeId, dict[Tier, int]]:
        """How many of `hashes` each worker has said it holds, by tier; no zeros."""
        counts = self.table.count(b"".join(hashes))
        return {self.slots[s].worker: held for s, held in counts.items() if s in self.slots}

    def num_blocks(self, worker: NodeId) -> int:
        """Blocks counted as in device memory of `worker`, expected ones too."""
        view = self.views.get(worker)
        return 0 if view is None else self.table.held(view.slot, FACT[Tier.DEVICE] | EXPECTED)

    def check_integrity(self) -> None:
        """Assert the class invariant. O(everything): for tests and the simulator."""
        assert self.slots == {view.slot: view for view in self.views.values()}
        assert len(self.slots) == len(self.views)
        assert self._lagging == {w: v for w, v in self.views.items() if not v.in_step}
        self.table.check_integrity()

    def _store(self, view: _View, tier: Tier, block_hashes: bytes) -> None:
        slot, fact = self._place_of(view, tier)
        if tier is not Tier.OBJECT or self.table.held(slot, fact) < MAX_STORED:
            self.table.change(slot, block_hashes, add=fact)
        if self.watcher is not None and tier is not Tier.OBJECT:
            self.watcher.changed(view.worker, tier, block_hashes, b"")

    def _forget(self, worker: NodeId) -> None:
        if self.watcher is not None:
            self.watcher.forgotten(worker)

    def _place_of(self, view: _View, tier: Tier) -> tuple[int, int]:
        """The slot and the fact by which the table knows what this worker has in a tier. What it
        has in the object store, all of its kind have."""
        if tier is not Tier.OBJECT:
            return view.slot, FACT[tier]
        slot, fact = self.stores.get(view.kind), FACT[Tier.DISK]
        if slot is None:
            slot = self.stores[view.kind] = self.table.open(STORE_GROUP)
            self.on_store(view.kind, slot)
        return slot, fact

    def _current_view(self, worker: NodeId, epoch: int, seq: int) -> _View | None:
        """The view that an event or snapshot of this epoch is for; None: it is of the past."""
        view = self.views.get(worker)
        if view is None or epoch < view.epoch:
            return None
        if epoch > view.epoch:
            self._restart(view, epoch)
        view.seen = max(view.seen, seq)
        return view

    def _check_gap(self, view: _View) -> None:
        if view.in_step:
            self._lagging.pop(view.worker, None)
        else:
            self._lagging[view.worker] = view

    def _ask(self, now: float, view: _View) -> bool:
        if view.in_step:
            return False
        if view.asked_at is not None and now - view.asked_at < self._snapshot_retry_s:
            return False
        view.asked_at = now
        return True

    def _restart(self, view: _View, epoch: int) -> None:
        self._take_new_slot(view)
        view.epoch, view.seq, view.seen, view.asked_at = epoch, None, -1, None

    def _take_new_slot(self, view: _View) -> None:
        """It holds nothing there, nor is anything expected."""
        del self.slots[view.slot]
        self.table.close(view.slot)
        view.slot = self.table.open(view.group)
        self.slots[view.slot] = view
        self.on_slot(view.worker, view.slot)
        self._forget(view.worker)
