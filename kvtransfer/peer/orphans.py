"""Reads that were given up and do not settle: what they may still write to belongs to nothing else.

Life of an orphaned read: given up, and not settled in time (the worker that it reads from may be
stopped) -> the sequence goes on with other blocks, and the read keeps its own -> settled: they are
free. One that never settles keeps them as long as the process lives; no news of a peer ends that,
since bytes on their way may arrive after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.engine.kv.block_pool import BlockPool
from kvrelay.kvtransfer.agent import CopyDone, TransferId
from kvrelay.kvtransfer.tiers.blocks import Source
from kvrelay.kvtransfer.tiers.manager import Tiers


@dataclass(frozen=True, slots=True)
class _Orphan:
    blocks: Sequence[int]  # its destination
    sources: Sequence[Source]  # in a lower tier; pinned


class Orphans:
    """Owned by a worker's exchange. Invariant: each block that such a read may write to has a
    reference from here, so that it is neither allocated nor sealed."""

    def __init__(self, pool: BlockPool, tiers: Tiers) -> None:
        self._pool = pool
        self._tiers = tiers
        self._reads: dict[TransferId, _Orphan] = {}
        self.num_taken = 0  # since the start

    @property
    def num_reads(self) -> int:
        return len(self._reads)

    @property
    def num_blocks(self) -> int:
        """Blocks of the device that are kept for them."""
        return sum(len(orphan.blocks) for orphan in self._reads.values())

    def take(
        self, transfer_id: TransferId, blocks: Sequence[int], sources: Sequence[Source]
    ) -> None:
        """A read whose sequence still has its blocks, and may free them from now on. `sources` are
        pinned, and stay so."""
        self._pool.hold(blocks)
        self._reads[transfer_id] = _Orphan(blocks, sources)
        self.num_taken += 1

    def on_copy_done(self, done: CopyDone) -> bool:
        """Whether it was one of these."""
        orphan = self._reads.pop(done.transfer_id, None)
        if orphan is None:
            return False
        self._pool.release(orphan.blocks)
        self._tiers.unpin(orphan.sources)
        return True

    def check_idle(self) -> list[str]:
        return [f"an orphaned read holds {len(o.blocks)} blocks" for o in self._reads.values()]
