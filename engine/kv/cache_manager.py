"""Block tables of sequences over the block pool: prefix hits, allocation, sealing, checksums."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import inf
from typing import NamedTuple

from kvrelay.engine.kv.block_hash import GroupNames, first_of, group_hash
from kvrelay.engine.kv.block_pool import BlockPool
from kvrelay.engine.kv.block_table import NO_BLOCK, BlockTable, Part
from kvrelay.engine.kv.tier import Retention
from kvrelay.engine.kv.window import GROUP_KINDS, Windows
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.stats import GroupBlocks


class Lack(NamedTuple):
    """Why a sequence was not admitted."""

    num_blocks: int  # so many less than it needs were free; or it is low, and may not have them
    num_found: int  # entries of its table that are cached, or need not be
    num_idle: int  # cached blocks of it that nothing uses
    free_from: float  # when it may have them, if nothing changes


NO_LACK = Lack(0, 0, 0, inf)

COPY_LAG = 4  # rows that copies to the lower tiers may be behind what is decoded
COMPARED = 32  # rows of a table that is as it was, in each step


class _Held:
    """What the manager has given a sequence, and what it has found of the sequence's own table:
    `sound` is as `table`, as long as it has so many rewrites. Rows up to `compared` were looked at
    again meanwhile. As long as parts begin at `firsts`, `written` are the blocks of `rows`, and
    what is read in the row `windows_at` is there."""

    __slots__ = (
        "compared",
        "firsts",
        "num_rewrites",
        "rows",
        "sound",
        "table",
        "windows_at",
        "written",
    )

    def __init__(self, table: BlockTable, sound: BlockTable) -> None:
        self.table, self.sound = table, sound
        self.num_rewrites = self.compared = 0
        self.rows, self.written = (0, 0), list[int]()
        self.windows_at, self.firsts = -1, list[int]()

    def is_whole(self, first: int, end: int) -> bool:
        """Whether it has all rows `[first, end)`; they are `rows` from then on."""
        table = self.table
        firsts = [part.first for part in table.parts]
        most = (end - first) * table.num_groups
        if self.rows != (first, end) or self.firsts != firsts or len(self.written) != most:
            self.rows, self.firsts, self.windows_at = (first, end), firsts, -1
            self.written = table.rows(first, end)
        return len(self.written) == most


class KVCacheManager:
    """Allocates and frees the blocks of sequences.

    Invariant: the pool's reference counts are those of the block tables of the live sequences in
    `_held`; `block_ids` of a sequence is its own copy of its table. Every checksum belongs to a
    block whose bytes have not changed since it was taken.

    What a step costs here is in proportion to the rows that it adds, and what a prompt costs to the
    blocks that it reads: of a window those at its end (docs/adr/0083).

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
        self.lack = NO_LACK  # what the last sequence that was not admitted lacked
        self._held: dict[Sequence, _Held] = {}
        self._parting: set[int] = set()
        # Where sequences have left windows: the first group's block before it, and rows up to it.
        self._left_at: dict[bytes, int] = {}
        self._has_windows = self.windows.any
        self._whole = [n for n, (window, _) in enumerate(self.windows.parts) if not window.size]
        self._kinds = [GROUP_KINDS.index(window.kind) for window in self.windows.groups]
        num_states, num_whole = self._kinds.count(2), max(1, self._kinds.count(0))
        self._strides = [(0, 1, max(1, num_states // num_whole))[kind] for kind in self._kinds]
        if len(self._kinds) > 1:
            self.pool.kinds = bytearray(num_blocks)

    def usable_hashes(self, seq: Sequence) -> Seq[bytes]:
        """Hashes of the blocks that a prefix hit may cover."""
        return first_of(seq.block_hashes, self.num_usable(seq))

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
            return self.pool.num_found(block_hashes)
        rows = len(block_hashes) // self.windows.count
        for window, groups in self.windows.parts:
            if not window.size:
                names = _names_of(block_hashes, groups, range(rows))
                rows = self.pool.num_found(names) // len(groups)
        return self.windows.reach(
            rows * self.windows.count,
            lambda index: self.pool.is_cached(block_hashes[index]),
            known=rows,
        )

    @property
    def num_low(self) -> int:
        """Sequences of low classes that have blocks."""
        return sum(seq.is_low for seq in self._held)

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
        windows, low = self.windows, seq.is_low
        end, goal, table = self._cached(seq)
        is_one = len(table.parts) == 1 and not table.parts[0].first
        hits = table.parts[0].blocks if is_one else table.blocks()  # until it gets others
        num_free = self.pool.num_free
        self.pool.acquire(hits)
        num_idle = num_free - self.pool.num_free
        covered = max(end, windows.end(goal, len(seq.tokens)))
        whole = windows.entries(len(seq.tokens))
        needs = self._needs(table, covered, whole)
        count = sum(needs)
        fresh = self.allocate(count, low=low) if self._is_free(seq, count + headroom) else None
        if fresh is None:
            count, num_freed = count + headroom, self.pool.num_freed
            free_from = self.pool.low_free_from(count) if low else inf
            self.lack = Lack(count - self.pool.num_free, end, num_idle, free_from)
            self.pool.release(hits)  # they are evicted later, but nothing has become free
            self.pool.num_freed = num_freed
            return False
        if not low:
            self.pool.claim(hits)
        seq.num_hits = seq.num_sealed = end
        seq.num_computed = windows.tokens(end)
        seq.slid_at, seq.num_covered = goal, covered
        self._fill([table], needs, fresh)
        self._hold(seq, table)
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

        first, count = windows.full(seq.num_computed), windows.count
        known, has_whole = first // count, any(not window.size for window, _ in windows.parts)
        if has_whole and (whole := windows.whole(len(names), has, known)) > first:
            seq.parts_at = whole
            if (cause := windows.lacking(whole, has)) and not seq.has_own_kv:
                seq.recomputed = {cause: windows.tokens(whole - first)}
        self._pass_earlier(seq, known)

    def _pass_earlier(self, seq: Sequence, num_rows: int) -> None:
        """Windows that were left in its first rows are evicted first, the first of them last."""
        windows, names = self.windows, seq.block_hashes
        end = windows.full(seq.num_prompt_tokens - 1)
        chain, rows_of = seq.chain.block_hashes, self._left_at
        if len(rows_of) < num_rows:
            found = sorted(
                r for name, r in rows_of.items() if r <= num_rows and chain[r - 1] == name
            )
        else:
            found = [r for name in chain[:num_rows] if (r := rows_of.get(name, 0))]
        for rows in reversed(found):
            past = [i for i in self._window_entries(rows) if not self._is_read_at(i, end)]
            self.pool.demote((names[index] for index in reversed(past)), self._parting)
            if rows < num_rows:
                del self._left_at[chain[rows - 1]]

    def grow(self, seq: Sequence, num_unknown: int = 0) -> bool:
        """Allocate blocks up to the end of `seq.tokens` and of `num_unknown` more, or with windows
        for the next ones. False if the pool has no block left."""
        num_tokens, covered = len(seq.tokens) + num_unknown, seq.num_covered
        if num_tokens <= self.windows.tokens(covered):
            return True
        end = self.windows.end(seq.num_computed, num_tokens)
        if end <= covered:
            return True
        table = self._held[seq].table
        needs = self._needs(table, end, end)
        count = sum(needs)
        fresh = self.allocate(count, low=seq.is_low) if self._is_free(seq, count) else None
        if fresh is None:
            return False
        self._fill([table, seq.block_ids], needs, fresh)
        seq.num_covered = end
        return True

    def slide(self, seq: Sequence) -> None:
        """Free the blocks that no later position of `seq` reads, and allocate as many for the next
        tokens of a prompt: otherwise other sequences would be admitted in their place, and be
        preempted for it."""
        windows, size = self.windows, self.block_size
        if not self._has_windows or seq.slid_at // size == seq.num_computed // size:
            return
        seq.slid_at = seq.num_computed
        end = windows.full(seq.num_prompt_tokens - 1) if seq.retention.keep_s > 0 else 0
        kept: list[int] = []
        others: list[int] = []
        table, own = self._held[seq].table, seq.block_ids
        for number, (window, groups) in enumerate(windows.parts):
            start, first = window.start(seq.num_computed), table.parts[number].first
            if start <= (first := max(first, window.num_sink_blocks)):
                continue
            own.lose(number, start, window.num_sink_blocks)
            gone = table.lose(number, start, window.num_sink_blocks)
            for at, block in enumerate(gone):
                index = (first + at // len(groups)) * windows.count + groups[0]
                is_kept = block in self._parting or self._is_read_at(index, end)
                (kept if is_kept else others).append(block)
        self.pool.release(kept)
        self.pool.release(others, evict_first=True)
        if seq.num_missing > 1:
            self.grow(seq)

    def num_covered(self, seq: Sequence) -> int:
        """Positions, from the first, that the block table covers."""
        return self.windows.tokens(seq.num_covered)

    def expect(self, seq: Sequence, end: int) -> bool:
        """Lay out the table of `seq`, which has just been admitted, so that blocks before `end` can
        be loaded and `seq` continue there. False, and nothing changed, if there are too few blocks.
        Needed with windows only: without one the table has these entries already."""
        windows, old = self.windows, self._held[seq].table
        goal, sealed = windows.tokens(end), seq.num_sealed // windows.count
        table, dropped = BlockTable(self._parts(goal)), list[int]()
        for part, before in zip(table.parts, old.parts, strict=True):
            kept = before.rows(part.first, sealed) if part.first else before.rows(0, sealed)
            part.add(before.rows(0, min(part.num_sinks, sealed)) + kept)
            first = min(part.first, sealed)
            dropped += before.rows(part.num_sinks, first) if first > part.num_sinks else []
        covered = windows.end(goal, len(seq.tokens))
        needs = self._needs(table, covered, windows.entries(len(seq.tokens)))
        spare = old.blocks(sealed)
        more = self.allocate(max(0, sum(needs) - len(spare)), low=seq.is_low)
        if more is None:
            return False
        spare += more
        self._fill([table], needs, [spare.pop() for _ in range(sum(needs))])
        self.pool.release(spare)  # blank, of whatever kind
        self.pool.release(dropped)
        seq.slid_at, seq.num_covered = goal, covered
        self._hold(seq, table)
        return True

    def can_go_on(self, seq: Sequence, end: int) -> bool:
        """Whether `seq` has all blocks that are read by positions from block `end` on."""
        windows, rows = self.windows, end // self.windows.count
        covered = range(rows, seq.num_covered // windows.count)
        return all(
            part.has(run)
            for (window, _), part in zip(windows.parts, seq.block_ids.parts, strict=True)
            for run in (*window.kept(rows, windows.tokens(end)), covered)
        )

    def seal_computed(self, seq: Sequence) -> None:
        """Seal the blocks that are full up to `num_computed`; none of KV of several weights."""
        if seq.next_chain is not None:
            return
        windows, names, table = self.windows, seq.chain.extend(seq.tokens), self._held[seq].table
        first, count, row, name_of_row = seq.num_sealed, windows.count, -1, b""
        keep = self.collect_sealed and seq.retention.keep_s > 0
        end = max(first, windows.full(seq.num_computed))
        for index, block in table.entries(first // count, end // count):
            if index // count != row:
                row = index // count
                name_of_row = names[row]
            name = group_hash(name_of_row, group) if (group := index - row * count) else name_of_row
            is_new = self.pool.seal(block, name)
            if is_new and keep and (not self._has_windows or self._is_collected(seq, index)):
                self.newly_sealed.append((block, name, seq.retention))
        seq.num_sealed = end
        if self._has_windows and seq.retention.keep_s > 0:
            self._pass_ends(seq, table)

    def release(self, seq: Sequence) -> None:
        """Free all blocks; nothing writes to them any more. Sealed ones stay cached, to be evicted
        first if the request's retention is 0."""
        held = self._held.pop(seq, None)
        table, rows = held.table if held else BlockTable(), seq.num_sealed // self.windows.count
        if self._has_windows and rows and seq.retention.keep_s > 0:
            self._left(seq.chain.block_hashes[rows - 1], rows)
            if self.collect_sealed:
                self._collect_kept(seq, table, seq.num_sealed)
                self._pass_lag(seq)
        num_hits = seq.num_hits // self.windows.count
        if seq.retention.keep_s <= 0:  # but blocks that were cached before keep their order
            self.pool.release(table.blocks(num_hits), evict_first=True)
            self.pool.release(table.blocks(0, num_hits))
        else:
            for blocks, is_prefix in reversed([*table.stretches(self._whole)]):
                self.pool.release(blocks, is_prefix=is_prefix)
        seq.block_ids = BlockTable()
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
        return not any(o.is_low for o in self._held if o is not seq)

    def allocate(self, count: int, *, low: bool = False) -> list[int] | None:
        """As `BlockPool.allocate`, for blocks that will be written: drops their checksums."""
        blocks = self.pool.allocate(count, low=low)
        for block in blocks or ():
            self.checksums.pop(block, None)
        if self._parting and blocks:
            self._parting.difference_update(blocks)
        return blocks

    def group_blocks(self) -> tuple[GroupBlocks, ...]:
        """What groups have of the pool, by kind, where there are several."""
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
        known, table = self._held[seq], seq.block_ids
        held, first = known.table, start // self.block_size
        end = -(-(start + count) // self.block_size)
        looked_at = range(first, end)
        is_whole, written = known.is_whole(first, end), known.written
        if is_whole and table.rows(first, end) == written:
            looked_at = range(0)
            if thorough and table is known.sound and table.num_rewrites == known.num_rewrites:
                at = known.compared if known.compared < end else 0
                known.compared = stop = min(at + COMPARED, end)
                if table.rows(at, stop) != held.rows(at, stop) or stop > held.num_rows:
                    looked_at = range(at, stop)
            elif thorough:
                looked_at = range(end)
        if looked_at and (why := _difference(held, table, looked_at)):
            return why
        if thorough:
            known.sound, known.num_rewrites = table, table.num_rewrites
        if not is_whole or not self.pool.are_private(written):
            wrong = (block for block in written if not self.pool.are_private([block]))
            block = next(wrong, NO_BLOCK)
            return f"block {block}, to be written, is not its own: it is sealed or shared"
        if thorough and self._has_windows:
            return self._missing(known, first, start)
        return None

    def _missing(self, known: _Held, row: int, start: int) -> str | None:
        """What position `start`, which is in `row`, reads and a table lacks; None: it has all."""
        windows = self.windows
        if known.windows_at == row:
            return None
        for (window, groups), part in zip(windows.parts, known.table.parts, strict=True):
            for run in window.kept(row, start) if window.size else ():
                if not part.has(run):
                    index = run.start * windows.count + groups[0]
                    return f"block table entry {index}, which position {start} reads, is missing"
        known.windows_at = row
        return None

    def check_integrity(self, others: int = 0) -> None:
        """Assert the class invariant; `others`: references that no sequence holds."""
        self.pool.check_integrity()
        num_held = sum(held.table.num_held for held in self._held.values())
        assert num_held + others == self.pool.num_references, (num_held, others)
        for seq, held in self._held.items():
            assert held.table == seq.block_ids, seq.request_id

    def _hold(self, seq: Sequence, table: BlockTable) -> None:
        seq.block_ids = table.copy()
        self._held[seq] = _Held(table, seq.block_ids)

    def _parts(self, num_computed: int) -> list[Part]:
        """Makes those of an empty table whose sequence goes on after `num_computed` positions."""
        parts: list[Part] = []
        for window, groups in self.windows.parts:
            start, num_sinks = window.start(num_computed), window.num_sink_blocks
            parts.append(Part(groups, start, num_sinks) if start > num_sinks else Part(groups))
        return parts

    def _needs(self, table: BlockTable, end: int, whole: int) -> list[int]:
        """Blocks that its parts lack of the entries before `end`; those without a window, before
        `whole`."""
        count = self.windows.count
        return [
            part.num_missing((end if window.size else whole) // count)
            for (window, _), part in zip(self.windows.parts, table.parts, strict=True)
        ]

    def _fill(self, tables: list[BlockTable], needs: list[int], blocks: list[int]) -> None:
        """As many more to each part as it needs."""
        at = 0
        for number, need in enumerate(needs):
            more, kind = blocks[at : at + need], self._kinds[tables[0].parts[number].groups[0]]
            at += need
            for table in tables:
                table.parts[number].add(more)
            self.pool.set_kind(more, kind)

    def _cached(self, seq: Sequence) -> tuple[int, int, BlockTable]:
        """How many entries are cached; after how many positions `seq` goes on; and the beginning of
        its table, with those that it needs for that."""
        names, pool, windows = self.usable_hashes(seq), self.pool, self.windows
        if not self._has_windows:
            table = BlockTable(self._parts(0))
            table.parts[0].blocks = pool.lookup(names)
            rows = len(table.parts[0].blocks) // windows.count
            del table.parts[0].blocks[rows * windows.count :]
            return rows * windows.count, rows * self.block_size, table
        rows = (len(names) if seq.is_remote else self.num_cached(seq)) // windows.count
        goal = len(seq.tokens) if seq.is_remote else rows * self.block_size
        end, table = rows, BlockTable(self._parts(goal))
        found: list[list[tuple[range, list[int]]]] = []
        for window, groups in windows.parts:
            runs = [run for run in window.kept(rows, goal) if run]
            found.append([(run, pool.lookup(_names_of(names, groups, run))) for run in runs])
            for run, blocks in found[-1]:  # a remote one is continued at its end only
                if len(blocks) < len(run) * len(groups):
                    end = min(end, run.start + len(blocks) // len(groups))
        for part, parts in zip(table.parts, found, strict=True):
            for run, blocks in parts:
                part.add(blocks[: max(0, end - run.start) * len(part.groups)])
        return end * windows.count, goal, table

    def _window_entries(self, num_rows: int) -> list[int]:
        """Those of groups with a window that are read again after so many rows."""
        count, num_computed = self.windows.count, num_rows * self.block_size
        return sorted(
            row * count + group
            for window, groups in self.windows.parts
            if window.size
            for run in window.kept(num_rows, num_computed)
            for row in run
            for group in groups
        )

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
        rows, decoded_from = seq.num_sealed // self.windows.count, self._decoded_from(seq)
        for group, window in enumerate(self.windows.groups):
            if window.size:
                start = window.start(rows * self.block_size)
                first = start - 2 * max(COPY_LAG, self._strides[group])
                for row in range(max(first, decoded_from), start):
                    self._pass(seq, group, row)

    def _is_read_at(self, index: int, end: int) -> bool:
        """Whether a request that continues at entry `end` reads entry `index`."""
        return index < end and self.windows.keeps(index, self.windows.tokens(end))

    def _pass_ends(self, seq: Sequence, table: BlockTable) -> None:
        """See to the places where others may part from `seq`, as far as it has been computed."""
        windows, block_hashes = self.windows, seq.chain.block_hashes
        parting = {windows.full(seq.chain.num_public_tokens), seq.parts_at}
        for end in sorted(parting | {windows.full(seq.num_prompt_tokens - 1)}):
            if not seq.passed_at < end <= seq.num_sealed:
                continue
            seq.passed_at = end
            self._left(block_hashes[end // windows.count - 1], end // windows.count)
            if end in parting:
                entries = map(table.__getitem__, self._window_entries(end // windows.count))
                self._parting.update(block for block in entries if block != NO_BLOCK)
            if self.collect_sealed:
                self._collect_kept(seq, table, end)

    def _collect_kept(self, seq: Sequence, table: BlockTable, end: int) -> None:
        """Blocks that a later request can continue with from entry `end` on are worth copying to
        the lower tiers; those of groups without a window are copied already."""
        block_hashes = seq.block_hashes
        for index in self._window_entries(end // self.windows.count):
            block = table[index]
            if block != NO_BLOCK and self.pool.has_hash(block, block_hashes[index]):
                self.newly_sealed.append((block, block_hashes[index], seq.retention))

    def _left(self, name: bytes, num_rows: int) -> None:
        """A window stays behind the block of that name, of the last of so many rows."""
        self._left_at[name] = num_rows
        if len(self._left_at) > self.pool.num_blocks:
            del self._left_at[next(iter(self._left_at))]


def _names_of(block_hashes: Seq[bytes], groups: Seq[int], rows: range) -> Seq[bytes]:
    if isinstance(block_hashes, GroupNames):
        if len(groups) == 1 and not rows.start:
            return block_hashes.of_one(groups[0], rows.stop)
        return block_hashes.of_groups(groups, rows)
    return block_hashes[rows.start : rows.stop]


def _difference(held: BlockTable, table: BlockTable, rows: range) -> str:
    """How a sequence's own table differs from what it holds; "": not in these rows."""
    first, end, count = rows.start, rows.stop, held.num_groups
    if table.rows(first, end) == held.rows(first, end) and end <= held.num_rows:
        return ""
    if table.num_rows < end or held.num_rows < end:
        return f"the block table has {len(table)} entries, {end * count} are needed"
    both = zip(held[first * count : end * count], table[first * count : end * count], strict=True)
    for index, (right, wrong) in enumerate(both, start=first * count):
        if right != wrong:
            return f"block table entry {index} is {wrong}, the sequence holds {right}"
    return f"the block table has other groups in rows {first} to {end} than the sequence"
