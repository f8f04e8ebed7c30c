"""Blocks in runs are freed, evicted and found as they are one by one."""

from __future__ import annotations

import random
from hashlib import blake2b

import pytest

from kvrelay.engine.kv import block_pool
from kvrelay.engine.kv.block_pool import BlockPool
from kvrelay.engine.kv.runs import Runs

NUM_BLOCKS = 60


def chain(path: list[int]) -> list[bytes]:
    names, parent = [], b""
    for number in path:
        parent = blake2b(parent + number.to_bytes(4), digest_size=16).digest()
        names.append(parent)
    return names


class Sessions:
    """Sessions that share beginnings, part and go on, in a pool that is too small for them."""

    def __init__(self, seed: int, *, in_runs: bool) -> None:
        self.random, self.in_runs = random.Random(seed), in_runs
        self.pool = BlockPool(NUM_BLOCKS, longest_run=7)
        self.pool.kinds = bytearray(NUM_BLOCKS)
        self.live: list[list[int]] = []  # block tables
        self.held: list[list[int]] = []
        self.paths = [[0]]

    def begin(self) -> None:
        choice = self.random
        path = list(choice.choice(self.paths))
        del path[choice.randint(1, len(path)) :]
        path += [choice.randrange(3) for _ in range(choice.randrange(12))]
        self.paths = [*self.paths[-6:], path]
        names, low = chain(path), choice.random() < 0.2
        hits = self.pool.lookup(names)
        self.pool.acquire(hits)
        fresh = self.pool.allocate(len(names) - len(hits) + 1, low=low)
        if fresh is None:
            self.pool.release(hits)
            return
        if not low:
            self.pool.claim(hits)
        for block, name in zip(fresh, names[len(hits) :], strict=False):
            if choice.random() < 0.95:
                self.pool.seal(block, name)
        self.live.append(hits + fresh)

    def end(self) -> None:
        if self.live:
            table = self.live.pop(self.random.randrange(len(self.live)))
            if self.random.random() < 0.1:
                at = self.random.randrange(len(table))
                self.pool.release(table[at:], evict_first=True)
                self.pool.release(table[:at])
            else:
                self.pool.release(table, is_prefix=self.in_runs)

    def disturb(self) -> None:
        """What comes to some blocks of a prefix alone."""
        choice, names = self.random, chain(self.random.choice(self.paths))
        some = choice.sample(names, min(len(names), 3))
        match choice.randrange(5):
            case 0:
                self.pool.evict(some)
            case 1:
                self.pool.demote(some, ())
            case 2 if found := self.pool.lookup(some[:1]):
                self.pool.forget(found[0])
            case 3 if self.live:
                self.held.append([choice.choice(choice.choice(self.live))])
                self.pool.hold(self.held[-1])
            case 4 if self.held:
                self.pool.release(self.held.pop())

    def step(self) -> None:
        self.pool.now += 1.0
        self.random.choice([self.begin, self.end, self.end, self.disturb])()
        self.pool.check_integrity()

    def seen(self) -> tuple[object, ...]:
        pool = self.pool
        named = {name: pool.lookup([name]) for name in pool.block_hashes()}
        counts = pool.num_free, pool.num_evictable_low, pool.num_used_low, pool.num_evictions
        more = pool.num_freed, pool.num_references, pool.num_used_of(0), pool.num_cached_of(0)
        low = [pool.low_free_from(count) for count in range(0, NUM_BLOCKS, 7)]
        return self.live, pool.eviction_order(), named, counts, more, low


@pytest.mark.parametrize("seed", range(8))
def test_a_pool_with_runs_does_what_one_without_does(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_pool, "MIN_RUN", 2)
    monkeypatch.setattr(block_pool, "MERGED", 3)
    runs, alone = Sessions(seed, in_runs=True), Sessions(seed, in_runs=False)
    num_in_runs = 0
    for _ in range(250):
        runs.step()
        alone.step()
        assert runs.seen() == alone.seen()
        num_in_runs += sum(len(run.blocks) for run in runs.pool._runs.all())
    assert num_in_runs > 250


def looked_at(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Names, pieces and references by ten turns of a session that is so long."""
    pool = BlockPool(4 * num_rows)
    counts = [0]

    class Names(list[bytes]):
        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            counts[0] += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
            return super().__getitem__(at)

    pieces = Runs.pieces

    def counted(runs: Runs, blocks: list[int]):  # type: ignore[no-untyped-def]
        for piece in pieces(runs, blocks):
            counts[0] += len(piece) if isinstance(piece, list) else 1
            yield piece

    path = list(range(num_rows))
    for turn in range(13):
        if turn == 3:
            counts[0] = 0
            monkeypatch.setattr(Runs, "pieces", counted)
        names = Names(chain(path))
        hits = pool.lookup(names)
        pool.acquire(hits)
        fresh = pool.allocate(len(path) - len(hits))
        assert fresh is not None
        for block, name in zip(fresh, chain(path)[len(hits) :], strict=True):
            pool.seal(block, name)
        pool.release(hits + fresh, is_prefix=True)
        path += [7] * 5
    monkeypatch.undo()
    pool.check_integrity()
    return counts[0]


def test_a_turn_looks_at_runs_and_at_its_new_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = looked_at(100, monkeypatch), looked_at(20_000, monkeypatch)
    assert long <= short + 10 * 20_000 // 100
