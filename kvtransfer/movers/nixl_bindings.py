"""NIXL's Python bindings, the environment that NIXL and UCX are configured by, and the life of a
transfer.

Loaded once per process, by the first agent. The bindings under NIXL's Python class are used here,
because that class does not offer the delay of the progress thread.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvrelay.kvtransfer.agent import NO_COPY, AgentError, CopyDone, TransferId
from kvrelay.kvtransfer.movers.metadata import Space

ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "FATAL",  # what it would print, AgentError says
    "UCX_LOG_LEVEL": "error",
    "UCX_DEBUG_SIGNO": "0",  # or UCX takes SIGHUP to wait for a debugger
    "UCX_KEEPALIVE_INTERVAL": "5s",  # a host that went away is noticed within a few of these
    # Without NVLink (L4, L40S, PCIe cards) UCX would not read from another GPU: the CPU would copy.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
}
CPU_ENVIRONMENT = {
    # tcp: wire-up, death of a peer, other hosts. sm: same host.
    "UCX_TLS": "tcp,sm,self",
    # Nothing that these use caches registrations, so nothing has to hear of `munmap`. To hook that
    # UCX patches libc, and sleeps 50 ms before each of eight functions once there are two threads.
    "UCX_MEM_EVENTS": "n",
}
"""Of a machine without a GPU and RDMA. UCX's own choice is right where there are such devices."""

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
PACKAGES = ("nixl_cu12", "nixl_cu13")

RDMA_DEVICES = Path("/sys/class/infiniband")

logger = logging.getLogger(__name__)


def open_nixl(on_cpu: bool) -> Any:
    """The bindings, after the environment is set. What the operator has set stands: NIXL and UCX
    read it when they are first loaded, UCX also when an agent is made. Raises AgentError."""
    environment = ENVIRONMENT | (CPU_ENVIRONMENT if on_cpu and not has_rdma() else {})
    for key, value in environment.items():
        os.environ.setdefault(key, value)
    return _load_bindings()


def has_rdma() -> bool:
    """Whether this machine has InfiniBand or RoCE devices."""
    return RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())


def memory_type(nixl: Any, space: Space) -> Any:
    return {"DRAM": nixl.DRAM_SEG, "VRAM": nixl.VRAM_SEG}[space.memory]


def whole(nixl: Any, space: Space, bytes_per_block: int) -> Any:
    """Describes all of `space` by one entry of a registration."""
    row = (space.address, space.num_blocks * bytes_per_block, space.device, "")
    return nixl.nixlRegDList(memory_type(nixl, space), [row])


def descriptors(nixl: Any, space: Space, bytes_per_block: int, spans: list[tuple[int, int]]) -> Any:
    """Makes one descriptor for each (offset, length) of each block, block by block."""
    blocks = np.arange(space.num_blocks, dtype=np.uint64) * np.uint64(bytes_per_block)
    offsets, lengths = np.array(spans, np.uint64).T
    rows: NDArray[np.uint64] = np.empty((space.num_blocks, len(spans), 3), np.uint64)
    rows[:, :, 0] = np.uint64(space.address) + blocks[:, None] + offsets
    rows[:, :, 1] = lengths
    rows[:, :, 2] = space.device
    return nixl.nixlXferDList(memory_type(nixl, space), rows.reshape(-1, 3))


def indices(block_ids: Sequence[int], spans_per_block: int) -> NDArray[np.int32]:
    """Which descriptors are those of these blocks, block by block."""
    blocks = np.asarray(block_ids, np.int32)
    if spans_per_block == 1:
        return blocks
    spans = np.arange(spans_per_block, dtype=np.int32)
    return (blocks[:, None] * np.int32(spans_per_block) + spans).reshape(-1)


def error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def quietly(free: Any, *args: Any) -> None:
    """Free something of NIXL's, or that it has used; a failure to is worth a line in the log."""
    try:
        free(*args)
    except Exception as error:
        logger.warning("NIXL %s: %s", free.__name__, error_text(error))


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    text: str  # what it does, for errors
    handle: int
    transfer_id: TransferId = NO_COPY
    settled: bool = False  # NIXL reported its end
    error: str | None = None  # a bad end


T = TypeVar("T", bound=Transfer)


