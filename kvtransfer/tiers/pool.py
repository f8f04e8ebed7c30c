"""One tier of KV blocks below the device: which slot holds which block, and which goes first.

Life of an entry: allocated (its slot is being written) -> readable, and evictable while it is not
pinned -> forgotten: evicted, expired, dropped or found bad. Its slot is blank once it
has no pins.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvrelay.engine.kv.block_pool import NetChanges
from kvrelay.engine.kv.tier import Tier, TierHashes
from kvrelay.kvtransfer.tiers.registry import has_keys
from kvrelay.kvtransfer.tiers.uses import Usage

PROBATION_SHARE = 0.7
"""Of a tier, left to blocks that no second request has used. The rest is for those that one has, so
that a flood of prompts without a second use does not push them out. On an hour of real chat traffic
it finds 1.0 points more blocks than LRU in 8 M tokens and 0.3 more in 16 M, and no rule that was
compared finds 0.5 more (`python -m benchmarks.kv.tier_trace TRACE --policies`)."""
KEPT_SHARE = 0.5  # at most, so much of a tier is kept by orders
DUPLICATE = "duplicate"  # why an entry was forgotten: the device has it too
FORGOTTEN_HERE = ("evicted", "expired")  # what others may find in storage that has keys

FEW = 64  # items that are not worth to be cleared away

Item = TypeVar("Item")


class LeastFirst(Generic[Item]):
    """Items by a key that may grow at any time and never shrinks; None: it belongs here no more.

    Invariant: each member is in the heap once, under a key that is at most its present one. So
    nothing has to be done when a key grows. At most half of the heap, and a few, belong here no
    more."""

    def __init__(self, key: Callable[[Item], float | None], most: Callable[[], int]) -> None:
        """`most`: how many items may belong here now."""
        self._key = key
        self._most = most
        self._heap: list[tuple[float, int, Item]] = []
        self._members: set[Item] = set()
        self._num_added = 0  # breaks ties: items are not compared

    def add(self, item: Item) -> None:
        """Nothing happens if it is here already."""
        key = self._key(item)
        if key is None or item in self._members:
            return
        self._members.add(item)
        self._num_added += 1
        heapq.heappush(self._heap, (key, self._num_added, item))
        if len(self._heap) > FEW + 2 * self._most():
            self._compact()

    def first(self) -> Item | None:
        """The item of the least key; it stays."""
        while self._heap:
            key, number, item = self._heap[0]
            now = self._key(item)
            if now is None:
                self.pop()
            elif now > key:
                heapq.heapreplace(self._heap, (now, number, item))
            else:
                return item
        return None

    def pop(self) -> None:
        """Take out what `first` has returned."""
        self._members.remove(heapq.heappop(self._heap)[2])

    def _compact(self) -> None:
        """Drop what belongs here no more, which is half of it at least."""
        self._heap = [element for element in self._heap if self._key(element[2]) is not None]
        heapq.heapify(self._heap)
        self._members = {item for _, _, item in self._heap}


@dataclass(slots=True, eq=False)
class Entry:
    """A block in a tier. `gone`: why it was forgotten; empty while it is here."""

    _usage: Usage
    slot: int
    checksum: int = 0
    readable: bool = False
    kept: bool = False
    indexed_until: float | None = None  # its end in the index of the store; None: it is not there
    gone: str = ""

    @property
    def usage(self) -> Usage:
        return self._usage.settled()

    @property
    def block_hash(self) -> bytes:
        return self._usage.block_hash


class TierPool:
    """Owns the slots [0, num_blocks) of one tier, and its room, where blocks differ in bytes.

    Invariant: `used_bytes` is what entries take, and forgotten ones that are pinned, and at most
    the room; a slot is blank, or an entry's, or a forgotten entry's and pinned; a hash has at
    most one entry; the slot of an entry that is not readable is pinned by its writer; entries that
    are readable and not pinned are in `_expiry`, and unless kept in `_probation` or `_protected`.
    """

    def __init__(
        self, tier: Tier, num_blocks: int, block_bytes: int = 0, room_bytes: int = 0
    ) -> None:
        """`block_bytes`: the most that a block takes of `room_bytes`; 0: all take the same, and
        there is room for `num_blocks`."""
        self.tier = tier
        self.num_blocks = num_blocks
        self.used_bytes = 0
        self._block_bytes = block_bytes
        self._room_bytes = room_bytes
        self._has_keys = has_keys(tier)
        self.num_reused = 0
        self.num_kept = 0
        self._entries: dict[bytes, Entry] = {}
        self._owners: list[Entry | None] = [None] * num_blocks
        self._pins = [0] * num_blocks
        self._bytes = [0] * num_blocks  # that slots take of the room
        # Blank slots, the next one last; those that a limit leaves out are beside them.
        self._blank = dict.fromkeys(range(num_blocks - 1, -1, -1))
        self._left_out: dict[int, None] = {}
        self._limit: int | None = None  # slots from here on are not written
        self._forgotten: list[Entry] = []
        # Whether the device has it too, and keeps it for now: see `tiers.duplicates`.
        self.is_duplicate: Callable[[Entry], bool] = lambda entry: False
        self._duplicates = LeastFirst(self._recency_if_duplicate, self.num_entries)
        self._changes = NetChanges()
        self._expiry = LeastFirst(self._expires_at, self.num_entries)
        self._probation = LeastFirst(self._recency_if_new, self.num_entries)
        self._protected = LeastFirst(self._recency_if_reused, self.num_entries)
        self._low = LeastFirst(self._recency_if_low, self.num_entries)

    @property
    def num_used(self) -> int:
        """Slots that are not blank."""
        return self.num_blocks - len(self._blank) - len(self._left_out)

    @property
    def num_lacking(self) -> int:
        """Blank slots that are not to be written."""
        return len(self._left_out)

    @property
    def num_usable(self) -> int:
        """Slots that are in use, or may be."""
        return self.num_blocks - len(self._left_out)

    @property
    def num_blank(self) -> int:
        """Blocks for which there is room, whatever they take."""
        if not self._block_bytes:
            return len(self._blank)
        return min(len(self._blank), (self._room_bytes - self.used_bytes) // self._block_bytes)

    @property
    def num_pinned(self) -> int:
        return sum(pins > 0 for pins in self._pins)

    @property
    def _least_blocks(self) -> int:
        """For how many there is room if each takes the most."""
        in_bytes = self._room_bytes // self._block_bytes if self._block_bytes else self.num_blocks
        return min(self.num_usable, in_bytes)

    def num_entries(self) -> int:
        return len(self._entries)

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether it is here or on its way."""
        return block_hash in self._entries

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    def get(self, block_hash: bytes) -> Entry | None:
        """The entry, if it can be read."""
        entry = self._entries.get(block_hash)
        return entry if entry is not None and entry.readable else None

    def is_coming(self, block_hash: bytes) -> bool:
        return block_hash in self._entries and not self._entries[block_hash].readable

    def block_hashes(self) -> tuple[bytes, ...]:
        return tuple(block_hash for block_hash, entry in self._entries.items() if entry.readable)

    def hashes_in(self, first: int, end: int) -> tuple[bytes, ...]:
        """Those in slots `[first, end)`."""
        entries = self._owners[first:end]
        return tuple(e.usage.block_hash for e in entries if e is not None and e.readable)

    def fill(self, found: Iterable[tuple[int, int, int, Usage]]) -> None:
        """Slot, checksum, bytes (0: the most) and usage of each block that is here already."""
        for slot, checksum, num_bytes, usage in found:
            assert self._owners[slot] is None
            entry = self._enter(usage, slot, num_bytes or self._block_bytes)
            entry.checksum, entry.readable = checksum, True
            entry.indexed_until = usage.expires_at
            self._changes.note(usage.block_hash, stored=True)
            self._enlist(entry)
            self._blank.pop(slot, None)
            self._left_out.pop(slot, None)

    def limit(self, num_slots: int) -> None:
        """Write no slot from this one on, until the next call: there is no memory. What is there
        already can be read, and leaves its slot for good when it is forgotten."""
        self._limit = num_slots
        self._left_out |= {slot: None for slot in self._blank if slot >= num_slots}
        back = [slot for slot in self._left_out if slot < num_slots]
        for slot in back:
            del self._left_out[slot]
        for slot in self._left_out:
            self._blank.pop(slot, None)
        self._blank |= dict.fromkeys(back)

    def grow(self, num_blocks: int) -> None:
        """Have as many slots, if there are fewer."""
        more = range(self.num_blocks, num_blocks)
        self._owners += [None] * len(more)
        self._pins += [0] * len(more)
        self._bytes += [0] * len(more)
        self._blank |= dict.fromkeys(more)
        self.num_blocks = len(self._owners)

    def forget_slots(self, slots: range, why: str) -> None:
        """Forget the entries that have these slots, as far as the pool has grown to them."""
        for entry in self._owners[slots.start : slots.stop]:
            if entry is not None:
                self.forget(entry, why)

    def allocate(self, now: float, usage: Usage, *, is_duplicate: bool = False) -> Entry | None:
        """An entry whose slot may be written, for the writer to `commit` or `abandon`; None if all
        slots are in use, or there is no room. The least valuable entries give way: one that has
        expired, or that the device has too, or of low classes, or else the least recently used of
        the part that has more than its share; that not for one of low classes. `is_duplicate`: the
        device has it and keeps it for now, so that no block makes way that only this tier has."""
        while self.num_blank < 1:
            if self.expire(now, 1):
                continue
            if (entry := self._duplicates.first()) is not None:
                self.forget(entry, DUPLICATE)
            elif is_duplicate or not self._evict(only_low=usage.is_low):
                return None
        entry = self._enter(usage, self._blank.popitem()[0], self._block_bytes)
        self._pins[entry.slot] = 1
        return entry

    def commit(self, entry: Entry, checksum: int, num_bytes: int | None = None) -> bool:
        """It is written, and takes that many bytes; None: as many as it might. False if it was
        forgotten meanwhile."""
        if num_bytes is not None and self._block_bytes:
            self._take(entry.slot, num_bytes)
        if not entry.gone:
            entry.checksum, entry.readable = checksum, True
            self._changes.note(entry.block_hash, stored=True)
        self.unpin(entry.slot)
        return not entry.gone

    def abandon(self, entry: Entry, why: str) -> None:
        """It was not written, and no transfer writes to it any more."""
        if not entry.gone:
            self.forget(entry, why)
        self.unpin(entry.slot)

    def forget(self, entry: Entry, why: str) -> None:
        assert not entry.gone
        entry.gone = why
        del self._entries[entry.block_hash]
        self._owners[entry.slot] = None
        self.num_reused -= entry.usage.is_reused
        self.num_kept -= entry.kept
        if entry.readable and not (self._has_keys and why in FORGOTTEN_HERE):
            self._changes.note(entry.block_hash, stored=False)
        if not self._pins[entry.slot]:
            self._give_back(entry.slot)
        self._forgotten.append(entry)

    def drop(self, block_hash: bytes) -> None:
        """Forget it, if it is here or on its way, unless an order keeps it."""
        entry = self._entries.get(block_hash)
        if entry is not None and not entry.kept:
            self.forget(entry, "dropped")

    def take_forgotten(self) -> list[Entry]:
        """Entries that were forgotten since the last call; `gone` says why."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def pin(self, slot: int) -> None:
        """The slot is read: it stays as it is until `unpin`."""
        assert self._pins[slot] or self._owners[slot] is not None
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        assert self._pins[slot] > 0
        self._pins[slot] -= 1
        if self._pins[slot]:
            return
        entry = self._owners[slot]
        if entry is None:
            self._give_back(slot)
        else:
            self._enlist(entry)

    def retain(self, block_hash: bytes) -> bool:
        """Have it neither evicted nor expire. False if it is not here, or the quota is used up."""
        entry = self.get(block_hash)
        if entry is None:
            return False
        if not entry.kept:
            if self.num_kept >= KEPT_SHARE * self._least_blocks:
                return False
            entry.kept = True
            self.num_kept += 1
        return True

    def is_retained(self, block_hash: bytes) -> bool:
        return block_hash in self._entries and self._entries[block_hash].kept

    def stop_retaining(self, block_hash: bytes) -> bool:
        entry = self.get(block_hash)
        if entry is None or not entry.kept:
            return False
        entry.kept = False
        self.num_kept -= 1
        self._enlist(entry)
        return True

    def on_duplicate(self, block_hash: bytes) -> None:
        """The device has it now."""
        entry = self.get(block_hash)
        if entry is not None:
            self._duplicates.add(entry)

    def on_reuse(self, block_hash: bytes) -> None:
        """Its usage `is_reused` now, and was not before."""
        entry = self._entries.get(block_hash)
        if entry is not None:
            self.num_reused += 1
            self._enlist(entry)

    def expire(self, now: float, at_most: int) -> int:
        """Forget entries whose retention is over; returns how many."""
        count = 0
        while count < at_most:
            entry = self._expiry.first()
            if entry is None or entry.usage.expires_at > now:
                break
            self.forget(entry, "expired")
            count += 1
        return count

    def take_changes(self) -> TierHashes | None:
        """Net change of the readable hashes since the last call."""
        stored, removed = self._changes.take()
        return TierHashes(self.tier, stored, removed) if stored or removed else None

    def check_integrity(self) -> None:
        """Assert the class invariant. Cost: O(num_blocks)."""
        blank = {*self._blank, *self._left_out}
        assert not self._left_out or min(self._left_out) >= (self._limit or 0)
        assert self.used_bytes == sum(self._bytes) <= self._room_bytes
        assert not any(self._bytes[slot] for slot in blank)
        assert len(blank) == len(self._blank) + len(self._left_out)
        for slot, entry in enumerate(self._owners):
            pins = self._pins[slot]
            assert pins >= 0
            assert (slot in blank) == (entry is None and pins == 0)
            if entry is not None:
                assert self._entries[entry.block_hash] is entry
                assert entry.slot == slot
                assert not entry.gone
                assert entry.readable or pins
        entries = self._entries.values()
        assert len(entries) == sum(owner is not None for owner in self._owners)
        assert self.num_reused == sum(e.usage.is_reused for e in entries)
        assert self.num_kept == sum(e.kept for e in entries) <= KEPT_SHARE * self.num_blocks + 1

    def _enter(self, usage: Usage, slot: int, num_bytes: int) -> Entry:
        assert usage.block_hash not in self._entries
        entry = self._entries[usage.block_hash] = self._owners[slot] = Entry(usage, slot)
        if self._block_bytes:
            self._take(slot, num_bytes)
        self.num_reused += usage.is_reused
        return entry

    def _take(self, slot: int, num_bytes: int) -> None:
        """Bytes of the room, in place of those that the slot takes."""
        self.used_bytes += num_bytes - self._bytes[slot]
        self._bytes[slot] = num_bytes

    def _give_back(self, slot: int) -> None:
        self._take(slot, 0)
        is_out = self._limit is not None and slot >= self._limit
        (self._left_out if is_out else self._blank)[slot] = None

    def _evict(self, *, only_low: bool) -> bool:
        num_new = len(self._entries) - self.num_reused
        parts = [self._probation, self._protected]
        if num_new <= PROBATION_SHARE * self.num_usable:
            parts.reverse()
        for part in [self._low] if only_low else [self._low, *parts]:
            entry = part.first()
            if entry is not None:
                self.forget(entry, "evicted")
                return True
        return False

    def _enlist(self, entry: Entry) -> None:
        """It may have become evictable, or have changed its part."""
        self._expiry.add(entry)
        (self._protected if entry.usage.is_reused else self._probation).add(entry)
        self._low.add(entry)
        self._duplicates.add(entry)

    def is_free(self, entry: Entry) -> bool:
        """Whether it may be evicted."""
        free = entry.readable and not entry.gone and not entry.kept
        return free and not self._pins[entry.slot]

    def _recency_if_new(self, entry: Entry) -> float | None:
        wanted = self.is_free(entry) and not entry.usage.is_reused
        return entry.usage.recency if wanted else None

    def _recency_if_duplicate(self, entry: Entry) -> float | None:
        return entry.usage.recency if self.is_free(entry) and self.is_duplicate(entry) else None

    def _recency_if_low(self, entry: Entry) -> float | None:
        return entry.usage.recency if self.is_free(entry) and entry.usage.is_low else None

    def _recency_if_reused(self, entry: Entry) -> float | None:
        wanted = self.is_free(entry) and entry.usage.is_reused
        return entry.usage.recency if wanted else None

    def _expires_at(self, entry: Entry) -> float | None:
        return entry.usage.expires_at if self.is_free(entry) else None
