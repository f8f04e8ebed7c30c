"""Which blocks of a sequence are read again, where every layer attends to a window of positions.

A query at position p reads (p - window, p], and the attention sinks [0, num_sinks). So blocks
between the sinks and the window of the next position are never read again: they are freed, their
entries in the block table become -1, and the blocks of a sequence are bounded at any length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Arithmetic over the indices of a block table. Without a size everything is read again."""

    block_size: int
    size: int = 0  # positions that a query reads, its own among them; 0: all
    num_sinks: int = 0
    chunk_blocks: int = 1  # allocated ahead of a prompt's computed ones, at least

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
        """Entries that a block table needs: of a prompt, up to its next chunks."""
        count = -(-num_tokens // self.block_size)
        if not self.size:
            return count
        ahead = self.num_blocks - self.num_sink_blocks + self.chunk_blocks
        return min(count, self.start(num_computed) + ahead)

    def start(self, num_computed: int) -> int:
        """The first block, except sinks, that is read again after `num_computed` positions.

        Counted from the last full block, so that a later request can continue at its end, too."""
        if not self.size:
            return 0
        return max(0, num_computed // self.block_size * self.block_size - self.size + 1) // (
            self.block_size
        )

    def keeps(self, index: int, num_computed: int) -> bool:
        """Whether block `index` is read again after `num_computed` positions."""
        return index < self.num_sink_blocks or index >= self.start(num_computed)

    def kept(self, num_computed: int) -> list[int]:
        """The full blocks that are read again after `num_computed` positions."""
        start = self.start(num_computed)
        sinks = range(min(self.num_sink_blocks, start))
        return [*sinks, *range(start, num_computed // self.block_size)]

    def runs(self, first: int, end: int, num_computed: int) -> list[range]:
        """Those of blocks `[first, end)` that are read again after `num_computed` positions: none,
        one or two runs."""
        start = self.start(num_computed)
        parts = [range(first, min(end, self.num_sink_blocks)), range(max(first, start), end)]
        if start <= self.num_sink_blocks:
            parts = [range(first, end)]
        return [part for part in parts if part]

    def reach(self, num_blocks: int, has: Callable[[int], bool]) -> int:
        """Length in blocks of the longest prefix of `num_blocks` blocks that can be continued: all
        of its blocks are there, except that those between sinks and window may be missing."""
        for index in range(min(self.num_sink_blocks, num_blocks) if self.size else num_blocks):
            if not has(index):
                return index
        if not self.size:
            return num_blocks
        end = index = num_blocks
        while index > self.start(end * self.block_size):
            index -= 1
            if index >= self.num_sink_blocks and not has(index):
                end = index  # no longer prefix has this block outside of its window
        return end
