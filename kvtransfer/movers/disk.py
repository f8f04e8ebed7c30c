"""Moves blocks between a worker's memory and its disk store, by NIXL's file backends.

It has a NIXL agent of its own, used from its own thread, so that a slow disk never holds up the
transfers of memory. A transfer that failed may have broken NIXL's queue, so that agent is made anew
before the next one.

Memory is described once; the store's file is described again whenever the store has opened another
one. POSIX moves what the CPU can see. Of a GPU's memory GDS (GPUDirect Storage) moves blocks
without a copy through host memory; where it does not work, only host memory and disk exchange
blocks.

Which queue POSIX uses. Measured on two cores and one disk, blocks of 46,080 / 368,640 bytes, GiB/s:

               cached read   uncached read     write
  io_uring      2.2 / 1.5     0.37 / 0.57    1.2 / 2.2
  Linux AIO     2.1 / 1.6     0.16 / 0.33    1.5 / 2.7
  POSIX AIO     1.5 / 1.4     0.15 / 0.31    1.1 / 2.0
  pread/pwrite  2.5 / 1.7     0.18 / 0.34    1.8 / 2.3

io_uring reads in parallel what is not cached, and that is what a disk tier is read for; some
machines forbid it, and get Linux AIO. POSIX AIO never recovers from a failed transfer.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import AgentError, CopyBlocks
from kvrelay.kvtransfer.movers.metadata import Space
from kvrelay.kvtransfer.movers.nixl_bindings import (
    Transfer,
    Transfers,
    descriptors,
    error_text,
    memory_type,
    open_nixl,
    quietly,
    whole,
)
from kvrelay.kvtransfer.movers.pool import Sides, sides_of, space_of

QUEUES = ("use_uring", "use_aio")
"""Options of NIXL's POSIX backend, best first."""
MAX_LIVE_BLOCKS = 32_768
"""Of all transfers together. NIXL's queue holds twice as many, and breaks when it overflows."""
CLOSE_S = 30.0
"""`close` waits this long for a disk that does not answer."""
CLOSE_POLL_S = 1e-3

logger = logging.getLogger(__name__)
_abandoned: list[object] = []  # memory that a disk may still write to: never to be used again


class BlockFile(Protocol):
    """What is needed of a `kvtransfer.store.DiskStore`. `fd` may become another one."""

    @property
    def fd(self) -> int: ...
    @property
    def bytes_per_block(self) -> int: ...
    @property
    def max_blocks(self) -> int: ...
    def offset(self, slot: int, /) -> int: ...


@dataclass(slots=True, eq=False)
class OpenFile:
    """One opening of the store, under a file descriptor of our own: what the store closes and
    opens meanwhile cannot be mistaken for it."""

    identity: tuple[int, int, int]  # the store's fd, device, inode
    fd: int
    dlists: dict[int, int] = field(default_factory=dict)  # by backend
    registered: list[tuple[Any, int]] = field(default_factory=list)
    live: int = 0  # transfers that use it


