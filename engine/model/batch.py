"""A step as tensors: every sequence's tokens in one row, and where each of them lives.

Built once per step and read by every layer. Before that, `Guard` checks the step, request by
request: whatever a faulty scheduler could get wrong, a kernel would turn into a wild read or write,
and into wrong tokens of another request. A request whose block table is wrong is left out of the
step; the others run.

Tables are long and most steps change none, so the guard keeps them as arrays and looks at the rows
that are new to it. It counts in how many of them each block is, so that it sees without reading
them whether one that is written is in another. What rewrites a table, or goes back behind what is
read, has it looked at as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvrelay.engine.kv.block_table import NO_BLOCK, BlockTable
from kvrelay.engine.model.quest import PageReads
from kvrelay.engine.model.states import NO_STATE, StateSpans
from kvrelay.engine.model.terms import NOTHING_LOADED, RowTerms, TermRows, term_rows
from kvrelay.engine.step import ScheduledSeq, Step

if TYPE_CHECKING:
    from kvrelay.engine.model.vision.rows import ImageRows


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a valid step."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    window: int = 0  # the widest of the layers, if each has one; penalties count what is in it
    num_sinks: int = 0
    guard: bool = True  # before each step, block tables are also compared with each other
    group_windows: tuple[int, ...] = ()  # a window for each group of layers; (): `window`
    num_state_groups: int = 0  # the last ones, of recurrent layers

    @property
    def num_groups(self) -> int:
        return len(self.group_windows) or 1

    def entries(self, num_tokens: int) -> int:
        """Entries of a block table that has this many positions."""
        return -(-num_tokens // self.block_size) * self.num_groups

    @property
    def windows(self) -> dict[tuple[int, int], list[int]]:
        """The groups that read alike: (positions that a token reads, sinks' rows) -> groups. 0: all
        positions."""
        alike: dict[tuple[int, int], list[int]] = {}
        for group, size in enumerate(self.group_windows or (self.window,)):
            sinks = -(-self.num_sinks // self.block_size) if size else 0
            alike.setdefault((size, sinks), []).append(group)
        return alike


@dataclass(frozen=True, slots=True)
class Batch:
    """All tensors are on one device. S sequences, N tokens, R of them with logits."""

    tokens: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    slots: torch.Tensor  # [N] int64: block * block_size + offset
    query_start: torch.Tensor  # [S] int32: index of the sequence's first token in `tokens`
    query_len: torch.Tensor  # [S] int32
    context_len: torch.Tensor  # [S] int32: tokens up to and with the last one of the query
    # [S, widest] int32; 0 past a sequence's blocks, -1 before its window
    block_tables: torch.Tensor
    sample_rows: torch.Tensor  # [R] int64, ascending
    spans: tuple[tuple[int, int, int], ...]  # (query_start, query_len, context_len), on the host
    # `slots` [G, N] and `block_tables` [G, S, widest] of the layers in the G groups after the first
    more_slots: torch.Tensor | None = None
    more_tables: torch.Tensor | None = None
    states: tuple[StateSpans, ...] = ()  # for each group of recurrent layers
    terms: tuple[TermRows, ...] = ()  # the last rows, in order; the first have none
    images: ImageRows | None = None  # None: rows turn by their positions, and are tokens
    # [S] int32, of a pass whose draft tokens have rows of their own: how many rows recurrent layers
    # pass from this one on, 0 for a draft token's; they keep what they are given.
    passed: torch.Tensor | None = None
    pages: PageReads | None = None  # None: each row reads its whole context

    def slots_of(self, group: int) -> torch.Tensor:
        if group == 0:
            return self.slots
        assert self.more_slots is not None
        return self.more_slots[group - 1]

    def tables_of(self, group: int) -> torch.Tensor:
        if group == 0:
            return self.block_tables
        assert self.more_tables is not None
        return self.more_tables[group - 1]

    @staticmethod
    def from_step(
        step: Step,
        limits: Limits,
        device: torch.device,
        checked: Sequence[Table] | None = None,
        loaded: Mapping[bytes, RowTerms] = NOTHING_LOADED,
        *,
        with_states: bool = True,
    ) -> Batch:
        """`checked`: the sequences' block tables as `Guard.check` gives them; without, they and the
        tokens are checked here, but not with each other. `loaded`: what the sequences need, which
        are ordered by that (`by_need`). `with_states`: operations read `states`. Raises ValueError
        if a sequence is not within `limits`."""
        seqs, size = step.seqs, limits.block_size
        if checked is None:
            checked = tables_of(seqs, limits)
        groups = limits.num_groups
        rows_of = [-(-(seq.start + len(seq.tokens)) // size) for seq in seqs]
        tables = np.zeros((groups, len(seqs), max(rows_of, default=0)), np.int32)
        for index, (table, num_rows) in enumerate(zip(checked, rows_of, strict=True)):
            table.write(tables[:, index], 0, num_rows)
        counts = np.array([len(seq.tokens) for seq in seqs], np.int64)
        starts = np.array([seq.start for seq in seqs], np.int64)
        firsts, ends = counts.cumsum() - counts, starts + counts
        rows = np.arange(len(seqs)).repeat(counts)  # [num_tokens]
        positions = np.arange(len(rows)) + (starts - firsts)[rows]
        blocks = np.ascontiguousarray(tables[:, rows, positions // size], np.int64)  # [groups, N]
        slots = blocks * size + positions % size
        tokens = np.fromiter(chain.from_iterable(seq.tokens for seq in seqs), np.int64, len(rows))
        offsets = (firsts - starts).tolist()
        read = [
            position + offset
            for seq, offset in zip(seqs, offsets, strict=True)
            for position in seq.read_positions
        ]
        first_state = groups - limits.num_state_groups if with_states else groups
        spans = zip(firsts.tolist(), counts.tolist(), ends.tolist(), strict=True)
        return Batch(
            tokens=torch.from_numpy(tokens).to(device),
            positions=torch.from_numpy(positions).to(device),
            slots=torch.from_numpy(slots[0]).to(device),
            query_start=torch.from_numpy(firsts.astype(np.int32)).to(device),
            query_len=torch.from_numpy(counts.astype(np.int32)).to(device),
            context_len=torch.from_numpy(ends.astype(np.int32)).to(device),
            block_tables=torch.from_numpy(tables[0]).to(device),
            sample_rows=torch.tensor(read, dtype=torch.int64).to(device),
            spans=tuple(spans),
            more_slots=torch.from_numpy(slots[1:]).to(device) if groups > 1 else None,
            more_tables=torch.from_numpy(tables[1:]).to(device) if groups > 1 else None,
            states=_states_of(seqs, tables[first_state:], size),
            terms=term_rows(seqs, counts.tolist(), loaded),
            pages=PageReads.of(seqs, checked, size),
        )

    def sampled(self) -> Batch:
        """The rows in `sample_rows` as a batch of their own, for the last layer. On a CPU."""
        last = (self.query_start + self.query_len - 1).long()
        seqs = torch.bucketize(self.sample_rows, last)
        rows = torch.arange(len(seqs), dtype=torch.int32)
        context = (self.positions[self.sample_rows] + 1).int()
        more_slots, more_tables = self.more_slots, self.more_tables
        if more_slots is not None and more_tables is not None:
            more_slots, more_tables = more_slots[:, self.sample_rows], more_tables[:, seqs]
        return Batch(
            tokens=self.tokens[self.sample_rows],
            positions=self.positions[self.sample_rows],
            slots=self.slots[self.sample_rows],
            query_start=rows,
            query_len=torch.ones_like(rows),
            context_len=context,
            block_tables=self.block_tables[seqs],
            sample_rows=rows.long(),
            spans=tuple((row, 1, length) for row, length in enumerate(context.tolist())),
            more_slots=more_slots,
            more_tables=more_tables,
            terms=tuple(self._terms_of_samples()),
            pages=None if self.pages is None else self.pages.of_rows(seqs),
        )

    def _terms_of_samples(self) -> Iterator[TermRows]:
        for first, count, terms in self.terms:
            ends = torch.tensor([first, first + count])
            start, end = torch.searchsorted(self.sample_rows, ends).tolist()
            if start < end:
                yield TermRows(start, end - start, terms)


def _states_of(
    seqs: Sequence[ScheduledSeq], tables: np.ndarray, size: int
) -> tuple[StateSpans, ...]:
    """Where the states of each group are; tables: [groups, S, widest]. A sequence's tokens are cut
    at the ends of blocks, so that a full block has the state after its last token."""
    rows: list[tuple[int, int]] = []
    loads: list[tuple[int, int]] = []  # sequence and row of the table; row -1: nothing
    stores: list[tuple[int, int]] = []
    first = 0
    for number, seq in enumerate(seqs if len(tables) else ()):
        start, end = seq.start, seq.start + len(seq.tokens)
        while start < end:
            row = start // size
            stop = min(end, (row + 1) * size)
            rows.append((first, stop - start))
            loads.append((number, (start - 1) // size))
            stores.append((number, row))
            first, start = first + stop - start, stop
    return tuple(
        StateSpans(
            tuple(rows),
            tuple(int(table[seq, row]) if row >= 0 else NO_STATE for seq, row in loads),
            tuple(int(table[place]) for place in stores),
        )
        for table in tables
    )


def check_size(seq: ScheduledSeq, limits: Limits, *, has_rows: bool = False) -> int:
    """Entries of the block table that the step uses. Raises ValueError if there are fewer, and for
    positions beyond the model's length. `has_rows`: the table is known to have as many."""
    end = seq.end
    if not seq.tokens or seq.start < 0 or end > limits.max_model_len:
        raise ValueError(
            f"request {seq.request_id}: positions [{seq.start}, {end}) are empty or exceed "
            f"the model's length of {limits.max_model_len}"
        )
    needed = limits.entries(end)
    if not has_rows and len(seq.block_ids) < needed:
        raise ValueError(
            f"request {seq.request_id}: {len(seq.block_ids)} blocks for {end} positions, "
            f"{needed} are needed"
        )
    return needed


class OutsideVocabulary(ValueError):
    """Token ids that the model does not have: the fault of who asked, not of the scheduler."""


def check_tokens(seq: ScheduledSeq, limits: Limits) -> None:
    """Raises OutsideVocabulary if the model has no such token ids."""
    if seq.follows is not None:  # the token will be one that was sampled
        return
    tokens = seq.input_tokens
    if len(tokens) == 1 and 0 <= tokens[0] < limits.vocab_size:  # as in most steps
        return
    lowest, highest = min(tokens), max(tokens)
    if lowest < 0 or highest >= limits.vocab_size:
        raise OutsideVocabulary(
            f"request {seq.request_id}: token ids {lowest} to {highest} are outside "
            f"the vocabulary of {limits.vocab_size}"
        )


KEPT_STEPS = 16  # in which a sequence may have no part, and be known

Groups = slice | list[int]  # an index into arrays of groups


class Table:
    """A block table as an array, as far as it was found valid. Owned by what checks it.

    Invariant: of each window's groups, sinks and rows `[first, num_rows)` are blocks of the pool;
    other rows may be anything. It is that of `source` as long as that has so many rewrites."""

    __slots__ = (
        "_first_group",
        "_limits",
        "_read",
        "_seen",
        "_seen_at",
        "blocks",
        "num_bounded",
        "num_rewrites",
        "num_rows",
        "seen_in",
        "source",
        "written",
    )

    def __init__(self, seq: ScheduledSeq, limits: Limits) -> None:
        source = seq.block_ids
        if not isinstance(source, BlockTable):
            source = BlockTable.of(source, limits.num_groups)
        self._limits, self.source = limits, source
        self.num_rewrites, self.num_rows, self.seen_in = source.num_rewrites, 0, 0
        self.num_bounded = 0  # rows, from the first, whose keys have bounds (`engine.model.quest`)
        self._first_group: Table | None = None
        self._seen_at = 0
        self._seen: tuple[int, int, list[int]] | None = None  # rows, and what parts had lost
        self.written = NO_BLOCKS  # in the step that was checked last
        width = -(-limits.max_model_len // limits.block_size)
        self.blocks = np.zeros((limits.num_groups, width), np.int64)  # most rows are not real
        # For each window: positions that are read, sinks' rows, groups, the first row behind sinks.
        self._read: list[list[Any]] = [
            [size, sinks, tuple(groups), sinks] for (size, sinks), groups in limits.windows.items()
        ]

    def visible(self, first: int, end: int) -> np.ndarray:
        """The blocks in those of rows `[first, end)` that are read."""
        spans = self._spans(first, end)
        found = [self.blocks[_index(groups), a:b].reshape(-1) for groups, a, b in spans]
        return found[0] if len(found) == 1 else np.concatenate(found or [NO_BLOCKS])

    def end(self, seq: ScheduledSeq) -> int:
        """Rows that the step reads or writes; more may be known."""
        return -(-seq.end // self._limits.block_size)

    def places(self, first: int, end: int) -> np.ndarray:
        """Where those that `visible` gives are in an array like `blocks`, flat."""
        width = self.blocks.shape[1]
        at = [
            (np.array(groups)[:, np.newaxis] * width + np.arange(a, b)).reshape(-1)
            for groups, a, b in self._spans(first, end)
        ]
        return np.concatenate([NO_BLOCKS, *at])

    def write(self, target: np.ndarray, first: int, end: int) -> None:
        """Those of rows `[first, end)` that are read, into `target` [groups, at least end rows]."""
        for groups, a, b in self._spans(first, end):
            at = _index(groups)
            target[at, a:b] = self.blocks[at, a:b]

    def first_group(self) -> Table:
        """The blocks of the first group of layers, as a table of its own: always the same one."""
        if self._first_group is None:
            self._first_group = copy(self)
            self._first_group.blocks, self._first_group._read = self.blocks[:1], [[0, 0, (0,), 0]]
        self._first_group.num_rows = self.num_rows
        return self._first_group

    def is_as_seen(self, seq: ScheduledSeq) -> bool:
        """Whether this step uses the rows of the one before, and they are what they were then: as
        while a decode fills a block. What a window has left since is left with the next block."""
        source = self.source
        if seq.block_ids is not source or source.num_rewrites != self.num_rewrites:
            return False
        if seq.start < self._seen_at:  # its windows begin before
            return False
        size, firsts = self._limits.block_size, [part.first for part in source.parts]
        return self._seen == (seq.start // size, -(-seq.end // size), firsts)

    def see(self, seq: ScheduledSeq) -> None:
        """It was found valid for this step."""
        first, end = seq.start // self._limits.block_size, self.end(seq)
        self._seen_at = seq.start
        self._seen = first, end, [part.first for part in self.source.parts]
        self.written = self.blocks[:, first:end].reshape(-1)

    def goes_on(self, seq: ScheduledSeq) -> bool:
        """Whether what is known of it is true for this step."""
        source = self.source
        if seq.block_ids is not source or source.num_rewrites != self.num_rewrites:
            return False
        lost = [part for part in source.parts if part.first]
        for (first, row), each in zip(self._firsts(seq.start), self._read, strict=True):
            is_lost = any(row < part.first and part.groups[0] in each[2] for part in lost)
            if is_lost or row < first:
                return False
        return True

    def leave(self, position: int) -> np.ndarray:
        """No longer read what tokens from `position` on do not; returns those blocks."""
        gone = [NO_BLOCKS]
        for each, (first, row) in zip(self._read, self._firsts(position), strict=True):
            if row > first:
                at = _index(each[2])
                gone.append(self.blocks[at, first : min(row, self.num_rows)].reshape(-1))
                each[3] = row
        return gone[0] if len(gone) == 1 else np.concatenate(gone)

    def extend(self, seq: ScheduledSeq, end: int) -> np.ndarray:
        """Read rows up to `end` from its source; returns the blocks of those that the step reads or
        writes. Raises ValueError for a block outside the pool, and for a missing one."""
        begin, blocks = self.num_rows, self.blocks
        for part in [*self.source.parts]:  # another thread may replace one by one with fewer rows
            for of_window, a, b in self._spans(begin, end):
                groups, columns = _common(of_window, part.groups)
                blocks[groups, a:b] = NO_BLOCK
                for row, run in part.runs(a, b) if columns else ():
                    rows = np.array(run, np.int64).reshape(-1, len(part.groups))
                    blocks[groups, row : row + len(rows)] = rows[:, columns].T
        new = self.visible(begin, end)
        if len(new) and (new.min() < 0 or new.max() >= self._limits.num_blocks):
            raise ValueError(self._why_wrong(seq, new, begin, end))
        self.num_rows = end
        return new

    def _why_wrong(self, seq: ScheduledSeq, new: np.ndarray, first: int, end: int) -> str:
        if new.min() >= 0:
            return (
                f"request {seq.request_id}: block ids {new.min()} to {new.max()} are outside"
                f" the pool of {self._limits.num_blocks} blocks"
            )
        read = np.zeros_like(self.blocks[:, :end])
        self.write(read, first, end)
        entries = read.T.reshape(-1)
        index = np.flatnonzero(entries < 0)[0]
        return (
            f"request {seq.request_id}: entry {index} of its block table is {entries[index]}, and"
            f" position {seq.start} reads it"
        )

    def _firsts(self, position: int) -> Iterator[tuple[int, int]]:
        """For each window: the first row that was read, and that tokens from there on read."""
        block_size = self._limits.block_size
        for size, sinks, _, first in self._read:
            yield first, max(sinks, (position - size + 1) // block_size) if size else 0

    def _spans(self, first: int, end: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Those of rows `[first, end)` that are read, by groups."""
        for _, sinks, groups, begin in self._read:
            if first < min(sinks, end):
                yield groups, first, min(sinks, end)
            if max(first, begin) < end:
                yield groups, max(first, begin), end


NO_BLOCKS = np.empty(0, np.int64)


@cache
def _index(groups: tuple[int, ...]) -> Groups:
    is_run = groups[-1] - groups[0] + 1 == len(groups)
    return slice(groups[0], groups[-1] + 1) if is_run else [*groups]


@cache
def _common(groups: tuple[int, ...], others: tuple[int, ...]) -> tuple[Groups, list[int]]:
    """Those of `groups` that are among `others`, and where."""
    common = tuple(group for group in groups if group in others)
    return _index(common) if common else [], [others.index(group) for group in common]


def tables_of(seqs: Sequence[ScheduledSeq], limits: Limits) -> list[Table]:
    """Each checked by itself, as are the tokens. Raises ValueError."""
    tables = []
    for seq in seqs:
        needed = check_size(seq, limits) // limits.num_groups
        check_tokens(seq, limits)
        table = Table(seq, limits)
        table.leave(seq.start)
        table.extend(seq, needed)
        tables.append(table)
    return tables


class Guard:
    """Owned by a runner. Invariant: `_known` holds valid tables of the last `KEPT_STEPS` steps, and
    `_holders` in how many of them each block is read or written."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[str, Table] = {}
        self._number = 0  # the step has it
        self._places = np.zeros(limits.num_blocks, np.int64)  # scratch of `_is_distinct`
        self._holders = np.zeros(limits.num_blocks, np.int32)

    def check(self, step: Step) -> tuple[dict[int, str], dict[int, str], list[Table]]:
        """Index of a sequence of `step` -> why it must not run, by a fault of the scheduler; the
        same, by token ids of the request; and the tables of the others, in order, which are valid
        until the next call. Ranges are always checked; with `limits.guard`, also that no block that
        is written is in another place of any table."""
        faults: dict[int, str] = {}
        invalid: dict[int, str] = {}
        tables: dict[int, Table] = {}
        self._number += 1
        names = [seq.request_id for seq in step.seqs]
        if len({*names}) < len(names):
            names = [f"{name} {index}" for index, name in enumerate(names)]
        for index, (name, seq) in enumerate(zip(names, step.seqs, strict=True)):
            try:
                tables[index] = self._checked(name, seq)
            except OutsideVocabulary as error:
                invalid[index] = str(error)
            except ValueError as error:
                faults[index] = str(error)
        if self._limits.guard and self._may_share(step, tables):
            _find_shared(step, tables, faults)
            for index in faults.keys() & tables.keys():
                self._forget(names[index])
                del tables[index]
        if len(self._known) > len(tables):
            self._forget_before(self._number - KEPT_STEPS)
        return faults, invalid, [*tables.values()]

    def _checked(self, name: str, seq: ScheduledSeq) -> Table:
        """Raises ValueError if the block table does not fit the sequence."""
        table = self._known.get(name)
        is_as_seen = table is not None and table.is_as_seen(seq)
        needed = check_size(seq, self._limits, has_rows=is_as_seen) // self._limits.num_groups
        check_tokens(seq, self._limits)
        if table is not None and is_as_seen:
            table.seen_in = self._number
            return table
        if table is None or not table.goes_on(seq):
            self._forget(name)
            table = self._known[name] = Table(seq, self._limits)
        table.seen_in = self._number
        self._count(table.leave(seq.start), -1)
        if table.num_rows < needed:
            try:
                self._extend(table, seq, needed)
            except ValueError:
                self._forget(name)
                raise
        table.see(seq)
        return table

    def _extend(self, table: Table, seq: ScheduledSeq, end: int) -> None:
        before = table.num_rows
        new = table.extend(seq, end)
        if not self._limits.guard:
            return
        if not self._is_distinct(new) or (before and self._holders[new].any()):
            all_blocks = table.visible(0, end)
            if not self._is_distinct(all_blocks):
                table.num_rows = before
                block = _twice(all_blocks.tolist())
                raise ValueError(f"request {seq.request_id}: block {block} is in its table twice")
        self._count(new, 1)

    def _count(self, blocks: np.ndarray, change: int) -> None:
        """`blocks`: of one table, each once."""
        if self._limits.guard and len(blocks):
            self._holders[blocks] += change

    def _forget(self, name: str) -> None:
        table = self._known.pop(name, None)
        if table is not None:
            self._count(table.visible(0, table.num_rows), -1)

    def _forget_before(self, number: int) -> None:
        for name in [name for name, table in self._known.items() if table.seen_in < number]:
            self._forget(name)

    def _is_distinct(self, blocks: np.ndarray) -> bool:
        places = np.arange(len(blocks))
        self._places[blocks] = places
        return bool((self._places[blocks] == places).all())

    def _may_share(self, step: Step, tables: dict[int, Table]) -> bool:
        """Whether a block that is written may be in two of `tables`, each without duplicates."""
        if not tables:
            return False
        blocks = np.concatenate([table.written for table in tables.values()])
        if (self._holders[blocks] == 1).all():
            return False
        self._forget_before(self._number)  # they may have ended, and their blocks be others'
        return bool((self._holders[blocks] != 1).any())


def _twice(blocks: list[int]) -> int:
    return next(block for block in blocks if blocks.count(block) > 1)


def _find_shared(step: Step, tables: Mapping[int, Table], faults: dict[int, str]) -> None:
    """Add to `faults` the sequences that share a block that one of them writes."""
    writers: dict[int, int] = {}  # block -> index of the sequence
    for index, table in tables.items():
        for block in table.written.tolist():
            other = writers.setdefault(block, index)
            if other != index:
                _blame(step, block, (other, index), faults)
    for index, table in tables.items():
        visible = table.visible(0, table.end(step.seqs[index])).tolist()
        for block in visible if index not in faults else ():
            writer = writers.get(block, index)
            if writer != index:
                _blame(step, block, (writer, index), faults)


def _blame(step: Step, block: int, both: tuple[int, int], faults: dict[int, str]) -> None:
    """Which of the two tables is wrong cannot be decided here: neither sequence runs."""
    names = [step.seqs[index].request_id for index in both]
    for index in both:
        faults[index] = (
            f"request {step.seqs[index].request_id}: block {block}, which is written in this step,"
            f" is in the tables of {names[0]} and {names[1]}"
        )
