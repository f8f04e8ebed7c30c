"""A disk agent whose blocks are coded on the disk: between it and the worker's memory they are in a
staging area, in as many bytes as they take. Approximate ones may be in fewer: their first byte says
so, as it says how others are coded.

Life of a read, in batches: slots of the staging area are free -> read into them -> decoded into the
worker's memory by threads, while the next batch is read -> the slots are free again. Of a write:
encoded by threads into slots -> written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import AgentError
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.codec import MORE_BYTES, Codec
from kvrelay.kvtransfer.kivi import Quantizer
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.movers.disk import DiskAgent
from kvrelay.kvtransfer.movers.pool import check_block_ids, is_on_gpu, pool_bytes
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
) -> CodedAgent:
    """`memory`: the worker's, `[num_blocks, ...]` each, contiguous; `share`: the heads that blocks
    hold; `quantizer`: of such blocks; None: all are exact. Raises AgentError."""
    size = store.bytes_per_block
    count = min(MAX_STAGING, max(MIN_STAGING, STAGING_BYTES // size))
    staging = np.empty((count, size), np.uint8)
    agent = DiskAgent(name, {Tier.HOST: staging}, store)
    return CodedAgent(agent, memory, store, codec, staging, share, quantizer)


@dataclass(slots=True, eq=False)
class _Batch:
    """Blocks `first` and following of a copy, one in each of the slots."""

    first: int
    slots: list[int]
    handle: Any = None  # the transfer that reads or writes them; None: there is none
    tasks: list[Future[list[int]]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class CodedCopy:
    peer: NodeId
    reads: bool
    memory: NDArray[np.uint8]
    blocks: list[int]
    slots: list[int]  # in the store
    results: list[int]  # what each takes in the store, if it is written; else its checksum
    approximate: frozenset[int] = frozenset()  # slots
    changed: dict[int, int] = field(default_factory=dict)  # index -> checksum as it will be read
    begun: int = 0
    done: int = 0
    batches: list[_Batch] = field(default_factory=list)


class CodedAgent:
    """Implements kvtransfer.agent.Agent over a DiskAgent whose memory is the staging area, as host
    memory. Owns it. Memory of a GPU is not reached.

    Invariant: a slot of the staging area is free, or of one copy that has not been released. A
    block that cannot be decoded arrives as zeros, which its checksum does not fit."""

    def __init__(
        self,
        agent: DiskAgent,
        memory: Mapping[Tier, Any],
        store: DiskStore,
        codec: Codec,
        staging: NDArray[np.uint8],
        share: HeadShare | None,
        quantizer: Quantizer | None = None,
    ) -> None:
        self._agent = agent
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
        self._live: set[CodedCopy] = set()
        self._refused: list[CodedCopy] = []  # some of it was begun

    @property
    def can_reach_device(self) -> bool:
        return Tier.DEVICE in self._memory

    def metadata(self) -> bytes:
        return self._agent.metadata()

    def connect(self, peer: NodeId, epoch: int, num_blocks: int, metadata: bytes) -> None:
        self._agent.connect(peer, epoch, num_blocks, metadata)

    def disconnect(self, peer: NodeId) -> None:
        self._agent.disconnect(peer)

    def post_copy(
        self,
        peer: NodeId,
        src: list[int],
        dst: list[int],
        src_tier: Tier = Tier.DEVICE,
        dst_tier: Tier = Tier.DEVICE,
        approximate: Sequence[int] = (),
    ) -> CodedCopy:
        reads = src_tier is Tier.DISK
        tier = dst_tier if reads else src_tier
        if [src_tier, dst_tier].count(Tier.DISK) != 1 or tier not in self._memory:
            raise AgentError(
                f"move of {len(src)} blocks from {src_tier} to {dst_tier} of {peer}: blocks are"
                f" coded between {', '.join(self._memory)} memory and the disk only"
            )
        memory = self._memory[tier]
        sizes = [self._store.max_blocks, len(memory)]
        check_block_ids(peer, src, dst, *(sizes if reads else sizes[::-1]))
        blocks, slots = (dst, src) if reads else (src, dst)
        results, quantised = [0] * len(blocks), frozenset(approximate)
        copy = CodedCopy(peer, reads, memory, blocks, slots, results, quantised)
        self._release_refused()
        self._live.add(copy)
        try:
            self._begin(copy)
        except Exception:  # what was begun of it is nobody else's
            self._refused.append(copy)
            self._release_refused()
            raise
        return copy

    def _release_refused(self) -> None:
        """Slots of copies that failed as they were posted are free again once they have settled."""
        self._refused = [copy for copy in self._refused if not self.release(copy)]

    def poll(self, handle: CodedCopy) -> bool:
        """What is in the page cache is read at once: so the next batch is begun here, and not when
        the caller comes again, and threads that have all there is to do are waited for."""
        for _ in range(BATCHES):
            before = handle.begun, handle.done
            for batch in list(handle.batches):
                self._advance(handle, batch)
            self._begin(handle)
            if (handle.begun, handle.done) == before:
                break
        batches = handle.batches if handle.reads else []
        if batches and all(batch.handle is None for batch in batches):
            wait(batches[0].tasks, WAIT_S, FIRST_COMPLETED)
        return handle.done == len(handle.blocks)

    def release(self, handle: CodedCopy) -> bool:
        for batch in list(handle.batches):
            if batch.handle is not None and not self._agent.release(batch.handle):
                continue
            batch.handle = None
            for task in batch.tasks:
                task.cancel()
            if all(task.done() for task in batch.tasks):
                self._end(handle, batch)
        if handle.batches:
            return False
        self._live.discard(handle)
        return True

    def results(self, handle: Any) -> tuple[int, ...]:
        """What each block of a write that is done takes in the store; the checksums of a read,
        taken while what was decoded is in the CPU's cache. (): it is another agent's copy."""
        return tuple(handle.results) if isinstance(handle, CodedCopy) else ()

    def changed(self, handle: Any) -> dict[int, int]:
        """Blocks of a write that is done which will be read with another checksum."""
        return handle.changed if isinstance(handle, CodedCopy) else {}

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for copy in list(self._live):
            self.release(copy)
        self._agent.close()

    def _begin(self, copy: CodedCopy) -> None:
        """The next batches, as far as slots are free. Raises AgentError."""
        free = self._free[copy.reads]
        while free and copy.begun < len(copy.blocks):
            count = min(len(copy.blocks) - copy.begun, len(free), self._most[copy.reads])
            batch = _Batch(copy.begun, free[:count])
            del free[:count]
            copy.begun += count
            copy.batches.append(batch)
            if copy.reads:
                stored = [self._size(slot) for slot in self._slots(copy, batch)]
                self._move(copy, batch, stored)
            else:
                self._submit(copy, batch, self._encode)

    def _advance(self, copy: CodedCopy, batch: _Batch) -> None:
        if batch.handle is not None:
            if not (self._agent.poll(batch.handle) and self._agent.release(batch.handle)):
                return
            batch.handle = None
            if copy.reads:
                self._submit(copy, batch, self._decode)
                return
        elif not all(task.done() for task in batch.tasks):
            return
        elif not copy.reads:
            sizes = self._take_results(copy, batch)
            for slot, size in zip(self._slots(copy, batch), sizes, strict=True):
                self._store.resize(slot, size)
            self._move(copy, batch, sizes)
            return
        if copy.reads:
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
        self._free[copy.reads] += batch.slots

    def _slots(self, copy: CodedCopy, batch: _Batch) -> list[int]:
        return copy.slots[batch.first : batch.first + len(batch.slots)]

    def _size(self, slot: int) -> int:
        return int(self._store.sizes[slot]) or self._store.slot_bytes

    def _move(self, copy: CodedCopy, batch: _Batch, sizes: Sequence[int]) -> None:
        """Between the staging area and the disk. Raises AgentError."""
        slots, each = self._slots(copy, batch), [min(s, self._store.bytes_per_block) for s in sizes]
        if copy.reads:
            ways = slots, batch.slots, Tier.DISK, Tier.HOST
        else:
            ways = batch.slots, slots, Tier.HOST, Tier.DISK
        batch.handle = self._agent.post_copy(copy.peer, *ways, sizes=each)

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
            block, row = copy.memory[copy.blocks[batch.first + index]], batch.slots[index]
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
        quantizer, block = self._quantizer, copy.memory[copy.blocks[index]]
        if quantizer is None or copy.slots[index] not in copy.approximate:
            return 0
        end = MORE_BYTES + quantizer.num_bytes
        if slot_bytes(end) >= len(block) or not quantizer.encode(block, coded[MORE_BYTES:]):
            return 0
        coded[:MORE_BYTES] = 0
        coded[0] = QUANTISED
        back = np.empty_like(block)
        quantizer.decode(coded[MORE_BYTES:], back)
        (copy.changed[index],) = checksum_blocks(back[None], [0], self._share)
        return end

    def _decode(self, copy: CodedCopy, batch: _Batch, indices: range) -> list[int]:
        """By a thread: their checksums."""
        size = self._store.bytes_per_block
        for index in indices:
            at = batch.first + index
            block, row = copy.memory[copy.blocks[at]], self._staging[batch.slots[index]]
            taken = self._size(copy.slots[at])
            if taken >= size:
                block[:] = row
            elif row[0] == QUANTISED and self._quantizer is not None:
                self._quantizer.decode(row[MORE_BYTES:], block)
            elif not self._codec.decode(row[:taken], block):
                block[:] = 0
        first, end = batch.first + indices.start, batch.first + indices.stop
        return checksum_blocks(copy.memory, copy.blocks[first:end], self._share)
