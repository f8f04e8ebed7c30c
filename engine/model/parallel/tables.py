"""Block tables of a worker's ranks: the leader sends of each the rows that its followers lack.

Life of a table at a follower: all of it comes with the first step of its sequence, or where entries
were rewritten; then rows that are new, and which ones were lost. Both ends forget it when its
sequence had no part in some steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.engine.kv.block_table import BlockTable
from kvrelay.engine.model.batch import KEPT_STEPS
from kvrelay.engine.step import ScheduledSeq, Step


@dataclass(frozen=True, slots=True)
class Rows:
    """What a follower lacks of a table."""

    first: int  # it has the rows before; 0: none of them any more
    kept: tuple[
        tuple[int, int], ...
    ]  # for each part: its first row but for sinks, and their number
    new: BlockTable | None  # from `first` on


@dataclass(frozen=True, slots=True)
class SentStep:
    step: Step
    rows: list[Rows | None]  # None: the sequence has its table itself


@dataclass(slots=True)
class _Known:
    table: BlockTable
    num_rewrites: int
    num_rows: int
    seen_in: int


class _Tables:
    """Invariant: what a follower knows, its leader knows of it."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._number = 0  # the step has it

    def _end_step(self) -> None:
        before = self._number - KEPT_STEPS
        for name in [name for name, known in self._known.items() if known.seen_in < before]:
            del self._known[name]
        self._number += 1


class SentTables(_Tables):
    """The leader's. Where a step could not be sent, the worker is lost."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size

    def pack(self, step: Step) -> SentStep:
        rows = [self._rows(seq) for seq in step.seqs]
        self._end_step()
        both = zip(step.seqs, rows, strict=True)
        seqs = [seq if each is None else replace(seq, block_ids=[]) for seq, each in both]
        return SentStep(replace(step, seqs=seqs), rows)

    def _rows(self, seq: ScheduledSeq) -> Rows | None:
        table, end = seq.block_ids, -(-seq.end // self._block_size)
        if not isinstance(table, BlockTable):
            return None
        known, first = self._known.get(seq.request_id), 0
        if known and known.table is table and known.num_rewrites == table.num_rewrites:
            first = known.num_rows
        # A part may get its rows later than another: then they are still to be sent.
        end = max(first, min(end, *(part.end for part in table.parts)))
        self._known[seq.request_id] = _Known(table, table.num_rewrites, end, self._number)
        kept = tuple((part.first, part.num_sinks) for part in table.parts)
        return Rows(first, kept, table.between(first, end) if first < end else None)


class ReceivedTables(_Tables):
    """A follower owns it, and takes them in the order in which they were sent."""

    def unpack(self, sent: SentStep) -> Step:
        both = zip(sent.step.seqs, sent.rows, strict=True)
        seqs = [seq if rows is None else self._with_table(seq, rows) for seq, rows in both]
        self._end_step()
        return replace(sent.step, seqs=seqs)

    def _with_table(self, seq: ScheduledSeq, rows: Rows) -> ScheduledSeq:
        if rows.first:
            table = self._known[seq.request_id].table
            _update(table, rows)
        else:
            table = rows.new or BlockTable()
        self._known[seq.request_id] = _Known(table, 0, 0, self._number)
        return replace(seq, block_ids=table)


def _update(table: BlockTable, rows: Rows) -> None:
    for number, (first, num_sinks) in enumerate(rows.kept):
        if first > table.parts[number].first:
            table.lose(number, first, num_sinks)
    if rows.new is not None:
        for part, new in zip(table.parts, rows.new.parts, strict=True):
            part.blocks += new.blocks
