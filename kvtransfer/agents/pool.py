"""A worker's KV pool as bytes, and the check of block ids that came from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.node import NodeId
from kvtransfer.agent import AgentError


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
