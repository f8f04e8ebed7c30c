"""Host memory beside the device pool: read by peers, and exchanged with it."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import AgentError, PeerAgent
from kvrelay.kvtransfer.movers.pool import make_host_arena
from tests.kvtransfer.movers.agent_kit import AgentMaker, agent_maker, begin, fails, read, settle
from tests.kvtransfer.movers.nixl_peer import content, peer_process

SIZE = 20_000
MEMORY = (Tier.DEVICE, Tier.HOST)
COUNTS = {Tier.DEVICE: 40, Tier.HOST: 90}

Pools = dict[Tier, np.ndarray]


def tiered(make: AgentMaker, name: str, seed: int) -> tuple[PeerAgent, Pools]:
    pools = {tier: content(COUNTS[tier], SIZE, seed + i) for i, tier in enumerate(MEMORY)}
    return make.over(name, pools[Tier.DEVICE], host=pools[Tier.HOST]), pools


@pytest.mark.parametrize(("src_tier", "dst_tier"), list(itertools.product(MEMORY, MEMORY)))
def test_each_memory_of_a_peer_is_read_into_each_of_ones_own(
    make: AgentMaker, src_tier: Tier, dst_tier: Tier
) -> None:
    reader, pools = tiered(make, "reader", seed=1)
    producer, sources = tiered(make, "producer", seed=11)
    reader.connect("p", 1, COUNTS[Tier.DEVICE], producer.metadata())
    rng = random.Random(0)
    src = rng.sample(range(COUNTS[src_tier]), 30)
    dst = rng.sample(range(COUNTS[dst_tier]), 30)
    expected = {tier: pool.copy() for tier, pool in pools.items()}
    expected[dst_tier][dst] = sources[src_tier][src]
    before = {tier: pool.copy() for tier, pool in sources.items()}
    read(reader, "p", src, dst, src_tier, dst_tier)
    for tier in MEMORY:
        assert np.array_equal(pools[tier], expected[tier])
        assert np.array_equal(sources[tier], before[tier])


def test_blocks_move_between_own_memories_both_ways_without_a_connection(make: AgentMaker) -> None:
    agent, pools = tiered(make, "me", seed=1)
    rng = random.Random(1)
    slots = rng.sample(range(COUNTS[Tier.HOST]), 40)
    device, host = (pools[tier].copy() for tier in MEMORY)
    read(agent, "me", list(range(40)), slots, Tier.DEVICE, Tier.HOST)
    host[slots] = device
    assert np.array_equal(pools[Tier.HOST], host)
    assert np.array_equal(pools[Tier.DEVICE], device)
    pools[Tier.DEVICE][:] = 0
    read(agent, "me", slots[::-1], list(range(40)), Tier.HOST, Tier.DEVICE)
    assert np.array_equal(pools[Tier.DEVICE], device[::-1])
    assert np.array_equal(pools[Tier.HOST], host)


def test_moves_within_run_beside_reads_from_peers(make: AgentMaker) -> None:
    agent, pools = tiered(make, "me", seed=1)
    producer, sources = tiered(make, "producer", seed=11)
    agent.connect("p", 1, COUNTS[Tier.DEVICE], producer.metadata())
    before = pools[Tier.DEVICE].copy()
    handles = [
        begin(agent, "me", [i], [i], src_tier=Tier.DEVICE, dst_tier=Tier.HOST) for i in range(8)
    ]
    handles += [
        begin(agent, "p", [i], [i], src_tier=Tier.HOST, dst_tier=Tier.HOST) for i in range(8, 16)
    ]
    for handle in reversed(handles):
        settle(agent, handle)
    assert np.array_equal(pools[Tier.HOST][:8], before[:8])
    assert np.array_equal(pools[Tier.HOST][8:16], sources[Tier.HOST][8:16])


def test_memory_that_is_not_there_is_named(make: AgentMaker) -> None:
    plain, _ = make("plain", size=SIZE)
    agent, _ = tiered(make, "me", seed=1)
    agent.connect("p", 1, 64, plain.metadata())
    plain.connect("q", 1, COUNTS[Tier.DEVICE], agent.metadata())
    assert "no host memory" in fails(agent, "p", [0], [0], src_tier=Tier.HOST)
    assert "plain has no host memory" in fails(plain, "q", [0], [0], dst_tier=Tier.HOST)
    assert "no host memory" in fails(plain, "plain", [0], [0], dst_tier=Tier.HOST)
    assert "no disk memory" in fails(agent, "p", [0], [0], src_tier=Tier.DISK)
    assert "not within device memory" in fails(agent, "me", [0], [1])


@pytest.mark.parametrize(
    ("tiers", "src", "dst", "what"),
    [
        ((Tier.HOST, Tier.DEVICE), 90, 0, "source block 90 is outside [0, 90)"),
        ((Tier.HOST, Tier.DEVICE), 89, 40, "destination block 40 is outside [0, 40)"),
        ((Tier.DEVICE, Tier.HOST), 40, 0, "source block 40 is outside [0, 40)"),
        ((Tier.DEVICE, Tier.HOST), 0, 90, "destination block 90 is outside [0, 90)"),
    ],
)
def test_blocks_are_checked_against_the_memory_that_they_are_in(
    make: AgentMaker, tiers: tuple[Tier, Tier], src: int, dst: int, what: str
) -> None:
    agent, pools = tiered(make, "me", seed=1)
    before = {tier: pool.copy() for tier, pool in pools.items()}
    assert what in fails(agent, "me", [src], [dst], src_tier=tiers[0], dst_tier=tiers[1])
    assert all(np.array_equal(pools[tier], before[tier]) for tier in MEMORY)


def test_host_memory_of_another_process_is_read_after_its_device_memory() -> None:
    with agent_maker() as make, peer_process(20, SIZE, seed=5, num_host_blocks=50) as peer:
        agent, pools = tiered(make, "me", seed=1)
        agent.connect("p", 1, 20, peer[1])
        read(agent, "p", [3, 19], [0, 1])
        read(agent, "p", [49, 3], [2, 3], src_tier=Tier.HOST)
        read(agent, "p", [48], [89], src_tier=Tier.HOST, dst_tier=Tier.HOST)
        device, host = content(20, SIZE, seed=5), content(50, SIZE, seed=6)
        assert np.array_equal(pools[Tier.DEVICE][:4], [device[3], device[19], host[49], host[3]])
        assert np.array_equal(pools[Tier.HOST][89], host[48])


class TestHostArena:
    def test_memory_is_committed_when_it_comes_into_use(self) -> None:
        def resident_bytes() -> int:
            with open("/proc/self/statm", encoding="ascii") as statm:
                return int(statm.read().split()[1]) * 4096

        num_bytes = 512 << 20
        with agent_maker() as make:
            before = resident_bytes()
            arena = make_host_arena(num_bytes // (1 << 20), 1 << 20, pinned=False)
            make.over("me", np.zeros((2, 1 << 20), np.uint8), host=arena)
            assert resident_bytes() - before < num_bytes // 4
            read(make.agents[0], "me", [1], [300], Tier.DEVICE, Tier.HOST)
            assert not arena[300].any()
            assert resident_bytes() - before < num_bytes // 4

    def test_more_than_there_is_is_an_error_that_says_how_much(self) -> None:
        with pytest.raises(AgentError, match=r"no 1048576\.0 GiB of host memory"):
            make_host_arena(1 << 30, 1 << 20, pinned=False)

    def test_what_cannot_be_page_locked_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Cuda:
            def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
                return 2  # out of memory

        monkeypatch.setattr("torch.cuda.cudart", Cuda)
        with pytest.raises(AgentError, match="cannot page-lock"):
            make_host_arena(4, 4096, pinned=True)

    def test_a_page_locked_arena_is_unlocked_when_it_is_freed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        locked: dict[int, int] = {}

        class Cuda:
            def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
                locked[address] = num_bytes
                return 0

            def cudaHostUnregister(self, address: int) -> None:
                del locked[address]

        monkeypatch.setattr("torch.cuda.cudart", Cuda)
        arena = make_host_arena(4, 4096, pinned=True)
        view = arena[1:].view(np.uint16)
        assert locked == {arena.ctypes.data: 4 * 4096}
        del arena
        assert locked, "a view keeps it"
        del view
        assert not locked
