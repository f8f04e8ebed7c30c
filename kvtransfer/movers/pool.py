"""A worker's KV memory as bytes, and the check of what is to be copied."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import PROBE_BYTES, AgentError, CopyBlocks
from kvrelay.kvtransfer.checksum import BlockBytes, checksum_blocks, head_weights
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.movers.metadata import Space

WRITTEN_AT_ONCE = 32  # blocks that are copied to a GPU; a stack of them is on both sides
CUDA_HOST_REGISTER_PORTABLE = 1  # page-locked for every CUDA context


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


def as_tensor(block: NDArray[np.uint8]) -> Any:
    """A view of its bytes; writes go through."""
    import torch

    return torch.from_numpy(block)


class DeviceBytes:
    """The bytes of a pool that the CPU cannot see: a block is copied out where it is asked for, but
    checksums are computed there, many at once, without waiting for the model's passes. What is
    written to a block has to be complete."""

    def __init__(self, pool: Any, share: HeadShare | None = None) -> None:
        """`share`: the heads that blocks hold, as for `checksum_blocks`."""
        assert pool.is_contiguous(), "pool is not contiguous"
        import torch

        self._blocks = pool.flatten(1).view(torch.uint8)
        self._share = share
        self._kernels = _checksum_kernels(self._blocks, share)

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        if self._kernels is not None:
            found: list[int] = self._kernels.of(block_ids)
            return found
        copied = self._blocks[list(block_ids)].cpu().numpy()
        return checksum_blocks(copied, range(len(copied)), self._share)

    def begin_checksums(self, block_ids: Sequence[int]) -> Callable[[], list[int]]:
        """As `checksum_blocks`, of blocks that are complete once what the thread's current stream
        has to do by now is done; the call that is returned waits for that."""
        if self._kernels is None:
            return partial(self.checksums, block_ids)
        begun: Callable[[], list[int]] = self._kernels.begin(block_ids)
        return begun

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._blocks.shape)

    def __getitem__(self, block_id: int, /) -> NDArray[np.uint8]:
        block: NDArray[np.uint8] = self._blocks[block_id].cpu().numpy()
        return block


def _checksum_kernels(blocks: Any, share: HeadShare | None) -> Any:
    """None where they cannot be used."""
    if not blocks.is_cuda:
        return None
    try:
        from kvrelay.kvtransfer.movers.checksum_kernels import Checksums, fits
    except ImportError:  # without Triton
        return None
    weights = head_weights(share)
    return Checksums(blocks, weights) if fits(blocks.shape[1] // len(weights)) else None


def is_on_gpu(pool: Any) -> bool:
    device = getattr(pool, "device", None)  # numpy's arrays have one, a string, since 2.0
    return getattr(device, "type", "cpu") != "cpu"


def block_bytes(pool: Any, share: HeadShare | None = None) -> BlockBytes:
    """`pool_bytes` where the CPU can see the pool, `DeviceBytes` where it cannot."""
    return DeviceBytes(pool, share) if is_on_gpu(pool) else pool_bytes(pool)


def write_blocks(
    pool: Any, blocks: Sequence[int], found: Sequence[NDArray[np.uint8]] | NDArray[np.uint8]
) -> None:
    """Copies the bytes of each block into a pool on the CPU or a GPU, and waits for it."""
    if not is_on_gpu(pool):
        target = pool_bytes(pool)
        for block_id, block in zip(blocks, found, strict=True):
            target[block_id] = block
        return
    import torch

    memory = pool.flatten(1).view(torch.uint8)
    for at in range(0, len(blocks), WRITTEN_AT_ONCE):
        some = slice(at, at + WRITTEN_AT_ONCE)
        stack = np.stack([*found[some]])
        memory[list(blocks[some])] = torch.from_numpy(stack).to(memory.device)
    torch.cuda.current_stream(memory.device).synchronize()


def space_of(pool: Any) -> tuple[Space, int]:
    """Where `[num_blocks, ...]` lies, contiguous, on the CPU or a GPU; and the bytes per block."""
    if is_on_gpu(pool):
        assert pool.is_contiguous(), "pool is not contiguous"
        size = pool.numel() * pool.element_size() // len(pool)
        return Space(len(pool), pool.data_ptr(), "VRAM", pool.get_device()), size
    view = pool_bytes(pool)
    return Space(len(view), view.ctypes.data), view.shape[1]


def make_scratch(pool: Any, bytes_per_block: int) -> Any:
    """Memory that reads are timed into, beside `pool` and on its device: `[num_blocks,
    bytes_per_block]`. None if a GPU has none left."""
    num_blocks = min(len(pool), max(1, PROBE_BYTES // bytes_per_block))
    if not is_on_gpu(pool):
        return np.ones((num_blocks, bytes_per_block), np.uint8)  # written: the memory is there
    import torch

    try:
        return torch.empty((num_blocks, bytes_per_block), dtype=torch.uint8, device=pool.device)
    except torch.OutOfMemoryError:
        return None


def probe_blocks(num_bytes: int, bytes_per_block: int, *limits: int) -> list[int]:
    """Which blocks to read for `num_bytes`: one at least, and no more than any of `limits`."""
    return list(range(min(max(1, num_bytes // bytes_per_block), *limits)))


def make_host_arena(num_blocks: int, bytes_per_block: int, pinned: bool) -> NDArray[np.uint8]:
    """Host memory for `num_blocks`, `[num_blocks, bytes_per_block]`.

    It is not touched here, so that memory is committed as it comes into use; unless `pinned`, which
    page-locks all of it, for copies to and from a GPU. Raises AgentError."""
    try:
        arena = np.empty((num_blocks, bytes_per_block), np.uint8)
    except MemoryError as error:
        raise AgentError(
            f"no {num_blocks * bytes_per_block / 2**30:.1f} GiB of host memory for KV blocks;"
            " lower the size of the host tier"
        ) from error
    if pinned:
        pin(arena)
    return arena


def pin(arena: NDArray[np.uint8]) -> None:
    """Page-lock `arena` until it is freed. (torch's own pinned allocations are rounded up to a
    power of two.) Raises AgentError."""
    import torch

    cuda = torch.cuda.cudart()
    code = cuda.cudaHostRegister(arena.ctypes.data, arena.nbytes, CUDA_HOST_REGISTER_PORTABLE)
    if int(code) != 0:
        raise AgentError(
            f"cannot page-lock {arena.nbytes / 2**30:.1f} GiB of host memory: CUDA error {code};"
            " lower the size of the host tier, or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(arena, cuda.cudaHostUnregister, arena.ctypes.data)


def check_block_ids(request: CopyBlocks, num_src: int, num_dst: int) -> None:
    """Raises AgentError unless it names blocks of pools of these sizes, one for one."""
    src, dst, text = request.src, request.dst, f"read from {request.peer}"
    if len(src) != len(dst) or not src:
        raise AgentError(f"{text}: {len(src)} source and {len(dst)} destination blocks")
    for side, ids, limit in (("source", src, num_src), ("destination", dst, num_dst)):
        if min(ids) < 0 or max(ids) >= limit:
            wrong = next(i for i in ids if not 0 <= i < limit)
            raise AgentError(f"{text}: {side} block {wrong} is outside [0, {limit})")


class Sides(NamedTuple):
    """A copy between memory and storage, as storage sees it."""

    reads: bool  # the storage
    tier: Tier  # which memory it is
    blocks: tuple[int, ...]  # there
    slots: tuple[int, ...]  # in the storage


def sides_of(
    request: CopyBlocks, storage: Tier, memory: Mapping[Tier, Sized], num_slots: int = sys.maxsize
) -> Sides:
    """Raises AgentError unless it is between slots of `storage` and blocks of one of `memory`.
    `num_slots`: that there are; storage that has keys has none."""
    reads = request.src_tier is storage
    sides = Sides(reads, request.src_tier, request.src, request.dst)
    if reads:
        sides = Sides(reads, request.dst_tier, request.dst, request.src)
    if sides.tier not in memory:
        raise AgentError(f"{request.text}: no {sides.tier} memory is reached")
    sizes = num_slots, len(memory[sides.tier])
    check_block_ids(request, *(sizes if reads else sizes[::-1]))
    return sides
