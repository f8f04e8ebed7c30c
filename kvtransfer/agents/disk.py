"""An agent that moves blocks between a worker's memory and its disk store, by NIXL's file backends.

It has a NIXL agent of its own, used from its own thread, so that a slow disk never holds up the
transfers of memory. A transfer that failed may have broken NIXL's queue, so that agent is made anew
before the next one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.kv.tier import Tier
from engine.node import NodeId
from kvtransfer.agent import AgentError
from kvtransfer.agents.nixl_bindings import error_text, quietly
from kvtransfer.agents.nixl_file import BlockFile, FileTransport, OpenFile
from kvtransfer.agents.pool import check_block_ids, space_of

MAX_LIVE_BLOCKS = 32_768
"""Of all transfers together. NIXL's queue holds twice as many, and breaks when it overflows."""
CLOSE_S = 30.0
"""`close` waits this long for a disk that does not answer."""
CLOSE_POLL_S = 1e-3

logger = logging.getLogger(__name__)
_abandoned: list[object] = []  # memory that a disk may still write to: never to be used again


@dataclass(slots=True, eq=False)
class _Transfer:
    text: str  # what it does, for errors
    reads: bool  # the disk
    num_blocks: int
    end: int  # of its bytes in the file
    file: OpenFile
    handle: int
    settled: bool = False
    error: str | None = None
    released: bool = False


