"""Block tables of sequences over the block pool: prefix hits, allocation, sealing, checksums."""

from __future__ import annotations

from engine.kv.block_pool import BlockPool
from engine.kv.tier import Retention
from engine.kv.window import Window
from engine.sequence import NO_BLOCK, Sequence


class KVCacheManager:
    """Gives sequences their blocks and takes them back.

    Invariant: the pool's reference counts are the block tables of the live sequences, as `_tables`
    has them; `block_ids` of a sequence is a copy of its own. Every checksum belongs to a block
    whose bytes have not changed since it was taken.

    With a window, a sequence holds at most `most_blocks`: it gives back what is not read again
    (`slide`), and a long prompt is covered as far as its next chunks only. What it has given back
    is the first to be evicted, and never copied to the tiers below: what is worth keeping there is
    known when it ends.
    """

    def __init__(self, num_blocks: int, block_size: int, window: Window | None = None) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.window = window or Window(block_size)
        self.checksums: dict[int, int] = {}  # block id -> checksum of its bytes
        self.collect_sealed = False  # True: somebody takes `newly_sealed` after every message
        self.newly_sealed: list[
            tuple[int, bytes, Retention]
        ] = []  # block, its hash, of the request
        self._tables: dict[Sequence, list[int]] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def usable_hashes(self, seq: Sequence) -> list[bytes]:
        """Names of the blocks that a prefix hit may cover: the last token is always computed,
        because its logits are wanted."""
        return seq.block_hashes[: (len(seq.tokens) - 1) // self.block_size]

    def num_cached(self, seq: Sequence) -> int:
        """How many of the usable hashes need not be computed; with a window, some of them may be
        missing."""
        block_hashes = self.usable_hashes(seq)
        if not self.window.size:
            return len(self.pool.lookup(block_hashes))
        return self.window.reach(
            len(block_hashes), lambda index: self.pool.is_cached(block_hashes[index])
        )

    def admit(self, seq: Sequence, headroom: int) -> bool:
        """Give `seq` blocks for all its tokens, the cached prefix among them, or with a window for
        what it needs first. False, and nothing changed, if fewer than `headroom` free blocks would
        remain."""
        assert not seq.block_ids
        table = self._cached(seq)
        hits = [block for block in table if block != NO_BLOCK]
        self.pool.acquire(hits)
        num_computed, window = len(table) * self.block_size, self.window
        goal = len(seq.tokens) if seq.is_remote else num_computed  # what is computed here begins
        end = window.end(goal, len(seq.tokens))
        keeps = [True] * (end - len(table))
        if window.size:
            keeps = [window.keeps(index, goal) for index in range(len(table), end)]
        count = sum(keeps)
        fresh = self.allocate(count) if count + headroom <= self.pool.num_free else None
        if fresh is None:
            self.pool.release(hits)
            return False
        seq.num_hits = seq.num_sealed = len(table)
        seq.num_computed = num_computed
        seq.window_start = window.start(goal)
        fresh.reverse()
        self._set_table(seq, table + [fresh.pop() if kept else NO_BLOCK for kept in keeps])
        return True

    def grow(self, seq: Sequence) -> bool:
        """Cover all of `seq.tokens`, or with a window what comes next of them. False if the pool
        has no block left."""
        end = self.window.end(seq.num_computed, len(seq.tokens))
        count = end - len(self._tables[seq])
        if count <= 0:
            return True
        fresh = self.allocate(count)
        if fresh is None:
            return False
        seq.block_ids += fresh
        self._tables[seq] += fresh
        return True

    def slide(self, seq: Sequence) -> None:
        """Give back what no later position of `seq` reads, and cover what comes next of a prompt
        with as many: else others would be admitted in their place, and preempted for it."""
        start = self.window.start(seq.num_computed)
        if start <= seq.window_start:
            return
        table, gone = self._tables[seq], range(seq.window_start, start)
        seq.window_start = start
        places = [i for i in gone if i >= self.window.num_sink_blocks and table[i] != NO_BLOCK]
        self.pool.release([table[i] for i in places if i < seq.num_hits])
        self.pool.release([table[i] for i in places if i >= seq.num_hits], first_to_go=True)
        for index in places:
            table[index] = seq.block_ids[index] = NO_BLOCK
        if seq.num_missing > 1:
            self.grow(seq)

    def num_covered(self, seq: Sequence) -> int:
        """Positions that have a block, of those that come next."""
        return len(self._tables[seq]) * self.block_size

    def expect(self, seq: Sequence, end: int) -> bool:
        """Blocks up to `end` that it needs to go on there come from elsewhere: lay out the table
        of `seq`, which has just been admitted, for that. False, and nothing changed, if there are
        too few blocks. Needed with a window only: else they have their places already."""
        num_computed = end * self.block_size
        old, num_entries = self._tables[seq], self.window.end(num_computed, len(seq.tokens))
        keeps = [self.window.keeps(index, num_computed) for index in range(num_entries)]
        spare = old[seq.num_sealed :]
        count = sum(keeps[seq.num_sealed :])
        more = self.allocate(max(0, count - len(spare)))
        if more is None:
            return False
        spare += more
        table = old[: seq.num_sealed]
        dropped = [block for block, kept in zip(table, keeps, strict=False) if not kept]
        table = [b if kept else NO_BLOCK for b, kept in zip(table, keeps, strict=False)]
        table += [spare.pop() if kept else NO_BLOCK for kept in keeps[seq.num_sealed :]]
        self.pool.release(spare)
        self.pool.release([block for block in dropped if block != NO_BLOCK])
        seq.window_start = self.window.start(num_computed)
        self._set_table(seq, table)
        return True

    def can_go_on(self, seq: Sequence, end: int) -> bool:
        """Whether `seq` has places for all blocks that are read from the end of block `end` on."""
        kept = self.window.kept(end * self.block_size)
        return NO_BLOCK not in seq.block_ids[end:] and all(
            seq.block_ids[index] != NO_BLOCK for index in kept
        )

    def seal_computed(self, seq: Sequence) -> None:
        """Seal the blocks that `num_computed` has filled."""
        block_hashes, table = seq.block_hashes, self._tables[seq]
        collect = self.collect_sealed and seq.retention.keep_s > 0 and not self.window.size
        while (seq.num_sealed + 1) * self.block_size <= seq.num_computed:
            block, block_hash = table[seq.num_sealed], block_hashes[seq.num_sealed]
            if block != NO_BLOCK and self.pool.seal(block, block_hash) and collect:
                self.newly_sealed.append((block, block_hash, seq.retention))
            seq.num_sealed += 1

    def release(self, seq: Sequence) -> None:
        """Take all blocks back; nothing writes to them any more. Sealed ones stay as cache, first
        to go where they are not worth keeping."""
        table = self._tables.pop(seq, [])
        if self.window.size and self.collect_sealed and seq.retention.keep_s > 0:
            self._collect_kept(seq, table)
        new = [block for block in table[seq.num_hits :] if block != NO_BLOCK]
        hits = [block for block in table[: seq.num_hits] if block != NO_BLOCK]
        if seq.retention.keep_s <= 0:  # but what was here before it is worth as much as before
            self.pool.release(new, first_to_go=True)
            self.pool.release(hits)
        else:
            self.pool.release(hits + new)
        seq.block_ids = []
        seq.num_sealed = 0
        seq.num_computed = 0
        seq.window_start = 0

    def allocate(self, count: int) -> list[int] | None:
        """As `BlockPool.allocate`: blocks to be written, whose checksums are not known."""
        blocks = self.pool.allocate(count)
        for block in blocks or ():
            self.checksums.pop(block, None)
        return blocks

    def fault(self, seq: Sequence, count: int, *, thorough: bool) -> str | None:
        """Why feeding `seq` its next `count` tokens would write or read where it must not; None if
        all is well. Only the blocks to be written are looked at, unless `thorough`."""
        held, table, size = self._tables[seq], seq.block_ids, self.block_size
        end = self.num_blocks_for(seq.num_computed + count)
        written = range(seq.num_computed // size, end)
        if len(table) < end or len(held) < end:
            return f"the block table has {len(table)} entries, {end} are needed"
        for index in range(end) if thorough and table != held else written:
            if table[index] != held[index]:
                return (
                    f"block table entry {index} is {table[index]}, the sequence holds {held[index]}"
                )
        for block in held[written.start : end]:
            if block == NO_BLOCK or not self.pool.is_private(block):
                return f"block {block}, to be written, is not its own: it is sealed or shared"
        if thorough and NO_BLOCK in held:
            start = self.window.start(seq.num_computed)
            if NO_BLOCK in held[start:end] or NO_BLOCK in held[: self.window.num_sink_blocks]:
                return f"a block in [{start}, {end}) or of the sinks, to be read, is missing"
        return None

    def check_integrity(self, others: int = 0) -> None:
        """Assert the class invariant; `others`: references that are held by no sequence."""
        self.pool.check_integrity()
        held = [block for table in self._tables.values() for block in table if block != NO_BLOCK]
        assert len(held) + others == self.pool.num_references, (len(held), others)
        for seq, table in self._tables.items():
            assert table == seq.block_ids, seq.request_id

    def _set_table(self, seq: Sequence, table: list[int]) -> None:
        self._tables[seq] = table
        seq.block_ids = list(table)

    def _cached(self, seq: Sequence) -> list[int]:
        """The beginning of a table: cached blocks, none where none is needed."""
        block_hashes, pool, window = self.usable_hashes(seq), self.pool, self.window
        if not window.size:
            return pool.lookup(block_hashes)
        end = self.num_cached(seq)
        kept = window.kept(end * self.block_size)
        if seq.is_remote:  # it need not be able to go on before its end
            kept = [index for index in window.kept(len(seq.tokens)) if index < len(block_hashes)]
            found = len(pool.lookup([block_hashes[index] for index in kept]))
            end = len(block_hashes) if found == len(kept) else kept[found]
            kept = kept[:found]
        table = [NO_BLOCK] * end
        for index, block in zip(kept, pool.lookup([block_hashes[i] for i in kept]), strict=True):
            table[index] = block
        return table

    def _collect_kept(self, seq: Sequence, table: list[int]) -> None:
        """What a later request can go on with is worth copying to the tiers below."""
        block_hashes = seq.block_hashes
        for index in self.window.kept(seq.num_sealed * self.block_size):
            if table[index] != NO_BLOCK and self.pool.has_hash(table[index], block_hashes[index]):
                self.newly_sealed.append((table[index], block_hashes[index], seq.retention))
