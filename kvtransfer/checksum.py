"""Checksums of KV blocks in host memory: computed by the producer after it wrote them, and by the
consumer after it read them, before they are used.

XXH3 (64 bits) finds accidents of transport, not attacks: peers are authenticated.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest


def checksum_blocks(pool_bytes: NDArray[np.uint8], block_ids: Iterable[int]) -> list[int]:
    """One unsigned 64-bit number per block, in order.

    `pool_bytes` is `[num_blocks, bytes_per_block]`, contiguous; nothing is copied, and the GIL is
    released while a block is hashed. IndexError for a block outside the pool.
    """
    assert pool_bytes.ndim == 2, pool_bytes.shape
    assert pool_bytes.flags.c_contiguous, "pool is not contiguous"
    return [xxh3_64_intdigest(pool_bytes[block_id]) for block_id in block_ids]
