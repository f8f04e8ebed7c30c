"""Penalties on a GPU: how often tokens have come, a row of the vocabulary for each sequence.

Life of a row: a sequence that is penalized takes one when its token is first drawn on the device,
from whoever has not used it for the longest; what counts of its context is sent and added up there.
From then on each pass counts the token that it is given, known to the host or not, so that a step
ahead needs nothing more. What else has changed since is sent: tokens that were drawn elsewhere, or
have left the window. Where that is not how a context goes on, its row is counted anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kvrelay.engine.model.gpu.staging import stage_arrays
from kvrelay.engine.model.sampling.counts import IN_PROMPT
from kvrelay.engine.step import ScheduledSeq

NO_ROW = -1  # nothing is penalized, or the host samples
KEY = "row of counts"
SPAN, BLOCK = 16384, 1024  # tokens of a program, and at a time
_IN_PROMPT = tl.constexpr(IN_PROMPT)


@dataclass(slots=True, eq=False)
class _Row:
    """Has tokens [first, end) of a context counted."""

    number: int
    context: list[int]
    first: int = 0
    end: int = 0


class DeviceCounts:
    """Owned by the decode passes, used from one thread at a time. A step has no more penalized
    sequences than there are rows."""

    def __init__(self, num_rows: int, vocab: int, window: int, device: torch.device) -> None:
        """window: so many of the last tokens count; 0: all."""
        self._vocab, self._window, self._device = vocab, window, device
        self.times = torch.zeros((num_rows, vocab), dtype=torch.int64, device=device)
        self._free = list(range(num_rows))
        self._used = OrderedDict[int, _Row]()  # by number, the last used one last

    @staticmethod
    def size(num_rows: int, vocab: int) -> int:
        """How many bytes they take of the device."""
        return 8 * num_rows * vocab

    def rows_of(
        self, seqs: Sequence[ScheduledSeq], ends: Sequence[int], ahead: int = 0
    ) -> list[int]:
        """The row of each, or NO_ROW; they have counted [0, ends) of the contexts, once the work is
        done that is queued here. ahead: tokens after these that a pass counts by itself."""
        wanted = [
            (own := seq.sampling).is_penalized
            and not own.is_masked
            and own.is_drawn(end + ahead - seq.num_prompt_tokens)
            for seq, end in zip(seqs, ends, strict=True)
        ]
        if not any(wanted):
            return [NO_ROW] * len(seqs)
        for seq, is_wanted in zip(seqs, wanted, strict=True):
            if is_wanted and self._row_of(seq) is not None:
                self._used.move_to_end(seq.kept[KEY].number)
        changes: list[tuple[np.ndarray, np.ndarray]] = []
        rows = [NO_ROW] * len(seqs)
        for index, (seq, end) in enumerate(zip(seqs, ends, strict=True)):
            if wanted[index]:
                row = self._row_of(seq) or self._take_row(seq)
                self._bring(row, seq.num_prompt_tokens, end, ahead, changes)
                rows[index] = row.number
        if changes:
            at, values = (np.concatenate(each) for each in zip(*changes, strict=True))
            there = stage_arrays({"at": at, "values": values}, self._device)
            self.times.view(-1).index_add_(0, there["at"], there["values"])
        return rows

    def _row_of(self, seq: ScheduledSeq) -> _Row | None:
        row: _Row | None = seq.kept.get(KEY)
        is_own = row is not None and self._used.get(row.number) is row
        return row if is_own and row is not None and row.context is seq.context else None

    def _take_row(self, seq: ScheduledSeq) -> _Row:
        number = self._free.pop() if self._free else self._used.popitem(last=False)[0]
        row = self._used[number] = seq.kept[KEY] = _Row(number, seq.context)
        self.times[number].zero_()
        return row

    def _bring(
        self,
        row: _Row,
        num_prompt: int,
        end: int,
        ahead: int,
        changes: list[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Adds what the row lacks to `changes`, and takes what it has too much."""
        first = max(0, end + ahead - self._window) if self._window else 0
        if not row.first <= first <= row.end <= end:
            self.times[row.number].zero_()
            row.first = row.end = first
        for start, stop, sign in ((row.end, end, 1), (row.first, first, -1)):
            tokens = np.array(row.context[start:stop], np.int64)
            values = np.where(np.arange(start, stop) < num_prompt, IN_PROMPT, 1) * sign
            is_known = (tokens >= 0) & (tokens < self._vocab)
            if is_known.any():
                changes.append((row.number * self._vocab + tokens[is_known], values[is_known]))
        row.first, row.end = first, end + ahead


def penalize(
    logits: torch.Tensor,
    times: torch.Tensor,
    rows: torch.Tensor,
    draws: Mapping[str, torch.Tensor],
) -> None:
    """logits float32 [R, vocab_size], contiguous, are changed where rows [R] is none of NO_ROW;
    draws: of `sampling.COLUMNS`."""
    if not len(logits):
        return
    vocab = logits.shape[1]
    _penalize[(len(logits), triton.cdiv(vocab, SPAN))](
        logits, times, rows, draws["repetition_penalty"], draws["presence_penalty"],
        draws["frequency_penalty"], vocab, SPAN=SPAN, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _penalize(
    logits, times, rows, repetition, presence, frequency, vocab,
    SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = tl.load(rows + index).to(tl.int64)
    if row >= 0:
        penalty = tl.load(repetition + index).to(tl.float32)
        once, each = tl.load(presence + index), tl.load(frequency + index)
        for first in range(0, SPAN, BLOCK):
            at = tl.program_id(1) * SPAN + first + tl.arange(0, BLOCK)
            count = tl.load(times + row * vocab + at, mask=at < vocab, other=0)
            to = logits + index.to(tl.int64) * vocab + at
            logit = tl.load(to, mask=count > 0, other=0.0)
            logit = tl.where(logit > 0, logit / penalty, logit * penalty)
            output = count % _IN_PROMPT
            less = (once + each * output.to(tl.float64)).to(tl.float32)
            tl.store(to, tl.where(output > 0, logit - less, logit), mask=count > 0)
