"""A worker's KV pool as bytes, and the check of block ids that came from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.node import NodeId
from kvtransfer.agent import AgentError
from kvtransfer.checksum import BlockBytes


def pool_bytes(pool: Any) -> NDArray[np.uint8]:
    """`[num_blocks, bytes_per_block]`, a view of a contiguous numpy array or CPU tensor
    `[num_blocks, ...]`; writes go through."""
    if isinstance(pool, np.ndarray):
        assert pool.flags.c_contiguous, "pool is not contiguous"
        return pool.reshape(len(pool), -1).view(np.uint8)
    import torch  # not needed where pools are numpy arrays, and slow to import

    assert pool.device.type == "cpu", pool.device
    assert pool.is_contiguous(), "pool is not contiguous"
    return pool.flatten(1).view(torch.uint8).numpy()


class DeviceBytes:
    """The bytes of a pool that the CPU cannot see: a block is copied out where it is asked for.

    The copy is ordered after what was launched on the pool's stream before, so a block whose
    checksum is known is complete."""

    def __init__(self, pool: Any) -> None:
        assert pool.is_contiguous(), "pool is not contiguous"
        import torch

        self._blocks = pool.flatten(1).view(torch.uint8)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._blocks.shape)

    def __getitem__(self, block_id: int, /) -> NDArray[np.uint8]:
        block: NDArray[np.uint8] = self._blocks[block_id].cpu().numpy()
        return block


def block_bytes(pool: Any) -> BlockBytes:
    """`pool_bytes` where the CPU can see the pool, `DeviceBytes` where it cannot."""
    device = getattr(pool, "device", None)
    on_cpu = isinstance(pool, np.ndarray) or device is None or device.type == "cpu"
    return pool_bytes(pool) if on_cpu else DeviceBytes(pool)


def check_block_ids(
    peer: NodeId, src: Sequence[int], dst: Sequence[int], num_src: int, num_dst: int
) -> None:
    """Raises AgentError unless the two lists name blocks of pools of these sizes, one for one."""
    if len(src) != len(dst) or not src:
        raise AgentError(f"read from {peer}: {len(src)} source and {len(dst)} destination blocks")
    for side, ids, limit in (("source", src, num_src), ("destination", dst, num_dst)):
        if min(ids) < 0 or max(ids) >= limit:
            wrong = next(i for i in ids if not 0 <= i < limit)
            raise AgentError(f"read from {peer}: {side} block {wrong} is outside [0, {limit})")
