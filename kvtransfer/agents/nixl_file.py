"""A NIXL agent for transfers between a worker's memory and one file: its backends, what is
registered with them, and the descriptor lists.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from engine.kv.tier import Tier
from engine.node import NodeId
from kvtransfer.agent import AgentError
from kvtransfer.agents.metadata import Space
from kvtransfer.agents.nixl_bindings import descriptors, error_text, open_nixl, quietly, whole

QUEUES = ("use_uring", "use_aio")
"""Options of NIXL's POSIX backend, best first."""

logger = logging.getLogger(__name__)


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
    """Owned by a DiskAgent. Invariant: `files` ends with the current one; one that was replaced
    stays as long as transfers use it."""

    def __init__(self, name: NodeId, spaces: Mapping[Tier, Space], store: BlockFile) -> None:
        """Raises whatever NIXL does."""
        self.nixl = open_nixl(on_cpu=False)  # UCX, of which that is a matter, is not used here
        self.files: list[OpenFile] = []
        self._name = name
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

    def make(
        self, reads: bool, tier: Tier, blocks: Sequence[int], file: OpenFile, slots: Sequence[int]
    ) -> int:
        """A transfer between `blocks` of a memory and `slots` of the file, not posted yet."""
        operation = self.nixl.NIXL_READ if reads else self.nixl.NIXL_WRITE
        backend, memory = self.memory[tier]
        handle: int = self.agent.makeXferReq(
            operation,
            memory,
            np.asarray(blocks, np.int32),
            file.dlists[backend],
            np.asarray(slots, np.int32),
            b"",
            [backend],
        )
        return handle

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
