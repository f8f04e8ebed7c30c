"""The ways to move KV blocks that `benchmarks.kv.transfer` compares, for one size of blocks.

All move blocks by the same shuffled lists of indices. Block i of the second process, which is read,
is filled with i % 251.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from benchmarks.kv.second_process import second_process
from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import CopyBlocks, MoveId, Mover
from kvrelay.kvtransfer.movers.disk import DiskMover
from kvrelay.kvtransfer.movers.nixl import NixlAgent
from kvrelay.kvtransfer.movers.pool import make_host_arena
from kvrelay.kvtransfer.store import DiskStore

MEMCPY = "memcpy"
BETWEEN = "NIXL, 2 processes"
TO_HOST = "device to host"
TO_DEVICE = "host to device"
DISK_WRITE = "disk write"
DISK_READ = "disk read"
RAW_WRITE = "raw pwrite"
RAW_READ = "raw pread"

DEADLINE_S = 120.0
SPINS = 20
WAIT_S = 50e-6

Move = Callable[[list[int], list[int]], None]


@dataclass(frozen=True, slots=True)
class Way:
    """One way from `source[src]` to `destination[dst]`, both `[num_blocks, block_bytes]`."""

    move: Move
    source: np.ndarray
    destination: np.ndarray
    file: int | None = None  # the descriptor of a file that it reads or writes
    writes: bool = False  # the file; what it holds then is `destination`, once read back

    def seconds(self, src: list[int], dst: list[int], direct: bool) -> float:
        """The time of one turn. `direct`: reads find nothing in the page cache, and writes last
        until they have reached the disk. Raises ClickException if a block is wrong."""
        if direct and self.file is not None:
            os.fsync(self.file)
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)
        self.destination[dst] = 255
        start = time.perf_counter()
        self.move(src, dst)
        if direct and self.file is not None and self.writes:
            os.fsync(self.file)
        return time.perf_counter() - start


class Ways:
    """Owned by the benchmark, from `with` to its end: pools, agents, files, the second process."""

    def __init__(self, block_bytes: int, num_blocks: int, folder: Path) -> None:
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._folder = folder
        self._stack = ExitStack()
        self.ways: dict[str, Way] = {}

    def __enter__(self) -> Ways:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _build(self) -> None:
        shape = (self._num_blocks, self._block_bytes)
        source, device = np.empty(shape, np.uint8), np.zeros(shape, np.uint8)
        fill(source)
        host = make_host_arena(*shape, pinned=False)
        fill(host)
        metadata = self._stack.enter_context(
            second_process(
                "benchmarks.kv.transfer", "--peer", *map(str, shape), deadline_s=DEADLINE_S
            )
        )
        nixl = NixlAgent("reader", device, host=host)
        self._stack.callback(nixl.close)
        nixl.connect("peer", 1, self._num_blocks, metadata)

        def memcpy(src: list[int], dst: list[int]) -> None:
            for i, j in zip(src, dst, strict=True):
                device[j] = source[i]

        self.ways = {
            MEMCPY: Way(memcpy, source, device),
            BETWEEN: Way(moves(nixl, "peer"), source, device),
            TO_HOST: Way(moves(nixl, "reader", Tier.DEVICE, Tier.HOST), device, host),
            TO_DEVICE: Way(moves(nixl, "reader", Tier.HOST, Tier.DEVICE), host, device),
        }
        self._build_disk(source, device)

    def _build_disk(self, source: np.ndarray, device: np.ndarray) -> None:
        """Two files with the content of `source`: a store's, and one for raw reads and writes."""
        store = DiskStore.open(
            self._folder / f"store-{self._block_bytes}",
            fingerprint=bytes(16),
            bytes_per_block=self._block_bytes,
            max_blocks=self._num_blocks,
        )
        self._stack.callback(store.close)
        raw = os.open(self._folder / f"raw-{self._block_bytes}", os.O_RDWR | os.O_CREAT, 0o600)
        self._stack.callback(os.close, raw)
        offsets = [store.offset(slot) for slot in range(self._num_blocks)]
        on_disk = source.copy()  # what is in the slots, as far as a check needs it
        for fd in (store.fd, raw):
            for block, offset in zip(source, offsets, strict=True):
                os.pwrite(fd, block.data, offset)
        agent = DiskMover("reader", {Tier.DEVICE: device}, store)
        self._stack.callback(agent.close)

        def pwrite(src: list[int], dst: list[int]) -> None:
            for i, j in zip(src, dst, strict=True):
                os.pwrite(raw, device[i].data, offsets[j])

        def pread(src: list[int], dst: list[int]) -> None:
            for i, j in zip(src, dst, strict=True):
                os.preadv(raw, [device[j]], offsets[i])

        write = moves(agent, "reader", Tier.DEVICE, Tier.DISK)
        read = moves(agent, "reader", Tier.DISK, Tier.DEVICE)
        self.ways |= {
            DISK_WRITE: Way(write, device, on_disk, store.fd, writes=True),
            RAW_WRITE: Way(pwrite, device, on_disk, raw, writes=True),
            DISK_READ: Way(read, on_disk, device, store.fd),
            RAW_READ: Way(pread, on_disk, device, raw),
        }
        self._offsets = offsets

    def turn(self, name: str, src: list[int], dst: list[int], direct: bool) -> float:
        """Seconds of one turn of a way, whose result is checked. Raises ClickException."""
        way = self.ways[name]
        seconds = way.seconds(src, dst, direct)
        if way.writes:
            assert way.file is not None
            for slot in dst:
                os.preadv(way.file, [way.destination[slot]], self._offsets[slot])
        wrong = (way.destination[dst] != way.source[src]).any(axis=1).sum()
        if wrong:
            raise click.ClickException(f"{name}: {wrong} of {len(src)} blocks are wrong")
        if way.writes:  # both files hold the same again
            for other in self.ways.values():
                if other.writes and other.file != way.file:
                    assert other.file is not None
                    for slot in dst:
                        os.pwrite(other.file, way.destination[slot].data, self._offsets[slot])
        return seconds


def moves(
    mover: Mover, peer: str, src_tier: Tier = Tier.DEVICE, dst_tier: Tier = Tier.DEVICE
) -> Move:
    """Reads as a transfer thread does."""

    def move(src: list[int], dst: list[int]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        ways = tuple(src), tuple(dst), DEADLINE_S, src_tier, dst_tier
        handle = mover.copy(CopyBlocks(MoveId(1), peer, 1, *ways))
        polls = 0
        while (done := mover.poll(handle)) is None:
            polls += 1
            if polls > SPINS:
                time.sleep(WAIT_S)
            if time.monotonic() > deadline:
                raise click.ClickException(f"a read has not ended in {DEADLINE_S:g} s")
        if done.error is not None:
            raise click.ClickException(done.error)

    return move


def serve_as_peer(num_blocks: int, block_bytes: int) -> None:
    pool = np.empty((num_blocks, block_bytes), np.uint8)
    fill(pool)
    agent = NixlAgent("peer", pool)
    sys.stdout.write(agent.metadata().hex() + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
    agent.close()


def fill(pool: np.ndarray) -> None:
    pool[:] = (np.arange(len(pool)) % 251).astype(np.uint8)[:, None]
