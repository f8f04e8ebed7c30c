"""Checksums by the GPU's kernels are those of the CPU, byte for byte."""

from __future__ import annotations

import pytest
import torch

from kvrelay.kvtransfer.checksum import checksum_blocks, head_weights
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.movers.pool import DeviceBytes, pool_bytes
from tests.engine.model.paged import DEVICE

from kvrelay.kvtransfer.movers.checksum_kernels import Checksums, fits  # isort: skip

WHOLE = head_weights(None)
KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_bytes", [256, 264, 320, 1024, 1032, 1040, 2048, 2064, 8128, 9232, 40_960]
)
def test_blocks_of_any_size(num_bytes: int) -> None:
    """Less than a chunk, one that is full, and many with a part behind."""
    torch.manual_seed(num_bytes)
    blocks = torch.randint(0, 256, (6, num_bytes), dtype=torch.uint8)
    wanted = checksum_blocks(blocks.numpy(), [4, 0, 5, 4])
    assert Checksums(blocks.to(DEVICE), WHOLE).of([4, 0, 5, 4]) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_pools_of_every_type(kind: torch.dtype) -> None:
    """The last as FP8, whose scales are behind the numbers."""
    torch.manual_seed(1)
    shape = (5, 3, 2, 2, 16 * 65) if kind is torch.uint8 else (5, 3, 2, 2, 16, 64)
    pool = (torch.randn(shape) * 50).to(kind)
    blocks, per_head = pool.flatten(1).view(torch.uint8), pool[0, 0, 0, 0].nbytes
    for share in (HeadShare(0, 1, 2, 6, per_head), HeadShare(1, 2, 4, 6, per_head)):
        found = Checksums(blocks.to(DEVICE), head_weights(share)).of([4, 0, 2])
        assert found == checksum_blocks(pool_bytes(pool), [4, 0, 2], share)


def test_bytes_of_all_ones_and_none() -> None:
    """Carries of every sum and product."""
    blocks = torch.tensor([[0], [255]], dtype=torch.uint8).expand(2, 4096).contiguous()
    assert Checksums(blocks.to(DEVICE), WHOLE).of([0, 1]) == checksum_blocks(blocks.numpy(), [0, 1])


def test_a_changed_bit_changes_the_checksum() -> None:
    blocks = torch.zeros(33, 2112, dtype=torch.uint8)
    for index in range(1, 33):
        blocks[index, 66 * index - 1] = 1 << index % 8
    assert len(set(Checksums(blocks.to(DEVICE), WHOLE).of(range(33)))) == 33


def test_sizes_that_do_not_fit_and_blocks_outside_the_pool() -> None:
    assert not any(map(fits, (64, 192, 1004, 2050)))
    sums = Checksums(torch.zeros(4, 256, dtype=torch.uint8, device=DEVICE), WHOLE)
    assert sums.of([]) == []
    for wrong in ([4], [0, -1]):
        with pytest.raises(IndexError):
            sums.of(wrong)


def test_a_pool_on_a_gpu_asks_the_kernels() -> None:
    """Where there is none, its blocks are copied out."""
    pool = torch.randn(4, 2, 2, 2, 16, 32)
    for share in (None, HeadShare(0, 1, 2, 4, 4 * 16 * 32)):
        blocks = DeviceBytes(pool.to(DEVICE), share)
        assert (blocks._kernels is not None) == (DEVICE.type == "cuda")
        assert checksum_blocks(blocks, [3, 0]) == checksum_blocks(pool_bytes(pool), [3, 0], share)
