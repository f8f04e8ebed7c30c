"""Checksums of KV blocks: computed by the producer after it wrote them, and by the
consumer after it read them, before they are used.

XXH3 (64 bits) finds accidents of transport, not attacks: peers are authenticated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from xxhash import xxh3_64_intdigest


class BlockBytes(Protocol):
    """A pool, block by block: a contiguous `[num_blocks, bytes_per_block]` array of bytes in host
    memory is one; `kvtransfer.agents.pool.DeviceBytes` is one over a GPU's."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, block_id: int, /) -> Any: ...  # of uint8, `[bytes_per_block]`


def checksum_blocks(pool_bytes: BlockBytes, block_ids: Iterable[int]) -> list[int]:
    """One unsigned 64-bit number per block, in order.

    Of host memory nothing is copied, and the GIL is released while a block is hashed. IndexError
    for a block outside the pool.
    """
    assert len(pool_bytes.shape) == 2, pool_bytes.shape
    if isinstance(pool_bytes, np.ndarray):
        assert pool_bytes.flags.c_contiguous, "pool is not contiguous"
    return [xxh3_64_intdigest(pool_bytes[block_id]) for block_id in block_ids]
