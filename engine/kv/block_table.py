"""The block table of a sequence: which block has the KV of which tokens, in which group of layers.

Seen from outside it is a list of entries, row by row (`engine.kv.window`): -1 where a group keeps
no block. Inside, groups that attend to the same window are one part, since they keep the same rows:
the sinks, and one run that grows at its end and, with a window, loses its beginning. So a table
costs what it has: a group of states two blocks, however many rows there are.

What is known of a table stays true while it only grows and loses rows; `num_rewrites` counts the
other changes. So whoever has looked at it looks at new rows alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import overload

NO_BLOCK = -1  # in place of an entry: freed, or never needed


class Part:
    """Blocks of the groups with one window: row by row, in the order of `groups`.

    Invariant: it has the rows `[0, num_sinks)`, which are in `sinks`, and `[first, end)`; as long
    as it has lost none, `first` and `num_sinks` are 0."""

    __slots__ = ("blocks", "first", "groups", "num_sinks", "sinks")

    def __init__(self, groups: Sequence[int], first: int = 0, num_sinks: int = 0) -> None:
        """num_sinks: rows; `add` fills them first."""
        self.groups = tuple(groups)
        self.first = first
        self.num_sinks = num_sinks
        self.sinks: list[int] = []
        self.blocks: list[int] = []

    @property
    def end(self) -> int:
        return self.first + len(self.blocks) // len(self.groups)

    def num_missing(self, end: int) -> int:
        """Blocks that it lacks of its rows before `end`."""
        width = len(self.groups)
        more = max(0, (end - self.first) * width - len(self.blocks))
        return self.num_sinks * width - len(self.sinks) + more

    def has(self, rows: range) -> bool:
        if rows.stop <= self.num_sinks or not rows:
            return True
        return self.first <= rows.start and rows.stop <= self.end

    def rows(self, first: int, end: int) -> list[int]:
        """Blocks that it has of rows `[first, end)`."""
        width, lost = len(self.groups), self.first
        if lost <= first and width == 1:  # as in most steps
            return self.blocks[first - lost : end - lost]
        if lost <= first:
            return self.blocks[(first - lost) * width : (end - lost) * width]
        found = self.blocks[: max(0, end - lost) * width]
        return self.sinks[first * width : end * width] + found if first < self.num_sinks else found

    def runs(self, first: int, end: int) -> Iterator[tuple[int, list[int]]]:
        """Those of rows `[first, end)` as a row and the blocks from there on."""
        width = len(self.groups)
        if first < self.num_sinks:
            yield first, self.sinks[first * width : end * width]
        first = max(first, self.first)
        if first < min(end, self.end):
            yield first, self.blocks[(first - self.first) * width : (end - self.first) * width]

    def add(self, blocks: list[int]) -> None:
        lacking = self.num_sinks * len(self.groups) - len(self.sinks)
        if lacking:
            self.sinks += blocks[:lacking]
            blocks = blocks[lacking:]
        self.blocks += blocks

    def between(self, first: int, end: int) -> Part:
        """What it has of rows `[first, end)`, as a part that loses the others."""
        lost = max(first, self.first)
        part = Part(self.groups, lost, self.num_sinks)
        part.sinks = [*self.sinks]
        part.blocks = self.rows(max(lost, self.num_sinks), end)
        return part


class BlockTable(Sequence[int]):
    """Written by the KV cache manager alone. Whatever else writes an entry counts as a rewrite."""

    __slots__ = ("num_groups", "num_rewrites", "parts")

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.parts = [*parts]
        self.num_groups = sum(len(part.groups) for part in self.parts)
        self.num_rewrites = 0

    @staticmethod
    def of(entries: Sequence[int], num_groups: int = 1) -> BlockTable:
        """A table of whole rows, whatever is in them."""
        part = Part(range(num_groups))
        part.blocks = [*entries]
        return BlockTable([part])

    @property
    def num_rows(self) -> int:
        if len(self.parts) == 1:
            return self.parts[0].end
        return max((part.end for part in self.parts), default=0)

    @property
    def num_held(self) -> int:
        """Entries that have a block."""
        return sum(len(part.sinks) + len(part.blocks) for part in self.parts)

    def copy(self) -> BlockTable:
        return self.between(0, self.num_rows)

    def between(self, first: int, end: int) -> BlockTable:
        """What it has of rows `[first, end)`, and sinks."""
        return BlockTable(part.between(first, end) for part in self.parts)

    def rows(self, first: int, end: int) -> list[int]:
        """Blocks of rows `[first, end)`, part by part."""
        found = self.parts[0].rows(first, end)
        if len(self.parts) > 1:
            for part in self.parts[1:]:
                found += part.rows(first, end)
        return found

    def segments(self, first: int, end: int) -> Iterator[tuple[range, list[Part]]]:
        """Rows `[first, end)` cut where parts begin and end, each with those that have it."""
        bounds = {first, end}
        for part in self.parts:
            bounds.update((part.num_sinks, part.first, part.end))
        for a, b in pairwise(sorted(bound for bound in bounds if first <= bound <= end)):
            rows = range(a, b)
            yield rows, [part for part in self.parts if part.has(rows)]

    def blocks(self, first: int = 0, end: int | None = None) -> list[int]:
        """Those of rows `[first, end)`, row by row."""
        end = self.num_rows if end is None else end
        if len(self.parts) == 1:
            return self.parts[0].rows(first, end)
        found: list[int] = []
        for rows, parts in self.segments(first, end):
            if len(parts) == 1:
                found += parts[0].rows(rows.start, rows.stop)
            else:
                for row in rows:
                    for part in parts:
                        found += part.rows(row, row + 1)
        return found

    def stretches(self, whole: Iterable[int]) -> Iterator[tuple[list[int], bool]]:
        """All blocks, row by row, in stretches, and whether one is of a prefix: where only one of
        the `whole` parts, those that keep all rows, has blocks. Not to be changed."""
        kept = [self.parts[number] for number in whole] if self.parts else []
        if len(self.parts) == 1 and kept:
            yield kept[0].blocks, True
            return
        for rows, parts in self.segments(0, self.num_rows):
            is_prefix = len(parts) == 1 and parts[0] in kept
            yield self.blocks(rows.start, rows.stop), is_prefix

    def entries(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Indices of those of rows `[first, end)`, and their blocks, row by row."""
        count = self.num_groups
        if len(self.parts) == 1:
            for row, blocks in self.parts[0].runs(first, end):
                yield from enumerate(blocks, row * count)
            return
        for rows, parts in self.segments(first, end):
            for row in rows:
                for part in parts:
                    at = row * count
                    blocks = part.rows(row, row + 1)
                    yield from zip([at + group for group in part.groups], blocks, strict=True)

    def lose(self, number: int, row: int, num_sinks: int) -> list[int]:
        """Rows before `row` of a part, except sinks; returns their blocks. The part is replaced, as
        another thread may read it."""
        part = self.parts[number]
        gone = part.rows(max(part.first, num_sinks), row)
        left = Part(part.groups, row, num_sinks)
        left.sinks, left.blocks = part.rows(0, num_sinks), part.rows(row, part.end)
        self.parts[number] = left
        return gone

    def __len__(self) -> int:
        return self.num_rows * self.num_groups

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if len(self.parts) == 1 and not self.parts[0].first:
            return self.parts[0].blocks[index]
        if isinstance(index, slice):
            indices = range(*index.indices(len(self)))
            if not indices:
                return []
            count, lowest = self.num_groups, min(indices[0], indices[-1])
            first = lowest // count
            entries = self._flat(first, max(indices[0], indices[-1]) // count + 1)
            return [entries[each - first * count] for each in indices]
        blocks, at = self._place(index)
        return NO_BLOCK if blocks is None else blocks[at]

    def __setitem__(self, index: int, block: int) -> None:
        blocks, at = self._place(index)
        if blocks is None:
            raise IndexError(f"the table has no block at entry {index}")
        blocks[at] = block
        self.num_rewrites += 1

    def __iter__(self) -> Iterator[int]:
        return iter(self._flat(0, self.num_rows))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (BlockTable, list)) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"BlockTable({[*self]})"

    def _place(self, index: int) -> tuple[list[int] | None, int]:
        """The list that an entry is in, and where; None: it has no block."""
        entry = index if index >= 0 else index + len(self)
        row, group = divmod(entry, self.num_groups) if self.parts else (0, 0)
        for part in self.parts if entry >= 0 else ():
            if group in part.groups:
                width, offset = len(part.groups), part.groups.index(group)
                if row < part.num_sinks:
                    return part.sinks, row * width + offset
                if part.first <= row < part.end:
                    return part.blocks, (row - part.first) * width + offset
        if not 0 <= entry < len(self):
            raise IndexError(f"entry {index} of a table of {len(self)}")
        return None, 0

    def _flat(self, first: int, end: int) -> list[int]:
        """The entries of rows `[first, end)`."""
        count = self.num_groups
        entries = [NO_BLOCK] * ((end - first) * count)
        for part in self.parts:
            width = len(part.groups)
            for row, blocks in part.runs(first, end):
                at = (row - first) * count
                stop = at + len(blocks) // width * count
                for offset, group in enumerate(part.groups):
                    entries[at + group : stop + group : count] = blocks[offset::width]
        return entries
