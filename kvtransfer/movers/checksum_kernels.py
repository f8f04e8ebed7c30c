"""Checksums of KV blocks on a GPU: XXH3 of 64 bits, the same numbers that the CPU computes.

XXH3 (Yann Collet, https://github.com/Cyan4973/xxHash) adds up products of stripes of 64 bytes, and
mixes the sums after each chunk of 16 stripes. The sums of all chunks are computed at once, then a
program for each head of a block mixes them in their order. So what is read twice is a sixteenth.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl

from kvrelay.engine.model.gpu.staging import to_device

STRIPE, STRIPES = 64, 16  # bytes; stripes of a chunk
CHUNK = STRIPE * STRIPES
LEAST = 256  # bytes; XXH3 computes shorter inputs otherwise
CHUNKS = 8  # a program does so many
_LANES = tl.constexpr(8)  # 64-bit numbers of a stripe
_PRIME32_1 = tl.constexpr(0x9E3779B1)
_PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
_AVALANCHE = tl.constexpr(0x165667919E3779F9)
_START = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07d"
    "ccff7221b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e"
    "3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac83"
    "34d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce"
    "45cb3a8f95160428afd7fbcabb4b407e"
)
_KEYS = 192  # bytes of the secret that are used


def fits(bytes_per_head: int) -> bool:
    """Whether heads of this size can be computed here."""
    return bytes_per_head >= LEAST and bytes_per_head % 8 == 0


class Checksums:
    """Computes those of one pool's blocks. May be used from several threads, each of which has a
    stream of its own here, so that it does not wait for the passes of the model."""

    def __init__(self, blocks: torch.Tensor, weights: np.ndarray) -> None:
        """blocks: [num_blocks, bytes_per_block] uint8, contiguous; weights: [heads of a block], as
        `kvtransfer.checksum.head_weights`. `fits` the size of a head."""
        self._num_blocks = len(blocks)
        self._words = blocks.view(len(blocks) * len(weights), -1).view(torch.int64)
        self._weights = torch.from_numpy(weights.view(np.int64)).to(blocks.device)
        self._threads = threading.local()
        offsets = [*range(0, _KEYS - STRIPE + 1, 8)]  # a stripe's, then the one for mixing
        keys = [_numbers(offset, 8) for offset in offsets]
        keys += [_numbers(_KEYS - STRIPE - 7, 8), _numbers(11, 8), np.array(_START, np.uint64)]
        # Waited for: the streams that read them are others than the one that copies.
        self._keys = torch.from_numpy(np.stack(keys).view(np.int64)).to(blocks.device)
        if blocks.is_cuda:
            self.of([0])  # compiles the kernels, which no step should wait for

    def of(self, block_ids: Sequence[int]) -> list[int]:
        """One unsigned number of 64 bits for each, in order. What is written to the blocks has to
        be complete. IndexError for a block outside the pool."""
        with self._stream():
            return _unsigned(self._sums(block_ids).cpu())

    def begin(self, block_ids: Sequence[int]) -> Callable[[], list[int]]:
        """As `of`, once what the thread's current stream has to do by now is done. The host does
        not wait for that; the call that is returned does, and may come from another thread."""
        if self._words.device.type != "cuda":
            return partial(_unsigned, self._sums(block_ids))
        passes, ended = torch.cuda.current_stream(self._words.device), torch.cuda.Event()
        with self._stream():
            torch.cuda.current_stream().wait_stream(passes)
            sums = self._sums(block_ids)
            host = torch.empty(len(sums), dtype=torch.int64, pin_memory=True)
            host.copy_(sums, non_blocking=True)
            ended.record()

        def result() -> list[int]:
            ended.synchronize()
            return _unsigned(host)

        return result

    def _stream(self) -> AbstractContextManager[object]:
        device = self._words.device
        if device.type != "cuda":
            return nullcontext()
        if not hasattr(self._threads, "stream"):
            self._threads.stream = torch.cuda.Stream(device)
        stream: AbstractContextManager[object] = torch.cuda.stream(self._threads.stream)
        return stream

    def _sums(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Launches the sums of the blocks. [num_blocks] int64"""
        if not block_ids:
            return torch.empty(0, dtype=torch.int64)
        num_blocks = self._num_blocks
        if min(block_ids) < 0 or max(block_ids) >= num_blocks:
            raise IndexError(f"blocks {min(block_ids)} to {max(block_ids)} of {num_blocks}")
        terms = self._launch(block_ids).view(len(block_ids), -1) * self._weights
        return terms.sum(1)

    def _launch(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Launches the terms of their heads. [num_blocks, num_heads] int64"""
        width, device = self._words.shape[1], self._words.device
        size, num_heads = 8 * width, len(self._weights)
        rows = np.array(block_ids, np.int64)[:, None] * num_heads + np.arange(num_heads)
        ids = to_device(rows.reshape(-1), device)
        num_chunks = (size - 1) // CHUNK  # before the last, which may be full too
        sums = torch.empty(len(ids), max(1, num_chunks), 8, dtype=torch.int64, device=device)
        out = torch.empty(len(ids), dtype=torch.int64, device=device)
        if num_chunks:
            grid = (len(ids), triton.cdiv(num_chunks, CHUNKS))
            _sum_chunks[grid](
                self._words, ids, self._keys, sums, width, num_chunks,
                CHUNKS=CHUNKS, STRIPES=STRIPES, num_warps=4,
            )  # fmt: skip
        _mix[(len(ids),)](
            self._words, ids, self._keys, sums, out, width, num_chunks, size,
            STRIPES=STRIPES, num_warps=1,
        )  # fmt: skip
        return out


def _unsigned(sums: torch.Tensor) -> list[int]:
    found: list[int] = sums.numpy().view(np.uint64).tolist()
    return found


def _numbers(offset: int, count: int) -> np.ndarray:
    """Reads the secret from a byte on."""
    return np.frombuffer(_SECRET, np.uint64, count, offset)


@triton.jit
def _products(words, keys):
    mixed = words ^ keys
    return (mixed & 0xFFFFFFFF) * (mixed >> 32)


@triton.jit
def _load(pointer):
    return tl.load(pointer).to(tl.uint64, bitcast=True)


@triton.jit
def _load_if(pointer, mask):
    return tl.load(pointer, mask=mask, other=0).to(tl.uint64, bitcast=True)


@triton.jit
def _sum_chunks(
    words, ids, keys, sums, width, num_chunks, CHUNKS: tl.constexpr, STRIPES: tl.constexpr
):
    """What each chunk adds: sums [num_heads, num_chunks, 8]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.load(ids + row)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    lane, stripe = tl.arange(0, _LANES), tl.arange(0, STRIPES)
    inside = chunk < num_chunks
    at = words + head * width + chunk[:, None, None] * (STRIPES * _LANES)
    at += (stripe[:, None] * _LANES)[None]
    mask = inside[:, None, None]
    own = _load_if(at + lane[None, None, :], mask)
    other = _load_if(at + (lane ^ 1)[None, None, :], mask)
    key = _load(keys + stripe[:, None] * _LANES + lane[None, :])
    added = tl.sum(_products(own, key[None]) + other, axis=1)
    to = sums + (row * num_chunks + chunk[:, None]) * _LANES + lane[None, :]
    tl.store(to, added.to(tl.int64, bitcast=True), mask=inside[:, None])


@triton.jit(do_not_specialize=["num_chunks"])  # which has no methods where it is a constant, 1
def _mix(words, ids, keys, sums, out, width, num_chunks, size, STRIPES: tl.constexpr):
    """From the sums of the chunks to the hash of a head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.load(ids + row)
    lane, stripe = tl.arange(0, _LANES), tl.arange(0, STRIPES)
    mixer = _load(keys + STRIPES * _LANES + lane)
    state = _load(keys + (STRIPES + 3) * _LANES + lane)
    for chunk in range(num_chunks):
        state += _load(sums + (row * num_chunks + chunk) * _LANES + lane)
        state = (state ^ (state >> 47) ^ mixer) * _PRIME32_1
    # The last chunk, but for its last stripe, which has a key of its own.
    first = words + head * width + num_chunks.to(tl.int64) * (STRIPES * _LANES)
    left = (size - 1 - num_chunks * (STRIPES * 64)) // 64
    mask = (stripe < left)[:, None]
    own = _load_if(first + stripe[:, None] * _LANES + lane[None, :], mask)
    other = _load_if(first + stripe[:, None] * _LANES + (lane ^ 1)[None, :], mask)
    key = _load_if(keys + stripe[:, None] * _LANES + lane[None, :], mask)
    state += tl.sum(tl.where(mask, _products(own, key) + other, 0), axis=0)
    last = words + (head + 1) * width - _LANES
    state += _products(_load(last + lane), _load(keys + (STRIPES + 1) * _LANES + lane))
    state += _load(last + (lane ^ 1))
    low, high = tl.split(tl.reshape(state ^ _load(keys + (STRIPES + 2) * _LANES + lane), (4, 2)))
    folded = (low * high) ^ tl.umulhi(low, high)
    found = size.to(tl.uint64) * _PRIME64_1 + tl.sum(folded, axis=0)
    found = (found ^ (found >> 37)) * _AVALANCHE
    found ^= found >> 32
    tl.store(out + row, found.to(tl.int64, bitcast=True))