class FileTransport:
    """Owned by a DiskMover. Invariant: `files` ends with the current one; one that was replaced
    stays as long as transfers use it."""

    def __init__(self, name: NodeId, spaces: Mapping[Tier, Space], store: BlockFile) -> None:
        """Raises AgentError, and whatever NIXL raises."""
        self.nixl = open_nixl(on_cpu=False)  # UCX, of which that is a matter, is not used here
        self.files: list[OpenFile] = []
        self._name = name
        self._spaces = spaces
        self._store = store
        self._agent_name = f"{name}#disk#{secrets.token_hex(8)}"
        config = self.nixl.nixlAgentConfig()
        config.useProgThread = False  # no peer asks anything of this agent
        self.agent: Any = self.nixl.nixlAgent(self._agent_name, config)
        self._registered: list[tuple[Any, int]] = []
        self.memory: dict[Tier, tuple[int, int]] = {}  # backend, descriptor list
        self._posix = self._open_posix()
        for tier, space in spaces.items():
            if space.memory == "DRAM":
                self._describe_memory(tier, space, self._posix)
            else:
                self._describe_on_gpu(tier, space)

    def make(self, sides: Sides, file: OpenFile, sizes: Sequence[int] | None) -> int:
        """A transfer between memory and the file, not posted yet. `sizes`: the bytes of each block,
        from its beginning; None: all of them."""
        operation = self.nixl.NIXL_READ if sides.reads else self.nixl.NIXL_WRITE
        backend, memory = self.memory[sides.tier]
        if sizes is not None:
            descs = self._parts(sides, file, sizes)
            made: int = self.agent.createXferReq(
                operation, *descs, self._agent_name, b"", [backend]
            )
            return made
        handle: int = self.agent.makeXferReq(
            operation,
            memory,
            np.asarray(sides.blocks, np.int32),
            file.dlists[backend],
            np.asarray(sides.slots, np.int32),
            b"",
            [backend],
        )
        return handle

    def _parts(self, sides: Sides, file: OpenFile, sizes: Sequence[int]) -> tuple[Any, Any]:
        """Their descriptors in memory and in the file."""
        space, size = self._spaces[sides.tier], self._store.bytes_per_block
        in_memory = np.empty((len(sizes), 3), np.uint64)
        in_file = np.empty((len(sizes), 3), np.uint64)
        in_memory[:, 0] = [space.address + each * size for each in sides.blocks]
        in_memory[:, 2] = space.device
        in_file[:, 0] = [self._store.offset(slot) for slot in sides.slots]
        in_file[:, 2] = file.fd
        in_memory[:, 1] = in_file[:, 1] = sizes
        kind = memory_type(self.nixl, space)
        return (
            self.nixl.nixlXferDList(kind, in_memory),
            self.nixl.nixlXferDList(self.nixl.FILE_SEG, in_file),
        )

    def current_file(self) -> OpenFile:
        """The store's file as it is now, described. Raises AgentError."""
        try:
            identity = self._identity()
            if self.files and self.files[-1].identity == identity:
                return self.files[-1]
            file = OpenFile(identity, os.dup(self._store.fd))
        except OSError as error:
            raise AgentError(f"the disk store of {self._name} is not open: {error}") from error
        try:
            self._describe_file(file)
        except Exception as error:
            self._drop(file)
            text = error_text(error)
            raise AgentError(f"the disk store of {self._name} cannot be used: {text}") from error
        self.files.append(file)
        self.drop_old_files()
        return file

    def is_current(self, file: OpenFile) -> bool:
        """Whether the store has the same file still."""
        try:
            return file.identity == self._identity()
        except OSError:
            return False

    def drop_old_files(self) -> None:
        for file in [file for file in self.files[:-1] if file.live == 0]:
            self.files.remove(file)
            self._drop(file)

    def close(self) -> None:
        """Undo everything. No transfer is left."""
        while self.files:
            self._drop(self.files.pop())
        for _, dlist in self.memory.values():
            quietly(self.agent.releasedDlistH, dlist)
        for registered, backend in self._registered:
            quietly(self.agent.deregisterMem, registered, [backend])
        self.agent = None  # the last reference

    def _identity(self) -> tuple[int, int, int]:
        fd = self._store.fd
        status = os.fstat(fd)
        return fd, status.st_dev, status.st_ino

    def _open_posix(self) -> int:
        errors = []
        for queue in QUEUES:
            try:
                backend: int = self.agent.createBackend("POSIX", {queue: "true"})
                return backend
            except Exception as error:
                errors.append(f"{queue}: {error_text(error)}")
                logger.info("%s: NIXL's POSIX backend without %s", self._name, queue)
        raise AgentError(f"NIXL's POSIX backend does not work here ({'; '.join(errors)})")

    def _describe_memory(self, tier: Tier, space: Space, backend: int) -> None:
        size = self._store.bytes_per_block
        registered = whole(self.nixl, space, size)
        self.agent.registerMem(registered, [backend])
        self._registered.append((registered, backend))
        descs = descriptors(self.nixl, space, size, [(0, size)])
        self.memory[tier] = backend, self.agent.prepXferDlist("", descs, [backend])

    def _describe_on_gpu(self, tier: Tier, space: Space) -> None:
        try:
            self._describe_memory(tier, space, self.agent.createBackend("GDS", {}))
        except Exception as error:
            self._without_gds(None, error)

    def _without_gds(self, backend: int | None, error: Exception) -> None:
        """`backend`: that has described memory already."""
        text = error_text(error)
        logger.warning("%s has no GPUDirect Storage, KV goes by host memory: %s", self._name, text)
        for tier, (of_tier, dlist) in list(self.memory.items()):
            if of_tier == backend:
                quietly(self.agent.releasedDlistH, dlist)
                del self.memory[tier]
        for each in [each for each in self._registered if each[1] == backend]:
            quietly(self.agent.deregisterMem, each[0], [backend])
            self._registered.remove(each)

    def _describe_file(self, file: OpenFile) -> None:
        store = self._store
        rows = np.empty((store.max_blocks, 3), np.uint64)
        rows[:, 0] = [store.offset(slot) for slot in range(store.max_blocks)]
        rows[:, 1] = store.bytes_per_block
        rows[:, 2] = file.fd
        end = int(rows[:, 0].max()) + store.bytes_per_block
        for backend in {backend for backend, _ in self.memory.values()}:
            try:
                registered = self.nixl.nixlRegDList(self.nixl.FILE_SEG, [(0, end, file.fd, "")])
                self.agent.registerMem(registered, [backend])
            except Exception as error:
                if backend == self._posix or self.files:
                    raise
                self._without_gds(backend, error)  # a file system that it does not know
                continue
            file.registered.append((registered, backend))
            descs = self.nixl.nixlXferDList(self.nixl.FILE_SEG, rows)
            file.dlists[backend] = self.agent.prepXferDlist(self._agent_name, descs, [backend])

    def _drop(self, file: OpenFile) -> None:
        for dlist in file.dlists.values():
            quietly(self.agent.releasedDlistH, dlist)
        for registered, backend in file.registered:
            quietly(self.agent.deregisterMem, registered, [backend])
        quietly(os.close, file.fd)  # it is closed even where that reports EIO


