"""An agent over NIXL: KV blocks move by RDMA, NVLink, shared memory or TCP, as UCX finds them.

Life: the device pool and the host arena are registered once and described once, one descriptor a
block; each peer's memory is described once, when it is connected; a transfer is then two lists of
indices. Moves between the two own memories are transfers from the agent to itself. Where a peer
holds other heads (another tensor-parallel size), the descriptors of that connection are spans of
blocks. Everything is undone in `close`, whatever is still in flight.

Three things about NIXL 1.x with UCX that shape this file:

- Releasing a transfer that runs frees its request and does not stop it: its bytes still land (seen
  over TCP with a peer that was stopped and went on). So a transfer is released only once NIXL says
  that it is done or has failed, and the destination stays pinned until then.
- NIXL's progress thread polls without a pause unless a delay is set. With the delay it sleeps until
  a peer wants something, and without the thread a peer that does nothing cannot be read.
- A peer's remote keys must outlive its transfers: a peer that was replaced is forgotten when the
  last of them has settled, and every incarnation of an agent has a name of its own.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import AgentError, CopyBlocks
from kvrelay.kvtransfer.layout import CopySpan, HeadShare
from kvrelay.kvtransfer.movers.metadata import AgentMetadata, Space, copy_spans, unpack
from kvrelay.kvtransfer.movers.nixl_bindings import (
    Transfer,
    Transfers,
    check_allocator,
    check_fits,
    cuda_of_torch,
    descriptors,
    error_text,
    indices,
    open_nixl,
    quietly,
    whole,
)
from kvrelay.kvtransfer.movers.pool import (
    check_block_ids,
    is_on_gpu,
    make_scratch,
    probe_blocks,
    space_of,
)

PROGRESS_WAKE_US = 100_000
"""The progress thread wakes by itself this often (and at once when there is work)."""

Spans = tuple[CopySpan, ...]


@dataclass(slots=True, eq=False)
class Peer:
    """A peer's incarnation as NIXL knows it. Removed once it is `gone` and `live` is 0."""

    agent: str
    spaces: Mapping[Tier, Space]
    spans: Spans  # what is read of each block; local lists are made for the same ones
    dlists: dict[Tier, int]
    metadata: bytes = b""
    live: int = 0  # transfers not freed
    gone: bool = False  # replaced or disconnected: no new reads
    failed: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Read(Transfer):
    peer: Peer


