"""One tier against a naive model that looks at every block each time it needs one."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.tiers.pool import (
    KEPT_SHARE,
    PROBATION_SHARE,
    Entry,
    LeastFirst,
    TierPool,
)
from kvrelay.kvtransfer.tiers.uses import Usage

NUM_BLOCKS = 6
NAMES = st.integers(0, 9)


@dataclass
class Model:
    """Blocks by number; those that are forgotten and still pinned are in `ghosts`."""

    entries: dict[int, Entry] = field(default_factory=dict)
    pins: dict[Entry, int] = field(default_factory=dict)
    ghosts: set[Entry] = field(default_factory=set)

    def free(self) -> list[int]:
        return [
            number
            for number, entry in self.entries.items()
            if entry.readable and not entry.kept and not self.pins.get(entry)
        ]

    def may_go(self, now: float, is_low: bool) -> set[int]:
        """Which may be evicted for a new block, that may be of a low class; empty: none need be, or
        can be."""
        usage = {number: self.entries[number].usage for number in self.free()}
        expired = {number for number in usage if usage[number].expires_at <= now}
        if expired:
            first = min(usage[number].expires_at for number in expired)
            return {number for number in expired if usage[number].expires_at == first}
        low = [number for number in usage if usage[number].is_low]
        if low or is_low:
            return {min(low, key=lambda number: usage[number].recency)} if low else set()
        new = [number for number in usage if usage[number].num_uses < 2]
        again = [number for number in usage if usage[number].num_uses >= 2]
        num_new = sum(entry.usage.num_uses < 2 for entry in self.entries.values())
        part = new if num_new > PROBATION_SHARE * NUM_BLOCKS else again
        part = part or new or again
        return {min(part, key=lambda number: usage[number].recency)} if part else set()

    def forget(self, number: int) -> None:
        entry = self.entries.pop(number)
        if self.pins.get(entry):
            self.ghosts.add(entry)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = TierPool(Tier.HOST, NUM_BLOCKS)
        self.model = Model()
        self.now = 0.0
        self.recency = 0
        self.known: set[bytes] = set()

    @rule(number=NAMES, keep_s=st.integers(1, 9), uses=st.integers(0, 2), low=st.booleans())
    def allocate(self, number: int, keep_s: int, uses: int, low: bool) -> None:
        model = self.model
        if number in model.entries:
            return
        self.recency += 1
        usage = Usage(bytes([number]), self.recency, self.now, self.now + keep_s, True, uses)
        is_full = len(model.entries) + len(model.ghosts) == NUM_BLOCKS
        usage.is_low = low
        candidates = model.may_go(self.now, low) if is_full else set()
        entry = self.pool.allocate(self.now, usage)
        assert (entry is None) == (is_full and not candidates)
        gone = [n for n in model.entries if bytes([n]) not in self.pool]
        assert len(gone) == bool(candidates)
        assert set(gone) <= candidates
        for other in gone:
            model.forget(other)
        if entry is not None:
            in_use = {e.slot for e in [*model.entries.values(), *model.ghosts]}
            assert entry.slot not in in_use
            model.entries[number] = entry
            model.pins[entry] = 1

    @rule(number=NAMES, good=st.booleans())
    def written(self, number: int, good: bool) -> None:
        """Also one that was dropped while it was written."""
        model = self.model
        being_written = [*model.entries.values(), *model.ghosts]
        entry = next(
            (e for e in being_written if e.block_hash[0] == number and not e.readable), None
        )
        if entry is None:
            return
        was_gone = bool(entry.gone)
        if good:
            assert self.pool.commit(entry, number) is (not was_gone)
        else:
            self.pool.abandon(entry, "failed")
        model.pins[entry] -= 1
        if was_gone:
            model.ghosts.discard(entry)
        elif not good:
            model.forget(number)

    @rule(number=NAMES)
    def use(self, number: int) -> None:
        if number not in self.model.entries:
            return
        usage = self.model.entries[number].usage
        self.recency += 1
        usage.recency, usage.num_uses = self.recency, usage.num_uses + 1
        usage.is_low = usage.is_low and number % 2 == 0
        usage.expires_at = max(usage.expires_at, self.now + 3)
        if usage.num_uses == 2:
            self.pool.on_reuse(bytes([number]))

    @rule(number=NAMES)
    def pin(self, number: int) -> None:
        entry = self.pool.get(bytes([number]))
        if entry is not None:
            self.pool.pin(entry.slot)
            self.model.pins[entry] = self.model.pins.get(entry, 0) + 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = [e for e, pins in self.model.pins.items() if pins and e.readable]
        if not pinned:
            return
        entry = data.draw(st.sampled_from(pinned))
        self.pool.unpin(entry.slot)
        self.model.pins[entry] -= 1
        if not self.model.pins[entry]:
            self.model.ghosts.discard(entry)

    @rule(number=NAMES)
    def keep(self, number: int) -> None:
        entry = self.model.entries.get(number)
        there = entry is not None and entry.readable
        was_kept = entry is not None and entry.kept
        room = sum(e.kept for e in self.model.entries.values()) < KEPT_SHARE * NUM_BLOCKS
        assert self.pool.retain(bytes([number])) == (there and (was_kept or room))

    @rule(number=NAMES)
    def stop_retaining(self, number: int) -> None:
        entry = self.model.entries.get(number)
        was_kept = entry is not None and entry.kept
        assert self.pool.stop_retaining(bytes([number])) == was_kept

    @rule(number=NAMES)
    def drop(self, number: int) -> None:
        self.pool.drop(bytes([number]))
        entry = self.model.entries.get(number)
        if entry is not None and not entry.kept:
            self.model.forget(number)

    @rule(after_s=st.integers(1, 4))
    def expire(self, after_s: int) -> None:
        self.now += after_s
        due = [n for n in self.model.free() if self.model.entries[n].usage.expires_at <= self.now]
        assert self.pool.expire(self.now, NUM_BLOCKS) == len(due)
        for number in due:
            self.model.forget(number)

    @rule()
    def listen(self) -> None:
        change = self.pool.take_changes()
        if change is not None:
            assert not set(change.stored) & self.known
            assert set(change.removed) <= self.known
            self.known = (self.known | set(change.stored)) - set(change.removed)
        assert self.known == set(self.pool.block_hashes())

    @invariant()
    def agrees(self) -> None:
        model = self.model
        self.pool.check_integrity()
        assert {name[0] for name in self.pool} == set(model.entries)
        readable = {number for number, entry in model.entries.items() if entry.readable}
        assert {name[0] for name in self.pool.block_hashes()} == readable
        assert self.pool.num_used == len(model.entries) + len(model.ghosts)
        assert self.pool.num_pinned == sum(pins > 0 for pins in model.pins.values())
        assert all(entry.gone for entry in self.pool.take_forgotten())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_as_many_blocks_fit_as_there_are_bytes_for() -> None:
    """Each may take 10 until it is written; what it took less is room for others."""
    pool = TierPool(Tier.DISK, 40, 10, 100)
    entries = {}
    for number in range(60):
        entry = pool.allocate(0.0, Usage(bytes([number]), number, 0.0, 9.0, True))
        assert entry is not None
        assert pool.commit(entry, 0, 4 + number % 3)
        entries[number] = entry
        pool.check_integrity()
    assert pool.used_bytes > 85
    assert pool.num_blank == (100 - pool.used_bytes) // 10 == 0
    kept = [number for number, entry in entries.items() if not entry.gone]
    assert kept == list(range(60 - len(kept), 60)), "the least recently used have gone"
    assert len(kept) > 16
    for number in kept:
        pool.pin(entries[number].slot)
    last = Usage(b"last", 99, 0.0, 9.0, True)
    assert pool.allocate(0.0, last) is None, "what is pinned is not evicted"
    pool.forget(entries[kept[0]], "dropped")
    pool.forget(entries[kept[1]], "dropped")
    assert pool.allocate(0.0, last) is None, "and takes its room until it is read"
    for number in kept:
        pool.unpin(entries[number].slot)
    assert pool.allocate(0.0, last) is not None
    pool.check_integrity()


def test_least_first_follows_keys_that_grow_and_forgets_what_has_none() -> None:
    keys: dict[str, float | None] = {"a": 1, "b": 2, "c": 3}
    order = LeastFirst[str](keys.__getitem__, lambda: len(keys))
    for item in keys:
        order.add(item)
    keys["a"] = 2.5
    assert order.first() == "b"
    keys["b"] = None
    assert order.first() == "a"
    order.pop()
    assert order.first() == "c"
    order.add("a")
    assert order.first() == "a"


def test_least_first_does_not_grow_with_what_has_gone() -> None:
    live: set[int] = set()
    order = LeastFirst[int](lambda item: float(item) if item in live else None, lambda: len(live))
    for item in range(10_000):
        live.add(item)
        order.add(item)
        live.discard(item - 5)
    assert len(order._heap) <= 64
    assert order.first() == 9995
