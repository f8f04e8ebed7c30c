"""An agent over NIXL: KV blocks move by RDMA, NVLink, shared memory or TCP, as UCX finds them.

Life: the pool is registered once and described once, one descriptor a block; each peer's pool is
described once, when it is connected; a transfer is then two lists of indices. Everything is undone
in `close`, whatever is still in flight.

Three things about NIXL 1.x with UCX that shape this file:

- Releasing a transfer that runs frees its request and does not stop it: its bytes still land (seen
  over TCP with a peer that was stopped and went on). So a transfer is released only once NIXL says
  that it is done or has failed, and the destination stays pinned until then.
- NIXL's progress thread polls without a pause unless a delay is set, which its Python class does
  not offer; so the bindings under that class are used here. With the delay it sleeps until a peer
  wants something, and without the thread a peer that does nothing cannot be read.
- A peer's remote keys must outlive its transfers: a peer that was replaced is forgotten when the
  last of them has settled, and every incarnation of an agent has a name of its own.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.node import NodeId
from kvtransfer.agent import AgentError
from kvtransfer.agents.metadata import AgentMetadata, unpack
from kvtransfer.agents.pool import check_block_ids

if TYPE_CHECKING:
    import torch

PROGRESS_WAKE_US = 100_000
"""The progress thread wakes by itself this often (and at once when there is work)."""

ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "FATAL",  # what it would print, AgentError says
    "UCX_LOG_LEVEL": "error",
    "UCX_DEBUG_SIGNO": "0",  # or UCX takes SIGHUP to wait for a debugger
    "UCX_KEEPALIVE_INTERVAL": "5s",  # a host that went away is noticed within a few of these
}
CPU_ENVIRONMENT = {
    "UCX_TLS": "tcp,sm,self",  # tcp: wire-up, death of a peer, other hosts. sm: same host
}


@dataclass(slots=True, eq=False)
class _Peer:
    """A peer's incarnation as NIXL knows it. Removed once it is `gone` and `live` is 0."""

    agent: str
    dlist: int
    num_blocks: int
    metadata: bytes
    live: int = 0  # transfers not released
    gone: bool = False  # replaced or disconnected: no new reads
    failed: bool = False


@dataclass(slots=True, eq=False)
class _Xfer:
    node: NodeId
    peer: _Peer
    handle: int
    settled: bool = False  # NIXL reported its end
    error: str | None = None  # a bad end
    released: bool = False