class Transfers(Generic[T]):
    """The transfers of an agent over NIXL. An agent adds what its transfers use, and what their end
    means for that.

    Invariant: a transfer's handle is freed exactly once, and not before it has settled (but where
    the agent is closed)."""

    def __init__(self) -> None:
        self._nixl: Any = None  # the bindings
        self._agent: Any = None  # NIXL's
        self._live: set[T] = set()  # not freed

    def poll(self, handle: T) -> CopyDone | None:
        assert handle in self._live
        self._look(handle)
        if not handle.settled:
            return None
        self._free(handle)
        return CopyDone(handle.transfer_id, handle.error)

    def cancel(self, handle: T) -> None:
        """NIXL does not stop it: it ends by itself."""

    def _post(self, transfer: T) -> None:
        """Raises AgentError. What can be copied at once is copied here, with the GIL released."""
        self._live.add(transfer)
        try:
            self._agent.postXferReq(transfer.handle, b"")
        except Exception as error:
            self._fail(transfer, error)
            self._free(transfer)
            raise AgentError(str(transfer.error)) from error

    def _look(self, transfer: T) -> None:
        """Let NIXL make progress, and see whether `transfer` has settled."""
        if transfer.settled:
            return
        try:
            if self._agent.getXferStatus(transfer.handle) == self._nixl.NIXL_IN_PROG:
                return
        except Exception as error:
            self._fail(transfer, error)
            return
        transfer.settled = True
        self._on_done(transfer)

    def _fail(self, transfer: T, error: Exception) -> None:
        transfer.settled = True
        transfer.error = f"{transfer.text}: {error_text(error)}"
        self._on_failed(transfer)

    def _free(self, transfer: T) -> None:
        self._live.remove(transfer)
        quietly(self._agent.releaseXferReq, transfer.handle)
        self._on_freed(transfer)

    def _on_done(self, transfer: T) -> None:
        """NIXL says that it ended well."""

    def _on_failed(self, transfer: T) -> None:
        """It has settled, but its end was bad."""

    def _on_freed(self, transfer: T) -> None:
        """It uses nothing any more."""


def cuda_of_torch() -> str:
    """The major version that torch is built for; "": none, or torch is not loaded."""
    torch = sys.modules.get("torch")
    version = (torch.version.cuda or "") if torch is not None else ""
    return version.partition(".")[0]


def check_fits(nixl: Any, cuda: str) -> None:
    """Raises AgentError unless the bindings are of a NIXL that is built for version `cuda`. One of
    another version takes memory of a GPU for memory of the host, and cannot read it."""
    package = nixl.__name__.partition(".")[0]
    if package != f"nixl_cu{cuda}":
        raise AgentError(
            f"torch is for CUDA {cuda or '(none)'}, NIXL is {package.replace('_', '-')}, which"
            f" cannot read such a GPU's memory: make setup-gpu, or pip install nixl-cu{cuda or 13}"
        )


def check_allocator(environment: Mapping[str, str]) -> None:
    """Raises AgentError for memory of a GPU that other processes of the machine cannot map: UCX
    would fall back to slow ways, without a word."""
    for name in ALLOCATOR_SETTINGS:
        stated = environment.get(name, "").replace(" ", "").lower()
        if "expandable_segments:true" in stated:
            raise AgentError(
                f"{name} has expandable_segments:True: NVLink between processes (cuda_ipc) does not"
                " work with such memory; leave it out"
            )


def _load_bindings() -> Any:
    """NIXL's bindings for the CUDA that torch was built for; any will do where there is none.
    Raises AgentError, with what NIXL itself says."""
    wanted = f"nixl_cu{cuda_of_torch()}"
    problems: list[str] = []
    raise_exceptions = logging.raiseExceptions
    try:
        for name in sorted(PACKAGES, key=lambda name: name != wanted):
            try:
                return importlib.import_module(f"{name}._bindings")
            except ImportError as error:
                if getattr(error, "name", None) != name:  # a library of its own does not load
                    problems.append(f"{name}: {error_text(error)}")
                    logger.warning("NIXL cannot be loaded: %s", problems[-1])
    finally:
        logging.raiseExceptions = raise_exceptions  # importing NIXL turns it off
    why = "; ".join(problems) or f"none of the packages {', '.join(PACKAGES)} is installed"
    raise AgentError(f"NIXL cannot be loaded: {why}")
