from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer import transfer_loop
from kvrelay.kvtransfer.agent import (
    ConnectPeer,
    CopyBlocks,
    CopyDone,
    Mover,
    PeerConnected,
    StoreFailed,
    StoreIndex,
)
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.executor import TransferExecutor
from kvrelay.kvtransfer.movers.nixl import NixlAgent
from kvrelay.kvtransfer.store import StoreError
from kvrelay.kvtransfer.transfer_loop import Answer, TransferLoop
from tests.kvtransfer.fake_agent import FakeAgent, a_read
from tests.kvtransfer.movers.nixl_peer import content

DEADLINE_S = 30.0
NUM_BLOCKS, BLOCK = 8, 256


def executor_of(mover: Mover, pool: np.ndarray | None = None) -> TransferExecutor:
    device = content(4, 8, 0) if pool is None else pool
    return TransferExecutor("me", 1, mover, {Tier.DEVICE: device})


class Loop:
    """A TransferLoop, and its answers as they come."""

    def __init__(self, executor: TransferExecutor, **options: Any) -> None:
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.loop = TransferLoop(executor, self.answers.put, **options)
        self.submit = self.loop.submit

    def next(self) -> Answer:
        return self.answers.get(timeout=DEADLINE_S)


@pytest.fixture
def start() -> Iterator[Callable[..., Loop]]:
    loops: list[Loop] = []

    def new(executor: TransferExecutor, **options: Any) -> Loop:
        loops.append(Loop(executor, **options))
        return loops[-1]

    yield new
    for each in loops:
        assert each.loop.close(DEADLINE_S)


class TestTransferLoop:
    def test_many_reads_between_two_workers(self, start: Callable[..., Loop]) -> None:
        producer = NixlAgent("p", torch.from_numpy(source := content(NUM_BLOCKS, BLOCK, 1)))
        pool = content(NUM_BLOCKS, BLOCK, 0)
        executor = executor_of(NixlAgent("me", torch.from_numpy(pool)), pool)
        loop = start(executor)
        loop.submit(ConnectPeer("p", 3, NUM_BLOCKS, producer.metadata()))
        for i in range(200):
            loop.submit(CopyBlocks(i, "p", 3, (i % 8,), (i % 8,), 5.0))
        assert loop.next() == PeerConnected("p", 3)
        answers = [loop.next() for _ in range(200)]
        for answer in answers:
            assert isinstance(answer, CopyDone)
            assert answer.checksums == tuple(checksum_blocks(source, [answer.transfer_id % 8]))
        assert sorted(a.transfer_id for a in answers if isinstance(a, CopyDone)) == [*range(200)]
        assert np.array_equal(pool, source)
        assert executor.audit() == 0
        producer.close()

    def test_a_stalled_read_times_out_by_itself(self, start: Callable[..., Loop]) -> None:
        agent = FakeAgent()
        loop = start(executor_of(agent))
        loop.submit(ConnectPeer("p", 1, 4, b""))
        loop.submit(a_read(timeout_s=0.05))
        assert loop.next() == PeerConnected("p", 1)
        answer = loop.next()
        assert isinstance(answer, CopyDone)
        assert "not done after 0.05 s" in (answer.error or "")
        assert not agent.live

    def test_more_than_may_be_outstanding_is_refused(self, start: Callable[..., Loop]) -> None:
        agent = FakeAgent()
        loop = start(executor_of(agent), max_outstanding=2)
        loop.submit(ConnectPeer("p", 1, 4, b""))
        assert loop.next() == PeerConnected("p", 1)
        for transfer_id in (1, 2, 3):
            loop.submit(a_read(transfer_id, timeout_s=1000))
        refusal = loop.next()
        assert isinstance(refusal, CopyDone)
        assert refusal.transfer_id == 3
        assert refusal.error == "2 transfers are outstanding, the most allowed"

    def test_close_answers_everything_and_refuses_what_is_new(self) -> None:
        agent = FakeAgent()
        loop = Loop(executor_of(agent))
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

    def test_an_agent_that_cannot_say_how_a_read_is_stops_no_other(
        self, start: Callable[..., Loop]
    ) -> None:
        """The thread ended, without a word: nothing that was asked of it was answered again."""

        class Failing(FakeAgent):
            num_failures = 0

            def poll(self, handle: int) -> CopyDone | None:
                if handle == 0 and self.num_failures < 3:
                    self.num_failures += 1
                    raise OSError(errno.EIO, "Input/output error")
                return super().poll(handle)

        agent = Failing(states=["done", "done"])
        executor = executor_of(agent)
        loop = start(executor)
        loop.submit(ConnectPeer("p", 1, 4, b""))
        assert loop.next() == PeerConnected("p", 1)
        loop.submit(a_read(1))
        loop.submit(a_read(2))
        ends = [loop.next(), loop.next()]
        errors = {end.transfer_id: end.error for end in ends if isinstance(end, CopyDone)}
        assert errors == {1: "OSError: [Errno 5] Input/output error", 2: None}
        assert agent.num_failures == 3, "its blocks are nobody else's before it has settled"
        assert not agent.live
        assert executor.audit() == 0

    def test_an_agent_that_cannot_be_closed_keeps_nobody_waiting(self) -> None:
        class Failing(FakeAgent):
            def close(self) -> None:
                raise OSError(errno.EIO, "Input/output error")

        events: list[Any] = []
        loop = Loop(executor_of(Failing(states=["stalled"])), store=FakeStore(events))
        loop.submit(ConnectPeer("p", 1, 4, b""))
        loop.submit(a_read(1, timeout_s=1000))
        assert loop.next() == PeerConnected("p", 1)
        assert loop.loop.close(DEADLINE_S)
        end = loop.next()
        assert isinstance(end, CopyDone)
        assert end.error == "the worker shuts down"
        assert events == ["closed"]

    def test_an_idle_loop_does_not_poll(self, start: Callable[..., Loop]) -> None:
        class Counting(TransferExecutor):
            polls = 0

            def poll_copies(self) -> list[CopyDone]:
                self.polls += 1
                return super().poll_copies()

        executor = Counting("me", 1, FakeAgent(), {Tier.DEVICE: content(4, 8, 0)})
        loop = start(executor)
        loop.submit(ConnectPeer("p", 1, 4, b""))
        loop.next()
        time.sleep(0.3)  # a loop that spins polls many thousand times meanwhile
        assert executor.polls < 100


