"""A sequence that does not fit is tried again when that may help, and costs little until then."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest

from kvrelay.engine.kv.block_hash import BlockChain
from kvrelay.engine.kv.block_pool import LEFT_S, BlockPool
from kvrelay.engine.kv.block_table import NO_BLOCK
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.kv.tier import DEFAULT_RETENTION
from kvrelay.engine.kv.window import Windows
from kvrelay.engine.scheduling.lacks import Lacks
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.sequence import SeqState, Sequence
from kvrelay.engine.service_class import ServiceClass
from tests.engine.configs import worker_config
from tests.engine.sequences import sequence

SIZE = 4
WHOLE, GROUPS, WINDOWS = (0,), (0, 8, 0), (8,)
LOW = ServiceClass.BATCH.priority
LOW_RETENTION = replace(DEFAULT_RETENTION, is_low=True)


def cache(num_blocks: int, sizes: Seq[int] = WHOLE) -> KVCacheManager:
    return KVCacheManager(num_blocks, SIZE, Windows.of(SIZE, sizes))


def prompt(num_tokens: int, *, number: int = 0, shared: int = 0, groups: int = 1, **of: Any) -> Any:
    """Its first `shared` tokens are those of all others."""
    tokens = [*range(shared), *range(10_000 * (number + 1), 10_000 * (number + 2))][:num_tokens]
    chain = BlockChain(b"f", UNSALTED, SIZE, groups)
    return sequence(tokens, chain=chain, request_id=f"r{number}", **of)


def compute(kv: KVCacheManager, seq: Sequence, count: int | None = None) -> None:
    seq.num_computed = min(len(seq.tokens) - 1, seq.num_computed + (count or len(seq.tokens)))
    if kv.grow(seq):
        kv.seal_computed(seq)
        kv.slide(seq)


def leave_cached(kv: KVCacheManager, seq: Sequence) -> None:
    assert kv.admit(seq, 0)
    compute(kv, seq)
    kv.release(seq)


class Crowd:
    """Sequences that come, are computed, end, and are dropped from the cache, in any order."""

    def __init__(self, seed: int, sizes: Seq[int], *, low: bool) -> None:
        self.random = random.Random(seed)
        self.sizes, self.low = sizes, low
        self.kv = cache(self.random.randint(24, 70), sizes)
        self.lacks = Lacks(self.kv)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.outcomes = Counter[str]()
        self.num_made = 0

    def make(self) -> Sequence:
        self.num_made += 1
        is_low = self.low and self.random.random() < 0.7
        retention = LOW_RETENTION if is_low else DEFAULT_RETENTION
        if self.random.random() < 0.2:
            retention = replace(retention, keep_s=0.0)
        return prompt(
            self.random.randint(2, 90),
            number=self.random.randrange(4),
            shared=self.random.choice([0, 24]),
            groups=len(self.sizes),
            priority=LOW if is_low else 0,
            retention=retention,
        )

    def step(self) -> None:
        kv, running = self.kv, self.running
        match self.random.randrange(8):
            case 0 | 1:
                self.waiting.append(self.make())
            case 2 if running:
                kv.release(running.pop(self.random.randrange(len(running))))
            case 3 | 4 | 5 if running:
                compute(kv, self.random.choice(running), self.random.randint(1, 30))
            case 6:
                self.kv.pool.now += self.random.choice([0.0, LEFT_S / 2, LEFT_S])
            case 7 if self.random.random() < 0.2:
                kv.pool.evict(self.random.sample(kv.pool.block_hashes(), kv.pool.num_cached // 3))
        for seq in list(self.waiting):
            self.try_one(seq, self.random.randrange(3))

    def try_one(self, seq: Sequence, headroom: int) -> None:
        if self.kv.windows.any:
            assert self.lacks.num_cached(seq) == self.kv.num_cached(seq)
        is_in_vain = self.lacks.is_in_vain(seq, headroom)
        is_admitted = self.kv.admit(seq, headroom)
        self.outcomes[f"{'vain' if is_in_vain else 'tried'}, {is_admitted}"] += 1
        if is_admitted:
            assert not is_in_vain
            self.lacks.forget(seq)
            self.waiting.remove(seq)
            self.running.append(seq)
        elif not is_in_vain and self.kv.pool.num_free > headroom:
            self.lacks.note(seq, headroom)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("sizes", [WHOLE, GROUPS, WINDOWS])
def test_a_try_that_is_left_out_would_fail(sizes: tuple[int, ...], low: bool) -> None:
    outcomes = Counter[str]()
    for seed in range(12):
        crowd = Crowd(seed, sizes, low=low)
        for _ in range(80):
            crowd.step()
        outcomes += crowd.outcomes
    assert outcomes["tried, True"] > 60
    assert outcomes["vain, False"] > (2 * outcomes["tried, False"] if sizes == WHOLE else 60)


@pytest.mark.parametrize("sizes", [WHOLE, GROUPS])
def test_what_is_cached_of_a_sequence_is_followed(sizes: tuple[int, ...]) -> None:
    kv = cache(400, sizes)
    lacks = Lacks(kv)
    waiting = prompt(400, groups=len(sizes))
    counts = []
    other = prompt(400, groups=len(sizes))
    assert kv.admit(other, 0)
    for _ in range(5):
        compute(kv, other, 64)
        counts.append(lacks.num_cached(waiting))
        assert counts[-1] == kv.num_cached(waiting)
    assert sorted(set(counts)) == counts
    kv.release(other)
    for number in range(1, 6):  # it is evicted, the end first
        leave_cached(kv, prompt(330, number=number, groups=len(sizes)))
        assert lacks.num_cached(waiting) == kv.num_cached(waiting)
    assert lacks.num_cached(waiting) < counts[-1]


def test_what_is_dropped_out_of_turn_is_noticed() -> None:
    kv = cache(400)
    lacks, waiting = Lacks(kv), prompt(200)
    leave_cached(kv, prompt(200))
    assert lacks.num_cached(waiting) == 49
    kv.pool.evict(waiting.block_hashes[20:25])
    assert lacks.num_cached(waiting) == kv.num_cached(waiting) == 20


class CountingPool(BlockPool):
    num_looked_up = 0

    def lookup(self, block_hashes: Seq[bytes]) -> list[int]:
        found = super().lookup(block_hashes)
        self.num_looked_up += len(found) + 1
        return found

    def is_cached(self, block_hash: bytes) -> bool:
        self.num_looked_up += 1
        return super().is_cached(block_hash)


class Full:
    """A scheduler whose blocks are in use, but for a share that waiting sequences have cached."""

    def __init__(self, num_tokens: int, num_waiting: int, sizes: Seq[int], *, stream: bool) -> None:
        windows, groups = Windows.of(SIZE, sizes), len(sizes)
        num_blocks = 2 * windows.max_blocks(num_tokens)
        config = worker_config(num_blocks=num_blocks, block_size=SIZE, max_model_len=1 << 20)
        self.kv = cache(num_blocks, sizes)
        self.pool = self.kv.pool = CountingPool(num_blocks)
        self.scheduler = Scheduler(config, self.kv)
        leave_cached(self.kv, prompt(num_tokens // 4, groups=groups))
        self.busy = prompt(num_tokens + num_tokens // 2, number=8, groups=groups)
        assert self.kv.admit(self.busy, 0)
        self.busy.state, self.busy.num_prompt_tokens = SeqState.RUNNING, 1  # a stream
        self.busy.num_computed = len(self.busy.tokens) - 1
        self.scheduler.running.append(self.busy)
        for number in range(num_waiting):
            seq = prompt(num_tokens, shared=num_tokens // 4 * (not number), number=number)
            seq.chain = BlockChain(b"f", UNSALTED, SIZE, groups)
            if stream:
                seq.num_prompt_tokens -= 1
            self.scheduler.add(seq)

    def looked_up_by(self, num_messages: int) -> int:
        before = self.pool.num_looked_up
        for _ in range(num_messages):
            assert not self.scheduler.admit_waiting(1.0, lambda seq: False, 1e-4)
        return self.pool.num_looked_up - before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sizes", [WHOLE, (0, 8)])
def test_messages_do_not_cost_what_waits(sizes: tuple[int, ...], stream: bool) -> None:
    looked_up = []
    for num_tokens in (400, 6400):
        full = Full(num_tokens, 4, sizes, stream=stream)
        first = full.looked_up_by(1)
        looked_up.append(full.looked_up_by(50))
        assert looked_up[-1] <= 50 * 4 * 4 * len(sizes), (first, looked_up)
    assert looked_up[0] == looked_up[1]


def test_a_long_prompt_that_is_computed_costs_no_message_anything() -> None:
    looked_up = []
    for num_tokens in (400, 6400):
        kv = cache(num_tokens)
        pool = kv.pool = CountingPool(num_tokens)
        config = worker_config(
            num_blocks=num_tokens, block_size=SIZE, max_num_seqs=1, max_model_len=1 << 20
        )
        scheduler = Scheduler(config, kv)
        scheduler.add(prompt(num_tokens, shared=200))
        assert scheduler.admit_waiting(0.0, lambda seq: False, 1e-4)
        scheduler.add(prompt(100, number=1, shared=50))  # goes on after the shared part
        before = pool.num_looked_up
        for _ in range(20):
            assert not scheduler.admit_waiting(1.0, lambda seq: False, 1e-4)
        looked_up.append(pool.num_looked_up - before)
    assert looked_up[0] == looked_up[1] <= 20 * 8


def test_what_a_waiting_sequence_finds_is_evicted_last() -> None:
    kv = cache(100)
    config = worker_config(num_blocks=100, block_size=SIZE)
    scheduler = Scheduler(config, kv)
    leave_cached(kv, prompt(160))  # 39 blocks of the one that will wait
    leave_cached(kv, prompt(100, number=1))
    busy = prompt(140, number=2)
    assert kv.admit(busy, 0)
    scheduler.add(prompt(390))
    for step in range(20):
        busy.tokens += [step] * SIZE
        assert kv.grow(busy)
        kv.release(other) if (other := prompt(4, number=20 + step)) and kv.admit(other, 0) else None
        assert not scheduler.admit_waiting(1.0, lambda seq: False, 1e-4)
    assert kv.num_cached(scheduler.waiting[0]) == 39


def test_it_goes_on_with_the_message_after_which_it_fits() -> None:
    kv = cache(100)
    scheduler = Scheduler(worker_config(num_blocks=100, block_size=SIZE), kv)
    holders = [prompt(80, number=number) for number in range(1, 6)]
    for holder in holders:
        assert kv.admit(holder, 0)
    scheduler.add(prompt(200))
    for holder in holders[:2]:
        assert not scheduler.admit_waiting(1.0, lambda seq: False, 1e-4)
        kv.release(holder)
    assert not scheduler.admit_waiting(1.0, lambda seq: False, 1e-4)
    kv.release(holders[2])
    assert scheduler.admit_waiting(1.0, lambda seq: False, 1e-4)
    assert NO_BLOCK not in scheduler.running[0].block_ids
