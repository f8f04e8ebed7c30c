"""Which blocks of a sequence are read again, where layers attend to a window of positions.

A query at position p reads (p - window, p], and the attention sinks [0, num_sinks). So blocks
between the sinks and the window of the next position are never read again: they are freed, and
their entries in the block table become -1. Where every layer has a window, the blocks of a sequence
are bounded at any length.

Layers that attend to different windows are different groups. A block holds the KV of `block_size`
tokens in the layers of one group, so these tokens have one block of each group: a row. Blocks of
all groups have the same bytes and come from one pool, which the groups share as requests need them
(docs/adr/0045). A block table has its rows one after the other: entry `i` is of row `i // count`
and of group `i % count`. With one group, as most models have, entries and rows are the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvrelay.engine.kv.spec import STATE_WINDOW

GROUP_KINDS = ("full", "window", "state")  # what is read of a group's tokens: all, the last, a sum


@dataclass(frozen=True, slots=True)
class Window:
    """Arithmetic over the rows of one group. Without a size everything is read again."""

    block_size: int
    size: int = 0  # positions that a query reads, its own among them; 0: all
    num_sinks: int = 0
    chunk_blocks: int = 1  # allocated ahead of a prompt's computed ones, at least

    @property
    def kind(self) -> str:
        """By what a later query reads: see GROUP_KINDS."""
        return GROUP_KINDS[0 if not self.size else 2 if self.size == STATE_WINDOW else 1]

    @property
    def num_sink_blocks(self) -> int:
        return -(-self.num_sinks // self.block_size) if self.size else 0

    @property
    def num_blocks(self) -> int:
        """Blocks that a decode holds at most: sinks, window, and the block of its end."""
        return self.num_sink_blocks - (1 - self.size) // self.block_size + 1

    def max_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most, at any time."""
        count = -(-num_tokens // self.block_size)
        return min(count, self.num_blocks + self.chunk_blocks) if self.size else count

    def end(self, num_computed: int, num_tokens: int) -> int:
        """Rows that a block table needs: of a prompt, up to its next chunks."""
        count = -(-num_tokens // self.block_size)
        if not self.size:
            return count
        ahead = self.num_blocks - self.num_sink_blocks + self.chunk_blocks
        return min(count, self.start(num_computed) + ahead)

    def start(self, num_computed: int) -> int:
        """The first row, except sinks, that is read again after `num_computed` positions.

        Counted from the last full block, so that a later request can continue at its end, too."""
        if not self.size:
            return 0
        return max(0, num_computed // self.block_size * self.block_size - self.size + 1) // (
            self.block_size
        )

    def keeps(self, index: int, num_computed: int) -> bool:
        """Whether row `index` is read again after `num_computed` positions."""
        return index < self.num_sink_blocks or index >= self.start(num_computed)

    def kept(self, num_rows: int, num_computed: int) -> tuple[range, range]:
        """Those of the first `num_rows` rows that are read again after `num_computed` positions:
        sinks, where there are others behind them, and the rest."""
        start, sinks = self.start(num_computed), self.num_sink_blocks
        if start <= sinks:
            return range(0), range(num_rows)
        return range(min(sinks, num_rows)), range(start, max(start, num_rows))


@dataclass(frozen=True, slots=True)
class Windows:
    """Arithmetic over the entries of a block table: the windows of all groups."""

    block_size: int
    groups: tuple[Window, ...]
    parts: tuple[tuple[Window, tuple[int, ...]], ...] = field(init=False)  # each, and its groups

    def __post_init__(self) -> None:
        alike = dict[Window, list[int]]()
        for group, window in enumerate(self.groups):
            alike.setdefault(window, []).append(group)
        parts = tuple((window, tuple(groups)) for window, groups in alike.items())
        object.__setattr__(self, "parts", parts)

    @staticmethod
    def of(
        block_size: int, sizes: Sequence[int] = (0,), num_sinks: int = 0, chunk_blocks: int = 1
    ) -> Windows:
        """`sizes`, one for each group, and the others as in `Window`."""
        each = (Window(block_size, size, num_sinks if size else 0, chunk_blocks) for size in sizes)
        return Windows(block_size, tuple(each))

    @staticmethod
    def within(
        num_blocks: int,
        block_size: int,
        sizes: Sequence[int],
        *,
        num_sinks: int = 0,
        max_model_len: int,
        ahead: int,
    ) -> Windows:
        """For a pool of `num_blocks`: a prompt has blocks for the next `ahead` tokens if the pool
        has room for that beside a sequence of `max_model_len`, and for one block at least."""
        bounds = [each.num_blocks for each in Windows.of(block_size, sizes, num_sinks).groups]
        num_sized = sum(map(bool, sizes)) or 1
        whole = -(-max_model_len // block_size) * (len(sizes) - num_sized)
        room = min(num_blocks // 4, num_blocks - whole - sum(bounds)) // num_sized
        chunk = max(1, min(-(-ahead // block_size), room))
        return Windows.of(block_size, sizes, num_sinks, chunk)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a prompt, from its last full block on, that a step may compute at most; 0: any
        number."""
        sized = [window.chunk_blocks for window in self.groups if window.size]
        return min(sized, default=0) * self.block_size

    @property
    def count(self) -> int:
        return len(self.groups)

    @property
    def any(self) -> bool:
        """Whether any layer attends to a window."""
        return any(window.size for window in self.groups)

    def entries(self, num_tokens: int) -> int:
        """How many entries cover `num_tokens` positions."""
        return -(-num_tokens // self.block_size) * len(self.groups)

    def full(self, num_tokens: int) -> int:
        """How many entries have the full blocks of `num_tokens` positions."""
        return num_tokens // self.block_size * len(self.groups)

    def tokens(self, num_entries: int) -> int:
        """Positions that this many entries cover in all groups."""
        return num_entries // len(self.groups) * self.block_size

    def row(self, position: int) -> slice:
        """The entries of the blocks that `position` is in."""
        first = self.full(position)
        return slice(first, first + len(self.groups))

    def max_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most, at any time."""
        return sum(window.max_blocks(num_tokens) for window in self.groups)

    def most_tokens(self, num_blocks: int) -> int | None:
        """Length of the longest sequence that `num_blocks` hold; None: any."""
        bounds = [window.num_blocks + window.chunk_blocks for window in self.groups if window.size]
        if len(bounds) == len(self.groups) and sum(bounds) <= num_blocks:
            return None
        rows = range(num_blocks + 1)
        longest = bisect_right(rows, num_blocks, key=lambda n: self.max_blocks(n * self.block_size))
        return (longest - 1) * self.block_size

    def end(self, num_computed: int, num_tokens: int) -> int:
        """Entries up to which a block table needs blocks: of a prompt, up to its next chunks."""
        rows = min(window.end(num_computed, num_tokens) for window, _ in self.parts)
        return rows * len(self.groups)

    def keeps(self, index: int, num_computed: int) -> bool:
        """Whether block `index` is read again after `num_computed` positions."""
        row, group = divmod(index, len(self.groups))
        return self.groups[group].keeps(row, num_computed)

    def kept(self, num_computed: int) -> list[int]:
        """The full blocks that are read again after `num_computed` positions."""
        return self.kept_of(0, self.full(num_computed), num_computed)

    def kept_of(self, first: int, end: int, num_computed: int) -> list[int]:
        """Those of entries `[first, end)` that are read again after `num_computed` positions."""
        if not self.any:
            return list(range(first, end))
        count = len(self.groups)
        kept = [
            row * count + group
            for rows, groups in self._segments(first // count, -(-end // count), num_computed)
            for row in rows
            for group in groups
        ]
        if first % count or end % count:
            kept = [index for index in kept if first <= index < end]
        return kept

    def _segments(
        self, first: int, end: int, num_computed: int
    ) -> Iterator[tuple[range, list[int]]]:
        """Rows `[first, end)` cut where windows begin and sinks end, each with the groups that read
        it again after `num_computed` positions."""
        kept = [(window.kept(end, num_computed), groups) for window, groups in self.parts]
        bounds = {bound for runs, _ in kept for run in runs for bound in (run.start, run.stop)}
        inside = sorted({first, end} | {bound for bound in bounds if first < bound < end})
        for a, b in pairwise(inside):
            read = [groups for runs, groups in kept if any(a in run for run in runs)]
            yield range(a, b), sorted(group for groups in read for group in groups)

    def runs(self, first: int, end: int, num_computed: int) -> list[range]:
        """Where those of entries `[first, end)` lie that are read again after `num_computed`
        positions: with one group in one or two runs or none, with several among others."""
        if len(self.groups) > 1:
            kept = self.kept_of(first, end, num_computed)
            return [range(kept[0], kept[-1] + 1)] if kept else []
        rows = self.groups[0].kept(end, num_computed)
        runs = (range(max(first, run.start), run.stop) for run in rows)
        return [run for run in runs if run]

    def whole(self, num_entries: int, has: Callable[[int], bool], known: int = 0) -> int:
        """Length in entries of the longest prefix of `num_entries` entries that could be continued
        if all windows were there. known: rows that groups without a window have."""
        count = len(self.groups)
        rows = num_entries // count
        for window, groups in self.parts:
            sinks = min(window.num_sink_blocks, rows)
            for row in range(sinks) if window.size else range(known, rows):
                if not all(has(row * count + group) for group in groups):
                    rows = min(row, rows)
                    break
        return rows * count

    def lacking(self, num_entries: int, has: Callable[[int], bool]) -> str:
        """The kind of the last group whose window at the end of `num_entries` entries is not there;
        "": all are."""
        rows = num_entries // len(self.groups)
        for group in reversed(range(len(self.groups))):
            if self.groups[group].size and self._window_reach(group, rows, has) < rows:
                return self.groups[group].kind
        return ""

    def reach(self, num_entries: int, has: Callable[[int], bool], known: int = 0) -> int:
        """Length in entries of the longest prefix of `num_entries` entries that can be continued:
        all of its blocks are there, but for those that no later query reads. known: as of
        `whole`."""
        count = len(self.groups)
        rows = self.whole(num_entries, has, known) // count
        checked: dict[int, int] = {}  # group -> rows of which its window was found complete
        while True:
            before = rows
            for group, window in enumerate(self.groups):
                if window.size and checked.get(group) != rows:
                    rows = self._window_reach(group, rows, has)
                    checked[group] = rows
            if rows == before:
                return rows * count

    def _window_reach(self, group: int, num_rows: int, has: Callable[[int], bool]) -> int:
        window, count = self.groups[group], len(self.groups)
        end = row = num_rows
        while row > window.start(end * self.block_size):
            row -= 1
            if row >= window.num_sink_blocks and not has(row * count + group):
                end = row  # no longer prefix has this block outside of its window
        return end