class FakeStore:
    """A StoreExecutor that keeps the order of what it and the agent are asked for."""

    wait_s = 1.0

    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.news: queue.SimpleQueue[StoreFailed] = queue.SimpleQueue()

    def update(self, change: StoreIndex) -> None:
        self.events.append(change)
        if 9 in change.remove:
            raise StoreError("slot 9 is not there")

    def check(self, busy: bool) -> list[StoreFailed]:
        return [] if self.news.empty() else [self.news.get()]

    def close(self) -> None:
        self.events.append("closed")


class RecordingAgent(FakeAgent):
    """Its reads are done at once."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__(states=["done"] * 100)
        self.events = events

    def copy(self, request: CopyBlocks) -> int:
        self.events.append(("read", *request.dst))
        return super().copy(request)

    def close(self) -> None:
        super().close()
        self.events.append("agent closed")


class TestTheDisksLoop:
    def test_the_index_is_changed_in_order_with_the_reads(self) -> None:
        events: list[Any] = []
        loop = Loop(executor_of(RecordingAgent(events)), store=FakeStore(events))
        write = CopyBlocks(1, "me", 1, (0,), (5,), 5.0, dst_tier=Tier.DISK)
        loop.submit(StoreIndex(remove=(5,)))
        loop.submit(write)
        loop.submit(StoreIndex(remove=(6,)))
        answer = loop.next()
        assert isinstance(answer, CopyDone)
        assert answer.transfer_id == 1
        assert loop.loop.close(DEADLINE_S)
        assert events == [
            StoreIndex(remove=(5,)),
            ("read", 5),
            StoreIndex(remove=(6,)),
            "agent closed",
            "closed",
        ]
        assert loop.answers.empty(), "a change that worked has no answer"

    def test_what_goes_wrong_with_the_store_is_told(self, start: Callable[..., Loop]) -> None:
        store = FakeStore([])
        loop = start(executor_of(FakeAgent()), store=store)
        loop.submit(StoreIndex(remove=(9,)))
        assert loop.next() == StoreFailed("slot 9 is not there")
        store.news.put(StoreFailed("the folder is gone"))
        assert loop.next() == StoreFailed("the folder is gone")

    def test_changes_of_the_index_are_bounded_too(self, start: Callable[..., Loop]) -> None:
        held = threading.Event()

        class Slow(FakeStore):
            def update(self, change: StoreIndex) -> None:
                assert held.wait(DEADLINE_S)
                super().update(change)

        events: list[Any] = []
        loop = start(executor_of(FakeAgent()), store=Slow(events), max_outstanding=2)
        for slot in (1, 2, 3):
            loop.submit(StoreIndex(remove=(slot,)))
        refusal = loop.next()
        assert isinstance(refusal, StoreFailed)
        assert "2 transfers are outstanding" in refusal.error
        held.set()
        assert loop.loop.close(DEADLINE_S)
        assert events == [StoreIndex(remove=(1,)), StoreIndex(remove=(2,)), "closed"]


def test_the_wait_between_polls_grows_from_nothing_to_its_cap() -> None:
    waits = [transfer_loop._wait_s(quiet) for quiet in range(5000)]
    assert waits == sorted(waits)
    assert waits[0] == 0.0
    assert waits[transfer_loop.SPINS] == transfer_loop.WAIT.base_s
    assert waits[-1] == transfer_loop.WAIT.max_s
