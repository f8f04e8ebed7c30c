"""Peers of other tensor-parallel sizes: each block of each rank holds a share of the heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvrelay.engine.kv.spec import KVSpec
from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import AgentError
from kvrelay.kvtransfer.layout import BlockLayout, HeadShare
from tests.kvtransfer.movers.agent_kit import AgentMaker, read

SPEC = KVSpec(num_layers=3, num_kv_heads=4, head_dim=8, block_size=4, dtype="bfloat16")
LAYOUT = BlockLayout(SPEC)
NUM_BLOCKS = 12
# [num_blocks, num_layers, 2, num_kv_heads, bytes of a head]
SHAPE = (NUM_BLOCKS, 3, 2, 4, 4 * 8 * 2)


def whole_cache(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SHAPE, np.uint8)


def pool_of(cache: np.ndarray, share: HeadShare) -> np.ndarray:
    """The rank's own pool: its heads of each plane of each block."""
    heads = share.heads
    return np.ascontiguousarray(cache[:, :, :, heads.start : heads.stop])


def test_ranks_without_a_common_head_do_not_connect(make: AgentMaker) -> None:
    agents = []
    for rank in range(2):
        share = LAYOUT.share(rank, 2)
        agents.append(make.over(f"r{rank}", pool_of(whole_cache(0), share), share=share))
    with pytest.raises(AgentError, match="p has KV heads 2 to 3, and none of 0 to 1"):
        agents[0].connect("p", 1, NUM_BLOCKS, agents[1].metadata())


@pytest.mark.parametrize(
    ("field", "what"),
    [("num_heads", "KV heads"), ("num_planes", "planes per block"), ("bytes_per_head", "per head")],
)
def test_shares_of_another_model_do_not_connect(make: AgentMaker, field: str, what: str) -> None:
    mine = LAYOUT.share(0, 1)
    theirs = replace(mine, **{field: 2 * getattr(mine, field)})
    reader = make.over("d", pool_of(whole_cache(0), mine), share=mine)
    other = np.zeros((NUM_BLOCKS, theirs.bytes_per_block), np.uint8)
    producer = make.over("p", other, share=theirs)
    with pytest.raises(AgentError, match=f"p differs in .*{what}"):
        reader.connect("p", 1, NUM_BLOCKS, producer.metadata())


def test_moves_within_a_rank_are_of_whole_blocks(make: AgentMaker) -> None:
    share = LAYOUT.share(1, 2)
    pool, host = pool_of(whole_cache(1), share), pool_of(whole_cache(2), share)
    agent = make.over("me", pool, host=host, share=share)
    read(agent, "me", [2, 3], [5, 4], Tier.DEVICE, Tier.HOST)
    assert np.array_equal(host[[5, 4]], pool[[2, 3]])
