"""An agent whose peers may have several ranks, each with a share of the heads of every block.

It reads from as few ranks of a peer as have all the heads of its own blocks. Where several have the
same heads, readers of different ranks take different ones. A copy has a part for each rank that it
reads from, and is done when all are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import AgentError, ProbeAgent
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.movers.metadata import pack_ranks, read, unpack_ranks


@dataclass(slots=True, eq=False)
class _Copy:
    """`error`: a part of it could not be posted."""

    parts: list[Any]
    error: str | None = None


class RanksAgent:
    """Implements kvtransfer.agent.Agent over that of one rank, and owns it. Its metadata are those
    of a worker of one rank; where there are more, `join_ranks` has all."""

    def __init__(self, name: NodeId, agent: ProbeAgent, share: HeadShare, rank: int = 0) -> None:
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

    def post_copy(
        self,
        peer: NodeId,
        src: list[int],
        dst: list[int],
        src_tier: Tier = Tier.DEVICE,
        dst_tier: Tier = Tier.DEVICE,
    ) -> Any:
        names = [peer] if peer == self._name else self._peers.get(peer, [])
        return self._post(
            peer, names, lambda name: self._agent.post_copy(name, src, dst, src_tier, dst_tier)
        )

    def post_probe(self, peer: NodeId, num_bytes: int) -> tuple[Any, int]:
        names, sizes = self._peers.get(peer, []), list[int]()

        def post(name: str) -> Any:
            handle, size = self._agent.post_probe(name, num_bytes // len(names))
            sizes.append(size)
            return handle

        return self._post(peer, names, post), sum(sizes)

    def _post(self, peer: NodeId, names: list[str], post: Callable[[str], Any]) -> Any:
        """A part for each of `names`; one alone is what its agent knows."""
        if not names:
            raise AgentError(f"not connected to {peer}")
        if len(names) == 1:
            return post(names[0])
        copy = _Copy([])
        for name in names:
            try:
                copy.parts.append(post(name))
            except Exception as error:
                if not copy.parts:
                    raise
                copy.error = str(error)  # raised by `poll`: what was posted has to settle
                break
        return copy

    def poll(self, handle: Any) -> bool:
        if not isinstance(handle, _Copy):
            return self._agent.poll(handle)
        if handle.error is not None:
            raise AgentError(handle.error)
        return all(self._agent.poll(part) for part in handle.parts)

    def release(self, handle: Any) -> bool:
        if not isinstance(handle, _Copy):
            return self._agent.release(handle)
        handle.parts = [part for part in handle.parts if not self._agent.release(part)]
        return not handle.parts

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
