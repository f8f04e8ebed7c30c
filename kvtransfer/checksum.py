"""Checksums of KV blocks, which do not depend on how a block's heads are divided among ranks.

Taken by the producer after it wrote a block, and by the consumer after it read it, before it is
used. A block's is the sum, mod 2^64, over its heads (those of each plane) of XXH3-64 of the head's
bytes times an odd weight that says which head it is. So the ranks of a worker add up what each
found in its heads. It finds accidents of transport, not attacks; peers authenticate.

Computed in C (`c/checksum.c`); heads of few bytes, and all without a C compiler, by xxhash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvrelay.engine.native import NativeBuildError, declarations, load
from kvrelay.kvtransfer.layout import HeadShare

SOURCE = Path(__file__).parent / "c" / "checksum.c"
LEAST_HEAD_BYTES = 241  # in C; XXH3 computes shorter inputs otherwise
MOD = 1 << 64


class BlockBytes(Protocol):
    """A pool, block by block: a contiguous `[num_blocks, bytes_per_block]` array of bytes in host
    memory is one; `kvtransfer.movers.pool.DeviceBytes` is one over a GPU's."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, block_id: int, /) -> Any: ...  # `[bytes_per_block]` uint8


@runtime_checkable
class HashedThere(Protocol):
    """A pool that computes checksums where its blocks are, by what it knows of its heads."""

    def checksums(self, block_ids: Sequence[int], /) -> list[int]: ...

    def begin_checksums(self, block_ids: Sequence[int], /) -> Callable[[], list[int]]: ...


def checksum_blocks(
    pool_bytes: BlockBytes, block_ids: Sequence[int], share: HeadShare | None = None
) -> list[int]:
    """One unsigned 64-bit number per block, in order. `share`: the heads that blocks of the pool
    hold; None: a block is one.

    Of host memory nothing is copied, and the GIL is released while blocks are hashed. IndexError
    for a block outside the pool.
    """
    num_blocks, size = pool_bytes.shape
    if isinstance(pool_bytes, np.ndarray):
        assert pool_bytes.flags.c_contiguous, "pool is not contiguous"
    elif isinstance(pool_bytes, HashedThere):
        return pool_bytes.checksums(block_ids)
    if not len(block_ids):
        return []
    if min(block_ids) < 0 or max(block_ids) >= num_blocks:
        raise IndexError(f"blocks {min(block_ids)} to {max(block_ids)} of {num_blocks}")
    weights = head_weights(share)
    hasher = load_native() if size >= len(weights) * LEAST_HEAD_BYTES else None
    if hasher is None or not isinstance(pool_bytes, np.ndarray):
        return [_checksum(pool_bytes[block_id], weights) for block_id in block_ids]
    ids, sums = np.array(block_ids, np.int64), np.empty(len(block_ids), np.uint64)
    arrays = (weights.ctypes.data, sums.ctypes.data)
    per_head = size // len(weights)
    hasher(pool_bytes.ctypes.data, ids.ctypes.data, len(ids), len(weights), per_head, *arrays)
    found: list[int] = sums.tolist()
    return found


def head_weights(share: HeadShare | None) -> NDArray[np.uint64]:
    """What the sums of a block's heads are multiplied by, in the order of `share`; 0: those that
    are another rank's to tell."""
    if share is None:
        return np.ones(1, np.uint64)
    return _weights(share)


@cache
def _weights(share: HeadShare) -> NDArray[np.uint64]:
    planes = np.arange(share.num_planes, dtype=np.uint64)[:, None] * np.uint64(share.num_heads)
    heads = planes + np.array(share.heads, np.uint64)
    own = [head in share.own_heads for head in share.heads]
    return np.where(own, np.uint64(2) * heads + np.uint64(1), np.uint64(0)).reshape(-1)


def _checksum(block: NDArray[np.uint8], weights: NDArray[np.uint64]) -> int:
    heads = block.reshape(len(weights), -1)
    terms = (xxh3_64_intdigest(h.data) * w for h, w in zip(heads, weights.tolist(), strict=True))
    return int(sum(terms)) % MOD


def begin_checksums(
    pool_bytes: BlockBytes, block_ids: Sequence[int], share: HeadShare | None = None
) -> Callable[[], list[int]]:
    """As `checksum_blocks`, of blocks that the calling thread has launched the writing of. The call
    that is returned waits for both; it may come from another thread."""
    if isinstance(pool_bytes, HashedThere):
        return pool_bytes.begin_checksums(block_ids)
    return partial(checksum_blocks, pool_bytes, block_ids, share)


@cache
def load_native() -> Callable[..., None] | None:
    """`kvr_checksum_blocks` of checksum.c; None: it cannot be compiled here."""
    try:
        header = declarations(SOURCE.with_suffix(".h"))
        hasher: Callable[..., None] = load(
            SOURCE, ("-march=native",), ffi=header
        ).kvr_checksum_blocks
    except NativeBuildError:
        return None
    return hasher
