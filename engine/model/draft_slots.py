"""When what a drafter goes on from is made: its slots, of all tokens that were computed.

Prompts' are made at once. Those of decodes wait, with the hidden states that they are made of,
until the drafter is asked again, or until the block is full: then it is sealed, and nobody may
write to it any more. Where a step says that the drafter is not asked, full blocks go without: they
have zeros, so drafts after them are worse, and no token is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from kvrelay.engine.model.batch import Table
from kvrelay.engine.step import Sampled, ScheduledSeq

FORGOTTEN_AFTER = 256  # steps in which a sequence had no part: most have ended

Tables = Sequence[Table]


@dataclass(slots=True)
class Part:
    """Tokens whose slots are made in one call: `tokens` of `seq` from position `start` on."""

    seq: ScheduledSeq
    table: Table
    start: int
    tokens: list[int]
    # [captured layers, len(tokens), hidden_size]; with one more in front, of the token before,
    # where that is not in a block.
    outputs: torch.Tensor
    has_before: bool = False


class MakesSlots(Protocol):
    def keep(self, parts: Sequence[Part]) -> None: ...


@dataclass(slots=True)
class _Waiting:
    """What waits for one sequence. Slots of positions before `made` are there, or are given up;
    `outputs` are of `tokens`, which begin at position `first`."""

    made: int
    first: int
    tokens: list[int] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)  # [captured, 1, hidden_size] each
    seen: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)

    def forget(self, before: int) -> None:
        count = max(0, before - self.first)
        del self.tokens[:count], self.outputs[:count]
        self.first += count


class Slots:
    """Owned by a runner. A sequence has at most a block of tokens that wait, and the one before."""

    def __init__(self, drafter: MakesSlots, region: np.ndarray, block_size: int) -> None:
        """region: uint8 [num_blocks, draft_bytes], the drafter's part of each block of the pool;
        it is in blocks of the first group of layers."""
        self._drafter, self._region = drafter, region
        self._size = block_size
        self._waiting: dict[str, _Waiting] = {}
        self._step = 0

    def catch_up(self, seqs: Sequence[ScheduledSeq], tables: Tables) -> None:
        """Make what waits of `seqs`, decodes that the drafter is asked for."""
        found = (
            self._rest(seq, table, known)
            for seq, table in zip(seqs, tables, strict=True)
            if (known := self._waiting.get(seq.request_id)) is not None and known.end == seq.start
        )
        self._make(found)

    def after(
        self,
        seqs: Sequence[ScheduledSeq],
        sampled: Sequence[Sampled | None],
        tables: Tables,
        outputs: torch.Tensor,
        *,
        fills: bool,
    ) -> None:
        """A step has computed `seqs`. outputs: [captured, N, hidden_size], of the tokens that were
        computed, and not rejected. fills: whether blocks that decodes have filled get their
        slots."""
        parts, first = list[Part | None](), 0
        self._step += 1
        for seq, each, table in zip(seqs, sampled, tables, strict=True):
            tokens = computed_tokens(seq, each)
            own, first = outputs[:, first : first + len(tokens)], first + len(tokens)
            if seq.start + len(seq.tokens) > seq.num_prompt_tokens and len(seq.tokens) == 1:
                parts.append(self._put(seq, table, tokens, own, fills=fills))
            else:
                self._waiting.pop(seq.request_id, None)
                parts.append(Part(seq, table, seq.start, tokens, own))
        self._make(parts)
        if self._step % FORGOTTEN_AFTER == 0:
            oldest = self._step - FORGOTTEN_AFTER
            self._waiting = {n: each for n, each in self._waiting.items() if each.seen > oldest}

    def _put(
        self,
        seq: ScheduledSeq,
        table: Table,
        tokens: list[int],
        outputs: torch.Tensor,
        *,
        fills: bool,
    ) -> Part | None:
        """Tokens of a decode; returns what has to be made now."""
        known = self._waiting.get(seq.request_id)
        if known is None or known.end != seq.start:
            known = self._waiting[seq.request_id] = _Waiting(seq.start, seq.start)
        known.seen = self._step
        known.tokens += tokens
        known.outputs += outputs.clone().split(1, dim=1)
        block = known.end - known.end % self._size  # where the one begins that is not full
        if block <= seq.start - seq.start % self._size:
            return None
        if fills:
            return self._rest(seq, table, known, seq.start)
        for row in range(seq.start // self._size, block // self._size):
            if known.made <= row * self._size:
                self._region[table.blocks[0, row]] = 0
        known.made = block
        known.forget(block - 1)
        return None

    def _rest(
        self, seq: ScheduledSeq, table: Table, known: _Waiting, at: int | None = None
    ) -> Part | None:
        """What waits of `seq`, as far as its block may be written: that of position `at`, its
        next one where that is None."""
        at = known.end if at is None else at
        first = max(known.made, at - at % self._size)
        has_before = known.first < first
        skipped = first - known.first - has_before
        tokens = known.tokens[first - known.first :]
        if not tokens and not has_before:
            return None
        outputs = torch.cat(known.outputs[skipped:], dim=1)
        known.made = known.end
        known.forget(known.end - 1)
        return Part(seq, table, first, tokens, outputs, has_before)

    def _make(self, parts: Iterable[Part | None]) -> None:
        wanted = [part for part in parts if part is not None]
        if not wanted:
            return
        begun = [block for part in wanted for block in self._begun(part)]
        if begun:
            self._region[begun] = 0
        self._drafter.keep(wanted)

    def _begun(self, part: Part) -> list[int]:
        """The block that it begins and does not fill: no other slots of it are anybody's."""
        end, size = part.start + len(part.tokens), self._size
        row = end // size
        if not end % size or part.start > row * size or not part.tokens:
            return []
        return [int(part.table.blocks[0, row])]


def computed_tokens(seq: ScheduledSeq, sampled: Sampled | None) -> list[int]:
    """Those of `seq` that a pass, or passes in a row, have computed, and not rejected."""
    if sampled is None or not sampled.more:
        return seq.tokens
    return [*seq.tokens, sampled.token, *sampled.more[:-1]]