class NixlAgent:
    """Implements kvtransfer.agent.Agent. Owned by the worker's transfer thread.

    Invariant: a NIXL transfer handle, descriptor list or remote agent is freed exactly once, and
    never while a transfer that uses it runs (except by `close`, which stops the transport).
    """

    def __init__(
        self, name: str, pool: torch.Tensor, *, backend: str = "UCX", num_threads: int = 0
    ) -> None:
        """`pool`: `[num_blocks, ...]`, contiguous, CPU or CUDA; it stays registered till `close`.
        `num_threads` > 0 lets NIXL split large transfers. Raises AgentError."""
        assert pool.is_contiguous(), "pool is not contiguous"
        _set_environment(on_cpu=not pool.is_cuda)
        self._nixl = _load_bindings()
        self._pool = pool
        self._num_blocks = len(pool)
        self._bytes_per_block = pool.numel() * pool.element_size() // len(pool)
        self._memory = "VRAM" if pool.is_cuda else "DRAM"
        device = pool.get_device() if pool.is_cuda else 0
        self._transport = f"nixl/{backend}"
        incarnation = f"{name}#{secrets.token_hex(8)}"
        self._peers: dict[NodeId, _Peer] = {}
        self._retired: list[_Peer] = []  # gone, with transfers that have not settled
        self._xfers: set[_Xfer] = set()
        try:
            config = self._nixl.nixlAgentConfig()
            config.useProgThread = True
            config.pthrDelay = PROGRESS_WAKE_US
            self._agent = self._nixl.nixlAgent(incarnation, config)
            options = {"num_threads": str(num_threads)} if num_threads else {}
            self._backend = self._agent.createBackend(backend, options)
            whole = (pool.data_ptr(), self._num_blocks * self._bytes_per_block, device, "")
            self._registered = self._nixl.nixlRegDList(self._memory_type(self._memory), [whole])
            self._agent.registerMem(self._registered, [self._backend])
            self._dlist = self._describe("", pool.data_ptr(), len(pool), self._memory, device)
            connection = self._agent.getLocalMD()
        except Exception as error:
            raise AgentError(f"NIXL agent {name} over {backend}: {_text(error)}") from error
        self._metadata = AgentMetadata(
            self._transport,
            incarnation,
            self._num_blocks,
            self._bytes_per_block,
            pool.data_ptr(),
            self._memory,
            device,
            connection,
        ).pack()

    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, peer: NodeId, epoch: int, num_blocks: int, metadata: bytes) -> None:
        known = self._peers.get(peer)
        if known is not None and known.metadata == metadata and not known.failed:
            return
        self.disconnect(peer)
        facts = unpack(
            peer,
            metadata,
            transport=self._transport,
            num_blocks=num_blocks,
            bytes_per_block=self._bytes_per_block,
        )
        if any(old.agent == facts.agent for old in self._retired):
            raise AgentError(f"{peer}, epoch {epoch}: reads of its last connection run on")
        try:
            self._agent.loadRemoteMD(facts.connection)
        except Exception as error:
            raise AgentError(f"cannot connect to {peer}, epoch {epoch}: {_text(error)}") from error
        try:
            dlist = self._describe(
                facts.agent, facts.address, facts.num_blocks, facts.memory, facts.device
            )
        except Exception as error:
            self._agent.invalidateRemoteMD(facts.agent)
            raise AgentError(f"cannot read the pool of {peer}: {_text(error)}") from error
        self._peers[peer] = _Peer(facts.agent, dlist, facts.num_blocks, metadata)

    def disconnect(self, peer: NodeId) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        known.gone = True
        if known.live:
            self._retired.append(known)
        else:
            self._forget(known)

    def read(self, peer: NodeId, src: list[int], dst: list[int]) -> _Xfer:
        known = self._peers.get(peer)
        if known is None:
            raise AgentError(f"not connected to {peer}")
        check_block_ids(peer, src, dst, known.num_blocks, self._num_blocks)
        try:
            handle = self._agent.makeXferReq(
                self._nixl.NIXL_READ,
                self._dlist,
                np.asarray(dst, np.int32),
                known.dlist,
                np.asarray(src, np.int32),
                b"",
                [self._backend],
            )
        except Exception as error:
            known.failed = True
            raise AgentError(f"read from {peer}: {_text(error)}") from error
        xfer = _Xfer(peer, known, handle)
        self._xfers.add(xfer)
        known.live += 1
        try:
            # Over shared memory the copy is made here, with the GIL released.
            xfer.settled = self._agent.postXferReq(handle, b"") != self._nixl.NIXL_IN_PROG
        except Exception as error:
            self._settle_failed(xfer, error)
            self.release(xfer)
            raise AgentError(str(xfer.error)) from error
        return xfer

    def poll(self, handle: _Xfer) -> bool:
        assert not handle.released
        self._look(handle)
        if handle.error is not None:
            raise AgentError(handle.error)
        return handle.settled

    def release(self, handle: _Xfer) -> bool:
        if handle.released:
            return True
        self._look(handle)
        if not handle.settled:
            return False
        self._free(handle)
        peer = handle.peer
        peer.live -= 1
        if peer.gone and peer.live == 0:
            self._retired.remove(peer)
            self._forget(peer)
        return True

    def close(self) -> None:
        for xfer in list(self._xfers):
            self._free(xfer)
        for peer in [*self._peers.values(), *self._retired]:
            self._forget(peer)
        self._peers.clear()
        self._retired.clear()
        if self._agent is not None:
            self._quietly(self._agent.releasedDlistH, self._dlist)
            self._quietly(self._agent.deregisterMem, self._registered, [self._backend])
        self._agent = None  # the last reference: NIXL stops the transport

    def _describe(self, agent: str, address: int, count: int, memory: str, device: int) -> int:
        """Prepare a list of `count` blocks from `address` on; "" is this agent."""
        rows = np.empty((count, 3), np.uint64)
        rows[:, 0] = np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(
            self._bytes_per_block
        )
        rows[:, 1] = self._bytes_per_block
        rows[:, 2] = device
        descs = self._nixl.nixlXferDList(self._memory_type(memory), rows)
        return self._agent.prepXferDlist(agent, descs, [self._backend])

    def _memory_type(self, memory: str) -> Any:
        return {"DRAM": self._nixl.DRAM_SEG, "VRAM": self._nixl.VRAM_SEG}[memory]

    def _look(self, xfer: _Xfer) -> None:
        """Let the transport make progress, and see whether `xfer` has settled."""
        if xfer.settled:
            return
        try:
            status = self._agent.getXferStatus(xfer.handle)
            xfer.settled = status != self._nixl.NIXL_IN_PROG
        except Exception as error:
            self._settle_failed(xfer, error)

    def _settle_failed(self, xfer: _Xfer, error: Exception) -> None:
        xfer.settled = True
        xfer.error = f"read from {xfer.node}: {_text(error)}"
        xfer.peer.failed = True

    def _free(self, xfer: _Xfer) -> None:
        self._xfers.remove(xfer)
        xfer.released = True
        self._quietly(self._agent.releaseXferReq, xfer.handle)

    def _forget(self, peer: _Peer) -> None:
        self._quietly(self._agent.releasedDlistH, peer.dlist)
        self._quietly(self._agent.invalidateRemoteMD, peer.agent)

    def _quietly(self, free: Any, *args: Any) -> None:
        """Free something of NIXL's; a failure to is only worth a line in the log."""
        try:
            free(*args)
        except Exception as error:
            logging.getLogger(__name__).warning("NIXL %s: %s", free.__name__, _text(error))


def _set_environment(on_cpu: bool) -> None:
    """UCX and NIXL are configured by the environment, read when they are first loaded and when
    an agent is made. What the operator has set stands."""
    for key, value in (ENVIRONMENT | (CPU_ENVIRONMENT if on_cpu else {})).items():
        os.environ.setdefault(key, value)


def _load_bindings() -> Any:
    """NIXL's bindings for the CUDA that torch was built for; any will do where there is none."""
    torch = sys.modules.get("torch")
    cuda = (torch.version.cuda or "") if torch is not None else ""
    names = ["nixl_cu12", "nixl_cu13"]
    if cuda.startswith("13"):
        names.reverse()
    raise_exceptions = logging.raiseExceptions
    try:
        for name in names:
            try:
                return importlib.import_module(f"{name}._bindings")
            except ModuleNotFoundError as error:
                if error.name != name:
                    raise
    finally:
        logging.raiseExceptions = raise_exceptions  # importing NIXL turns it off
    raise AgentError(f"none of the packages {', '.join(names)} is installed")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
