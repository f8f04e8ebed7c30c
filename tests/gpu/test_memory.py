"""KV blocks in a GPU's memory, as those who check and move them see them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvrelay.kvtransfer.movers.pool import DeviceBytes, block_bytes, make_host_arena, space_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SHAPE = (7, 3, 2, 2, 16, 64)


@pytest.fixture
def pool():
    torch.manual_seed(0)
    return torch.randn(SHAPE, device="cuda").bfloat16()


def test_the_bytes_of_a_block_are_read_as_they_are(pool):
    view = block_bytes(pool)
    assert isinstance(view, DeviceBytes)
    expected = pool.cpu().flatten(1).view(torch.uint8).numpy()
    assert view.shape == expected.shape
    for block in range(len(pool)):
        assert np.array_equal(view[block], expected[block])
    space, size = space_of(pool)
    assert (space.memory, space.num_blocks, size) == ("VRAM", 7, expected.shape[1])
    assert space.address == pool.data_ptr()


def test_a_host_arena_is_page_locked_and_takes_blocks_without_a_detour(pool):
    _, size = space_of(pool)
    arena = make_host_arena(len(pool), size, pinned=True)
    host = torch.from_numpy(arena)
    assert host.is_pinned()
    blocks = pool.flatten(1).view(torch.uint8)
    host.copy_(blocks, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host, blocks.cpu())
    back = torch.zeros_like(blocks)
    back.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, blocks)


def test_blocks_go_from_one_agent_to_another_between_device_and_host(pool):
    for name in ("nixl_cu13", "nixl_cu12"):
        try:
            __import__(name)
            break
        except ImportError:
            continue
    else:
        pytest.skip("NIXL is not installed")
    from kvrelay.engine.kv.tier import Tier
    from kvrelay.kvtransfer.movers.nixl import NixlAgent
    from tests.kvtransfer.movers.agent_kit import read

    _, size = space_of(pool)
    arena = make_host_arena(len(pool), size, pinned=True)
    target = torch.zeros_like(pool)
    here, there = NixlAgent("here", target, host=arena), NixlAgent("there", pool)
    try:
        # By a thread that has done nothing with CUDA: without a context UCX would take TCP.
        threads = ThreadPoolExecutor(1)
        threads.submit(here.connect, "there", 1, len(pool), there.metadata()).result()

        def move(peer, src, dst, **tiers):
            read(here, peer, src, dst, **tiers)

        move("there", [5, 0, 2], [1, 3, 6])
        assert torch.equal(target[[1, 3, 6]], pool[[5, 0, 2]])
        move("here", [3], [4], src_tier=Tier.DEVICE, dst_tier=Tier.HOST)
        assert np.array_equal(arena[4], block_bytes(pool)[0])
    finally:
        here.close()
        there.close()
