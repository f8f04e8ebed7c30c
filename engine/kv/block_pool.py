"""Blocks of KV memory: who uses them, which are sealed, which may be reused.

Life of a block: blank -> allocated (written by one sequence) -> sealed (full, has the hash of its
content, shared by reference count) -> evictable (unreferenced; still a prefix cache hit) -> evicted
or hit again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain, compress, groupby, islice
from math import inf
from typing import Any, cast

from kvrelay.engine.kv.runs import LONGEST, Place, Run, Runs

NUM_KINDS = 3
LOW_SHARE = 0.25  # low classes of service may have so much of a pool at the cost of cached blocks
LOOKED_UP = 256  # hashes at a time, of which one may be missing
MIN_RUN = 8  # fewer blocks, after no run, are freed one by one
MERGED = 64  # so many blocks of a run go to the one before it, if both are freed together
LEFT_S = 300.0  # and all cached blocks that were not used for this long


class NetChanges:
    """How a set of hashes differs from what was last published of it. Owned by the owner of the
    set.

    Invariant: a hash that was added and removed again, or the other way round, is not in it."""

    __slots__ = ("_is_stored",)

    def __init__(self) -> None:
        self._is_stored: dict[bytes, bool] = {}  # hash -> added (True) or removed

    def note(self, block_hash: bytes, *, stored: bool) -> None:
        """`block_hash` was added to the set, or removed from it."""
        if self._is_stored.get(block_hash) is (not stored):
            del self._is_stored[block_hash]  # as it was published
        else:
            self._is_stored[block_hash] = stored

    def take(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Net (stored, removed) hashes since the last call."""
        if not self._is_stored:
            return (), ()
        stored = tuple(each for each, is_stored in self._is_stored.items() if is_stored)
        removed = tuple(each for each, is_stored in self._is_stored.items() if not is_stored)
        self._is_stored.clear()
        return stored, removed


