"""A drafter's head in one call of the CPU kernels: all tokens that it proposes, one after the
other, as decodes are passes in a row; or the keys and values of what was computed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvrelay.engine.model.batch import Limits, Table
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.cpu.attention import CpuAttention
from kvrelay.engine.model.cpu.recurrent import address, described_matrix
from kvrelay.engine.model.cpu.step import CpuDecode
from kvrelay.engine.model.weights import (
    AttentionWeights,
    LayerWeights,
    MLPWeights,
    Weights,
)
from kvrelay.engine.step import NO_TOKEN, ScheduledSeq, Step

NO_LIMIT_S = 1e9  # drafts end with their number


class CpuDraft(CpuDecode):
    """Drafts several tokens of each sequence in one call. A drafter owns it."""

    def __init__(
        self,
        config: ModelConfig,
        limits: Limits,
        library: Any,
        num_threads: int,
        attention: CpuAttention,
        weights: Any,
        model: tuple[Weights, ModelConfig],
        buffer: Any,
    ) -> None:
        """config: of the head's layer; weights: `DraftWeights`; model: what is drafted for."""
        served, of = model
        layer = weights.layer or LayerWeights(
            input_norm=weights.input_norm,
            attention=AttentionWeights(weights.qkv, None, None, weights.out),
            attention_out_norm=None,
            mlp_norm=weights.mlp_norm,
            mlp=MLPWeights(weights.gate_up, weights.down),
            experts=None,
            mlp_out_norm=None,
        )
        head = served.head if weights.heads[0] is None else weights.heads[0]
        table = served.table if weights.table is None else weights.table
        own = Weights(table, (layer,), weights.norm, head)
        super().__init__(config, limits, library, num_threads, attention, own, buffer)
        self._vocab, self._known = config.vocab_size, weights.tokens
        request = self._request
        request.embed_scale, request.burst_s, request.softcap = (
            of.embed_scale,
            NO_LIMIT_S,
            of.logits_softcap,
        )
        request.vocab, request.adds_normed = self._vocab, weights.adds_normed
        request.leaves_normed = weights.layer is not None
        if not weights.is_fused:
            request.fc = described_matrix(weights.fc)
        request.embed_norm = address(weights.embed_norm)
        request.state_norm = address(weights.state_norm)
        if self._known is not None:
            request.known = self._known.data_ptr()

    def propose(
        self, shares: Sequence[ScheduledSeq], tables: Sequence[Table], states: torch.Tensor
    ) -> list[list[int]]:
        """As many tokens after each of `shares`, which have one, as it asks for. All take part in
        as many passes as the one that asks for most: what the others draw then is cut off, and they
        stay at their last positions."""
        counts = [min(share.num_drafts, self._limits.block_size) for share in shares]
        last = [share.start + count - 1 for share, count in zip(shares, counts, strict=True)]
        self._last = np.array(last, np.int64)
        self._give(states)
        if self._known is not None:
            self._request.whole = self._buffer("whole", len(shares), self._vocab).data_ptr()
        step = Step(0, [*shares], repeats=max(counts))
        for share in shares:
            share.num_drafts = 0
        self._request.last_positions = self._last.ctypes.data
        found = self.execute(step, tables)
        assert found is not None
        drafts = [(each.token, *each.more)[:n] for each, n in zip(found, counts, strict=True)]
        return [[token for token in draft if token != NO_TOKEN] for draft in drafts]

    def _most(self, step: Step) -> int:
        return step.repeats

    def keep(
        self, shares: Sequence[ScheduledSeq], tables: Sequence[Table], states: torch.Tensor
    ) -> None:
        """Writes keys and values of all tokens of `shares`; states: before each."""
        self._place(shares, tables)
        self._give(states)
        self._request.keeps_only, self._request.max_passes = True, 1
        self._lib.kvr_decode(ctypes.addressof(self._request))
        self._request.keeps_only = False

    def _give(self, states: torch.Tensor) -> None:
        self._states = states.float().contiguous()
        pairs = self._buffer("pairs", len(states), 2 * states.shape[1])
        self._request.before, self._request.pairs = self._states.data_ptr(), pairs.data_ptr()
