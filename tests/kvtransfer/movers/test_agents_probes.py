"""A small read from each peer that is connected, timed, within a process and between two."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvrelay.engine.kv.spec import KVSpec
from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import ConnectPeer, CopyBlocks, CopyDone, PeerConnected
from kvrelay.kvtransfer.executor import TransferExecutor
from kvrelay.kvtransfer.layout import BlockLayout
from kvrelay.kvtransfer.movers.ranks import RanksAgent, join_ranks
from kvrelay.kvtransfer.probes import TIMEOUT_S, Probes
from kvrelay.kvtransfer.transfer_loop import Answer, TransferLoop
from tests.kvtransfer.movers.agent_kit import AgentMaker, agent_maker, ended, read
from tests.kvtransfer.movers.nixl_peer import content, peer_process

NUM_BLOCKS, SIZE = 64, 1 << 16
DEADLINE_S = 30.0


@contextmanager
def looped(agent: Any, pool: Any) -> Iterator[Callable[[Any], Answer]]:
    """Asks the transfer thread of a worker, which owns `agent`, and waits for its answer."""
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    executor = TransferExecutor("me", 1, agent, {Tier.DEVICE: pool}, probes=Probes(agent))
    loop = TransferLoop(executor, answers.put)

    def ask(request: Any) -> Answer:
        loop.submit(request)
        return answers.get(timeout=DEADLINE_S)

    try:
        yield ask
    finally:
        assert loop.close(DEADLINE_S)


def is_well(answer: Answer) -> PeerConnected:
    assert isinstance(answer, PeerConnected)
    assert (answer.error, answer.not_timed) == (None, None)
    assert answer.bytes_per_s > 1e6
    return answer


@pytest.mark.slow
def test_a_peer_in_another_process_is_timed_and_nothing_of_the_pool_is_written() -> None:
    with agent_maker() as make, peer_process(NUM_BLOCKS, SIZE, seed=1) as (_, metadata):
        agent, pool = make("me", NUM_BLOCKS, SIZE)
        before = pool.copy()
        with looped(agent, pool) as ask:
            is_well(ask(ConnectPeer("p", 1, NUM_BLOCKS, metadata)))
            assert np.array_equal(pool, before)
            done = ask(CopyBlocks(1, "p", 1, (3,), (5,), 5.0))
        assert isinstance(done, CopyDone)
        assert done.error is None
        before[5] = content(NUM_BLOCKS, SIZE, 1)[3]
        assert np.array_equal(pool, before)


def test_a_peer_that_is_stopped_is_told_in_time_and_read_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # shared memory of a stopped process can be read
    with agent_maker() as make, peer_process(NUM_BLOCKS, SIZE, seed=1) as (peer, metadata):
        agent, pool = make("me", NUM_BLOCKS, SIZE)
        with looped(agent, pool) as ask:
            peer.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            answer = ask(ConnectPeer("p", 1, NUM_BLOCKS, metadata))
            took_s = time.monotonic() - started
            peer.send_signal(signal.SIGCONT)
            assert isinstance(answer, PeerConnected)
            assert (answer.error, answer.bytes_per_s) == (None, 0.0)
            assert answer.not_timed == f"a read of {SIZE} bytes was not done after {TIMEOUT_S:g} s"
            assert took_s < 20 * TIMEOUT_S  # a machine may be busy
            done = ask(CopyBlocks(1, "p", 1, (3,), (5,), DEADLINE_S))
        assert isinstance(done, CopyDone)
        assert done.error is None
        assert np.array_equal(pool[5], content(NUM_BLOCKS, SIZE, 1)[3])


def test_an_unknown_peer_is_not_timed(make: AgentMaker) -> None:
    probes = Probes(make("me", NUM_BLOCKS, SIZE)[0])
    probes.begin(PeerConnected("unknown", 1))
    (answer,) = probes.poll()
    assert (answer.error, answer.not_timed) == (None, "not connected to unknown")


@pytest.mark.parametrize(("src_size", "dst_size"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_ranks_read_what_they_have_heads_of(make: AgentMaker, src_size: int, dst_size: int) -> None:
    layout = BlockLayout(KVSpec(2, 2, 64, 16, "float32"))
    ours, theirs = layout.share(0, dst_size), [layout.share(r, src_size) for r in range(src_size)]
    producers = [
        RanksAgent("p", make.over(f"p-{rank}", content(8, share.bytes_per_block, 1), None, share),
                   share, rank)
        for rank, share in enumerate(theirs)
    ]  # fmt: skip
    pool = content(8, ours.bytes_per_block, 0)
    before = pool.copy()
    agent = RanksAgent("me", make.over("me", pool, None, ours), ours)
    metadata = join_ranks("p", [each.metadata() for each in producers])
    agent.connect("p", 1, 8, metadata)
    handle, num_bytes = agent.post_probe("p", 4 * ours.bytes_per_block)
    assert num_bytes == 4 * ours.bytes_per_block
    assert ended(agent, handle).error is None
    with looped(agent, pool) as ask:
        is_well(ask(ConnectPeer("p", 1, 8, metadata)))
    assert np.array_equal(pool, before)


def test_two_workers_time_each_other() -> None:
    """The memory that each reads into is its own affair: the other does not hear of it."""
    with agent_maker() as make:
        agents = [make(name, NUM_BLOCKS, SIZE)[0] for name in "ab"]
        for one, other, name in ((*agents, "b"), (*reversed(agents), "a")):
            one.connect(name, 1, NUM_BLOCKS, other.metadata())
            handle, _ = one.post_probe(name, 1)
            assert ended(one, handle).error is None
        read(agents[0], "b", [1], [2])
