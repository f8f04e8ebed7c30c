from __future__ import annotations

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from kvtransfer.agents.pool import DeviceBytes, pool_bytes
from kvtransfer.layout import checksum_blocks


@pytest.fixture
def pool() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (8, 1000), dtype=np.uint8)


def test_checksums_are_those_of_the_bytes_in_the_order_asked(pool: np.ndarray) -> None:
    assert checksum_blocks(pool, [5, 0, 5]) == [
        xxh3_64_intdigest(pool[i].tobytes()) for i in (5, 0, 5)
    ]
    assert checksum_blocks(pool, []) == []


@pytest.mark.parametrize("position", [0, 499, 999])
def test_one_flipped_bit_is_noticed_and_only_there(pool: np.ndarray, position: int) -> None:
    before = checksum_blocks(pool, range(8))
    pool[3, position] ^= 1
    after = checksum_blocks(pool, range(8))
    assert [i for i in range(8) if before[i] != after[i]] == [3]


def test_a_block_outside_the_pool_is_an_error(pool: np.ndarray) -> None:
    with pytest.raises(IndexError):
        checksum_blocks(pool, [8])


def test_a_pool_with_gaps_is_refused(pool: np.ndarray) -> None:
    with pytest.raises(AssertionError):
        checksum_blocks(pool[:, :500], [0])


def test_a_pool_beyond_the_cpu_is_read_block_by_block() -> None:
    tensor = torch.randn(6, 2, 2, 3, 4, 5).bfloat16()  # as a GPU's, which has to be copied out
    blocks = DeviceBytes(tensor)
    assert blocks.shape == pool_bytes(tensor).shape
    assert checksum_blocks(blocks, [4, 1]) == checksum_blocks(pool_bytes(tensor), [4, 1])
