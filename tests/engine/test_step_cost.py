"""What the host does for a step and for a turn of a session, counted: it is in proportion to what
is new, not to how long the sequences are."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any

import pytest

from kvrelay.engine.cost import PROMPT_SHAPE, FittedCost
from kvrelay.engine.kv.block_hash import BlockChain
from kvrelay.engine.kv.block_table import BlockTable
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.runs import LONGEST
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.model.batch import Guard, Limits
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.sequence import SeqState, Sequence
from kvrelay.engine.step import Sampled, StepDone
from tests.engine.configs import worker_config
from tests.engine.sequences import sequence

SIZE = 16
SHORT, LONG = 2_048, 65_536
KINDS = {"whole": (0,), "windows": (0, *(512,) * 5), "states": (0, *(2,) * 48)}
kinds = pytest.mark.parametrize("sizes", KINDS.values(), ids=KINDS)


class Counting(list[int]):
    """Entries of a block table that counts how many are looked at."""

    num_read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        Counting.num_read += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Any:
        Counting.num_read += len(self)
        return super().__iter__()

    def __eq__(self, other: object) -> bool:
        Counting.num_read += len(self)
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


class Engine:
    """The scheduler and the guard of one worker, and who computes nothing."""

    def __init__(self, sizes: tuple[int, ...], length: int) -> None:
        longest, num_groups = length + 1024, len(sizes)
        num_blocks = 2 * (longest // SIZE + 200 * num_groups)
        groups = sizes if num_groups > 1 else ()
        config = worker_config(
            num_blocks=num_blocks, block_size=SIZE, max_model_len=longest, group_windows=groups
        )
        self.kv = KVCacheManager(num_blocks, SIZE, config.kv_windows)
        self.scheduler = Scheduler(config, self.kv)
        self.guard = Guard(Limits(num_blocks, SIZE, longest, 1000, group_windows=groups))
        self.length, self.num_groups = length, num_groups
        self.numbers = count()

    def begin(self, tokens: list[int]) -> Sequence:
        seq = sequence(
            tokens,
            request_id=f"r{next(self.numbers)}",
            sampling=SamplingParams(max_tokens=10**6, temperature=0.0),
            chain=BlockChain(b"f", UNSALTED, SIZE, self.num_groups),
        )
        self.scheduler.add(seq)
        assert self.scheduler.admit(seq, 0.0)
        self.scheduler.waiting.remove(seq)
        self.kv.begin(seq, lambda _: False)
        seq.state = SeqState.RUNNING
        self.scheduler.running.append(seq)
        return seq

    def step(self) -> None:
        cost = FittedCost(PROMPT_SHAPE)
        step = self.scheduler.schedule(0.0, lambda _: 2048, cost)
        assert step is not None
        step.repeats = 1
        assert self.guard.check(step)[:2] == ({}, {})
        sampled = [Sampled(1) if share.sample else None for share in step.seqs]
        self.scheduler.finish_step(StepDone(step.step_id, sampled))

    def compute(self, seq: Sequence) -> None:
        while not seq.is_stream:
            self.step()


def counted(call: Callable[[], object]) -> tuple[int, Counter[str]]:
    """How many functions are called, and which how often."""
    calls: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[arg.__qualname__] += 1

    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sum(calls.values()), calls


@kinds
def test_a_step_looks_at_as_much_of_a_long_table_as_of_a_short_one(sizes: tuple[int, ...]) -> None:
    found: list[tuple[int, int]] = []
    for length in (SHORT, LONG):
        engine = Engine(sizes, length)
        seq = engine.begin([7] * length)
        engine.compute(seq)
        for table in (engine.kv._held[seq].table, seq.block_ids):
            for part in table.parts:
                part.blocks = Counting(part.blocks)

        def steps(engine: Engine = engine) -> None:
            for _ in range(4 * SIZE):
                engine.step()

        Counting.num_read = 0
        num_calls, _ = counted(steps)
        found.append((num_calls, Counting.num_read))
        engine.kv.check_integrity()
    (short_calls, short_read), (long_calls, long_read) = found
    assert long_calls <= 1.07 * short_calls  # the fuller pool evicts
    assert 0 < long_read <= 1.3 * short_read
    assert long_read < 4 * SIZE * (200 + 20 * len(sizes))


@kinds
def test_a_turn_that_is_a_hit_calls_as_much_for_a_long_session_as_for_a_short_one(
    sizes: tuple[int, ...],
) -> None:
    found: list[int] = []
    for length in (SHORT, LONG):
        engine = Engine(sizes, length)
        first = engine.begin([7] * length)
        engine.compute(first)
        engine.scheduler.remove(first)
        again = [*first.tokens, *[8] * 40]

        def turn(engine: Engine = engine, again: list[int] = again) -> None:
            seq = engine.begin(again)
            assert seq.num_computed >= len(again) - 60
            engine.scheduler.remove(seq)

        by_name = counted(turn)[1]
        # What is done for each block is done by one call for many, or once for a run.
        found.append(sum(by_name.values()) - by_name["append"])
        engine.kv.check_integrity()
    num_runs = (LONG - SHORT) // SIZE // LONGEST
    assert found[1] <= 1.3 * found[0] + 40 * num_runs


def test_names_of_other_groups_are_made_where_they_are_read() -> None:
    chain = BlockChain(b"f", UNSALTED, SIZE, 49)
    tokens = [7] * LONG
    chain.extend(tokens)
    num_calls, _ = counted(lambda: chain.extend_groups(tokens)[: 49 * 4000])
    assert num_calls < 20


def test_a_table_of_groups_is_as_large_as_what_it_has() -> None:
    engine = Engine(KINDS["states"], LONG)
    seq = engine.begin([7] * LONG)
    engine.compute(seq)
    table = seq.block_ids
    assert isinstance(table, BlockTable)
    assert len(table) >= LONG // SIZE * 49
    held = sum(len(part.sinks) + len(part.blocks) for part in table.parts)
    assert held <= LONG // SIZE + 1 + 48 * 3
