"""The transfer agent of a simulated worker: reads that really tear.

A read copies each block at its own moment between its start and its end, so a source block that is
overwritten meanwhile arrives torn or stale. A read that fails or stalls may have copied some blocks
and not others. Up to the moment of its `CopyDone` it can write to its destination, never after it.

A worker may have several ranks: each reads its part of every block, slots in place of heads, with a
fate of its own, and the answers are joined by what joins those of real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import ConnectPeer, CopyBlocks, CopyDone, PeerConnected, TransferId
from kvrelay.kvtransfer.ranks import RankAnswers
from kvrelay.lab.sim.executor import OnViolation, SimExecutor


@dataclass(frozen=True, slots=True)
class ReadFate:
    """What becomes of one rank's read, decided when it is posted."""

    duration_s: float
    error: str | None = None
    moments: tuple[float | None, ...] = ()  # when block i is copied, after the start; None: never
    flip: tuple[int, int] | None = None  # (index of the block, index of the slot) damaged


class Peer(Protocol):
    """One life of a worker, as its peers see it."""

    node_id: NodeId
    epoch: int
    alive: bool
    executor: SimExecutor


class SimAgent:
    """Moves blocks into the pool of one life of one worker.

    Invariant: `executor.writable` are the destination blocks of the live transfers, by tier, and no
    block belongs to two of them.
    """

    def __init__(
        self,
        own: NodeId,
        executor: SimExecutor,
        find_peer: Callable[[NodeId], Peer | None],
        after: Callable[[float, Callable[[], None]], None],
        on_violation: OnViolation,
        num_ranks: int = 1,
        join: type[RankAnswers] = RankAnswers,
    ) -> None:
        self.num_ranks = num_ranks
        self._join = join
        self._own = own
        self._executor = executor
        self._find_peer = find_peer
        self._after = after  # calls back after that many seconds, unless this worker died
        self._on_violation = on_violation
        self._peers: dict[NodeId, Peer] = {}
        self._live: dict[TransferId, int] = {}  # ranks that can still write

    @property
    def num_live(self) -> int:
        return len(self._live)

    def connect(self, effect: ConnectPeer, error: str | None) -> PeerConnected:
        """Make the peer readable if it is still the process that `effect` means."""
        peer = self._find_peer(effect.peer)
        if error is None and (peer is None or not peer.alive or peer.epoch != effect.epoch):
            error = f"{effect.peer} epoch {effect.epoch} is not there"
        if error is None:
            assert peer is not None
            assert effect.num_blocks == len(peer.executor.pool.blocks)
            self._peers[effect.peer] = peer
        return PeerConnected(effect.peer, effect.epoch, error)

    def source(self, effect: CopyBlocks) -> Peer | None:
        """The process to read from, dead or alive; None if it was never connected. Its own blocks
        a worker can always move."""
        peer = self._peers.get(effect.peer)
        if effect.peer == self._own:
            peer = self._find_peer(effect.peer)
        return peer if peer is not None and peer.epoch == effect.epoch else None

    def read(
        self, effect: CopyBlocks, fates: Sequence[ReadFate], done: Callable[[Any], None]
    ) -> None:
        """Post the read: copies and the ends are events from now on. `fates`: of each rank. `done`
        gets its `CopyDone`."""
        assert effect.transfer_id not in self._live
        assert len(effect.src) == len(effect.dst) > 0
        assert len(set(effect.dst)) == len(effect.dst)
        executor, source = self._executor, self.source(effect)
        writable = executor.writable[effect.dst_tier]
        if not writable.isdisjoint(effect.dst):
            self._on_violation("two transfers write to one block", f"transfer {effect.transfer_id}")
        if effect.peer == self._own:
            self._check_own(effect)
        else:
            assert Tier.DISK not in (effect.src_tier, effect.dst_tier), "a peer's disk"
        self._live[effect.transfer_id] = self.num_ranks
        writable.update(effect.dst)
        answers = self._join([True] * self.num_ranks, lambda _request: None, done)
        answers.begin(effect)
        for rank, fate in enumerate(fates):
            self._post(effect, source, rank, fate, answers)

    def _post(
        self,
        effect: CopyBlocks,
        source: Peer | None,
        rank: int,
        fate: ReadFate,
        answers: RankAnswers,
    ) -> None:
        # What is written to disk has its checksum taken before.
        before = None
        if effect.dst_tier is Tier.DISK:
            before = self._checksums(effect.src_tier, effect.src, rank)
        if source is not None:
            for index, moment in enumerate(fate.moments):
                if moment is not None:
                    self._after(moment, self._copy(effect, source, rank, index, fate.flip))

        def settle() -> None:
            answers.add(rank, self._settle(effect, source, rank, fate, before))

        self._after(fate.duration_s, settle)

    def _check_own(self, effect: CopyBlocks) -> None:
        """A worker knows what happens to its own blocks: it must not read one that is written."""
        overlap = self._executor.writable[effect.src_tier].intersection(effect.src)
        if overlap:
            text = f"transfer {effect.transfer_id}, {effect.src_tier} {sorted(overlap)}"
            self._on_violation("a move reads a block that is being written", text)

    def _checksums(self, tier: Tier, blocks: tuple[int, ...], rank: int) -> tuple[int, ...]:
        pool = self._executor.pools[tier]
        return tuple(pool.checksum(block, rank, self.num_ranks) for block in blocks)

    def _copy(
        self,
        effect: CopyBlocks,
        source: Peer,
        rank: int,
        index: int,
        flip: tuple[int, int] | None,
    ) -> Callable[[], None]:
        def copy() -> None:
            if not source.alive:
                return
            block = list(source.executor.pools[effect.src_tier].blocks[effect.src[index]])
            if flip is not None and flip[0] == index:
                own = range(rank, len(block), self.num_ranks)
                block[own[flip[1] % len(own)]] ^= 1 << 17
            blocks, number = self._executor.pools[effect.dst_tier].blocks, effect.dst[index]
            there = list(blocks[number])
            there[rank :: self.num_ranks] = block[rank :: self.num_ranks]
            blocks[number] = there

        return copy

    def _settle(
        self,
        effect: CopyBlocks,
        source: Peer | None,
        rank: int,
        fate: ReadFate,
        before: tuple[int, ...] | None,
    ) -> CopyDone:
        self._live[effect.transfer_id] -= 1
        if not self._live[effect.transfer_id]:
            del self._live[effect.transfer_id]
            self._executor.writable[effect.dst_tier].difference_update(effect.dst)
        error = fate.error
        if error is None and (source is None or not source.alive):
            error = f"{effect.peer} epoch {effect.epoch} is gone"
        if error is not None:
            return CopyDone(effect.transfer_id, error, elapsed_s=fate.duration_s)
        return CopyDone(
            effect.transfer_id,
            None,
            self._checksums(effect.dst_tier, effect.dst, rank) if before is None else before,
            fate.duration_s,
            len(effect.dst) * self._executor.pool.block_size * 8 // self.num_ranks,
        )
