"""The threads of a worker: what goes to which, and how they end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.model.step_executor import StepExecutor
from kvrelay.engine.step import Execute, Step, StepDone
from kvrelay.kvtransfer.agent import (
    ConnectPeer,
    CopyBlocks,
    CopyDone,
    PeerConnected,
    StoreFailed,
    StoreIndex,
)
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.executor import StoreExecutor, TransferExecutor
from kvrelay.worker.threads import Copies, LaunchThreads, WorkerThreads
from tests.kvtransfer.fake_agent import FakeAgent, RefusingStore
from tests.kvtransfer.movers.nixl_peer import content

DEADLINE_S = 30.0
HOST, DISK = Tier.HOST, Tier.DISK


class Bench:
    """A worker's threads over two fake agents, whose reads are done at once."""

    def __init__(self, with_disk: bool = True) -> None:
        pools = {Tier.DEVICE: content(4, 8, 0), HOST: content(4, 8, 1)}
        self.memory, self.disk = FakeAgent(states=["done"] * 9), FakeAgent(states=["done"] * 9)
        self.store: Any = RefusingStore()
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.steps: list[int] = []
        copies: Copies = {Tier.DEVICE: (TransferExecutor("me", 1, self.memory, pools), None)}
        if with_disk:
            disk = TransferExecutor("me", 1, self.disk, pools)
            copies = {**copies, DISK: (disk, StoreExecutor(self.store))}
        self.threads = WorkerThreads(
            StepExecutor(self.run_step, partial(checksum_blocks, pools[Tier.DEVICE])),
            copies,
            self.answers.put,
            "me",
        )

    def run_step(self, step: Step) -> StepDone:
        self.steps.append(step.step_id)
        return StepDone(step.step_id, [])

    def ask(self, effect: Any) -> Any:
        self.threads.perform(effect)
        return self.answers.get(timeout=DEADLINE_S)


@pytest.fixture
def start() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def new(**options: Any) -> Bench:
        benches.append(Bench(**options))
        return benches[-1]

    yield new
    for bench in benches:
        bench.threads.close()
        assert bench.memory.closed
        assert not [t for t in threading.enumerate() if t.name.startswith("me-")]


def move(transfer_id: int, src_tier: Tier, dst_tier: Tier) -> CopyBlocks:
    return CopyBlocks(transfer_id, "me", 1, (0,), (1,), 5.0, src_tier, dst_tier)


def test_each_effect_goes_to_its_thread(start: Callable[..., Bench]) -> None:
    bench = start()
    assert bench.ask(Execute(Step(3, []))).step_id == 3
    assert bench.steps == [3]
    assert bench.ask(ConnectPeer("p", 2, 4, b"")) == PeerConnected("p", 2)
    assert bench.ask(move(1, HOST, Tier.DEVICE)).error is None
    assert (bench.memory.num_reads, bench.disk.num_reads) == (1, 0)
    for transfer_id, tiers in enumerate([(HOST, DISK), (DISK, HOST), (DISK, Tier.DEVICE)], 2):
        done = bench.ask(move(transfer_id, *tiers))
        assert (done.transfer_id, done.error) == (transfer_id, None)
    assert (bench.memory.num_reads, bench.disk.num_reads) == (1, 3)
    assert bench.ask(StoreIndex(remove=(1,))) == StoreFailed("no space")


def test_a_disk_that_hangs_holds_up_nothing_else(start: Callable[..., Bench]) -> None:
    bench = start()
    bench.disk.states[0] = "stalled"
    bench.threads.perform(move(1, HOST, DISK))
    assert bench.ask(move(2, HOST, Tier.DEVICE)).transfer_id == 2
    assert bench.ask(Execute(Step(3, []))).step_id == 3
    bench.disk.states[0] = "done"
    done = bench.answers.get(timeout=DEADLINE_S)
    assert isinstance(done, CopyDone)
    assert (done.transfer_id, done.error) == (1, None)


def test_what_is_under_way_at_the_end_is_answered_and_the_store_closed() -> None:
    bench = Bench()
    bench.disk.states[0] = bench.memory.states[0] = "stalled"
    bench.threads.perform(move(1, HOST, DISK))
    bench.threads.perform(move(2, HOST, Tier.DEVICE))
    bench.threads.perform(Execute(Step(3, [])))
    bench.threads.close()
    answers = [bench.answers.get_nowait() for _ in range(3)]
    reads = sorted((a.transfer_id, a.error) for a in answers if isinstance(a, CopyDone))
    assert reads == [(1, "the worker shuts down"), (2, "the worker shuts down")]
    assert [a.step_id for a in answers if isinstance(a, StepDone)] == [3]
    assert bench.memory.closed
    assert bench.disk.closed
    assert bench.store.closed


def test_without_a_disk_its_moves_fail(start: Callable[..., Bench]) -> None:
    bench = start(with_disk=False)
    done = bench.ask(move(1, HOST, DISK))
    assert (done.transfer_id, done.error) == (1, "this worker has no disk tier")
    assert bench.ask(StoreIndex(remove=(1,))) == StoreFailed("this worker has no disk tier")
    assert bench.memory.num_reads == 0


def test_a_step_is_launched_while_one_runs_and_its_end_is_told_after_it() -> None:
    """The second is launched before the first has ended; what is executed keeps its place."""
    answers: queue.SimpleQueue[StepDone] = queue.SimpleQueue()
    launched: queue.SimpleQueue[int] = queue.SimpleQueue()
    ends = {number: threading.Event() for number in range(3)}

    def launch(step: Step) -> Callable[[], StepDone]:
        launched.put(step.step_id)

        def wait() -> StepDone:
            assert ends[step.step_id].wait(DEADLINE_S)
            return StepDone(step.step_id, [])

        return wait

    def execute(step: Step) -> StepDone:
        return StepDone(step.step_id, [])

    executor = StepExecutor(
        execute, lambda _: [], launch_step=launch, begin_checksums=lambda _: list[int]
    )
    threads = LaunchThreads(executor.launch, answers.put, "launching")
    for number in range(3):
        threads.submit(Step(number, [], may_be_followed=True))
    threads.submit(Step(3, []))
    assert [launched.get(timeout=DEADLINE_S) for _ in range(3)] == [0, 1, 2]
    assert answers.empty()
    threads.stop()
    assert not threads.join(0.01), "a step runs"
    for number in (1, 0, 2):
        ends[number].set()
    assert [answers.get(timeout=DEADLINE_S).step_id for _ in range(4)] == [0, 1, 2, 3]
    assert threads.join(DEADLINE_S)
    assert not [t for t in threading.enumerate() if t.name.startswith("launching")]