class DiskAgent:
    """Implements kvtransfer.agent.Agent for moves within one worker, the disk on one side. Owned
    by the worker's disk thread.

    Invariant: what a transfer uses is freed after it has settled. A read that is done has filled
    its blocks: a file that is too short is refused before and after (NIXL itself reports it since
    1.5). A write that is done is in the file that the store has.
    """

    def __init__(self, name: NodeId, pools: Mapping[Tier, Any], store: BlockFile) -> None:
        """`pools`: the worker's memory by tier, `[num_blocks, ...]` each, contiguous. Both it and
        the store stay open till `close`. Raises AgentError."""
        self._name = name
        self._store = store
        self._pools = dict(pools)  # registered: must stay alive
        located = {tier: space_of(pool) for tier, pool in self._pools.items()}
        self._spaces = {tier: space for tier, (space, _) in located.items()}
        assert {size for _, size in located.values()} == {store.bytes_per_block}, located
        self._live: set[_Transfer] = set()
        self._broken = False
        self._transport: FileTransport | None = self._open()
        self._transport.current_file()

    @property
    def can_reach_device(self) -> bool:
        """Whether blocks move between disk and device memory; else only from and to host memory."""
        return Tier.DEVICE in self._opened().memory

    def metadata(self) -> bytes:
        return b""

    def connect(self, peer: NodeId, epoch: int, num_blocks: int, metadata: bytes) -> None:
        raise AgentError(f"the disk of {self._name} is its own, and not read by {peer}")

    def disconnect(self, peer: NodeId) -> None:
        """There is no one to forget."""

    def post_copy(
        self,
        peer: NodeId,
        src: list[int],
        dst: list[int],
        src_tier: Tier = Tier.DEVICE,
        dst_tier: Tier = Tier.DEVICE,
    ) -> _Transfer:
        text = f"move of {len(src)} blocks from {src_tier} to {dst_tier} of {peer}"
        if peer != self._name or [src_tier, dst_tier].count(Tier.DISK) != 1:
            raise AgentError(f"{text}: this is the disk of {self._name}, for its own memory")
        reads = src_tier is Tier.DISK
        tier = dst_tier if reads else src_tier
        transport = self._opened()
        if tier not in transport.memory:
            raise AgentError(f"{text}: {self._name}'s disk does not reach {tier} memory")
        num_blocks, num_slots = self._spaces[tier].num_blocks, self._store.max_blocks
        check_block_ids(peer, src, dst, *([num_slots, num_blocks][:: 1 if reads else -1]))
        busy = sum(transfer.num_blocks for transfer in self._live)
        if busy + len(src) > MAX_LIVE_BLOCKS:
            raise AgentError(f"{text}: {busy} of at most {MAX_LIVE_BLOCKS} blocks are on their way")
        if self._broken and not self._live:
            transport = self._renew(transport)
        blocks, slots = (dst, src) if reads else (src, dst)
        end = max(map(self._store.offset, slots)) + self._store.bytes_per_block
        transfer = _Transfer(text, reads, len(src), end, transport.current_file(), handle=0)
        _check(transfer, transport)
        try:
            transfer.handle = transport.make(reads, tier, blocks, transfer.file, slots)
        except Exception as error:
            raise AgentError(f"{text}: {error_text(error)}") from error
        self._post(transfer, transport)
        return transfer

    def poll(self, handle: _Transfer) -> bool:
        assert not handle.released
        self._look(handle, self._opened())
        if handle.error is not None:
            raise AgentError(handle.error)
        return handle.settled

    def release(self, handle: _Transfer) -> bool:
        if handle.released:
            return True
        transport = self._opened()
        self._look(handle, transport)
        if not handle.settled:
            return False
        handle.released = True
        quietly(transport.agent.releaseXferReq, handle.handle)
        self._live.remove(handle)
        handle.file.live -= 1
        transport.drop_old_files()
        return True

    def close(self) -> None:
        if self._transport is None:
            return
        deadline = time.monotonic() + CLOSE_S
        while not self._release_all() and time.monotonic() < deadline:
            time.sleep(CLOSE_POLL_S)
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
            return FileTransport(self._name, self._spaces, self._store)
        except Exception as error:
            text = str(error) if isinstance(error, AgentError) else error_text(error)
            raise AgentError(f"disk agent of {self._name}: {text}") from error

    def _opened(self) -> FileTransport:
        assert self._transport is not None, "the disk agent is closed"
        return self._transport

    def _renew(self, transport: FileTransport) -> FileTransport:
        self._transport = self._open()
        self._broken = False
        transport.close()
        return self._transport

    def _post(self, transfer: _Transfer, transport: FileTransport) -> None:
        self._live.add(transfer)
        transfer.file.live += 1
        try:
            # What is cached is copied here, with the GIL released. Its end is seen by `_look`.
            transport.agent.postXferReq(transfer.handle, b"")
        except Exception as error:
            self._settle_failed(transfer, error)
            self.release(transfer)
            raise AgentError(str(transfer.error)) from error

    def _look(self, transfer: _Transfer, transport: FileTransport) -> None:
        """Let NIXL submit more of `transfer`, and see whether it has settled."""
        if transfer.settled:
            return
        try:
            status = transport.agent.getXferStatus(transfer.handle)
        except Exception as error:
            self._settle_failed(transfer, error)
            return
        if status == transport.nixl.NIXL_IN_PROG:
            return
        transfer.settled = True
        try:
            _check(transfer, transport)
        except AgentError as error:
            transfer.error = str(error)

    def _settle_failed(self, transfer: _Transfer, error: Exception) -> None:
        """NIXL says no more than that it failed; what an operator looks at first is added."""
        transfer.settled = True
        self._broken = True
        status = os.fstatvfs(transfer.file.fd)
        free_gib = status.f_bavail * status.f_frsize / 2**30
        transfer.error = (
            f"{transfer.text}: {error_text(error)}; the disk has {free_gib:.1f} GiB free"
        )

    def _release_all(self) -> bool:
        for transfer in list(self._live):
            self.release(transfer)
        return not self._live


def _check(transfer: _Transfer, transport: FileTransport) -> None:
    """Before and after a transfer. Raises AgentError if what is read is not all in the file, or
    what is written is in a file that the store has given up."""
    if transfer.reads:
        size = os.fstat(transfer.file.fd).st_size
        if size < transfer.end:
            raise AgentError(
                f"{transfer.text}: the file was cut to {size} bytes, not {transfer.end}"
            )
    elif not transport.is_current(transfer.file):
        raise AgentError(f"{transfer.text}: the disk store has another file now")
