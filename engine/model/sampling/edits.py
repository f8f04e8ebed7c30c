"""Edits of logits that requests ask for before their draws, one class each.

An edit stands in `EDITS` or, where it only takes tokens away, in `BANS`; its parameters are marked
`Effect.EDITS` in `SamplingParams`. A row that needs one is sampled by torch, one by one, whatever
computes its logits. Penalties (`Effect.PENALIZES`) are edits only where torch draws. Token ids
outside the vocabulary are ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from operator import attrgetter
from typing import ClassVar

import torch

from kvrelay.engine.model.sampling.counts import counts_of
from kvrelay.engine.request import DEFAULTS
from kvrelay.engine.step import ScheduledSeq

Taken = tuple[list[int], torch.Tensor]  # tokens, and their logits


class Edit(ABC):
    parameters: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._said = attrgetter(*self.parameters)
        self._nothing = self._said(DEFAULTS)

    def is_needed(self, seq: ScheduledSeq) -> bool:
        """Whether the next token of `seq` depends on it: one of its parameters says something."""
        return bool(self._said(seq.sampling) != self._nothing)

    @abstractmethod
    def apply(self, row: torch.Tensor, seq: ScheduledSeq, window: int) -> Taken | None:
        """Edits float32 [vocab_size] in place. window: of `edit`. Returns what a ban has taken and
        comes back where nothing is left."""


class Bias(Edit):
    parameters = ("logit_bias",)

    def apply(self, row: torch.Tensor, seq: ScheduledSeq, window: int) -> None:
        biases = seq.sampling.logit_bias
        ids = _known(biases, row)
        row[ids] += torch.tensor([biases[i] for i in ids], dtype=row.dtype, device=row.device)


class RepetitionPenalty(Edit):
    parameters = ("repetition_penalty",)

    def apply(self, row: torch.Tensor, seq: ScheduledSeq, window: int) -> None:
        penalty = seq.sampling.repetition_penalty
        known, _ = counts_of(seq, window).known(len(row))
        ids = torch.from_numpy(known).to(row.device)
        logits = row[ids]
        row[ids] = torch.where(logits > 0, logits / penalty, logits * penalty)


class OutputPenalties(Edit):
    parameters = ("presence_penalty", "frequency_penalty")

    def apply(self, row: torch.Tensor, seq: ScheduledSeq, window: int) -> None:
        ids, counts = counts_of(seq, window).known(len(row))
        ids, counts = ids[counts > 0], counts[counts > 0]
        penalty = seq.sampling.presence_penalty + seq.sampling.frequency_penalty * counts
        row[torch.from_numpy(ids).to(row.device)] -= torch.from_numpy(penalty).to(row)


class Allowed(Edit):
    parameters = ("allowed_token_ids",)

    def apply(self, row: torch.Tensor, seq: ScheduledSeq, window: int) -> None:
        ids = _known(seq.sampling.allowed_token_ids, row)
        kept = row[ids]
        row.fill_(-torch.inf)
        row[ids] = kept


class BadWords(Edit):
    """The last tokens of words whose others the output ends with."""

    parameters = ("bad_words",)

    def apply(self, row: torch.Tensor, seq: ScheduledSeq, window: int) -> Taken:
        lasts, context = list[int](), seq.context
        for *begin, last in seq.sampling.bad_words:
            if len(begin) <= _num_output(seq) and context[len(context) - len(begin) :] == begin:
                lasts.append(last)
        ids = _known(lasts, row)
        taken = ids, row[ids]
        row[ids] = -torch.inf
        return taken


class MinTokens(Edit):
    parameters = ("min_tokens",)

    def is_needed(self, seq: ScheduledSeq) -> bool:
        return seq.sampling.must_go_on(_num_output(seq))

    def apply(self, row: torch.Tensor, seq: ScheduledSeq, window: int) -> None:
        row[_known(seq.sampling.stop_token_ids, row)] = -torch.inf


EDITS: tuple[Edit, ...] = (Bias(), RepetitionPenalty(), OutputPenalties())
BANS: tuple[Edit, ...] = (Allowed(), MinTokens(), BadWords())


def edit(row: torch.Tensor, seq: ScheduledSeq, window: int) -> None:
    """All that `seq` needs, in place. window: how many tokens of the context count; 0: all. Where
    bans leave nothing, the output may end, and where it cannot, what they say comes back."""
    for each in EDITS:
        if each.is_needed(seq):
            each.apply(row, seq, window)
    bans = [each for each in BANS if each.is_needed(seq)]
    if not bans:
        return
    stops = _known(seq.sampling.stop_token_ids, row)
    taken = [(stops, row[stops]), *(each.apply(row, seq, window) for each in bans)]
    for ids, logits in filter(None, taken):
        if row.amax() != -torch.inf:
            return
        row[ids] = logits


def _num_output(seq: ScheduledSeq) -> int:
    return len(seq.context) - seq.num_prompt_tokens


def _known(ids: Iterable[int], row: torch.Tensor) -> list[int]:
    vocab = len(row)
    return [token for token in ids if 0 <= token < vocab]
