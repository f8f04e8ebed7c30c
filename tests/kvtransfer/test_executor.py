from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import (
    ConnectPeer,
    CopyBlocks,
    CopyDone,
    PeerConnected,
    StoreFailed,
)
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.executor import (
    STORE_CHECK_BUSY_S,
    STORE_CHECK_IDLE_S,
    StoreExecutor,
    TransferExecutor,
)
from tests.kvtransfer.fake_agent import FakeAgent, a_read
from tests.kvtransfer.movers.agent_kit import agent_maker
from tests.kvtransfer.movers.nixl_peer import content

NUM_BLOCKS, BLOCK = 8, 256
HOST, DISK = Tier.HOST, Tier.DISK


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """The TransferExecutor of "me" at epoch 7 over a fake agent, connected to "p" and "dead" at
    epoch 1. Its host memory is as large as its pool."""

    agent: FakeAgent = field(default_factory=FakeAgent)
    clock: Clock = field(default_factory=Clock)
    pool: np.ndarray = field(default_factory=lambda: content(NUM_BLOCKS, BLOCK, 0))
    host: np.ndarray = field(default_factory=lambda: content(NUM_BLOCKS, BLOCK, 1))

    def __post_init__(self) -> None:
        pools = {Tier.DEVICE: self.pool, Tier.HOST: self.host}
        self.executor = TransferExecutor("me", 7, self.agent, pools, clock=self.clock)
        for peer in ("p", "dead"):
            assert self.executor.connect(ConnectPeer(peer, 1, NUM_BLOCKS, b"")).error is None


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    assert bench.executor.audit() == 0
    assert not bench.agent.live


