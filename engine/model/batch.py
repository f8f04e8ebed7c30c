"""A step as tensors: every sequence's tokens in one row, and where each of them lives.

Built once per step and read by every layer. Before that, `Guard` checks the step, request by
request: whatever a faulty scheduler could get wrong, a kernel would turn into a wild read or write,
and into wrong tokens of another request. A request whose block table is wrong is left out of the
step; the others run.

Tables are long and most steps change none, so each is converted and checked only where it differs
from the one that was valid in the step before. What the tables of a step have in common is checked
in every step: a block that is written must be in one table only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from kvrelay.engine.model.states import NO_STATE, StateSpans
from kvrelay.engine.model.terms import NOTHING_LOADED, RowTerms, TermRows, term_rows
from kvrelay.engine.step import ScheduledSeq, Step


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

    def written_from(self, position: int) -> int:
        """The first entry of the block table that a token at `position` writes."""
        return position // self.block_size * self.num_groups

    def is_read(self, position: int, num_entries: int) -> np.ndarray | None:
        """For each entry of a block table, whether tokens from `position` on read it. None: all."""
        sizes = self.group_windows or (self.window,)
        if not any(sizes):
            return None
        rows = np.arange(-(-num_entries // len(sizes)))[:, np.newaxis]
        sinks = [-(-self.num_sinks // self.block_size) if size else 0 for size in sizes]
        firsts = [max(0, position - size + 1) // self.block_size if size else 0 for size in sizes]
        read: np.ndarray = (rows >= np.array(firsts)) | (rows < np.array(sinks))
        return read.reshape(-1)[:num_entries]


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
        checked: Sequence[np.ndarray] | None = None,
        loaded: Mapping[bytes, RowTerms] = NOTHING_LOADED,
    ) -> Batch:
        """`checked`: the sequences' block tables as `Guard.check` gives them; without, they and the
        tokens are checked here. `loaded`: what the sequences need, which are ordered by that
        (`by_need`). Raises ValueError if a sequence is not within `limits`."""
        seqs, size = step.seqs, limits.block_size
        if checked is None:
            checked = [checked_blocks(seq, limits) for seq in seqs]
            for seq in seqs:
                check_tokens(seq, limits)
        groups = limits.num_groups
        widest = max(map(len, checked), default=0) // groups
        tables = np.zeros((groups, len(seqs), widest), np.int32)
        for row, table in enumerate(checked):
            tables[:, row, : len(table) // groups] = table.reshape(-1, groups).T
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
            states=_states_of(seqs, tables[groups - limits.num_state_groups :], size),
            terms=term_rows(seqs, counts.tolist(), loaded),
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


def checked_blocks(seq: ScheduledSeq, limits: Limits) -> np.ndarray:
    """The blocks of positions [0, start + len(tokens)), int64; -1 before the window. Raises
    ValueError."""
    blocks = np.array(seq.block_ids[: check_size(seq, limits)], np.int64)
    check_blocks(seq, blocks, limits)
    return blocks


def check_size(seq: ScheduledSeq, limits: Limits) -> int:
    """Entries of the block table that the step uses. Raises ValueError if there are fewer, and for
    positions beyond the model's length."""
    end = seq.end
    if not seq.tokens or seq.start < 0 or end > limits.max_model_len:
        raise ValueError(
            f"request {seq.request_id}: positions [{seq.start}, {end}) are empty or exceed "
            f"the model's length of {limits.max_model_len}"
        )
    needed = limits.entries(end)
    if len(seq.block_ids) < needed:
        raise ValueError(
            f"request {seq.request_id}: {len(seq.block_ids)} blocks for {end} positions, "
            f"{needed} are needed"
        )
    return needed


def check_blocks(seq: ScheduledSeq, blocks: np.ndarray, limits: Limits) -> None:
    """Raises ValueError for a block outside the pool, and for a missing one that is read."""
    if blocks.min() < 0:
        _check_missing(seq, blocks, limits)
    if blocks.min() < -1 or blocks.max() >= limits.num_blocks:
        raise ValueError(
            f"request {seq.request_id}: block ids {blocks.min()} to {blocks.max()} are outside "
            f"the pool of {limits.num_blocks} blocks"
        )


def _check_missing(seq: ScheduledSeq, blocks: np.ndarray, limits: Limits) -> None:
    read = limits.is_read(seq.start, len(blocks))
    missing = np.flatnonzero(blocks < 0 if read is None else (blocks < 0) & read)
    if len(missing):
        raise ValueError(
            f"request {seq.request_id}: entry {missing[0]} of its block table is "
            f"{blocks[missing[0]]}, and position {seq.start} reads it"
        )


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


