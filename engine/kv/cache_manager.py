"""Block tables of sequences over the block pool: prefix hits, allocation, sealing, checksums."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from kvrelay.engine.kv.block_pool import BlockPool
from kvrelay.engine.kv.tier import Retention
from kvrelay.engine.kv.window import GROUP_KINDS, Windows
from kvrelay.engine.sequence import NO_BLOCK, Sequence
from kvrelay.engine.stats import GroupBlocks


class Lack(NamedTuple):
    """Why a sequence was not admitted."""

    num_blocks: int  # so many less than it needs were free; or it is low, and may not have them
    num_found: int  # entries of its table that are cached, or need not be
    num_idle: int  # cached blocks of it that nothing uses
    free_from: float  # when it may have them, if nothing changes


NO_LACK = Lack(0, 0, 0, inf)

COPY_LAG = 4  # rows that copies to the lower tiers may be behind what is decoded


class KVCacheManager:
    """Allocates and frees the blocks of sequences.

    Invariant: the pool's reference counts are those of the block tables of the live sequences in
    `_tables`; `block_ids` of a sequence is its own copy of its table. Every checksum belongs to a
    block whose bytes have not changed since it was taken.

    Where layers attend to a window, their blocks that are not read again are freed (`slide`), and a
    long prompt has them for its next chunks only. Blocks freed so are evicted first; but not those
    with which others can continue where they may part from it: at the prompt's end, at a public
    beginning's, and where `begin` found that some did. The last two are in `_parting`, with the
    windows of each. The lower tiers get the windows of such places, and of the place up to which a
    sequence has been decoded, so that another worker can go on there if this one dies.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: Windows | None = None) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.windows = windows or Windows.of(block_size)
        self.checksums: dict[int, int] = {}  # block id -> checksum of its bytes
        self.collect_sealed = False  # True: the tiers take `newly_sealed` after every message
        self.collect_decoded = False  # True: with the windows that a sequence leaves as it decodes
        self.newly_sealed: list[tuple[int, bytes, Retention]] = []  # block, its hash
        self.newly_passed: list[bytes] = []  # were sealed by decodes, and windows have left them
        self.lack = NO_LACK  # what the last one that was not admitted lacked
        self._tables: dict[Sequence, list[int]] = {}
        self._parting: set[int] = set()
        self._has_windows = self.windows.any
        self._kinds = [GROUP_KINDS.index(window.kind) for window in self.windows.groups]
        num_states, num_whole = self._kinds.count(2), max(1, self._kinds.count(0))
        self._strides = [(0, 1, max(1, num_states // num_whole))[kind] for kind in self._kinds]
        if len(self._kinds) > 1:
            self.pool.kinds = bytearray(num_blocks)

    def usable_hashes(self, seq: Sequence) -> list[bytes]:
        """Hashes of the blocks that a prefix hit may cover."""
        return seq.block_hashes[: self.num_usable(seq)]

    def num_usable(self, seq: Sequence) -> int:
        """How many these are: the last token is always computed, because its logits are needed, as
        is all of a prompt that still has to give outputs."""
        end = len(seq.tokens) - 1 if seq.outputs_from is None else seq.outputs_from
        return self.windows.full(end)

    def num_cached(self, seq: Sequence) -> int:
        """How many blocks, from the first, need not be computed; with windows, some of them may be
        missing."""
        block_hashes = self.usable_hashes(seq)
        if not self._has_windows:
            return len(self.pool.lookup(block_hashes))
        return self.windows.reach(
            len(block_hashes), lambda index: self.pool.is_cached(block_hashes[index])
        )

    @property
    def num_low(self) -> int:
        """Sequences of low classes that have blocks."""
        return sum(seq.is_low for seq in self._tables)

    def lacks(self, seq: Sequence, num_blocks: float) -> bool:
        """Whether at least so many blocks of `seq` are not cached, found by looking at one. False
        with windows, where it would take more to find."""
        spare = self.windows.max_blocks(len(seq.tokens)) - num_blocks
        if self._has_windows or spare < 0:
            return False
        at = int(spare)
        return at >= self.num_usable(seq) or not self.pool.is_cached(seq.block_hashes[at])

    def admit(self, seq: Sequence, headroom: int) -> bool:
        """Allocate blocks for all tokens of `seq`, the cached prefix among them; of groups with a
        window, for its first chunks. False, and nothing changed, if fewer than `headroom` free
        blocks would remain."""
        assert not seq.block_ids
        if self.pool.num_free <= headroom:
            return False  # the block of its last token is never a cache hit
        table = self._cached(seq)
        hits = [block for block in table if block != NO_BLOCK]
        num_free = self.pool.num_free
        self.pool.acquire(hits)
        num_idle, low = num_free - self.pool.num_free, seq.is_low
        num_computed, windows = self.windows.tokens(len(table)), self.windows
        goal = len(seq.tokens) if seq.is_remote else num_computed  # computing begins after it
        end = windows.end(goal, len(seq.tokens))
        if self._has_windows:
            needs = windows.needs(goal, len(seq.tokens))[len(table) :]
        else:
            needs = [True] * (end - len(table))
        count = sum(needs)
        fresh = self.allocate(count, low=low) if self._is_free(seq, count + headroom) else None
        if fresh is None:
            count, num_freed = count + headroom, self.pool.num_freed
            free_from = self.pool.low_free_from(count) if low else inf
            self.lack = Lack(count - self.pool.num_free, len(table), num_idle, free_from)
            self.pool.release(hits)  # they are evicted later, but nothing has become free
            self.pool.num_freed = num_freed
            return False
        if not low:
            self.pool.claim(hits)
        seq.num_hits = seq.num_sealed = len(table)
        seq.num_computed = num_computed
        seq.slid_at, seq.num_covered = goal, max(end, len(table))
        fresh.reverse()
        self._set_table(seq, table + [fresh.pop() if needed else NO_BLOCK for needed in needs])
        return True

    def begin(self, seq: Sequence, is_below: Callable[[bytes], bool]) -> None:
        """`seq`, of which all that can be had is there, will be computed from there on. Where more
        of its prefix is cached but the windows to go on, others part from it too, and what it
        leaves there is kept. Windows of its earlier turns have been passed, and are evicted first.
        `is_below`: whether a lower tier has a block."""
        windows, names = self.windows, self.usable_hashes(seq)
        if not self._has_windows:
            return

        def has(index: int) -> bool:
            return self.pool.is_cached(names[index]) or is_below(names[index])

        sized = [group for group, window in enumerate(windows.groups) if window.size]
        first, count = windows.full(seq.num_computed), windows.count
        if len(sized) < count and (whole := windows.whole(len(names), has)) > first:
            seq.parts_at = whole
            if (cause := windows.lacking(whole, has)) and not seq.has_own_kv:
                seq.recomputed = {cause: windows.tokens(whole - first)}
        end = windows.full(seq.num_prompt_tokens - 1)
        behind = (row + group for row in range(first - count, -1, -count) for group in sized)
        past = (names[i] for i in behind if not self._is_read_at(i, end))
        self.pool.demote(past, self._parting)

    def grow(self, seq: Sequence, num_unknown: int = 0) -> bool:
        """Allocate blocks up to the end of `seq.tokens` and of `num_unknown` more, or with windows
        for the next ones. False if the pool has no block left."""
        num_tokens, covered = len(seq.tokens) + num_unknown, seq.num_covered
        if num_tokens <= self.windows.tokens(covered):
            return True
        end = self.windows.end(seq.num_computed, num_tokens)
        if end <= covered:
            return True
        table = self._tables[seq]
        missing = [i for i in range(covered, min(end, len(table))) if table[i] == NO_BLOCK]
        num_more = max(0, end - len(table))
        count = len(missing) + num_more
        fresh = self.allocate(count, low=seq.is_low) if self._is_free(seq, count) else None
        if fresh is None:
            return False
        for index, block in zip(missing, fresh, strict=False):
            table[index] = seq.block_ids[index] = block
        more = fresh[len(missing) :]
        seq.block_ids += more
        table += more
        if self.pool.kinds:
            self._set_kinds(table, first=covered)
        seq.num_covered = end
        return True

    def slide(self, seq: Sequence) -> None:
        """Free the blocks that no later position of `seq` reads, and allocate as many for the next
        tokens of a prompt: otherwise other sequences would be admitted in their place, and be
        preempted for it."""
        if not self._has_windows:
            return
        table, gone = self._tables[seq], self.windows.freed(seq.slid_at, seq.num_computed)
        if not gone:
            return
        seq.slid_at = seq.num_computed
        places = [index for index in gone if table[index] != NO_BLOCK]
        end = self.windows.full(seq.num_prompt_tokens - 1) if seq.retention.keep_s > 0 else 0
        kept = {i for i in places if table[i] in self._parting or self._is_read_at(i, end)}
        self.pool.release([table[i] for i in places if i in kept])
        self.pool.release([table[i] for i in places if i not in kept], evict_first=True)
        for index in places:
            table[index] = seq.block_ids[index] = NO_BLOCK
        if seq.num_missing > 1:
            self.grow(seq)

    def num_covered(self, seq: Sequence) -> int:
        """Positions, from the first, that the block table covers."""
        return self.windows.tokens(seq.num_covered)

    def expect(self, seq: Sequence, end: int) -> bool:
        """Lay out the table of `seq`, which has just been admitted, so that blocks before `end` can
        be loaded and `seq` continue there. False, and nothing changed, if there are too few blocks.
        Needed with windows only: without one the table has these entries already."""
        num_computed = self.windows.tokens(end)
        old, needs = self._tables[seq], self.windows.needs(num_computed, len(seq.tokens))
        spare = [block for block in old[seq.num_sealed :] if block != NO_BLOCK]
        count = sum(needs[seq.num_sealed :])
        more = self.allocate(max(0, count - len(spare)), low=seq.is_low)
        if more is None:
            return False
        spare += more
        table = old[: seq.num_sealed]
        dropped = [block for block, needed in zip(table, needs, strict=False) if not needed]
        table = [b if needed else NO_BLOCK for b, needed in zip(table, needs, strict=False)]
        table += [spare.pop() if needed else NO_BLOCK for needed in needs[seq.num_sealed :]]
        self.pool.release(spare)  # blank, of whatever kind
        self.pool.release([block for block in dropped if block != NO_BLOCK])
        seq.slid_at = num_computed
        seq.num_covered = self.windows.end(num_computed, len(seq.tokens))
        self._set_table(seq, table)
        return True

    def can_go_on(self, seq: Sequence, end: int) -> bool:
        """Whether `seq` has all blocks that are read by positions from block `end` on."""
        kept = self.windows.kept(self.windows.tokens(end))
        return NO_BLOCK not in seq.block_ids[end : seq.num_covered] and all(
            seq.block_ids[index] != NO_BLOCK for index in kept
        )

    def seal_computed(self, seq: Sequence) -> None:
        """Seal the blocks that are full up to `num_computed`; none of KV of several weights."""
        if seq.next_chain is not None:
            return
        block_hashes, table, end = seq.block_hashes, self._tables[seq], seq.num_computed
        keep = self.collect_sealed and seq.retention.keep_s > 0
        for index in range(seq.num_sealed, self.windows.full(end)):
            block, block_hash = table[index], block_hashes[index]
            is_new = block != NO_BLOCK and self.pool.seal(block, block_hash)
            if is_new and keep and (not self._has_windows or self._is_collected(seq, index)):
                self.newly_sealed.append((block, block_hash, seq.retention))
            seq.num_sealed = index + 1
        if self._has_windows and seq.retention.keep_s > 0:
            self._pass_ends(seq, table)

    def release(self, seq: Sequence) -> None:
        """Free all blocks; nothing writes to them any more. Sealed ones stay cached, to be evicted
        first if the request's retention is 0."""
        table = self._tables.pop(seq, [])
        if self._has_windows and self.collect_sealed and seq.retention.keep_s > 0:
            self._collect_kept(seq, table, seq.num_sealed)
            self._pass_lag(seq)
        new = [block for block in table[seq.num_hits :] if block != NO_BLOCK]
        hits = [block for block in table[: seq.num_hits] if block != NO_BLOCK]
        if seq.retention.keep_s <= 0:  # but blocks that were cached before keep their order
            self.pool.release(new, evict_first=True)
            self.pool.release(hits)
        else:
            self.pool.release(hits + new)
        seq.block_ids = []
        if seq.next_chain is not None:
            seq.chain, seq.next_chain = seq.next_chain, None
        seq.num_sealed = 0
        seq.num_computed = 0
        seq.slid_at = seq.num_covered = seq.passed_at = seq.parts_at = 0

    def _is_free(self, seq: Sequence, count: int) -> bool:
        """Whether `seq` may have so many blocks. One of a low class may have as many as it needs,
        several may evict what others have left as far as the pool lets low classes."""
        if count > self.pool.num_free:
            return False
        if not seq.is_low or self.pool.has_free_low(count):
            return True
        return not any(o.is_low for o in self._tables if o is not seq)

    def allocate(self, count: int, *, low: bool = False) -> list[int] | None:
        """As `BlockPool.allocate`, for blocks that will be written: drops their checksums."""
        blocks = self.pool.allocate(count, low=low)
        for block in blocks or ():
            self.checksums.pop(block, None)
        if self._parting and blocks:
            self._parting.difference_update(blocks)
        return blocks

    def group_blocks(self) -> tuple[GroupBlocks, ...]:
        """What groups have of the pool, by kind, where there are several. Cost: O(num_blocks)."""
        pool, kinds = self.pool, sorted(set(self._kinds)) if len(self._kinds) > 1 else ()
        return tuple(
            GroupBlocks(
                GROUP_KINDS[kind],
                self._kinds.count(kind),
                pool.num_used_of(kind),
                pool.num_cached_of(kind),
                pool.evictions[kind],
            )
            for kind in kinds
        )

    def fault(self, seq: Sequence, start: int, count: int, *, thorough: bool) -> str | None:
        """Why computing `count` tokens of `seq` from position `start` on would write or read blocks
        that it must not; None if its block table is valid. Without `thorough`, only the blocks to
        be written are checked."""
        held, table, windows = self._tables[seq], seq.block_ids, self.windows
        if count == 1 and not self._has_windows and (not thorough or table == held):
            at = start // self.block_size  # a decode, as most are
            if at < len(held) and table[at] == held[at] and self.pool.is_private(held[at]):
                return None
        first, end = windows.full(start), windows.entries(start + count)
        if len(table) < end or len(held) < end:
            return f"the block table has {len(table)} entries, {end} are needed"
        for index in range(end) if thorough and table != held else range(first, end):
            if table[index] != held[index]:
                return (
                    f"block table entry {index} is {table[index]}, the sequence holds {held[index]}"
                )
        for block in held[first:end]:
            if block == NO_BLOCK or not self.pool.is_private(block):
                return f"block {block}, to be written, is not its own: it is sealed or shared"
        if thorough and NO_BLOCK in held[:first]:
            for index in range(first):
                if held[index] == NO_BLOCK and windows.keeps(index, start):
                    return f"block table entry {index}, which position {start} reads, is missing"
        return None

    def check_integrity(self, others: int = 0) -> None:
        """Assert the class invariant; `others`: references that no sequence holds."""
        self.pool.check_integrity()
        held = [block for table in self._tables.values() for block in table if block != NO_BLOCK]
        assert len(held) + others == self.pool.num_references, (len(held), others)
        for seq, table in self._tables.items():
            assert table == seq.block_ids, seq.request_id

    def _set_table(self, seq: Sequence, table: list[int]) -> None:
        self._tables[seq] = table
        seq.block_ids = list(table)
        if self.pool.kinds:
            self._set_kinds(table, first=0)

    def _set_kinds(self, table: list[int], first: int) -> None:
        for index in range(first, len(table)):
            if table[index] != NO_BLOCK:
                self.pool.kinds[table[index]] = self._kinds[index % len(self._kinds)]

    def _cached(self, seq: Sequence) -> list[int]:
        """The beginning of a table: cached blocks, NO_BLOCK where none is needed."""
        block_hashes, pool, windows = self.usable_hashes(seq), self.pool, self.windows
        if not self._has_windows:
            return pool.lookup(block_hashes)
        if seq.is_remote:  # it is continued at its end only
            kept = windows.kept_of(0, len(block_hashes), len(seq.tokens))
            found = len(pool.lookup([block_hashes[index] for index in kept]))
            end = len(block_hashes) if found == len(kept) else kept[found]
            end -= end % windows.count
            kept = [index for index in kept if index < end]
        else:
            end = self.num_cached(seq)
            kept = windows.kept(windows.tokens(end))
        table = [NO_BLOCK] * end
        for index, block in zip(kept, pool.lookup([block_hashes[i] for i in kept]), strict=True):
            table[index] = block
        return table

    def _is_collected(self, seq: Sequence, index: int) -> bool:
        """Whether a block that was just sealed goes to the lower tiers at once. While `seq` decodes
        those of windows do, and leave them when no window is left that has them; and states once in
        so many rows that they take no more than what layers keep of all tokens."""
        row, group = divmod(index, self.windows.count)
        window, stride = self.windows.groups[group], self._strides[group]
        if not window.size:
            return True
        if row < self._decoded_from(seq) or row % stride or not self.collect_decoded:
            return False
        start = window.start((row + 1) * self.block_size)
        self._pass(seq, group, start - stride * (1 + -(-COPY_LAG // stride)))
        return True

    def _decoded_from(self, seq: Sequence) -> int:
        return self.windows.full(seq.num_prompt_tokens - 1) // self.windows.count

    def _pass(self, seq: Sequence, group: int, row: int) -> None:
        """No longer copied for takeovers."""
        if row >= max(self._decoded_from(seq), self.windows.groups[group].num_sink_blocks):
            self.newly_passed.append(seq.block_hashes[row * self.windows.count + group])

    def _pass_lag(self, seq: Sequence) -> None:
        """What was left below for copies that might be late, of a sequence that has ended."""
        if not self.collect_decoded:
            return
        rows = seq.num_sealed // self.windows.count
        for group, window in enumerate(self.windows.groups):
            if window.size:
                start = window.start(rows * self.block_size)
                for row in range(start - 2 * max(COPY_LAG, self._strides[group]), start):
                    self._pass(seq, group, row)

    def _is_read_at(self, index: int, end: int) -> bool:
        """Whether a request that continues at entry `end` reads entry `index`."""
        return index < end and self.windows.keeps(index, self.windows.tokens(end))

    def _pass_ends(self, seq: Sequence, table: list[int]) -> None:
        """See to the places where others may part from `seq`, as far as it has been computed."""
        windows = self.windows
        parting = {windows.full(seq.chain.num_public_tokens), seq.parts_at}
        for end in sorted(parting | {windows.full(seq.num_prompt_tokens - 1)}):
            if not seq.passed_at < end <= seq.num_sealed:
                continue
            seq.passed_at = end
            if end in parting:
                kept = windows.kept(windows.tokens(end))
                sized = (index for index in kept if windows.groups[index % windows.count].size)
                self._parting.update(table[index] for index in sized if table[index] != NO_BLOCK)
            if self.collect_sealed:
                self._collect_kept(seq, table, end)

    def _collect_kept(self, seq: Sequence, table: list[int], end: int) -> None:
        """Blocks that a later request can continue with from entry `end` on are worth copying to
        the lower tiers; those of groups without a window are copied already."""
        block_hashes, windows = seq.block_hashes, self.windows
        for index in windows.kept(windows.tokens(end)):
            if not windows.groups[index % windows.count].size or table[index] == NO_BLOCK:
                continue
            if self.pool.has_hash(table[index], block_hashes[index]):
                self.newly_sealed.append((table[index], block_hashes[index], seq.retention))