@dataclass(slots=True, eq=False, kw_only=True)
class Move(Transfer):
    reads: bool  # the disk
    num_blocks: int
    file_end: int  # its bytes in the file end there
    file: OpenFile


class DiskMover(Transfers[Move]):
    """Copies between a worker's memory and its disk. Owned by the worker's disk thread.

    Invariant: what a transfer uses is freed after it has settled. A read that is done has filled
    its blocks: a file that is too short is refused before and after (NIXL itself reports it since
    1.5). A write that is done is in the file that the store has.
    """

    def __init__(self, name: NodeId, pools: Mapping[Tier, Any], store: BlockFile) -> None:
        """`pools`: the worker's memory by tier, `[num_blocks, ...]` each, contiguous. Both it and
        the store stay open till `close`. Raises AgentError."""
        super().__init__()
        self._name = name
        self._store = store
        self._pools = dict(pools)  # registered: must stay alive
        located = {tier: space_of(pool) for tier, pool in self._pools.items()}
        self._spaces = {tier: space for tier, (space, _) in located.items()}
        assert {size for _, size in located.values()} == {store.bytes_per_block}, located
        self._broken = False
        self._transport: FileTransport | None = self._open()
        self._transport.current_file()

    @property
    def can_reach_device(self) -> bool:
        """Whether blocks move between disk and device memory; else only from and to host memory."""
        return Tier.DEVICE in self._opened().memory

    def copy(self, request: CopyBlocks, sizes: Sequence[int] | None = None) -> Move:
        """`sizes`: bytes of each block, from its beginning, if they are not moved whole."""
        transport, text = self._opened(), request.text
        reached = {tier: self._pools[tier] for tier in transport.memory}
        sides = sides_of(request, Tier.DISK, reached, self._store.max_blocks)
        busy = sum(transfer.num_blocks for transfer in self._live)
        if busy + len(sides.slots) > MAX_LIVE_BLOCKS:
            raise AgentError(f"{text}: {busy} of at most {MAX_LIVE_BLOCKS} blocks are on their way")
        if self._broken and not self._live:
            transport = self._renew(transport)
        whole = self._store.bytes_per_block
        each = [whole] * len(sides.slots) if sizes is None else sizes
        assert all(0 < size <= whole for size in each), sizes
        end = max(self._store.offset(s) + size for s, size in zip(sides.slots, each, strict=True))
        move = Move(
            text=text,
            handle=0,
            transfer_id=request.transfer_id,
            reads=sides.reads,
            num_blocks=len(sides.slots),
            file_end=end,
            file=transport.current_file(),
        )
        _check(move, transport)
        try:
            move.handle = transport.make(sides, move.file, sizes)
        except Exception as error:
            raise AgentError(f"{text}: {error_text(error)}") from error
        move.file.live += 1
        self._post(move)
        return move

    def close(self) -> None:
        if self._transport is None:
            return
        deadline = time.monotonic() + CLOSE_S
        while self._live and time.monotonic() < deadline:
            for move in list(self._live):
                self.poll(move)
            time.sleep(CLOSE_POLL_S)
        self._agent = None  # the transport has the last reference
        if self._live:
            logger.error(
                "%s: %d moves from and to disk have not ended in %g s; their memory is lost",
                self._name,
                len(self._live),
                CLOSE_S,
            )
            _abandoned.append((self._transport, self._pools, self._live))
        else:
            self._transport.close()
        self._transport = None

    def _open(self) -> FileTransport:
        try:
            transport = FileTransport(self._name, self._spaces, self._store)
        except Exception as error:
            text = str(error) if isinstance(error, AgentError) else error_text(error)
            raise AgentError(f"disk of {self._name}: {text}") from error
        self._nixl, self._agent = transport.nixl, transport.agent
        return transport

    def _opened(self) -> FileTransport:
        assert self._transport is not None, "the mover is closed"
        return self._transport

    def _renew(self, transport: FileTransport) -> FileTransport:
        self._transport = self._open()
        self._broken = False
        transport.close()
        return self._transport

    def _on_done(self, transfer: Move) -> None:
        try:
            _check(transfer, self._opened())
        except AgentError as error:
            transfer.error = str(error)

    def _on_failed(self, transfer: Move) -> None:
        """NIXL says no more than that it failed; what an operator looks at first is added."""
        self._broken = True
        status = os.fstatvfs(transfer.file.fd)
        free_gib = status.f_bavail * status.f_frsize / 2**30
        transfer.error = f"{transfer.error}; the disk has {free_gib:.1f} GiB free"

    def _on_freed(self, transfer: Move) -> None:
        transfer.file.live -= 1
        self._opened().drop_old_files()


def _check(transfer: Move, transport: FileTransport) -> None:
    """Before and after a transfer. Raises AgentError if what is read is not all in the file, or
    what is written is in a file that the store has given up."""
    if transfer.reads:
        size = os.fstat(transfer.file.fd).st_size
        if size < transfer.file_end:
            raise AgentError(
                f"{transfer.text}: the file was cut to {size} bytes, not {transfer.file_end}"
            )
    elif not transport.is_current(transfer.file):
        raise AgentError(f"{transfer.text}: the disk store has another file now")
