"""An agent whose peers may have several ranks, each with a share of the heads of every block.

It reads from as few ranks of a peer as have all the heads of its own blocks. Where several have the
same heads, readers of different ranks take different ones. A copy has a part for each rank that it
reads from, and is done when all are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import (
    NO_COPY,
    AgentError,
    CopyBlocks,
    CopyDone,
    PeerAgent,
    TransferId,
)
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.movers.metadata import pack_ranks, read, unpack_ranks


@dataclass(slots=True, eq=False)
class _Copy:
    """`error`: why a part of it could not be begun, or has failed."""

    transfer_id: TransferId
    parts: list[Any]  # that have not settled
    error: str | None = None


class RanksAgent:
    """A PeerAgent over that of one rank, which it owns. Its metadata are those of a worker of one
    rank; where there are more, `join_ranks` has all."""

    def __init__(self, name: NodeId, agent: PeerAgent, share: HeadShare, rank: int = 0) -> None:
        """`share`: the heads of its own blocks. `rank`: its number, also among those that have the
        same heads."""
        self._name = name
        self._agent = agent
        self._share = share
        self._rank = rank
        self._peers: dict[NodeId, list[str]] = {}  # what each rank is called that is read from

    def metadata(self) -> bytes:
        return pack_ranks([self._agent.metadata()])

    def connect(self, peer: NodeId, epoch: int, num_blocks: int, metadata: bytes) -> None:
        self.disconnect(peer)
        each = unpack_ranks(peer, metadata)
        shares = [read(peer, one).share for one in each]
        ranks = ranks_to_read(peer, self._share, self._rank, shares)
        names = {rank: f"{peer}/{rank}" if len(each) > 1 else peer for rank in ranks}
        self._peers[peer] = [*names.values()]
        try:
            for rank, name in names.items():
                self._agent.connect(name, epoch, num_blocks, each[rank])
        except Exception:
            self.disconnect(peer)
            raise

    def disconnect(self, peer: NodeId) -> None:
        for name in self._peers.pop(peer, ()):
            self._agent.disconnect(name)

    def copy(self, request: CopyBlocks) -> Any:
        peer = request.peer
        names = [peer] if peer == self._name else self._peers.get(peer, [])

        def begin(name: str) -> Any:
            return self._agent.copy(replace(request, peer=name))

        return self._begin(request.transfer_id, peer, names, begin)

    def post_probe(self, peer: NodeId, num_bytes: int) -> tuple[Any, int]:
        names, sizes = self._peers.get(peer, []), list[int]()

        def post(name: str) -> Any:
            handle, size = self._agent.post_probe(name, num_bytes // len(names))
            sizes.append(size)
            return handle

        return self._begin(NO_COPY, peer, names, post), sum(sizes)

    def _begin(
        self, transfer_id: TransferId, peer: NodeId, names: list[str], begin: Callable[[str], Any]
    ) -> _Copy:
        """A part for each of `names`."""
        if not names:
            raise AgentError(f"not connected to {peer}")
        copy = _Copy(transfer_id, [])
        for name in names:
            try:
                copy.parts.append(begin(name))
            except Exception as error:
                if not copy.parts:
                    raise
                copy.error = str(error)  # what was begun has to settle
                break
        return copy

    def poll(self, handle: _Copy) -> CopyDone | None:
        for part in list(handle.parts):
            done = self._agent.poll(part)
            if done is not None:
                handle.parts.remove(part)
                handle.error = handle.error or done.error
        return None if handle.parts else CopyDone(handle.transfer_id, handle.error)

    def cancel(self, handle: _Copy) -> None:
        for part in handle.parts:
            self._agent.cancel(part)

    def close(self) -> None:
        self._peers.clear()
        self._agent.close()


def join_ranks(name: NodeId, metadata: Sequence[bytes]) -> bytes:
    """Makes a worker's metadata from those of the RanksAgents of all its ranks, in their order."""
    return pack_ranks([one for each in metadata for one in unpack_ranks(name, each)])


def ranks_to_read(
    peer: NodeId, own: HeadShare, reader: int, shares: Sequence[HeadShare | None]
) -> list[int]:
    """Which of the ranks of `peer`, that have `shares`, the rank `reader` with `own` reads. Raises
    AgentError if they lack some of its heads."""
    found: list[int] = []
    missing = set(own.heads)
    same: dict[range, list[int]] = {}
    for rank, share in enumerate(shares):
        if share is None or not share.is_valid:
            raise AgentError(f"{peer} does not say which heads its rank {rank} has")
        same.setdefault(share.own_heads, []).append(rank)
    for heads, ranks in same.items():
        if missing.intersection(heads):
            missing.difference_update(heads)
            found.append(ranks[reader % len(ranks)])
    if missing:
        raise AgentError(f"{peer} lacks KV heads {sorted(missing)} of {own.num_heads}")
    return found
