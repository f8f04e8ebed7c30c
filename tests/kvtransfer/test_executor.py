from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from engine.request import SamplingParams
from engine.step import Sampled, ScheduledSeq, Step, StepDone
from kvtransfer.agent import ConnectPeer, PeerConnected, ReadBlocks, ReadDone
from kvtransfer.agents.local import LocalAgent, LocalRegistry
from kvtransfer.checksum import checksum_blocks
from kvtransfer.executor import WorkerExecutor
from tests.kvtransfer.fake_agent import FakeAgent, a_read, no_step
from tests.kvtransfer.nixl_peer import content

NUM_BLOCKS, BLOCK = 8, 256


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def a_step(*checksum_blocks: int) -> Step:
    seqs = [
        ScheduledSeq("r", [1, 2], 0, [0], sample, SamplingParams(), [1, 2], 2)
        for sample in (False, True)
    ]
    return Step(7, seqs, list(checksum_blocks))


@dataclass
class Bench:
    """A WorkerExecutor over a fake agent, connected to "p" and "dead" at epoch 1."""

    agent: FakeAgent = field(default_factory=FakeAgent)
    clock: Clock = field(default_factory=Clock)
    pool: np.ndarray = field(default_factory=lambda: content(NUM_BLOCKS, BLOCK, 0))

    def __post_init__(self) -> None:
        self.executor = WorkerExecutor(no_step, self.agent, self.pool, clock=self.clock)
        for peer in ("p", "dead"):
            assert self.executor.connect(ConnectPeer(peer, 1, NUM_BLOCKS, b"")).error is None


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    assert bench.executor.audit() == 0
    assert not bench.agent.live


