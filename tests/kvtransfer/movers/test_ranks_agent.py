"""Workers of several ranks read from one another, whatever their sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvrelay.engine.kv.spec import KVSpec
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.model.parallel.shard import Shard
from kvrelay.kvtransfer.agent import AgentError
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.layout import BlockLayout, HeadShare
from kvrelay.kvtransfer.movers.metadata import pack_ranks
from kvrelay.kvtransfer.movers.ranks import RanksAgent, join_ranks, ranks_to_read
from kvrelay.kvtransfer.ranks import add_checksums, first_with_heads
from tests.kvtransfer.movers.agent_kit import AgentMaker, fails, read

NUM_BLOCKS = 6
SIZES = [1, 2, 4]


def layout(num_heads: int, dtype: str = "bfloat16") -> BlockLayout:
    planes = 1 if num_heads == 1 else 2  # one head: a latent, which all ranks have
    return BlockLayout(KVSpec(3, num_heads, 8, 4, dtype, planes))


def cache_of(layout: BlockLayout, seed: int) -> np.ndarray:
    """[num_blocks, planes, heads, bytes of a head]"""
    spec = layout.spec
    shape = (NUM_BLOCKS, spec.num_layers * spec.num_planes, spec.num_kv_heads, spec.bytes_per_head)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


class Ranked:
    """The ranks of a worker, each with its heads of `cache` in a pool of its own."""

    def __init__(
        self, make: AgentMaker, name: str, layout: BlockLayout, size: int, cache: np.ndarray
    ) -> None:
        heads = [Shard(rank, size).kv_heads(layout.spec.num_kv_heads) for rank in range(size)]
        self.shares = [layout.share(rank, size) for rank in range(size)]
        self.pools = [np.ascontiguousarray(cache[:, :, h.start : h.stop]) for h in heads]
        self.agents = [
            RanksAgent(name, make.over(f"{name}-{rank}", pool, pool.copy(), share), share, rank)
            for rank, (pool, share) in enumerate(zip(self.pools, self.shares, strict=True))
        ]
        self.metadata = join_ranks(name, [agent.metadata() for agent in self.agents])

    def checksums(self, blocks: list[int]) -> list[int]:
        counted = first_with_heads(self.shares)
        flat = [pool.reshape(NUM_BLOCKS, -1) for pool in self.pools]
        each = zip(flat, self.shares, counted, strict=True)
        return add_checksums([checksum_blocks(p, blocks, s) for p, s, is_c in each if is_c])


@pytest.mark.slow
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("num_heads", [1, 2, 4])
@pytest.mark.parametrize("dst_size", SIZES)
@pytest.mark.parametrize("src_size", SIZES)
def test_every_head_arrives_where_it_belongs_and_no_other_is_touched(
    make: AgentMaker, src_size: int, dst_size: int, num_heads: int, tier: Tier
) -> None:
    shape = layout(num_heads, "float8_e4m3" if src_size == 2 else "bfloat16")
    cache, before = cache_of(shape, 1), cache_of(shape, 2)
    producer = Ranked(make, "p", shape, src_size, cache)
    reader = Ranked(make, "d", shape, dst_size, before)
    src, dst = [5, 0, 3], [1, 2, 4]
    for agent in reader.agents:
        agent.connect("p", 1, NUM_BLOCKS, producer.metadata)
        read(agent, "p", src, dst, src_tier=tier)
    after = before.copy()
    after[dst] = cache[src]
    for pool, share in zip(reader.pools, reader.shares, strict=True):
        assert np.array_equal(pool, after[:, :, share.heads.start : share.heads.stop])
    assert reader.checksums(dst) == producer.checksums(src)
    assert reader.checksums(dst) == checksum_blocks(
        cache.reshape(NUM_BLOCKS, -1), src, shape.share(0, 1)
    )


def test_readers_with_the_same_heads_spread_over_ranks_that_have_them() -> None:
    shares = [layout(2).share(rank // 2, 2) for rank in range(4)]  # heads 0, 0, 1, 1
    own = [layout(2).share(rank, 2) for rank in range(2)]
    assert [ranks_to_read("p", each, rank, shares) for rank, each in enumerate(own)] == [[0], [3]]
    assert ranks_to_read("p", layout(2).share(0, 1), 0, shares) == [0, 2]
    latent = layout(1).share(0, 1)  # which all ranks have
    read_from = [ranks_to_read("p", latent, reader, [latent] * 4) for reader in range(4)]
    assert read_from == [[0], [1], [2], [3]]


def test_readers_of_states_read_each_part_where_it_is_good() -> None:
    spec = replace(layout(2).spec, windows=(0, 2), num_state_groups=1, num_units=4)
    shares = [[BlockLayout(spec).share(rank, size) for rank in range(size)] for size in (1, 2, 4)]
    one, two, four = shares
    assert [share.own_heads for share in four] == [range(at, at + 1) for at in range(4)]
    assert ranks_to_read("p", one[0], 0, four) == [0, 1, 2, 3]
    assert [ranks_to_read("p", each, rank, four) for rank, each in enumerate(two)] == [
        [0, 1],
        [2, 3],
    ]
    assert [ranks_to_read("p", each, r, four) for r, each in enumerate(four)] == [
        *([0, 1], [0, 1], [2, 3], [2, 3])
    ]
    assert [ranks_to_read("p", each, r, two) for r, each in enumerate(four)] == [[0], [0], [1], [1]]
    block = np.arange(spec.bytes_per_block, dtype=np.uint8).reshape(1, 4, -1)
    blocks = [block[:, s.heads.start : s.heads.stop].copy().reshape(1, -1) for s in four]
    halves = spec.bytes_per_block // 4
    blocks[0][:, halves:] += 1  # a state that it does not compute
    sums = add_checksums([checksum_blocks(b, [0], s) for b, s in zip(blocks, four, strict=True)])
    assert first_with_heads(four) == [True] * 4
    assert sums == checksum_blocks(block.reshape(1, -1), [0], one[0])


def test_a_rank_that_is_lost_fails_the_copy_once_the_others_have_settled(make: AgentMaker) -> None:
    shape = layout(4)
    producer = Ranked(make, "p", shape, 2, cache_of(shape, 1))
    (agent,) = Ranked(make, "d", shape, 1, cache_of(shape, 2)).agents
    agent.connect("p", 1, NUM_BLOCKS, producer.metadata)
    agent._agent.disconnect("p/1")
    assert fails(agent, "p", [0], [0]) == "not connected to p/1"
    agent.disconnect("p")
    assert fails(agent, "p", [0], [0]) == "not connected to p"


def test_what_cannot_be_read_is_told(make: AgentMaker) -> None:
    shape = layout(4)
    producer = Ranked(make, "p", shape, 2, cache_of(shape, 1))
    (agent,) = Ranked(make, "d", shape, 1, cache_of(shape, 2)).agents
    half = producer.agents[0].metadata()
    with pytest.raises(AgentError, match=r"p lacks KV heads \[2, 3\] of 4"):
        agent.connect("p", 1, NUM_BLOCKS, half)
    for wrong in (b"", b"\xc1", pack_ranks([b"rubbish"])):
        with pytest.raises(AgentError, match="agent metadata of p"):
            agent.connect("p", 1, NUM_BLOCKS, wrong)
    with pytest.raises(AgentError, match="does not say which heads its rank 0 has"):
        ranks_to_read("p", shape.share(0, 1), 0, [None])
    with pytest.raises(AgentError, match="does not say"):
        ranks_to_read("p", shape.share(0, 1), 0, [HeadShare(3, 2, 4, 6, 64)])