class TestReads:
    def test_a_read_is_answered_once_when_done(self, bench: Bench) -> None:
        bench.executor.post(a_read())
        assert bench.executor.poll_copies() == []
        assert bench.executor.audit() == 1
        bench.clock.now = 2.0
        bench.agent.states[0] = "done"
        checksums = tuple(checksum_blocks(bench.pool, [2, 3]))
        assert bench.executor.poll_copies() == [CopyDone(1, None, checksums, 2.0, 2 * BLOCK)]
        assert bench.executor.poll_copies() == []

    def test_reads_settle_in_any_order(self, bench: Bench) -> None:
        for transfer_id in (1, 2, 3):
            bench.executor.post(a_read(transfer_id))
        bench.agent.states[:] = ["stalled", "done", "lost"]
        assert [(d.transfer_id, d.error) for d in bench.executor.poll_copies()] == [
            (2, None),
            (3, "lost"),
        ]
        bench.agent.states[0] = "done"
        assert [d.transfer_id for d in bench.executor.poll_copies()] == [1]

    def test_a_stalled_read_is_given_up_and_answered_once(self, bench: Bench) -> None:
        bench.executor.post(a_read(timeout_s=5))
        bench.clock.now = 4.9
        assert bench.executor.poll_copies() == []
        bench.clock.now = 5.0
        assert bench.executor.poll_copies() == []
        assert bench.agent.canceled == {0}
        (done,) = bench.executor.poll_copies()
        assert done.error == "read of 2 blocks from p not done after 5 s"
        assert done.checksums == ()
        bench.agent.states[0] = "done"
        assert bench.executor.poll_copies() == []

    @pytest.mark.parametrize("end", ["stalled", "done", "lost"])
    def test_no_answer_while_something_may_still_write(self, bench: Bench, end: str) -> None:
        bench.executor.post(a_read(timeout_s=5))
        bench.agent.pinned.add(0)
        bench.clock.now = 6.0
        assert bench.executor.poll_copies() == []
        bench.agent.states[0] = end
        assert bench.executor.poll_copies() == []
        assert bench.executor.audit() == 1
        bench.agent.pinned.clear()
        (done,) = bench.executor.poll_copies()
        assert "not done after 5 s" in (done.error or "")

    @pytest.mark.parametrize(
        ("request_", "error"),
        [
            (a_read(epoch=2), "read from p at epoch 2: connected to epoch 1"),
            (a_read(peer="x"), "read from x at epoch 1: connected to epoch None"),
            (a_read(peer="dead"), "read from dead: no"),
            (a_read(peer="me", src_tier=HOST), "read from me at epoch 1: this is epoch 7"),
            (a_read(dst_tier=DISK), "read from p: device to disk is not possible"),
            (a_read(src_tier=DISK), "read from p: disk to device is not possible"),
            (
                a_read(peer="me", epoch=7, src_tier=DISK, dst_tier=DISK),
                "read from me: disk to disk is not possible",
            ),
        ],
    )
    def test_a_read_that_cannot_begin_is_answered(
        self, bench: Bench, request_: CopyBlocks, error: str
    ) -> None:
        bench.executor.post(request_)
        assert [d.error for d in bench.executor.poll_copies()] == [error]

    def test_a_read_of_nothing_is_done(self, bench: Bench) -> None:
        bench.executor.post(CopyBlocks(4, "p", 1, (), (), 1.0))
        assert bench.executor.poll_copies() == [CopyDone(4, None)]
        assert bench.agent.num_reads == 0

    def test_a_failed_connection_says_why_and_ends_the_older_one(self, bench: Bench) -> None:
        answer = bench.executor.connect(ConnectPeer("p", 2, NUM_BLOCKS, b"bad"))
        assert answer == PeerConnected("p", 2, "p differs")
        bench.executor.post(a_read(epoch=1))
        assert "connected to epoch None" in (bench.executor.poll_copies()[0].error or "")

    def test_between_own_tiers_the_checksums_are_of_what_arrived(self, bench: Bench) -> None:
        bench.executor.post(a_read(1, "me", 7, src_tier=HOST))
        bench.executor.post(a_read(2, "me", 7, dst_tier=HOST))
        bench.executor.post(a_read(3, "me", 7, src_tier=DISK, dst_tier=HOST))
        bench.agent.states[:] = ["done"] * 3
        in_pool = tuple(checksum_blocks(bench.pool, [2, 3]))
        in_host = tuple(checksum_blocks(bench.host, [2, 3]))
        assert [d.checksums for d in bench.executor.poll_copies()] == [in_pool, in_host, in_host]

    def test_what_goes_to_disk_is_checksummed_before_it_is_written(self, bench: Bench) -> None:
        before = tuple(checksum_blocks(bench.host, [0, 1]))
        bench.executor.post(a_read(1, "me", 7, src_tier=HOST, dst_tier=DISK))
        bench.host[0] ^= 0xFF  # by mistake, while it is being written
        bench.agent.states[0] = "done"
        (done,) = bench.executor.poll_copies()
        assert done.checksums == before
        assert done.num_bytes == 2 * BLOCK

    def test_a_tier_that_this_worker_does_not_have_is_named(self) -> None:
        agent = FakeAgent()
        executor = TransferExecutor("me", 7, agent, {Tier.DEVICE: content(4, 8, 0)})
        for transfer_id, tiers in enumerate(
            [{"dst_tier": HOST}, {"src_tier": HOST}, {"src_tier": HOST, "dst_tier": DISK}]
        ):
            executor.post(a_read(transfer_id, "me", 7, **tiers))
        errors = {done.error for done in executor.poll_copies()}
        assert errors == {"read from me: me has no host memory"}
        assert agent.num_reads == 0

    def test_close_answers_what_settles_and_what_does_not(self, bench: Bench) -> None:
        for transfer_id in (1, 2):
            bench.executor.post(a_read(transfer_id))
        bench.agent.pinned.add(0)
        done = bench.executor.close(0.0)
        assert sorted(d.transfer_id for d in done) == [1, 2]
        assert {d.error for d in done} == {"the worker shuts down"}
        assert bench.agent.closed


def test_faults_are_put_into_the_memory_that_was_read_into_and_never_on_disk() -> None:
    pool, host = content(NUM_BLOCKS, BLOCK, 0), content(NUM_BLOCKS, BLOCK, 1)
    hit: list[str] = []

    def corrupt(request: CopyBlocks, pool_bytes: np.ndarray) -> None:
        hit.append("host" if pool_bytes is host else "pool")

    agent, pools = FakeAgent(states=["done"] * 4), {Tier.DEVICE: pool, HOST: host}
    executor = TransferExecutor("me", 1, agent, pools, corrupt=corrupt)
    executor.post(a_read(1, "me", src_tier=HOST))
    executor.post(a_read(2, "me", src_tier=DISK, dst_tier=HOST))
    executor.post(a_read(3, "me", src_tier=HOST, dst_tier=DISK))
    assert [done.error for done in executor.poll_copies()] == [None] * 3
    assert hit == ["pool", "host"]


