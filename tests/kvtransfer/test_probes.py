"""Small reads from peers that were just connected: how they grow, and what is told of those that
fail."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import NO_COPY, PROBE_BYTES, ConnectPeer, CopyDone, PeerConnected
from kvrelay.kvtransfer.executor import SHUTS_DOWN, TransferExecutor
from kvrelay.kvtransfer.probes import ENOUGH_S, TIMEOUT_S, Probes
from kvrelay.kvtransfer.ranks import RankAnswers
from tests.kvtransfer.fake_agent import FakeAgent, a_read
from tests.kvtransfer.movers.nixl_peer import content

BLOCK = 1 << 16
CONNECTED = PeerConnected("p", 1)


@dataclass
class ProbedAgent(FakeAgent):
    """Its peer has `num_blocks`, and sends a block in `block_s` after `start_s`, by `now`."""

    now: float = 0.0
    block_s: float = 1e-5
    start_s: float = 0.0
    num_blocks: int = PROBE_BYTES // BLOCK
    sizes: list[int] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)

    def post_probe(self, peer: str, num_bytes: int) -> tuple[int, int]:
        count = min(max(1, num_bytes // BLOCK), self.num_blocks)
        handle = self.begin(peer, NO_COPY)
        self.sizes.append(count)
        self.ends[handle] = self.now + self.start_s + count * self.block_s
        return handle, count * BLOCK

    def poll(self, handle: int) -> CopyDone | None:
        if self.states[handle] == "stalled" and self.now >= self.ends.get(handle, 1e9):
            self.states[handle] = "done"
        return super().poll(handle)


def run(agent: ProbedAgent, probes: Probes, step_s: float = 1e-6) -> PeerConnected:
    """Until the connection is told."""
    while True:
        told = probes.poll()
        if told:
            assert not probes.is_timing
            return told[0]
        agent.now += step_s


def begun(agent: ProbedAgent) -> Probes:
    probes = Probes(agent, clock=lambda: agent.now)
    probes.begin(CONNECTED)
    return probes


def test_reads_grow_until_their_overhead_does_not_count() -> None:
    agent = ProbedAgent(start_s=50e-6)
    told = run(agent, begun(agent))
    assert agent.sizes == [1, 1, 8, 64, 256], "the first connects, and the last is the largest"
    assert told == replace(CONNECTED, bytes_per_s=told.bytes_per_s)
    assert told.bytes_per_s == pytest.approx(BLOCK / 1e-5, rel=0.03)
    assert agent.now < 5e-3
    assert not agent.live


def test_by_a_slow_lane_a_block_is_enough() -> None:
    agent = ProbedAgent(block_s=ENOUGH_S)
    told = run(agent, begun(agent))
    assert agent.sizes == [1, 1]
    assert told.bytes_per_s == pytest.approx(BLOCK / ENOUGH_S, rel=0.01)


def test_a_small_pool_is_read_whole() -> None:
    agent = ProbedAgent(num_blocks=3)
    assert run(agent, begun(agent)).not_timed is None
    assert agent.sizes == [1, 1, 3]


def test_what_the_time_was_enough_for_is_told() -> None:
    agent = ProbedAgent(block_s=1e-4)
    probes = begun(agent)
    while len(agent.sizes) < 3:  # 8 blocks are on their way
        assert probes.poll() == []
        agent.now += 1e-6
    agent.block_s = 1e9
    agent.ends[2] = 1e9
    assert run(agent, probes, 1e-3).bytes_per_s == pytest.approx(BLOCK / 1e-4, rel=0.02)


def test_a_peer_that_does_not_answer_is_connected_after_all() -> None:
    """Its read, which has not settled, is not forgotten."""
    agent = ProbedAgent(block_s=1e9, pinned={0})
    probes = begun(agent)
    told = run(agent, probes, 1e-3)
    assert agent.now == pytest.approx(TIMEOUT_S, abs=2e-3)
    assert (told.error, told.bytes_per_s) == (None, 0.0)
    assert told.not_timed == "a read of 65536 bytes was not done after 0.1 s"
    assert probes.poll() == []
    assert probes.num_live == 1
    agent.pinned.clear()
    agent.states[0] = "done"
    assert probes.poll() == []
    assert probes.num_live == 0
    assert not agent.live


@pytest.mark.parametrize("states", [["broken\nin two"], ["done", "broken\nin two"]])
def test_a_read_that_fails_is_told(states: list[str]) -> None:
    agent = ProbedAgent(states=states)
    told = run(agent, begun(agent))
    assert (told.error, told.bytes_per_s, told.not_timed) == (None, 0.0, "broken")
    assert not agent.live


def test_a_read_that_cannot_be_posted_is_told() -> None:
    agent = ProbedAgent()
    probes = Probes(agent)
    probes.begin(replace(CONNECTED, peer="dead"))
    assert probes.num_live == 1
    (told,) = probes.poll()
    assert told.not_timed == "read from dead: no"
    assert probes.num_live == 0


def executor_over(agent: ProbedAgent) -> TransferExecutor:
    def clock() -> float:
        return agent.now

    pools = {Tier.DEVICE: content(4, 8, 0)}
    return TransferExecutor("me", 7, agent, pools, probes=Probes(agent, clock), clock=clock)


class TestExecutor:
    def test_the_answer_comes_with_the_copies(self) -> None:
        agent = ProbedAgent()
        executor = executor_over(agent)
        assert executor.connect(ConnectPeer("p", 1, 4, b"")) is None
        assert executor.is_timing
        assert executor.audit() == 1
        answers: list[Any] = []
        while not answers:
            answers = executor.poll_copies()
            agent.now += 1e-5
        assert [type(each) for each in answers] == [PeerConnected]
        assert answers[0].bytes_per_s > 0
        assert executor.audit() == 0
        assert not executor.is_timing

    def test_a_copy_that_is_asked_for_meanwhile_does_not_wait(self) -> None:
        agent = ProbedAgent(block_s=1e9)
        executor = executor_over(agent)
        executor.connect(ConnectPeer("p", 1, 4, b""))
        agent.states.append("done")
        executor.post(a_read())
        (answer,) = executor.poll_copies()
        assert isinstance(answer, CopyDone)
        assert answer.error is None

    def test_a_peer_that_cannot_be_connected_is_not_read(self) -> None:
        executor = executor_over(ProbedAgent())
        answer = executor.connect(ConnectPeer("p", 1, 4, b"bad"))
        assert answer == PeerConnected("p", 1, "p differs")
        assert executor.audit() == 0

    def test_the_end_of_the_worker_answers_it(self) -> None:
        agent = ProbedAgent(block_s=1e9)
        executor = executor_over(agent)
        executor.connect(ConnectPeer("p", 1, 4, b""))
        (answer,) = executor.close(0.0)
        assert isinstance(answer, PeerConnected)
        assert (answer.error, answer.not_timed) == (None, SHUTS_DOWN)
        assert agent.closed
        assert executor.audit() == 0


def test_ranks_are_as_fast_as_the_slowest_of_them() -> None:
    told: list[Any] = []
    answers = RankAnswers([True, True], lambda _request: None, told.append)
    for rates in ((4e9, 3e9), (4e9, 0.0)):
        answers.begin(ConnectPeer("p", 1, 4, b""))
        for rank, rate in enumerate(rates):
            why = None if rate else "too slow"
            answers.add(rank, replace(CONNECTED, bytes_per_s=rate, not_timed=why))
    both, one = told
    assert (both.bytes_per_s, both.not_timed) == (6e9, None)
    assert (one.bytes_per_s, one.not_timed, one.error) == (0.0, "too slow", None)
