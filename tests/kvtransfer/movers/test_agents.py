from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvrelay.kvtransfer.agent import AgentError
from kvrelay.kvtransfer.movers.metadata import AgentMetadata
from kvrelay.kvtransfer.movers.nixl import NixlAgent
from kvrelay.kvtransfer.movers.pool import pool_bytes
from tests.kvtransfer.movers.agent_kit import (
    BLOCK,
    DEADLINE_S,
    NUM_BLOCKS,
    AgentMaker,
    begin,
    read,
    settle,
)
from tests.kvtransfer.movers.nixl_peer import content, peer_process


class TestEveryAgent:
    def test_a_read_of_shuffled_blocks_writes_them_and_nothing_else(self, make: AgentMaker) -> None:
        reader, pool = make("reader", seed=1)
        producer, source = make("producer", num_blocks=100, seed=2)
        reader.connect("p", 1, 100, producer.metadata())
        rng = random.Random(3)
        src, dst = rng.sample(range(100), 40), rng.sample(range(NUM_BLOCKS), 40)
        expected = pool.copy()
        expected[dst] = source[src]
        read(reader, "p", src, dst)
        assert np.array_equal(pool, expected)

    def test_reads_from_two_peers_run_at_once(self, make: AgentMaker) -> None:
        reader, pool = make("reader")
        sources = {}
        for seed, peer in enumerate("ab", start=1):
            producer, sources[peer] = make("producer", seed=seed)
            reader.connect(peer, 1, NUM_BLOCKS, producer.metadata())
        reads = [("ab"[i % 2], list(range(i, 64, 8)), list(range(i, 64, 8))) for i in range(8)]
        handles = [begin(reader, *each) for each in reads]
        for handle in reversed(handles):
            settle(reader, handle)
        for peer, src, dst in reads:
            assert np.array_equal(pool[dst], sources[peer][src])

    def test_a_peer_that_was_never_connected_is_named(self, make: AgentMaker) -> None:
        reader, _ = make("reader")
        with pytest.raises(AgentError, match="nobody"):
            begin(reader, "nobody", [0], [0])
        reader.disconnect("nobody")

    def test_no_read_after_disconnect(self, make: AgentMaker) -> None:
        reader, _ = make("reader")
        reader.connect("p", 1, NUM_BLOCKS, make("producer")[0].metadata())
        reader.disconnect("p")
        with pytest.raises(AgentError, match="not connected to p"):
            begin(reader, "p", [0], [0])

    @pytest.mark.parametrize(
        ("src", "dst", "what"),
        [
            ([64], [0], "source block 64"),
            ([0], [-1], "destination block -1"),
            ([0, 1], [0], "2 source and 1 destination"),
            ([], [], "0 source"),
        ],
    )
    def test_blocks_outside_a_pool_are_refused(
        self, make: AgentMaker, src: list[int], dst: list[int], what: str
    ) -> None:
        reader, _ = make("reader")
        reader.connect("p", 1, NUM_BLOCKS, make("producer")[0].metadata())
        with pytest.raises(AgentError, match=what):
            begin(reader, "p", src, dst)

    def test_a_new_epoch_of_a_peer_replaces_the_old_one(self, make: AgentMaker) -> None:
        reader, pool = make("reader")
        for epoch in (1, 2, 3):
            producer, source = make("producer", num_blocks=NUM_BLOCKS + epoch, seed=epoch)
            reader.connect("p", epoch, NUM_BLOCKS + epoch, producer.metadata())
            read(reader, "p", [NUM_BLOCKS], [7])
            assert np.array_equal(pool[7], source[NUM_BLOCKS])
            producer.close()

    def test_connecting_twice_is_harmless(self, make: AgentMaker) -> None:
        reader, pool = make("reader")
        producer, source = make("producer", seed=1)
        for _ in range(2):
            reader.connect("p", 1, NUM_BLOCKS, producer.metadata())
        read(reader, "p", [5], [6])
        assert np.array_equal(pool[6], source[5])

    def test_what_differs_between_pools_is_named(self, make: AgentMaker) -> None:
        reader, _ = make("reader")
        other, _ = make("producer", size=BLOCK * 2)
        with pytest.raises(AgentError, match=r"p differs in bytes per block: it says 8192"):
            reader.connect("p", 1, NUM_BLOCKS, other.metadata())
        same, _ = make("producer")
        with pytest.raises(AgentError, match=r"p differs in number of blocks: it says 64"):
            reader.connect("p", 1, NUM_BLOCKS + 1, same.metadata())
        with pytest.raises(AgentError, match="not connected to p"):
            begin(reader, "p", [0], [0])

    def test_damaged_metadata_is_an_error_and_no_crash(self, make: AgentMaker) -> None:
        reader, _ = make("reader")
        good = make("producer")[0].metadata()
        rng = random.Random(0)
        damaged = [b"", b"x", rng.randbytes(500), good[:-1], good + b"x"]
        for _ in range(50):
            flipped = bytearray(good)
            flipped[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
            damaged.append(bytes(flipped))
        for metadata in damaged:
            with pytest.raises(AgentError, match="of p "):
                reader.connect("p", 1, NUM_BLOCKS, metadata)


def test_agents_of_different_transports_do_not_connect(make: AgentMaker) -> None:
    agent, pool = make("n")
    over_tcp = AgentMetadata(transport="tcp", agent="t", bytes_per_block=BLOCK, spaces={})
    with pytest.raises(AgentError, match="differs in transport: it says tcp"):
        agent.connect("t", 1, len(pool), over_tcp.pack())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool_bytes_is_a_view_of_a_tensor(dtype: torch.dtype) -> None:
    pool = torch.zeros(3, 2, 5, dtype=dtype)
    view = pool_bytes(pool)
    assert view.shape == (3, 10 * pool.element_size())
    view[1] = 255
    assert not pool[1].eq(0).any()
    assert pool[0].eq(0).all()
    assert pool[2].eq(0).all()


SIZES = (200, 368_640)  # 74 MB: over TCP still under way when the peer is killed
TRANSPORTS = ["tcp,sm,self", "tcp,self"]


class TestNixlBetweenProcesses:
    @pytest.fixture(
        params=[TRANSPORTS[0], *(pytest.param(t, marks=pytest.mark.long) for t in TRANSPORTS[1:])],
        autouse=True,
    )
    def _transports(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", request.param)

    @pytest.fixture
    def reader(self) -> Iterator[tuple[NixlAgent, np.ndarray]]:
        pool = torch.zeros(SIZES, dtype=torch.uint8)
        agent = NixlAgent("reader", pool)
        yield agent, pool.numpy()
        agent.close()

    @pytest.mark.slow
    def test_a_killed_peer_fails_the_read_and_its_successor_is_read(
        self, reader: tuple[NixlAgent, np.ndarray]
    ) -> None:
        agent, pool = reader
        blocks = list(range(SIZES[0]))
        with peer_process(*SIZES, seed=1) as (process, metadata):
            agent.connect("p", 1, SIZES[0], metadata)
            read(agent, "p", [3, 1], [4, 5])
            assert np.array_equal(pool[[4, 5]], content(*SIZES, seed=1)[[3, 1]])
            with pytest.raises(AgentError, match="from p"):
                read_while_killing(agent, process.pid, blocks)
            with pytest.raises(AgentError, match="from p"):
                read(agent, "p", [0], [0])
        with peer_process(*SIZES, seed=2) as (_, metadata):
            agent.connect("p", 2, SIZES[0], metadata)
            read(agent, "p", blocks[::-1], blocks)
            assert np.array_equal(pool, content(*SIZES, seed=2)[::-1])


def read_while_killing(agent: NixlAgent, pid: int, blocks: list[int]) -> None:
    """Read all blocks again and again; the peer dies in the midst of one. Raises AgentError."""
    handle = begin(agent, "p", blocks, blocks)
    killer = threading.Thread(target=os.kill, args=(pid, signal.SIGKILL))
    killer.start()
    deadline = time.monotonic() + DEADLINE_S
    try:
        while time.monotonic() < deadline:
            settle(agent, handle)
            handle = begin(agent, "p", blocks, blocks)
    finally:
        killer.join()


@pytest.fixture
def tcp_reader(monkeypatch: pytest.MonkeyPatch) -> tuple[NixlAgent, np.ndarray]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    pool = torch.zeros(SIZES, dtype=torch.uint8)
    return NixlAgent("reader", pool), pool.numpy()


@pytest.mark.slow
def test_a_read_from_a_stopped_peer_settles_only_when_its_bytes_have_come(
    tcp_reader: tuple[NixlAgent, np.ndarray],
) -> None:
    agent, pool = tcp_reader
    blocks = list(range(SIZES[0]))
    with peer_process(*SIZES, seed=1) as (process, metadata):
        agent.connect("p", 1, SIZES[0], metadata)
        read(agent, "p", [0], [0])
        os.kill(process.pid, signal.SIGSTOP)
        handle = begin(agent, "p", blocks, blocks)
        agent.cancel(handle)
        for _ in range(100):
            assert agent.poll(handle) is None
        agent.disconnect("p")
        with pytest.raises(AgentError, match="reads of its last connection run on"):
            agent.connect("p", 1, SIZES[0], metadata)
        os.kill(process.pid, signal.SIGCONT)
        settle(agent, handle)
        assert np.array_equal(pool, content(*SIZES, seed=1))
        pool[:] = 0
        agent.connect("p", 1, SIZES[0], metadata)  # no new incarnation
        read(agent, "p", [9], [0])
        assert np.array_equal(pool[0], content(*SIZES, seed=1)[9])
        assert not pool[1:].any()
    agent.close()


@pytest.mark.slow
def test_close_stops_a_read_that_never_settles(tcp_reader: tuple[NixlAgent, np.ndarray]) -> None:
    agent, pool = tcp_reader
    blocks = list(range(SIZES[0]))
    with peer_process(*SIZES, seed=1) as (process, metadata):
        agent.connect("p", 1, SIZES[0], metadata)
        read(agent, "p", [0], [0])
        os.kill(process.pid, signal.SIGSTOP)
        begin(agent, "p", blocks, blocks)
        agent.close()
        before = pool.copy()
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait(DEADLINE_S)
    assert np.array_equal(pool, before)