class NixlAgent(Transfers[Read]):
    """Implements kvtransfer.agent.PeerAgent. Owned by the worker's transfer thread.

    Invariant: a NIXL transfer handle, descriptor list or remote agent is freed exactly once, and
    never while a transfer that uses it runs (except by `close`, which stops the transport).
    """

    def __init__(
        self,
        name: NodeId,
        pool: Any,
        *,
        host: Any | None = None,
        share: HeadShare | None = None,
        backend: str = "UCX",
        num_threads: int = 0,
    ) -> None:
        """`pool`: `[num_blocks, ...]`, contiguous, CPU or CUDA; `host`: the same in host memory,
        blocks of the same size. Both stay registered till `close`. `share`: which heads the blocks
        hold, where tensor-parallel sizes differ. `num_threads` > 0 lets NIXL split large transfers.
        Raises AgentError."""
        super().__init__()
        self._name = name
        self._pools = {Tier.DEVICE: pool} | ({} if host is None else {Tier.HOST: host})
        located = {tier: space_of(each) for tier, each in self._pools.items()}
        (size,) = {size for _, size in located.values()}  # one size of blocks
        assert share is None or share.bytes_per_block == size, (share, size)
        self._on_gpu = is_on_gpu(pool)
        self._nixl = open_nixl(on_cpu=not self._on_gpu)
        if self._on_gpu:
            check_fits(self._nixl, cuda_of_torch())
            check_allocator(os.environ)
        self._facts = AgentMetadata(
            transport=f"nixl/{backend}",
            agent=f"{name}#{secrets.token_hex(8)}",
            bytes_per_block=size,
            spaces={tier: space for tier, (space, _) in located.items()},
            share=share,
        )
        self._bound = threading.local()  # done: the thread has a CUDA context
        self._scratch = make_scratch(pool, size)
        self._local: dict[tuple[Tier | None, Spans], int] = {}  # descriptor lists of own memory
        self._peers: dict[NodeId, Peer] = {}
        self._retired: list[Peer] = []  # gone, with transfers that have not settled
        try:
            self._start(backend, {"num_threads": str(num_threads)} if num_threads else {})
        except Exception as error:
            raise AgentError(f"NIXL agent {name} over {backend}: {error_text(error)}") from error

    def _start(self, backend: str, options: dict[str, str]) -> None:
        """Make NIXL's agent; register and describe what is ours."""
        self._bind_cuda()
        facts = self._facts
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_WAKE_US
        self._agent = self._nixl.nixlAgent(facts.agent, config)
        self._backend = self._agent.createBackend(backend, options)
        self._registered: list[Any] = []
        self._own_spaces: dict[Tier | None, Space] = {}
        for tier, space in facts.spaces.items():
            self._register(tier, space)
        self._metadata = replace(facts, connection=self._agent.getLocalMD()).pack()
        if self._scratch is not None:  # it is no tier, and peers do not hear of it
            self._register(None, space_of(self._scratch)[0])
        blocks = (CopySpan(0, 0, facts.bytes_per_block),)
        self._own = self._describe_peer(facts, blocks, b"")

    def _bind_cuda(self) -> None:
        """UCX asks the calling thread's CUDA context what it can reach: without one it leaves out
        NVLink. A thread has none before it has launched something."""
        if not self._on_gpu or hasattr(self._bound, "done"):
            return
        import torch

        device = self._pools[Tier.DEVICE].device
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        self._bound.done = True

    def _register(self, tier: Tier | None, space: Space) -> None:
        self._own_spaces[tier] = space
        self._registered.append(whole(self._nixl, space, self._facts.bytes_per_block))
        self._agent.registerMem(self._registered[-1], [self._backend])

    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, peer: NodeId, epoch: int, num_blocks: int, metadata: bytes) -> None:
        known = self._peers.get(peer)
        if known is not None and known.metadata == metadata and not known.failed:
            return
        self.disconnect(peer)
        self._bind_cuda()
        facts = unpack(peer, metadata, self._facts, num_blocks=num_blocks)
        spans = copy_spans(peer, facts, self._facts)
        if any(old.agent == facts.agent for old in self._retired):
            raise AgentError(f"{peer}, epoch {epoch}: reads of its last connection run on")
        try:
            self._agent.loadRemoteMD(facts.connection)
        except Exception as error:
            text = error_text(error)
            raise AgentError(f"cannot connect to {peer}, epoch {epoch}: {text}") from error
        try:
            connected = self._describe_peer(facts, spans, metadata)
        except Exception as error:
            self._agent.invalidateRemoteMD(facts.agent)
            raise AgentError(f"cannot read the memory of {peer}: {error_text(error)}") from error
        self._peers[peer] = connected

    def disconnect(self, peer: NodeId) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        known.gone = True
        if known.live:
            self._retired.append(known)
        else:
            self._forget(known)

    def copy(self, request: CopyBlocks) -> Read:
        peer, source, destination = request.peer, request.src_tier, request.dst_tier
        known = self._own if peer == self._name else self._peers.get(peer)
        if known is None:
            raise AgentError(f"not connected to {peer}")
        if known is self._own and source is destination:
            raise AgentError(f"{peer} moves blocks between tiers, not within {source} memory")
        own = self._facts.spaces
        for owner, tier, spaces in ((peer, source, known.spaces), (self._name, destination, own)):
            if tier not in spaces:
                raise AgentError(f"read from {peer}: {owner} has no {tier} memory")
        check_block_ids(request, known.spaces[source].num_blocks, own[destination].num_blocks)
        read = self._read(peer, known, (source, request.src), (destination, request.dst))
        read.transfer_id = request.transfer_id
        return read

    def post_probe(self, peer: NodeId, num_bytes: int) -> tuple[Read, int]:
        known = self._peers.get(peer)
        if known is None:
            raise AgentError(f"not connected to {peer}")
        if self._scratch is None:
            raise AgentError(f"read from {peer}: {self._name} had no memory left to time it with")
        size = sum(span.length for span in known.spans)
        limits = len(self._scratch), known.spaces[Tier.DEVICE].num_blocks
        blocks = probe_blocks(num_bytes, size, *limits)
        transfer = self._read(peer, known, (Tier.DEVICE, blocks), (None, blocks))
        return transfer, len(blocks) * size

    def _read(
        self,
        peer: NodeId,
        known: Peer,
        source: tuple[Tier, Sequence[int]],
        destination: tuple[Tier | None, Sequence[int]],
    ) -> Read:
        """Blocks of a tier of `peer` into own ones; None: the scratch memory."""
        (src_tier, src), (dst_tier, dst) = source, destination
        self._bind_cuda()
        try:
            handle = self._agent.makeXferReq(
                self._nixl.NIXL_READ,
                self._local[dst_tier, known.spans],
                indices(dst, len(known.spans)),
                known.dlists[src_tier],
                indices(src, len(known.spans)),
                b"",
                [self._backend],
            )
        except Exception as error:
            known.failed = True
            raise AgentError(f"read from {peer}: {error_text(error)}") from error
        read = Read(text=f"read from {peer}", handle=handle, peer=known)
        known.live += 1
        self._post(read)
        return read

    def close(self) -> None:
        if self._agent is None:
            return
        for read in list(self._live):
            self._free(read)
        for peer in [*self._peers.values(), *self._retired]:
            self._forget(peer)
        self._peers.clear()
        self._retired.clear()
        for dlist in [*self._local.values(), *self._own.dlists.values()]:
            quietly(self._agent.releasedDlistH, dlist)
        for each in self._registered:
            quietly(self._agent.deregisterMem, each, [self._backend])
        self._agent = None  # the last reference: NIXL stops the transport

    def _describe_peer(self, facts: AgentMetadata, spans: Spans, metadata: bytes) -> Peer:
        """Prepare the lists of a peer's memory (or of ours, as a peer), and of ours to match."""
        for tier, space in self._own_spaces.items():
            if (tier, spans) not in self._local:
                runs = [(span.dst, span.length) for span in spans]
                dlist = self._describe("", space, self._facts.bytes_per_block, runs)
                self._local[tier, spans] = dlist
        runs = [(span.src, span.length) for span in spans]
        peer = Peer(facts.agent, facts.spaces, spans, {}, metadata)
        try:
            for tier, space in facts.spaces.items():
                size = facts.bytes_per_block
                peer.dlists[tier] = self._describe(facts.agent, space, size, runs)
        except Exception:
            for dlist in peer.dlists.values():
                quietly(self._agent.releasedDlistH, dlist)
            raise
        return peer

    def _describe(
        self, agent: str, space: Space, bytes_per_block: int, runs: list[tuple[int, int]]
    ) -> int:
        """Prepare a list of the runs of all blocks of `space`; "" is memory on our side."""
        descs = descriptors(self._nixl, space, bytes_per_block, runs)
        return self._agent.prepXferDlist(agent, descs, [self._backend])

    def _on_failed(self, transfer: Read) -> None:
        transfer.peer.failed = True

    def _on_freed(self, transfer: Read) -> None:
        peer = transfer.peer
        peer.live -= 1
        if peer.gone and peer.live == 0:
            self._retired.remove(peer)
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        for dlist in peer.dlists.values():
            quietly(self._agent.releasedDlistH, dlist)
        quietly(self._agent.invalidateRemoteMD, peer.agent)
