"""Decodes on a CPU: passes in one call of the kernels, as many in a row as a step allows; or one in
which drafts are verified.

Life: what does not change is described once. A step fills in its sequences' tokens and positions,
and of block tables and ways to draw those that are new; the kernels do the rest, so that a pass
costs an interpreter next to nothing. Arrays grow to the largest step seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvrelay.engine.model.batch import Limits
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.cpu.attention import CpuAttention
from kvrelay.engine.model.cpu.kernels import structure
from kvrelay.engine.model.cpu.sampling import DRAW, draw_of
from kvrelay.engine.model.cpu.step import (
    ROW_BLOCK_STEP,
    described,
    described_matrix,
    step_of,
    widths,
)
from kvrelay.engine.model.sampling.sampler import Masks, is_plain
from kvrelay.engine.model.weights import Weights
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import BURST_S, NO_TOKEN, Sampled, ScheduledSeq, Step, verify_drafts

_Decode = structure("Decode")


class CpuDecode:
    """Owned by a runner, used from one thread at a time.

    Invariant: `_held` and `_lengths` are what the tables, draws and queries say now."""

    def __init__(
        self,
        config: ModelConfig,
        limits: Limits,
        library: Any,
        num_threads: int,
        attention: CpuAttention,
        weights: Weights,
        buffer: Callable[[str, int, int], torch.Tensor],
    ) -> None:
        """`attention` is used for decodes alone."""
        self._limits, self._lib, self._attention = limits, library, attention
        layers = described(config, weights.layers, attention, library)
        self._alive, self._buffer = (weights, layers), buffer
        step = step_of(config, library, num_threads)
        self._widths = {**widths(layers, config), "hidden": step.width}
        self._request = _Decode(
            layers=ctypes.addressof(layers),
            table=weights.table.data_ptr(),
            norm=weights.norm.data_ptr(),
            num_layers=len(layers),
            block_size=limits.block_size,
            tile=attention.tile,
            head=described_matrix(weights.head),
            step=step,
            burst_s=BURST_S,
            embed_scale=config.embed_scale,
            softcap=config.logits_softcap,
            bf16_table=weights.table.dtype == torch.bfloat16,
        )
        self._capacity = self._splits = 0
        self._rows: dict[str, np.ndarray] = {}
        self._held: list[tuple[np.ndarray, SamplingParams]] = []
        self._lengths: list[int] = []  # context of each row, in tokens

    def execute(
        self, step: Step, tables: Sequence[np.ndarray], masks_of: Masks | None = None
    ) -> list[Sampled] | None:
        """Up to `step.repeats` passes; none follows one that drew a stop token. `tables`: of the
        sequences, as `Guard.check` gives them. `masks_of`: as `Grammars.masks`, for one pass.
        None: nothing was done, as some are no decodes, or sampled in a way that the kernels do not
        know."""
        seqs, request = step.seqs, self._request
        if not all(len(seq.tokens) == 1 and seq.sample and is_plain(seq) for seq in seqs):
            return None
        count = sum(len(seq.input_tokens) for seq in seqs)
        self._make_room(count, sum(len(seq.input_tokens) * seq.end for seq in seqs))
        self._fill(seqs, tables, count)
        at = self._rows["draws"]["mask"][:count]
        at[:] = 0
        if masks_of is not None:
            masks = masks_of(seqs)
            at[:] = masks.ctypes.data + np.arange(count) * masks.strides[0]
        is_single = count > len(seqs) or masks_of is not None
        request.step.rows, request.max_passes = count, 1 if is_single else self._most(step)
        request.logits = self._buffer("logits", count, request.head.rows).data_ptr()
        passes = self._lib.kvr_decode(ctypes.addressof(request))
        drawn = self._rows["drawn"][: passes * count].tolist()
        if count > len(seqs):
            return verify_drafts(seqs, drawn)
        columns = [drawn[row::count] for row in range(count)]
        return [
            Sampled(first, more=tuple(more) if NO_TOKEN not in more else tuple(more[:-1]))
            for first, *more in columns
        ]

    def _most(self, step: Step) -> int:
        """Passes, whatever the step says, of which none leaves a block that was looked at."""
        most, size, longest = step.repeats, self._limits.block_size, self._limits.max_model_len
        if most > 1:
            most = min(most, *(min(size - s.start % size, longest - s.start) for s in step.seqs))
        return most

    def _fill(self, seqs: Sequence[ScheduledSeq], tables: Sequence[np.ndarray], count: int) -> None:
        """Fills in `count` rows for the kernel."""
        rows, held, request = self._rows, self._held, self._request
        request.num_seqs = len(seqs)
        rows["tokens"][:count] = [token for seq in seqs for token in seq.input_tokens]
        rows["positions"][:count] = [at for seq in seqs for at in range(seq.start, seq.end)]
        lengths = [len(seq.input_tokens) for seq in seqs]
        is_new = lengths != self._lengths  # rows are others'
        if is_new:
            self._lengths = lengths
            rows["query_len"][: len(seqs)] = lengths
            rows["query_start"][: len(seqs)] = np.cumsum(lengths) - lengths
        self._held = [(blocks, seq.sampling) for seq, blocks in zip(seqs, tables, strict=True)]
        for index, (blocks, sampling) in enumerate(self._held):
            old = held[index] if index < len(held) else (None, None)
            if old[0] is not blocks:
                rows["block_tables"][index, : len(blocks)] = blocks
            is_new = is_new or old[1] is not sampling
        if is_new:
            rows["draws"][:count] = [draw_of(seq) for seq in seqs for _ in seq.input_tokens]
            stops = [seq.sampling.stop_token_ids for seq in seqs]
            self._stops = np.array([token for each in stops for token in each], np.int64)
            rows["stop_ends"][: len(seqs)] = np.cumsum([len(each) for each in stops])
            request.stops = self._stops.ctypes.data

    def _make_room(self, count: int, positions: int) -> None:
        """For `count` rows that meet so many positions before their own altogether."""
        splits = positions // self._attention.split_keys + 3 * count  # sinks, and two begun
        if count <= self._capacity and splits <= self._splits:
            return
        if count > self._capacity:
            self._capacity = max(2 * self._capacity, count)
        if splits > self._splits:
            self._splits = max(2 * self._splits, splits)
        count = self._capacity
        limits, request = self._limits, self._request
        request.table_stride = -(-limits.max_model_len // limits.block_size)
        self._rows = {
            "tokens": np.zeros(count, np.int64),
            "positions": np.zeros(count, np.int64),
            "slots": np.zeros(count, np.int64),
            "context_len": np.zeros(count, np.int32),
            "query_start": np.zeros(count, np.int32),
            "query_len": np.zeros(count, np.int32),
            "block_tables": np.zeros((count, request.table_stride), np.int32),
            "draws": np.zeros(count, DRAW),
            "drawn": np.zeros(limits.block_size * count, np.int64),
            "stop_ends": np.zeros(count, np.int64),
        }
        at = self._attention.hold(self._rows, count, self._splits)
        self._attentions, request.num_attentions = (ctypes.c_void_p * len(at))(*at), len(at)
        request.attentions = ctypes.addressof(self._attentions)
        for name, array in self._rows.items():
            if name != "query_start":
                setattr(request, name, array.ctypes.data)
        rows = count + request.step.threads * ROW_BLOCK_STEP
        self._buffers = {name: torch.empty(rows * each) for name, each in self._widths.items()}
        for name, buffer in self._buffers.items():
            setattr(request.step, name, buffer.data_ptr())
        self._held, self._lengths = [], []