class BlockPool:
    """Owns every block id in [0, num_blocks).

    Invariant: a block is in exactly one of blank, evictable, or in use (reference count > 0); a
    hash belongs to at most one block; an evictable block has a hash, a blank one has none. A
    block's references are those in `_refs`, or the users of its run (`engine.kv.runs`).

    Blocks of requests of low classes are marked, until one of a higher class uses them, and
    evicted before all others."""

    def __init__(self, num_blocks: int, longest_run: int = LONGEST) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._runs = Runs(num_blocks, longest_run)
        # Least recently used first: when. Those of low classes, of which no run is, are apart.
        self._evictable: OrderedDict[int | Place, float] = OrderedDict()
        self._evictable_low: OrderedDict[int, float] = OrderedDict()
        # By kind, where there are several.
        self._used_in_runs, self._used_alone = [0] * NUM_KINDS, [0] * NUM_KINDS
        self._sealed = [0] * NUM_KINDS
        self._num_beside = 0  # evictable blocks that have no entry: all but one of each place
        self._is_low = bytearray(num_blocks)
        self._num_low = 0
        self.now = 0.0  # set by its owner
        self._changes = NetChanges()
        self.num_evictions = 0
        self.num_freed = 0  # blocks that have become free, or are worth less than before
        self.num_renamed = 0  # hashes that have come or gone
        self.num_dropped = 0  # hashes that have gone out of turn, not evicted
        self.kinds = bytearray()  # by block: see `set_kind`; empty: all are of one kind
        self.evictions = [0] * NUM_KINDS  # by kind, where there are several

    def num_used_of(self, kind: int) -> int:
        """Blocks of `kind` that have a reference."""
        return self._used_alone[kind] + self._used_in_runs[kind]

    def num_cached_of(self, kind: int) -> int:
        """Blocks of `kind` that are sealed."""
        return self._sealed[kind]

    def set_kind(self, blocks: Sequence[int], kind: int) -> None:
        """These have just been allocated for that kind."""
        kinds, used = self.kinds, self._used_alone
        for block in blocks if kinds else ():
            if (before := kinds[block]) != kind:
                used[before] -= 1
                used[kind] += 1
                kinds[block] = kind

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: blank or evictable."""
        return len(self._blank) + self.num_evictable

    @property
    def num_evictable(self) -> int:
        return len(self._evictable) + self._num_beside + len(self._evictable_low)

    @property
    def num_evictable_low(self) -> int:
        return len(self._evictable_low)

    @property
    def num_used_low(self) -> int:
        """Blocks that requests of low classes alone have a reference to."""
        return self._num_low - len(self._evictable_low)

    def has_free_low(self, count: int) -> bool:
        """Whether a request of a low class, beside others, may have so many: what is blank or of
        low classes, and of the rest little, or what was not used for long."""
        return self.low_free_from(count) <= self.now

    def low_free_from(self, count: int) -> float:
        """From when on it may have so many, if nothing else changes; `inf`: never."""
        others = count - len(self._blank) - len(self._evictable_low)
        if others <= 0 or others > len(self._evictable) + self._num_beside:
            return -inf if others <= 0 else inf
        if self.num_used_low + count <= LOW_SHARE * self.num_blocks:
            return -inf
        if not self._num_beside:
            return next(islice(self._evictable.values(), others - 1, None)) + LEFT_S
        for entry, when in self._evictable.items():  # noqa: B007 - of the last one
            others -= entry.num_blocks if isinstance(entry, Place) else 1
            if others <= 0:
                break
        return when + LEFT_S

    @property
    def num_cached(self) -> int:
        return len(self._by_hash)

    def is_idle(self) -> bool:
        return self.num_free == self.num_blocks

    def eviction_order(self) -> list[int]:
        """Evictable blocks, the first to go first. Cost: O(num_blocks)."""
        order = [*self._evictable_low]
        for entry in self._evictable:
            order += entry.eviction_order() if isinstance(entry, Place) else [entry]
        return order

    def next_evicted(self, count: int) -> list[bytes]:
        """Hashes of the blocks that are evicted next, the first to go first; at most `count`."""
        blocks: list[int] = []
        for entry in chain[int | Place](self._evictable_low, self._evictable):
            if len(blocks) >= count:
                break
            blocks += entry.eviction_order() if isinstance(entry, Place) else [entry]
        return [cast("bytes", self._hashes[block]) for block in blocks[: max(0, count)]]

    @property
    def num_references(self) -> int:
        in_runs = sum(run.num_users * len(run.blocks) for run in self._runs.all())
        return sum(self._refs) + in_runs

    def are_private(self, blocks: Iterable[int]) -> bool:
        """Whether these may be written: they have one reference and no hash."""
        refs, hashes = self._refs, self._hashes
        return not [block for block in blocks if refs[block] != 1 or hashes[block] is not None]

    def has_hash(self, block: int, block_hash: bytes) -> bool:
        return self._hashes[block] == block_hash

    def block_hashes(self) -> tuple[bytes, ...]:
        """Hashes of all sealed blocks, in the order in which they were sealed."""
        return tuple(self._by_hash)

    def is_cached(self, block_hash: bytes) -> bool:
        return block_hash in self._by_hash

    def lookup(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest cached prefix of `block_hashes`. Of a run, the names of two
        blocks are looked at."""
        blocks: list[int] = []
        for found, size in self._found(block_hashes):
            blocks += found if size == len(found) else found[:size]
        return blocks

    def num_found(self, block_hashes: Sequence[bytes]) -> int:
        """Returns how many `lookup` finds."""
        return sum(size for _, size in self._found(block_hashes))

    def _found(self, block_hashes: Sequence[bytes]) -> Iterator[tuple[list[int], int]]:
        """What `lookup` finds, as the first blocks of lists, and how many of each."""
        at, total = 0, len(block_hashes)
        while at < total and (block := self._by_hash.get(block_hashes[at])) is not None:
            rest = self._runs.rest(block)
            size = min(len(rest), total - at)
            if size > 1 and self._hashes[rest[size - 1]] == block_hashes[at + size - 1]:
                yield rest, size
                at += size
                continue
            found = [*map(self._by_hash.get, block_hashes[at : at + LOOKED_UP])]
            size = found.index(None) if None in found else len(found)
            yield cast("list[int]", found), size
            if size < len(found):
                return
            at += size

    def acquire(self, blocks: Sequence[int]) -> None:
        """One more reference to each of `blocks`, which are sealed. Many at once: those of a long
        prefix."""
        for piece in self._runs.pieces(blocks):
            if isinstance(piece, Run):
                if not piece.num_users:
                    self._unplace(piece)
                    self._count_used(piece.blocks, len(piece.blocks))
                piece.num_users += 1
            else:
                self._acquire_each(piece)

    def _acquire_each(self, blocks: Sequence[int]) -> None:
        refs = self._refs
        assert None not in map(self._hashes.__getitem__, blocks)
        idle = [block for block in blocks if not refs[block]]
        self._count_alone(idle, 1)
        for block in blocks:
            refs[block] += 1
        if not self._evictable_low:
            deque(map(self._evictable.__delitem__, idle), maxlen=0)
            return
        for block in idle:
            del self._idle(block)[block]

    def claim(self, blocks: Sequence[int]) -> None:
        """A request that is of no low class has a reference to each of these."""
        for piece in self._runs.pieces(blocks) if self._num_low else ():
            for block in () if isinstance(piece, Run) else piece:
                assert self._refs[block]
                self._mark(block, low=False)

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`, which are in use: they are freed later."""
        for block in blocks:
            self._take_out(block)
            assert self._refs[block] > 0
            self._refs[block] += 1

    def allocate(self, count: int, *, low: bool = False) -> list[int] | None:
        """`count` blocks with one reference each and undefined content, or None if there are too
        few. Blank blocks are taken first, then the least recently used evictable ones. `low`: they
        are marked."""
        if count > self.num_free:
            return None
        first = max(0, len(self._blank) - count)
        blocks = self._blank[first:]
        blocks.reverse()
        del self._blank[first:]
        num_evicted = count - len(blocks)
        while len(blocks) < count:
            idle: OrderedDict[Any, float] = self._evictable_low or self._evictable
            entry, when = idle.popitem(last=False)
            if entry.__class__ is Place:
                blocks += self._evict_end(entry, when, count - len(blocks))
            else:
                self._forget_hash(entry)
                blocks += (entry,)
        for block in blocks:
            self._refs[block] = 1
            self._mark(block, low=low)
        self._count_alone(blocks, 1)
        self.num_evictions += num_evicted
        if num_evicted and self.kinds:
            for block in blocks[-num_evicted:]:
                self.evictions[self.kinds[block]] += 1
        return blocks

    def _evict_end(self, place: Place, when: float, most: int) -> list[int]:
        """Evicts at least one block of runs that were the first to go."""
        self._evictable[place] = when
        self._evictable.move_to_end(place, last=False)
        run = place.runs[-1]
        blocks = run.blocks[-most:]
        blocks.reverse()
        if len(blocks) == len(run.blocks):
            self._unplace(run)
        else:
            self._num_beside -= len(blocks)
        self._runs.leave(run, blocks)
        for block in blocks:
            self._forget_hash(block)
        return blocks

    def release(
        self, blocks: Sequence[int], *, evict_first: bool = False, is_prefix: bool = False
    ) -> None:
        """One reference less to each. The end of a sequence is evicted before its beginning,
        because a prefix is useful without its continuation, but not the other way round.
        `evict_first`: these are evicted before all others. `is_prefix`: they follow each other in
        a prefix, so that those that become free are runs from then on."""
        pieces = [*self._runs.pieces(blocks)]
        if is_prefix:
            pieces = self._joined(pieces)
        for piece in pieces if evict_first else reversed(pieces):
            if not isinstance(piece, Run):
                self._release_each(piece, evict_first=evict_first)
                continue
            assert piece.num_users > 0
            piece.num_users -= 1
            if not piece.num_users:
                self.num_freed += len(piece.blocks)
                self._count_used(piece.blocks, -len(piece.blocks))
                self._place(piece, evict_first=evict_first)

    def _joined(self, pieces: Sequence[Run | Sequence[int]]) -> list[Run | Sequence[int]]:
        """What becomes free with the next release is in runs, as long as they may be."""
        joined: list[Run | Sequence[int]] = []
        last: Run | None = None  # what follows may be added to it
        for piece in pieces:
            if isinstance(piece, Run):
                is_short = len(piece.blocks) <= MERGED and piece.num_users == 1
                if last is None or not is_short or not self._runs.append(last, piece.blocks):
                    joined.append(piece)
                    last = piece if piece.num_users == 1 else None
                continue
            for is_alone, group in groupby(piece, self._is_alone):
                blocks = [*group]
                if not is_alone or (last is None and len(blocks) < MIN_RUN):
                    joined.append(blocks)
                    last = None
                    continue
                for block in blocks:
                    self._refs[block] = 0
                self._count_alone(blocks, -1)
                self._count_used(blocks, len(blocks))
                if last is None or not self._runs.append(last, blocks):
                    joined += (runs := self._runs.make(blocks))
                    last = runs[-1]
        return joined

    def _is_alone(self, block: int) -> bool:
        """Whether it has one reference, and may be in a run when it has none."""
        is_sealed = self._hashes[block] is not None
        return is_sealed and self._refs[block] == 1 and not self._is_low[block]

    def _is_used(self, block: int) -> bool:
        run = self._runs.of(block)
        return self._refs[block] > 0 or (run is not None and run.num_users > 0)

    def _release_each(self, blocks: Sequence[int], *, evict_first: bool) -> None:
        refs, hashes = self._refs, self._hashes
        assert all(map(refs.__getitem__, blocks))
        for block in blocks:
            refs[block] -= 1
        freed = [block for block in blocks if not refs[block]]
        self._count_alone(freed, -1)
        self.num_freed += len(freed)
        if not evict_first:
            freed.reverse()
        blank = [block for block in freed if hashes[block] is None]
        for block in blank if self._num_low else ():
            self._mark(block, low=False)
        self._blank += blank
        cached = freed if not blank else [block for block in freed if hashes[block] is not None]
        if not (self._num_low or evict_first):
            self._evictable.update(dict.fromkeys(cached, self.now))
            return
        for block in cached:
            idle = self._idle(block)
            idle[block] = -inf if evict_first else self.now
            if evict_first:
                idle.move_to_end(block, last=False)

    def demote(self, block_hashes: Iterable[bytes], spared: Container[int]) -> None:
        """Those of these blocks that nothing uses are evicted before all others, the last of them
        first; but not the `spared` ones."""
        for block_hash in block_hashes:
            block = self._by_hash.get(block_hash)
            if block is not None and not self._is_used(block) and block not in spared:
                self._take_out(block)
                idle = self._idle(block)
                idle[block] = -inf
                idle.move_to_end(block, last=False)
                self.num_freed += 1

    def seal(self, block: int, block_hash: bytes) -> bool:
        """Set the hash of a full block. False if another block has it: this one stays private."""
        assert self._refs[block] > 0
        assert self._hashes[block] is None
        if block_hash in self._by_hash:
            return False
        self._hashes[block] = block_hash
        self._by_hash[block_hash] = block
        if self.kinds:
            self._sealed[self.kinds[block]] += 1
        self.num_renamed += 1
        self._changes.note(block_hash, stored=True)
        return True

    def evict(self, block_hashes: Iterable[bytes]) -> int:
        """Blank the unreferenced ones of these blocks; returns how many. The others stay."""
        count = 0
        for block_hash in block_hashes:
            block = self._by_hash.get(block_hash)
            if block is None or self._is_used(block):
                continue
            if not self._take_out(block):
                del self._idle(block)[block]
            self._forget_hash(block)
            self._mark(block, low=False)
            self._blank.append(block)
            count += 1
        self.num_freed += count
        self.num_dropped += count
        return count

    def forget(self, block: int) -> None:
        """It is damaged: nobody is to find it. Who uses it keeps it; then it is blank."""
        block_hash = self._hashes[block]
        if block_hash is not None and not self.evict([block_hash]):
            self._take_out(block)
            self._forget_hash(block)
            self.num_dropped += 1

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Net (stored, removed) hashes since the last call."""
        return self._changes.take()

    def check_integrity(self) -> None:
        """Assert the class invariant. Cost: O(num_blocks)."""
        self._runs.check_integrity()
        order = self.eviction_order()
        blank, evictable = set(self._blank), set(order)
        assert len(order) == len(evictable) == self.num_evictable
        for kind in range(NUM_KINDS) if self.kinds else ():
            assert bytes(compress(self.kinds, self._refs)).count(kind) == self._used_alone[kind]
            assert bytes(compress(self.kinds, self._hashes)).count(kind) == self._sealed[kind]
        assert self._num_low == sum(self._is_low)
        assert not any(map(self._is_low.__getitem__, blank | (evictable - {*self._evictable_low})))
        assert all(self._is_low[block] for block in self._evictable_low)
        assert len(blank) == len(self._blank)
        assert not blank & evictable
        for block in range(self.num_blocks):
            in_use, run = self._is_used(block), self._runs.of(block)
            assert self._refs[block] >= 0
            assert run is None or not (self._refs[block] or self._is_low[block])
            assert run is None or self._hashes[block] is not None
            assert in_use == (block not in blank and block not in evictable)
            block_hash = self._hashes[block]
            assert (block_hash is None) or self._by_hash[block_hash] == block
            assert block not in blank or block_hash is None
            assert block not in evictable or block_hash is not None
        assert len(self._by_hash) == sum(block_hash is not None for block_hash in self._hashes)

    def _idle(self, block: int) -> OrderedDict[Any, float]:
        """Where it is if it is evictable, and in no run."""
        return self._evictable_low if self._is_low[block] else self._evictable

    def _place(self, run: Run, *, evict_first: bool) -> None:
        """Nothing uses it any more."""
        place = run.place = Place(run)
        self._evictable[place] = -inf if evict_first else self.now
        if evict_first:
            self._evictable.move_to_end(place, last=False)
        self._num_beside += len(run.blocks) - 1

    def _unplace(self, run: Run) -> None:
        """It is not evictable any more."""
        place, run.place = run.place, None
        assert place is not None
        place.runs.remove(run)
        self._num_beside -= len(run.blocks)
        if not place.runs:
            del self._evictable[place]
            self._num_beside += 1

    def _take_out(self, block: int) -> bool:
        """Whether it was in a run. It is in none from then on, nor evictable if it was."""
        run = self._runs.alone(block)
        if run is None:
            return False
        if run.num_users:
            self._count_used(run.blocks, -1)
            self._count_alone([block], 1)
        else:
            self._unplace(run)
        self._refs[block] = run.num_users
        self._runs.leave(run, [block])
        return True

    def _count_used(self, blocks: Sequence[int], change: int) -> None:
        """So many of these, which are of one kind, are in runs that have users from now on."""
        if self.kinds:
            self._used_in_runs[self.kinds[blocks[0]]] += change

    def _count_alone(self, blocks: Sequence[int], change: int) -> None:
        """These, which are in no run, have a first reference, or none any more."""
        kinds, used = self.kinds, self._used_alone
        for block in blocks if kinds else ():
            used[kinds[block]] += change

    def _mark(self, block: int, *, low: bool) -> None:
        self._num_low += low - self._is_low[block]
        self._is_low[block] = low

    def _forget_hash(self, block: int) -> None:
        block_hash = self._hashes[block]
        assert block_hash is not None
        self._hashes[block] = None
        if self.kinds:
            self._sealed[self.kinds[block]] -= 1
        del self._by_hash[block_hash]
        self.num_renamed += 1
        self._changes.note(block_hash, stored=False)
