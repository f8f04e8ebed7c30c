from __future__ import annotations

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from kvrelay.engine.kv.spec import DTYPE_BYTES, KVSpec
from kvrelay.engine.native import NativeBuildError
from kvrelay.kvtransfer import checksum
from kvrelay.kvtransfer.checksum import MOD, checksum_blocks, head_weights
from kvrelay.kvtransfer.layout import BlockLayout, HeadShare
from kvrelay.kvtransfer.movers.pool import DeviceBytes, pool_bytes


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


@pytest.mark.parametrize("size", [*range(240, 322), 1024, 1025, 1088, 2112, 4095, 18_432])
def test_the_c_code_computes_xxh3(size: int) -> None:
    block = np.random.default_rng(size).integers(0, 256, (1, size), dtype=np.uint8)
    block[0, : size // 3] = 255  # carries of every sum
    assert checksum_blocks(block, [0]) == [xxh3_64_intdigest(block[0].data)]


def content(share: HeadShare) -> np.ndarray:
    random = np.random.default_rng(share.bytes_per_head)
    return random.integers(0, 256, (3, share.bytes_per_block), dtype=np.uint8)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_the_sums_of_ranks_are_that_of_the_whole_block(dtype: str) -> None:
    for head_dim, num_planes in ((8, 2), (64, 2), (72, 1)):
        layout = BlockLayout(KVSpec(3, 4, head_dim, 16, dtype, num_planes))
        whole = layout.share(0, 1)
        pool = content(whole)
        wanted = checksum_blocks(pool, [2, 0], whole)
        for size in (2, 4):
            parts = []
            for share in (layout.share(rank, size) for rank in range(size)):
                by_head = pool.reshape(3, whole.num_planes, 4, -1)
                own = by_head[:, :, share.heads.start : share.heads.stop]
                own = np.ascontiguousarray(own).reshape(3, -1)
                parts.append(checksum_blocks(own, [2, 0], share))
            assert [sum(each) % MOD for each in zip(*parts, strict=True)] == wanted


def test_heads_that_are_swapped_are_noticed() -> None:
    share = HeadShare(0, 1, 4, 2, 256)
    pool = content(share)
    before = checksum_blocks(pool, [0], share)
    pool[0] = pool[0].reshape(8, -1)[[0, 5, 2, 3, 4, 1, 6, 7]].reshape(-1)
    assert checksum_blocks(pool, [0], share) != before


@pytest.mark.parametrize("per_head", [128, 2112])
def test_without_a_compiler_they_are_the_same(
    per_head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = HeadShare(1, 2, 6, 4, per_head)
    pool = content(share)
    heads = zip(pool[1].reshape(12, -1), head_weights(share).tolist(), strict=True)
    wanted = [sum(xxh3_64_intdigest(head.data) * weight for head, weight in heads) % MOD]
    assert checksum_blocks(pool, [1], share) == wanted

    def unavailable(*_args: object, **_options: object) -> None:
        raise NativeBuildError("no compiler")

    monkeypatch.setattr(checksum, "load", unavailable)
    checksum.load_native.cache_clear()
    try:
        assert checksum_blocks(pool, [1], share) == wanted
        assert checksum.load_native() is None
    finally:
        checksum.load_native.cache_clear()