class TestSteps:
    def test_blocks_are_checksummed_after_the_step(self) -> None:
        pool = content(NUM_BLOCKS, BLOCK, 0)

        def run(step: Step) -> StepDone:
            pool[5] = 9
            return StepDone(step.step_id, [None, Sampled(3)])

        done = WorkerExecutor(run, FakeAgent(), pool).execute(a_step(5, 1))
        assert done.checksums == checksum_blocks(pool, [5, 1])
        assert (done.step_id, done.sampled, done.error) == (7, [None, Sampled(3)], None)

    def test_an_exception_becomes_an_error_of_one_line(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def run(step: Step) -> StepDone:
            raise ValueError("shape mismatch\nand more")

        done = WorkerExecutor(run, FakeAgent(), content(2, 8, 0)).execute(a_step(0))
        assert done == StepDone(7, [None, None], error="ValueError: shape mismatch")
        assert "Traceback" in caplog.text

    def test_a_block_that_cannot_be_checksummed_is_an_error(self) -> None:
        executor = WorkerExecutor(
            lambda step: StepDone(step.step_id, [None, None]), FakeAgent(), content(2, 8, 0)
        )
        assert (executor.execute(a_step(2)).error or "").startswith("IndexError")


class TestReads:
    def test_a_read_is_answered_once_when_done(self, bench: Bench) -> None:
        bench.executor.post(a_read())
        assert bench.executor.poll_reads() == []
        assert bench.executor.audit() == 1
        bench.clock.now = 2.0
        bench.agent.states[0] = "done"
        checksums = tuple(checksum_blocks(bench.pool, [2, 3]))
        assert bench.executor.poll_reads() == [ReadDone(1, None, checksums, 2.0, 2 * BLOCK)]
        assert bench.executor.poll_reads() == []

    def test_reads_settle_in_any_order(self, bench: Bench) -> None:
        for transfer_id in (1, 2, 3):
            bench.executor.post(a_read(transfer_id))
        bench.agent.states[:] = ["stalled", "done", "lost"]
        assert [(d.transfer_id, d.error) for d in bench.executor.poll_reads()] == [
            (2, None),
            (3, "lost"),
        ]
        bench.agent.states[0] = "done"
        assert [d.transfer_id for d in bench.executor.poll_reads()] == [1]

    def test_a_stalled_read_is_given_up_and_answered_once(self, bench: Bench) -> None:
        bench.executor.post(a_read(timeout_s=5))
        bench.clock.now = 4.9
        assert bench.executor.poll_reads() == []
        bench.clock.now = 5.0
        (done,) = bench.executor.poll_reads()
        assert done.error == "read of 2 blocks from p not done after 5 s"
        assert done.checksums == ()
        bench.agent.states[0] = "done"
        assert bench.executor.poll_reads() == []

    @pytest.mark.parametrize("end", ["stalled", "done", "lost"])
    def test_no_answer_while_something_may_still_write(self, bench: Bench, end: str) -> None:
        bench.executor.post(a_read(timeout_s=5))
        bench.agent.pinned.add(0)
        bench.clock.now = 6.0
        assert bench.executor.poll_reads() == []
        bench.agent.states[0] = end
        assert bench.executor.poll_reads() == []
        assert bench.executor.audit() == 1
        bench.agent.pinned.clear()
        (done,) = bench.executor.poll_reads()
        assert "not done after 5 s" in (done.error or "")

    def test_a_good_read_whose_handle_stays_a_while_is_still_good(self, bench: Bench) -> None:
        bench.executor.post(a_read())
        bench.agent.pinned.add(0)
        bench.agent.states[0] = "done"
        assert bench.executor.poll_reads() == []
        bench.agent.pinned.clear()
        assert [d.error for d in bench.executor.poll_reads()] == [None]

    @pytest.mark.parametrize(
        ("request_", "error"),
        [
            (a_read(epoch=2), "read from p at epoch 2: connected to epoch 1"),
            (a_read(peer="x"), "read from x at epoch 1: connected to epoch None"),
            (a_read(peer="dead"), "read from dead: no"),
        ],
    )
    def test_a_read_that_cannot_begin_is_answered(
        self, bench: Bench, request_: ReadBlocks, error: str
    ) -> None:
        bench.executor.post(request_)
        assert [d.error for d in bench.executor.poll_reads()] == [error]

    def test_a_read_of_nothing_is_done(self, bench: Bench) -> None:
        bench.executor.post(ReadBlocks(4, "p", 1, (), (), 1.0))
        assert bench.executor.poll_reads() == [ReadDone(4, None)]
        assert bench.agent.num_reads == 0

    def test_a_failed_connection_says_why_and_ends_the_older_one(self, bench: Bench) -> None:
        answer = bench.executor.connect(ConnectPeer("p", 2, NUM_BLOCKS, b"bad"))
        assert answer == PeerConnected("p", 2, "p differs")
        bench.executor.post(a_read(epoch=1))
        assert "connected to epoch None" in (bench.executor.poll_reads()[0].error or "")

    def test_close_answers_what_settles_and_what_does_not(self, bench: Bench) -> None:
        for transfer_id in (1, 2):
            bench.executor.post(a_read(transfer_id))
        bench.agent.pinned.add(0)
        done = bench.executor.close(0.0)
        assert sorted(d.transfer_id for d in done) == [1, 2]
        assert {d.error for d in done} == {"the worker shuts down"}
        assert bench.agent.closed


def test_bad_bytes_in_one_block_change_its_checksum_alone() -> None:
    registry = LocalRegistry()
    pool, source = content(NUM_BLOCKS, BLOCK, 0), content(NUM_BLOCKS, BLOCK, 1)
    producer = LocalAgent("p", source, registry)

    def corrupt(request: ReadBlocks, pool_bytes: np.ndarray) -> None:
        pool_bytes[request.dst[1], 100] ^= 1

    executor = WorkerExecutor(no_step, LocalAgent("r", pool, registry), pool, corrupt=corrupt)
    assert executor.connect(ConnectPeer("p", 1, NUM_BLOCKS, producer.metadata())).error is None
    executor.post(ReadBlocks(1, "p", 1, (4, 5, 6), (1, 2, 3), 5.0))
    (done,) = executor.poll_reads()
    expected = checksum_blocks(source, [4, 5, 6])
    assert [a == b for a, b in zip(done.checksums, expected, strict=True)] == [True, False, True]
