"""What a step must not do to the KV pool: found before it runs, request by request.

Whatever a faulty scheduler could get wrong, a kernel would turn into a wild read or write, and into
wrong tokens of somebody else. A request whose block table lies is left out; the others go on.
"""

from __future__ import annotations

import numpy as np

from engine.model.batch import Limits, check_tokens, checked_blocks
from engine.step import ScheduledSeq, Step


def find_faults(step: Step, limits: Limits) -> dict[int, str]:
    """Index of a sequence of `step` -> why it must not run. Ranges are always looked at; where
    `limits.guard` says so, also what two entries have in common."""
    faults: dict[int, str] = {}
    for index, seq in enumerate(step.seqs):
        try:
            checked_blocks(seq, limits)
            check_tokens(seq, np.array(seq.tokens, np.int64), limits)
        except ValueError as error:
            faults[index] = str(error)
    if limits.guard:
        _find_shared(step, limits, faults)
    return faults


def _find_shared(step: Step, limits: Limits, faults: dict[int, str]) -> None:
    """Blocks that are twice in a table, or that two sequences use, one of them to write."""
    writers: dict[int, int] = {}  # block -> index of the sequence
    for index, seq in enumerate(step.seqs):
        if index in faults:
            continue
        table = _visible(seq, limits)
        twice = len(table) - len(set(table))
        if twice:
            block = next(block for block in table if table.count(block) > 1)
            faults[index] = f"request {seq.request_id}: block {block} is in its table twice"
            continue
        for block in table[-_num_written(seq, limits) :]:
            other = writers.setdefault(block, index)
            if other != index:
                _blame(step, block, (other, index), faults)
    for index, seq in enumerate(step.seqs):
        if index in faults or not writers:
            continue
        for block in _visible(seq, limits):
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


def _visible(seq: ScheduledSeq, limits: Limits) -> list[int]:
    """The entries that the step reads or writes, those that it writes last."""
    end = -(-(seq.start + len(seq.tokens)) // limits.block_size)
    first = limits.first_read(seq.start)
    sinks = range(min(limits.num_sink_blocks, first))
    return [*(seq.block_ids[i] for i in sinks), *seq.block_ids[first:end]]


def _num_written(seq: ScheduledSeq, limits: Limits) -> int:
    end = -(-(seq.start + len(seq.tokens)) // limits.block_size)
    return end - seq.start // limits.block_size
