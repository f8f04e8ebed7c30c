"""Blocks that are coded on the disk: between it and the worker's memory they are in a staging area,
in as many bytes as they take. Approximate ones may be in fewer: their first byte says
so, as it says how others are coded.

Life of a read, in batches: slots of the staging area are free -> read into them -> decoded into the
worker's memory by threads, while the next batch is read -> the slots are free again. Of a write:
encoded by threads into slots -> written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import GIVEN_UP, AgentError, CopyBlocks, CopyDone
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.codec import MORE_BYTES, Codec
from kvrelay.kvtransfer.kivi import Quantizer
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.movers.disk import DiskMover
from kvrelay.kvtransfer.movers.pool import Sides, is_on_gpu, pool_bytes, sides_of
from kvrelay.kvtransfer.store import DiskStore, slot_bytes

STAGING_BYTES = 48 << 20
MIN_STAGING, MAX_STAGING = 8, 128  # blocks
BATCHES = 6  # that are read at once, in three quarters of the staging area; writes have the rest
MAX_THREADS = 4
WAIT_S = 500e-6
QUANTISED = 0x40  # the first byte of a block in four bits a number; no codec begins with it
TASKS = 1  # for each thread, of a batch: none is long without work when one is slow


def open_coded(
    name: NodeId,
    memory: Mapping[Tier, Any],
    store: DiskStore,
    codec: Codec,
    share: HeadShare | None = None,
    quantizer: Quantizer | None = None,
) -> CodedMover:
    """`memory`: the worker's, `[num_blocks, ...]` each, contiguous; `share`: the heads that blocks
    hold; `quantizer`: of such blocks; None: all are exact. Raises AgentError."""
    size = store.bytes_per_block
    count = min(MAX_STAGING, max(MIN_STAGING, STAGING_BYTES // size))
    staging = np.empty((count, size), np.uint8)
    disk = DiskMover(name, {Tier.HOST: staging}, store)
    return CodedMover(disk, memory, store, codec, staging, share, quantizer)


@dataclass(slots=True, eq=False)
class _Batch:
    """Blocks `first` and following of a copy, one in each of the slots."""

    first: int
    slots: list[int]
    handle: Any = None  # the transfer that reads or writes them; None: there is none
    tasks: list[Future[list[int]]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class CodedCopy:
    request: CopyBlocks
    sides: Sides
    memory: NDArray[np.uint8]
    results: list[int]  # what each takes in the store, if it is written; else its checksum
    read_as: list[int]  # the checksum that each will be read with, if it is written
    begun: int = 0
    done: int = 0
    given_up: bool = False
    batches: list[_Batch] = field(default_factory=list)


class CodedMover:
    """Copies between a worker's memory and its disk, over a DiskMover whose memory is the staging
    area, as host memory, and which it owns. Memory of a GPU is not reached.

    Invariant: a slot of the staging area is free, or of one copy that has not settled. A block that
    cannot be decoded arrives as zeros, which its checksum does not fit."""

    def __init__(
        self,
        disk: DiskMover,
        memory: Mapping[Tier, Any],
        store: DiskStore,
        codec: Codec,
        staging: NDArray[np.uint8],
        share: HeadShare | None,
        quantizer: Quantizer | None = None,
    ) -> None:
        self._disk = disk
        self._memory = {t: pool_bytes(pool) for t, pool in memory.items() if not is_on_gpu(pool)}
        self._store = store
        self._codec = codec
        self._staging = staging
        self._share = share
        self._quantizer = quantizer
        num_writes = max(1, len(staging) // 4)
        self._free = {
            False: list(range(num_writes)),
            True: list(range(num_writes, len(staging))),
        }
        self._most = {False: num_writes, True: max(1, (len(staging) - num_writes) // BATCHES)}
        self._num_threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._num_threads, "kv-codec")

    @property
    def can_reach_device(self) -> bool:
        return Tier.DEVICE in self._memory

    def copy(self, request: CopyBlocks) -> CodedCopy:
        sides = sides_of(request, Tier.DISK, self._memory, self._store.max_blocks)
        read_as, results = list(request.checksums), [0] * len(sides.blocks)
        return CodedCopy(request, sides, self._memory[sides.tier], results, read_as)

    def poll(self, handle: CodedCopy) -> CopyDone | None:
        """What is in the page cache is read at once: so the next batch is begun here, and not when
        the caller comes again, and threads that have all there is to do are waited for."""
        if handle.given_up:
            return self._settle(handle)
        for _ in range(BATCHES):
            before = handle.begun, handle.done
            for batch in list(handle.batches):
                self._advance(handle, batch)
            self._begin(handle)
            if (handle.begun, handle.done) == before:
                break
        reads, results = handle.sides.reads, tuple(handle.results)
        batches = handle.batches if reads else []
        if batches and all(batch.handle is None for batch in batches):
            wait(batches[0].tasks, WAIT_S, FIRST_COMPLETED)
        if handle.done < len(results):
            return None
        request, read_as = handle.request, tuple(handle.read_as)
        done = CopyDone(request.transfer_id, None)
        if reads:
            return replace(done, checksums=results)
        changed = read_as if read_as != request.checksums else ()
        return replace(done, stored_bytes=results, stored_checksums=changed)

    def cancel(self, handle: CodedCopy) -> None:
        handle.given_up = True
        for batch in handle.batches:
            if batch.handle is not None:
                self._disk.cancel(batch.handle)
            for task in batch.tasks:
                task.cancel()

    def _settle(self, copy: CodedCopy) -> CopyDone | None:
        """Slots of a copy that was given up are free again once nothing uses them."""
        for batch in list(copy.batches):
            if batch.handle is not None and self._disk.poll(batch.handle) is not None:
                batch.handle = None
            if batch.handle is None and all(task.done() for task in batch.tasks):
                self._end(copy, batch)
        return None if copy.batches else CopyDone(copy.request.transfer_id, GIVEN_UP)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._disk.close()

    def _begin(self, copy: CodedCopy) -> None:
        """The next batches, as far as slots are free. Raises AgentError."""
        reads, num_blocks = copy.sides.reads, len(copy.sides.blocks)
        free = self._free[reads]
        while free and copy.begun < num_blocks:
            count = min(num_blocks - copy.begun, len(free), self._most[reads])
            batch = _Batch(copy.begun, free[:count])
            del free[:count]
            copy.begun += count
            copy.batches.append(batch)
            if reads:
                stored = [self._size(slot) for slot in self._slots(copy, batch)]
                self._move(copy, batch, stored)
            else:
                self._submit(copy, batch, self._encode)

    def _advance(self, copy: CodedCopy, batch: _Batch) -> None:
        reads = copy.sides.reads
        if batch.handle is not None:
            moved = self._disk.poll(batch.handle)
            if moved is None:
                return
            batch.handle = None
            if moved.error is not None:
                raise AgentError(moved.error)
            if reads:
                self._submit(copy, batch, self._decode)
                return
        elif not all(task.done() for task in batch.tasks):
            return
        elif not reads:
            sizes = self._take_results(copy, batch)
            for slot, size in zip(self._slots(copy, batch), sizes, strict=True):
                self._store.resize(slot, size)
            self._move(copy, batch, sizes)
            return
        if reads:
            self._take_results(copy, batch)
        copy.done += len(batch.slots)
        self._end(copy, batch)

    def _take_results(self, copy: CodedCopy, batch: _Batch) -> list[int]:
        results = [each for task in batch.tasks for each in task.result()]
        batch.tasks = []
        copy.results[batch.first : batch.first + len(results)] = results
        return results

    def _end(self, copy: CodedCopy, batch: _Batch) -> None:
        copy.batches.remove(batch)
        self._free[copy.sides.reads] += batch.slots

    def _slots(self, copy: CodedCopy, batch: _Batch) -> tuple[int, ...]:
        return copy.sides.slots[batch.first : batch.first + len(batch.slots)]

    def _size(self, slot: int) -> int:
        return int(self._store.sizes[slot]) or self._store.slot_bytes

    def _move(self, copy: CodedCopy, batch: _Batch, sizes: Sequence[int]) -> None:
        """Between the staging area and the disk. Raises AgentError."""
        slots, rows = self._slots(copy, batch), tuple(batch.slots)
        if copy.sides.reads:
            part = replace(copy.request, src=slots, dst=rows, dst_tier=Tier.HOST)
        else:
            part = replace(copy.request, src=rows, dst=slots, src_tier=Tier.HOST)
        batch.handle = self._disk.copy(part, [min(s, self._store.bytes_per_block) for s in sizes])

    def _submit(self, copy: CodedCopy, batch: _Batch, work: Any) -> None:
        count = len(batch.slots)
        step = -(-count // (self._num_threads * TASKS))
        batch.tasks = [
            self._threads.submit(work, copy, batch, range(at, min(at + step, count)))
            for at in range(0, count, step)
        ]

    def _encode(self, copy: CodedCopy, batch: _Batch, indices: range) -> list[int]:
        """By a thread: what each takes in the store, in whole pages; as much as a slot has if it
        does not become smaller."""
        size, sizes = self._store.bytes_per_block, []
        coded = np.empty(size + MORE_BYTES, np.uint8)
        for index in indices:
            block, row = copy.memory[copy.sides.blocks[batch.first + index]], batch.slots[index]
            end = self._quantise(copy, batch.first + index, coded)
            end = end or self._codec.encode(block, coded)
            taken = slot_bytes(end)
            if taken < size:
                coded[end:taken] = 0
                self._staging[row, :taken] = coded[:taken]
            else:
                self._staging[row] = block
            sizes.append(taken if taken < size else self._store.slot_bytes)
        return sizes

    def _quantise(self, copy: CodedCopy, index: int, coded: NDArray[np.uint8]) -> int:
        """The bytes that it takes; 0: it stays exact."""
        quantizer, block = self._quantizer, copy.memory[copy.sides.blocks[index]]
        if quantizer is None or copy.sides.slots[index] not in copy.request.approximate:
            return 0
        end = MORE_BYTES + quantizer.num_bytes
        if slot_bytes(end) >= len(block) or not quantizer.encode(block, coded[MORE_BYTES:]):
            return 0
        coded[:MORE_BYTES] = 0
        coded[0] = QUANTISED
        back = np.empty_like(block)
        quantizer.decode(coded[MORE_BYTES:], back)
        (copy.read_as[index],) = checksum_blocks(back[None], [0], self._share)
        return end

    def _decode(self, copy: CodedCopy, batch: _Batch, indices: range) -> list[int]:
        """By a thread: their checksums."""
        size = self._store.bytes_per_block
        for index in indices:
            at = batch.first + index
            block, row = copy.memory[copy.sides.blocks[at]], self._staging[batch.slots[index]]
            taken = self._size(copy.sides.slots[at])
            if taken >= size:
                block[:] = row
            elif row[0] == QUANTISED and self._quantizer is not None:
                self._quantizer.decode(row[MORE_BYTES:], block)
            elif not self._codec.decode(row[:taken], block):
                block[:] = 0
        first, end = batch.first + indices.start, batch.first + indices.stop
        return checksum_blocks(copy.memory, copy.sides.blocks[first:end], self._share)