def test_what_the_agent_knows_of_a_copy_is_told() -> None:
    pool = content(NUM_BLOCKS, BLOCK, 1)
    known = [{"checksums": (7, 8)}, {}, {"stored_bytes": (4096, 8192), "stored_checksums": (3, 4)}]

    class Knowing(FakeAgent):
        def poll(self, handle: int) -> CopyDone | None:
            done = super().poll(handle)
            return done and replace(done, **known[handle])

    agent, pools = Knowing(states=["done"] * 3), {Tier.DEVICE: pool}
    executor = TransferExecutor("me", 1, agent, pools)
    for number, tiers in enumerate([(DISK, Tier.DEVICE)] * 2 + [(Tier.DEVICE, DISK)]):
        executor.post(a_read(number, "me", src_tier=tiers[0], dst_tier=tiers[1]))
    first, second, third = executor.poll_copies()
    assert (first.checksums, first.stored_bytes) == ((7, 8), ())
    assert second.checksums == tuple(checksum_blocks(pool, (2, 3)))
    assert third.checksums == tuple(checksum_blocks(pool, (0, 1)))
    assert (third.stored_bytes, third.stored_checksums) == ((4096, 8192), (3, 4))


@dataclass
class FakeStore:
    """A disk store that says what the test tells it to."""

    news: list[str | None] = field(default_factory=list)
    in_trouble: bool = False
    counters: Counter[str] = field(default_factory=Counter)
    num_checks: int = 0

    def check(self) -> str | None:
        self.num_checks += 1
        news = self.news.pop(0) if self.news else None
        self.counters["recreated"] += "starts empty" in (news or "")
        return news


class TestTheStore:
    def test_only_what_is_wrong_and_stays_so_is_a_failure(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        clock, store = Clock(), FakeStore()
        executor = StoreExecutor(store, clock=clock)  # type: ignore[arg-type]

        def look(news: str | None, in_trouble: bool) -> list[StoreFailed]:
            store.news, store.in_trouble = [news], in_trouble
            clock.now += STORE_CHECK_IDLE_S
            return executor.check(False)

        assert look("it is read-only", in_trouble=True) == [StoreFailed("it is read-only")]
        assert look(None, in_trouble=True) == []
        assert look("in order again", in_trouble=False) == []
        assert look("it vanished; it starts empty", in_trouble=False) == [
            StoreFailed("it vanished; it starts empty", lost=True)
        ]
        assert "it starts empty" in caplog.text

    def test_it_is_looked_after_more_often_while_it_is_busy(self) -> None:
        def num_checks(busy: bool) -> int:
            clock, store = Clock(), FakeStore()
            executor = StoreExecutor(store, clock=clock)  # type: ignore[arg-type]
            for _ in range(200):
                clock.now += 0.1
                executor.check(busy)
            return store.num_checks

        assert num_checks(busy=False) == pytest.approx(20 / STORE_CHECK_IDLE_S, abs=1)
        assert num_checks(busy=True) == pytest.approx(20 / STORE_CHECK_BUSY_S, abs=5)


def test_bad_bytes_in_one_block_change_its_checksum_alone() -> None:
    def corrupt(request: CopyBlocks, pool_bytes: np.ndarray) -> None:
        pool_bytes[request.dst[1], 100] ^= 1

    with agent_maker() as make:
        producer, source = make("p", NUM_BLOCKS, BLOCK, 1)
        agent, pool = make("r", NUM_BLOCKS, BLOCK, 0)
        executor = TransferExecutor("r", 1, agent, {Tier.DEVICE: pool}, corrupt=corrupt)
        assert executor.connect(ConnectPeer("p", 1, NUM_BLOCKS, producer.metadata())).error is None
        executor.post(CopyBlocks(1, "p", 1, (4, 5, 6), (1, 2, 3), 5.0))
        while not (answers := executor.poll_copies()):
            pass
    (done,) = answers
    expected = checksum_blocks(source, [4, 5, 6])
    assert [a == b for a, b in zip(done.checksums, expected, strict=True)] == [True, False, True]
