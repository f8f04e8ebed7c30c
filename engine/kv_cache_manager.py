"""Block tables of sequences over the block pool: prefix hits, allocation, sealing, checksums."""

from __future__ import annotations

from engine.block_pool import BlockPool
from engine.sequence import Sequence
from engine.tier import Retention


class KVCacheManager:
    """Gives sequences their blocks and takes them back.

    Invariant: the pool's reference counts are the block tables of the live sequences; every
    checksum belongs to a block whose bytes have not changed since it was taken.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.checksums: dict[int, int] = {}  # block id -> checksum of its bytes
        self.collect_sealed = False  # True: somebody takes `newly_sealed` after every message
        self.newly_sealed: list[
            tuple[int, bytes, Retention]
        ] = []  # block, its name, of the request

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def usable_names(self, seq: Sequence) -> list[bytes]:
        """Names of the blocks that a prefix hit may cover: the last token is always computed,
        because its logits are wanted."""
        return seq.names[: (len(seq.tokens) - 1) // self.block_size]

    def admit(self, seq: Sequence, headroom: int) -> bool:
        """Give `seq` blocks for all its tokens, the cached prefix among them. False, and nothing
        changed, if fewer than `headroom` free blocks would remain."""
        assert not seq.block_ids
        hits = self.pool.lookup(self.usable_names(seq))
        self.pool.acquire(hits)
        count = self.num_blocks_for(len(seq.tokens)) - len(hits)
        fresh = self.allocate(count) if count + headroom <= self.pool.num_free else None
        if fresh is None:
            self.pool.release(hits)
            return False
        seq.block_ids = hits + fresh
        seq.num_hits = seq.num_sealed = len(hits)
        seq.num_computed = len(hits) * self.block_size
        return True

    def grow(self, seq: Sequence) -> bool:
        """Cover all of `seq.tokens`. False if the pool has no block left."""
        count = self.num_blocks_for(len(seq.tokens)) - len(seq.block_ids)
        if count <= 0:
            return True
        fresh = self.allocate(count)
        if fresh is None:
            return False
        seq.block_ids += fresh
        return True

    def seal_computed(self, seq: Sequence) -> None:
        """Seal the blocks that `num_computed` has filled."""
        names = seq.names
        while (seq.num_sealed + 1) * self.block_size <= seq.num_computed:
            block, name = seq.block_ids[seq.num_sealed], names[seq.num_sealed]
            if self.pool.seal(block, name) and self.collect_sealed and seq.retention.keep_s > 0:
                self.newly_sealed.append((block, name, seq.retention))
            seq.num_sealed += 1

    def release(self, seq: Sequence) -> None:
        """Take all blocks back; nothing writes to them any more. Sealed ones stay as cache, first
        to go where they are not worth keeping."""
        if seq.retention.keep_s <= 0:  # but what was here before it is worth as much as before
            self.pool.release(seq.block_ids[seq.num_hits :], first_to_go=True)
            self.pool.release(seq.block_ids[: seq.num_hits])
        else:
            self.pool.release(seq.block_ids)
        seq.block_ids = []
        seq.num_sealed = 0
        seq.num_computed = 0

    def allocate(self, count: int) -> list[int] | None:
        """As `BlockPool.allocate`: blocks to be written, whose checksums are not known."""
        blocks = self.pool.allocate(count)
        for block in blocks or ():
            self.checksums.pop(block, None)
        return blocks
