"""Draft tokens verified in a pass that runs layer by layer: of ranks, and of models whose layers
the kernels of CPUs do not run all at once.

A sequence's rows are its token and its draft tokens. What recurrent layers are given is kept, and
no state of these sequences is stored. Rank 0, which samples, says how many rows are right: these
pass the recurrences again, and what comes out is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvrelay.engine.model.batch import Batch, Limits, Table
from kvrelay.engine.model.decoder import Decoder
from kvrelay.engine.model.sampling.sampler import rows_of, undrafted, verified
from kvrelay.engine.model.states import NO_STATE, StateSpans
from kvrelay.engine.model.terms import RowTerms
from kvrelay.engine.step import Sampled, ScheduledSeq, Step

if TYPE_CHECKING:
    from kvrelay.engine.model.parallel.ops import Group

SampleRows = Callable[[torch.Tensor, list[ScheduledSeq], list[ScheduledSeq]], list[Sampled]]
"""Given logits of all rows, what each row is sampled as, and the sequences with their drafts."""


def has_drafts(seqs: Sequence[ScheduledSeq]) -> bool:
    """Whether all are decodes, and some have draft tokens to verify."""
    drafts = any(seq.draft_tokens for seq in undrafted(seqs))
    return drafts and all(
        len(seq.tokens) == 1 and seq.sample and seq.outputs_from is None for seq in seqs
    )


def verify(
    step: Step,
    tables: Sequence[Table],
    decoder: Decoder,
    limits: Limits,
    loaded: Mapping[bytes, RowTerms],
    sample: SampleRows,
    group: Group | None,
) -> list[Sampled]:
    """One pass over decodes and their draft tokens, on a CPU. group: the ranks of the worker, which
    all call this; what is returned counts at rank 0."""
    seqs, device = undrafted(step.seqs), torch.device("cpu")
    whole = Step(step.step_id, [_of(seq, len(seq.input_tokens)) for seq in seqs])
    batch = Batch.from_step(whole, limits, device, tables, loaded)
    batch = replace(batch, sample_rows=torch.arange(len(batch.tokens)))
    has_states = bool(batch.states)
    if has_states:
        batch = replace(batch, states=_not_stored(batch, seqs))
    logits = decoder.logits(decoder.hidden_states(batch, keeps=has_states))
    rows = [row for seq in seqs for row in rows_of(seq)]
    sampled = iter(sample(logits, rows, seqs))
    found = [verified(seq, [next(sampled) for _ in seq.input_tokens]) for seq in seqs]
    if has_states:
        counts = torch.tensor([1 + len(each.more) for each in found])
        if group is not None:
            group.share(counts)
        _replay(seqs, tables, counts.tolist(), decoder, limits)
    return found


def _of(seq: ScheduledSeq, count: int) -> ScheduledSeq:
    """`seq` with its first `count` input tokens, none of them a draft."""
    return replace(seq, tokens=seq.input_tokens[:count], draft_tokens=[])


def _not_stored(batch: Batch, seqs: Sequence[ScheduledSeq]) -> tuple[StateSpans, ...]:
    """A draft ends with its block, so each sequence is one segment of rows."""
    drafted = [bool(seq.draft_tokens) for seq in seqs]
    return tuple(
        replace(
            spans,
            store=tuple(
                NO_STATE if is_drafted else slot
                for slot, is_drafted in zip(spans.store, drafted, strict=True)
            ),
        )
        for spans in batch.states
    )


def _replay(
    seqs: Sequence[ScheduledSeq],
    tables: Sequence[Table],
    counts: Sequence[int],
    decoder: Decoder,
    limits: Limits,
) -> None:
    again, of_again, rows, first = [], [], list[int](), 0
    for seq, table, count in zip(seqs, tables, counts, strict=True):
        if seq.draft_tokens:
            again.append(_of(seq, count))
            of_again.append(table)
            rows += range(first, first + count)
        first += len(seq.input_tokens)
    batch = Batch.from_step(Step(0, again), limits, torch.device("cpu"), of_again)
    decoder.replay(batch, torch.tensor(rows))