@dataclass(frozen=True, slots=True)
class Table:
    """A block table that is valid as far as it was used. Blocks before the window may be anything
    in the pool, or -1."""

    entries: list[int]  # a copy
    blocks: np.ndarray  # block ids, int64
    position: int  # what tokens from there on read is neither missing nor duplicated


class Guard:
    """Owned by a runner. Invariant: `_known` holds the valid tables of the last step; one is used
    again only for a sequence whose table begins with the same entries."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[str, Table] = {}
        self._places = np.zeros(limits.num_blocks, np.int64)  # scratch of `_is_distinct`
        self._is_written = np.zeros(limits.num_blocks, np.bool_)  # all False between steps

    def check(self, step: Step) -> tuple[dict[int, str], dict[int, str], list[np.ndarray]]:
        """Index of a sequence of `step` -> why it must not run, by a fault of the scheduler; the
        same, by token ids of the request; and the tables of the others, in order, int64, cut to the
        entries in use. Ranges are always checked; with `limits.guard`, also that no block that is
        written is in another place of any table."""
        faults: dict[int, str] = {}
        invalid: dict[int, str] = {}
        tables: dict[int, Table] = {}
        for index, seq in enumerate(step.seqs):
            try:
                tables[index] = self._checked(seq)
            except OutsideVocabulary as error:
                invalid[index] = str(error)
            except ValueError as error:
                faults[index] = str(error)
        if self._limits.guard and self._may_share(step, tables):
            _find_shared(step, self._limits, faults, set(invalid))
        good = {index: table for index, table in tables.items() if index not in faults}
        self._known = {step.seqs[index].request_id: table for index, table in good.items()}
        return faults, invalid, [table.blocks for table in good.values()]

    def _checked(self, seq: ScheduledSeq) -> Table:
        """Raises ValueError if the block table does not fit the sequence."""
        limits = self._limits
        needed = check_size(seq, limits)
        check_tokens(seq, limits)
        known = self._known.get(seq.request_id)
        size = 0 if known is None else len(known.entries)
        if known is None or size > needed or known.entries != seq.block_ids[:size]:
            known, size = None, 0
        if known is not None and size == needed and known.position <= seq.start:
            return known
        blocks = np.array(seq.block_ids[size:needed], np.int64)
        if known is not None:
            blocks = np.concatenate((known.blocks, blocks))
        check_blocks(seq, blocks, limits)
        if limits.guard and not self._is_distinct(_visible(seq, blocks, limits)):
            block = _twice(_visible(seq, blocks, limits).tolist())
            raise ValueError(f"request {seq.request_id}: block {block} is in its table twice")
        return Table(seq.block_ids[:needed], blocks, seq.start)

    def _is_distinct(self, blocks: np.ndarray) -> bool:
        places = np.arange(len(blocks))
        self._places[blocks] = places
        return bool((self._places[blocks] == places).all())

    def _may_share(self, step: Step, tables: dict[int, Table]) -> bool:
        """Whether a block that is written may be in two of `tables`, each without duplicates."""
        if not tables:
            return False
        shares = [(step.seqs[index], table.blocks) for index, table in tables.items()]
        limits = self._limits
        written = np.concatenate(
            [blocks[limits.written_from(seq.start) :] for seq, blocks in shares]
        )
        if not self._is_distinct(written):
            return True
        self._is_written[written] = True
        read = np.concatenate([_visible(seq, blocks, limits) for seq, blocks in shares])
        count = int(np.count_nonzero(self._is_written[read]))
        self._is_written[written] = False
        return count != len(written)


def _visible(seq: ScheduledSeq, blocks: np.ndarray, limits: Limits) -> np.ndarray:
    """The entries that the step reads or writes; those that it writes come last."""
    read = limits.is_read(seq.start, len(blocks))
    return blocks if read is None else blocks[read]


def _twice(blocks: list[int]) -> int:
    return next(block for block in blocks if blocks.count(block) > 1)


def _find_shared(step: Step, limits: Limits, faults: dict[int, str], left_out: set[int]) -> None:
    """Add to `faults` the sequences that share a block that one of them writes; those of `left_out`
    do not run."""
    writers: dict[int, int] = {}  # block -> index of the sequence
    visible: dict[int, list[int]] = {}
    for index, seq in enumerate(step.seqs):
        if index in faults or index in left_out:
            continue
        end = limits.entries(seq.end)
        blocks = np.array(seq.block_ids[:end], np.int64)
        visible[index] = _visible(seq, blocks, limits).tolist()
        for block in seq.block_ids[limits.written_from(seq.start) : end]:
            other = writers.setdefault(block, index)
            if other != index:
                _blame(step, block, (other, index), faults)
    for index, table in visible.items():
        for block in table if index not in faults else ():
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
