"""What a step must not do to the KV pool: found before it runs, request by request.

Whatever a faulty scheduler could get wrong, a kernel would turn into a wild read or write, and into
wrong tokens of somebody else. A request whose block table lies is left out; the others go on.

Tables are long and most steps change none, so each is converted and looked through only where it
differs from what was found sound in the step before. What the tables of a step have in common is
looked at in every step: whoever writes a block must be the only one who has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.model.batch import Limits, check_blocks, check_size, check_tokens
from engine.step import ScheduledSeq, Step


@dataclass(frozen=True, slots=True)
class Table:
    """A block table that was found sound, as far as it was used. The blocks that a window has left
    may be anything in the pool, or -1."""

    entries: list[int]  # a copy
    blocks: np.ndarray  # the same, int64
    first: int  # from this block on, and in the sinks, none is missing, or there twice


class Guard:
    """Owned by a runner. Invariant: `_known` holds tables of the last step, each sound within the
    limits; one is believed again only for a sequence whose table begins with the same entries."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[str, Table] = {}
        self._places = np.zeros(limits.num_blocks, np.int64)  # scratch of `_is_distinct`
        self._is_written = np.zeros(limits.num_blocks, np.bool_)  # all False between steps

    def check(self, step: Step) -> tuple[dict[int, str], list[np.ndarray]]:
        """Index of a sequence of `step` -> why it must not run; and the tables of the others, in
        order, int64, as long as they are used. Ranges are always looked at; where `limits.guard`
        says so, also what two entries have in common."""
        faults: dict[int, str] = {}
        tables: dict[int, Table] = {}
        for index, seq in enumerate(step.seqs):
            try:
                tables[index] = self._checked(seq)
            except ValueError as error:
                faults[index] = str(error)
        if self._limits.guard and self._may_share(step, tables):
            _find_shared(step, self._limits, faults)
        good = {index: table for index, table in tables.items() if index not in faults}
        self._known = {step.seqs[index].request_id: table for index, table in good.items()}
        return faults, [table.blocks for table in good.values()]

    def _checked(self, seq: ScheduledSeq) -> Table:
        """Raises ValueError."""
        limits = self._limits
        needed = check_size(seq, limits)
        check_tokens(seq, limits)
        known, first = self._known.get(seq.request_id), limits.first_read(seq.start)
        size = 0 if known is None else len(known.entries)
        if known is None or size > needed or known.entries != seq.block_ids[:size]:
            known, size = None, 0
        if known is not None and size == needed and known.first <= first:
            return known
        blocks = np.array(seq.block_ids[size:needed], np.int64)
        if known is not None:
            blocks = np.concatenate((known.blocks, blocks))
        check_blocks(seq, blocks, limits)
        if limits.guard and not self._is_distinct(_visible(seq, blocks, limits)):
            block = _twice(_visible(seq, blocks, limits).tolist())
            raise ValueError(f"request {seq.request_id}: block {block} is in its table twice")
        return Table(seq.block_ids[:needed], blocks, first)

    def _is_distinct(self, blocks: np.ndarray) -> bool:
        places = np.arange(len(blocks))
        self._places[blocks] = places
        return bool((self._places[blocks] == places).all())

    def _may_share(self, step: Step, tables: dict[int, Table]) -> bool:
        """Whether a block that is written is in two of `tables`: each holds a block once."""
        if not tables:
            return False
        shares = [(step.seqs[index], table.blocks) for index, table in tables.items()]
        size = self._limits.block_size
        written = np.concatenate([blocks[seq.start // size :] for seq, blocks in shares])
        if not self._is_distinct(written):
            return True
        self._is_written[written] = True
        read = np.concatenate([_visible(seq, blocks, self._limits) for seq, blocks in shares])
        count = int(np.count_nonzero(self._is_written[read]))
        self._is_written[written] = False
        return count != len(written)


def _visible(seq: ScheduledSeq, blocks: np.ndarray, limits: Limits) -> np.ndarray:
    """The entries that the step reads or writes, those that it writes last."""
    first = limits.first_read(seq.start)
    if not first:
        return blocks
    return np.concatenate((blocks[: min(limits.num_sink_blocks, first)], blocks[first:]))


def _twice(blocks: list[int]) -> int:
    return next(block for block in blocks if blocks.count(block) > 1)


def _find_shared(step: Step, limits: Limits, faults: dict[int, str]) -> None:
    """Add to `faults` who has a block that one of a step's sequences writes, and another has."""
    writers: dict[int, int] = {}  # block -> index of the sequence
    visible: dict[int, list[int]] = {}
    for index, seq in enumerate(step.seqs):
        if index in faults:
            continue
        end = -(-seq.end // limits.block_size)
        blocks = np.array(seq.block_ids[:end], np.int64)
        visible[index] = _visible(seq, blocks, limits).tolist()
        for block in seq.block_ids[seq.start // limits.block_size : end]:
            other = writers.setdefault(block, index)
            if other != index:
                _blame(step, block, (other, index), faults)
    for index, table in visible.items():
        for block in table if index not in faults else ():
            writer = writers.get(block, index)
            if writer != index:
                _blame(step, block, (writer, index), faults)


def _blame(step: Step, block: int, both: tuple[int, int], faults: dict[int, str]) -> None:
    """Who of the two lies cannot be seen here: neither runs."""
    names = [step.seqs[index].request_id for index in both]
    for index in both:
        faults[index] = (
            f"request {step.seqs[index].request_id}: block {block}, which is written in this step,"
            f" is in the tables of {names[0]} and {names[1]}"
        )
