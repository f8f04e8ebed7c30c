from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvtransfer import executor as executor_module
from kvtransfer.agent import ConnectPeer, PeerConnected, ReadBlocks, ReadDone
from kvtransfer.agents.local import LocalAgent, LocalRegistry
from kvtransfer.checksum import checksum_blocks
from kvtransfer.executor import Answer, TransferLoop, WorkerExecutor
from tests.kvtransfer.fake_agent import FakeAgent, a_read, no_step
from tests.kvtransfer.nixl_peer import content

DEADLINE_S = 30.0
NUM_BLOCKS, BLOCK = 8, 256


class Loop:
    """A TransferLoop, and its answers as they come."""

    def __init__(self, executor: WorkerExecutor, **options: Any) -> None:
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.loop = TransferLoop(executor, self.answers.put, **options)
        self.submit = self.loop.submit

    def next(self) -> Answer:
        return self.answers.get(timeout=DEADLINE_S)


@pytest.fixture
def start() -> Iterator[Callable[..., Loop]]:
    loops: list[Loop] = []

    def new(executor: WorkerExecutor, **options: Any) -> Loop:
        loops.append(Loop(executor, **options))
        return loops[-1]

    yield new
    for each in loops:
        assert each.loop.close(DEADLINE_S)


class TestTransferLoop:
    def test_many_reads_between_two_workers(self, start: Callable[..., Loop]) -> None:
        registry = LocalRegistry()
        pool, source = content(NUM_BLOCKS, BLOCK, 0), content(NUM_BLOCKS, BLOCK, 1)
        producer = LocalAgent("p", source, registry)
        executor = WorkerExecutor(no_step, LocalAgent("r", pool, registry), pool)
        loop = start(executor)
        loop.submit(ConnectPeer("p", 3, NUM_BLOCKS, producer.metadata()))
        for i in range(200):
            loop.submit(ReadBlocks(i, "p", 3, (i % 8,), (i % 8,), 5.0))
        assert loop.next() == PeerConnected("p", 3)
        answers = [loop.next() for _ in range(200)]
        for answer in answers:
            assert isinstance(answer, ReadDone)
            assert answer.checksums == tuple(checksum_blocks(source, [answer.transfer_id % 8]))
        assert sorted(a.transfer_id for a in answers if isinstance(a, ReadDone)) == [*range(200)]
        assert np.array_equal(pool, source)
        assert executor.audit() == 0

    def test_a_stalled_read_times_out_by_itself(self, start: Callable[..., Loop]) -> None:
        agent = FakeAgent()
        loop = start(WorkerExecutor(no_step, agent, content(4, 8, 0)))
        loop.submit(ConnectPeer("p", 1, 4, b""))
        loop.submit(a_read(timeout_s=0.05))
        assert loop.next() == PeerConnected("p", 1)
        answer = loop.next()
        assert isinstance(answer, ReadDone)
        assert "not done after 0.05 s" in (answer.error or "")
        assert not agent.live

    def test_more_than_may_be_outstanding_is_refused(self, start: Callable[..., Loop]) -> None:
        agent = FakeAgent()
        loop = start(WorkerExecutor(no_step, agent, content(4, 8, 0)), max_outstanding=2)
        loop.submit(ConnectPeer("p", 1, 4, b""))
        assert loop.next() == PeerConnected("p", 1)
        for transfer_id in (1, 2, 3):
            loop.submit(a_read(transfer_id, timeout_s=1000))
        refusal = loop.next()
        assert isinstance(refusal, ReadDone)
        assert refusal.transfer_id == 3
        assert refusal.error == "2 transfers are outstanding, the most allowed"

    def test_close_answers_everything_and_refuses_what_is_new(self) -> None:
        agent = FakeAgent()
        loop = Loop(WorkerExecutor(no_step, agent, content(4, 8, 0)))
        loop.submit(ConnectPeer("p", 1, 4, b""))
        for transfer_id in (1, 2):
            loop.submit(a_read(transfer_id, timeout_s=1000))
        assert loop.loop.close(DEADLINE_S)
        loop.submit(a_read(3))
        loop.submit(ConnectPeer("q", 1, 4, b""))
        assert loop.next() == PeerConnected("p", 1)
        ends = [loop.next() for _ in range(4)]
        assert [e.error for e in ends] == ["the worker shuts down"] * 4
        assert loop.answers.empty()
        assert agent.closed
        assert loop.loop.close(DEADLINE_S)

    def test_an_idle_loop_does_not_poll(self, start: Callable[..., Loop]) -> None:
        class Counting(WorkerExecutor):
            polls = 0

            def poll_reads(self) -> list[ReadDone]:
                self.polls += 1
                return super().poll_reads()

        executor = Counting(no_step, FakeAgent(), content(4, 8, 0))
        loop = start(executor)
        loop.submit(ConnectPeer("p", 1, 4, b""))
        loop.next()
        time.sleep(0.3)  # a loop that spins polls many thousand times meanwhile
        assert executor.polls < 100


def test_the_wait_between_polls_grows_from_nothing_to_its_cap() -> None:
    waits = [executor_module._wait_s(quiet) for quiet in range(5000)]
    assert waits == sorted(waits)
    assert waits[0] == 0.0
    assert waits[executor_module.SPINS] == executor_module.FIRST_WAIT_S
    assert waits[-1] == executor_module.MAX_WAIT_S
